"""Per-kernel timing against stock MLX: cold weights, interleaved, GPU time and wall."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx
from rich.table import Table

from ..launch.matmul import device_chip
from ..plan import Plan, supports
from ..plan_exact import plan_launch
from ..problem import AFFINE_BITS, DTYPE_BYTES, FP_MODES, Matmul
from ..roofline import matmul_bytes, weight_bytes
from . import BenchError, gpu_time, record
from .device import Environment
from .kernel_data import TOLERANCE, error_of, link, ours, stock, weights
from .kernel_timer import MAX_COPIES, Effort, Op, Timer
from .measure import Clock, copies, drift_free_ratio, stats, verdict
from .suite import Case, cell, measure, table_of, trust

MAIN = ("4096x4096", "4096x14336", "14336x4096", "8192x28672", "4096x128256")
WIDE = ("4096x4096", "8192x28672")
FORMATS = tuple((bits, 64, "affine") for bits in AFFINE_BITS if bits != 4)


def shape_of(text: str) -> tuple[int, int]:
    """``4096x14336`` as (K, N)."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        raise BenchError(f"--shapes takes KxN such as 4096x14336; got {text!r}")
    return int(parts[0]), int(parts[1])


def default_cases(quick: bool) -> Iterator[Matmul]:
    """The cases of the decode suite, most important first."""

    def case(text: str, dtype: str, m: int = 1, form=(4, 64, "affine")) -> Matmul:
        k, n = shape_of(text)
        bits, group, mode = form
        return Matmul(m, n, k, dtype, bits, group, mode)

    for text in MAIN:
        yield case(text, "float16")
        yield case(text, "bfloat16")
    if quick:
        return
    for m in (2, 4, 8, 16):
        yield from (case(text, "bfloat16", m) for text in MAIN)
    forms = [*FORMATS, *((b, g, mode) for mode, (b, g) in FP_MODES.items())]
    for form in [*forms, (4, 32, "affine"), (4, 128, "affine"), (16, 0, "none")]:
        yield from (case(text, "bfloat16", 1, form) for text in WIDE)
    yield from (case(text, "float32") for text in WIDE)


def measure_case(
    problem: Matmul,
    env: Environment,
    effort: Effort,
    *,
    gpu_events: gpu_time.Recorder | None = gpu_time.cuda_events,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """One row of the decode suite. BenchError if no kernel takes this problem.

    ``gpu_events`` as `suite.measure`.
    """
    timer = make_timer(problem, env.cache_bytes)
    case = matmul_case(problem, timer)
    found = measure(case, timer, env, effort, gpu_events, clock)["A"]
    return matmul_row(
        "decode", problem, plan_launch((problem,), device_chip()), **found
    )


def matmul_case(problem: Matmul, timer: Timer) -> Case:
    """A product of ``timer`` as `suite.measure` takes it."""

    def error(op: Op) -> float:
        return error_of(op, timer.x, timer.buffers[0], problem)

    sizes = weight_bytes(problem), matmul_bytes(problem)
    return Case(describe(problem), *sizes, error, TOLERANCE[problem.x_dtype])


def host_case(
    problem: Matmul,
    env: Environment,
    effort: Effort,
    *,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """One row of the host suite: µs to build and to evaluate one launch.

    Meaningful where the kernel itself is shorter than its launch, so take it small.
    """
    timer = make_timer(problem, 1.0)
    samples = timer.host(effort, clock)
    totals = {side: [a + b for a, b in pairs] for side, pairs in samples.items()}
    values: dict[str, Any] = {}
    for side, prefix in (("A", ""), ("B", "stock_")):
        build, evaluate = zip(*samples[side], strict=True)
        both = stats(totals[side])
        values |= {
            f"{prefix}us": both.median * 1e6,
            f"{prefix}spread": both.spread,
            f"{prefix}build_us": stats(build).median * 1e6,
            f"{prefix}eval_us": stats(evaluate).median * 1e6,
        }
    return matmul_row(
        "host",
        problem,
        plan_launch((problem,), device_chip()),
        us_source="host clock",
        ratio=drift_free_ratio(**totals),
        comparable=verdict(effort.repeats),
        repeats=effort.repeats,
        delay_s=0.0,
        **values,
        **env.fields(),
    )


def make_timer(problem: Matmul, cache_bytes: float) -> Timer:
    """Both sides on cold weights. BenchError if no kernel takes the problem."""
    reason = supports(problem)
    if reason:
        raise BenchError(f"{describe(problem)}: {reason}")
    count = min(copies(weight_bytes(problem), cache_bytes), MAX_COPIES)
    shape = (problem.M, problem.K)
    return Timer(
        {"A": ours(problem), "B": stock(problem)},
        mx.random.normal(shape).astype(getattr(mx, problem.x_dtype)),
        [weights(problem) for _ in range(count)],
        partial(link, problem=problem),
    )


def matmul_row(
    suite: str, problem: Matmul, chosen: Plan, **values: Any
) -> dict[str, Any]:
    """A row of a suite of products: the problem, its plan and the measured values."""
    plain = problem.mode == "none"
    return record.row(
        suite=suite,
        kernel=chosen.kernel,
        shape=f"{problem.K}x{problem.N}",
        M=problem.M,
        dtype=problem.x_dtype,
        bits=8 * DTYPE_BYTES[problem.x_dtype] if plain else problem.bits,
        group=0 if plain else problem.group_size,
        mode=problem.mode,
        plan=str(chosen),
        **values,
    )


def describe(p: Matmul) -> str:
    """A problem in a few words, for messages."""
    bits = "" if p.mode == "none" else f" {p.bits}-bit g{p.group_size}"
    return f"{p.mode}{bits} {p.x_dtype} {p.K}x{p.N} M={p.M}"


def table(rows: list[dict[str, Any]]) -> Table:
    """Rows as a table for the terminal."""
    names = ("kernel", "K x N", "M", "format", "dtype", "us", "stock", "ratio", "GB/s")
    more = ("peak", "wall", "stock wall", "build", "eval", "spread", "")
    out = table_of("µs per launch, median", (*names, *more))
    for r in rows:
        out.add_row(
            *(r["kernel"], r["shape"], str(r["M"])),
            f"{r['mode']} {r['bits']}b g{r['group']}",
            r["dtype"],
            *(cell(r[name]) for name in ("us", "stock_us")),
            cell(r["ratio"], "{:.2f}"),
            cell(r["gbps"], "{:.0f}"),
            cell(r["frac_peak"], "{:.0%}"),
            *(cell(r[n]) for n in ("wall_us", "stock_wall_us", "build_us", "eval_us")),
            cell(r["spread"], "{:.1%}"),
            trust(r),
        )
    return out
