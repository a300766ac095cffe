"""Kernels with a call before every access, and the table of where those calls stand.

Clang's thread sanitizer puts the calls in; its runtime is not used. The assembly
between compiler and linker tells each call's line and the lines it was inlined from, so
no debug format has to be read.
"""

from __future__ import annotations

import ctypes
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mlx_phase.executor import cpu_build
from mlx_phase.executor.cpu_compiler import native_flags, run
from mlx_phase.executor.cpu_launch import Library
from mlx_phase.executor.cpu_source import cpu_source
from mlx_phase.executor.error import ExecutorError
from mlx_phase.executor.signature import MetalSource

#: Accesses stay as the text has them: nothing merged into vectors or library calls.
#: Tail calls would return to the wrong line.
CHECKED_FLAGS = (
    "-O1 -DEMU_SANITIZE -ftrivial-auto-var-init=pattern -gdwarf-4 -gline-tables-only "
    "-fno-vectorize -fno-slp-vectorize -fno-optimize-sibling-calls "
    "-fstrict-flex-arrays=3 -Xclang -fsanitize=thread,alignment,array-bounds "
    "-Xclang -fsanitize-recover=alignment,array-bounds "
    "-mllvm -tsan-instrument-func-entry-exit=0 -mllvm -tsan-instrument-atomics=0 "
    "-mllvm -tsan-instrument-read-before-write=1"
).split()
#: The same kernel with zeros instead of a pattern in what it does not initialise.
ZEROED_FLAGS = ("-O1", "-DEMU_SANITIZE", "-ftrivial-auto-var-init=zero")
#: What says, without a run, which variable lacks a value.
WARNING_FLAGS = "-Wuninitialized -Wconditional-uninitialized".split()

APART = 65536  # bytes between threadgroup arrays: EMU_APART of cpu_sanitize.h

_LOCATION = re.compile(r"^\s*\.loc\s.*?(?:#|//|;)\s*(.*)")
_CALL = re.compile(
    r"^\s*(?:callq?|bl)\s+_?(?:__tsan_(?:un|re|wr|mem)|__ubsan_|emu_checked_)"
)
_PLACE = re.compile(r"([^\s\[\]]*?):(\d+):(\d+)")


@dataclass(frozen=True)
class Place:
    """A line of the kernel's ``source`` or ``header``, or of a header of ours."""

    file: str
    line: int
    near: bool = False  # not that very line

    def __str__(self) -> str:
        return f"{'near ' * self.near}{self.file} line {self.line}"


@dataclass(frozen=True)
class Sanitized:
    """A kernel with checks, and the places of its calls by return address."""

    checked: Library
    zeroed: Callable[[], Library]  # the same without checks, with zeroed variables
    arena_bytes: int  # of threadgroup memory, as Metal would count it
    places: dict[int, tuple[Place, ...]]
    arrays: tuple[tuple[str, int, int], ...]  # name, offset, bytes


_LOADED: dict[str, Sanitized] = {}


def load(name: str, metal: MetalSource) -> Sanitized:
    """Build and load a specialised kernel for the sanitizer.

    Raises ExecutorError with the compiler's words if it does not compile.
    """
    code = cpu_source(metal)
    found = _LOADED.get(code)
    if found is None:
        try:
            found = _LOADED[code] = _load(code)
        except ExecutorError as error:
            raise ExecutorError(f"kernel {name!r}: {error}") from None
    return found


def _load(code: str) -> Sanitized:
    flags = [*cpu_build.KERNEL_FLAGS, *CHECKED_FLAGS]
    handle = cpu_build.load(code, flags, edit=label_calls)
    ctypes.c_uint32.in_dll(handle, "emu_live").value = 1
    arrays = shared_arrays(handle)
    end = max((offset + size + APART for _, offset, size in arrays), default=0)

    @cache
    def zeroed() -> Library:
        flags = [*cpu_build.KERNEL_FLAGS, *ZEROED_FLAGS]
        return _library(cpu_build.load(code, flags), end)

    counted = ctypes.c_uint64.in_dll(handle, "emu_arena_bytes").value
    library = _library(handle, end)
    return Sanitized(library, zeroed, counted, _places(handle), arrays)


def _library(handle: ctypes.CDLL, arena_bytes: int) -> Library:
    entry = ctypes.cast(handle.emu_entry, ctypes.c_void_p).value
    return Library(handle, entry, arena_bytes)


def label_calls(assembly: str) -> str:
    """Assembly with a table of its checking calls: return addresses and lines."""
    out, places, chain, near = [], [], "", ""
    for line in assembly.splitlines():
        out.append(line)
        location = _LOCATION.match(line)
        if location:
            chain = location[1]
        elif _CALL.match(line):
            out.append(f"Lemu_call_{len(places)}:")
            found = [f"{f} {n}" for f, n, _ in _PLACE.findall(chain) if n != "0"]
            # Code that several lines share has none: the one before is near.
            near = ";".join(found) or near
            places.append(near if found else f"~{near}")
    # Mach-O's names start with an underscore.
    mark = "_" if "_emu_entry:" in assembly else ""
    out += ["\t.data", "\t.p2align 3"]
    for table, kind, values in (
        ("emu_calls", ".quad", [f"Lemu_call_{i}" for i in range(len(places))] + ["0"]),
        ("emu_places", ".asciz", ['"' + "\\n".join(places).replace('"', "") + '"']),
    ):
        out += [f"\t.globl {mark}{table}", f"{mark}{table}:"]
        out += [f"\t{kind} {value}" for value in values]
    return "\n".join(out) + "\n"


def _places(handle: ctypes.CDLL) -> dict[int, tuple[Place, ...]]:
    table = ctypes.addressof(ctypes.c_char.in_dll(handle, "emu_places"))
    rows = ctypes.string_at(table).decode(errors="replace").split("\n")
    calls = (ctypes.c_uint64 * len(rows)).in_dll(handle, "emu_calls")
    return {
        call: tuple(_place(part) for part in row.split(";") if part.strip("~"))
        for call, row in zip(calls, rows, strict=True)
    }


def _place(text: str) -> Place:
    file, _, line = text.rpartition(" ")
    near = text.startswith("~")
    return Place(Path(file.lstrip("~")).name, int(line), near)


class _Shared(ctypes.Structure):
    """struct EmuShared of include/cpu_sanitize.h."""

    _fields_ = [
        ("type", ctypes.c_char_p),
        ("offset", ctypes.c_uint32),
        ("size", ctypes.c_uint32),
    ]


def shared_arrays(handle: ctypes.CDLL) -> tuple[tuple[str, int, int], ...]:
    count = ctypes.c_uint32.in_dll(handle, "emu_array_count").value
    rows = (_Shared * 64).in_dll(handle, "emu_arrays")[:count]
    return tuple((_array_name(r.type.decode()), r.offset, r.size) for r in rows)


def _array_name(signature: str) -> str:
    """`float tile[32]` from the text of a function with T and Tag in it."""
    found = re.search(r"\[T = (.*), Tag = (.*?emu_)?(\w+)_tag\b", signature)
    if not found:
        return "threadgroup memory"
    kind, name = found[1], found[3]
    base, bracket, dims = kind.partition("[")
    return f"{base.strip()} {name}{bracket}{dims}"


def uninitialised(metal: MetalSource) -> Sequence[str]:
    """The compiler's own words on variables without a value, "source:3: ..." each."""
    flags = [*cpu_build.KERNEL_FLAGS, *native_flags(), *WARNING_FLAGS]
    flags += ["-I", str(cpu_build.INCLUDE), "-nostdlib", "-S"]
    with tempfile.TemporaryDirectory() as folder:
        words = run(flags, Path(folder) / "kernel.s", cpu_source(metal))
    found = re.findall(r"^(source|header):(\d+):\d+: warning: (.*?) \[", words, re.M)
    return [f"{file} line {line}: {text}" for file, line, text in found]
