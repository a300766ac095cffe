"""The CPU executor's C compiles for the other processor too: x86-64 and aarch64."""

import struct
import sys

import pytest
from kernel_rows import arguments

from mlx_phase.chip import CPU
from mlx_phase.executor import (
    cpu_build,
    cpu_compiler,
    profile_build,
    sanitize_build,
    signature,
)
from mlx_phase.executor.cpu_source import cpu_source
from mlx_phase.plan import plan
from mlx_phase.problem import Matmul

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not cpu_compiler.compiler()[1].startswith("zig"),
    reason="zig brings the headers of other machines; clang alone does not",
)
#: Processor -> its number in an ELF file.
MACHINES = {"x86_64": 0x3E, "aarch64": 0xB7}


@pytest.fixture(params=MACHINES)
def machine(request, monkeypatch, tmp_path):
    monkeypatch.setenv("MLX_PHASE_CACHE", str(tmp_path))
    target = ["-target", f"{request.param}-linux-gnu"]
    if request.param == "x86_64":
        target += ["-mavx2", "-mfma", "-mf16c"]
    monkeypatch.setattr(cpu_build, "native_flags", lambda: target)
    monkeypatch.setattr(cpu_compiler.platform, "machine", lambda: request.param)
    return request.param


def check(path, machine):
    data = path.read_bytes()
    assert data[:4] == b"\x7fELF"
    assert struct.unpack_from("<H", data, 18) == (MACHINES[machine],)


@pytest.mark.parametrize(
    "problem",
    [
        Matmul(2, 64, 256, "bfloat16", 3, 32),
        Matmul(1, 64, 256, "float16", 4, 16, "nvfp4"),
        Matmul(1, 64, 256, "float16", mode="none"),
    ],
    ids=lambda p: f"{p.mode}-{p.x_dtype}",
)
def test_kernels_compile(problem, machine):
    name, ins, outs, body, header, values = arguments((problem,), plan(problem, CPU))
    metal = signature.metal_source(name, ins, outs, body, header, values)
    flags = [*cpu_build.KERNEL_FLAGS, *cpu_build.LEAN_FLAGS]
    check(cpu_build.build(cpu_source(metal), flags), machine)


def test_the_runtime_needs_no_headers_of_this_system(machine):
    """A build for a named target looks at zig's headers only, as on a bare machine."""
    files = [str(cpu_build.INCLUDE / name) for name in cpu_build.RUNTIME]
    flags = [*cpu_build.LEAN_FLAGS, *cpu_build.libc_headers()]
    check(cpu_build.build(None, flags, files), machine)


@pytest.mark.parametrize(
    "edit, flags",
    [
        (sanitize_build.label_calls, sanitize_build.CHECKED_FLAGS),
        (profile_build.count_blocks, profile_build.PROFILE_FLAGS),
    ],
)
def test_checked_and_counting_kernels_compile(edit, flags, machine):
    problem = Matmul(1, 64, 256, "bfloat16", 4, 64)
    name, ins, outs, body, header, values = arguments((problem,), plan(problem, CPU))
    metal = signature.metal_source(name, ins, outs, body, header, values)
    flags = [*cpu_build.KERNEL_FLAGS, *flags, *cpu_build.LEAN_FLAGS]
    path = cpu_build.build(cpu_source(metal), flags, edit=edit)
    check(path, machine)
    # every call that checks has its place in the table
    words = path.read_bytes()
    assert b"\nheader " in words or b"emu_block_kinds" in words


def test_the_checking_runtime_compiles(machine):
    names = [*cpu_build.RUNTIME, *cpu_build.CHECKING]
    files = [str(cpu_build.INCLUDE / name) for name in names]
    flags = ["-DEMU_SANITIZE", *cpu_build.LEAN_FLAGS, *cpu_build.libc_headers()]
    check(cpu_build.build(None, flags, files), machine)
