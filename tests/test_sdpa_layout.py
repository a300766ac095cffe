"""Decode attention reads caches and queries wherever they lie."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
import ref
import tolerance
from hypothesis import given, settings
from hypothesis import strategies as st
from sdpa_case import case, matrix_plan, random_mask, small_plan

from mlx_phase.launch import matmul

CODES = dict(k_bits=8, v_bits=4, v_group=32)


def in_cache(a: mx.array, room: int = 40) -> mx.array:
    """A view of a longer buffer, as KVCache gives it; the rest is NaN (or all ones)."""
    B, H, k_len, D = a.shape
    fill = 0xFFFFFFFF if a.dtype == mx.uint32 else float("nan")
    tail = mx.full((B, H, room, D), fill, a.dtype)
    buffer = mx.concatenate([a, tail], axis=2)
    mx.eval(buffer)
    return buffer[..., :k_len, :]


@pytest.mark.parametrize("form", [{}, CODES], ids=["plain", "codes"])
@pytest.mark.parametrize("k_len", [1, 70, 300])
def test_caches_are_read_in_place(form, k_len):
    """Slices of a cache whose unused rest is NaN, and q as a transposed view."""
    base = case(k_len=k_len, batch=2, **form)
    out = base.check()
    caches = [
        in_cache(c) if isinstance(c, mx.array) else tuple(map(in_cache, c))
        for c in base.caches()
    ]
    swapped = mx.contiguous(base.q.swapaxes(1, 2))
    moved = replace(base, q=swapped.swapaxes(1, 2))
    tolerance.assert_bits(moved.run(caches=caches), out)


def test_a_mask_may_run_backwards():
    mask = random_mask((1, 4, 2, 70))[:, ::-1, ::-1, ::-1]
    base = case(q_len=2, k_len=70, mask=mask)
    whole = replace(base, extras={"mask": mx.contiguous(mask)})
    tolerance.assert_bits(base.run(), whole.run())


def backwards(a: mx.array) -> mx.array:
    """The same rows in a view that steps back along heads and rows."""
    turned = mx.contiguous(a[:, ::-1, ::-1])
    mx.eval(turned)
    return turned[:, ::-1, ::-1]


@pytest.mark.parametrize("matrix", [False, True], ids=["split", "matrix"])
@pytest.mark.parametrize("form", [{}, CODES], ids=["plain", "codes"])
def test_queries_and_caches_may_run_backwards(form, matrix):
    base = case(q_len=2, k_len=150, causal=True, **form)
    plan = matrix_plan(base) if matrix else small_plan(base.problem)
    caches = [
        backwards(c) if isinstance(c, mx.array) else tuple(map(backwards, c))
        for c in base.caches()
    ]
    turned = replace(base, q=backwards(base.q))
    tolerance.assert_bits(turned.run(plan, caches), base.check(plan))


def test_no_copy_of_the_cache():
    base = case(k_len=600)
    caches = [in_cache(c) for c in base.caches()]
    mx.eval(base.run(caches=caches))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    out = base.run(caches=caches)
    mx.eval(out)
    assert mx.get_peak_memory() - before < caches[0].nbytes / 2
    base.check(caches=caches)


@pytest.mark.parametrize("off", [1, 2, 4])
def test_misaligned_rows(off):
    """Rows that start anywhere: a slice along the last axis."""
    base = case(k_len=70)
    out = base.run()

    def shifted(a: mx.array) -> mx.array:
        pad = mx.full((*a.shape[:-1], 3 + off), float("nan"), a.dtype)
        buffer = mx.concatenate([pad[..., :off], a, pad[..., off:]], axis=-1)
        mx.eval(buffer)
        return buffer[..., off : off + a.shape[-1]]

    moved = replace(base, q=shifted(base.q))
    caches = [shifted(c) for c in base.caches()]
    tolerance.assert_bits(moved.run(caches=caches), out)


@pytest.mark.parametrize("form", [{}, dict(k_bits=8, v_bits=8)], ids=["plain", "codes"])
def test_narrow_loads_give_the_same_bits(form):
    base = case(k_len=70, **form)
    out = base.run()
    matmul.narrow_loads(True)
    try:
        tolerance.assert_bits(base.run(), out)
    finally:
        matmul.narrow_loads(False)


def test_another_last_axis_is_never_a_wrong_number():
    base = case(k_len=70)
    turned = mx.contiguous(base.k.swapaxes(2, 3)).swapaxes(2, 3)
    assert mx.isnan(base.run(caches=[turned, base.v])).all()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_shape_mask_and_stride(data):
    draw = data.draw
    form = draw(
        st.sampled_from(
            [{}, dict(causal=True), dict(mask="bool"), dict(window=7, mask="float32")]
        )
    )
    kv_heads, batch = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    heads = (kv_heads * draw(st.integers(1, 3)), kv_heads)
    q_len, k_len = draw(st.integers(1, 4)), draw(st.integers(1, 130))
    form = dict(form)
    if kind := form.pop("mask", None):
        full = (batch, heads[0], q_len, k_len)
        shape = [draw(st.sampled_from([1, n])) for n in full]
        form["mask"] = random_mask(shape, kind, seed=draw(st.integers(0, 9)))
    base = case(heads=heads, q_len=q_len, k_len=k_len, batch=batch, **form)
    caches = base.caches()
    if draw(st.booleans()):
        caches = [in_cache(c, draw(st.integers(1, 9))) for c in caches]
    if draw(st.booleans()):
        # As a projection leaves it: [B, k_len, Hkv, D] seen with heads first.
        caches = [mx.contiguous(c.swapaxes(1, 2)).swapaxes(1, 2) for c in caches]
    base.check(small_plan(base.problem), caches)


def test_output_is_laid_out_as_models_want_it():
    base = case(q_len=3, k_len=70)
    out = base.run()
    view = memoryview(out.astype(mx.float32).transpose(0, 2, 1, 3))
    assert out.shape == (1, 4, 3, 64) and view.c_contiguous
    np.testing.assert_array_equal(ref.to_numpy(out), ref.to_numpy(mx.contiguous(out)))


def test_lens_of_each_batch_row():
    """A cache of fixed length: keys of row b end at lens[b], behind it is NaN."""
    for lens in ([1, 70], [46, 47], [150, 97]):
        base = case(q_len=2, k_len=150, batch=2, causal=True, lens=lens)
        there = mx.arange(150)[:, None] < base.extras["lens"][:, None, None, None]
        k = mx.where(there, base.k, float("nan")).astype(base.k.dtype)
        replace(base, k=k).check(small_plan(base.problem))
