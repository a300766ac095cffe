"""Weights of the matrix variant: relative to a score that follows the largest one."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
import sdpa_case
import tolerance
from sdpa_case import form, poisoned
from sdpa_case import matrix_plan as plan

K_LEN = 200


def near(first: int) -> np.ndarray:
    """Scores of normal keys, all ``first`` apart from those at the end."""
    return np.random.default_rng(7).normal(size=K_LEN) + first


# Scores of a head's keys, in natural units: a float's exponent holds 88 at most.
SCORES = {
    "rising": np.linspace(-300, 300, K_LEN),
    "falling": np.linspace(300, -300, K_LEN),
    "rising a little": np.linspace(0, 12, K_LEN),
    "one is far above": np.where(np.arange(K_LEN) == 150, 200, near(0)),
    "one, the first, is": np.where(np.arange(K_LEN) == 0, 60, near(0)),
    "all are far below": near(-2000),
    "steps": near(0) + np.arange(K_LEN) // 16 * 5,
}


def with_scores(scores: np.ndarray, q_len: int = 1, bits: int = 16, **more):
    """Two query heads of a kv head; the first row of the first has these scores."""
    case = sdpa_case.case(
        heads=(2, 1), k_len=K_LEN, q_len=q_len, **form(bits, bits, 32), **more
    )
    q = np.array(case.q.astype(mx.float32))[0, 0, 0]
    keys = scores[:, None] * q / (case.scale * (q @ q))
    case.k = mx.array(keys[None, None], mx.float32).astype(case.q.dtype)
    return case


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("name", SCORES)
def test_scores_that_move(name, bits):
    case = with_scores(SCORES[name], bits=bits)
    out = case.check(plan(case), [poisoned(c) for c in case.caches()])
    assert mx.isfinite(out).all().item()


@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("name", ["rising", "one is far above", "steps"])
def test_a_row_moves_alone(name, bits):
    """Rows with scores that rise, fall and stay have the bits of calls alone."""
    case = with_scores(SCORES[name], q_len=3, bits=bits)
    factors = mx.array([1, -1, 0.01])[:, None]
    case.q = (case.q[:, :, :1] * factors).astype(case.q.dtype)
    out = case.check(plan(case))
    for i in range(3):
        problem = replace(case.problem, q_len=1)
        one = replace(case, problem=problem, q=case.q[:, :, i : i + 1])
        tolerance.assert_bits(one.run(plan(one)), out[:, :, i : i + 1])


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_scores_beyond_the_digits_of_a_float(bits, mask):
    """Rounding a product loses more than 2^15 there: the largest score gets all."""
    mask = mx.ones((3, K_LEN), mx.bool_) if mask else None
    case = sdpa_case.case(
        heads=(2, 1),
        k_len=K_LEN,
        q_len=3,
        mask=mask,
        dtype="bfloat16",
        **form(bits, bits, 32),
    )
    case.k = case.k * 10000
    case.q = case.q * mx.array([1e6, 1e-4, 2000], mx.bfloat16)[:, None]
    out = case.check(plan(case))
    for i in range(3):
        extras = {"mask": mask[:1]} if mask is not None else {}
        problem = replace(case.problem, q_len=1)
        q = case.q[:, :, i : i + 1]
        one = replace(case, problem=problem, q=q, extras=extras)
        tolerance.assert_bits(one.run(plan(one)), out[:, :, i : i + 1])


@pytest.mark.parametrize("causal,window", [(True, 0), (True, 50), (False, 70)])
def test_rows_that_see_less_move_alone(causal, window):
    """A row has the same bits where its step is cut off and where it is not."""
    case = with_scores(SCORES["rising"], 4, 8, causal=causal, window=window)
    case.q = mx.repeat(case.q[:, :, :1], 4, 2)
    out = case.check(plan(case))
    for i in range(4):
        n = K_LEN - 3 + i if causal else K_LEN
        problem = replace(case.problem, q_len=1)
        one = replace(case, problem=problem, q=case.q[:, :, i : i + 1])
        if not causal and i < 3:
            continue  # its window ends elsewhere
        cut = [tuple(x[:, :, :n] for x in cache) for cache in case.caches()]
        tolerance.assert_bits(one.run(plan(one), cut), out[:, :, i : i + 1])


@pytest.mark.parametrize("bits", [8, 4])
def test_biases_of_keys_keep_their_digits(bits):
    """Keys that differ by a constant each, which the rest of a key makes up for."""
    case = sdpa_case.case(heads=(1, 1), k_len=K_LEN, **form(bits, bits, 32))
    q = np.array(case.q.astype(mx.float32))[0, 0, 0]
    levels = np.random.default_rng(8).uniform(-40, 40, (K_LEN, 1))
    keys = levels * (1 - q.sum() / (q @ q) * q)
    case.k = mx.array(keys[None, None], mx.float32).astype(case.k.dtype)
    out = np.array(case.check(plan(case)).astype(mx.float32))
    right = case.oracle()[0]
    # No more than the rounding of the answer, and some of weights to halves.
    assert np.abs(out - right).max() <= 2**-8 * np.abs(right).max()


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_have_the_bits_of_any_layout(bits):
    """Rows one behind the other, keys of two heads in turn, and words out of line."""
    case = sdpa_case.case(q_len=2, k_len=150, causal=True, **form(bits, bits, 32))
    caches = case.caches()
    want = case.check(plan(case), caches)

    def by_key(a: mx.array) -> mx.array:
        return mx.contiguous(a.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)

    def moved(a: mx.array) -> mx.array:
        flat = mx.concatenate([mx.zeros(1, a.dtype), a.flatten()])
        mx.eval(flat)
        return flat[1:].reshape(a.shape)

    for change in (by_key, moved):
        views = [tuple(map(change, cache)) for cache in caches]
        tolerance.assert_bits(case.run(plan(case), views), want)
