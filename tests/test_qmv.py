"""Decode kernels against the float32 oracle, launched directly: no fallback."""

import cases
import mlx.core as mx
import numpy as np
import pytest
import ref
import tolerance
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_phase import chip
from mlx_phase.launch import matmul
from mlx_phase.plan import Plan, plan
from mlx_phase.problem import Matmul
from mlx_phase.source import load


def run(x, q: cases.Weights, p: Plan | None = None) -> mx.array:
    """The kernel's answer under plan ``p``, or the planned one."""
    K = x.shape[-1]
    name = str(x.dtype).split(".")[-1]
    problem = Matmul(x.size // K, q.w.shape[0], K, name, q.bits, q.group_size, q.mode)
    weights = [a for a in q.args if a is not None]
    return matmul.prepare(problem, p)(x, *weights)


def check(out, x, q: cases.Weights) -> None:
    name = str(x.dtype).split(".")[-1]
    weight = ref.dequantize(*q.args, q.group_size, q.bits, q.mode)
    tolerance.assert_close(out, ref.matmul(x, weight), ref.dense(x, weight, name), name)


def other(mode: str) -> Plan:
    """A plan with the text that the CPU's own plan does not take."""
    kernel = "qmv" if mode == "affine" else "qmv_fp"
    return Plan(kernel, 4, 2, 1, 1, True, "test")


@pytest.mark.parametrize("mode,bits,group", cases.FORMATS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_every_format(mode, bits, group, dtype):
    K = 5 * group + 32 * (group == 16)
    q = cases.random_weights(37, K, mode, bits, group, dtype)
    x = cases.activations(2, K, dtype)
    out = run(x, q, other(mode) if dtype == "float16" else None)
    assert out.dtype == x.dtype
    check(out, x, q)


@pytest.mark.parametrize("mode,bits,group", cases.FORMATS)
def test_one_hot_gives_the_weight(mode, bits, group):
    K = 11 * group
    q = cases.exact_weights(9, K, mode, bits, group)
    weight = ref.dequantize(*q.args, group, bits, mode)
    for k in cases.one_hot_positions(K, group):
        out = ref.to_numpy(run(cases.one_hot(K, k), q))
        np.testing.assert_array_equal(out[0], weight[:, k], err_msg=f"k = {k}")


@pytest.mark.parametrize("N", [1, 2, 3, 4, 7, 8, 9, 32, 40, 100])
def test_const_probe_for_every_row(N):
    q, c = cases.const_probe(N, 512)
    for M in (1, 2, 16):
        out = run(mx.ones((M, 512), mx.float16), q)
        np.testing.assert_array_equal(ref.to_numpy(out), np.tile(512 * c, (M, 1)))


@pytest.mark.parametrize("mode,bits,group", [("affine", 4, 64), ("nvfp4", 4, 16)])
@pytest.mark.parametrize("M", range(1, 17))
def test_rows_have_the_bits_of_single_rows(mode, bits, group, M):
    q = cases.random_weights(33, 2112, mode, bits, group, "bfloat16")
    x = cases.activations(M, 2112, "bfloat16")
    out = run(x, q)
    check(out, x, q)
    for m in range(M):
        tolerance.assert_bits(out[m : m + 1], run(x[m : m + 1], q))


@pytest.mark.parametrize("mode,bits,group", cases.FORMATS[::3] + cases.FORMATS[-2:])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_exact_rows_in_other_formats(mode, bits, group, dtype):
    q = cases.random_weights(10, 1152, mode, bits, group, dtype)
    x = cases.activations(5, 1152, dtype)
    p = other(mode) if dtype == "float16" else None
    out = run(x, q, p)
    for m in (0, 4):
        tolerance.assert_bits(out[m : m + 1], run(x[m : m + 1], q, p))


# Every tile the plan can choose, and K split in ways that leave empty shares.
PLANS = [
    Plan("qmv", rows, sg, ks, splits, True, "test")
    for rows, sg, ks, splits in [
        (4, 2, 1, 1), (2, 2, 1, 1), (1, 2, 1, 1), (4, 2, 2, 1), (4, 4, 4, 1),
        (2, 8, 8, 1), (4, 4, 2, 1), (4, 2, 2, 2), (4, 2, 1, 3), (1, 2, 1, 7),
    ]
]  # fmt: skip


@pytest.mark.parametrize("p", PLANS, ids=str)
def test_every_tile(p):
    q = cases.random_weights(29, 1184, "affine", 4, 32, "float16")
    for M in (1, 3):
        x = cases.activations(M, 1184, "float16")
        check(run(x, q, p), x, q)


@pytest.mark.parametrize("ks,splits", [(1, 1), (2, 1), (2, 3)])
def test_tiles_change_no_bit(ks, splits):
    q = cases.random_weights(21, 2048, "affine", 4, 64, "bfloat16")
    x = cases.activations(2, 2048, "bfloat16")
    outs = [
        run(x, q, Plan("qmv", rows, sg, ks, splits, True, "test"))
        for rows, sg in [(4, ks), (1, 4), (2, 2)]
    ]
    for out in outs[1:]:
        tolerance.assert_bits(out, outs[0])


@pytest.mark.parametrize("dx,dw", [(0, 0), (4, 0), (0, 2), (4, 2), (1, 1), (3, 1)])
@pytest.mark.parametrize("M", [1, 4])
def test_unaligned_x_and_w(dx, dw, M):
    K = 576
    q = cases.random_weights(12, K, "affine", 4, 64, "float16")
    x = cases.activations(M, K, "float16")
    buffer = mx.concatenate([mx.full((dx,), float("nan"), x.dtype), x.flatten()])
    flat = mx.concatenate([mx.zeros((dw,), mx.uint32), q.w.flatten()])
    mx.eval(buffer, flat)
    w = flat[dw:].reshape(q.w.shape)
    moved = cases.Weights(w, *q.args[1:], q.group_size, q.bits, q.mode)
    out = run(buffer[dx:].reshape(x.shape), moved)
    check(out, x, q)
    tolerance.assert_bits(out, run(x, q))


@pytest.mark.parametrize("mode,bits,group", [*cases.FORMATS, ("none", 16, 0)])
def test_narrow_loads_give_the_same_bits(mode, bits, group):
    """The text for devices where a misaligned vector load goes wrong."""
    K = 4 * group or 264
    q = cases.random_weights(9, K, mode, bits, group, "float16") if group else None
    weights = [a for a in q.args if a is not None] if q else []
    weights = weights or [cases.activations(9, K, "float16", seed=5)]
    x = cases.activations(2, K, "float16")
    problem = Matmul(2, 9, K, "float16", bits, group, mode)
    wide = matmul.prepare(problem)(x, *weights)
    assert not matmul.narrow_loads(True)
    try:
        assert (
            "define ALIGNED(p, n) false" in load(plan_of(problem).kernel, True).header
        )
        tolerance.assert_bits(matmul.prepare(problem)(x, *weights), wide)
    finally:
        matmul.narrow_loads(False)


def plan_of(problem):
    return plan(problem, matmul.device_chip())


def test_poison_after_x_and_strided_arrays():
    q = cases.random_weights(30, 448, "affine", 4, 64, "float16")
    x = cases.activations(3, 448, "float16")
    out = run(x, q)
    assert mx.isfinite(out).all().item()
    tolerance.assert_bits(run(cases.poisoned(x), q), out)
    fused = cases.random_weights(90, 448, "affine", 4, 64, "float16")
    part = fused.rows(30, 60)
    scales = mx.contiguous(part.scales.T).T
    tolerance.assert_bits(
        run(x, part),
        run(x, cases.Weights(mx.contiguous(part.w), scales, part.biases, 64, 4)),
    )


@pytest.mark.parametrize("shape", [(256,), (1, 256), (3, 4, 256), (2, 3, 1, 256)])
def test_leading_dimensions(shape):
    q = cases.random_weights(40, 256, "affine", 4, 64, "float16")
    x = cases.activations(int(np.prod(shape[:-1])), 256, "float16").reshape(shape)
    out = run(x, q)
    assert out.shape == (*shape[:-1], 40)
    tolerance.assert_bits(out.reshape(-1, 40), run(x.reshape(-1, 256), q))


def test_nan_and_inf_go_where_they_belong():
    q = cases.random_weights(8, 256, "affine", 8, 32, "float32")
    x = np.array(cases.activations(3, 256))
    x[0, 100], x[2, 7] = np.nan, np.inf
    out = ref.to_numpy(run(mx.array(x), q))
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()
    assert not np.isfinite(out[2]).any()


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("N,K", [(1, 8), (5, 40), (33, 257), (64, 1024), (3, 1001)])
def test_plain_weights(dtype, N, K):
    rng = np.random.default_rng([N, K])
    w = mx.array(rng.normal(size=(N, K)), getattr(mx, dtype))
    for M in (1, 3, 16):
        x = cases.activations(M, K, dtype)
        out = matmul.matvec(x, w)
        weight = ref.to_numpy(w)
        tolerance.assert_close(
            out, ref.matmul(x, weight), ref.dense(x, weight, dtype), dtype
        )
        tolerance.assert_bits(out[-1:], matmul.matvec(x[-1:], w))
        tolerance.assert_bits(matmul.matvec(cases.poisoned(x, 8)[:1], w), out[:1])


def test_plain_weights_split():
    w = cases.activations(6, 4096, "float16", seed=3)
    x = cases.activations(2, 4096, "float16")
    for ks, splits in [(4, 1), (1, 5), (2, 3)]:
        p = Plan("gemv", 4, max(2, ks), ks, splits, True, "test")
        problem = Matmul(2, 6, 4096, "float16", mode="none")
        out = matmul.prepare(problem, p)(x, w)
        weight = ref.to_numpy(w)
        tolerance.assert_close(
            out, ref.matmul(x, weight), ref.dense(x, weight, "float16"), "float16"
        )


def test_split_does_not_depend_on_M():
    for device in ("h200", "m1", "m4-max"):
        for N, K in [(64, 512), (256, 14336), (4096, 4096), (100, 8192)]:
            plans = [plan(Matmul(M, N, K), chip.lookup(device)) for M in range(1, 17)]
            assert len({(p.k_simdgroups, p.splits) for p in plans}) == 1
            assert all(p.exact and p.kernel == "qmv" for p in plans)


def test_small_grids_are_split_and_large_ones_are_not():
    h200 = chip.lookup("h200")
    assert plan(Matmul(1, 64, 14336), h200).splits > 1
    assert plan(Matmul(1, 1024, 4096), h200).splits == 1
    p = plan(Matmul(1, 8, 1024), h200)
    assert p.splits * p.k_simdgroups * 512 <= 1024 or p.splits == 1


@pytest.mark.parametrize(
    "problem,words",
    [
        (Matmul(17, 8, 64), "M = 17"),
        (Matmul(0, 8, 64), "empty"),
        (Matmul(1, 8, 96), "multiple of group_size"),
        (Matmul(1, 8, 64, "float64"), "float64"),
        (Matmul(1, 8, 64, bits=7), "7-bit"),
        (Matmul(1, 8, 64, group_size=16), "group 16"),
        (Matmul(1, 8, 64, mode="mxfp4"), "mxfp4"),
        (Matmul(1, 8, 64, mode="q4"), "q4"),
        (Matmul(1, 8, 64, batch=2), "batched"),
        (Matmul(1, 8, 4, mode="none"), "below 8"),
    ],
)
def test_refusals_say_why(problem, words):
    with pytest.raises(ValueError, match=words):
        matmul.prepare(problem)


FEW_FORMATS = [("affine", 4, 32), ("affine", 3, 64), ("nvfp4", 4, 16), ("mxfp8", 8, 32)]


@settings(max_examples=40, deadline=None)
@given(
    form=st.sampled_from(FEW_FORMATS),
    M=st.integers(1, 3),
    N=st.integers(1, 70),
    groups=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_any_shape(form, M, N, groups, seed):
    K = max(32, form[2]) * groups
    q = cases.random_weights(N, K, *form, "bfloat16", seed)
    x = cases.activations(M, K, "bfloat16", seed)
    out = run(x, q)
    check(out, x, q)
    tolerance.assert_bits(out[:1], run(x[:1], q))
