"""A comparison of chips as data: what its rows share, its lines, its notes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from ..chip import Chip
from ..predict_data import Published


@dataclass(frozen=True)
class Same:
    """What two rows must share to stand in one table."""

    model: str
    quant: str
    prompt_tokens: int
    tokens: int | None
    build: str

    @property
    def text(self) -> str:
        """In words, as a caption."""
        made = "unknown" if self.tokens is None else self.tokens
        return (
            f"{self.model}, {self.quant}, prompt {self.prompt_tokens} tokens, "
            f"{made} generated, {self.build}"
        )


NAMES = {
    "model": "model",
    "quant": "quantisation",
    "prompt_tokens": "prompt length",
    "tokens": "generated tokens",
    "build": "build",
}


def difference(groups: Iterable[Same]) -> str:
    """What keeps groups apart: ``model (a, b); build (x, y)``."""
    groups = list(groups)
    found = []
    for field in fields(Same):
        values = sorted({str(getattr(group, field.name)) for group in groups})
        if len(values) > 1:
            found.append(f"{NAMES[field.name]} ({', '.join(values)})")
    return "; ".join(found)


@dataclass(frozen=True)
class Speed:
    """One chip's speeds of one origin, tok/s; None is not known.

    ``bytes_per_token`` is what a decode step reads, ``row`` the published row.
    """

    chip: Chip
    decode: float | None
    prefill: float | None
    stock_decode: float | None = None
    stock_prefill: float | None = None
    bytes_per_token: int | None = None
    source: str = ""
    note: str = ""
    row: Published | None = None


@dataclass(frozen=True)
class Interval:
    """A predicted speed, tok/s, and the edges of its interval."""

    speed: float
    low: float
    high: float


@dataclass(frozen=True)
class Predicted:
    """What ``mlx_phase.predict`` gives for a line."""

    decode: Interval
    prefill: Interval | None


@dataclass(frozen=True)
class Line:
    """One chip of a table, with what is known about it."""

    chip: Chip
    measured: Speed | None = None
    published: Speed | None = None
    predicted: Predicted | None = None

    @property
    def basis(self) -> Speed | None:
        """The speed that MBU and tok/s per GB/s are of: measured, else published."""
        return self.measured or self.published

    @property
    def per_gbs(self) -> float | None:
        """Decode tok/s per GB/s of marketed bandwidth."""
        speed, bandwidth = self.basis, self.chip.bandwidth_gbs
        if speed is None or not speed.decode or not bandwidth:
            return None
        return speed.decode / bandwidth

    @property
    def mbu(self) -> float | None:
        """Part of the marketed bandwidth that decode reaches, 0..1."""
        speed, per_gbs = self.basis, self.per_gbs
        if speed is None or per_gbs is None or not speed.bytes_per_token:
            return None
        return per_gbs * speed.bytes_per_token / 1e9


@dataclass(frozen=True)
class Table:
    """Comparable lines; ``measured`` and ``published`` are what each side's rows
    share, ``left_out`` are sentences about rows that could not join."""

    lines: tuple[Line, ...]
    measured: Same | None = None
    published: Same | None = None
    left_out: tuple[str, ...] = ()

    @property
    def same(self) -> Same:
        """What the table is about: the measured side where there is one."""
        found = self.measured or self.published
        assert found is not None, "a table has rows of one side at least"
        return found

    @property
    def bytes_per_token(self) -> int | None:
        """What a decode step reads (None: not known)."""
        speeds = [line.measured if self.measured else line.published
                  for line in self.lines]  # fmt: skip
        known = [s.bytes_per_token for s in speeds if s and s.bytes_per_token]
        return known[0] if known else None

    def roof(self, bandwidth_gbs: float) -> float | None:
        """Decode tok/s at which memory would be busy all the time."""
        moved = self.bytes_per_token
        return bandwidth_gbs * 1e9 / moved if moved else None


def order(line: Line) -> tuple[Any, ...]:
    """Apple's chips by generation and size, then the others by bandwidth."""
    chip = line.chip
    size = (chip.bandwidth_gbs or 0.0, chip.gpu_cores, chip.name)
    if not re.match(r"M\d", chip.name):
        return (1, "", 0, *size)
    tier = ("", "Pro", "Max", "Ultra").index(chip.name[3:])
    return (0, chip.name[1], tier, *size)


def largest(lines: Sequence[Line]) -> list[Line]:
    """Of each name only the part with most cores."""
    best: dict[str, Line] = {}
    for line in lines:
        known = best.get(line.chip.name)
        if known is None or line.chip.gpu_cores > known.chip.gpu_cores:
            best[line.chip.name] = line
    return list(best.values())


def together(speeds: Sequence[Speed]) -> Speed:
    """Runs of one chip in one series as a single speed: their mean."""
    if len(speeds) == 1:
        return speeds[0]

    def mean(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    return replace(
        speeds[0],
        decode=mean([speed.decode for speed in speeds]),
        prefill=mean([speed.prefill for speed in speeds]),
        note=f"mean of {len(speeds)} runs",
    )
