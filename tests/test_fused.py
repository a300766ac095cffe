"""Fused decode launches against the oracle, launched directly: no fallback."""

import cases
import fused_case as case
import mlx.core as mx
import numpy as np
import pytest
import tolerance

from mlx_phase import chip
from mlx_phase.launch import fused
from mlx_phase.plan import Plan, plan_fused, supports_fused
from mlx_phase.problem import Matmul

K = 320
D = 32


def close(out: mx.array, want: np.ndarray, dtype: str) -> None:
    tolerance.assert_close(out, want, case.rounded(want, dtype), dtype)


def activations(B: int, L: int, dtype: str) -> mx.array:
    return cases.activations(B * L, K, dtype).reshape(B, L, K)


@pytest.mark.parametrize(
    "dtype, M, bits, group",
    [("bfloat16", 1, 4, 64), ("float16", 3, 6, 32), ("float32", 16, 3, 64)],
)
def test_add(dtype, M, bits, group):
    q = case.weights(36, K, dtype, bits, group)
    x, res = cases.activations(M, K, dtype), cases.activations(M, 36, dtype)
    y = fused.prepare_add(Matmul(M, 36, K, dtype, bits, group))(x, *q.args, res)
    close(y, case.wide(res) + case.wide(x) @ case.matrix(q).T, dtype)


@pytest.mark.parametrize("activation", fused.ACTIVATIONS)
@pytest.mark.parametrize(
    "dtype, M, eps",
    [("float32", 1, case.EPS), ("bfloat16", 5, case.EPS), ("float16", 16, None)],
)
def test_glu(activation, dtype, M, eps):
    gate, up = case.weights(36, K, dtype), case.weights(36, K, dtype, seed=1)
    # Far out, where an exponential overflows.
    x, weight = cases.activations(M, K, dtype) * 3, case.vector(K, dtype, 2)
    run = fused.prepare_glu(Matmul(M, 36, K, dtype), activation, eps)
    given = [weight] * (eps is not None)
    y = run(x, *given, *gate.args, *up.args)
    n = case.wide(x) if eps is None else case.norm(case.wide(x), case.wide(weight))

    def product(of: type) -> np.ndarray:
        g, u = (n.astype(of) @ case.matrix(q).T.astype(of) for q in (gate, up))
        return getattr(case, activation)(g) * u

    # Sums cancel, which float32 feels in any order of additions.
    dense = case.rounded(product(np.float32), dtype)
    tolerance.assert_close(y, product(np.float64), dense, dtype)


@pytest.mark.parametrize("activation", fused.ACTIVATIONS)
def test_activations_far_out_are_finite(activation):
    # gate is 1000 and -1000 times the first of x
    weight = np.zeros((4, 64), np.float32)
    weight[:, 0] = [1000, -1000, 1, 0]
    q = mx.quantize(mx.array(weight), group_size=64, bits=8)
    ones = mx.quantize(mx.eye(4, 64), group_size=64, bits=8)
    run = fused.prepare_glu(Matmul(1, 4, 64, "float32", 8, 64), activation, None)
    x = mx.zeros((1, 64)).at[0, :4].add(1.0)
    y = np.array(run(x, *q, *ones))[0]
    np.testing.assert_allclose(y[:2], [1000, 0], rtol=1e-4, atol=1e-4)


LAYOUTS = [(32, False), (16, False), (8, True), (0, False)]


@pytest.mark.parametrize("dims, traditional", LAYOUTS)
@pytest.mark.parametrize(
    "dtype, B, L, mixed, bias, eps",
    [
        ("float32", 1, 1, (4, 4, 4), False, case.EPS),
        ("bfloat16", 2, 3, (4, 4, 6), True, case.EPS),
        ("float16", 1, 16, (8, 3, 2), False, None),
    ],
)
def test_qkv(dims, traditional, dtype, B, L, mixed, bias, eps):
    sizes = (3 * D, D, D)
    qs = [
        case.weights(n, K, dtype, b, seed=i)
        for i, (n, b) in enumerate(zip(sizes, mixed, strict=True))
    ]
    x, weight = activations(B, L, dtype), case.vector(K, dtype, 5)
    biases = [case.vector(n, dtype, n) for n in sizes] if bias else []
    cs = case.angles(L, 77, D, dims, traditional)
    members = tuple(
        Matmul(B * L, n, K, dtype, b) for n, b in zip(sizes, mixed, strict=True)
    )
    run = fused.prepare_qkv(members, fused.Rotary(D, dims, traditional), eps, bias)
    arrays = [a for q in qs for a in q.args]
    given = (x, *[weight] * (eps is not None), *arrays, *biases)
    given += (mx.array(cs.astype(np.float32)),)
    q, kv = run(*given)
    both = run(*given, packed=True)
    assert both.shape == (B, sum(sizes) // D, L, D)
    case.assert_behind(both, q, kv)
    out = [q, *mx.split(kv, 2)]
    n = case.wide(x) if eps is None else case.norm(case.wide(x), case.wide(weight))
    for i, (q, y) in enumerate(zip(qs, out, strict=True)):
        want = n @ case.matrix(q).T + (case.wide(biases[i]) if bias else 0)
        want = case.heads(want, D)
        if i < 2:
            want = case.rotate(want, cs, dims, traditional)
        assert y.shape == (B, sizes[i] // D, L, D)
        close(y, want, dtype)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("dims, traditional, D", [(80, False, 80), (32, True, 48)])
def test_qk_norm(dtype, dims, traditional, D):
    q, kv = (
        cases.activations(B * h * 3, D, dtype, seed=h).reshape(B, h, 3, D)
        for B, h in ((2, 4), (4, 1))
    )
    norms = [case.vector(D, dtype, 1), case.vector(D, dtype, 2)]
    cs = case.angles(3, 500, D, dims, traditional)
    run = fused.prepare_qk_norm(dtype, fused.Rotary(D, dims, traditional), case.EPS)
    angles = mx.array(cs.astype(np.float32))
    q_out, kv_out = run(q, kv, *norms, angles)
    both = mx.concatenate([q.reshape(-1), kv.reshape(-1)]).reshape(2, 6, 3, D)
    case.assert_behind(run(both, 1, *norms, angles), q_out, kv_out)
    tolerance.assert_bits(kv_out[2:], kv[2:])
    for x, weight, y in zip((q, kv[:2]), norms, (q_out, kv_out[:2]), strict=True):
        want = case.norm(case.wide(x), case.wide(weight))
        close(y, case.rotate(want, cs, dims, traditional), dtype)


@pytest.mark.parametrize("dtype, M, K", [("float32", 3, 300), ("bfloat16", 1, 2088)])
def test_add_norm(dtype, M, K):
    x, res = (cases.activations(M, K, dtype, seed=s) for s in (1, 2))
    weight = case.vector(K, dtype, 3)
    run = fused.prepare_add_norm(dtype, K, case.EPS)
    y = run(x, weight, res)
    close(y, case.wide(res) + case.norm(case.wide(x), case.wide(weight)), dtype)
    # A row knows nothing of the others, and is NaN by itself.
    tolerance.assert_bits(run(x[-1:], weight, res[-1:]), y[-1:])
    if M > 1:
        x[1] = float("nan")
        bad = np.isnan(np.array(run(x, weight, res))).all(axis=1)
        assert bad.tolist() == [False, True, False]


def test_add_norm_keeps_float16_finite():
    x, big = mx.ones((2, 64), mx.float16), mx.full((2, 64), 65504.0, mx.float16)
    sign = mx.array([[1.0], [-1.0]], mx.float16)
    run = fused.prepare_add_norm("float16", 64, case.EPS)
    y = run(x * sign, mx.full((64,), 900.0, mx.float16), big * sign)
    assert mx.array_equal(y, big * sign).item()


@pytest.mark.parametrize(
    "simdgroups, ks, M, lean",
    [
        *((2, 1, 2, False), (2, 2, 7, False), (4, 4, 16, False), (4, 2, 5, False)),
        *((2, 1, 2, True), (8, 1, 16, True), (4, 4, 3, True), (8, 2, 5, True)),
    ],
)
def test_rows_have_the_bits_of_single_rows(simdgroups, ks, M, lean):
    """Whatever M and the tile: rows of x are computed as if alone."""
    dtype, wide_K = "bfloat16", 4096
    x = cases.activations(M, wide_K, dtype)
    weight = case.vector(wide_K, dtype, 1)
    gate, up = (case.weights(20, wide_K, dtype, seed=s) for s in (1, 2))

    def run(x: mx.array, rows: int) -> mx.array:
        m = Matmul(x.shape[0], 20, wide_K, dtype)
        groups = simdgroups if x.shape[0] > 1 else max(2, ks)
        p = Plan("qmv_glu", rows, groups, ks, 1, True, "test", lean=lean)
        return fused.prepare_glu(m, "silu", case.EPS, p)(
            x, weight, *gate.args, *up.args
        )

    whole = run(x, 2)
    for m in range(0, M, 3):
        for rows in (2, 4):
            tolerance.assert_bits(whole[m : m + 1], run(x[m : m + 1], rows))


def test_positions_have_the_bits_of_single_positions():
    dtype, L = "bfloat16", 5
    qs = [case.weights(n, K, dtype, seed=n) for n in (2 * D, D, D)]
    arrays = [a for q in qs for a in q.args]
    x, weight = activations(1, L, dtype), case.vector(K, dtype, 5)
    cs = mx.array(case.angles(L, 9, D, D, False).astype(np.float32))

    def run(x: mx.array, cs: mx.array) -> list[mx.array]:
        members = tuple(Matmul(x.shape[1], n, K, dtype) for n in (2 * D, D, D))
        rotary = fused.Rotary(D, D, False)
        return fused.prepare_qkv(members, rotary, case.EPS)(x, weight, *arrays, cs)

    with pytest.raises(ValueError, match="k has 32 rows, v 64"):
        fused.prepare_qkv(
            tuple(Matmul(1, n, K, dtype) for n in (64, 32, 64)),
            fused.Rotary(D, D, False),
            None,
        )

    whole = run(x, cs)
    for i in range(L):
        for a, b in zip(whole, run(x[:, i : i + 1], cs[i : i + 1]), strict=True):
            tolerance.assert_bits(a[:, :, i : i + 1], b)


def test_nan_stays_in_its_row():
    x = cases.activations(3, K, "float32")
    x[1] = float("nan")
    q = case.weights(36, K, "float32")
    res = mx.zeros((3, 36))
    y = fused.prepare_add(Matmul(3, 36, K, "float32"))(x, *q.args, res)
    assert np.isnan(np.array(y)).all(axis=1).tolist() == [False, True, False]


def test_slices_of_larger_arrays_are_read_right():
    dtype = "float16"
    q = case.weights(36, K, dtype)
    big = cases.activations(5, K + 8, dtype)
    x, res = big[1:4, 3 : K + 3], cases.activations(6, 36, dtype)[::2]
    y = fused.prepare_add(Matmul(3, 36, K, dtype))(x, *q.args, res)
    close(y, case.wide(res) + case.wide(x) @ case.matrix(q).T, dtype)


def test_what_is_not_supported_is_said():
    a = Matmul(1, 64, 128)
    h200 = chip.lookup("h200")
    for kernel, members, why in [
        ("qmv_add", (Matmul(1, 6, 128),), "N % 4"),
        ("qmv_add", (Matmul(17, 64, 128),), "M = 17"),
        (
            "qmv_add",
            (Matmul(1, 64, 64, bits=4, group_size=32, mode="mxfp4"),),
            "affine",
        ),
        ("qmv_glu", (a, Matmul(1, 32, 128)), "up has 32"),
        ("qmv_glu", (a, Matmul(1, 64, 128, bits=8)), "do not share"),
        ("qmv_qkv", (a, a, Matmul(1, 64, 192)), "do not share"),
    ]:
        assert why in supports_fused(kernel, members)
        with pytest.raises(ValueError, match="qmv_"):
            plan_fused(kernel, members, h200)
    mixed = (a, Matmul(1, 32, 128, bits=6), a)
    assert supports_fused("qmv_qkv", mixed) is None
