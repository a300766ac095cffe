"""The prefill product against the float32 oracle: the kernel or an error."""

import cases
import mlx.core as mx
import product_case
import pytest
import ref
import tolerance

from mlx_phase.launch import matmul, qmm
from mlx_phase.plan_qmm import Tile, TilePlan, plan_qmm, supports_qmm
from mlx_phase.problem import Matmul

#: One simdgroup; several that share rows of x and of W, with more than a block of K.
ONE, FOUR = Tile(16, 16, 32, 1, 1), Tile(32, 32, 64, 2, 2)


def planned(kernel: str, tile: Tile, splits: int = 1) -> TilePlan:
    simdgroups = tile.SM * tile.SN
    return TilePlan(kernel, tile.BN, simdgroups, 1, splits, False, "test", tile)


def problem_of(x: mx.array, q: cases.Weights) -> Matmul:
    K = x.shape[-1]
    name = str(x.dtype).split(".")[-1]
    return Matmul(x.size // K, q.w.shape[0], K, name, q.bits, q.group_size, q.mode)


def run(x: mx.array, q: cases.Weights, tile: Tile = ONE, splits: int = 1) -> mx.array:
    """The kernel's answer with a tile."""
    kernel = "qmm" if q.mode == "affine" else "qmm_fp"
    call = qmm.prepare(problem_of(x, q), planned(kernel, tile, splits))
    return call(x, *(a for a in q.args if a is not None))


def check(x: mx.array, q: cases.Weights, tile: Tile = ONE, splits: int = 1) -> mx.array:
    out = run(x, q, tile, splits)
    name = str(x.dtype).split(".")[-1]
    assert out.dtype == x.dtype and out.shape == (*x.shape[:-1], q.w.shape[0])
    weight = ref.dequantize(*q.args, q.group_size, q.bits, q.mode)
    rows = x.reshape(-1, x.shape[-1])
    right, dense = ref.matmul(rows, weight), ref.dense(rows, weight, name)
    tolerance.assert_close(out.reshape(len(rows), -1), right, dense, name)
    return out


@pytest.mark.parametrize("mode,bits,group", cases.FORMATS)
def test_every_format(mode, bits, group):
    """M and N end inside a tile, K inside a step where the format allows."""
    K = 3 * group if group < 128 else group
    dtype = cases.DTYPES[(bits + group // 32) % 3]
    q = cases.random_weights(37, K, mode, bits, group, dtype)
    check(cases.activations(35, K, dtype), q)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_several_simdgroups_and_shares_of_k(dtype):
    q = cases.random_weights(45, 352, "affine", 4, 32, dtype)
    x = cases.activations(37, 352, dtype)
    whole = check(x, q, FOUR)
    shared = check(x, q, FOUR, splits=2)
    assert whole.dtype == shared.dtype
    # 352 is 11 steps of 32: of 8 shares of two, two have nothing to add.
    if dtype == "float32":
        check(x, q, ONE, splits=8)


@pytest.mark.parametrize("M,N", [(17, 1), (32, 32), (33, 8), (64, 33), (65, 31)])
def test_every_tail_gives_the_constant(M, N):
    q, c = cases.const_probe(N, 256)
    out = run(mx.ones((M, 256), mx.float16), q)
    assert (out == 256 * c).all().item()


@pytest.mark.parametrize("K", [32, 64, 96, 128, 160])
def test_one_hot_gives_the_weight(K):
    """Each place of K meets its own weight, whatever order both sides take K in."""
    q = cases.exact_weights(9, K, "affine", 4, 32)
    weight = ref.dequantize(*q.args, 32, 4, "affine")
    assert (ref.to_numpy(run(mx.eye(K), q)) == weight.T).all()


@pytest.mark.parametrize("mode,bits,group", [("affine", 3, 32), ("nvfp4", 4, 16)])
def test_one_hot_of_odd_codes(mode, bits, group):
    K = 96 + 16 * (group == 16)
    q = cases.exact_weights(9, K, mode, bits, group)
    weight = ref.dequantize(*q.args, group, bits, mode)
    assert (ref.to_numpy(run(mx.eye(K), q)) == weight.T).all()


def test_uniform_and_peak():
    """All sums equal, and one value that all others would drown in."""
    q, c = cases.const_probe(8, 128, dtype="bfloat16")
    x = mx.full((20, 128), 0.5, mx.bfloat16)
    assert (run(x, q) == 64 * c).all().item()
    peak = mx.where(mx.arange(128)[None] == 77, 4096.0, x).astype(mx.bfloat16)
    want = (4096 + 63.5) * ref.to_numpy(mx.array(c))
    got = ref.to_numpy(run(peak, q).astype(mx.float32))
    assert abs(got - want).max() <= 2.0**-8 * abs(want).max()


def test_rows_do_not_see_each_other_or_what_is_behind_them():
    q = cases.random_weights(20, 160, "affine", 4, 32, "bfloat16")
    product_case.assert_rows_are_alone(run, cases.activations(19, 160, "bfloat16"), q)


def test_unaligned_x_and_w():
    q = cases.random_weights(20, 160, "affine", 4, 32, "float16")
    product_case.assert_any_place(run, cases.activations(18, 160, "float16"), q)


def test_leading_dimensions_and_strides():
    q = cases.random_weights(20, 160, "affine", 4, 32, "float16")
    x = cases.activations(36, 160, "float16")
    out = check(x.reshape(2, 18, 160), q)
    tolerance.assert_bits(out.reshape(36, 20), run(x, q))
    alone = mx.array(ref.to_numpy(x)[::2]).astype(x.dtype)
    tolerance.assert_bits(run(x[::2], q), run(alone, q))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("K", [40, 41, 96])
def test_plain_weights(dtype, K):
    """K of any length: 41 leaves rows that are not aligned."""
    x, w = cases.activations(35, K, dtype), cases.activations(19, K, dtype, seed=5)
    problem = Matmul(35, 19, K, dtype, mode="none")
    out = qmm.prepare(problem, planned("qmm_plain", ONE))(x, w)
    weight = ref.to_numpy(w)
    tolerance.assert_close(
        out, ref.matmul(x, weight), ref.dense(x, weight, dtype), dtype
    )


def test_what_is_taken_again_at_the_end_of_k_weighs_nothing():
    x, w = mx.ones((17, 40), mx.float16), mx.ones((16, 40), mx.float16)
    w = mx.where(mx.arange(40) == 39, mx.array(float("inf"), mx.float16), w)
    problem = Matmul(17, 16, 40, "float16", mode="none")
    out = qmm.prepare(problem, planned("qmm_plain", ONE))(x, w)
    assert (out == float("inf")).all().item()


@pytest.mark.parametrize(
    "problem,words",
    [
        (Matmul(16, 8, 64), "M = 16"),
        (Matmul(20, 8, 96), "multiple of group_size"),
        (Matmul(20, 8, 64, mode="mxfp3"), "mxfp3"),
        (Matmul(20, 2, 64), "too few"),
    ],
)
def test_refusals_say_why(problem, words):
    assert words in supports_qmm(problem)
    with pytest.raises(ValueError, match=words):
        plan_qmm(problem, matmul.device_chip())
