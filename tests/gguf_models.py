"""A tiny llama as GGUF metadata and tensors, as llama.cpp's converter writes it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tokenizers.pre_tokenizers import ByteLevel

SPECIALS = ["<|bos|>", "<|end|>"]
MERGES = ["1 2", "12 3", "123 4", "h i", "Ġ hi"]
_MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def model(tied: bool = True, **more: Any) -> llama.Model:
    """A float32 llama in Hugging Face layout (halves rotated, not pairs)."""
    args = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 288,
        "rope_theta": 5000.0,
        "tie_word_embeddings": tied,
        **more,
    }
    mx.random.seed(7)
    result = llama.Model(llama.ModelArgs(**args))
    # Norms of ones and zero biases would hide a swapped or dropped one.
    parameters = [
        (name, mx.random.uniform(0.5, 1.5, a.shape) if a.ndim == 1 else a * 2)
        for name, a in tree_flatten(result.parameters())
    ]
    result.load_weights(parameters)
    mx.eval(result.parameters())
    return result


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k from rotated halves to rotated pairs, per head."""
    halves = weights.reshape(heads, 2, -1, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def unpermute(weights: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `permute`."""
    pairs = weights.reshape(heads, -1, 2, *weights.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def gguf_name(name: str) -> str:
    """mlx-lm parameter name -> GGUF tensor name."""
    path, leaf = name.rsplit(".", 1)
    prefix = ""
    if path.startswith("model.layers."):
        _, _, layer, path = path.split(".", 3)
        prefix = f"blk.{layer}."
    return f"{prefix}{_MODULES[path]}.{leaf}"


def heads_of(args: llama.ModelArgs, name: str) -> int | None:
    """Heads of the rows that the converter permutes; None for other tensors."""
    if ".q_proj." in name:
        return args.num_attention_heads
    return args.num_key_value_heads if ".k_proj." in name else None


def tensors(source: llama.Model) -> dict[str, np.ndarray]:
    """Float32 GGUF tensors of a model by GGUF name."""
    result = {}
    for name, array in tree_flatten(source.parameters()):
        weights, heads = np.array(array), heads_of(source.args, name)
        result[gguf_name(name)] = permute(weights, heads) if heads else weights
    return result


def metadata(source: llama.Model, pre: str = "smollm", **more: Any) -> dict[str, Any]:
    """GGUF metadata of a model with a 263-token byte-level tokenizer."""
    args = source.args
    letters = sorted(ByteLevel.alphabet())
    tokens = SPECIALS + letters + [m.replace(" ", "") for m in MERGES]
    result = {
        "general.architecture": "llama",
        "llama.block_count": args.num_hidden_layers,
        "llama.embedding_length": args.hidden_size,
        "llama.feed_forward_length": args.intermediate_size,
        "llama.attention.head_count": args.num_attention_heads,
        "llama.attention.head_count_kv": args.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": args.rms_norm_eps,
        "llama.rope.freq_base": args.rope_theta,
        "llama.context_length": 512,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0]['content'] }}",
    }
    result.update({key.replace("__", "."): item for key, item in more.items()})
    return result
