"""The doctor on the fused launches of a decoder block."""

from dataclasses import replace

import pytest

from mlx_phase import doctor_fused
from mlx_phase.chip import lookup
from mlx_phase.doctor_fused import FusedRow, examine, rows
from mlx_phase.launch import fused


@pytest.mark.parametrize("row", rows(True), ids=lambda r: r.kernel)
def test_kernels_pass(row):
    found = examine(row)
    assert found.ok and found.exact and found.worst <= 1, found.error
    assert not found.kernel.endswith(("True", "False"))


@pytest.mark.parametrize(
    "kernel, dtype, bits, choice",
    [
        ("qmv_add", "float16", 8, False),
        ("qmv_glu", "bfloat16", 4, "silu"),
        ("qmv_qkv", "bfloat16", 4, False),
        ("qmv_qkv_bias", "bfloat16", 8, True),
    ],
)
def test_matrix_units_are_examined_where_models_get_them(
    monkeypatch, kernel, dtype, bits, choice
):
    chip = replace(lookup("h200"), threadgroup_bytes=32768)
    monkeypatch.setattr(fused, "device_chip", lambda: chip)
    found = examine(FusedRow(kernel, 9, dtype, bits, choice))
    assert found.ok and found.exact, found.error
    assert found.kernel.startswith(kernel.replace("qmv", "qmm_codes") + " ")


def test_every_kernel_dtype_and_choice_is_examined():
    full = rows(False)
    assert {r.kernel for r in full} == set(doctor_fused.KERNELS)
    assert {r.dtype for r in full} == {"float32", "float16", "bfloat16"}
    activations = {r.choice for r in full if r.kernel == "qmv_glu"}
    assert activations == {"silu", "gelu_approx", "gelu"}
    assert {r.kernel for r in rows(True)} == set(doctor_fused.KERNELS)


def test_a_wrong_kernel_is_found(monkeypatch):
    """Each output is compared: a launch that adds nothing is off."""
    row = FusedRow("qmv_add", 2, "float32", 4, False)
    monkeypatch.setattr(
        doctor_fused, "prepare_add", lambda *_: lambda x, w, s, b, res: res
    )
    found = examine(row)
    assert not found.ok and "off by" in found.error


def test_a_kernel_that_does_not_compile_is_a_row_not_a_crash(monkeypatch):
    def refuse(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(doctor_fused, "prepare_add", refuse)
    found = examine(FusedRow("qmv_add", 2, "float32", 4, False))
    assert not found.ok and found.error == "no compiler" and found.run_ms is None
