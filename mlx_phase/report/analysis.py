"""The numbers of a report: passes of each phase on one chip, from shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .. import step
from ..chip import Chip
from ..plan import MAX_M
from ..roofline import machine_balance
from ..shapes import GROUPS, ModelShapes
from ..step import ATTENTION, Operation, Pass

# Rows that tiles of prefill kernels have: MLX's GEMM 32 or 64, its attention 32 or 64
# queries (mlx 0.32, backend/metal). Chunks of a prompt are multiples of it.
TILE_ROWS = 64


@dataclass(frozen=True)
class Options:
    """What a report is about. ``tokens`` are generated after ``prompt`` ones;
    ``context`` is the cache length of the decode step that is analysed; ``itl_ms`` is
    the longest inter-token latency allowed; ``acceptance`` and ``draft_cost`` (time of
    a drafted token over that of a decode step) are assumptions about a draft model."""

    prompt: int = 2048
    context: int = 2048
    batch: int = 1
    draft: int = 4
    tokens: int = 256
    kv_bits: int = 16
    itl_ms: float = 100.0
    acceptance: float = 0.7
    draft_cost: float = 0.1


@dataclass(frozen=True)
class Analysis:
    """Passes of one model on one chip; all times are lower bounds."""

    name: str
    source: str
    shapes: ModelShapes
    chip: Chip
    options: Options

    @cached_property
    def prefill(self) -> Pass:
        """The whole prompt of one request in one pass."""
        o = self.options
        (found,) = step.prefill(self.shapes, self.chip, o.prompt, kv_bits=o.kv_bits)
        return found

    @cached_property
    def decode(self) -> Pass:
        """One step of all requests."""
        return self.step(1)

    def step(self, rows: int, batch: int | None = None, chip: Chip | None = None):
        """A step of ``rows`` rows a request (1, or drafted tokens + 1)."""
        o = self.options
        return step.decode(
            self.shapes,
            chip or self.chip,
            o.context,
            batch or o.batch,
            rows,
            kv_bits=o.kv_bits,
        )

    @cached_property
    def verify(self) -> Pass | None:
        """A verification of the drafted tokens; None without speculation."""
        return self.step(self.options.draft + 1) if self.options.draft else None

    @property
    def phases(self) -> list[tuple[str, Pass]]:
        """(name, pass) of each phase that the options ask for."""
        found = [("prefill", self.prefill), ("decode", self.decode)]
        return found + ([("verify", self.verify)] if self.verify else [])

    @property
    def balance(self) -> float | None:
        """FLOPs a byte at which the chip turns from memory- to compute-bound."""
        return machine_balance(self.chip)

    @property
    def experts(self) -> bool:
        """Whether the model has experts."""
        return self.shapes.experts > 0

    def cost_ratio(self, rows: int) -> float | None:
        """Bound of a step of ``rows`` rows a request over that of one row.

        Decode kernels use no matrix units, so up to their limit of rows the math
        goes at the rate of plain FMA.
        """
        one, many = (self.step(r, chip=self.fma_chip(r)).seconds for r in (1, rows))
        return many / one if one and many else None

    def fma_chip(self, rows: int) -> Chip:
        """The chip as a step of ``rows`` rows a request uses it."""
        if rows * self.options.batch > MAX_M or not self.chip.fp32_tflops:
            return self.chip
        return replace(self.chip, matmul_tflops=self.chip.fp32_tflops)

    @cached_property
    def knee_rows(self) -> int | None:
        """Rows from which every product of the layers is bound by compute."""
        return step.compute_bound_rows(self.shapes, self.chip)

    def chunk_seconds(self, chunk: int) -> float | None:
        """Bound of the prompt's last ``chunk`` tokens, the slowest chunk of it."""
        o = self.options
        rows = min(chunk, o.prompt)
        return step.forward(
            self.shapes, self.chip, rows, o.prompt, head_rows=1, kv_bits=o.kv_bits
        ).seconds

    def chunked_seconds(self, chunk: int) -> float | None:
        """Bound of the whole prompt in chunks."""
        o = self.options
        passes = step.prefill(
            self.shapes, self.chip, o.prompt, chunk, kv_bits=o.kv_bits
        )
        times = [p.seconds for p in passes]
        return None if None in times else sum(times)


def grouped(operations: Sequence[Operation]) -> dict[str, list[Operation]]:
    """Operations by the group that a table shows as one row, in a layer's order."""
    found: dict[str, list[Operation]] = {}
    for group, names in GROUPS.items():
        members = [o for o in operations if o.name in names]
        if members:
            found[group] = members
        if group == "QKV":
            found[ATTENTION] = [o for o in operations if o.name == ATTENTION]
    return found


def side(flops: float, moved: float, balance: float | None) -> str:
    """memory, compute, or at the knee (within a factor of 1.5 of the balance)."""
    if balance is None:
        return "unknown"
    ratio = flops / moved / balance
    if 1 / 1.5 <= ratio <= 1.5:
        return "knee"
    return "compute" if ratio > 1 else "memory"


def analyse(
    name: str, source: str, shapes: ModelShapes, chip: Chip, options: Options
) -> Analysis:
    """An analysis; ValueError if the options don't fit the model or each other."""
    o = options
    for field in ("prompt", "context", "batch", "tokens"):
        if getattr(o, field) < 1:
            raise ValueError(f"{field} must be 1 or more, got {getattr(o, field)}")
    if o.draft < 0:
        raise ValueError(f"drafted tokens must be 0 or more, got {o.draft}")
    if not 0 <= o.acceptance <= 1:
        raise ValueError(f"acceptance must be in 0..1, got {o.acceptance}")
    if o.kv_bits not in (4, 8, 16):
        raise ValueError(f"the cache has 4, 8 or 16 bits, not {o.kv_bits}")
    elements = shapes.kv_heads * shapes.head_dim
    if o.kv_bits < 16 and elements % 64:
        raise ValueError(f"a quantised cache needs groups of 64, not {elements}")
    return Analysis(name, source, shapes, chip, options)
