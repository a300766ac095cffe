"""Prefill products (M > 16) against stock MLX, interleaved, weights cold."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import mlx.core as mx
from rich.table import Table

from ..launch.matmul import device_chip
from ..plan_qmm import plan_qmm, stays_stock, supports_qmm
from ..problem import Matmul
from ..roofline import weight_bytes
from . import gpu_time
from .device import Environment
from .kernel_data import error_of, link, planned, stock, weights
from .kernel_suite import describe as describe  # a suite has one
from .kernel_suite import matmul_case, matmul_row, shape_of
from .kernel_timer import MAX_COPIES, Effort, Op, Timer
from .measure import Clock, copies
from .suite import cell, measure, table_of, trust

supports = supports_qmm
SHAPES = ("4096x14336", "14336x4096", "4096x4096", "4096x1024")
ROWS = (32, 64, 128, 512, 2048)
FORMS = ((8, 64, "affine"), (4, 32, "mxfp4"), (16, 0, "none"))
OUTER = 24  # first and last rows of x that are checked


def default_cases(quick: bool) -> Iterator[Matmul]:
    """The cases of the suite, most important first."""
    for text, M in product(SHAPES[:1] if quick else SHAPES, ROWS[::-1]):
        K, N = shape_of(text)
        yield Matmul(M, N, K, "bfloat16", 4, 64)
    if quick:
        return
    K, N = shape_of(SHAPES[0])
    for (bits, group, mode), M in product(FORMS, (64, 512, 2048)):
        yield Matmul(M, N, K, "bfloat16", bits, group, mode)
    yield from (Matmul(M, N, K, "float16", 4, 64) for M in (64, 512, 2048))


def measure_case(
    problem: Matmul,
    env: Environment,
    effort: Effort,
    *,
    gpu_events: gpu_time.Recorder | None = gpu_time.cuda_events,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """One row: the tile of the plan's table, also where the plan leaves stock.

    ``gpu_events`` as `suite.measure`; ValueError if no kernel takes the problem.
    """
    chosen = plan_qmm(problem, device_chip())
    count = min(copies(weight_bytes(problem), env.cache_bytes), MAX_COPIES)
    x = mx.random.normal((problem.M, problem.K)).astype(getattr(mx, problem.x_dtype))
    timer = Timer(
        {"A": planned(problem, chosen), "B": stock(problem)},
        x,
        [weights(problem) for _ in range(count)],
        partial(link, problem=problem),
    )
    rows = mx.concatenate([mx.arange(problem.M)[s] for s in _ends(problem.M)])

    def error(op: Op) -> float:
        # All rows are computed, and those that can be told in memory are compared.
        part = replace(problem, M=rows.size)

        def outer(_: mx.array, *buffers: mx.array) -> mx.array:
            return op(x, *buffers)[rows]

        return error_of(outer, x[rows], timer.buffers[0], part)

    case = replace(matmul_case(problem, timer), error_of=error)
    found = measure(case, timer, env, effort, gpu_events, clock)["A"]
    if why := stays_stock(problem, device_chip()):
        chosen = replace(chosen, reason=f"not planned here: {why}")
    return matmul_row("prefill", problem, chosen, **found)


def _ends(M: int) -> tuple[slice, ...]:
    return (slice(0, OUTER), slice(M - OUTER, M)) if M > 2 * OUTER else (slice(0, M),)


def table(rows: list[dict[str, Any]]) -> Table:
    """The rows as a table; TFLOP/s counts 2 M N K."""
    names = ("K x N", "M", "kernel", "format", "dtype", "us", "stock", "ratio")
    more = ("TFLOP/s", "stock", "wall", "stock wall", "spread", "")
    out = table_of("µs per launch, median", (*names, *more))
    for r in rows:
        K, N = shape_of(r["shape"])
        flops = 2e-6 * r["M"] * K * N
        rates = [flops / r[n] if r[n] else None for n in ("us", "stock_us")]
        out.add_row(
            *(r["shape"], str(r["M"]), r["kernel"]),
            f"{r['mode']} {r['bits']}b g{r['group']}",
            r["dtype"],
            *(cell(r[name]) for name in ("us", "stock_us")),
            cell(r["ratio"], "{:.2f}"),
            *(cell(rate) for rate in rates),
            *(cell(r[n]) for n in ("wall_us", "stock_wall_us")),
            cell(r["spread"], "{:.1%}"),
            trust(r),
        )
    return out
