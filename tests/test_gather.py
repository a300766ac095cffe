"""Experts' kernels against the oracle, launched directly: the kernel or an error."""

from dataclasses import replace

import cases
import gather_case as case
import mlx.core as mx
import numpy as np
import pytest
import tolerance

from mlx_phase import chip
from mlx_phase.launch.matmul import device_chip
from mlx_phase.plan_gather import plan_gather, stays_stock, supports_gather
from mlx_phase.problem import Gather, Matmul

K = 192
# All bits, groups and modes; a kernel a row, so not all pairs of them.
FORMATS = cases.FORMATS[0:18:4] + [cases.FORMATS[11]] + cases.FORMATS[-3:]
NAN = float("nan")


def check(y: mx.array, x: mx.array, rows, rhs, q: case.Experts) -> None:
    name = str(x.dtype).split(".")[-1]
    assert y.dtype == x.dtype
    right, dense = (case.products(x, rows, rhs, q, d) for d in (None, name))
    tolerance.assert_close(y.reshape(right.shape), right, dense, name)


@pytest.mark.parametrize("i", range(len(FORMATS)))
def test_every_format(i):
    form, dtype = FORMATS[i], cases.DTYPES[i % 3]
    wide = 5 * form[2] + 32 * (form[2] == 16)
    q = case.experts(3, 37, wide, form, dtype)
    x = cases.activations(2, wide, dtype)
    rhs = [2, 0, 2, 2]
    check(case.run(x, rhs, q, each=2), x, [0, 0, 1, 1], rhs, q)


@pytest.mark.parametrize("N", [4, 5, 7, 8, 33])
def test_every_tail_of_n(N):
    q = case.experts(4, N, K)
    x = cases.activations(3, K)
    rhs = mx.array([[3, 1, 1], [0, 3, 2], [1, 1, 0]], mx.int64)
    y = case.run(x, rhs, q, each=3)
    assert y.shape == (3, 3, 1, N)
    check(y, x, np.arange(9) // 3, rhs, q)


def test_a_bias_and_rows_that_an_array_names():
    q = case.experts(4, 37, K, bias=True)
    x = cases.activations(3, K)
    lhs, rhs = [2, 0, 0, 1, 2], [1, 3, 1, 1, 0]
    check(case.run(x, rhs, q, lhs=lhs), x, lhs, rhs, q)


def poisoned(q: case.Experts, used: set[int]) -> case.Experts:
    """NaN where nothing may be read: scales, biases and bias of the other experts."""
    bad = [
        w if e in used else replace(w, scales=w.scales * NAN, biases=w.biases * NAN)
        for e, w in enumerate(q.parts)
    ]
    if q.bias is None:
        return case.Experts(bad)
    seen = mx.array([[e in used] for e in range(len(bad))])
    return case.Experts(bad, mx.where(seen, q.bias, NAN))


def test_experts_of_nobody_are_not_read():
    q = case.experts(4, 9, K)
    x = cases.activations(2, K)
    rhs = [3, 1, 1, 3]
    y = case.run(x, rhs, q, each=2)
    tolerance.assert_bits(case.run(x, rhs, poisoned(q, {1, 3}), each=2), y)


def test_one_expert_strided_x_and_an_index_too_large():
    q = case.experts(1, 8, K)
    x = cases.poisoned(cases.activations(10, K))[::2]
    check(case.run(x, [0] * 5, q), x, range(5), [0] * 5, q)
    # A wrong index must not read elsewhere.
    tolerance.assert_bits(case.run(x, [7] * 5, q), case.run(x, [0] * 5, q))


@pytest.mark.parametrize("share, ks", [(2, 2), (4, 1)])
def test_pairs_that_share_a_read_have_the_bits_of_single_ones(share, ks):
    q, rhs = case.experts(4, 18, 2112), [1, 1, 1, 1, 1, 3, 3, 3, 2, 2]
    x = cases.activations(len(rhs), 2112)
    g = case.problem(x, len(rhs), q, sorted=True)
    p = replace(plan_gather(g, device_chip()), k_simdgroups=ks, simdgroups=2 * ks)
    y = case.run(x, rhs, q, sorted=True, p=replace(p, share=share))
    check(y, x, range(len(rhs)), rhs, q)
    alone = replace(p, share=1)
    tolerance.assert_bits(y, case.run(x, rhs, q, p=alone))
    for i in (slice(0, 1), slice(8, 9)):
        tolerance.assert_bits(y[i], case.run(x[i], rhs[i], q, p=alone))


GLU = (
    ("float32", ("affine", 4, 64), {"activation": "silu"}, False),
    ("bfloat16", ("affine", 6, 32), {"activation": "gelu_approx"}, True),
    ("float32", ("mxfp4", 4, 32), case.CLIPPED, True),
)


def glu_close(y, x, rows, rhs, gate, up, activation: str) -> None:
    name = str(x.dtype).split(".")[-1]
    right, dense = (
        case.gated(*(case.products(x, rows, rhs, q, d) for q in (gate, up)), activation)
        for d in (None, name)
    )
    tolerance.assert_close(y.reshape(right.shape), right, dense, name)


@pytest.mark.parametrize("dtype, form, kind, bias", GLU)
@pytest.mark.parametrize("N", [9, 34])
def test_glu(dtype, form, kind, bias, N):
    gate, up = (case.experts(3, N, K, form, dtype, bias, s) for s in (0, 9))
    # Far out, where an exponential overflows and values are clipped.
    x = cases.activations(2, K, dtype) * 20
    rhs = [2, 0, 0, 2]
    y = case.run(x, rhs, gate, up, each=2, **kind)
    glu_close(y, x, [0, 0, 1, 1], rhs, gate, up, kind["activation"])
    tolerance.assert_bits(case.run(x[1:], rhs[2:], gate, up, each=2, **kind), y[2:])


@pytest.mark.parametrize("kind", GLU[::2])
def test_nan_is_not_clipped_away(kind):
    dtype, form, kind, bias = kind
    gate, up = (case.experts(3, 9, K, form, dtype, bias, s) for s in (0, 9))
    x = cases.activations(2, K, dtype)
    x[1] = NAN
    y = case.run(x, [2, 0, 0, 2], gate, up, each=2, **kind)
    bad = np.isnan(np.array(y)).reshape(2, -1)
    assert bad[1].all() and not bad[0].any()


def test_plan_is_the_same_for_all_few_pairs():
    for device in ("h200", "m1", "m4-max"):
        for N, wide in [(64, 512), (768, 2048), (2880, 2880), (14336, 4096)]:
            m = Matmul(1, N, wide)
            plans = [
                plan_gather(Gather(m, 32, n * 4, 4), chip.lookup(device))
                for n in range(1, 17)
            ] + [plan_gather(Gather(m, 32, 64, sorted=True), chip.lookup(device))]
            assert len({p.k_simdgroups for p in plans}) == 1
            assert all(p.exact and p.kernel == "gather_qmv" for p in plans)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"pairs": 257}, "more than 256 pairs"),
        ({"experts": 1, "matmul": Matmul(1, 4, 64)}, "too few"),
        ({"matmul": Matmul(1, 2, 512)}, "too few"),
        ({"matmul": Matmul(2, 8, 64)}, "2 rows of x"),
        ({"matmul": Matmul(1, 8, 64, mode="none")}, "plain weights"),
        ({"matmul": Matmul(1, 8, 64, group_size=16)}, "group 16"),
        ({"scattered": True}, "rows named by arrays"),
        ({"activation": "silu", "each": 0}, "rows named by arrays"),
    ],
)
def test_refusals_say_why(change, words):
    g = replace(Gather(Matmul(1, 64, 128), 8, 16, 2), **change)
    assert words in supports_gather(g)
    with pytest.raises(ValueError, match=words):
        plan_gather(g, chip.lookup("m1"))


def test_stock_keeps_what_it_is_better_at():
    few = Gather(Matmul(1, 64, 128), 8, 16, 2)
    many = replace(few, pairs=512, each=1, sorted=True)
    floats = replace(many, matmul=replace(many.matmul, x_dtype="float32"))
    for device, g, words in [
        ("m5", few, None), ("m5", many, "neural accelerators"), ("m4-max", many, None),
        ("h200", floats, "no tensor cores"), ("m1", floats, None),
        ("m1", replace(few, pairs=512), "not sorted"),
        ("h200", few, None), ("h200", many, None), ("a100", many, "not timed"),
    ]:  # fmt: skip
        why = stays_stock(g, chip.lookup(device))
        assert (words is None and why is None) or words in why, device
