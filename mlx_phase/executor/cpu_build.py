"""Compiles C++ for this processor and keeps the result on disk."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import inspect
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from ctypes import CDLL
from pathlib import Path

import platformdirs

from mlx_phase.executor.error import ExecutorError

INCLUDE = Path(__file__).parent / "include"
RUNTIME = ("cpu_fiber.c", "cpu_pool.c", "cpu_report.c")
CHECKING = ("cpu_sanitize.c", "cpu_profile.c")
#: What kernels start with, after the list of their swizzles.
PRELUDE = '#include "metal_cpu.h"\n'
ZIG_CACHES = ("ZIG_LOCAL_CACHE_DIR", "ZIG_GLOBAL_CACHE_DIR")

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
#: Stack probes make a huge local array meet the guard page instead of jumping over it.
COMMON_FLAGS = (
    "-O2 -g0 -fstack-clash-protection -fomit-frame-pointer -fvisibility=hidden "
    "-shared -fPIC -w"
).split()
#: On Linux libc and libm are in the process already. Without -nostdlib zig first builds
#: its compiler runtime and libc stubs: 10 s once per machine.
LEAN_FLAGS = ("-nostdlib",) if sys.platform == "linux" else ("-lm",)
#: Lines of a compiler's complaint that an error shows.
SHOWN_LINES = 12


def cache_folder() -> Path:
    """Where compiled kernels lie: ``MLX_PHASE_CACHE`` or the user's cache folder."""
    chosen = os.environ.get("MLX_PHASE_CACHE")
    base = Path(chosen) if chosen else Path(platformdirs.user_cache_dir("mlx_phase"))
    return base / "cpu"


@functools.cache
def compiler() -> tuple[tuple[str, ...], str]:
    """Return (command, version) of the clang to use: ziglang's, else one on PATH.

    Raises ExecutorError if there is none.
    """
    spec = importlib.util.find_spec("ziglang")
    if spec is not None and spec.submodule_search_locations:
        # The binary itself: going through `python -m ziglang` starts an interpreter.
        folder = Path(next(iter(spec.submodule_search_locations)))
        binary = folder / ("zig.exe" if sys.platform == "win32" else "zig")
        command = (
            (str(binary), "cc")
            if binary.exists()
            else (sys.executable, "-m", "ziglang", "cc")
        )
        return command, f"zig {importlib.metadata.version('ziglang')}"
    clang = shutil.which("clang")
    if clang is None:
        raise ExecutorError(
            "the CPU executor compiles kernels and found no compiler: "
            "`pip install ziglang` (or mlx_phase[cpu]), or put clang on PATH"
        )
    found = subprocess.run([clang, "--version"], capture_output=True, text=True)
    return (clang,), found.stdout


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


def native_flags() -> list[str]:
    """Flags that say: for this very processor."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return ["-march=native" if x86 else "-mcpu=native"]


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
    target = cache_folder() / f"{_key(*flags, *files, code or '', edits)}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if code is None:
            failure = _compile([*flags, "-I", str(INCLUDE), *files], target)
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


def _key(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in (compiler()[1], _processor(), _headers(), *parts):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def _compile(arguments: Sequence[str], target: Path, code: str = "") -> str | None:
    """Make ``target`` with the compiler, from ``code`` if given; None, or its words."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made, environment = Path(folder) / "made", dict(os.environ)
        if code:
            source = Path(folder) / "kernel.cpp"
            source.write_text(code)
            arguments = [*arguments, str(source)]
        if "-nostdlib" in arguments:
            # zig keeps every object it ever made; here they go with the folder.
            environment |= dict.fromkeys(ZIG_CACHES, folder)
        result = subprocess.run(
            [*compiler()[0], *arguments, "-o", str(made)],
            capture_output=True,
            text=True,
            env=environment,
        )
        if result.returncode or not made.exists():
            return result.stderr
        os.replace(made, target)
    return None


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
        if parsed.exists() and _compile([*flags, *use], target, rest) is None:
            return None
    # Also after an error: a .pch that clang no longer takes must not stop a kernel.
    return _compile([*flags, "-I", str(INCLUDE)], target, code)


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
        return _compile([*link, str(lines)], target)


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
        _compile([*flags, "-I", str(INCLUDE), *options], parsed)
    return parsed


def complaint(stderr: str) -> str:
    """The first errors of a compiler's output, without the notes after them."""
    lines = stderr.strip().splitlines()
    first = next((i for i, line in enumerate(lines) if "error:" in line), 0)
    return "\n".join(lines[first : first + SHOWN_LINES]) or "the compiler failed"


def load(
    code: str | None,
    flags: Sequence[str],
    files: Sequence[str] = (),
    edit: Callable[[str], str] | None = None,
) -> CDLL:
    """Compile and load; see ``build``."""
    _math()
    path = build(code, [*flags, *LEAN_FLAGS], files, edit)
    try:
        return CDLL(str(path))
    except OSError as error:
        if "undefined symbol" not in str(error):
            raise
    # A processor without, say, half conversions needs the compiler's own library.
    return CDLL(str(build(code, [*flags, "-lm"], files, edit)))


@functools.cache
def _math() -> None:
    """Put the C library's math where kernels find it; musl has it in libc already."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)


def libc_headers() -> list[str]:
    """Flags with zig's C library headers, for a Linux machine that has none.

    Slim containers have no /usr/include, and with -nostdlib zig leaves its own out.
    """
    folder = Path(compiler()[0][0]).parent / "lib" / "libc" / "include"
    if sys.platform != "linux" or not folder.is_dir():
        return []
    machine = platform.machine()
    arch = "x86" if machine == "x86_64" else machine
    names = (f"{arch}-linux-gnu", "generic-glibc", f"{arch}-linux-any", "any-linux-any")
    # After the system's own, which win.
    return [part for name in names for part in ("-idirafter", str(folder / name))]


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
