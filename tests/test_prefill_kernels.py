"""Prefill attention passes the strict check, and NVRTC gives it tensor cores."""

import prefill_rows
import pytest
import tensor_cores

from mlx_phase.executor import strict

ROWS, NARROW = prefill_rows.rows(), prefill_rows.rows(narrow=True)
# Floats are multiplied through shuffles: too slow to compile here.
SHORT = [name for name in ROWS if "float32" not in name]
SHORT = SHORT[:2] + [name for name in SHORT if "wide" in name][1:]


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
    kind = "bf16" if "bfloat16" in name else "f16"
    tensor_cores.compiled(ROWS[name], arch, kind)
