"""The suite of experts: a small block on the CPU executor, and what the sweep says."""

from dataclasses import replace

import pytest
from test_bench_attention import sweeps as sweeps
from test_bench_kernels import EFFORT

from mlx_phase.bench import moe_suite, record
from mlx_phase.bench.device import environment
from mlx_phase.gather_ops import kernel_route
from mlx_phase.problem import Gather, Matmul

SMALL = moe_suite.Block("tiny", Matmul(1, 64, 128, "float32"), 4, 2, 2)


@pytest.fixture
def measured(monkeypatch):
    """A case measured by a clock that the operations move: ours is 3 x as fast."""
    now = [0.0]

    class Timed(moe_suite.Timer):
        def chain(self, side, length):
            now[0] += length * (1e-6 if side == "A" else 3e-6)
            return super().chain(side, length)

    monkeypatch.setattr(moe_suite, "Timer", Timed)
    options = {"gpu_events": None, "clock": lambda: now[0]}
    return lambda b: moe_suite.measure_case(b, environment(), EFFORT, **options)


FEW, MANY = "gather_glu + gather_qmv", "gather_qmm_glu + gather_qmm"


@pytest.mark.parametrize("tokens, kernels", [(2, FEW), (40, MANY)])
def test_a_row_is_complete_and_checked(tokens, kernels, measured):
    row = measured(replace(SMALL, tokens=tokens))
    record.validate(row)
    assert row["kernel"] == kernels and row["ratio"] == pytest.approx(3)
    assert row["experts"] == "4/2" and row["M"] == tokens
    assert "wrong" not in row["comparable"]
    assert "4/2" in moe_suite.table([row]).columns[1].cells


def test_kernels_are_named_in_the_order_of_a_block(measured):
    kernel_route(Gather(SMALL.down, 4, 6))
    assert measured(replace(SMALL, tokens=3))["kernel"] == FEW


def test_a_wrong_kernel_is_told(monkeypatch, measured):
    right = moe_suite._product
    monkeypatch.setattr(moe_suite, "_product", lambda *a: 1.1 * right(*a))
    assert "wrong result" in measured(SMALL)["comparable"]


def test_default_cases_and_the_cpu(sweeps, capsys):
    cases = list(moe_suite.default_cases(False))
    assert {b.tokens for b in cases} == {1, 4, 16, 64, 512, 2048}
    assert "128 experts, 1 tokens" in moe_suite.describe(cases[0])
    assert sweeps.main(["--suite", "moe"]) == 2
    assert "run on a GPU" in capsys.readouterr().err
