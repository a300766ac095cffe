"""Exact rows of decode attention: equal bits whatever else a call computes."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
import tolerance
from sdpa_case import CODES, case, small_plan

from mlx_phase.chip import lookup
from mlx_phase.launch import attention, attention_reduce

# Mostly float32: there a difference in the last bit of a sum is seen.
FORMS = {
    "plain": dict(dtype="float32"),
    "codes": dict(k_bits=8, v_bits=4, v_group=32, dtype="float32"),
    "codes of halves": dict(k_bits=4, v_bits=8, dtype="float16"),
    "window": dict(window=40),
}
BORDERS = (*range(4, 9), *range(42, 51), *range(90, 98), 150)


def rows_alone(base, k_len: int, plan) -> mx.array:
    """The q_len rows one by one, each over the keys that had been written by then."""
    q_len = base.problem.q_len
    outs = []
    for i in range(q_len):
        one = base.first(k_len - q_len + 1 + i, 1, at=i)
        outs.append(one.run(small_plan(one.problem) if plan is None else plan))
    return mx.concatenate(outs, axis=2)


@pytest.mark.parametrize("name", FORMS)
def test_four_rows_have_the_bits_of_four_steps(name):
    """At every k_len around the borders of chunks (46 keys) and of steps (32)."""
    base = case(q_len=4, k_len=150, causal=True, **FORMS[name])
    for k_len in BORDERS:
        part = base.first(k_len, 4)
        out = part.run(small_plan(part.problem))
        tolerance.assert_bits(out, rows_alone(base, k_len, None))


@pytest.mark.parametrize("name", ["plain", "codes"])
def test_planned_tiles_are_exact_too(name):
    """The plan's own chunk, with as many rows in registers as each call gets."""
    base = case(heads=(2, 1), q_len=4, k_len=700, causal=True, **FORMS[name])
    plan = attention.plan_sdpa(base.problem, lookup("h200"))
    one = attention.plan_sdpa(replace(base.problem, q_len=1), lookup("h200"))
    assert plan.rows != one.rows and plan.chunk == one.chunk
    for k_len in (plan.chunk + 2, 2 * plan.chunk + 1):
        out = base.first(k_len, 4).run(plan)
        tolerance.assert_bits(out, rows_alone(base, k_len, one))


def test_sixteen_rows():
    base = case(q_len=16, k_len=110, causal=True, dtype="float32")
    out = base.run(small_plan(base.problem))
    tolerance.assert_bits(out, rows_alone(base, 110, None))


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_rows_in_registers_change_no_bit(rows):
    base = case(heads=(8, 2), q_len=2, k_len=110, causal=True, dtype="float32")
    out = base.run(small_plan(base.problem))
    tolerance.assert_bits(base.run(small_plan(base.problem, rows=rows)), out)


def test_batch_rows_and_heads_have_the_bits_of_single_calls():
    for heads in ((4, 1), (4, 2)):
        base = case(
            heads=heads, q_len=3, k_len=110, batch=2, causal=True, dtype="float32"
        )
        out = base.run(small_plan(base.problem))
        G = heads[0] // heads[1]
        for b in range(2):
            for h in range(heads[1]):
                single = replace(base.problem, batch=1, q_heads=G, kv_heads=1)
                alone = replace(
                    base,
                    problem=single,
                    q=base.q[b : b + 1, h * G : h * G + G],
                    k=base.k[b : b + 1, h : h + 1],
                    v=base.v[b : b + 1, h : h + 1],
                )
                got = alone.run(small_plan(single))
                tolerance.assert_bits(out[b : b + 1, h * G : h * G + G], got)


@pytest.mark.parametrize("name", ["plain", "codes"])
def test_lens_gives_the_bits_of_the_shorter_view(name):
    lens = [1, 46, 47, 97]
    base = case(q_len=2, k_len=150, batch=4, causal=True, lens=lens, **FORMS[name])
    out = base.run(small_plan(base.problem))
    for b, n in enumerate(lens):
        alone = replace(
            base,
            problem=replace(base.problem, batch=1, lens=False),
            q=base.q[b : b + 1],
            k=base.k[b : b + 1, :, :n],
            v=base.v[b : b + 1, :, :n],
            extras={},
        )
        tolerance.assert_bits(out[b : b + 1], alone.run(small_plan(alone.problem)))


def test_masked_keys_leave_no_trace():
    """Chunks and steps that a mask hides are left out; the bits are those without."""
    base = case(q_len=1, k_len=150, dtype="float32")
    plain = base.first(60, 1)
    right = plain.run(small_plan(plain.problem))
    seen = mx.arange(150) < 60
    for mask in (seen, mx.where(seen, 0, -np.inf).astype(mx.float32)):
        kind = "bool" if mask.dtype == mx.bool_ else "additive"
        masked = replace(
            base, problem=replace(base.problem, mask=kind), extras={"mask": mask}
        )
        tolerance.assert_bits(masked.run(small_plan(masked.problem)), right)


def test_hidden_keys_are_not_read():
    """NaN under a mask at whole steps, before a window, and behind lens."""
    base = case(q_len=2, k_len=150, causal=True, window=20)
    out = base.run(small_plan(base.problem))
    there = mx.arange(150)[:, None] >= 124
    spoilt = [mx.where(there, a, float("nan")).astype(a.dtype) for a in base.caches()]
    tolerance.assert_bits(base.run(small_plan(base.problem), spoilt), out)

    mask = mx.arange(150) >= 96
    base = case(q_len=2, k_len=150, mask=mask)
    out = base.run(small_plan(base.problem))
    there = mask[:, None]
    spoilt = [mx.where(there, a, float("nan")).astype(a.dtype) for a in base.caches()]
    tolerance.assert_bits(base.run(small_plan(base.problem), spoilt), out)


def test_the_kernels_run(monkeypatch):
    """One launch where a chunk holds all keys, a second one to merge several."""
    names, real = [], attention.kernel
    for module in (attention, attention_reduce):
        monkeypatch.setattr(
            module,
            "kernel",
            lambda name, *more: names.append(name) or real(name, *more),
        )
    base = case(k_len=46)
    base.check(small_plan(base.problem))
    assert names == ["sdpa_split"]
    base = case(k_len=47, **FORMS["codes"])
    base.check(small_plan(base.problem))
    assert names[1:] == [CODES, "sdpa_reduce"]
