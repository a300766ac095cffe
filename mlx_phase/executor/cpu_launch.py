"""Loads compiled kernels and hands them to the runtime's scheduler."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from mlx_phase.executor import cpu_build
from mlx_phase.executor.cpu_arrays import address, extent, reset
from mlx_phase.executor.cpu_source import cpu_source
from mlx_phase.executor.error import ExecutorError
from mlx_phase.executor.signature import MetalSource

#: struct EmuLaunch of include/cpu_runtime.h: entry, args, grid, group, groups,
#: arena_bytes, threads, block_bytes; then its EmuError: address, code, line, thread,
#: group, file, text. What args point at follows in the same block.
LAUNCH = struct.Struct("=QQ3I3I3IIII")
_ERROR = struct.Struct("=Qiii3I64s2048s")
#: How far outside an array a read may stray: a multiple of every page size.
MARGIN = 16 << 20
ARGS_AT = (LAUNCH.size + _ERROR.size + 7) // 8 * 8
_LIBRARIES: dict[tuple[str, bool], Library] = {}


@dataclass(frozen=True)
class Library:
    """A loaded kernel: its entry's address and its threadgroup memory in bytes."""

    handle: ctypes.CDLL
    entry: int
    arena_bytes: int


@dataclass(frozen=True)
class Call:
    """What a launch was asked to run, and on what.

    ``views`` are the memoryviews of ``arrays``. ``outputs`` hold ``init_value``, or
    poison for None. ``grid`` and ``group`` count threads.
    """

    kernel: str
    names: tuple[tuple[str, ...], tuple[str, ...]]  # of inputs and of outputs
    metal: MetalSource
    arrays: list[mx.array]
    views: list[memoryview]
    outputs: list[mx.array]
    init_value: float | None
    grid: tuple[int, int, int]
    group: tuple[int, int, int]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(a.nbytes for a in self.arrays) + sum(a.nbytes for a in self.outputs)


def load(name: str, metal: MetalSource, fast: bool = True) -> Library:
    """Build and load a specialised kernel, or find it among those loaded before.

    ``fast``: optimised. Raises ExecutorError with the compiler's words if it does not
    compile.
    """
    code = cpu_source(metal)
    library = _LIBRARIES.get((code, fast))
    if library is None:
        try:
            handle = cpu_build.load(code, _flags(fast))
        except ExecutorError as error:
            raise ExecutorError(f"kernel {name!r}: {error}") from None
        entry = ctypes.cast(handle.emu_entry, ctypes.c_void_p).value
        arena = ctypes.c_uint64.in_dll(handle, "emu_arena_bytes").value
        library = _LIBRARIES[code, fast] = Library(handle, entry, arena)
    return library


def is_built(metal: MetalSource) -> bool:
    """Whether the fast build of a kernel lies in the cache."""
    return cpu_build.is_built(cpu_source(metal), _flags(True))


def _flags(fast: bool) -> list[str]:
    return [*cpu_build.KERNEL_FLAGS, *(cpu_build.FAST_FLAGS if fast else ("-O0",))]


@functools.cache
def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _threads() -> int:
    """OS threads to use: ``MLX_PHASE_CPU_THREADS``, else the usable cores."""
    chosen = os.environ.get("MLX_PHASE_CPU_THREADS")
    if chosen is None:
        return _cores()
    if not chosen.isdecimal() or int(chosen) < 1:
        raise ExecutorError(
            f"MLX_PHASE_CPU_THREADS={chosen!r} is not a number of threads"
        )
    return int(chosen)


def launch(call: Call, library: Library) -> None:
    """Run every threadgroup and wait. ExecutorError for what goes wrong in it."""
    inputs = [address(a, v) for a, v in zip(call.arrays, call.views, strict=True)]
    writes = [address(a, memoryview(a)) for a in call.outputs]
    failure = attempt(call, library, inputs, writes)
    if failure is None:
        return
    extents = [extent(p, v) for p, v in zip(inputs, call.views, strict=True)]
    if any(
        size and first - MARGIN <= failure.address < first + size + MARGIN
        for first, size in extents
    ):
        # A GPU lets a read stray a little, and a kernel that throws the value away is
        # right (MLX's documentation has one). Where that faults here, run again on
        # copies with room around them; a write still faults.
        for output in call.outputs:
            reset(output, call.init_value)
        with _roomy_copies(inputs, extents) as copies:
            failure = attempt(call, library, copies, writes)
    if failure:
        raise ExecutorError(
            f"kernel {call.kernel!r}: {failure.message} [threadgroup {failure.group} "
            f"of a grid of {call.grid} threads]"
        )


@dataclass(frozen=True)
class Failure:
    """The first error of a launch; the address is 0 unless memory was the trouble."""

    code: int
    message: str
    group: tuple[int, int, int]
    address: int


def attempt(
    call: Call,
    library: Library,
    inputs: Sequence[int],
    outputs: Sequence[int],
    sanitize: bool = False,
) -> Failure | None:
    """Run every threadgroup with arrays at these addresses; None, or what went wrong.

    ``sanitize``: in the sanitizer's runtime, on one OS thread.
    """
    params, views = call.metal.params, call.views
    at = ARGS_AT + 8 * len(params)
    extra = [views[p.index].ndim for p in params if p.kind in ("shape", "strides")]
    block = ctypes.create_string_buffer(at + 8 * (sum(extra) + len(params)))
    base = ctypes.addressof(block)
    pointers = []
    for param in params:
        i = param.index
        if param.kind == "input":
            pointers.append(inputs[i])
            continue
        if param.kind == "output":
            pointers.append(outputs[i])
            continue
        view = views[i]
        pointers.append(base + at)
        if param.kind == "ndim":
            struct.pack_into("=i", block, at, view.ndim)
            at += 8
        elif param.kind == "shape":
            struct.pack_into(f"={view.ndim}i", block, at, *view.shape)
            at += 8 * view.ndim
        else:
            steps = (s // view.itemsize for s in view.strides)
            struct.pack_into(f"={view.ndim}q", block, at, *steps)
            at += 8 * view.ndim
    struct.pack_into(f"={len(pointers)}Q", block, ARGS_AT, *pointers)
    LAUNCH.pack_into(
        block, 0, library.entry, base + ARGS_AT, *call.grid, *call.group, 0, 0, 0,
        library.arena_bytes, 1 if sanitize else _threads(), len(block),
    )  # fmt: skip
    if not cpu_build.runtime(sanitize).emu_launch(block):
        return None
    fault, code, _, _, x, y, z, _, text = _ERROR.unpack_from(block, LAUNCH.size)
    message = text.split(b"\0", 1)[0].decode(errors="replace")
    return Failure(code, message, (x, y, z), fault)


@contextlib.contextmanager
def _roomy_copies(
    inputs: Sequence[int], extents: Sequence[tuple[int, int]]
) -> Iterator[list[int]]:
    """Addresses of read-only copies of the inputs, MARGIN bytes of zeros around."""
    runtime = cpu_build.runtime()
    made = []
    try:
        for first, size in extents:
            copy = runtime.emu_copy(first, size, MARGIN) if size else first
            if copy is None:
                raise ExecutorError(f"no memory for a copy of {size} bytes of input")
            made.append((copy, size))
        yield [
            copy + pointer - first
            for (copy, _), pointer, (first, _) in zip(
                made, inputs, extents, strict=True
            )
        ]
    finally:
        for copy, size in made:
            if size:
                runtime.emu_free_copy(copy, size, MARGIN)
