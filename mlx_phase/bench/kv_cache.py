"""The prompt cache of a run: as the model makes it, or quantised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from . import BenchError


@dataclass(frozen=True)
class KV:
    """Affine format of a quantised cache: bits, values that share a scale."""

    bits: int
    group: int = 64


class PromptCache:
    """A new prompt cache of a model; ``kv`` None: as the model makes it.

    Where all layers keep a plain `KVCache`, mlx-lm's own loop quantises it: the first
    chunk of the prompt is computed on plain keys, as with ``mlx_lm.generate
    --kv-bits``. That loop fails at other caches, so of a mixed list the plain ones are
    quantised from the start and the others stay. BenchError if there is none.
    """

    def __init__(self, model: nn.Module, kv: KV | None) -> None:
        self.layers: list[Any] = make_prompt_cache(model)
        self.options: dict[str, int] = {}
        plain = [type(c) is KVCache for c in self.layers]
        if kv is None:
            return
        if not any(plain):
            names = sorted({type(c).__name__ for c in self.layers})
            raise BenchError(f"--kv-bits: no cache of the model ({', '.join(names)}) "
                             "can be quantised")  # fmt: skip
        if all(plain):
            self.options = {
                "kv_bits": kv.bits,
                "kv_group_size": kv.group,
                "quantized_kv_start": 0,
            }
            return
        for i, is_plain in enumerate(plain):
            if is_plain:
                self.layers[i] = QuantizedKVCache(kv.group, kv.bits)

    def quantise(self) -> None:
        """What mlx-lm's loop does after each chunk of the prompt."""
        if self.options:
            start, group, bits = (
                self.options[n]
                for n in ("quantized_kv_start", "kv_group_size", "kv_bits")
            )
            maybe_quantize_kv_cache(self.layers, start, group, bits)


def prefill(model: nn.Module, ids: mx.array, cache: PromptCache) -> mx.array:
    """Logits of the prompt ids [1, L]; the cache is filled, and quantised if asked."""
    logits = model(ids, cache=cache.layers)
    cache.quantise()
    return logits


def check_head_dim(config: dict[str, Any], kv: KV) -> None:
    """BenchError where the config says that heads are no multiple of a group."""
    text = config.get("text_config") or config
    size, heads = text.get("head_dim"), text.get("num_attention_heads")
    if not size and heads and text.get("hidden_size"):
        size = text["hidden_size"] // heads
    if size and size % kv.group:
        raise BenchError(
            f"--kv-bits: head_dim {size} is no multiple of the group of {kv.group}: "
            "choose another --kv-group-size"
        )
