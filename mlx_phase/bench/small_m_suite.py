"""Small M against stock MLX: the exact kernel, matrix units and stock, interleaved."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

import mlx.core as mx
from rich.table import Table

from ..launch.matmul import device_chip
from ..plan import MAX_M, Plan, plan
from ..plan import supports as supports
from ..plan_exact import plan_launch
from ..plan_matrix import first_rows, plan_matrix
from ..problem import Matmul
from ..roofline import weight_bytes
from . import gpu_time
from .device import Environment
from .kernel_data import Buffers, link, planned, stock, weights
from .kernel_suite import MAIN, matmul_case, matmul_row, shape_of
from .kernel_suite import describe as describe  # a suite has one
from .kernel_timer import MAX_COPIES, Effort, Timer
from .measure import Clock, copies
from .suite import cell, measure, table_of, trust

DTYPES = ("bfloat16", "float16")
ROWS = tuple(range(1, MAX_M + 1))
QUICK_ROWS = (1, 2, 4, 8, 16)
QUICK_SHAPES = ("8192x28672", "4096x14336", "4096x4096")


def default_cases(quick: bool) -> Iterator[Matmul]:
    """The cases of the suite, M rising within a shape."""
    shapes = QUICK_SHAPES if quick else MAIN
    for text, dtype, M in product(shapes, DTYPES, QUICK_ROWS if quick else ROWS):
        K, N = shape_of(text)
        yield Matmul(M, N, K, dtype, 4, 64)


def plans_of(problem: Matmul) -> dict[str, Plan]:
    """Sides of a case but stock (B): A exact rows, C the other family.

    Matrix units also below the M from which they are planned: it follows from this.
    """
    chip = device_chip()
    sides = {"A": plan_launch((problem,), chip)}
    if sides["A"].kernel == "qmm_codes":
        sides["C"] = plan(problem, chip)
    elif problem.M > 1 and first_rows(problem, chip) <= MAX_M:
        sides["C"] = plan_matrix(problem, chip)
    return sides


@lru_cache(maxsize=1)
def _weights(shape: Matmul, cache_bytes: float) -> list[Buffers]:
    # Of one shape, for each M in turn.
    count = min(copies(weight_bytes(shape), cache_bytes), MAX_COPIES)
    return [weights(shape) for _ in range(count)]


def measure_case(
    problem: Matmul,
    env: Environment,
    effort: Effort,
    *,
    gpu_events: gpu_time.Recorder | None = gpu_time.cuda_events,
    clock: Clock = time.perf_counter,
) -> list[dict[str, Any]]:
    """A row for the exact kernel and one for matrix units, if the plan knows them.

    ``gpu_events`` as `suite.measure`; ValueError if no kernel takes it.
    """
    plans = plans_of(problem)
    buffers = _weights(replace(problem, M=1), env.cache_bytes)
    x = mx.random.normal((problem.M, problem.K)).astype(getattr(mx, problem.x_dtype))
    ops = {side: planned(problem, p) for side, p in plans.items()}
    both = ops | {"B": stock(problem)}
    timer = Timer(both, x, buffers, partial(link, problem=problem))
    case = matmul_case(problem, timer)
    found = measure(case, timer, env, effort, gpu_events, clock)
    return [matmul_row("small_m", problem, plans[s], **found[s]) for s in plans]


def table(rows: list[dict[str, Any]]) -> Table:
    """The rows as a table; cost is the time over that of our exact kernel at M = 1."""
    ones = {_shape(r): r["us"] for r in rows if r["M"] == 1}
    names = ("K x N", "dtype", "M", "kernel", "us", "cost", "stock", "ratio", "GB/s")
    title = "µs per launch, median; cost: over our M = 1"
    out = table_of(title, (*names, "wall", "stock wall", "spread", ""))
    for r in rows:
        one = ones.get(_shape(r))
        out.add_row(
            *(r["shape"], r["dtype"], str(r["M"]), r["kernel"], cell(r["us"])),
            cell(r["us"] / one if one else None, "{:.2f}"),
            cell(r["stock_us"]),
            cell(r["ratio"], "{:.2f}"),
            cell(r["gbps"], "{:.0f}"),
            *(cell(r[n]) for n in ("wall_us", "stock_wall_us")),
            cell(r["spread"], "{:.1%}"),
            trust(r),
        )
    return out


def _shape(row: dict[str, Any]) -> tuple:
    return tuple(row[n] for n in ("shape", "dtype", "bits", "group", "mode"))
