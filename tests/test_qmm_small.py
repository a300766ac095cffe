"""Small M on matrix units against the float32 oracle: the kernel or an error."""

import cases
import mlx.core as mx
import product_case
import pytest
import ref
import tolerance

from mlx_phase import chip
from mlx_phase.launch import matrix
from mlx_phase.plan import Plan
from mlx_phase.plan_matrix import plan_matrix, supports_matrix
from mlx_phase.problem import Matmul


def problem_of(x: mx.array, q: cases.Weights) -> Matmul:
    K = x.shape[-1]
    name = str(x.dtype).split(".")[-1]
    return Matmul(x.size // K, q.w.shape[0], K, name, q.bits, q.group_size, q.mode)


def run(x: mx.array, q: cases.Weights, p: Plan | None = None) -> mx.array:
    """The kernel's answer under plan ``p``, or the planned one."""
    return matrix.prepare(problem_of(x, q), p)(x, *(a for a in q.args if a is not None))


def check(x: mx.array, q: cases.Weights, p: Plan | None = None) -> mx.array:
    out = run(x, q, p)
    name = str(x.dtype).split(".")[-1]
    assert out.dtype == x.dtype and out.shape == (*x.shape[:-1], q.w.shape[0])
    weight = ref.dequantize(*q.args, q.group_size, q.bits, q.mode)
    tolerance.assert_close(out, ref.matmul(x, weight), ref.dense(x, weight, name), name)
    return out


@pytest.mark.parametrize("mode,bits,group", cases.FORMATS)
def test_every_format(mode, bits, group):
    K = 3 * group + 32 * (group == 16)
    dtype = cases.DTYPES[bits % 3]
    q = cases.random_weights(37, K, mode, bits, group, dtype)
    check(cases.activations(6, K, dtype), q)


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("rows,ks", [(16, 2), (32, 4)])
def test_both_tiles(dtype, rows, ks):
    """8 and 16 columns, 16 and 32 rows, N and K that fill neither."""
    q = cases.random_weights(45, 672, "affine", 4, 32, dtype)
    p = Plan("qmm_small", rows, ks, ks, 1, False, "test")
    for M in (7, 16):
        check(cases.activations(M, 672, dtype), q, p)


@pytest.mark.parametrize("N", [1, 7, 8, 9, 16, 17, 33])
def test_every_tail_of_n(N):
    q, c = cases.const_probe(N, 512)
    out = run(mx.ones((9, 512), mx.float16), q)
    assert (out == 512 * c).all().item()


@pytest.mark.parametrize("K", [32, 64, 96, 128, 160, 256, 288])
def test_one_hot_gives_the_weight(K):
    q = cases.exact_weights(9, K, "affine", 4, 32)
    weight = ref.dequantize(*q.args, 32, 4, "affine")
    ks = cases.one_hot_positions(K, 32)
    x = mx.concatenate([cases.one_hot(K, k) for k in ks])
    for at in range(0, len(ks), 8):
        part = mx.concatenate([x, x])[at : at + 8]
        out = ref.to_numpy(run(part, q))
        want = weight[:, [ks[(at + i) % len(ks)] for i in range(8)]].T
        assert (out == want).all()


def test_rows_do_not_see_each_other():
    q = cases.random_weights(20, 320, "affine", 4, 64, "bfloat16")
    product_case.assert_rows_are_alone(run, cases.activations(8, 320, "bfloat16"), q)


def test_unaligned_x_and_w():
    q = cases.random_weights(20, 320, "affine", 4, 64, "float16")
    product_case.assert_any_place(run, cases.activations(8, 320, "float16"), q)


def test_leading_dimensions():
    q = cases.random_weights(20, 320, "affine", 4, 64, "float16")
    x = cases.activations(8, 320, "float16")
    out = check(x.reshape(2, 4, 320), q)
    tolerance.assert_bits(out.reshape(8, 20), run(x, q))


def test_plan_fills_the_chip():
    h200 = chip.lookup("h200")
    assert plan_matrix(Matmul(8, 1024, 4096), h200).k_simdgroups == 8
    assert plan_matrix(Matmul(8, 128256, 4096), h200).k_simdgroups == 2
    assert plan_matrix(Matmul(8, 1024, 256), h200).k_simdgroups == 2
    assert not plan_matrix(Matmul(8, 1024, 4096), h200).exact


@pytest.mark.parametrize(
    "problem,words",
    [
        (Matmul(17, 8, 64), "M = 17"),
        (Matmul(8, 8, 96), "multiple of group_size"),
        (Matmul(8, 8, 64, mode="none"), "plain weights"),
        (Matmul(8, 2, 64), "too few"),
    ],
)
def test_refusals_say_why(problem, words):
    assert words in supports_matrix(problem)
    with pytest.raises(ValueError, match=words):
        matrix.prepare(problem)
