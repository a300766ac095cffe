"""gather_ops.gather_qmm: a drop-in of mx.gather_qmm that never waits for indices."""

import cases
import gather_case as case
import mlx.core as mx
import numpy as np
import pytest
import tolerance

from mlx_phase import ops
from mlx_phase.gather_ops import gather_qmm

K = 192
FORM = {"group_size": 64, "bits": 4}


def made(N: int = 37, E: int = 5):
    return case.experts(E, N, K)


def check(y, x, rows, rhs, q) -> None:
    right, dense = (case.products(x, rows, rhs, q, d) for d in (None, "float32"))
    tolerance.assert_close(y.reshape(right.shape), right, dense, "float32")


@pytest.mark.parametrize(
    "batch, pairs, rows",
    [
        ((2, 3, 1), (2, 3, 2), np.arange(12) // 2),
        ((6,), (6,), np.arange(6)),
        ((1, 1), (1, 4), np.zeros(4, int)),
        ((), (3,), np.zeros(3, int)),
    ],
)
def test_rows_are_read_in_turn(batch, pairs, rows, engaged):
    q = made()
    x = cases.activations(int(np.prod(batch)), K).reshape(*batch, 1, K)
    rhs = np.random.default_rng(0).integers(0, 5, pairs)
    with engaged("gather_qmv", 1):
        y = gather_qmm(x, *q.args, rhs_indices=mx.array(rhs, mx.uint32), **FORM)
    assert y.shape == (*pairs, 1, 37)
    assert y.shape == mx.gather_qmm(x, *q.args, rhs_indices=mx.array(rhs), **FORM).shape
    check(y, x, rows, rhs, q)


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint8, mx.int64])
def test_indices_of_any_integers_and_a_slice_of_them(dtype, engaged):
    q, x = made(), cases.activations(6, K)[:, None]
    whole = mx.array([[1, 4, 9], [0, 0, 9], [3, 2, 9]]).astype(dtype)
    lhs = mx.array([[5, 0, 9], [1, 1, 9], [0, 2, 9]]).astype(dtype)
    arrays = {"lhs_indices": lhs[:, :2], "rhs_indices": whole[:, :2]}
    with engaged("gather_qmv", 1):
        y = gather_qmm(x, *q.args, **arrays, **FORM)
    check(y, x, [5, 0, 1, 1, 0, 2], [1, 4, 0, 0, 3, 2], q)


def test_many_sorted_pairs_take_tiles(engaged):
    q, rhs = made(), np.sort(np.random.default_rng(0).integers(0, 5, 300))
    x = cases.activations(300, K)[:, None]
    arrays = {"rhs_indices": mx.array(rhs, mx.uint32), "sorted_indices": True}
    with engaged("gather_qmm", 1):
        y = gather_qmm(x, *q.args, **arrays, **FORM)
    check(y, x, range(300), rhs, q)


def test_few_pairs_are_exact_sorted_or_not(engaged):
    q, rhs = made(), mx.array([0, 0, 1, 1, 1, 1, 4, 4], mx.uint32)
    x = cases.activations(8, K)[:, None]
    with engaged("gather_qmv", 2):
        ys = [
            gather_qmm(x, *q.args, rhs_indices=rhs, sorted_indices=s, **FORM)
            for s in (True, False)
        ]
    tolerance.assert_bits(*ys)


STOCK = {
    "not sorted": lambda q: (cases.activations(257, K)[:, None], q.args, [0] * 257, {}),
    "transpose=False": lambda q: (
        mx.ones((2, 1, 37)), q.args, [0, 1], {"transpose": False}),
    "2 rows of x": lambda q: (mx.ones((2, 2, K)), q.args, [0, 1], {}),
    "mixed dtypes": lambda q: (
        cases.activations(2, K, "float16")[:, None], q.args, [0, 1], {}),
    "[E, N, words]": lambda q: (
        cases.activations(2, K)[:, None], [a[None] for a in q.args], [0, 1], {}),
    "one expert index": lambda q: (
        mx.ones((2, 1, K)), q.args, [1], {"lhs_indices": mx.array([0, 1])}),
    "index for each result": lambda q: (mx.ones((1, K)), q.args, 1, {}),
    "not read in turn": lambda q: (
        cases.activations(2, K).reshape(2, 1, K), q.args, [[0, 1], [2, 3]], {}),
}  # fmt: skip


@pytest.mark.parametrize("words", STOCK)
def test_stock_serves_the_rest_and_says_why(words):
    x, args, rhs, more = STOCK[words](made())
    ops.reset_served()
    arrays = {"rhs_indices": mx.array(rhs, mx.uint32), **more}
    y = gather_qmm(x, *args, **arrays, **FORM)
    want = mx.gather_qmm(x, *args, **arrays, **FORM)
    assert y.dtype == want.dtype and mx.array_equal(y, want).item()
    (reason,) = ops.served().stock
    assert words in reason and not ops.served().kernels


@pytest.mark.parametrize(
    "batch, pairs", [((0, 1), (0, 2)), ((2,), (0, 2)), ((3,), (0, 3))]
)
def test_empty_launches_nothing(batch, pairs):
    ops.reset_served()
    x, rhs = mx.zeros((*batch, 1, K)), mx.zeros(pairs, mx.uint32)
    y = gather_qmm(x, *made().args, rhs_indices=rhs, **FORM)
    assert y.shape == (*pairs, 1, 37) and y.dtype == mx.float32
    assert not ops.served()


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"rhs_indices": [0]}, TypeError, "rhs_indices is a list"),
        ({"rhs_indices": mx.array([0.5, 1])}, ValueError, "rhs_indices are"),
        ({"rhs_indices": mx.zeros((3,), mx.int32)}, ValueError, "do not broadcast"),
        ({"x": mx.zeros((K,))}, ValueError, "pass x of shape"),
        ({"x": mx.zeros((2, 1, K + 1))}, ValueError, "gather_qmm: x"),
        ({"biases": None}, ValueError, "gather_qmm: biases are missing"),
        ({"bits": 7}, ValueError, "bits 7"),
        ({"mode": "q4"}, ValueError, "unknown mode"),
    ],
)
def test_bad_arguments_are_named(change, error, words):
    w, scales, biases = made().args
    args = {"x": mx.zeros((2, 1, K)), "w": w, "scales": scales, "biases": biases}
    args |= {"rhs_indices": mx.array([0, 1]), **FORM, **change}
    with pytest.raises(error, match=words):
        gather_qmm(**args)
