"""The oracle against hand-made values and MLX; comparisons against planted errors."""

import cases
import mlx.core as mx
import numpy as np
import pytest
import ref
import tolerance


@pytest.mark.parametrize("mode,bits,group_size", cases.FORMATS)
@pytest.mark.parametrize("make", [cases.exact_weights, cases.random_weights])
def test_dequantize_is_mlx(mode, bits, group_size, make):
    q = make(6, 256, mode, bits, group_size)
    ours = ref.dequantize(*q.args, **q.kwargs)
    theirs = np.array(mx.dequantize(*q.args, **q.kwargs).astype(mx.float32))
    assert np.isfinite(ours).all() and np.abs(ours).max() > 0
    np.testing.assert_array_equal(ours, theirs)


def test_unpack_by_hand():
    # 3 bits: code 10 has its low two bits in word 0 and its high bit in word 1.
    codes = [1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 5, 3]
    stream = sum(c << (3 * i) for i, c in enumerate(codes))
    words = np.array([stream >> s & 0xFFFFFFFF for s in (0, 32, 64)], np.uint32)
    assert ref.unpack(words, 3)[: len(codes)].tolist() == codes
    assert ref.unpack(np.array([0x76543210], np.uint32), 4).tolist() == list(range(8))
    assert ref.unpack(np.zeros((2, 18), np.uint32), 3).shape == (2, 192)


def test_small_floats_by_hand():
    assert ref.decode_e2m1(np.array([0, 1, 7, 9, 15])).tolist() == [0, 0.5, 6, -0.5, -6]
    e4m3 = ref.decode_e4m3(np.array([0x01, 0x08, 0x38, 0x7E, 0xB8]))
    assert e4m3.tolist() == [2**-9, 2**-6, 1.0, 448.0, -1.0]
    assert np.isnan(ref.decode_e4m3(np.array([0x7F, 0xFF]))).all()
    assert ref.decode_e8m0(np.array([0, 127, 130])).tolist() == [2.0**-127, 1, 8]


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_round_to_is_mlx(dtype):
    a = np.random.default_rng(0).normal(size=4096).astype(np.float32)
    a[:3] = [np.nan, np.inf, -0.0]
    want = mx.array(a).astype(getattr(mx, dtype)).astype(mx.float32)
    np.testing.assert_array_equal(ref.round_to(a, dtype), np.array(want))


def test_oracle_beats_half_precision_sums():
    # All codes 15, x = 1/64, K = 4096: stock's bf16 sum stops at 64, right is 960.
    q = cases.Weights(
        mx.full((2, 512), 0xFFFFFFFF, mx.uint32),
        mx.ones((2, 64), mx.bfloat16),
        mx.zeros((2, 64), mx.bfloat16),
        64,
        4,
    )
    x = mx.full((1, 4096), 1 / 64, dtype=mx.bfloat16)
    assert ref.quantized_matmul(x, *q.args, **q.kwargs).tolist() == [[960.0, 960.0]]
    dense = ref.dense(x, ref.dequantize(*q.args, **q.kwargs), "bfloat16")
    assert dense.tolist() == [[960.0, 960.0]]


def test_tolerance_finds_planted_errors():
    right = np.array([[1.0, np.nan, np.inf, 4.0]], np.float32)
    tolerance.assert_close(right, right, right, "float32")
    for at, value in ((0, np.nan), (1, 0.0), (2, -np.inf), (2, 1.0), (3, 4.001)):
        wrong = right.copy()
        wrong[0, at] = value
        with pytest.raises(AssertionError):
            tolerance.assert_close(wrong, right, right, "float32")
    with pytest.raises(AssertionError):
        tolerance.assert_close(right[:, :2], right, right, "float32")
    # The dense product's own error widens the limit, twice.
    near = right + np.array([[0, 0, 0, 0.001]], np.float32)
    off = right + np.array([[0, 0, 0, 0.0015]], np.float32)
    tolerance.assert_close(off, right, near, "float32")


def test_bits_tell_negative_results_apart():
    a = mx.array([1.0, float("nan")])
    tolerance.assert_bits(a, mx.array([1.0, float("nan")]))
    with pytest.raises(AssertionError):
        tolerance.assert_bits(a, mx.array([1.0 + 2**-23, float("nan")]))
    with pytest.raises(AssertionError):
        tolerance.assert_bits(a, a.astype(mx.float16))


@pytest.mark.parametrize("mode,bits,group_size", cases.FORMATS)
def test_const_probe_is_exact(mode, bits, group_size):
    q, c = cases.const_probe(7, 256, mode, bits, group_size)
    weight = ref.dequantize(*q.args, **q.kwargs)
    np.testing.assert_array_equal(weight, np.repeat(c[:, None], 256, 1))


def test_poisoned_is_a_view_before_nan():
    x = cases.poisoned(mx.ones((1, 64)))
    assert x.shape == (1, 64) and mx.isfinite(x).all().item()
