"""Every kernel of this project compiles with NVRTC, for sm_80 and sm_90: no GPU needed.

Formats take turns between the two, so each has several rows of every kernel.
"""

import fused_rows
import matrix_rows
import pytest
import sdpa_rows
from kernel_rows import arguments, reduce_arguments, row_name, rows

from mlx_phase import source
from mlx_phase.executor import cuda_check, nvrtc

CHIPS = {"a100-80gb": "sm_80", "h200": "sm_90a"}
# Planned for the chip that has the architecture: the formats alternate.
ROWS = rows(tuple(CHIPS))
ARCHES = [list(CHIPS.values())[i % 2] for i in range(len(ROWS))]
# Few: each takes seconds.
ATTENTION = sdpa_rows.rows(tuple(CHIPS))[1::3]


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


@pytest.mark.parametrize("row", fused_rows.rows(tuple(CHIPS)), ids=fused_rows.row_name)
def test_fused_kernel_compiles(row):
    arch = CHIPS[row[3]]
    assert f".target {arch}" in compiled(arch, *fused_rows.arguments(*row))


@pytest.mark.parametrize("row", ATTENTION, ids=sdpa_rows.row_name)
def test_attention_compiles(row):
    arch = list(CHIPS.values())[row[0].head_dim // 64 % 2]
    assert f".target {arch}" in compiled(arch, *sdpa_rows.arguments(*row))


def test_merge_of_chunks_compiles():
    kernel = sdpa_rows.reduce_arguments(sdpa_rows.PROBLEMS[2])
    assert ".target sm_80" in compiled("sm_80", *kernel)


@pytest.mark.parametrize("arch", CHIPS.values())
def test_rows_reach_every_kernel(arch):
    plans = [p for (_, p), a in zip(ROWS, ARCHES, strict=True) if a == arch]
    plans += [p for _, p, _ in ATTENTION]
    kernels = {p.kernel for p in plans} | {"qmv_reduce", "sdpa_reduce"}
    kernels |= {kernel for kernel, *_ in fused_rows.CASES} | matrix_rows.KERNELS
    assert kernels == set(source.KERNELS)
