"""Codes on matrix units against the oracle: launched directly, no fallback."""

from dataclasses import replace

import cases
import fused_case as case
import mlx.core as mx
import numpy as np
import pytest
import ref
import tolerance

from mlx_phase import check, doctor_kernels, ops
from mlx_phase.chip import lookup
from mlx_phase.launch import fused, matmul, matrix
from mlx_phase.plan import plan_fused
from mlx_phase.plan_exact import CodesPlan, plan_block, plan_codes, plan_launch
from mlx_phase.problem import Matmul

K = 384
H200 = lookup("h200")


def tile(kernel="qmm_codes", rows=16, ks=2, groups=2) -> CodesPlan:
    return CodesPlan(kernel, rows, ks, ks, 1, True, "test", groups)


def run(x: mx.array, q: cases.Weights, p: CodesPlan) -> mx.array:
    N, dtype = q.w.shape[0], str(x.dtype).split(".")[-1]
    problem = Matmul(x.size // x.shape[-1], N, x.shape[-1], dtype, q.bits, q.group_size)
    return matrix.prepare(problem, p)(x, *q.args)


def checked(x: mx.array, q: cases.Weights, p: CodesPlan) -> mx.array:
    out, dtype = run(x, q, p), str(x.dtype).split(".")[-1]
    assert out.dtype == x.dtype and out.shape == (*x.shape[:-1], q.w.shape[0])
    weight = ref.dequantize(*q.args, q.group_size, q.bits, q.mode)
    want, least = ref.matmul(x, weight), ref.dense(x, weight, dtype)
    tolerance.assert_close(out, want, least, dtype)
    return out


@pytest.mark.parametrize(
    "bits, group, dtype",
    [
        (4, 32, "float16"),
        (4, 64, "bfloat16"),
        (4, 128, "float32"),
        (8, 32, "bfloat16"),
        (8, 64, "float32"),
        (8, 128, "float16"),
    ],
)
def test_every_format(bits, group, dtype):
    k = 6 * group
    q = cases.random_weights(37, k, "affine", bits, group, dtype)
    checked(cases.activations(3, k, dtype), q, tile())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("ks, groups", [(1, 2), (2, 4), (4, 2)])
def test_rows_are_exact_for_every_m_and_tile(dtype, ks, groups):
    """K in 6 or 3 steps, dealt to 1, 2 or 4 simdgroups; N with a tail."""
    k = 64 * 12 if groups == 4 else K
    q = cases.random_weights(45, k, "affine", 4, 64, dtype)
    x = cases.activations(16, k, dtype)
    whole = checked(x, q, tile(rows=16, ks=ks, groups=groups))
    for M in (1, 2, 4, 7, 8, 9, 15):
        for rows in (16, 32) if M in (1, 9) else (16,):
            part = run(x[16 - M :], q, tile(rows=rows, ks=ks, groups=groups))
            tolerance.assert_bits(part, whole[16 - M :])


@pytest.mark.parametrize("N", [32, 33, 47, 48, 49])
def test_every_tail_of_n(N):
    q, c = cases.const_probe(N, 512)
    out = run(mx.ones((2, 512), mx.float16), q, tile(rows=32))
    assert (out == 512 * c).all().item()


def test_one_hot_gives_the_weight():
    q = cases.exact_weights(32, K, "affine", 4, 32)
    weight = ref.dequantize(*q.args, 32, 4, "affine")
    ks = cases.one_hot_positions(K, 32)
    for at in range(0, len(ks), 16):
        some = (ks * 2)[at : at + 16]
        x = mx.concatenate([cases.one_hot(K, k) for k in some])
        assert (ref.to_numpy(run(x, q, tile())) == weight[:, some].T).all()


def test_rows_do_not_see_each_other():
    q = cases.random_weights(40, K, "affine", 4, 64, "bfloat16")
    x = cases.activations(9, K, "bfloat16")
    out = run(x, q, tile())
    bad = mx.where(mx.arange(9)[:, None] == 3, x, float("nan")).astype(x.dtype)
    tolerance.assert_bits(run(bad, q, tile())[3], out[3])
    tolerance.assert_bits(run(cases.poisoned(x), q, tile()), out)
    tolerance.assert_bits(run(x.reshape(3, 3, K), q, tile()).reshape(9, 40), out)


def test_a_row_with_nan_is_nan_and_weights_beside_are_not_read():
    q = cases.random_weights(64, K, "affine", 8, 64, "bfloat16")
    x = cases.activations(2, K, "bfloat16")
    out = run(x, q.rows(0, 48), tile())
    scales = mx.where(mx.arange(64)[:, None] < 48, q.scales, float("nan"))
    cut = replace(q, scales=scales.astype(q.scales.dtype)).rows(0, 48)
    tolerance.assert_bits(run(x, cut, tile()), out)
    assert mx.isnan(run(x * float("nan"), q, tile())).all().item()


def test_unaligned_x_and_w():
    q = cases.random_weights(40, K, "affine", 4, 64, "float16")
    x = cases.activations(8, K, "float16")
    buffer = mx.concatenate([mx.zeros((3,), x.dtype), x.flatten()])
    flat = mx.concatenate([mx.zeros((1,), mx.uint32), q.w.flatten()])
    mx.eval(buffer, flat)
    moved = replace(q, w=flat[1:].reshape(q.w.shape))
    out = run(x, q, tile())
    tolerance.assert_bits(run(buffer[3:].reshape(x.shape), moved, tile()), out)
    assert not matmul.narrow_loads(True)
    try:
        tolerance.assert_bits(run(x, q, tile()), out)
    finally:
        matmul.narrow_loads(False)


@pytest.mark.parametrize("dtype, bits", [("bfloat16", 4), ("float16", 8)])
def test_add(dtype, bits):
    q = case.weights(40, K, dtype, bits)
    x, res = cases.activations(9, K, dtype), cases.activations(9, 40, dtype)
    p = tile("qmm_codes_add")
    outs = [
        fused.prepare_add(Matmul(M, 40, K, dtype, bits), p)(x[:M], *q.args, res[:M])
        for M in (1, 9)
    ]
    want = case.wide(res) + case.wide(x) @ case.matrix(q).T
    tolerance.assert_close(outs[1], want, case.rounded(want, dtype), dtype)
    tolerance.assert_bits(outs[0], outs[1][:1])


# A norm's weight may double x: halves have no room for that on every model.
@pytest.mark.parametrize(
    "dtype, activation, eps",
    [("bfloat16", "silu", case.EPS), ("float16", "gelu_approx", None)],
)
def test_glu(dtype, activation, eps):
    gate, up = case.weights(40, K, dtype), case.weights(40, K, dtype, seed=1)
    x, weight = cases.activations(9, K, dtype) * 3, case.vector(K, dtype, 2)
    n = case.wide(x) if eps is None else case.norm(case.wide(x), case.wide(weight))
    g, u = n @ case.matrix(gate).T, n @ case.matrix(up).T
    want, outs = getattr(case, activation)(g) * u, {}
    for M, rows in ((1, 16), (9, 32), (1, 64)):
        p = tile("qmm_codes_glu", rows)
        make = fused.prepare_glu(Matmul(M, 40, K, dtype), activation, eps, p)
        outs[M, rows] = make(x[:M], weight, *gate.args, *up.args)
    tolerance.assert_close(outs[9, 32], want, case.rounded(want, dtype), dtype)
    tolerance.assert_bits(outs[1, 16], outs[9, 32][:1])
    tolerance.assert_bits(outs[1, 64], outs[9, 32][:1])


@pytest.mark.parametrize(
    "dims, traditional, bias, eps",
    [(64, False, True, case.EPS), (32, True, False, case.EPS), (0, False, False, None)],
)
def test_qkv(dims, traditional, bias, eps):
    D, dtype, sizes = 64, "bfloat16", (128, 64, 64)
    qs = [case.weights(n, K, dtype, seed=i) for i, n in enumerate(sizes)]
    arrays = [a for q in qs for a in q.args]
    x = cases.activations(9, K, dtype).reshape(3, 3, K)
    weight = case.vector(K, dtype, 5)
    biases = [case.vector(n, dtype, n) for n in sizes] if bias else []
    cs = case.angles(3, 77, D, dims, traditional)
    outs = []
    for L, rows, turn in ((3, x, cs), (1, x[1:2, 1:2], cs[1:2])):
        # Tiles of 16 rows and of 32: the same bits.
        p = tile("qmm_codes_qkv", 32 if L == 3 else 16)
        members = tuple(Matmul(rows.size // K, n, K, dtype) for n in sizes)
        rotary = fused.Rotary(D, dims, traditional)
        launch = fused.prepare_qkv(members, rotary, eps, bias, p)
        angles = mx.array(turn.astype(np.float32))
        q, kv = launch(rows, weight, *arrays, *biases, angles)
        outs.append([q, *mx.split(kv, 2)])
        assert q.shape == (len(rows), 2, L, D)
    n = case.wide(x) if eps is None else case.norm(case.wide(x), case.wide(weight))
    for i, (q, y) in enumerate(zip(qs, outs[0], strict=True)):
        want = n @ case.matrix(q).T + (case.wide(biases[i]) if bias else 0)
        want = case.heads(want, D)
        if i < 2:
            want = case.rotate(want, cs, dims, traditional)
        tolerance.assert_close(y, want, case.rounded(want, dtype), dtype)
        tolerance.assert_bits(outs[1][i][0, :, 0], y[1, :, 1])


def test_plan_is_one_family_for_every_m():
    for M in range(1, 17):
        one = plan_launch((Matmul(M, 14336, 4096),), H200)
        assert (one.kernel, one.k_simdgroups, one.groups) == ("qmm_codes", 2, 4)
        assert plan_launch((Matmul(M, 1024, 4096),), H200).kernel == "qmv"
        assert plan_launch((Matmul(M, 14336, 4096),), lookup("m4max")).kernel == "qmv"
        assert plan_launch((Matmul(M, 4096, 4096, "float32"),), H200).kernel == "qmv"
        assert plan_launch((Matmul(M, 4096, 4096, bits=3),), H200).kernel == "qmv"


@pytest.mark.parametrize("bits, group", [(4, 32), (4, 128), (8, 32), (8, 64), (8, 128)])
@pytest.mark.parametrize("N", [2048, 28672])
@pytest.mark.parametrize("K", [4096, 8448])
def test_plans_fit_threadgroup_memory(bits, group, N, K):
    for dtype, pair in (("bfloat16", 4), ("float32", 8)):
        p = plan_codes(Matmul(1, N, K, dtype, bits, group), H200)
        size = p.rows * p.groups * (group * bits // 8 + pair)
        assert 2 * p.k_simdgroups * size <= 32768 and K % (p.groups * group) == 0


def test_blocks_stay_with_vectors_where_matrices_cannot():
    def kernel(name, *members, **how):
        return plan_block(name, members, H200, **how).kernel

    one, small = Matmul(1, 4096, 4096), Matmul(1, 64, 4096)
    assert kernel("qmv_add", one) == "qmm_codes_add"
    assert kernel("qmv_glu", one, one, normed=True) == "qmm_codes_glu"
    half = replace(one, x_dtype="float16")
    assert kernel("qmv_glu", half, half, normed=True) == "qmv_glu"
    assert kernel("qmv_glu", half, half) == "qmm_codes_glu"
    assert kernel("qmv_qkv", one, small, small, dims=(64, 64)) == "qmm_codes_qkv"
    assert kernel("qmv_qkv", one, small, small, dims=(80, 80)) == "qmv_qkv"
    assert kernel("qmv_qkv", one, small, replace(small, bits=8)) == "qmv_qkv"
    assert kernel("qmv_add", small) == "qmv_add"
    m4 = lookup("m4max")
    assert plan_block("qmv_add", (one,), m4) == plan_fused("qmv_add", (one,), m4)


def test_blocks_of_inexact_models_are_fused_and_shared_launches_go_apart(monkeypatch):
    monkeypatch.setattr(ops, "device_chip", lambda: H200)
    for M in (1, 8):
        one = Matmul(M, 4096, 4096)
        assert not ops.apart((one,), exact=False)
        assert ops.apart((one, one), exact=False) == (M > 1)
        assert not ops.apart((one, one), exact=True)
    # 3 bits have no codes kernel: matrix units take the layer alone.
    assert ops.apart((Matmul(8, 4096, 4096, bits=3),), exact=False)


def test_only_the_plan_that_is_taken_is_printed(monkeypatch, capsys):
    monkeypatch.setenv("MLX_PHASE_PRINT_PLANS", "1")
    plan_block.cache_clear()
    plan_block("qmv_add", (Matmul(5, 4096, 4096),), H200)
    (line,) = capsys.readouterr().err.splitlines()
    assert "qmm_codes_add" in line


def test_refusals_say_why():
    for problem, words in (
        (Matmul(17, 64, 128), "M = 17"),
        (Matmul(1, 64, 64), "no pair of groups"),
        (Matmul(1, 8, 128), "N is below 32"),
        (Matmul(1, 64, 128, bits=3), "codes of 4 or 8 bits"),
    ):
        with pytest.raises(ValueError, match=words):
            plan_codes(problem, H200)


@pytest.mark.parametrize("quick", [True, False])
def test_doctor_examines_every_format(monkeypatch, quick):
    monkeypatch.setattr(doctor_kernels, "device_chip", lambda: H200)
    found = doctor_kernels.codes_rows(quick)
    assert len(found) == (1 if quick else 12)
    assert {row.plan_many.kernel for row in found} == {"qmm_codes"}
    result = doctor_kernels.examine(found[-1])
    assert result.ok and result.exact, result


def test_check_compares_the_planned_kernel(monkeypatch):
    monkeypatch.setattr(check, "device_chip", lambda: H200)
    result = check.check(Matmul(1, 28672, 8192, "float16"))
    assert result.ok and result.kernel.startswith("qmm_codes "), result
