"""Decode attention against the float64 oracle, launched directly: no fallback."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
import tolerance
from sdpa_case import case, random_mask, small_plan

from mlx_phase import chip
from mlx_phase.launch import attention
from mlx_phase.plan_attention import plan_sdpa
from mlx_phase.problem import HEAD_DIMS, Sdpa

CODES = dict(k_bits=8, v_bits=4, v_group=32)

# Each head dim, dtype and format; heads, q_len and lengths take turns. Below 64 keys
# the first kernel writes the output, above it the reduce does.
FORMS = [
    (dict(dims=(64, 64), heads=(3, 3), dtype="float32"), 300),
    (dict(dims=(72, 72), heads=(2, 1), dtype="float16"), 33),
    (dict(dims=(80, 80), heads=(3, 1), dtype="bfloat16"), 31),
    (dict(dims=(96, 96), heads=(4, 2), dtype="float32"), 40),
    (dict(dims=(112, 112), heads=(5, 1), dtype="float16"), 20),
    (dict(dims=(128, 128), heads=(8, 2), dtype="bfloat16"), 259),
    (dict(dims=(192, 192), heads=(2, 2), dtype="float16"), 17),
    (dict(dims=(192, 128), heads=(2, 2), dtype="bfloat16"), 130),
    (dict(dims=(256, 256), heads=(4, 1), dtype="bfloat16"), 129),
    (dict(dims=(512, 512), heads=(2, 1), dtype="float16"), 18),
    (dict(dims=(576, 512), heads=(3, 1), dtype="bfloat16"), 70),
    (dict(dims=(64, 64), heads=(4, 2), **CODES), 300),
    (dict(dims=(96, 96), heads=(2, 2), k_bits=4, k_group=32, dtype="float16"), 40),
    (dict(dims=(128, 128), heads=(4, 1), v_bits=8, dtype="float32"), 20),
    (dict(dims=(256, 256), heads=(2, 1), k_bits=4, v_bits=8), 30),
    (dict(dims=(576, 512), heads=(2, 1), k_bits=8, v_bits=4), 20),
]


@pytest.mark.parametrize("form,k_len", FORMS, ids=lambda v: str(v)[:70])
def test_every_head_dim_and_format(form, k_len):
    q_len = 1 + k_len % 2
    case(q_len=q_len, k_len=k_len, causal=q_len > 1, **form).check()


@pytest.mark.parametrize("k_len", [1, 2, 31, 32, 33, 63, 64, 65, 255, 256, 257, 600])
def test_every_length(k_len):
    case(k_len=k_len).check()


@pytest.mark.parametrize("q_len", [1, 3])
def test_no_keys_at_all(q_len):
    run = attention.prepare(Sdpa(4, 2, 64, 64, q_len=q_len))
    k = mx.zeros((1, 2, 0, 64), mx.bfloat16)
    out = run(mx.ones((1, 4, q_len, 64), mx.bfloat16), k, k, scale=1.0)
    assert out.shape == (1, 4, q_len, 64) and out.dtype == mx.bfloat16
    assert not out.any().item()


def tree(q_len: int, k_len: int) -> mx.array:
    """Each new token sees the prompt, its parent's line and itself."""
    seen = np.zeros((q_len, k_len), bool)
    seen[:, : k_len - q_len] = True
    for i in range(q_len):
        j = i
        while True:
            seen[i, k_len - q_len + j] = True
            if j == 0:
                break
            j = (j - 1) // 2
    return mx.array(seen)


MASKS = [
    ("tree", lambda: tree(3, 150)),
    ("bool full", lambda: random_mask((2, 4, 3, 150))),
    ("bool per batch", lambda: random_mask((2, 1, 1, 150))),
    ("bool keys", lambda: random_mask((150,))),
    ("bool of rows", lambda: random_mask((3, 1))),
    ("additive full", lambda: random_mask((2, 4, 3, 150), "float32")),
    ("additive per head", lambda: mx.array([[[0.5]], [[-2.0]], [[9.0]], [[0.0]]])),
    ("additive scalar", lambda: mx.array(3.0)),
    ("additive of q's dtype", lambda: random_mask((1, 1, 3, 150), "bfloat16")),
]


@pytest.mark.parametrize("name,mask", MASKS, ids=[m[0] for m in MASKS])
def test_masks(name, mask):
    base = case(q_len=3, k_len=150, batch=2, mask=mask())
    out = base.check(small_plan(base.problem))
    if name in ("additive scalar", "additive per head"):
        plain = replace(base, problem=replace(base.problem, mask="none"), extras={})
        near = plain.run(small_plan(base.problem))
        assert mx.abs(out.astype(mx.float32) - near.astype(mx.float32)).max() < 0.02


@pytest.mark.parametrize("kind,sinks", [("bool", False), ("float32", True)])
def test_rows_with_nothing_to_attend_are_zero(kind, sinks):
    seen = np.ones((1, 1, 3, 150), bool)
    seen[:, :, 1] = False
    mask = mx.array(seen if kind == "bool" else np.where(seen, 0, -np.inf))
    mask = mask if kind == "bool" else mask.astype(mx.float32)
    base = case(q_len=3, k_len=150, batch=2, mask=mask, sinks=sinks)
    for chunk in (46, 512):
        out = base.check(small_plan(base.problem, chunk=chunk))
        assert (out[:, :, 1] == 0).all() and not (out[:, :, 0] == 0).any()


def rows_of(values: mx.array) -> mx.array:
    """[1, 2, k_len, 64] with one value in each key's row."""
    rows = mx.broadcast_to(values.astype(mx.float32)[:, None], (1, 2, len(values), 64))
    return mx.contiguous(rows)


def uniform(k_len: int, q_len: int = 1, **form) -> mx.array:
    """Answer for q = 0 and V[j] = j: the mean position of the keys that are seen."""
    base = case(q_len=q_len, k_len=k_len, dtype="float32", heads=(2, 2), **form)
    base.q = mx.zeros_like(base.q)
    base.v = rows_of(mx.arange(k_len))
    return base.run(small_plan(base.problem))[0, 0, :, 0]


def test_window_counts_its_own_token():
    assert uniform(10, window=4).tolist() == [7.5]
    assert uniform(10, 3, window=4, causal=True).tolist() == [5.5, 6.5, 7.5]


@pytest.mark.parametrize("k_len", [1, 31, 33, 150, 1025])
def test_uniform_probe_counts_each_key_once(k_len):
    np.testing.assert_allclose(uniform(k_len)[0], (k_len - 1) / 2, rtol=2e-5)


@pytest.mark.parametrize("window,causal,q_len", [(50, True, 3), (50, False, 1)])
def test_window_leaves_out_chunks_and_steps(window, causal, q_len):
    for k_len in (20, 47, 50, 51, 96, 150):
        base = case(q_len=q_len, k_len=k_len, window=window, causal=causal)
        base.check(small_plan(base.problem))


def test_peak_probe_finds_every_key():
    base = case(k_len=150, heads=(2, 2), dtype="float32", scale=1.0)
    base.q = mx.ones_like(base.q)
    base.v = rows_of(mx.arange(150))
    for j in (1, 45, 46, 47, 91, 92, 149):
        base.k = rows_of(mx.where(mx.arange(150) == j, 10.0, 0.0))
        assert (base.run(small_plan(base.problem)) == j).all(), j


def test_half_precision_partials_would_overflow():
    base = case(k_len=512, heads=(2, 2), dtype="float16")
    base.q, base.k = mx.zeros_like(base.q), mx.zeros_like(base.k)
    base.v = mx.full(base.v.shape, 60000.0, mx.float16)
    assert (base.run() == 60000).all()
    tolerance.assert_bits(base.run(), base.run())


def test_scale_stays_float32():
    base = case(dims=(96, 96), heads=(4, 2), k_len=40, dtype="bfloat16", scale=96**-0.5)
    base.q, base.k = base.q * 30, base.k * 30
    base.check()


# Tiles that the plan may choose, and some that leave simdgroups without keys.
TILES = [
    dict(chunk=32, lanes=8, keys=4, simdgroups=1),
    dict(chunk=100, lanes=16, keys=1, simdgroups=4),
    dict(chunk=256, lanes=32, keys=2, simdgroups=2),
    dict(chunk=1024, lanes=4, keys=4, simdgroups=2),
    dict(chunk=77, lanes=16, keys=8, simdgroups=8, rows=4),
    dict(chunk=64, lanes=8, keys=8, simdgroups=2, rows=1),
]


@pytest.mark.parametrize(
    "tile,form",
    [(tile, {}) for tile in TILES] + [(tile, CODES) for tile in TILES[1::3]],
    ids=str,
)
def test_every_tile(tile, form):
    base = case(heads=(4, 1), q_len=2, causal=True, k_len=300, **form)
    base.check(small_plan(base.problem, **tile))


def test_plans_do_not_depend_on_what_changes_between_calls():
    for device in ("h200", "m1", "m4-max"):
        for dims in HEAD_DIMS:
            for bits in (16, 8):
                if bits == 8 and dims % 32:
                    continue
                group = 64 if dims % 64 == 0 else 32
                base = Sdpa(8, 2, dims, dims, k_bits=bits, k_group=group)
                # Plain keys are added in one order, however early they are loaded.
                any_of = dict(rows=0, threadgroups=0, registers=0, reason="")
                any_of |= {"ahead": True} if bits == 16 else {}
                plans = {
                    replace(plan_sdpa(p, chip.lookup(device)), **any_of)
                    for p in (
                        replace(base, q_len=q, batch=b, k_len=n)
                        for q, b, n in [(1, 1, 1), (4, 1, 9000), (16, 3, 77)]
                    )
                }
                assert len(plans) == 1 and plans.pop().exact


@pytest.mark.parametrize(
    "problem,words",
    [
        (Sdpa(4, 2, 32, 32), "head dims"),
        (Sdpa(4, 2, 128, 64), "head dims"),
        (Sdpa(4, 3, 64, 64), "multiple of 3"),
        (Sdpa(4, 2, 64, 64, q_len=17), "q_len = 17"),
        (Sdpa(4, 2, 64, 64, q_len=0), "empty"),
        (Sdpa(4, 2, 64, 64, dtype="float64"), "float64"),
        (Sdpa(4, 2, 64, 64, k_bits=6), "6-bit"),
        (Sdpa(4, 2, 72, 72, v_bits=8), "groups of 64 of 72"),
        (Sdpa(4, 2, 64, 64, mask="tree"), "tree"),
        (Sdpa(4, 2, 64, 64, window=-1), "window"),
    ],
)
def test_refusals_say_why(problem, words):
    with pytest.raises(ValueError, match=words):
        attention.prepare(problem)
