"""Copies of a launch's arrays with room around them, and the runtime's view of them."""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_phase.executor import cpu_build
from mlx_phase.executor.cpu_arrays import address, extent
from mlx_phase.executor.cpu_launch import Call
from mlx_phase.executor.sanitize_build import APART

#: How far outside an array an access may land and still be known as that array's.
MARGIN = 4 << 20
#: Arrays up to this size have race records for every byte, larger ones per element.
FINE_BYTES = 1 << 20
INPUT, OUTPUT, THREADGROUP = range(3)
#: The runtime looks at one launch at a time, checked or profiled.
LOCK = threading.Lock()


class Buffer(ctypes.Structure):
    """struct Buffer of include/cpu_sanitize.c."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("start", "end", "low", "high")),
        *((name, ctypes.c_void_p) for name in ("inside", "written", "cells")),
        ("kind", ctypes.c_uint32),
        ("unit", ctypes.c_uint32),
    ]


class Finding(ctypes.Structure):
    """struct Finding of include/cpu_sanitize.c."""

    _fields_ = [
        *((n, ctypes.c_uint64) for n in ("address", "size", "pc", "other_pc")),
        ("group", ctypes.c_uint64),
        ("other_group", ctypes.c_uint64),
        ("value", ctypes.c_int64),
        ("what", ctypes.c_int32),
        ("buffer", ctypes.c_int32),
        *((n, ctypes.c_uint32) for n in ("access", "other_access")),
        *((n, ctypes.c_uint32) for n in ("thread", "other_thread", "barrier")),
        ("type", ctypes.c_char * 256),
    ]


@dataclass(frozen=True)
class Named:
    """What a message says of a buffer; elements are counted from ``pointer``."""

    label: str  # "input `x`"
    name: str
    form: str  # "float32, shape (4, 8)"
    pointer: int  # 0 for a threadgroup array: its start
    itemsize: int
    dims: tuple[int, ...] = ()


class Room:
    """Zeroed memory for an array of ``size`` bytes, with MARGIN bytes to both sides.

    ``offset``: the first byte's place after a multiple of 16.
    """

    def __init__(self, size: int, offset: int) -> None:
        self.size = size
        total = 2 * MARGIN + size + 16
        self._pages = mmap.mmap(-1, total, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.low = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        self.high = self.low + total
        self.start = self.low + MARGIN + offset

    def bytes(self) -> np.ndarray:
        """The array's bytes, not a copy."""
        kind = ctypes.c_uint8 * self.size
        return np.ctypeslib.as_array(kind.from_address(self.start))


@functools.cache
def _bias() -> int:
    """Where MLX's allocations start after a multiple of 16: GPUs have them at 0."""
    array = mx.zeros((64,), stream=mx.cpu)
    mx.eval(array)
    return address(array, memoryview(array)) % 16


def _inside(view: memoryview, first: int, size: int, pointer: int) -> np.ndarray | None:
    """Which bytes of the extent belong to elements; None: all of them."""
    if size == view.nbytes and view.c_contiguous:
        return None
    found = np.zeros(size, np.uint8)
    elements = np.lib.stride_tricks.as_strided(
        found[pointer - first :],
        (*view.shape, view.itemsize),
        (*view.strides, 1),
    )
    elements[...] = 1
    return None if found.all() else found


class Memory:
    """Guarded copies of all arrays of a launch."""

    def __init__(
        self, call: Call, shared: tuple[tuple[str, int, int], ...] = ()
    ) -> None:
        """``shared``: threadgroup arrays as (name, offset, bytes)."""
        self.named: list[Named] = []
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self._keep: list[object] = []
        self._rows: list[Buffer] = []
        self._rooms: list[tuple[Room, np.ndarray]] = []
        self._written = call.init_value is not None
        inputs, outputs = call.names
        for name, array, view in zip(inputs, call.arrays, call.views, strict=True):
            self._add_input(name, array, view)
        for name, array in zip(outputs, call.outputs, strict=True):
            self._add_output(name, array)
        self.written: list[np.ndarray] = []
        for name, offset, size in shared:
            self._add_array(name, offset, size)

    def _add_input(self, name: str, array: mx.array, view: memoryview) -> None:
        pointer = address(array, view)
        first, size = extent(pointer, view)
        room = Room(size, (first - _bias()) % 16 if size else 0)
        if size:
            ctypes.memmove(room.start, first, size)
        moved = room.start + pointer - first
        inside = _inside(view, first, size, pointer) if size else None
        self.inputs.append(moved)
        self._add(room, INPUT, 1, inside)
        self._name("input", name, array, moved)

    def _add_output(self, name: str, array: mx.array) -> None:
        view = memoryview(array)
        room = Room(view.nbytes, 0)
        kind = ctypes.c_uint8 * view.nbytes
        origin = np.ctypeslib.as_array(kind.from_address(address(array, view) or 1))
        self._rooms.append((room, origin))
        self.outputs.append(room.start)
        unit = 1 if view.nbytes <= FINE_BYTES else view.itemsize
        self._add(room, OUTPUT, unit, None)
        self._name("output", name, array, room.start)

    def _name(self, role: str, name: str, array: mx.array, pointer: int) -> None:
        dtype = str(array.dtype).rpartition(".")[2]
        form = f"{dtype}, shape {tuple(array.shape)}"
        self.named.append(
            Named(f"{role} `{name}`", name, form, pointer, array.dtype.size)
        )

    def _add(self, room: Room, kind: int, unit: int, inside: np.ndarray | None) -> None:
        end = room.start + room.size
        row = Buffer(room.start, end, room.low, room.high, None, None, None, kind, unit)
        if inside is not None:
            row.inside = inside.ctypes.data
        self._keep += [room, inside]
        self._rows.append(row)

    def _add_array(self, declared: str, offset: int, size: int) -> None:
        half = APART // 2
        row = Buffer(offset, offset + size, offset - half, offset + size + half)
        row.kind, row.unit = THREADGROUP, 1
        self._rows.append(row)
        name, _, rest = declared.rpartition(" ")[2].partition("[")
        dims = tuple(int(n) for n in rest.rstrip("]").split("][") if n)
        count = int(np.prod(dims, dtype=np.int64))
        self.named.append(
            Named(f"threadgroup `{declared}`", name, "", 0, size // max(count, 1), dims)
        )

    def table(self) -> ctypes.Array:
        """Buffers for the runtime, with outputs as they were and nothing touched."""
        cell = cpu_build.runtime(True).emu_sanitize_cell()
        table = (Buffer * len(self._rows))(*self._rows)
        self.written, records = [], []
        for row in table:
            if row.kind == INPUT:
                continue
            size = row.end - row.start
            written = np.full(max(size, 1), self._written, np.uint8)
            cells = np.zeros((size // row.unit + 1) * cell, np.uint8)
            row.written, row.cells = written.ctypes.data, cells.ctypes.data
            records += [written, cells]
            if row.kind == OUTPUT:
                self.written.append(written[:size])
        for room, origin in self._rooms:
            room.bytes()[:] = origin
        self._records = records  # alive until the next run
        return table

    def results(self) -> list[np.ndarray]:
        """Copies of the outputs' bytes."""
        return [room.bytes().copy() for room, _ in self._rooms]

    def publish(self, results: list[np.ndarray]) -> None:
        """Put bytes into the arrays that the caller gets."""
        for (_, origin), made in zip(self._rooms, results, strict=True):
            origin[:] = made
