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
from ..plan_matrix import first_rows, plan_matrix
from ..problem import Matmul
from ..roofline import matmul_bytes, weight_bytes
from . import gpu_time
from .device import Environment
from .kernel_data import TOLERANCE, Buffers, error_of, link, planned, stock, weights
from .kernel_suite import MAIN, describe, matmul_row, shape_of
from .kernel_timer import MAX_COPIES, Effort, Timer, side_columns, take_times
from .measure import Clock, NoiseError, copies, verdict

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
    """Sides of a case but stock (B): A exact rows, C matrix units.

    Matrix units also below the M from which they are planned: it follows from this.
    """
    chip = device_chip()
    sides = {"A": plan(problem, chip)}
    if problem.M > 1 and first_rows(problem, chip) <= MAX_M:
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

    ``gpu_events`` as `kernel_timer.take_times`; ValueError if no kernel takes it.
    """
    plans = plans_of(problem)
    buffers = _weights(replace(problem, M=1), env.cache_bytes)
    x = mx.random.normal((problem.M, problem.K)).astype(getattr(mx, problem.x_dtype))
    ops = {side: planned(problem, p) for side, p in plans.items()}
    both = ops | {"B": stock(problem)}
    timer = Timer(both, x, buffers, partial(link, problem=problem))
    cold = len(buffers) >= copies(weight_bytes(problem), env.cache_bytes)
    warm = [] if cold else ["too small to be cold: the weights stay in the cache"]
    try:
        times = take_times(timer, effort, gpu_events, clock)
        rows = []
        for side, chosen in plans.items():
            failures = [*warm]
            error = error_of(ops[side], x, buffers[0], problem)
            if not error <= TOLERANCE[problem.x_dtype]:
                failures.append(f"wrong result: error {error:.3g} of the largest value")
            moved = matmul_bytes(problem)
            columns, more = side_columns(times, side, moved, env.chip)
            if env.executor == "cpu":
                columns["note"] = "emulation on a CPU: says nothing about any GPU"
            columns["comparable"] = verdict(effort.repeats, failures + more)
            rows.append(matmul_row("small_m", problem, chosen, env, effort, **columns))
    except NoiseError as noise:
        raise NoiseError(f"{describe(problem)}: {noise}") from noise
    return rows


def table(rows: list[dict[str, Any]]) -> Table:
    """The rows as a table; cost is the time over that of our exact kernel at M = 1."""
    ones = {_shape(r): r["us"] for r in rows if r["M"] == 1}
    out = Table(title="µs per launch, median; cost: over our M = 1")
    names = ("K x N", "dtype", "M", "kernel", "us", "cost", "stock", "ratio", "GB/s")
    for head in (*names, "wall", "stock wall", "spread", ""):
        out.add_column(head, justify="right")

    def cell(value: float | None, form: str = "{:.1f}") -> str:
        return "-" if value is None else form.format(value)

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
            "" if r["comparable"] == "yes" else r["comparable"],
        )
    return out


def _shape(row: dict[str, Any]) -> tuple:
    return tuple(row[n] for n in ("shape", "dtype", "bits", "group", "mode"))
