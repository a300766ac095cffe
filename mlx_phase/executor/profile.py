"""Counters of a launch: what a GPU would read, write and execute, by simdgroup.

Nothing here is a time. The kernel runs on the CPU; loads and stores are put together
as the 32 lanes of a simdgroup would issue them, and instructions are counted in the
optimised code (see profile_build.py).
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_phase.executor import cpu_build
from mlx_phase.executor.cpu_launch import Call, attempt
from mlx_phase.executor.error import ExecutorError
from mlx_phase.executor.profile_build import KINDS, Profiled
from mlx_phase.executor.sanitize_memory import LOCK, Memory

LINE = 128
_PROFILE = 8  # of the checks in include/cpu_sanitize.c
_MAX_THREADS = 1024
_RECORDING = threading.Lock()  # one profile_kernel at a time
_TOTALS = (
    "device_read device_written threadgroup_read threadgroup_written loads stores "
    "threadgroup_loads threadgroup_stores atomics load_lines store_lines "
    "bank_conflicts threadgroups threads simdgroups"
).split()


@dataclass(frozen=True)
class ArrayUse:
    """Bytes of one array that a launch touched, each counted once."""

    name: str
    role: str  # input or output
    nbytes: int
    read: int
    written: int
    lines: int  # lines of 128 bytes with a byte that was touched


@dataclass(frozen=True)
class Profile:
    """Counters of one launch.

    ``device_*`` and ``threadgroup_*`` bytes are what threads asked for. ``loads``,
    ``stores``, ``threadgroup_loads``, ``threadgroup_stores``, ``atomics``,
    ``instructions`` (by kind) and ``collectives`` (by name) count instructions of a
    simdgroup; ``barriers`` those of threadgroups. ``load_lines`` and ``store_lines``
    are the 128-byte lines that each such load or store touches, summed.
    ``bank_conflicts``: extra turns of 32 banks of 4 bytes (which are an assumption).
    """

    kernel: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    device_read: int
    device_written: int
    threadgroup_read: int
    threadgroup_written: int
    loads: int
    stores: int
    threadgroup_loads: int
    threadgroup_stores: int
    atomics: int
    load_lines: int
    store_lines: int
    bank_conflicts: int
    threadgroups: int
    threads: int
    simdgroups: int
    barriers: int
    threadgroup_memory: int
    instructions: Mapping[str, int]
    collectives: Mapping[str, int]
    arrays: tuple[ArrayUse, ...] = field(default=())

    @property
    def unique_read(self) -> int:
        """Bytes of inputs (and outputs) that were read at least once."""
        return sum(a.read for a in self.arrays)

    @property
    def unique_written(self) -> int:
        """Bytes that were written at least once."""
        return sum(a.written for a in self.arrays)

    @property
    def memory_bytes(self) -> int:
        """Bytes of all lines touched: what memory moves if caches keep each line."""
        return LINE * sum(a.lines for a in self.arrays)

    @property
    def coalescing(self) -> float:
        """Bytes asked for by loads, per byte of the lines that they touch, up to 1 or
        more (several lanes may ask for the same byte)."""
        return self.device_read / max(LINE * self.load_lines, 1)


class _Range(ctypes.Structure):
    """struct Range of include/cpu_profile.c."""

    _fields_ = [
        ("start", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("read", ctypes.c_void_p),
        ("written", ctypes.c_void_p),
    ]


_recorded: list[Profile] | None = None


def recording() -> bool:
    """Whether launches are profiled."""
    return _recorded is not None


def profile_kernel(
    function: Callable[..., Any], *args: Any, **kwargs: Any
) -> list[Profile]:
    """Call ``function(*args, **kwargs)`` and profile each kernel that it launches.

    ``function`` is a kernel of ``metal_kernel`` or anything that calls such kernels; it
    runs on the CPU executor. ExecutorError if nothing was launched there.
    """
    global _recorded
    with _RECORDING:
        _recorded = []
        try:
            made = function(*args, **kwargs)
            mx.eval(made)
            found = _recorded
        finally:
            _recorded = None
    if not found:
        raise ExecutorError(
            "no kernel was launched on the CPU executor: set MLX_PHASE_EXECUTOR=cpu "
            "before kernels are made, and call one"
        )
    return found


def launch(call: Call, build: Profiled) -> None:
    """Run a kernel and add its profile to the list being recorded."""
    memory = Memory(call)
    rows = memory.table()
    touched = [np.zeros((2, row.end - row.start), np.uint8) for row in rows]
    ranges = (_Range * len(rows))(
        *(
            _Range(row.start, row.end, hits[0].ctypes.data, hits[1].ctypes.data)
            for row, hits in zip(rows, touched, strict=True)
        )
    )
    blocks = len(build.blocks)
    runtime = cpu_build.runtime(True)
    counts = np.zeros(_MAX_THREADS * blocks, np.uint32)
    sums = np.zeros(blocks, np.uint64)
    room, results = (ctypes.c_void_p(a.ctypes.data) for a in (counts, sums))
    runtime.emu_profile_totals.restype = ctypes.POINTER(ctypes.c_uint64)
    with LOCK:
        runtime.emu_profile_begin(ranges, len(rows), blocks, room, results)
        runtime.emu_sanitize_begin(
            rows, len(rows), _PROFILE, 0, ctypes.c_uint64(0), ctypes.c_void_p(None)
        )
        failure = attempt(call, build.library, memory.inputs, memory.outputs, True)
        if failure is not None:
            raise ExecutorError(f"kernel {call.kernel!r}: {failure.message}")
        totals = runtime.emu_profile_totals()[: len(_TOTALS)]
        collectives = _collectives(runtime)
    memory.publish(memory.results())
    uses = []
    for named, row, (read, written) in zip(memory.named, rows, touched, strict=True):
        size, at = row.end - row.start, row.start % LINE
        lines = np.zeros(-(-(size + at) // LINE) * LINE, np.uint8)
        lines[at : at + size] = read | written
        uses.append(
            ArrayUse(
                named.name,
                named.label.split()[0],
                size,
                int(read.sum()),
                int(written.sum()),
                int(lines.reshape(-1, LINE).any(axis=1).sum()),
            )
        )
    instructions: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
    for times, kinds in zip(sums.tolist(), build.blocks, strict=True):
        for kind, n in kinds.items():
            instructions[kind] += times * n
    _recorded.append(
        Profile(
            call.kernel,
            call.grid,
            call.group,
            **dict(zip(_TOTALS, totals, strict=True)),
            barriers=collectives.pop("threadgroup_barrier", 0),
            threadgroup_memory=build.arena_bytes,
            instructions=dict(instructions),
            collectives=collectives,
            arrays=tuple(uses),
        )
    )


def _collectives(runtime: ctypes.CDLL) -> dict[str, int]:
    runtime.emu_profile_op.restype = ctypes.c_char_p
    found, n, i = {}, ctypes.c_uint64(), 0
    while name := runtime.emu_profile_op(i, ctypes.byref(n)):
        if n.value:
            found[name.decode()] = n.value
        i += 1
    return found
