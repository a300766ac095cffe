"""The doctor's attention rows: every kernel, exact rows, failures it must see."""

from dataclasses import replace

import mlx.core as mx
import pytest

from mlx_phase import check, doctor, doctor_attention
from mlx_phase.attention_ops import planned
from mlx_phase.chip import lookup
from mlx_phase.doctor_attention import examine, rows
from mlx_phase.launch.matmul import device_chip
from mlx_phase.problem import CACHE_BITS, HEAD_DIM_PAIRS, HEAD_DIMS, Sdpa

SMALL = Sdpa(2, 1, 64, 64, 3, dtype="float32", causal=True)


@pytest.fixture(autouse=True)
def clean_results():
    check.forget()
    yield
    check.forget()


@pytest.mark.parametrize("quick", [True, False])
def test_rows_reach_every_kernel_size_dtype_and_cache(quick):
    found = rows(quick)
    kernels = {planned(p, device_chip()).kernel for p in found}
    prefill = {"sdpa_prefill", "sdpa_prefill_codes"}
    if not quick:
        prefill |= {"sdpa_prefill_wide", "sdpa_prefill_wide_codes"}
    decode = {"sdpa_split", "sdpa_split_codes", "sdpa_split_joint"}
    decode |= set() if quick else {"sdpa_split_codes_joint"}
    assert kernels == decode | prefill
    assert {p.dtype for p in found} == {"float16", "bfloat16", "float32"}
    assert {p.k_bits for p in found} == {16, *CACHE_BITS}
    assert len(found) < 8 if quick else len(found) > 100
    if not quick:
        sizes = {(p.head_dim, p.v_head_dim) for p in found}
        assert sizes == {(d, d) for d in HEAD_DIMS} | set(HEAD_DIM_PAIRS)
    assert doctor.everything(quick)[-len(found) :] == found


@pytest.mark.parametrize("quick", [True, False])
def test_rows_reach_matrix_units_where_a_chip_has_them_for_many_heads(
    quick, monkeypatch
):
    chip = lookup("m4-max")
    monkeypatch.setattr(doctor_attention, "device_chip", lambda: chip)
    kernels = {planned(p, chip).kernel for p in rows(quick)}
    forms = {"", "_codes", "_joint"}
    assert {f"sdpa_{k}{form}" for k in ("split", "matrix") for form in forms} <= kernels


def test_a_row_is_timed_checked_and_exact():
    ticks = iter([1.0, 1.5])
    found = examine(SMALL, clock=lambda: next(ticks))
    assert found.ok and found.exact is True and found.error is None
    assert found.run_ms == pytest.approx(500) and 0 < found.worst < 1
    assert found.kernel.startswith("sdpa_split float32") and found.M == 3


def test_a_joint_cache_is_checked_and_exact():
    found = examine(replace(SMALL, joint=True, lens=True))
    assert found.ok and found.exact is True and 0 < found.worst < 1
    assert found.kernel.startswith("sdpa_split_joint float32")


def test_a_prompt_is_checked_and_timed():
    found = examine(replace(SMALL, q_len=32))
    assert found.ok and found.exact is None and found.run_ms > 0
    assert found.kernel.startswith("sdpa_prefill float32") and found.M == 32


def test_rows_with_other_bits_are_found(monkeypatch):
    real = doctor_attention.prepare

    def other(problem):
        call = real(problem)
        return lambda *a, **options: call(*a, **options) * (1 + 1e-6 * problem.causal)

    monkeypatch.setattr(doctor_attention, "prepare", other)
    found = examine(SMALL)
    assert found.exact is False and not found.ok
    assert "rows of 3 queries have other bits than alone" in found.error


def test_a_wrong_kernel_is_found(monkeypatch):
    def wrong(problem, chosen):
        return lambda q, k, v, **options: mx.zeros_like(q)

    monkeypatch.setattr("mlx_phase.attention_check.prepare", wrong)
    found = examine(SMALL)
    assert not found.ok and "wrong result" in found.error and found.exact is None
