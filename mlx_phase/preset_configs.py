"""Shapes of published models, as mlx-lm's configs; `presets.py` fills them."""

from __future__ import annotations

from typing import Any


def _llama(
    hidden: int, inner: int, layers: int, heads: int, factor: float, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        **more,
    }


def _qwen3(
    hidden: int, inner: int, layers: int, heads: int, tied: bool
) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
    }


def _gemma3(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, window: int
) -> dict[str, Any]:
    return {
        "model_type": "gemma3_text",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "sliding_window": window,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "tie_word_embeddings": True,
    }


_PLAIN_ROPE: dict[str, Any] = {"rope_scaling": None, "max_position_embeddings": 32768}
# Shapes of the published config.json files; `tiny` is nobody's.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _llama(
        256,
        768,
        4,
        4,
        1.0,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=512,
        tie_word_embeddings=True,
        **_PLAIN_ROPE,
    ),
    "llama-1b": _llama(2048, 8192, 16, 32, 32.0, head_dim=64, tie_word_embeddings=True),
    "llama-3b": _llama(3072, 8192, 28, 24, 32.0, tie_word_embeddings=True),
    "llama-8b": _llama(4096, 14336, 32, 32, 8.0),
    "llama-70b": _llama(8192, 28672, 80, 64, 8.0),
    "mistral-7b": _llama(
        4096,
        14336,
        32,
        32,
        1.0,
        vocab_size=32768,
        **{**_PLAIN_ROPE, "rope_theta": 1000000.0},
    ),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, tied=False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, tied=False),
    "gemma3-1b": _gemma3(1152, 6912, 26, 4, 1, 512),
    "gemma3-4b": _gemma3(2560, 10240, 34, 8, 4, 1024),
    "phi3-mini": {
        "model_type": "phi3",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "vocab_size": 32064,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "vocab_size": 201088,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
    },
}
