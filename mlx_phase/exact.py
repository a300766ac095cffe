"""Exact rows for code that is not patched: MLX's own functions, inside a block."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn

from . import attention_hooks, ops


class _Here(threading.local):
    """How many blocks this thread is in; 0 also while a drop-in of ours computes."""

    depth = 0


_here = _Here()
_lock = threading.Lock()
_blocks = 0
_stock = _ours = None
# Marked while any block is open, which keeps the hooks on attention installed.
_holder: nn.Module | None = None


def _enter() -> None:
    global _blocks, _holder, _ours, _stock
    with _lock:
        if not _blocks:
            stock = mx.quantized_matmul

            @functools.wraps(stock)
            def quantized_matmul(*args, **kwargs):
                depth = _here.depth
                if not depth:
                    return stock(*args, **kwargs)
                # The drop-in calls this very function where stock has to serve.
                _here.depth = 0
                try:
                    return ops.quantized_matmul(*args, **kwargs)
                finally:
                    _here.depth = depth

            _stock, _ours = stock, quantized_matmul
            mx.quantized_matmul = quantized_matmul
            _holder = nn.Module()
            attention_hooks.mark(_holder)
        _blocks += 1


def _leave() -> None:
    global _blocks, _holder
    with _lock:
        _blocks -= 1
        if not _blocks:
            # Another package may have wrapped it since; ours then passes all on.
            if mx.quantized_matmul is _ours:
                mx.quantized_matmul = _stock
            attention_hooks.unmark(_holder)
            _holder = None


@contextmanager
def exact_rows() -> Iterator[None]:
    """Inside, `mx.quantized_matmul` and attention compute rows exactly, in this thread.

    A row of x has the same bits for each M from 1 to 16, and a query for each number of
    queries up to 16, whoever calls: an unpatched model of mlx-lm, or code of your own
    that uses ``mx.quantized_matmul`` and ``mx.fast.scaled_dot_product_attention``. More
    rows at once are not exact: a prefill kernel or stock computes them, whichever the
    plan has for this chip. Plain ``x @ w`` and what the kernels do not take stay
    stock, counted in ``mlx_phase.ops.served()``. Kernels are not checked on this
    machine as `patch` does, have no gradient, and a function compiled outside keeps
    what it was compiled with. A patched model keeps the ``exact`` that it was patched
    with.
    """
    _enter()
    state = attention_hooks._here.state
    try:
        _here.depth += 1
        attention_hooks._here.state = attention_hooks.ON
        yield
    finally:
        _here.depth -= 1
        attention_hooks._here.state = state
        _leave()
