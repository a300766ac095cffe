"""Attention kernels on this device: compiled, right, rows exact."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product

import mlx.core as mx

from .attention_check import canary, check, joint, small
from .doctor_kernels import Examined, examined
from .launch.attention import prepare
from .launch.matmul import device_chip
from .launch.prefill_attention import prepare as prepare_prefill
from .plan_attention import MAX_Q_LEN, plan_sdpa, supports_sdpa
from .plan_prefill_attention import plan_prefill, stays_stock, supports_prefill
from .problem import (
    CACHE_BITS,
    CACHE_GROUPS,
    DTYPE_BYTES,
    HEAD_DIM_PAIRS,
    HEAD_DIMS,
    Sdpa,
)

Q_LEN = 4
PROMPT = 2 * MAX_Q_LEN
# Query heads of a kv head.
HEADS = 4


def rows(quick: bool) -> list[Sdpa]:
    """A few queries for each head size, dtype and cache; ``quick``: each in turn.

    Then the same of keys and values in one array, as a model's steps keep them, and
    with more query heads where this chip has another kernel for these; prompts, where
    the kernels take them here.
    """
    plain = (16, 64)
    if quick:
        cases = (
            ((64, 64), "float16", plain),
            ((128, 128), "bfloat16", plain),
            ((128, 128), "bfloat16", (8, 64)),
            ((256, 256), "float32", (4, 32)),
        )
    else:
        sizes = [(d, d) for d in HEAD_DIMS] + list(HEAD_DIM_PAIRS)
        caches = [plain, *product(CACHE_BITS, CACHE_GROUPS)]
        cases = product(sizes, DTYPE_BYTES, caches)
    found = [p for p in (_row(*case) for case in cases) if supports_sdpa(p) is None]
    chip = device_chip()
    one = {"joint": True, "lens": True}
    one_array = [replace(p, **one) for p in (found[1:2] if quick else found)]
    prompts = [replace(p, q_len=PROMPT) for p in (found[1:3] if quick else found)]
    found += [p for p in one_array if supports_sdpa(p) is None]
    for p in [*found]:
        wide = replace(p, q_heads=2 * p.q_heads)
        if plan_sdpa(wide, chip).kernel != plan_sdpa(p, chip).kernel:
            found.append(wide)
    found += [p for p in prompts if not (supports_prefill(p) or stays_stock(p, chip))]
    return found


def _row(dims: tuple[int, int], dtype: str, cache: tuple[int, int]) -> Sdpa:
    bits, group = cache
    form = {"k_bits": bits, "v_bits": bits, "k_group": group, "v_group": group}
    return Sdpa(HEADS, 1, *dims, Q_LEN, dtype=dtype, causal=True, **form)


def examine(problem: Sdpa, clock=time.perf_counter) -> Examined:
    """Check the kernels for one query and for several; compare the bits of the rows.

    A prompt has no exact rows: its kernel is checked and timed.
    """
    many = check(problem)
    if problem.q_len > MAX_Q_LEN:
        first = replace(many, ms=0.0)
        return examined(first, many, PROMPT, "", lambda: (None, _time(problem, clock)))
    first = check(replace(problem, q_len=1, causal=False))
    n = problem.q_len
    return examined(first, many, n, f"{n} queries", lambda: _exact(problem, clock))


def _exact(problem: Sdpa, clock) -> tuple[bool, float]:
    """(each query as alone, on the keys up to its own; milliseconds of a launch)."""
    p = small(problem, plan_sdpa(problem, device_chip()))
    inputs = canary(p)
    run = _call(p, inputs, slice(None), p.k_len)
    whole = run()
    mx.eval(whole)
    start = clock()
    mx.eval(run())
    ms = 1e3 * (clock() - start)
    for i in range(p.q_len):
        rows, keys = slice(i, i + 1), p.k_len - p.q_len + 1 + i
        o = _call(replace(p, q_len=1, causal=False), inputs, rows, keys)()
        if not mx.array_equal(o, whole[:, :, rows], equal_nan=True).item():
            return False, ms
    return True, ms


def _call(p: Sdpa, inputs: dict, rows: slice, keys: int) -> Callable[[], mx.array]:
    """Attention of some queries of `canary` over its first keys."""
    run, q, scale = prepare(p), inputs["q"][:, :, rows], p.head_dim**-0.5
    k, v = inputs["k"], inputs["v"]
    if not p.joint:
        return partial(run, q, _first(k, keys), _first(v, keys), scale=scale)
    arrays, _, lens = joint(p, k, v, [keys] * p.batch)
    mx.eval(arrays)
    return lambda: run(q, arrays, None, scale=scale, lens=lens)[0]


def _time(problem: Sdpa, clock) -> float:
    """Milliseconds of a launch for a prompt."""
    p = small(problem, plan_prefill(problem, device_chip()))
    inputs, run = canary(p), prepare_prefill(p)
    mx.eval(*(inputs[name] for name in "qkv"))
    start = clock()
    mx.eval(run(*(inputs[name] for name in "qkv"), scale=p.head_dim**-0.5))
    return 1e3 * (clock() - start)


def _first(cache, keys: int):
    if isinstance(cache, mx.array):
        return cache[:, :, :keys]
    return tuple(a[:, :, :keys] for a in cache)
