"""Runs of chunks: added up by the threadgroup that takes them, or in the reduce."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
import ref
import sdpa_case
import tolerance
from sdpa_case import form, poisoned
from sdpa_case import matrix_plan as plan
from test_sdpa_reduce import right, states

from mlx_phase.launch import attention
from mlx_phase.launch.attention import fold_of
from mlx_phase.launch.attention_reduce import merge
from mlx_phase.launch.matmul import device_chip
from mlx_phase.plan_attention import plan_sdpa
from mlx_phase.problem import Sdpa

MANY = 10**6  # threadgroups that no runs fill: states are stored apart

CASES = {
    "plain": dict(causal=True),
    "one query": dict(q_len=1, dims=(128, 128)),
    "a window begins in a run": dict(causal=True, window=170),
    "a window leaves runs empty": dict(causal=True, window=20),
    "lens end in a run, and leave runs empty": dict(batch=2, lens=(33, 330)),
    "no key": dict(batch=2, lens=(0, 330)),
    "bool mask": dict(mask=mx.array(np.arange(330) % 70 < 3)[None, None, None]),
    "sinks": dict(sinks=True),
    "float32": dict(dtype="float32"),
    "8 bits": dict(causal=True, **form(8, 8, 64)),
    "4 bits": dict(causal=True, **form(4, 4, 32)),
    "mixed": dict(batch=2, lens=(200, 90), **form(16, 8, 32)),
}


@pytest.fixture(autouse=True)
def small_rings(monkeypatch):
    """These rings and runs fit into what every chip has."""
    monkeypatch.setattr(attention, "RING_AND_RUNS", 0)


def chosen(case, fold: int, threadgroups: int, rows: int = 8, chunk: int = 32):
    """A plan, and that it takes runs whole unless there are MANY threadgroups."""
    p = replace(plan(case, rows, chunk), fold=fold, threadgroups=threadgroups)
    chunks = -(-case.k.shape[2] // chunk)
    assert fold_of(case.problem, p, chunks) == (1 if threadgroups == MANY else fold)
    return p


@pytest.mark.parametrize("fold", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_runs_have_the_same_bits_whole_and_apart(name, fold):
    options = dict(heads=(8, 2), q_len=2, k_len=330) | CASES[name]
    case = sdpa_case.case(**options)
    caches = tuple(map(poisoned, case.caches()))
    out = case.check(chosen(case, fold, MANY), caches)
    for threadgroups in (1, 7):
        whole = chosen(case, fold, threadgroups)
        tolerance.assert_bits(case.run(whole, caches), out)


@pytest.mark.parametrize("last", [31, 32, 33, 63, 65, 96, 97, 127, 129, 160])
@pytest.mark.parametrize("threadgroups", [1, MANY])
def test_rows_have_the_bits_of_single_rows(last, threadgroups):
    """Four rows, whole or apart, and single ones the other way round."""
    case = sdpa_case.case(q_len=4, k_len=last, causal=True)
    caches = case.caches()
    p = replace(plan(case, 16, 32), fold=2, threadgroups=threadgroups)
    other = replace(p, rows=8, threadgroups=MANY + 1 - threadgroups)
    out = case.check(p, caches)
    for i in range(4):
        problem = replace(case.problem, q_len=1)
        one = replace(case, problem=problem, q=case.q[:, :, i : i + 1])
        cut = [a[:, :, : last - 3 + i] for a in caches]
        tolerance.assert_bits(out[:, :, i : i + 1], one.run(other, cut))


def test_many_rows():
    """Several blocks of rows, each in a threadgroup of its own."""
    case = sdpa_case.case(heads=(8, 2), q_len=10, k_len=200, causal=True)
    out = case.check(chosen(case, 2, MANY))
    for rows in (8, 16):
        tolerance.assert_bits(case.run(chosen(case, 2, 4, rows)), out)


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("threadgroups", [1, MANY])
def test_chunks_that_a_row_does_not_see_may_hold_anything(bits, threadgroups):
    """NaN in them, first and last of a run, reaches only rows that see them."""
    seen = np.ones((2, 330), bool)
    seen[0, :32] = seen[0, 96:160] = seen[0, 256:] = False
    mask = mx.array(seen)[None, None]
    case = sdpa_case.case(
        heads=(8, 2), q_len=2, k_len=330, mask=mask, **form(bits, bits, 64)
    )
    p = chosen(case, 4, threadgroups)
    want = case.check(p)
    hidden = mx.array(~seen[0])[:, None]

    def spoilt(a: mx.array) -> mx.array:
        return mx.where(hidden, float("nan"), a).astype(a.dtype)

    k, v = case.caches()
    v = spoilt(v) if bits == 16 else (v[0], *map(spoilt, v[1:]))
    out = case.run(p, (k, v))
    tolerance.assert_bits(out[:, :, 0], want[:, :, 0])
    assert mx.isnan(out[:, :, 1]).all()


def test_a_ring_and_runs_want_room(monkeypatch):
    monkeypatch.setattr(attention, "RING_AND_RUNS", 44 * 1024)
    case = sdpa_case.case(k_len=330, **form(8, 8, 64))
    p = replace(plan(case, chunk=32), fold=2, threadgroups=1)
    assert fold_of(case.problem, p, 11) == 1
    assert fold_of(case.problem, replace(p, threadgroup_bytes=48 * 1024), 11) == 2
    tolerance.assert_bits(case.run(p), case.check(replace(p, threadgroups=MANY)))


@pytest.mark.parametrize("fold,states_of", [(2, 9), (4, 5), (4, 70)])
def test_states_of_runs_alone(fold, states_of):
    """The reduce against NumPy, with empty states and an incomplete last run."""
    o, ml = states((2, 3, 2, states_of, 128), seed=7)
    ml[0, 1] = [-np.inf, 0]
    problem = Sdpa(3, 3, 128, 128, 2, 2, "float32")
    out = merge(problem, mx.array(o), mx.array(ml), None, fold)
    want = right(np.nan_to_num(o), ml)
    tolerance.assert_close(out, want, ref.round_to(want, "float32"), "float32")


@pytest.mark.cuda
@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("q_len", [1, 4, 16])
def test_runs_on_tensor_cores(bits, dim, q_len, monkeypatch):
    """As planned, of a cache with a window and one whose keys end in a run."""
    monkeypatch.undo()
    for more in (dict(window=3000), dict(lens=(7001,))):
        case = sdpa_case.case(
            heads=(32, 8), dims=(dim, dim), q_len=q_len, k_len=9001, causal=True,
            **form(bits, bits, 64), **more,
        )  # fmt: skip
        planned = plan_sdpa(case.problem, device_chip())
        fits = bits == 16 or planned.threadgroup_bytes >= attention.RING_AND_RUNS
        p = replace(planned, fold=4, threadgroups=MANY)
        assert fold_of(case.problem, p, 36) == 1
        out = case.check(p)
        for threadgroups in (8, 50):
            p = replace(p, threadgroups=threadgroups)
            assert fold_of(case.problem, p, 36) == (4 if fits else 1)
            tolerance.assert_bits(case.run(p), out)
