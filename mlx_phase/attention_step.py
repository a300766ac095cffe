"""Attention inside a traced step: fixed buffers, keys counted on the device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from . import attention_ops


def attend(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    lens: mx.array,
    mask: str | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of q [B, Hq, L, D] over the first ``lens`` keys of k and v.

    lens: int32 [B], the keys there are with the L new ones. mask: None (L is 1) or
    "causal", aligned to lens. Gives [B, Hq, L, Dv]; stock where no kernel serves.
    """
    options = {"scale": scale, "sinks": sinks}
    o = attention_ops.attend(q, k, v, mask=mask, lens=lens, **options)
    if o is not None:
        return o
    L, length = q.shape[2], k.shape[2]
    last = lens[:, None] - L + mx.arange(L, dtype=mx.int32)
    seen = mx.arange(length, dtype=mx.int32) <= last[..., None]
    return attention_ops.STOCK(q, k, v, mask=seen[:, None], **options)


@contextmanager
def attention_of_step(lens: mx.array) -> Iterator[None]:
    """Calls of ``mx.fast.scaled_dot_product_attention`` here see ``lens`` keys."""
    before, me = mx.fast.scaled_dot_product_attention, threading.get_ident()

    def attention(q, k, v, *, scale, mask=None, sinks=None, **options):
        if threading.get_ident() != me:
            more = {"scale": scale, "mask": mask, "sinks": sinks}
            return before(q, k, v, **more, **options)
        return attend(q, k, v, scale=scale, lens=lens, mask=mask, sinks=sinks)

    mx.fast.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        mx.fast.scaled_dot_product_attention = before
