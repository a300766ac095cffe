"""Clock, interleaving and noise. The clock is injected, so every rule is tested.

Rules: inputs are evaluated before the clock starts; warm-up runs are thrown away; two
candidates are timed in A B B A order; an operation's time is the difference of two
chain lengths, which removes the fixed cost of an evaluation; buffers rotate over more
than twice the cache; fewer than `MIN_REPEATS` repeats are not comparable.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Clock = Callable[[], float]
Trial = Callable[[], float]
# Seconds of each trial by the letter of its side.
Samples = dict[str, list[float]]
T = TypeVar("T")

MIN_REPEATS = 3
# Disturbances only ever add time, so the fastest of a few is the undisturbed one.
BEST_OF = 3
COMPARABLE = "yes"


class NoiseError(ValueError):
    """The noise was larger than what should be measured."""


@dataclass(frozen=True)
class Stats:
    """Median and spread of one quantity, in the unit of the samples."""

    median: float
    q1: float
    q3: float
    low: float
    high: float
    count: int

    @property
    def spread(self) -> float:
        """Interquartile range over the median (0 = no noise)."""
        return (self.q3 - self.q1) / self.median if self.median else 0.0

    def scaled(self, factor: float) -> Stats:
        """The same samples in another unit (``factor`` above 0)."""
        ends = (self.median, self.q1, self.q3, self.low, self.high)
        return Stats(*(value * factor for value in ends), self.count)


def stats(samples: Sequence[float]) -> Stats:
    """Median, quartiles and range; ValueError when there is no sample."""
    if not samples:
        raise ValueError("no samples: at least one repeat is needed")
    values = sorted(samples)
    return Stats(
        median=statistics.median(values),
        q1=percentile(values, 25),
        q3=percentile(values, 75),
        low=values[0],
        high=values[-1],
        count=len(values),
    )


def percentile(samples: Sequence[float], percent: float) -> float:
    """Linear interpolation between the order statistics, ``percent`` in 0..100."""
    if not samples:
        raise ValueError("no samples: a percentile needs at least one")
    values = sorted(samples)
    place = (len(values) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


@dataclass(frozen=True)
class Pair:
    """Result of an interleaved A/B run. ``ratio`` is time of B over time of A.

    b and ratio are None where only A could be run.
    """

    a: Stats
    b: Stats | None
    ratio: float | None
    order: str


def abba(repeats: int, sides: str = "AB") -> str:
    """Order of the trials, ``repeats`` of each: ABBAABBA..., so drift cancels."""
    return "".join(sides[:: 1 if i % 2 == 0 else -1] for i in range(repeats))


def interleave(
    trials: Mapping[str, Trial],
    repeats: int,
    *,
    warmup: int = 1,
    delay: float = 0.0,
    sleep: Callable[[float], None] = time.sleep,
) -> Samples:
    """Time trials by name in ABBA order; each call returns its own seconds.

    ``warmup`` calls of each come first and are dropped; ``delay`` seconds of rest come
    before every trial. Names are single letters.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    sides = "".join(sorted(trials))
    for name in sides * warmup:
        trials[name]()
    samples: Samples = {name: [] for name in sides}
    for name in abba(repeats, sides):
        if delay:
            sleep(delay)
        samples[name].append(trials[name]())
    return samples


def pair_of(samples: Samples, side: str = "A") -> Pair:
    """A side against side B, if that is there. NoiseError for times not above 0."""
    own, other = samples[side], samples.get("B")
    order = abba(len(own), "".join(sorted(samples)))
    ratio = drift_free_ratio(own, own if other is None else other)
    if other is None:
        return Pair(stats(own), None, None, order)
    return Pair(stats(own), stats(other), ratio, order)


def drift_free_ratio(A: Sequence[float], B: Sequence[float]) -> float:  # noqa: N803
    """B over A from samples in ABBA order.

    A chip that heats up makes every later trial slower. Neighbouring pairs run in
    opposite order, so the geometric mean of two pair ratios has no such drift in it.
    NoiseError for samples that are not above 0.
    """
    if min(*A, *B) <= 0:
        raise NoiseError("a measured time is not above 0: the machine is too noisy")
    ratios = [b / a for a, b in zip(A, B, strict=True)]
    if len(ratios) == 1:
        return ratios[0]
    return statistics.median(
        (one * two) ** 0.5 for one, two in zip(ratios, ratios[1:], strict=False)
    )


def timed(
    make: Callable[[], T],
    run: Callable[[T], object],
    *,
    evaluate: Callable[[object], object],
    clock: Clock = time.perf_counter,
) -> float:
    """Seconds of ``evaluate(run(inputs))``; the inputs are evaluated before."""
    inputs = make()
    evaluate(inputs)
    start = clock()
    evaluate(run(inputs))
    return clock() - start


def per_op(
    chain: Callable[[int], object],
    lengths: tuple[int, int],
    *,
    evaluate: Callable[[object], object],
    clock: Clock = time.perf_counter,
) -> float:
    """Seconds per operation: two queued chains of different length, differenced.

    ``chain(n)`` queues n operations and returns what has to be evaluated. Each length
    counts with the fastest of `BEST_OF` tries.
    """
    short, long = lengths
    if not 0 < short < long:
        raise ValueError(f"lengths must be 0 < short < long, got {lengths}")

    def seconds(n: int) -> float:
        start = clock()
        evaluate(chain(n))
        return clock() - start

    best = [min(seconds(n) for _ in range(BEST_OF)) for n in lengths]
    return (best[1] - best[0]) / (long - short)


def copies(bytes_each: int, cache_bytes: float) -> int:
    """How many buffers make one rotation exceed twice the cache (at least 2)."""
    if bytes_each <= 0:
        raise ValueError(f"bytes_each must be above 0, got {bytes_each}")
    return max(2, int(2 * cache_bytes // bytes_each) + 1)


def rotate(buffers: Sequence[T]) -> Iterator[T]:
    """Endless round robin: every buffer has left the cache when it comes again."""
    if not buffers:
        raise ValueError("no buffers to rotate over")
    while True:
        yield from buffers


def verdict(repeats: int, failures: Sequence[str] = ()) -> str:
    """``yes``, or ``not comparable: why`` for a row that must not be compared."""
    reasons = list(failures)
    if repeats < MIN_REPEATS:
        reasons.insert(0, f"{repeats} repeats, {MIN_REPEATS} needed")
    return f"not comparable: {'; '.join(reasons)}" if reasons else COMPARABLE
