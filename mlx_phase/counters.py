"""Counters of a kernel -> cycles, and the time and the bound they mean on a chip.

A prediction from published instruction costs; nothing here was measured on a chip.
docs/counters.md compares it with times that others measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from .chip import Chip

#: Slots that an instruction takes of a scheduler's one per cycle, by kind. A scheduler
#: issues for 32 lanes and a core has four. philipturner/metal-benchmarks (Apple7, 8):
#: additions, FMA, bitwise and compare-select take one cycle; IADD64 4. `bfloat`: a
#: widening is one shift or mask; narrowing (rounding by hand) is counted as three.
SLOTS = {
    "fma": 1, "float": 1, "bitwise": 1, "int": 1, "compare": 1, "branch": 1,
    "bfloat": 1, "convert16": 1, "convert": 1, "shift": 1, "imul": 1, "address": 4,
    "idivide": 30, "divide": 6, "exp": 1, "root": 2, "trigonometry": 8,
}  # fmt: skip
#: Cycles of the unit for everything else, which works beside the scheduler: IMUL32 + 2
#: FMUL32 take 4 cycles, IMUL32 + BITREV32 take 8 (the same source).
SLOW = {
    "convert": 4, "shift": 4, "imul": 4, "idivide": 40, "divide": 10, "exp": 4,
    "root": 15, "trigonometry": 24,
}  # fmt: skip
#: Slots of a load or a store, of a shuffle, of a sum over 32 lanes (five shuffles and
#: five additions).
LOAD, SHUFFLE, REDUCE = 1, 2, 15
#: An 8 x 8 x 8 product is one slot and keeps the FMA units for 16 cycles, at 0.8 of
#: their peak (102 of 128 FMA per core and cycle, the same source).
MATRIX = 20
_FMA_UNITS = ("fma", "float", "convert16")
LANES = 32


class Counted(Protocol):
    """What is needed of a profile: `mlx_phase.executor.profile.Profile` has it."""

    instructions: Mapping[str, int]
    collectives: Mapping[str, int]
    loads: int
    stores: int
    threadgroup_loads: int
    threadgroup_stores: int
    atomics: int
    bank_conflicts: int
    memory_bytes: int


@dataclass(frozen=True)
class Cost:
    """Work of a launch: simdgroup cycles of the scheduler (``slots``), of the FMA units
    (``fma``) and of the slow unit (``slow``); bytes that memory moves if caches keep
    each line."""

    slots: float
    fma: float
    slow: float
    memory_bytes: float

    @property
    def cycles(self) -> float:
        """Lane cycles: those of the busiest unit."""
        return LANES * max(self.slots, self.fma, self.slow)

    def times(self, factor: float) -> Cost:
        """The same for ``factor`` times the work."""
        return Cost(*(factor * n for n in vars(self).values()))

    def plus(self, other: Cost) -> Cost:
        """Both, one after the other."""
        mine, theirs = vars(self).values(), vars(other).values()
        return Cost(*(a + b for a, b in zip(mine, theirs, strict=True)))


@dataclass(frozen=True)
class Prediction:
    """Time in microseconds, what bounds it, and the time of each part alone."""

    us: float
    bound: str
    parts: Mapping[str, float]


def cost(profile: Counted) -> Cost:
    """Weigh a profile's instructions."""
    slots = slow = fma = 0.0
    for kind, n in profile.instructions.items():
        slots += SLOTS[kind] * n
        slow += SLOW.get(kind, 0) * n
        fma += n if kind in _FMA_UNITS else 0
    for name, n in profile.collectives.items():
        slots += _collective(name) * n
        fma += MATRIX * n if name.startswith("simdgroup_multiply") else 0
    accesses = profile.loads + profile.stores + profile.atomics
    accesses += profile.threadgroup_loads + profile.threadgroup_stores
    slots += LOAD * accesses + profile.bank_conflicts
    return Cost(slots, fma, slow, profile.memory_bytes)


def _collective(name: str) -> int:
    if name.startswith("simdgroup_"):
        return 1
    if "shuffle" in name or "broadcast" in name or "ballot" in name:
        return SHUFFLE
    return REDUCE


def clock_ghz(chip: Chip) -> float:
    """The clock that the table's FP32 rate implies: 256 FLOP per core and cycle."""
    return (chip.fp32_tflops or 0) * 1000 / (256 * max(chip.gpu_cores, 1))


def predict(work: Cost, chip: Chip, *, misses: float = 1.0) -> Prediction:
    """Time of a launch that fills ``chip``; ``misses``: what part of its bytes no cache
    has.

    The largest of memory and the units' times, as if they overlapped perfectly.
    ValueError if the table has no bandwidth or rate for the chip.
    """
    bandwidth = chip.measured_gbs or chip.bandwidth_gbs
    if not bandwidth or not chip.fp32_tflops:
        raise ValueError(f"no bandwidth or FP32 rate is known for {chip.name}")
    per_us = chip.gpu_cores * 4 * clock_ghz(chip) * 1000
    parts = {
        "memory": misses * work.memory_bytes / bandwidth / 1000,
        "instructions": work.slots / per_us,
        "FMA units": work.fma / per_us,
        "slow unit": work.slow / per_us,
    }
    bound = max(parts, key=parts.__getitem__)
    return Prediction(parts[bound], bound, parts)
