"""Compiles C++ for this processor and keeps the result on disk."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import inspect
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from ctypes import CDLL
from pathlib import Path

import platformdirs

from mlx_phase.executor.cpu_compiler import (
    LEAN_FLAGS,
    compile_file,
    compiler,
    complaint,
    libc_headers,
    native_flags,
)
from mlx_phase.executor.error import ExecutorError

INCLUDE = Path(__file__).parent / "include"
RUNTIME = ("cpu_fiber.c", "cpu_pool.c", "cpu_report.c")
CHECKING = ("cpu_sanitize.c", "cpu_profile.c")
#: What kernels start with, after the list of their swizzles.
PRELUDE = '#include "metal_cpu.h"\n'

#: Metal's safe math: no contraction of a * b + c, half and bfloat rounded after every
#: operation, `1.0` is a float. Metal code reinterprets pointers freely: no strict
#: aliasing. Large helpers are inlined, as Metal does, so that arrays passed by pointer
#: stay in registers: 1.5 times as fast. always_inline would double the compile time.
KERNEL_FLAGS = (
    "-x c++ -std=c++17 -fno-exceptions -fno-rtti -fno-threadsafe-statics "
    "-ffp-contract=off -fno-math-errno -fno-trapping-math "
    "-fno-strict-aliasing -fwrapv -mllvm -inlinehint-threshold=2500 "
    "-Xclang -cl-single-precision-constant "
    "-Xclang -ffloat16-excess-precision=none -Xclang -fbfloat16-excess-precision=none"
).split()
#: As fast as -O2, and compiles in 0.7 to 0.9 of its time.
FAST_FLAGS = ("-O1", "-fvectorize", "-fslp-vectorize")
#: Stack probes make a huge local array meet the guard page instead of jumping over it.
COMMON_FLAGS = (
    "-O2 -g0 -fstack-clash-protection -fomit-frame-pointer -fvisibility=hidden "
    "-shared -fPIC -w"
).split()


def cache_folder() -> Path:
    """Where compiled kernels lie: ``MLX_PHASE_CACHE`` or the user's cache folder."""
    chosen = os.environ.get("MLX_PHASE_CACHE")
    base = Path(chosen) if chosen else Path(platformdirs.user_cache_dir("mlx_phase"))
    return base / "cpu"


@functools.cache
def _processor() -> str:
    """What -march=native depends on, so that a shared cache never mixes machines."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return f"{platform.machine()} {platform.processor()} {platform.platform()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    lines = cpuinfo.read_text().split("\n\n", 1)[0].splitlines()
    return platform.machine() + "\n".join(x for x in lines if x.startswith(wanted))


@functools.cache
def _headers() -> str:
    """Digest of every header, compiled into each kernel's key."""
    digest = hashlib.sha256()
    for path in sorted(INCLUDE.iterdir()):
        if path.suffix in (".h", ".c"):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def build(
    code: str | None,
    flags: Sequence[str],
    files: Sequence[str] = (),
    edit: Callable[[str], str] | None = None,
) -> Path:
    """Compile ``code`` (or ``files``) to a shared library; a path in the cache.

    ``edit`` changes the assembly on its way. Several processes may build the same
    thing: the finished file is moved into place. Raises ExecutorError with the
    compiler's first lines if it fails.
    """
    flags = [*COMMON_FLAGS, *native_flags(), *flags]
    edits = Path(inspect.getfile(edit)).read_text() if edit else ""
    target = _target(*flags, *files, code or "", edits)
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if code is None:
            failure = compile_file([*flags, "-I", str(INCLUDE), *files], target)
        elif edit is None:
            failure = _compile_kernel(code, flags, target, target.parent)
        else:
            failure = _compile_edited(code, flags, target, edit)
    except OSError as error:
        raise ExecutorError(
            f"cannot write compiled kernels to {target.parent} ({error}); set "
            "MLX_PHASE_CACHE to a folder that can be written"
        ) from error
    if failure is not None:
        raise ExecutorError(complaint(failure))
    return target


def is_built(code: str, flags: Sequence[str]) -> bool:
    """Whether `load` of ``code`` with these flags would find it in the cache."""
    flags = [*COMMON_FLAGS, *native_flags(), *flags, *LEAN_FLAGS]
    return _target(*flags, code, "").exists()


def _target(*parts: str) -> Path:
    return cache_folder() / f"{_key(*parts)}.so"


def _key(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in (compiler()[1], _processor(), _headers(), *parts):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def _compile_kernel(
    code: str, flags: Sequence[str], target: Path, folder: Path
) -> str | None:
    """Compile with the headers parsed beforehand, a quarter of a kernel's time.

    ``folder`` is where those are kept.
    """
    swizzles, include, rest = code.partition(PRELUDE)
    if include:
        parsed = _parsed_headers(swizzles + include, flags, folder)
        use = ["-Xclang", "-include-pch", "-Xclang", str(parsed)]
        if parsed.exists() and compile_file([*flags, *use], target, rest) is None:
            return None
    # Also after an error: a .pch that clang no longer takes must not stop a kernel.
    return compile_file([*flags, "-I", str(INCLUDE)], target, code)


def _compile_edited(
    code: str, flags: Sequence[str], target: Path, edit: Callable[[str], str]
) -> str | None:
    """Compile with ``edit`` applied to the assembly."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        lines = Path(folder) / ("kernel.ll" if "-emit-llvm" in flags else "kernel.s")
        failure = _compile_kernel(code, [*flags, "-S"], lines, target.parent)
        if failure is not None:
            return failure
        lines.write_text(edit(lines.read_text()))
        kept = ("-shared", "-fPIC", "-nostdlib", "-lm", *native_flags())
        link = [f for f in flags if f in kept] + [
            "-w",
            "-Xclang",
            "-disable-llvm-passes",
        ]
        return compile_file([*link, str(lines)], target)


def _parsed_headers(prelude: str, flags: Sequence[str], folder: Path) -> Path:
    """Path of the precompiled prelude. It is made when a second kernel asks for it."""
    header = folder / f"{_key(*flags, prelude, str(INCLUDE))}.h"
    parsed = header.with_suffix(".pch")
    if not header.exists():
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            file.write(prelude)
        os.replace(file.name, header)
    elif not parsed.exists():
        options = ["-Xclang", "-fno-pch-timestamp", "-x", "c++-header", str(header)]
        compile_file([*flags, "-I", str(INCLUDE), *options], parsed)
    return parsed


def load(
    code: str | None,
    flags: Sequence[str],
    files: Sequence[str] = (),
    edit: Callable[[str], str] | None = None,
) -> CDLL:
    """Compile and load; see ``build``. ExecutorError too if what is built cannot be."""
    _math()
    path = build(code, [*flags, *LEAN_FLAGS], files, edit)
    try:
        return CDLL(str(path))
    except OSError as error:
        if "undefined symbol" in str(error):
            # A processor without, say, half conversions needs the compiler's library.
            return CDLL(str(build(code, [*flags, "-lm"], files, edit)))
    try:
        # A full disk or a crash has cut the file off: once more.
        path.unlink(missing_ok=True)
        return CDLL(str(build(code, [*flags, *LEAN_FLAGS], files, edit)))
    except OSError as error:
        raise ExecutorError(
            f"cannot load compiled kernels from {path.parent} ({error}); set "
            "MLX_PHASE_CACHE to a folder that can be written and whose files may run"
        ) from error


@functools.cache
def _math() -> None:
    """Put the C library's math where kernels find it; musl has it in libc already."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)


@functools.cache
def runtime(sanitize: bool = False) -> CDLL:
    """The scheduler's library, built on first use; the sanitizer's is another one."""
    names = [*RUNTIME, *CHECKING] if sanitize else RUNTIME
    files = [str(INCLUDE / name) for name in names]
    flags = ["-DEMU_SANITIZE"] if sanitize else []
    library = load(None, [*flags, *libc_headers()], files)
    sizes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    library.emu_copy.argtypes = library.emu_free_copy.argtypes = sizes
    library.emu_copy.restype, library.emu_free_copy.restype = ctypes.c_void_p, None
    # Its OS threads do not survive a fork: the child starts its own.
    os.register_at_fork(after_in_child=library.emu_after_fork)
    return library
