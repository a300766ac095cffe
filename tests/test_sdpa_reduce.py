"""The merge of chunk states alone, against NumPy."""

import mlx.core as mx
import numpy as np
import pytest
import ref
import tolerance

from mlx_phase.launch import attention_reduce
from mlx_phase.launch.attention_reduce import merge
from mlx_phase.problem import Sdpa


def merged(o, ml, dtype: str = "float32", sinks=None) -> mx.array:
    """The kernel's answer for states o [B, H, q, chunks, DV] and ml [..., 2]."""
    B, H, q_len, _, DV = o.shape
    problem = Sdpa(H, H, DV, DV, q_len, B, dtype, sinks=sinks is not None)
    return merge(problem, mx.array(o), mx.array(ml), sinks)


def right(o, ml, sinks=None) -> np.ndarray:
    """sum(o e^max) / (sum(s e^max) + e^sink), 0 where nothing was seen; float64."""
    top, total = ml[..., 0].astype(np.float64), ml[..., 1].astype(np.float64)
    high = top.max(-1, keepdims=True)
    if sinks is not None:
        sink = ref.to_numpy(sinks).astype(np.float64)[:, None, None]
        high = np.maximum(high, sink)
    high = np.where(np.isfinite(high), high, 0)
    w = np.exp(top - high)
    bottom = (w * total).sum(-1, keepdims=True)
    if sinks is not None:
        bottom = bottom + np.exp(sink - high)
    up = (np.where(w[..., None] > 0, o, 0) * w[..., None]).sum(-2)
    return up / np.where(bottom == 0, 1, bottom)


def states(shape, seed=0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, *shape])
    o = rng.normal(size=shape).astype(np.float32)
    top = rng.normal(size=shape[:-1]) * 20
    ml = np.stack([top, rng.uniform(1, 100, shape[:-1])], -1).astype(np.float32)
    empty = rng.random(shape[:-1]) < 0.3
    ml[empty] = [-np.inf, 0]
    o[empty] = np.nan  # the o of no keys is not written, so it must not be read
    return o, ml


@pytest.mark.parametrize(
    "dtype,DV,chunks",
    [
        ("float32", 64, 1),
        ("bfloat16", 72, 2),
        ("float16", 128, 300),
        ("bfloat16", 512, 9),
    ],
)
@pytest.mark.parametrize("sinks", [False, True])
def test_merge(dtype, DV, chunks, sinks):
    o, ml = states((2, 3, 2, chunks, DV))
    s = mx.array([0.5, -30.0, 25.0]).astype(getattr(mx, dtype)) if sinks else None
    out = merged(o, ml, dtype, s)
    want = right(np.nan_to_num(o), ml, s)
    tolerance.assert_close(out, want, ref.round_to(want, dtype), dtype)


def state(o, top, total):
    return np.full(64, o, np.float32), np.array([top, total], np.float32)


EMPTY = state(np.nan, -np.inf, 0)


@pytest.mark.parametrize(
    "parts,want",
    [
        ([EMPTY, EMPTY], 0.0),
        ([EMPTY, state(5, 0, 1)], 5.0),
        ([state(5, 0, 1), EMPTY], 5.0),
        ([EMPTY, state(10, -3, 4), EMPTY, EMPTY], 2.5),
        ([state(1, 0, 1), state(3, 0, 1)], 2.0),
        ([state(7, 80, 1), state(9, -80, 1)], 7.0),
    ],
)
def test_empty_states(parts, want):
    o = np.stack([p[0] for p in parts])[None, None, None]
    ml = np.stack([p[1] for p in parts])[None, None, None]
    assert (merged(o, ml) == want).all()
    if want == 0:
        assert (merged(o, ml, sinks=mx.array([2.0])) == 0).all()


def test_empty_chunks_behind_change_no_bit():
    o, ml = states((1, 2, 2, 20, 128), seed=3)
    out = merged(o, ml)
    more = np.full((1, 2, 2, 37, 128), np.nan, np.float32)
    none = np.zeros((1, 2, 2, 37, 2), np.float32)
    none[..., 0] = -np.inf
    tolerance.assert_bits(
        merged(np.concatenate([o, more], 3), np.concatenate([ml, none], 3)), out
    )


@pytest.mark.parametrize("chunks", [2, 5, 8, 16, 33, 260, 300])
def test_threads_and_early_loads_change_no_bit(chunks, monkeypatch):
    """Few chunks take few threads, many are asked for by eight."""
    o, ml = states((1, 3, 2, chunks, 128), seed=4)
    planned = attention_reduce.reduce_launch
    how = planned(Sdpa(3, 3, 128, 128, 2), 6, chunks)
    assert how["threadgroup"][0] == (
        64 if chunks <= 8 else 128 if chunks <= 16 else 256
    )
    assert dict(how["template"])["U"] == (8 if chunks > 256 else 4)
    out = merged(o, ml)

    def as_before(problem, rows, chunks, fold):
        how = planned(problem, rows, chunks, 256, fold=fold)
        args = [(k, 4 if k == "U" else v) for k, v in how["template"]]
        return how | {"template": args}

    monkeypatch.setattr(attention_reduce, "reduce_launch", as_before)
    tolerance.assert_bits(merged(o, ml), out)
