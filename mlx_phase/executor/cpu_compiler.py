"""Finds a clang and runs it: ziglang's, else one on PATH."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mlx_phase.executor.error import ExecutorError

_ZIG_CACHES = ("ZIG_LOCAL_CACHE_DIR", "ZIG_GLOBAL_CACHE_DIR")
#: On Linux libc and libm are in the process already. Without -nostdlib zig first builds
#: its compiler runtime and libc stubs: 10 s once per machine.
LEAN_FLAGS = ("-nostdlib",) if sys.platform == "linux" else ("-lm",)
#: Lines of a compiler's complaint that an error shows.
SHOWN_LINES = 12


@functools.cache
def compiler() -> tuple[tuple[str, ...], str]:
    """Return (command, version) of the clang to use: ziglang's, else one on PATH.

    Raises ExecutorError if there is none.
    """
    zig = _zig()
    if zig is not None:
        # The binary itself: going through `python -m ziglang` starts an interpreter.
        module = (sys.executable, "-m", "ziglang", "cc")
        command = (str(zig), "cc") if zig.exists() else module
        return command, f"zig {importlib.metadata.version('ziglang')}"
    clang = shutil.which("clang")
    if clang is None:
        raise ExecutorError(
            "the CPU executor compiles kernels and found no compiler: "
            "`pip install ziglang` (or mlx_phase[cpu]), or put clang on PATH"
        )
    found = subprocess.run([clang, "--version"], capture_output=True, text=True)
    return (clang,), found.stdout


def _zig() -> Path | None:
    """Where ziglang's program should be; None if it is not installed."""
    spec = importlib.util.find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations)))
    return folder / ("zig.exe" if sys.platform == "win32" else "zig")


def native_flags() -> list[str]:
    """Flags that say: for this very processor."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return ["-march=native" if x86 else "-mcpu=native"]


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


def compile_file(arguments: Sequence[str], target: Path, code: str = "") -> str | None:
    """Make ``target`` with the compiler, from ``code`` if given; None, or its words."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "made"
        words = run(arguments, made, code)
        if not made.exists():
            return words
        os.replace(made, target)
    return None


def run(arguments: Sequence[str], made: Path, code: str = "") -> str:
    """Compile to ``made``, in a folder of its own, and return what was said.

    ``made`` is not there after an error.
    """
    environment = dict(os.environ)
    if code:
        source = made.parent / "kernel.cpp"
        source.write_text(code)
        arguments = [*arguments, str(source)]
    if "-nostdlib" in arguments:
        # zig keeps every object it ever made; here they go with the folder.
        environment |= dict.fromkeys(_ZIG_CACHES, str(made.parent))
    words = ""
    for command in _commands(arguments, made):
        result = subprocess.run(
            command, capture_output=True, text=True, env=environment
        )
        words += result.stderr
        if result.returncode:
            made.unlink(missing_ok=True)
            break
    return words


def _commands(arguments: Sequence[str], made: Path) -> list[list[str]]:
    """What to run one after the other.

    `zig cc` looks at the system and at its cache, and starts the two programs below:
    a fifth of a kernel's time. A kernel needs nothing of that.
    """
    zig = _zig()
    kernel = "-nostdlib" in arguments and any(
        a.endswith((".cpp", ".h", ".s", ".ll")) for a in arguments
    )
    if zig is None or not zig.exists() or not kernel:
        return [[*compiler()[0], *arguments, "-o", str(made)]]
    builtin = ["-nostdinc", "-isystem", str(zig.parent / "lib" / "include")]
    clang = [str(zig), "clang", *builtin, *(a for a in arguments if a != "-shared")]
    if "-S" in arguments or "c++-header" in arguments:
        return [[*clang, "-o", str(made)]]
    compiled = f"{made}.o"
    return [
        [*clang, "-c", "-o", compiled],
        [str(zig), "ld.lld", "-shared", compiled, "-o", str(made)],
    ]


def complaint(stderr: str) -> str:
    """The first errors of a compiler's output, without the notes after them."""
    lines = stderr.strip().splitlines()
    first = next((i for i, line in enumerate(lines) if "error:" in line), 0)
    return "\n".join(lines[first : first + SHOWN_LINES]) or "the compiler failed"
