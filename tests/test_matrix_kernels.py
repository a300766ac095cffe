"""Kernels on matrix units pass the strict check, and NVRTC gives them tensor cores."""

import codes_rows
import matrix_rows
import pytest
import sdpa_rows
import tensor_cores

from mlx_phase.chip import lookup
from mlx_phase.executor import strict
from mlx_phase.plan_attention import plan_sdpa
from mlx_phase.problem import Sdpa

ROWS = matrix_rows.rows() | codes_rows.rows()
NARROW = matrix_rows.rows(narrow=True) | codes_rows.rows(narrow=True)
# Floats are multiplied in fp32, through hundreds of shuffles: too slow to compile here.
SHORT = [name for name in ROWS if "float32" not in name]


def test_rows_reach_every_kernel():
    # Texts without what a call lacks are of the same kernel.
    names = {row[0].removeprefix("mlxp_").split("_no_")[0] for row in ROWS.values()}
    assert names == matrix_rows.KERNELS | codes_rows.KERNELS


# Rows of attention are exact, those of qmm_small are not.
@pytest.mark.parametrize("name", ROWS)
def test_kernel_is_strict(name):
    strict.assert_clean(*ROWS[name], exact_rows="small" not in name)


@pytest.mark.parametrize("name", list(NARROW)[::3])
def test_text_without_vector_loads_is_strict(name):
    strict.assert_clean(*NARROW[name], exact_rows="small" not in name)


FOUR = dict(k_bits=4, v_bits=4)
EIGHT = dict(k_bits=8, v_bits=8)
JOINT = dict(lens=True, joint=True)


@pytest.mark.parametrize(
    "problem, registers, room",
    [
        (Sdpa(32, 8, 128, 128, **JOINT), 168, 48),
        (Sdpa(64, 8, 64, 64, **JOINT), 128, 48),
        (Sdpa(32, 8, 128, 128, **FOUR, **JOINT), 168, 48),
        (Sdpa(32, 8, 128, 128, 4, causal=True, **EIGHT, **JOINT), 168, 36),
    ],
    ids=str,
)
def test_attention_as_planned_for_hopper(problem, registers, room):
    """As much threadgroup memory and as many registers as the plan counts on."""
    plan = plan_sdpa(problem, lookup("h200"))
    assert (plan.threadgroup_bytes // 1024, plan.registers) == (room, registers)
    row = sdpa_rows.arguments(problem, plan, False)
    kind = "f16" if "_codes" in plan.kernel else "bf16"
    assert f".maxnreg {registers}" in tensor_cores.compiled(row, "sm_90a", kind)


@pytest.mark.parametrize("name", SHORT)
def test_kernel_compiles_for_tensor_cores(name):
    arch = ("sm_80", "sm_90a")[SHORT.index(name) % 2]
    # Codes of a cache are halves, whatever its dtype.
    whole = "bfloat16" in name and "sdpa_matrix_codes" not in name
    made = tensor_cores.compiled(ROWS[name], arch, "bf16" if whole else "f16")
    # What is copied in the background goes to whole 16 bytes.
    assert "cp.async.cg" not in made or ".shared .align 16 " in made
