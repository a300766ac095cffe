"""Decode attention on matrix units as Apple chips plan it: no early loads."""

from dataclasses import replace

import mlx.core as mx
import pytest
import sdpa_case
import tolerance
from sdpa_case import form, matrix_plan, poisoned

from mlx_phase.chip import lookup
from mlx_phase.plan_attention import plan_sdpa
from mlx_phase.problem import Sdpa

PLAIN, EIGHT, FOUR = form(16, 16, 64), form(8, 8, 64), form(4, 4, 64)
FORMS = [
    ("bfloat16", (64, 64), PLAIN),
    ("float16", (128, 128), PLAIN),
    ("bfloat16", (80, 80), PLAIN),
    ("bfloat16", (128, 128), EIGHT),
    ("float16", (64, 64), EIGHT),
    ("bfloat16", (128, 128), FOUR),
    ("float16", (64, 64), form(4, 8, 32)),
]


def planned(case: sdpa_case.Case, chunk: int = 64):
    """The plan of an M4 Max, with short chunks."""
    found = plan_sdpa(case.problem, lookup("m4-max"))
    assert found.kernel.startswith("sdpa_matrix") and not found.ahead
    return replace(found, chunk=chunk, simdgroups=2)


@pytest.mark.parametrize("dtype,dims,bits", FORMS, ids=str)
def test_every_form(dtype, dims, bits):
    case = sdpa_case.case(
        heads=(16, 2), dims=dims, q_len=2, k_len=77, dtype=dtype, causal=True, **bits
    )
    out = case.check(planned(case), [poisoned(c) for c in case.caches()])
    assert mx.isfinite(out).all().item()


@pytest.mark.parametrize("bits", [PLAIN, FOUR], ids=str)
@pytest.mark.parametrize("k_len", [1, 15, 16, 33, 64, 65, 129])
def test_every_tail(k_len, bits):
    case = sdpa_case.case(heads=(8, 1), k_len=k_len, **bits)
    case.check(planned(case), [poisoned(c) for c in case.caches()])


@pytest.mark.parametrize("bits", [PLAIN, FOUR], ids=str)
def test_rows_are_those_of_single_queries(bits):
    """Two row blocks share their keys, then one has half its columns."""
    case = sdpa_case.case(heads=(8, 1), q_len=4, k_len=140, causal=True, **bits)
    whole = case.check(planned(case))
    for i in range(4):
        alone = case.first(137 + i, 1, at=i)
        tolerance.assert_bits(alone.run(planned(alone)), whole[:, :, i : i + 1])


def test_early_loads_change_no_bit():
    case = sdpa_case.case(heads=(8, 1), q_len=2, k_len=140, causal=True, window=50)
    late = planned(case)
    tolerance.assert_bits(case.run(late), case.run(replace(late, ahead=True)))


@pytest.mark.parametrize("bits", [PLAIN, EIGHT], ids=str)
def test_the_sanitizer_has_nothing_to_say(bits, monkeypatch):
    monkeypatch.setenv("MLX_PHASE_SANITIZE", "all,partial")
    mask = sdpa_case.random_mask((1, 8, 2, 70))
    case = sdpa_case.case(heads=(8, 1), q_len=2, k_len=70, mask=mask, **bits)
    case.check(planned(case), [poisoned(c) for c in case.caches()])


@pytest.mark.parametrize(
    "problem, matrix",
    [
        (Sdpa(8, 1, 64, 64), True),
        (Sdpa(8, 1, 64, 64, joint=True, lens=True), True),
        (Sdpa(8, 2, 128, 128), False),  # memory bounds the vector kernel too
        (Sdpa(8, 2, 128, 128, **EIGHT), True),
        (Sdpa(4, 2, 128, 128, **EIGHT), False),
        (Sdpa(8, 1, 256, 256), False),  # registers
        (Sdpa(8, 1, 72, 72), False),
        (Sdpa(8, 1, 64, 64, dtype="float32"), False),
    ],
    ids=str,
)
def test_which_problems_take_it(problem, matrix):
    """Whatever q_len is, or rows would not be exact."""
    for chip in ("m1", "m3-max", "m5-max"):
        plans = [
            plan_sdpa(replace(problem, q_len=n, causal=n > 1), lookup(chip))
            for n in (1, 2, 16)
        ]
        assert {p.kernel.startswith("sdpa_matrix") for p in plans} == {matrix}
        assert len({(p.chunk, p.keys, p.simdgroups, p.ahead) for p in plans}) == 1


def test_hopper_asks_early():
    found = plan_sdpa(Sdpa(8, 1, 64, 64), lookup("h200"))
    assert found.ahead and matrix_plan(sdpa_case.case()).ahead
