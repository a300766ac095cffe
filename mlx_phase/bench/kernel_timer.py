"""Times of one kernel against stock: cold buffers, interleaved, GPU time and wall."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from ..chip import Chip
from ..roofline import gbs, mbu
from . import gpu_time
from .measure import (
    Clock,
    NoiseError,
    Pair,
    Samples,
    abba,
    interleave,
    pair_of,
    per_op,
    rotate,
    stats,
)

Op = Callable[..., mx.array]
Buffers = tuple[mx.array, ...]
# Above the marketed bandwidth something else than memory was measured.
TOO_FAST = 1.05
# Smaller buffers are in the cache in real use too, and filling memory takes minutes.
MAX_COPIES = 512


@dataclass(frozen=True)
class Effort:
    """How long to measure: launches per GPU-timed block, and two chain lengths."""

    repeats: int
    launches: int
    chain: tuple[int, int]


class Timer:
    """Times ``ops`` (B: stock where it can, others ours) as ``op(x, *buffers) -> y``.

    ``link`` makes the x of the next operation of a chain from y.
    """

    def __init__(
        self,
        ops: Mapping[str, Op],
        x: mx.array,
        buffers: Sequence[Buffers],
        link: Callable[[mx.array], mx.array],
    ) -> None:
        self.ops, self.x, self.buffers, self.link = ops, x, buffers, link
        mx.eval(x, buffers)
        # One rotation for both sides: every launch gets the coldest buffer.
        self.next: Iterator[Buffers] = rotate(buffers)

    def chain(self, side: str, length: int) -> mx.array:
        """``length`` operations, each on the result of the last, not evaluated."""
        x = self.x
        for _ in range(length):
            y = self.ops[side](x, *next(self.next))
            x = self.link(y)
        return y

    def wall(self, effort: Effort, clock: Clock) -> Pair:
        """Seconds per launch of A and B, as :meth:`wall_samples`."""
        return pair_of(self.wall_samples(effort, clock))

    def wall_samples(self, effort: Effort, clock: Clock) -> Samples:
        """Seconds per launch in a graph, chain-length difference, interleaved."""

        def trial(side: str) -> float:
            chain = partial(self.chain, side)
            return per_op(chain, effort.chain, evaluate=mx.eval, clock=clock)

        trials = {side: partial(trial, side) for side in self.ops}
        return interleave(trials, effort.repeats)

    def gpu_samples(self, effort: Effort, events: gpu_time.Recorder) -> Samples:
        """GPU seconds per launch from the profiler, interleaved in blocks."""

        def launch(program: str) -> None:
            # Evaluated one by one: launches of one graph could overlap.
            for side in program:
                mx.eval(self.ops[side](self.x, *next(self.next)))

        kernels = {}
        for side in self.ops:
            launch(side)
            run = partial(launch, side * effort.launches)
            kernels[side] = gpu_time.learn(run, effort.launches, events)
        order = abba(effort.repeats, "".join(sorted(self.ops)))
        program = "".join(side * effort.launches for side in order)
        times = gpu_time.split(events(partial(launch, program)), program, kernels)
        return {
            side: [
                stats(us[at : at + effort.launches]).median * 1e-6
                for at in range(0, len(us), effort.launches)
            ]
            for side, us in times.items()
        }

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


@dataclass(frozen=True)
class Times:
    """Seconds per launch by side, on the GPU (None: unknown) and of the wall clock."""

    gpu: Samples | None
    wall: Samples
    note: str | None


def take_times(
    timer: Timer, effort: Effort, events: gpu_time.Recorder | None, clock: Clock
) -> Times:
    """Time all sides of ``timer``; ``events`` None: there are no GPU times here."""
    gpu, note = None, None
    if events is not None:
        try:
            gpu = timer.gpu_samples(effort, events)
        except gpu_time.ProfileError as missing:
            note = f"no GPU times: {missing}"
    return Times(gpu, timer.wall_samples(effort, clock), note)


def side_columns(
    times: Times, side: str, moved: int, chip: Chip
) -> tuple[dict[str, Any], list[str]]:
    """The time columns of a side that moves ``moved`` bytes, and why not to trust them.

    Without GPU times ``us`` is the wall time; NoiseError where that can't be told from
    the noise.
    """
    pair, walls, source, note = None, {}, "gpu profiler", times.note
    if times.gpu is not None:
        pair = pair_of(times.gpu, side)
    try:
        wall = pair_of(times.wall, side)
        walls = {"wall_us": _us(wall.a), "stock_wall_us": _us(wall.b)}
        if pair is None:
            pair, source = wall, "wall"
    except NoiseError as noise:
        if pair is None:
            raise
        note = f"no wall time: {noise}"
    share = mbu(moved, pair.a.median, chip)
    failures = []
    if share is not None and share > TOO_FAST:
        failures.append(f"{share:.0%} of the memory bandwidth: not read from memory")
    columns = {
        "us": _us(pair.a),
        "stock_us": _us(pair.b),
        "ratio": pair.ratio,
        "us_source": source,
        "us_min": pair.a.low * 1e6,
        "us_max": pair.a.high * 1e6,
        "spread": pair.a.spread,
        "stock_spread": None if pair.b is None else pair.b.spread,
        "gbps": gbs(moved, pair.a.median),
        "frac_peak": share,
        "note": note,
        **walls,
    }
    return columns, failures


def _us(times) -> float | None:
    return None if times is None else times.median * 1e6
