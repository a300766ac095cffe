"""A tiny llama, its tokenizers and fake runs, for the tests of the bench."""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama

from mlx_phase.bench.generate import Run

VOCAB, LAYERS, HIDDEN = 96, 2, 64


def tiny(tied=True, quantised=True):
    mx.random.seed(3)
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        intermediate_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
        tie_word_embeddings=tied,
    )
    model = llama.Model(args)
    if quantised:
        nn.quantize(model, group_size=32, bits=4)
    mx.eval(model.parameters())
    return model


def config(**more):
    return {"vocab_size": VOCAB, "tie_word_embeddings": True} | more


class Tokenizer:
    """Letters are tokens; id 0 ends a text."""

    chat_template = None
    eos_token_ids = (0,)

    def encode(self, text):
        return [1 + ord(c) % (VOCAB - 1) for c in text]

    def decode(self, ids):
        return "".join(chr(64 + i) for i in ids)


class ChatTokenizer(Tokenizer):
    chat_template = "x"

    def apply_chat_template(self, turns, **options):
        assert options["add_generation_prompt"] and options["tokenize"]
        return [7, *self.encode(turns[0]["content"]), 8]


def run_of(arrivals, tokens=None, prompt=4):
    return Run(prompt, tokens or list(range(len(arrivals))), arrivals, [], 1000, 64)
