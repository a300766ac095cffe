"""Compile CUDA C++ with NVRTC: no GPU and no driver needed.

The pip packages nvidia-cuda-nvrtc,
nvidia-cuda-runtime, nvidia-cuda-cccl and nvidia-cuda-crt bring all that it needs.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path


class NvrtcMissing(RuntimeError):
    """NVRTC or the CUDA headers are not installed."""


class NvrtcError(RuntimeError):
    """The text does not compile; the message is the compiler's log."""


class NvrtcUnfit(NvrtcError):
    """Not the text's fault: this NVRTC is older than the GPU, or lacks a part."""


# nvrtcResult of a text with errors.
_COMPILATION = 6

_INSTALL = (
    "install them with: pip install nvidia-cuda-nvrtc nvidia-cuda-runtime "
    "nvidia-cuda-cccl nvidia-cuda-crt (the dev extra does)"
)


def _roots() -> list[Path]:
    """Folders that may hold a CUDA toolkit: the pip packages first, then CUDA_HOME."""
    site = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    homes.append("/usr/local/cuda")
    return [
        *sorted(site.glob("cu[0-9]*"), reverse=True),
        *sorted(site.glob("cuda_*")),
        *(Path(home) for home in homes if home),
    ]


@functools.cache
def library() -> ctypes.CDLL:
    """Load libnvrtc; raises NvrtcMissing."""
    names = ("libnvrtc.so.1[0-9]", "libnvrtc.so", "nvrtc64*.dll")
    folders = ("lib", "lib64", "bin", "targets/*/lib")
    for root in _roots():
        for folder in folders:
            for name in names:
                for path in sorted(root.glob(f"{folder}/{name}"), reverse=True):
                    try:
                        return ctypes.CDLL(str(path))
                    except OSError:
                        continue  # for another machine, or in parts
    raise NvrtcMissing(f"libnvrtc was not found; {_INSTALL}")


@functools.cache
def include_paths() -> tuple[str, ...]:
    """Folders with cuda_fp16.h and cuda/std/array; raises NvrtcMissing."""
    found: dict[str, str] = {}
    for root in _roots():
        for folder in ("include", "include/cccl", "cccl", "targets/*/include"):
            for path in sorted(root.glob(folder)):
                for header in ("cuda_fp16.h", "cuda/std/array", "crt/host_defines.h"):
                    if header not in found and (path / header).is_file():
                        found[header] = str(path)
    missing = {"cuda_fp16.h", "cuda/std/array"} - found.keys()
    if missing:
        raise NvrtcMissing(f"CUDA headers {sorted(missing)} were not found; {_INSTALL}")
    return tuple(dict.fromkeys(found.values()))


def version() -> tuple[int, int]:
    """Version of NVRTC, such as (13, 0); raises NvrtcMissing."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def compile_ptx(
    text: str, name: str, arch: str = "sm_80", options: Sequence[str] = ()
) -> str:
    """Compile ``text`` for ``arch`` with MLX's options and return the PTX.

    Raises NvrtcError with the compiler's log, of which NvrtcUnfit says that it is not
    the text's fault; NvrtcMissing without NVRTC.
    """
    made = _compile(text, name, arch, options, "PTX")
    return made.rstrip(b"\0").decode(errors="replace")


def compile_cubin(text: str, name: str, arch: str) -> bytes:
    """The same as machine code of ``arch``, such as "sm_90a"."""
    return _compile(text, name, arch, (), "CUBIN")


def _compile(
    text: str, name: str, arch: str, options: Sequence[str], result: str
) -> bytes:
    nvrtc = library()
    flags = [
        "--std=c++17",
        "--device-as-default-execution-space",
        f"-arch={arch}",
        *(f"-I{path}" for path in include_paths()),
        *options,
    ]
    program = ctypes.c_void_p()
    status = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), text.encode(), f"{name}.cu".encode(), 0, None, None
    )
    if status != 0:
        raise NvrtcError(f"nvrtcCreateProgram failed with status {status}")
    try:
        argv = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        status = nvrtc.nvrtcCompileProgram(program, len(flags), argv)
        if status != 0:
            log = _read(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            error = NvrtcError if status == _COMPILATION else NvrtcUnfit
            raise error(log or f"NVRTC failed with status {status}")
        return _read(program, result)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(library(), f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    getattr(library(), f"nvrtcGet{what}")(program, buffer)
    return buffer.raw
