"""What the sanitizer found, in words: place, thread, address, array and index."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mlx_phase.executor.cpu_launch import Call
from mlx_phase.executor.error import SanitizerError
from mlx_phase.executor.sanitize_build import Place
from mlx_phase.executor.sanitize_memory import Buffer, Finding, Named

(
    OUTSIDE,
    BETWEEN,
    WILD,
    WROTE_INPUT,
    MISALIGNED,
    INDEX,
    UNWRITTEN,
    CLASH,
    GROUPS_CLASH,
) = range(1, 10)
READ, WRITE, ATOMIC = 1, 2, 4
_CHECKS = {UNWRITTEN: "init", CLASH: "race", GROUPS_CLASH: "race"}


@dataclass(frozen=True)
class Launch:
    """What a message needs of a launch."""

    call: Call
    places: Mapping[int, tuple[Place, ...]]
    named: list[Named]

    def _sizes(self) -> list[tuple[int, int]]:
        return list(zip(self.call.grid, self.call.group, strict=True))

    def threadgroup(self, index: int) -> tuple[int, int, int]:
        """Position of the threadgroup that comes at ``index`` in the grid."""
        x, y, _ = (-(-n // g) for n, g in self._sizes())
        return index % x, index // x % y, index // (x * y)

    def thread(self, index: int, group: int) -> str:
        """A thread of a threadgroup, with its place in the simdgroup and the grid."""
        at = self.threadgroup(group)
        size = [min(g, n - p * g) for p, (n, g) in zip(at, self._sizes(), strict=True)]
        local = index % size[0], index // size[0] % size[1], index // size[0] // size[1]
        where = tuple(
            p * g + k for p, g, k in zip(at, self.call.group, local, strict=True)
        )
        return (
            f"thread {index} of threadgroup {at} (simdgroup {index // 32}, lane "
            f"{index % 32}; thread_position_in_grid {where})"
        )

    def place(self, pc: int) -> tuple[str, str]:
        """The kernel's own line of an access, and all lines it was inlined into."""
        chain = self.places.get(pc, ())
        own = [p for p in chain if p.file in ("source", "header")]
        if not own:
            return ("", "an unknown line") if not chain else ("", str(chain[0]))
        words = "".join(f", inlined into {p}" for p in own[1:])
        return str(own[0]), f"{own[0]}{words}"


def error(launch: Launch, found: Finding, rows: list[Buffer]) -> SanitizerError:
    """The error for the runtime's finding; ``rows`` are the launch's buffers."""
    own, words = launch.place(found.pc)
    thread = launch.thread(found.thread, found.group)
    named = launch.named[found.buffer] if found.buffer >= 0 else None
    row = rows[found.buffer] if named else None
    index = element = None
    where = ""
    if named and row:
        pointer = named.pointer or row.start
        index = (found.address - pointer) // named.itemsize
        element = _element(named, index)
        where = _where(named, row, pointer, index, element)
    address = f"address {found.address:#x}"
    access = f"{_kind(found.access)} of {found.size} bytes at {words}"
    if found.what == OUTSIDE:
        text = f"{access} is out of bounds: {thread}; {address} is {where}"
    elif found.what == BETWEEN:
        text = (
            f"{access} is past the view's extent: {thread}; {address} is {element}, "
            f"which lies between the elements of the strided {_full(named)}"
        )
    elif found.what == WILD:
        near = f"; the nearest is {_full(named)}, of which this is {element}"
        text = f"{access} is in no buffer: {thread}; {address}{near if named else ''}"
        index = None
    elif found.what == WROTE_INPUT:
        text = f"{access} changes an input: {thread}; {address} is {element} of {where}"
    elif found.what == MISALIGNED:
        kind = found.type.decode().split("'")[1] if b"'" in found.type else "an atomic"
        at = f", {element} of {_full(named)}" if named else ""
        text = (
            f"misaligned access to {kind} at {words}: {thread}; {address}{at}, is no "
            f"multiple of {found.value} bytes"
        )
    elif found.what == INDEX:
        kind = found.type.decode().split("'")[1]
        # A threadgroup array has a type of its own: cpu_source.py names it.
        array = re.fullmatch(r"emu_(\w+)_type", kind)
        named = next(
            (n for n in launch.named if array and n.dims and n.name == array[1]), None
        )
        kind = named.label if named else kind
        text = f"index {found.value} is outside of {kind} at {words}: {thread}"
        index = found.value
    elif found.what == UNWRITTEN:
        text = (
            f"{access} takes what nobody wrote: {thread}; {address} is {element} of "
            f"{_full(named)}"
        )
    else:
        text = _race(launch, found, words, thread, element, named)
    return SanitizerError(
        f"{text} [{_grid(launch)}]",
        _CHECKS.get(found.what, "mem"),
        launch.call.kernel,
        own,
        found.thread,
        launch.threadgroup(found.group),
        named.name if named else None,
        index,
    )


def _race(
    launch: Launch, found: Finding, words: str, thread: str, element: str, named: Named
) -> str:
    memory = "device" if named.form else "threadgroup"
    other = launch.place(found.other_pc)[1]
    text = (
        f"{_kind(found.access)} of {element} of {_full(named)} at {words} by {thread}, "
        f"and {_kind(found.other_access)} at {other} by "
        f"{launch.thread(found.other_thread, found.other_group)}, "
    )
    if found.what == GROUPS_CLASH:
        return text + "come in any order: no barrier stands between threadgroups"
    if found.barrier:
        return text + (
            "come in any order: the barrier between them does not order "
            f"{memory} memory; it needs mem_flags::mem_{memory}"
        )
    text += "come in any order: no barrier stands between them"
    if found.thread // 32 == found.other_thread // 32:
        return text + (
            f" (one simdgroup: simdgroup_barrier(mem_flags::mem_{memory}) is enough)"
        )
    return text


def _kind(access: int) -> str:
    if access & ATOMIC:
        return "atomic access"
    return "write" if access & WRITE else "read"


def _full(named: Named) -> str:
    return f"{named.label} ({named.form})" if named.form else named.label


def _element(named: Named, index: int) -> str:
    if len(named.dims) < 2 or index < 0:
        return f"{named.name}[{index}]"
    parts = []
    for size in reversed(named.dims[1:]):
        parts.append(index % size)
        index //= size
    return named.name + "".join(f"[{i}]" for i in (index, *reversed(parts)))


def _where(named: Named, row: Buffer, pointer: int, index: int, element: str) -> str:
    first = (row.start - pointer) // named.itemsize
    end = (row.end - pointer) // named.itemsize
    if first <= index < end:
        return _full(named)
    if first == end:
        return f"{element} of {_full(named)}, which has no elements"
    return (
        f"{element} of {_full(named)}, which is "
        f"{named.name}[{first}] to {named.name}[{end - 1}]"
    )


def _grid(launch: Launch) -> str:
    return f"grid {launch.call.grid}, threadgroup {launch.call.group}"
