"""The doctor on the kernels of experts."""

import gather_rows
import pytest

from mlx_phase import check, doctor, doctor_experts
from mlx_phase.chip import lookup
from mlx_phase.doctor_experts import examine, rows
from mlx_phase.launch.matmul import device_chip
from mlx_phase.plan_gather import plan_gather


@pytest.fixture(autouse=True)
def clean_results():
    check.forget()
    yield
    check.forget()


@pytest.mark.parametrize("row", rows(True), ids=gather_rows.problem_name)
def test_kernels_pass(row):
    found = examine(row)
    assert found.ok and found.worst <= 1, found.error
    assert found.exact is (True if plan_gather(row, device_chip()).exact else None)


@pytest.mark.parametrize("quick", [True, False])
def test_every_kernel_is_examined(quick):
    found = rows(quick)
    kernels = {plan_gather(g, device_chip()).kernel for g in found}
    assert kernels == gather_rows.KERNELS - {"gather_tiles"}
    assert {g.matmul.x_dtype for g in found} == {"float32", "float16", "bfloat16"}
    assert {g.activation for g in found} >= {"", "silu", "gelu_approx"}
    assert set(found) <= set(doctor.everything(quick))


def test_full_rows_are_all_formats_dtypes_and_choices():
    found = rows(False)
    assert len(found) == 4 * 21 * 3 and len(set(found)) > 4 * 21
    forms = {(g.matmul.mode, g.matmul.bits, g.matmul.group_size) for g in found}
    assert len(forms) == 21
    assert {g.activation for g in found} == {"", "silu", "gelu_approx", "clipped"}
    assert {g.each for g in found} == {0, 1, 4} and {g.bias for g in found} == {0, 1}


def test_what_a_chip_leaves_to_stock_is_not_there(monkeypatch):
    monkeypatch.setattr(doctor_experts, "device_chip", lambda: lookup("a100-80gb"))
    assert {plan_gather(g, lookup("a100-80gb")).exact for g in rows(True)} == {True}


def test_pairs_with_other_bits_than_alone_are_found(monkeypatch):
    row = next(g for g in rows(True) if g.sorted and g.exact)
    real = doctor_experts.prepare

    def wrong(g, chosen):
        run = real(g, chosen)
        return run if g.pairs > 1 else lambda *a: run(*a) * 1.01

    monkeypatch.setattr(doctor_experts, "prepare", wrong)
    found = examine(row)
    assert not found.ok and "other bits than alone" in found.error


def test_a_kernel_that_fails_its_check_is_a_failed_row(monkeypatch):
    monkeypatch.setattr("mlx_phase.gather_check.activated", lambda g, a, b: a + b)
    found = examine(rows(True)[0])
    assert not found.ok and "times the allowed error" in found.error
