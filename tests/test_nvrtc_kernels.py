"""Every kernel of this project compiles with NVRTC, for sm_80 and sm_90: no GPU needed.

Formats take turns between the two, so each has several rows of every kernel.
"""

import codes_rows
import fused_rows
import gather_rows
import matrix_rows
import prefill_rows
import pytest
import qmm_rows
import sdpa_rows
from kernel_rows import arguments, reduce_arguments, row_name, rows

from mlx_phase import source
from mlx_phase.executor import ExecutorError, cuda_check, nvrtc

CHIPS = {"a100-80gb": "sm_80", "h200": "sm_90a"}
# Planned for the chip that has the architecture, or for Apple: the formats alternate.
DECODE = {"m4-max": "sm_80", "h200": "sm_90a"}
ROWS = rows(tuple(DECODE))
ARCHES = [list(CHIPS.values())[i % 2] for i in range(len(ROWS))]
# Few: each takes seconds.
ATTENTION = sdpa_rows.rows(tuple(CHIPS))
ATTENTION = [*ATTENTION[:-6][1::3], *ATTENTION[-6:]]


PAIRS = list(zip(ROWS, ARCHES, strict=True))
FUSED = fused_rows.rows(tuple(DECODE))
# One row of each kernel and architecture becomes PTX, the others stop before that.
FIRST_FUSED = {row[0]: row for row in reversed(FUSED)}
FIRST = {(row[1].kernel, arch): row for row, arch in reversed(PAIRS)}


def compiled(arch: str, *kernel, **options) -> str:
    try:
        return cuda_check.compile_check(*kernel, arch=arch, **options)
    except nvrtc.NvrtcMissing as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    "row, arch", PAIRS, ids=[f"{row_name(r)}-{a}" for r, a in PAIRS]
)
def test_kernel_compiles(row, arch):
    ptx = row is FIRST[row[1].kernel, arch]
    made = compiled(arch, *arguments(*row), ptx=ptx)
    assert not ptx or f".target {arch}" in made and "fma.rn.f32" in made


def test_text_that_does_not_compile_is_refused_without_ptx():
    name, ins, outs, body, header, values = arguments(*ROWS[0])
    with pytest.raises(ExecutorError, match="mlxp_undeclared"):
        compiled("sm_80", name, ins, outs, f"mlxp_undeclared();{body}", header, values,
                 ptx=False)  # fmt: skip


@pytest.mark.parametrize("arch", CHIPS.values())
def test_reduce_compiles(arch):
    assert f".target {arch}" in compiled(arch, *reduce_arguments("bfloat16", 3))


@pytest.mark.parametrize("row", FUSED, ids=fused_rows.row_name)
def test_fused_kernel_compiles(row):
    arch, ptx = DECODE[row[3]], row is FIRST_FUSED[row[0]]
    made = compiled(arch, *fused_rows.arguments(*row), ptx=ptx)
    assert not ptx or f".target {arch}" in made


@pytest.mark.parametrize("row", ATTENTION, ids=sdpa_rows.row_name)
def test_attention_compiles(row):
    arch = list(CHIPS.values())[row[0].head_dim // 64 % 2]
    assert f".target {arch}" in compiled(arch, *sdpa_rows.arguments(*row))


@pytest.mark.parametrize("chunks,fold", [(2, 1), (33, 4), (300, 1)])
def test_merge_of_chunks_compiles(chunks, fold):
    kernel = sdpa_rows.reduce_arguments(sdpa_rows.PROBLEMS[2], chunks, fold)
    assert ".target sm_80" in compiled("sm_80", *kernel)


@pytest.mark.parametrize("arch", CHIPS.values())
def test_rows_reach_every_kernel(arch):
    plans = [p for (_, p), a in zip(ROWS, ARCHES, strict=True) if a == arch]
    plans += [p for _, p, _ in ATTENTION]
    kernels = {p.kernel for p in plans} | {"qmv_reduce", "sdpa_reduce"}
    kernels |= {kernel for kernel, *_ in fused_rows.CASES} | matrix_rows.KERNELS
    kernels |= qmm_rows.KERNELS
    kernels |= prefill_rows.KERNELS  # in test_prefill_kernels.py
    kernels |= gather_rows.KERNELS  # in test_gather_kernels.py
    kernels |= codes_rows.KERNELS  # in test_matrix_kernels.py
    assert kernels == set(source.KERNELS)
