"""ops.quantized_matmul: public bugs Q1-Q7 and K1 of other projects, empties, routes."""

import cases
import mlx.core as mx
import numpy as np
import pytest
import ref
from tolerance import assert_bits, assert_close

from mlx_phase import ops

DTYPE = {name: getattr(mx, name) for name in cases.DTYPES}


def run(x, q, **kwargs):
    return ops.quantized_matmul(x, *q.args, **q.kwargs, **kwargs)


def check(x, q, dtype):
    y = run(x, q)
    weight = ref.dequantize(*q.args, **q.kwargs)
    assert y.dtype == DTYPE[dtype]
    assert_close(y, ref.matmul(x, weight), ref.dense(x, weight, dtype), dtype)


@pytest.mark.parametrize("n", [1, 8, 32, 40, 96, 100])
@pytest.mark.parametrize("m", [1, 2, 16])
def test_q1_rows_not_a_multiple_of_the_tile(m, n, engaged):
    q, c = cases.const_probe(n, 512)
    with engaged("qmv", 1):
        y = run(mx.ones((m, 512), mx.float16), q)
    assert y.shape == (m, n)
    assert np.array_equal(ref.to_numpy(y), np.tile(512 * c, (m, 1)))


@pytest.mark.parametrize("m", [17, 32])
def test_q1_rows_above_the_decode_range_take_the_prefill_kernel(m, engaged):
    q, c = cases.const_probe(40, 512, dtype="float32")
    with engaged("qmm", 1):
        y = run(mx.ones((m, 512)), q)
    assert np.array_equal(ref.to_numpy(y), np.tile(512 * c, (m, 1)))


K_TAILS = (64, 96, 192, 320, 448, 576, 1088)


@pytest.mark.parametrize("bits", cases.AFFINE_BITS)
def test_q2_k_tails_one_hot(bits, engaged):
    for k in K_TAILS:
        q = cases.exact_weights(9, k, bits=bits, group_size=32)
        weight = ref.dequantize(*q.args, **q.kwargs)
        for at in cases.one_hot_positions(k, 32):
            with engaged("qmv", 1):
                y = run(cases.poisoned(cases.one_hot(k, at)), q)
            assert np.array_equal(ref.to_numpy(y)[0], weight[:, at]), (k, at)


@pytest.mark.parametrize("bits", cases.AFFINE_BITS)
def test_q2_k_tails_const(bits, engaged):
    for k in K_TAILS:
        q, c = cases.const_probe(9, k, bits=bits, group_size=32)
        with engaged("qmv", 1):
            y = run(cases.poisoned(mx.ones((1, k), mx.float16)), q)
        assert np.array_equal(ref.to_numpy(y)[0], k * c), k


@pytest.mark.parametrize("bits,words", [(3, 18), (5, 30), (6, 36)])
def test_q3_codes_across_word_borders(bits, words, engaged):
    q = cases.exact_weights(8, 192, bits=bits)
    assert q.w.shape == (8, words)
    weight = ref.dequantize(*q.args, **q.kwargs)
    x = mx.concatenate([cases.one_hot(192, at) for at in (10, 11, 191)])
    with engaged("qmv", 1):
        y = run(x, q)
    assert np.array_equal(ref.to_numpy(y), weight[:, [10, 11, 191]].T)


def test_q4_more_than_32767_columns(engaged):
    q, c = cases.const_probe(32840, 128)
    with engaged("qmv", 1):
        y = run(mx.ones((16, 128), mx.float16), q)
    assert np.array_equal(ref.to_numpy(y), np.tile(128 * c, (16, 1)))


def test_q4_more_than_32767_rows_are_stock():
    q, c = cases.const_probe(16, 128, dtype="float32")
    y = run(mx.ones((32840, 128)), q)
    assert np.array_equal(ref.to_numpy(y), np.tile(128 * c, (32840, 1)))


def test_q5_views_equal_copies(engaged):
    x, q = cases.activations(2, 256), cases.random_weights(3 * 24, 256)
    copy = cases.Weights(*map(mx.array, map(np.array, q.rows(24, 48).args)), 64, 4)
    wide = mx.repeat(x, 2, axis=1)
    column = mx.contiguous(copy.scales.T).T
    with engaged("qmv", 5):
        right = run(x, copy)
        # Not evaluated before the call: layouts are not known yet.
        assert_bits(run(x, cases.random_weights(72, 256).rows(24, 48)), right)
        assert_bits(run(wide[:, ::2], copy), right)
        transposed = cases.Weights(copy.w, column, copy.biases, 64, 4)
        assert_bits(run(x, transposed), right)
        assert_bits(run(mx.contiguous(x.T).T, copy), right)
    check(x, copy, "float32")


def test_q5_broadcast_weights_are_stock():
    x, q = cases.activations(2, 256), cases.random_weights(24, 256)
    many = [mx.broadcast_to(a[None], (2, *a.shape)) for a in q.args]
    y = run(mx.stack([x, x]), cases.Weights(*many, 64, 4))
    want = ref.quantized_matmul(x, *q.args, **q.kwargs)
    assert np.allclose(ref.to_numpy(y), want[None], atol=1e-4)
    assert [r.split(":")[0] for r in ops.served().stock] == ["batched weights"]


@pytest.mark.parametrize("shape", [(3, 4, 256), (2, 3, 1, 256), (256,), (1, 1, 256)])
def test_q6_batches_equal_row_by_row(shape, engaged):
    q = cases.random_weights(40, 256, dtype="bfloat16")
    rows = int(np.prod(shape[:-1], dtype=int))
    x = cases.activations(rows, 256, "bfloat16").reshape(shape)
    with engaged("qmv"):
        y = run(x, q)
        single = [run(row[None], q) for row in x.reshape(rows, 256)]
    assert y.shape == (*shape[:-1], 40)
    assert_bits(y.reshape(rows, 40), mx.concatenate(single))
    check(x, q, "bfloat16")


def test_q7_mixed_dtypes_follow_stock():
    q = cases.random_weights(40, 256, dtype="float16")
    x = cases.activations(2, 256, "bfloat16")
    y = run(x, q)
    assert y.dtype == mx.float32
    want = ref.quantized_matmul(x, *q.args, **q.kwargs)
    assert np.allclose(ref.to_numpy(y), want, atol=1e-4)
    (reason,) = ops.served().stock
    assert "bfloat16" in reason and "float16" in reason


@pytest.mark.parametrize("mode", cases.FLOAT_MODES)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_float_modes_keep_the_dtype_of_x(mode, dtype, engaged):
    bits, group = cases.FLOAT_MODES[mode]
    q = cases.random_weights(24, 320, mode, bits, group)
    with engaged("qmv_fp", 1):
        check(cases.activations(3, 320, dtype), q, dtype)


def test_k1_variants_in_one_eval():
    x = cases.activations(1, 256)
    pairs = [
        (x.astype(DTYPE[dtype]), cases.random_weights(24, 256, bits=bits, dtype=dtype))
        for bits in (4, 8)
        for dtype in ("float16", "bfloat16")
    ]
    results = [run(*pair) for pair in pairs]
    mx.eval(results)
    for (x, q), y in zip(pairs, results, strict=True):
        weight, dtype = ref.dequantize(*q.args, **q.kwargs), str(y.dtype).split(".")[-1]
        assert_close(y, ref.matmul(x, weight), ref.dense(x, weight, dtype), dtype)
    assert len(ops.served().kernels) == 4 and not ops.served().stock


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("k", [64, 200])
def test_linear_plain_weights(dtype, k, engaged):
    x = cases.activations(2, k, dtype)
    weight = cases.activations(37, k, dtype, seed=2)
    bias = cases.activations(1, 37, dtype, seed=3)[0]
    with engaged("gemv", 1):
        y = ops.linear(x, weight)
    w = ref.to_numpy(weight)
    assert_close(y, ref.matmul(x, w), ref.dense(x, w, dtype), dtype)
    assert_bits(ops.linear(x, weight, bias), y + bias)


def test_linear_stock_and_empty():
    x, weight = cases.activations(20, 64), cases.activations(5, 64)
    near = np.array(ops.linear(x, weight)) - np.array(x @ weight.T)
    assert np.abs(near).max() < 1e-5
    mixed = ops.linear(x[:1].astype(mx.float16), weight, mx.ones(5))
    (why,) = ops.served().stock
    assert mixed.dtype == mx.float32 and "mixed dtypes" in why
    assert ops.linear(mx.zeros((0, 64)), weight, mx.ones(5)).shape == (0, 5)
    assert ops.linear(mx.zeros((2, 0)), mx.zeros((5, 0))).tolist() == [[0] * 5] * 2


@pytest.mark.parametrize("shape", [(0, 128), (2, 0, 128)])
@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_o1_no_rows_launch_nothing(shape, mode, no_stock):
    q = cases.random_weights(32, 128, mode, 4, 32)
    for dtype in DTYPE.values():
        y = run(mx.zeros(shape, dtype), q)
        mx.eval(y)
        assert y.shape == (*shape[:-1], 32)
        # Affine promotes with the float32 scales, as stock does.
        assert y.dtype == (mx.float32 if mode == "affine" else dtype)
    assert not ops.served()


def test_o1_no_columns_and_no_k(no_stock):
    none = mx.zeros((0, 2), mx.float16)
    x = mx.ones((3, 128), mx.float16)
    y = ops.quantized_matmul(x, mx.zeros((0, 16), mx.uint32), none, none)
    assert y.shape == (3, 0) and y.dtype == mx.float16
    none = mx.zeros((5, 0), mx.float16)
    y = ops.quantized_matmul(x[:, :0], mx.zeros((5, 0), mx.uint32), none, none)
    assert y.tolist() == [[0] * 5] * 3
    batch = [mx.zeros((2, 0, n), t) for n, t in ((16, mx.uint32), (2, mx.float16))]
    y = ops.quantized_matmul(x, batch[0], batch[1], batch[1])
    assert y.shape == (2, 3, 0)


def test_o3_layout_is_the_launchers_business():
    # Python cannot ask an array for its strides, so ops must not pretend to.
    assert not [n for n in dir(mx.array) if "stride" in n or "contig" in n]


def test_transpose_false_and_stream_are_stock():
    q = cases.random_weights(128, 64)
    x = cases.activations(2, 128)
    y = ops.quantized_matmul(x, *q.args, transpose=False)
    want = ref.to_numpy(x) @ ref.dequantize(*q.args, **q.kwargs)
    assert np.allclose(ref.to_numpy(y), want, atol=1e-4)
    y = run(x[:, :64], q, stream=mx.cpu)
    assert y.shape == (2, 128) and len(ops.served().stock) == 2


def bad_inputs():
    q = cases.random_weights(32, 128)
    w, s, b = q.args
    x = mx.ones((2, 128))
    fp = cases.random_weights(32, 128, "mxfp4", 4, 32)
    return {
        "biases are missing": (x, w, s),
        "group_size 48": (x, w, s, b, True, 48),
        "bits 7": (x, w, s, b, True, 64, 7),
        "unknown mode 'foo'": (x, w, s, b, True, 64, 4, "foo"),
        "group_size 64 with mode 'mxfp4'": (x, w, s, b, True, 64, 4, "mxfp4"),
        "scales have shape": (x, w, s[:16], b[:16]),
        "they must be (32, 4)": (x, w, s, b, True, 32),
        "scales (32, 2) and biases (16, 2)": (x, w, s, b[:16]),
        "K = 128": (x[:, :64], w, s, b),
        "w is int32": (x, w.astype(mx.int32), s, b),
        "w has shape (16,)": (x, w[0], s[0], b[0]),
        "x has no dimension": (mx.array(1.0), w, s, b),
        "scales are int32": (x, w, s.astype(mx.int32), b.astype(mx.int32)),
        "scales are float32": (x, w, mx.ones((32, 4)), None, True, 32, 4, "mxfp4"),
        "biases given": (x, *fp.args[:2], b, True, 32, 4, "mxfp4"),
        "x is int32": (x.astype(mx.int32), *fp.args, True, 32, 4, "mxfp4"),
        "x is complex64": (x.astype(mx.complex64), w, s, b),
    }


@pytest.mark.parametrize("message", bad_inputs())
def test_bad_input_is_one_value_error(message, no_stock):
    with pytest.raises(ValueError) as error:
        ops.quantized_matmul(*bad_inputs()[message])
    text = str(error.value)
    assert message in text.replace("mlx.core.", "") and text.count("\n") == 0
    # What was wrong, then what to do.
    assert text.startswith("quantized_matmul: ") and ";" in text
    assert not ops.served()


def test_bad_types_and_bad_linear():
    q = cases.random_weights(32, 128)
    with pytest.raises(TypeError, match="x is a ndarray; pass an mx.array"):
        run(np.ones((2, 128), np.float32), q)
    with pytest.raises(ValueError, match=r"linear: x has shape \(2, 3\)"):
        ops.linear(mx.ones((2, 3)), mx.ones((5, 4)))
    with pytest.raises(ValueError, match=r"linear: bias has shape \(4,\)"):
        ops.linear(mx.ones((2, 4)), mx.ones((5, 4)), mx.ones(4))


def test_unsupported_widths_are_stock_with_a_reason():
    # Stock has 1-bit affine weights, the kernels do not.
    q = cases.Weights(
        mx.full((4, 4), 0xFFFFFFFF, mx.uint32), mx.ones((4, 2)), mx.zeros((4, 2)), 64, 1
    )
    assert run(mx.ones((1, 128)), q).tolist() == [[128.0] * 4]
    (reason,) = ops.served().stock
    assert "1-bit" in reason


def test_a_kernel_can_be_switched_off_and_on():
    q, x = cases.random_weights(24, 256), cases.activations(1, 256)
    run(x, q)
    (name,) = ops.served().kernels
    ops.disable(name, "planted")
    ops.reset_served()
    y = run(x, q)
    assert ops.served() == {f"{name} is off: planted": 1} and ops.off()
    assert np.allclose(
        ref.to_numpy(y), ref.quantized_matmul(x, *q.args, **q.kwargs), atol=1e-4
    )
    ops.enable_all()
    ops.reset_served()
    run(x, q)
    assert ops.served() == {name: 1} and not ops.off()
