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
from .counters_kernels import mlx_route, time

PUBLISHED = Path(__file__).parents[1] / "data" / "small_m.csv"
#: Predicted times nearer than this are one.
TIE = 0.005


@dataclass(frozen=True)
class Point:
    """A published figure of ``M`` rows through a K -> N matrix.

    ``against``: us, M=1 and the like (a ratio of times), or "per row" (how much faster
    than a read per row). ``spread``: relative, as published or by the digits given.
    ``cached``: the matrix, read again and again, stays in the last cache. ``waited``:
    each call was waited for, so that a constant is part of it.
    """

    source: str
    chip: Chip
    K: int
    N: int
    group: int
    kernel: str
    M: int
    against: str
    reported: float
    spread: float
    cached: bool
    waited: bool

    def kernel_us(self, M: int) -> float:
        """Predicted time of the kernel alone."""
        _, passes = mlx_route(M, self.chip, self.kernel, self.group)
        return time(passes, M, self.K, self.N, self.chip, self.cached).us

    def predicted(self, call_us: float) -> float:
        """In the unit of ``reported``; ``call_us`` is what a call costs beside it."""
        us = self.kernel_us(self.M) + call_us
        if self.against == "us":
            return us
        if self.against == "per row":
            _, rows = mlx_route(self.M, self.chip, "rows", self.group)
            return time(rows, self.M, self.K, self.N, self.chip, self.cached).us / us
        return us / (self.kernel_us(int(self.against[2:])) + call_us)

    @property
    def bound(self) -> str:
        """What bounds the kernel."""
        _, passes = mlx_route(self.M, self.chip, self.kernel, self.group)
        return time(passes, self.M, self.K, self.N, self.chip, self.cached).bound


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
                float(row["spread"]), row["cached"] == "yes", row["call"] == "waited",
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
            f"{errors[-1]:+.0%} | {p.bound} |"
        )
    near = sum(abs(e) <= 0.15 for e in errors)
    size = sorted(map(abs, errors))[len(errors) // 2]
    fitted = ", ".join(f"{us:.0f} µs ({s})" for s, us in calls().items() if us)
    lines.append(
        f"\n{near} of {len(errors)} points are within 15 %; the median error is "
        f"{size:.0%}. Fitted: {fitted}. Notes on each source are in "
        "`mlx_phase/data/small_m.csv`."
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
    missed, total = [], Counter()
    for source, kinds in sequences().items():
        cells = []
        for i, found in enumerate(kinds):
            total.update(p.right for p in found)
            counts = Counter(p.right for p in found)
            cells += [counts[True], counts[None], counts[False]]
            bad = [p for p in found if p.right is False or i == 0 and not p.right]
            missed += [(source, p) for p in bad]
        chips = {p.chip.name: 0 for p in points() if p.source == source}
        lines.append(
            f"| {source} | {', '.join(chips)} | {' | '.join(map(str, cells))} |"
        )
    lines.append(
        f"\n{total[True]} of {total.total()} pairs are in their order, {total[None]} "
        f"are predicted alike, {total[False]} are wrong. As published, the wrong ones "
        "and those of M predicted alike (a); with * more work took less time:\n"
    )
    for source in calls():
        texts = [
            f"{pair}{'*' * pair.impossible}{' (a)' if pair.right is None else ''}"
            for where, pair in missed
            if where == source
        ]
        if texts:
            lines.append(f"- {source}: {'; '.join(texts)}")
    return "\n".join(lines)
