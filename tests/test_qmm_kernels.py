"""Prefill kernels pass the strict check, and NVRTC gives them tensor cores."""

import pytest
import qmm_rows
import tensor_cores

from mlx_phase.executor import strict

ROWS, NARROW = qmm_rows.rows(), qmm_rows.rows(narrow=True)
# Floats are multiplied in fp32, through hundreds of shuffles: too slow to compile here.
SHORT = [name for name in ROWS if "float32" not in name]


def test_rows_reach_every_kernel():
    assert {row[0].removeprefix("mlxp_") for row in ROWS.values()} == qmm_rows.KERNELS


@pytest.mark.parametrize("name", ROWS)
def test_kernel_is_strict(name):
    strict.assert_clean(*ROWS[name], exact_rows=False)


@pytest.mark.parametrize("name", list(NARROW)[::4])
def test_text_without_vector_loads_is_strict(name):
    strict.assert_clean(*NARROW[name], exact_rows=False)


@pytest.mark.parametrize("name", SHORT)
def test_kernel_compiles_for_tensor_cores(name):
    arch = ("sm_80", "sm_90a")[SHORT.index(name) % 2]
    kind = "bf16" if "bfloat16" in name else "f16"
    ptx = tensor_cores.compiled(ROWS[name], arch, kind)
    # Fragments come eight rows at a time.
    assert "ldmatrix.sync.aligned.m8n8.x4.shared.b16" in ptx
