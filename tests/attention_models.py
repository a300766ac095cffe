"""Tiny models with heads of 64 for the tests of the attention hooks."""

import mlx.core as mx
from mlx_lm.models import gemma2, llama

HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
TOKENS = mx.array([[3, 1, 4, 1, 5]])


def tiny(seed=0, layers=2, **options):
    """A plain float32 llama: only its attention can be patched."""
    mx.random.seed(seed)
    args = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": layers}
    args |= {"intermediate_size": 64, "vocab_size": 48, "rms_norm_eps": 1e-5}
    model = llama.Model(llama.ModelArgs.from_dict(args | HEADS | options))
    mx.eval(model.parameters())
    return model.eval()


def with_own_attention():
    """gemma2 computes scores, their cap and softmax in its own code."""
    args = {"model_type": "gemma2", "hidden_size": 64, "num_hidden_layers": 1}
    args |= {"intermediate_size": 64, "vocab_size": 48, "rms_norm_eps": 1e-5}
    return gemma2.Model(gemma2.ModelArgs.from_dict(args | HEADS)).eval()


def steps(model, caches, prompt=TOKENS):
    """Logits of a prompt, two tokens one by one and three at once (a draft)."""
    batch = prompt.shape[0]
    outs = [model(prompt, cache=caches)]
    for token in (7, 8):
        outs.append(model(mx.full((batch, 1), token), cache=caches))
    outs.append(model(mx.full((batch, 3), 9), cache=caches))
    mx.eval(outs)
    return outs
