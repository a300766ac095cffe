"""The CPU executor's C compiles for the other processor too: x86-64 and aarch64."""

import struct
import sys

import pytest
from kernel_rows import arguments

from mlx_phase.chip import CPU
from mlx_phase.executor import cpu_build, signature
from mlx_phase.executor.cpu_source import cpu_source
from mlx_phase.plan import plan
from mlx_phase.problem import Matmul

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not cpu_build.compiler()[1].startswith("zig"),
    reason="zig brings the headers of other machines; clang alone does not",
)
#: Processor -> its number in an ELF file.
MACHINES = {"x86_64": 0x3E, "aarch64": 0xB7}


@pytest.fixture(params=MACHINES)
def machine(request, monkeypatch, tmp_path):
    monkeypatch.setenv("MLX_PHASE_CACHE", str(tmp_path))
    target = ["-target", f"{request.param}-linux-gnu"]
    if request.param == "x86_64":
        target.append("-mcpu=x86_64_v3")  # with half conversions
    monkeypatch.setattr(cpu_build, "_native", lambda: target)
    monkeypatch.setattr(cpu_build.platform, "machine", lambda: request.param)
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
