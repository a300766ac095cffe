"""Every kernel of this project compiles with NVRTC, for sm_80 and sm_90: no GPU needed.

Formats take turns between the two, so each has several rows of every kernel.
"""

import pytest
from kernel_rows import arguments, reduce_arguments, row_name, rows

from mlx_phase import source
from mlx_phase.executor import cuda_check, nvrtc

CHIPS = {"a100-80gb": "sm_80", "h200": "sm_90a"}
# Planned for the chip that has the architecture: the formats alternate.
ROWS = rows(tuple(CHIPS))
ARCHES = [list(CHIPS.values())[i % 2] for i in range(len(ROWS))]


def compiled(arch: str, *kernel) -> str:
    try:
        return cuda_check.compile_check(*kernel, arch=arch)
    except nvrtc.NvrtcMissing as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    "row, arch",
    list(zip(ROWS, ARCHES, strict=True)),
    ids=[f"{row_name(r)}-{a}" for r, a in zip(ROWS, ARCHES, strict=True)],
)
def test_kernel_compiles(row, arch):
    ptx = compiled(arch, *arguments(*row))
    assert f".target {arch}" in ptx and "fma.rn.f32" in ptx


@pytest.mark.parametrize("arch", CHIPS.values())
def test_reduce_compiles(arch):
    assert f".target {arch}" in compiled(arch, *reduce_arguments("bfloat16", 3))


@pytest.mark.parametrize("arch", CHIPS.values())
def test_rows_reach_every_kernel(arch):
    plans = [p for (_, p), a in zip(ROWS, ARCHES, strict=True) if a == arch]
    assert {p.kernel for p in plans} | {"qmv_reduce"} == set(source.KERNELS)
