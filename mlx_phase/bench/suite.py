"""What the suites of kernels share: how a case is measured, and cells of their tables.

A suite is a module with ``default_cases(quick)``, ``describe(case)``, ``table(rows)``
and ``measure_case(case, env, effort, *, gpu_events, clock)``, which makes a `Timer` and
calls `measure` for the columns that all rows have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.markup import escape
from rich.table import Table

from . import gpu_time
from .device import Environment
from .kernel_timer import Effort, Op, Timer, side_columns, take_times
from .measure import COMPARABLE, Clock, NoiseError, copies, verdict

EMULATED = "emulation on a CPU: says nothing about any GPU"


@dataclass(frozen=True)
class Case:
    """What `measure` has to know of a case.

    ``held``: bytes of one set of buffers; ``moved``: bytes that a launch must move.
    ``error_of``: error of a side's op over the largest right value; ``tolerance``: the
    largest that is right. ``notes``: for its rows.
    """

    name: str
    held: int
    moved: int
    error_of: Callable[[Op], float]
    tolerance: float
    notes: Sequence[str] = ()


def measure(
    case: Case,
    timer: Timer,
    env: Environment,
    effort: Effort,
    gpu_events: gpu_time.Recorder | None,
    clock: Clock,
) -> dict[str, dict[str, Any]]:
    """Columns of a row for each side of ``timer`` but stock (B): times, verdict, note.

    ``gpu_events`` None: there are no GPU times here, ``us`` is the wall time;
    NoiseError, naming the case, where that can't be told from the noise.
    """
    warm = []
    if len(timer.buffers) < copies(case.held, env.cache_bytes):
        warm.append("too small to be cold: its buffers stay in the cache")
    emulated = [EMULATED] if env.executor == "cpu" else []
    wrong = {}
    for side in sorted(timer.ops.keys() - {"B"}):
        error = case.error_of(timer.ops[side])
        right = error <= case.tolerance
        text = f"wrong result: error {error:.3g} of the largest value"
        wrong[side] = [] if right else [text]
    found = {}
    try:
        times = take_times(timer, effort, gpu_events, clock)
        for side, mistakes in wrong.items():
            columns, failures = side_columns(times, side, case.moved, env.chip)
            notes = [*case.notes, *filter(None, [columns["note"]]), *emulated]
            reasons = warm + mistakes + failures
            found[side] = columns | {
                "note": "; ".join(notes) or None,
                "comparable": verdict(effort.repeats, reasons),
                "repeats": effort.repeats,
                "delay_s": 0.0,
                **env.fields(),
            }
    except NoiseError as noise:
        raise NoiseError(f"{case.name}: {noise}") from noise
    return found


def cell(value: float | None, form: str = "{:.1f}") -> str:
    """A number of a row for a table, "-" where there is none."""
    return "-" if value is None else form.format(value)


def trust(row: dict[str, Any]) -> str:
    """The last cell of a row: why not to trust it, else nothing."""
    return "" if row["comparable"] == COMPARABLE else escape(row["comparable"])


def table_of(title: str, heads: Iterable[str]) -> Table:
    """A table of right-aligned columns without rows."""
    out = Table(title=title)
    for head in heads:
        out.add_column(head, justify="right")
    return out
