"""Prefill attention passes the strict check, and NVRTC gives it tensor cores."""

import prefill_rows
import pytest

from mlx_phase.executor import cuda_check, nvrtc, strict

ROWS, NARROW = prefill_rows.rows(), prefill_rows.rows(narrow=True)
# Floats are multiplied through shuffles: too slow to compile here.
SHORT = [name for name in ROWS if "float32" not in name][:2]


def test_rows_reach_every_kernel():
    names = {row[0].removeprefix("mlxp_") for row in ROWS.values()}
    assert names == prefill_rows.KERNELS


@pytest.mark.parametrize("name", ROWS)
def test_kernel_is_strict(name):
    strict.assert_clean(*ROWS[name])


@pytest.mark.parametrize("name", list(NARROW)[::5])
def test_text_without_vector_loads_is_strict(name):
    strict.assert_clean(*NARROW[name])


@pytest.mark.parametrize("name", SHORT)
def test_kernel_compiles_for_tensor_cores(name):
    arch = ("sm_80", "sm_90a")[SHORT.index(name) % 2]
    try:
        ptx = cuda_check.compile_check(*ROWS[name], arch=arch)
    except nvrtc.NvrtcMissing as error:
        pytest.skip(str(error))
    kind = "bf16.bf16" if "bfloat16" in name else "f16.f16"
    assert f".target {arch}" in ptx
    assert f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.f32" in ptx
    # An array in local memory would be a spill that no compiler can undo.
    assert ".local" not in ptx
