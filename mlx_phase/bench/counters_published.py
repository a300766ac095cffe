"""Times of MLX's small-M kernels that others published, against predicted ones."""

from __future__ import annotations

import csv
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path

from ..chip import Chip, lookup
from ..counters import Prediction
from .counters_kernels import mlx_route, time

PUBLISHED = Path(__file__).parents[1] / "data" / "small_m.csv"
#: Predicted times nearer than this are one.
TIE = 0.005
#: Bytes of a chip's last cache. M3: as M1 Max and M2 Max have (metal-benchmarks). M4
#: Pro: what fits the three sources of this chip together; 10 to 14 MiB do nearly so.
LAST_CACHE = {"M3 Max": 48 << 20, "M3 Ultra": 96 << 20, "M4 Pro": 12 << 20}


@dataclass(frozen=True)
class Point:
    """A published figure of ``M`` rows through a K -> N matrix.

    ``against``: us, M=1 and the like (a ratio of times), or "per row" (how much faster
    than a read per row). ``spread``: relative, as published or by the digits given.
    ``again``: each call read the same matrix. ``waited``: each call was waited for, so
    that a constant is part of it.
    """

    source: str
    chip: Chip
    K: int
    N: int
    group: int
    route: str
    M: int
    against: str
    reported: float
    spread: float
    again: bool
    waited: bool

    def kernel(self, M: int, kernel: str = "") -> Prediction:
        """Of the kernel alone, or of another one for the same matrix."""
        _, passes = mlx_route(M, self.chip, kernel or self.route, self.group)
        misses = 1.0
        if self.again:
            size = passes[0].cost.memory_bytes * self.N * self.K
            misses = 1 - hits(size / LAST_CACHE[self.chip.name])
        return time(passes, M, self.K, self.N, self.chip, misses)

    def predicted(self, call_us: float) -> float:
        """In the unit of ``reported``; ``call_us`` is what a call costs beside it."""
        us = self.kernel(self.M).us + call_us
        if self.against == "us":
            return us
        if self.against == "per row":
            return self.kernel(self.M, "rows").us / us
        return us / (self.kernel(int(self.against[2:])).us + call_us)


def hits(size: float) -> float:
    """What part of a matrix, ``size`` times the last cache, is still there when it is
    read again from its start.

    A line that is missed takes a random one's place: of a matrix of which a part h is
    there, a line stays with the chance exp(-(1 - h) size), which is h itself.
    """
    h = 1.0 if size <= 1 else 0.0
    for _ in range(200):
        h = math.exp((h - 1) * size)
    return h


@cache
def points() -> tuple[Point, ...]:
    """All rows of the file."""
    with PUBLISHED.open(newline="", encoding="utf-8") as file:
        return tuple(
            Point(
                row["source"].replace("ml-explore/", ""),
                lookup(f"{row['chip']} {row['cores']}"),
                int(row["K"]), int(row["N"]), int(row["group"]),
                "" if row["kernel"] == "qmv" else row["kernel"],
                int(row["M"]), row["against"], float(row["reported"]),
                float(row["spread"]), row["again"] == "yes", row["call"] == "waited",
            )
            for row in csv.DictReader(file)
        )  # fmt: skip


def fit_call(found: Sequence[Point]) -> float:
    """The constant of a call, in whole us, that brings the predictions nearest.

    Nearest: the median of relative errors, which a few odd points do not move.
    """

    def error(us: float) -> float:
        errors = sorted(abs(math.log(p.predicted(us) / p.reported)) for p in found)
        return (errors[(len(errors) - 1) // 2] + errors[len(errors) // 2]) / 2

    return min(range(0, 401), key=error)


@cache
def calls() -> dict[str, float]:
    """Source -> what its calls cost beside the kernel: 0 if they queue."""
    by_source = defaultdict(list)
    for p in points():
        by_source[p.source].append(p)
    return {
        source: fit_call(found) if found[0].waited else 0
        for source, found in by_source.items()
    }


def validation() -> str:
    """Reported against predicted, for MLX's kernels."""
    lines = [
        "| source | chip | K → N | M | unit | reported | predicted | error | bound |",
        "| --- | --- | --- | ---: | --- | ---: | ---: | ---: | --- |",
    ]
    errors = []
    for p in points():
        value = p.predicted(calls()[p.source])
        errors.append(value / p.reported - 1)
        unit = "µs" if p.against == "us" else f"× {p.against}"
        digits = 0 if p.against == "us" else 2
        lines.append(
            f"| {p.source} | {p.chip.name} {p.chip.gpu_cores} | {p.K} → {p.N} | {p.M} "
            f"| {unit} | {p.reported:.{digits}f} | {value:.{digits}f} | "
            f"{errors[-1]:+.0%} | {p.kernel(p.M).bound} |"
        )
    near = sum(abs(e) <= 0.15 for e in errors)
    size = sorted(map(abs, errors))[len(errors) // 2]
    fitted = ", ".join(f"{us:.0f} µs ({s})" for s, us in calls().items() if us)
    lines.append(
        f"\n{near} of {len(errors)} points are within 15 %; the median error is "
        f"{size:.0%}. Fitted: {fitted}; {LAST_CACHE['M4 Pro'] >> 20} MiB (last cache "
        "of the M4 Pro). Notes on each source are in `mlx_phase/data/small_m.csv`."
    )
    return "\n".join(lines)


@dataclass(frozen=True)
class Pair:
    """Two figures of one source that only M tells apart (or only the matrix)."""

    less: Point
    more: Point
    right: bool | None  # None: predicted alike

    @property
    def impossible(self) -> bool:
        """Published: more rows, or more weights, in less time."""
        a, b = self.less, self.more
        if b.against != "us" and a.K * a.N != b.K * b.N:
            return False  # ratios say nothing on the order of times
        return a.M * a.K * a.N > b.M * b.K * b.N

    def __str__(self) -> str:
        a, b = self.less, self.more
        if a.M == b.M:
            return f"M = {a.M}: {a.K} → {a.N} before {b.K} → {b.N}"
        return f"{a.K} → {a.N}: M = {a.M} before {b.M}"

    @property
    def matrices(self) -> set[tuple[str, int, int]]:
        """(source, K, N) of both."""
        return {(p.source, p.K, p.N) for p in (self.less, self.more)}


def contradicted(rows: Iterable[Pair]) -> set[tuple[str, int, int]]:
    """(source, K, N) of matrices that took less time for more rows at some M: which of
    their figures are off is not known."""
    return set().union(*(p.matrices for p in rows if p.impossible))


def pairs(found: Iterable[Point], predicted: dict[Point, float]) -> list[Pair]:
    """All pairs whose published figures differ by more than their spreads."""
    made = []
    for pair in combinations(found, 2):
        less, more = sorted(pair, key=lambda p: p.reported)
        if math.log(more.reported / less.reported) <= less.spread + more.spread:
            continue
        ratio = predicted[more] / predicted[less]
        right = None if abs(ratio - 1) < TIE else ratio > 1
        made.append(Pair(less, more, right))
    return made


def sequences() -> dict[str, list[list[Pair]]]:
    """Source -> pairs of each of its sequences: of M by matrix, of matrices by M."""
    whole = list(points())
    for p in points():  # M = 1 is the unit of these
        if p.against == "M=1" and p.M == 2:
            whole.append(replace(p, M=1, reported=1.0))
    predicted = {p: p.predicted(calls()[p.source]) for p in whole}
    rows, columns = defaultdict(list), defaultdict(list)
    for p in whole:
        rows[p.source, p.chip.name, p.K, p.N].append(p)
        columns[p.source, p.chip.name, p.M].append(p)
    made = {source: [[], []] for source in calls()}
    for i, groups in enumerate((rows, columns)):
        for (source, *_), found in groups.items():
            made[source][i] += pairs(found, predicted)
    return made


def order() -> str:
    """How many pairs of published figures are predicted in their order."""
    lines = [
        "| source | chips | by M: right | alike | wrong | by matrix: right | alike | "
        "wrong |",
        "| --- | --- |" + " ---: |" * 6,
    ]
    made = sequences()
    odd = contradicted(p for rows, _ in made.values() for p in rows)
    missed = defaultdict(list)
    total, sound, marks = Counter(), Counter(), Counter()
    for source, kinds in made.items():
        cells = []
        for i, found in enumerate(kinds):
            counts = Counter(p.right for p in found)
            total.update(counts)
            cells += [counts[True], counts[None], counts[False]]
            for p in found:
                mark = "*" if p.impossible else "†" if p.matrices & odd else ""
                sound[p.right] += not p.matrices & odd
                marks[mark] += p.right is False
                if p.right is False or i == 0 and not p.right:
                    alike = " (a)" if p.right is None else ""
                    missed[source].append(f"{p}{mark}{alike}")
        chips = {p.chip.name: 0 for p in points() if p.source == source}
        lines.append(
            f"| {source} | {', '.join(chips)} | {' | '.join(map(str, cells))} |"
        )
    lines.append(
        f"\n{total[True]} of {total.total()} pairs are in their order, {total[None]} "
        f"are predicted alike, {total[False]} are wrong. Of the wrong ones, in "
        f"{marks['*']} more work took less time (*), and {marks['†']} more have a "
        f"figure of a matrix of which that is true (†): {marks['']} are left. Without "
        f"such matrices: {sound[True]} of {sound.total()} in order, {sound[None]} "
        f"alike, {sound[False]} wrong. As published, the wrong ones and those of M "
        "predicted alike (a):\n"
    )
    lines += [f"- {source}: {'; '.join(texts)}" for source, texts in missed.items()]
    return "\n".join(lines)
