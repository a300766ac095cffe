"""Attention inside a traced step: fixed buffers, keys counted on the device."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx

from . import attention_ops
from .attention_ops import Packed
from .step_cache import StepCache, Untraceable

# Functions are exchanged by one thread at a time, or it would put back another's.
_EXCHANGED = threading.RLock()
BASE, QUANTIZED = "mlx_lm.models.base", "quantized_scaled_dot_product_attention"


def attend(
    q: mx.array,
    k: mx.array | Packed,
    v: mx.array | Packed,
    *,
    scale: float,
    cache: StepCache,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    group_size: int = 64,
    bits: int = 8,
) -> mx.array:
    """Attention of q [B, Hq, L, D] over those keys of k and v that are there.

    k and v as `attention_ops.sdpa`, whole buffers of ``cache``. mask: None (L is 1),
    "causal", aligned to the last key, or an array over all of k. Gives [B, Hq, L, Dv];
    stock where no kernel serves.
    """
    cache.unread, lens = False, cache.lens
    options = {"scale": scale, "sinks": sinks}
    coded = {"group_size": group_size, "bits": bits}
    if (arrays := cache.joint(q, k, v)) is not None:
        more = {"mask": mask, "lens": cache.position.lens}
        both = attention_ops.attend_joint(q, k, v, arrays, **more, **options, **coded)
        if both is not None:
            o, cache.recent = both
            return o
        cache.made_whole = True
    o = attention_ops.attend(q, k, v, mask=mask, lens=lens, **options, **coded)
    if o is not None:
        return o
    if not isinstance(k, mx.array):
        k, v = (mx.dequantize(*a, **coded).astype(q.dtype) for a in (k, v))
    L, length = q.shape[2], k.shape[2]
    last = lens[:, None] - L + mx.arange(L, dtype=mx.int32)
    seen = (mx.arange(length, dtype=mx.int32) <= last[..., None])[:, None]
    if isinstance(mask, mx.array):
        hidden = mx.array(float("-inf"), mask.dtype)
        seen = seen & mask if mask.dtype == mx.bool_ else mx.where(seen, mask, hidden)
    return attention_ops.STOCK(q, k, v, mask=seen, **options)


@contextmanager
def attention_of_step(caches: Sequence[StepCache]) -> Iterator[None]:
    """Calls of the functions that attend see as many keys as their cache has.

    Untraceable where keys are attended to in other ways.
    """
    with _EXCHANGED:
        me, base = threading.get_ident(), sys.modules.get(BASE)
        before = mx.fast.scaled_dot_product_attention
        before_quantized = getattr(base, QUANTIZED, None)

        def of(k) -> StepCache:
            for cache in caches:
                if cache.keys is k:
                    return cache
            raise Untraceable("attention to keys that are not those of its cache")

        def attention(q, k, v, *, scale, mask=None, sinks=None, **options):
            more = {"scale": scale, "mask": mask, "sinks": sinks}
            if threading.get_ident() != me:
                return before(q, k, v, **more, **options)
            return attend(q, k, v, cache=of(k), **more)

        def quantized(queries, q_keys, q_values, scale, mask, group_size=64, bits=8):
            more = {
                "scale": scale,
                "mask": mask,
                "group_size": group_size,
                "bits": bits,
            }
            if threading.get_ident() != me:
                return before_quantized(queries, q_keys, q_values, **more)
            return attend(queries, q_keys, q_values, cache=of(q_keys), **more)

        mx.fast.scaled_dot_product_attention = attention
        if base is not None:
            setattr(base, QUANTIZED, quantized)
        try:
            yield
            if any(cache.unread for cache in caches):
                raise Untraceable("attention that is not MLX's or mlx-lm's function")
        finally:
            mx.fast.scaled_dot_product_attention = before
            if base is not None:
                setattr(base, QUANTIZED, before_quantized)
