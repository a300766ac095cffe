"""The sanitizer: runs a kernel on the CPU with every access checked.

mem: accesses outside arrays and views, misaligned vectors, writes to inputs.
race: accesses of one byte by two threads, one a write, with no barrier between.
init: reads of what nobody wrote, outputs left unwritten, uninitialised variables.
sync: divergent barriers and collectives; results that depend on the order of threads.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import partial

import numpy as np

from mlx_phase.executor import cpu_build, sanitize_build
from mlx_phase.executor.cpu_launch import Call, Library, attempt
from mlx_phase.executor.error import ExecutorError, SanitizerError
from mlx_phase.executor.sanitize_build import Sanitized, load
from mlx_phase.executor.sanitize_memory import LOCK, Finding, Memory
from mlx_phase.executor.sanitize_report import Launch, error

CHECKS = ("mem", "race", "init", "sync")
#: Not a check: outputs may stay partly unwritten, as scratch of a later kernel may.
PARTIAL = "partial"
__all__ = ["CHECKS", "PARTIAL", "Sanitized", "chosen", "launch", "load", "parse"]
_BITS = {"mem": 1, "race": 2, "init": 4}
FORWARD, REVERSE, RANDOM = range(3)
ORDERS = {REVERSE: "reverse", RANDOM: "random"}
_FOUND = 6  # EMU_FOUND of include/cpu_runtime.h


def parse(value: str | bool | None) -> frozenset[str]:
    """Checks that ``sanitize=`` or ``MLX_PHASE_SANITIZE`` asks for.

    "mem,race", "all", True or "1"; "", "0", False or None for none. ValueError for an
    unknown one.
    """
    if value in (None, False, "", "0"):
        return frozenset()
    names = set() if value is True else {part.strip() for part in value.split(",")}
    found = names - {"", "all", "1"}
    if found == names & {PARTIAL}:
        found |= set(CHECKS)
    unknown = sorted(found - {*CHECKS, PARTIAL})
    if unknown:
        raise ValueError(
            f"[metal_kernel] no such check: {', '.join(unknown)}. The sanitizer has "
            f"{', '.join(CHECKS)} (or all), and {PARTIAL} for outputs that may stay "
            "partly unwritten"
        )
    return frozenset(found)


def chosen(asked: str | bool | None) -> frozenset[str]:
    """Checks of a kernel: what it was made with, else what the environment says."""
    if asked is not None:
        return parse(asked)
    try:
        return parse(os.environ.get("MLX_PHASE_SANITIZE"))
    except ValueError as error:
        # No argument of the caller's: the environment is wrong for all of it.
        raise ExecutorError(f"MLX_PHASE_SANITIZE: {error}") from None


def _seed() -> int:
    chosen = os.environ.get("MLX_PHASE_SANITIZE_SEED", "0")
    if not chosen.isdecimal():
        raise ExecutorError(f"MLX_PHASE_SANITIZE_SEED={chosen!r} is not a number")
    return int(chosen)


class _Session:
    """One launch of a kernel, run as often as the checks want."""

    def __init__(self, call: Call, build: Sanitized, checks: frozenset[str]) -> None:
        self.call, self.build, self.checks = call, build, checks
        self.memory = Memory(call, build.arrays)
        pairs = zip(call.grid, call.group, strict=True)
        self.groups = int(np.prod([-(-n // g) for n, g in pairs], dtype=np.int64))

    def run(self, library: Library, schedule: int, checked: bool) -> list[np.ndarray]:
        """Outputs' bytes of one run. Raises what it finds."""
        runtime = cpu_build.runtime(True)
        table = self.memory.table()
        order = None
        if schedule == REVERSE:
            order = np.arange(self.groups, dtype=np.uint64)[::-1].copy()
        elif schedule == RANDOM:
            order = np.random.default_rng(_seed()).permutation(self.groups)
            order = order.astype(np.uint64)
        bits = sum(_BITS.get(name, 0) for name in self.checks) if checked else 0
        runtime.emu_sanitize_begin(
            table,
            len(table),
            bits,
            schedule,
            ctypes.c_uint64(_seed()),
            ctypes.c_void_p(None if order is None else order.ctypes.data),
        )
        places = self.memory.inputs, self.memory.outputs
        failure = attempt(self.call, library, *places, sanitize=True)
        if failure is None:
            return self.memory.results()
        if failure.code == _FOUND:
            runtime.emu_sanitize_finding.restype = ctypes.POINTER(Finding)
            found = runtime.emu_sanitize_finding().contents
            named = self.memory.named
            said = Launch(self.call, self.build.places, named)
            raise error(said, found, list(table))
        raise SanitizerError(
            f"{failure.message} [threadgroup {failure.group} of a grid of "
            f"{self.call.grid} threads]",
            "sync" if failure.code in (1, 2, 4) else "mem",
            self.call.kernel,
            threadgroup=failure.group,
        )

    def unwritten(self) -> None:
        """Raise if the last run left elements of an output unwritten."""
        named = [n for n in self.memory.named if n.label.startswith("output")]
        for output, written in zip(named, self.memory.written, strict=True):
            elements = written.reshape(-1, output.itemsize).all(axis=1)
            missing = np.flatnonzero(~elements)
            if missing.size:
                some = ", ".join(f"{output.name}[{i}]" for i in missing[:4])
                more = ", ..." if missing.size > 4 else ""
                raise SanitizerError(
                    f"{missing.size} of {elements.size} elements of {output.label} "
                    f"({output.form}) stay unwritten: {some}{more}. Outputs of a Metal "
                    "kernel hold whatever was in memory: write all, give init_value, "
                    f"or allow it with sanitize={PARTIAL!r} among the checks",
                    "init",
                    self.call.kernel,
                    buffer=output.name,
                    index=int(missing[0]),
                )

    def same(
        self,
        first: list[np.ndarray],
        other: list[np.ndarray],
        check: str,
        why: Callable[[], str],
    ) -> None:
        """Raise unless two runs gave the same bits."""
        named = [n for n in self.memory.named if n.label.startswith("output")]
        for output, a, b in zip(named, first, other, strict=True):
            differ = np.flatnonzero(a != b)
            if differ.size:
                index = int(differ[0]) // output.itemsize
                raise SanitizerError(
                    f"{output.name}[{index}] of {output.label} ({output.form}) {why()}",
                    check,
                    self.call.kernel,
                    buffer=output.name,
                    index=index,
                )

    def variable(self) -> str:
        """What to say of results that depend on an uninitialised variable."""
        text = "has other bits when uninitialised local variables hold something else"
        hints = sanitize_build.uninitialised(self.call.metal)
        return text + "".join(f"; {hint}" for hint in hints)


def _depends(order: str) -> str:
    seed = f" (seed {_seed()})" if order == "random" else ""
    return (
        "depends on the order of threads and threadgroups: forward and "
        f"{order}{seed} give different bits"
    )


def launch(call: Call, build: Sanitized, checks: frozenset[str]) -> None:
    """Run a kernel under the checks; its outputs get the results of the forward order.

    Raises SanitizerError for the first bug found.
    """
    with LOCK:
        session = _Session(call, build, checks)
        first = session.run(build.checked, FORWARD, True)
        if "init" in checks:
            if PARTIAL not in checks:
                session.unwritten()
            zeroed = session.run(build.zeroed(), FORWARD, False)
            session.same(first, zeroed, "init", session.variable)
        if "sync" in checks:
            for schedule, order in ORDERS.items():
                made = session.run(build.checked, schedule, True)
                session.same(first, made, "sync", partial(_depends, order))
        session.memory.publish(first)
