"""Per-kernel timing against stock MLX: cold weights, interleaved, GPU time and wall."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from ..launch.matmul import device_chip
from ..plan import plan, supports
from ..problem import DTYPE_BYTES, Matmul
from ..roofline import gbs, matmul_bytes, mbu, weight_bytes
from . import BenchError, gpu_time, record
from .device import Environment
from .kernel_data import (
    TOLERANCE,
    Buffers,
    Op,
    error_of,
    link,
    ours,
    stock,
    weights,
)
from .measure import (
    Clock,
    NoiseError,
    Pair,
    abba,
    copies,
    drift_free_ratio,
    interleave,
    per_op,
    rotate,
    stats,
    verdict,
)

# Above the marketed bandwidth something else than memory was measured.
TOO_FAST = 1.05
# So small a matrix is in the cache in real use too, and filling memory takes minutes.
MAX_COPIES = 512


@dataclass(frozen=True)
class Effort:
    """How long to measure: launches per GPU-timed block, and two chain lengths."""

    repeats: int
    launches: int
    chain: tuple[int, int]


class Timer:
    """Times our kernel (side A) and stock (side B) on one problem."""

    def __init__(
        self, problem: Matmul, cache_bytes: float, ours_op: Op, stock_op: Op
    ) -> None:
        self.problem = problem
        self.ops = {"A": ours_op, "B": stock_op}
        wanted = copies(weight_bytes(problem), cache_bytes)
        count = min(wanted, MAX_COPIES)
        self.cold = count == wanted
        self.buffers = [weights(problem) for _ in range(count)]
        shape = (problem.M, problem.K)
        self.x = mx.random.normal(shape).astype(getattr(mx, problem.x_dtype))
        mx.eval(self.x, self.buffers)
        # One rotation for both sides: every launch gets the coldest buffer.
        self.next: Iterator[Buffers] = rotate(self.buffers)

    def chain(self, side: str, length: int) -> mx.array:
        """``length`` products, each on the result of the one before, not evaluated."""
        x = self.x
        for _ in range(length):
            y = self.ops[side](x, *next(self.next))
            x = link(y, self.problem)
        return y

    def wall(self, effort: Effort, clock: Clock) -> Pair:
        """Seconds per launch in a graph, chain-length difference, interleaved."""

        def trial(side: str) -> float:
            chain = partial(self.chain, side)
            return per_op(chain, effort.chain, evaluate=mx.eval, clock=clock)

        return interleave(partial(trial, "A"), partial(trial, "B"), effort.repeats)

    def gpu(self, effort: Effort, events: gpu_time.Recorder) -> Pair:
        """GPU seconds per launch from the profiler, interleaved in blocks."""

        def launch(program: str) -> None:
            # Evaluated one by one: launches of one graph could overlap.
            for side in program:
                mx.eval(self.ops[side](self.x, *next(self.next)))

        kernels = {}
        for side in "AB":
            launch(side)
            run = partial(launch, side * effort.launches)
            kernels[side] = gpu_time.learn(run, effort.launches, events)
        order = abba(effort.repeats)
        program = "".join(side * effort.launches for side in order)
        times = gpu_time.split(events(partial(launch, program)), program, kernels)
        blocks = {
            side: [
                stats(us[at : at + effort.launches]).median * 1e-6
                for at in range(0, len(us), effort.launches)
            ]
            for side, us in times.items()
        }
        return Pair(
            stats(blocks["A"]), stats(blocks["B"]), drift_free_ratio(**blocks), order
        )

    def host(
        self, effort: Effort, clock: Clock
    ) -> dict[str, list[tuple[float, float]]]:
        """Host seconds per launch (build, evaluate) of each side, interleaved."""
        short, long = effort.chain

        def once(side: str, length: int) -> tuple[float, float]:
            start = clock()
            y = self.chain(side, length)
            built = clock()
            mx.eval(y)
            return built - start, clock() - built

        samples: dict[str, list[tuple[float, float]]] = {"A": [], "B": []}
        for side in "AB" + abba(effort.repeats):
            low, high = once(side, short), once(side, long)
            build, evaluate = (high[i] - low[i] for i in (0, 1))
            per_launch = build / (long - short), evaluate / (long - short)
            samples[side].append(per_launch)
        return {side: pairs[1:] for side, pairs in samples.items()}  # without warm-up


def measure_case(
    problem: Matmul,
    env: Environment,
    effort: Effort,
    *,
    gpu_events: gpu_time.Recorder | None = gpu_time.cuda_events,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """One row of the decode suite. BenchError if no kernel takes this problem.

    ``gpu_events`` None: there are no GPU times here, ``us`` is the wall time;
    NoiseError where that can't be told from the noise.
    """
    timer = _timer(problem, env.cache_bytes)
    failures, note = [], None
    if not timer.cold:
        failures.append("too small to be cold: the weights stay in the cache")
    error = error_of(timer.ops["A"], timer.x, timer.buffers[0], problem)
    if not error <= TOLERANCE[problem.x_dtype]:
        failures.append(f"wrong result: error {error:.3g} of the largest value")
    pair, walls, source = None, {}, "gpu profiler"
    if gpu_events is not None:
        try:
            pair = timer.gpu(effort, gpu_events)
        except gpu_time.ProfileError as missing:
            note = f"no GPU times: {missing}"
    try:
        wall = timer.wall(effort, clock)
        walls = {
            "wall_us": wall.a.median * 1e6,
            "stock_wall_us": wall.b.median * 1e6,
        }
        if pair is None:
            pair, source = wall, "wall"
    except NoiseError as noise:
        if pair is None:
            raise NoiseError(f"{describe(problem)}: {noise}") from noise
        note = f"no wall time: {noise}"
    moved = matmul_bytes(problem)
    share = mbu(moved, pair.a.median, env.chip)
    if share is not None and share > TOO_FAST:
        failures.append(f"{share:.0%} of the memory bandwidth: not read from memory")
    if env.executor == "cpu":
        note = "emulation on a CPU: says nothing about any GPU"
    return _row(
        "decode",
        problem,
        env,
        effort,
        us=pair.a.median * 1e6,
        stock_us=pair.b.median * 1e6,
        ratio=pair.ratio,
        us_source=source,
        us_min=pair.a.low * 1e6,
        us_max=pair.a.high * 1e6,
        spread=pair.a.spread,
        stock_spread=pair.b.spread,
        gbps=gbs(moved, pair.a.median),
        frac_peak=share,
        comparable=verdict(effort.repeats, failures),
        note=note,
        **walls,
    )


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
    timer = _timer(problem, 1.0)
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
    return _row(
        "host",
        problem,
        env,
        effort,
        us_source="host clock",
        ratio=drift_free_ratio(**totals),
        comparable=verdict(effort.repeats),
        **values,
    )


def _timer(problem: Matmul, cache_bytes: float) -> Timer:
    reason = supports(problem)
    if reason:
        raise BenchError(f"{describe(problem)}: {reason}")
    return Timer(problem, cache_bytes, ours(problem), stock(problem))


def _row(
    suite: str, problem: Matmul, env: Environment, effort: Effort, **values: Any
) -> dict[str, Any]:
    plain = problem.mode == "none"
    chosen = plan(problem, device_chip())
    return record.row(
        suite=suite,
        kernel=chosen.kernel,
        shape=f"{problem.K}x{problem.N}",
        M=problem.M,
        dtype=problem.x_dtype,
        bits=8 * DTYPE_BYTES[problem.x_dtype] if plain else problem.bits,
        group=0 if plain else problem.group_size,
        mode=problem.mode,
        repeats=effort.repeats,
        delay_s=0.0,
        plan=str(chosen),
        **values,
        **env.fields(),
    )


def describe(p: Matmul) -> str:
    """A problem in a few words, for messages."""
    bits = "" if p.mode == "none" else f" {p.bits}-bit g{p.group_size}"
    return f"{p.mode}{bits} {p.x_dtype} {p.K}x{p.N} M={p.M}"
