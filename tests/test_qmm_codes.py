"""Codes on matrix units against the oracle: launched directly, no fallback."""

from dataclasses import replace

import cases
import fused_case as case
import mlx.core as mx
import numpy as np
import pytest
import ref
import tolerance

from mlx_phase import check, doctor_kernels
from mlx_phase.chip import lookup
from mlx_phase.launch import fused, matmul, matrix
from mlx_phase.plan_exact import CodesPlan
from mlx_phase.problem import Matmul

K = 384
H200 = lookup("h200")


def tile(kernel="qmm_codes", rows=16, ks=2, groups=2) -> CodesPlan:
    return CodesPlan(kernel, rows, ks, ks, 1, True, "test", groups)


#: How a single row of x may lie ready (groups, or -1: each simdgroup's own), and
#: tiles of a threadgroup.
READY = ((-1, 1), (8, 2), (16, 1))


def ready(p: CodesPlan, groups: int, tiles: int) -> CodesPlan:
    return replace(p, ready=groups, simdgroups=tiles * p.k_simdgroups)


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
    x = cases.activations(3, k, dtype)
    out = checked(x, q, tile())
    for how in READY[::2]:
        one = checked(x[2:], q, ready(tile(), *how))
        tolerance.assert_bits(one, out[2:])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("ks, groups", [(1, 2), (2, 4), (4, 2)])
def test_rows_are_exact_for_every_m_and_tile(dtype, ks, groups):
    """K in 6 or 3 steps, dealt to 1, 2 or 4 simdgroups; N with a tail; one row ready
    in threadgroup memory, all of it or in turns."""
    k = 64 * 12 if groups == 4 else K
    q = cases.random_weights(45, k, "affine", 4, 64, dtype)
    x = cases.activations(16, k, dtype)
    whole = checked(x, q, tile(rows=16, ks=ks, groups=groups))
    for M in (1, 2, 4, 7, 8, 9, 15):
        for rows in (16, 32) if M in (1, 9) else (16,):
            part = run(x[16 - M :], q, tile(rows=rows, ks=ks, groups=groups))
            tolerance.assert_bits(part, whole[16 - M :])
    for how, rows in zip(READY, (16, 16, 32), strict=True):
        p = ready(tile(rows=rows, ks=ks, groups=groups), *how)
        tolerance.assert_bits(run(x[15:], q, p), whole[15:])


@pytest.mark.parametrize("N", [32, 33, 47, 48, 49])
def test_every_tail_of_n(N):
    q, c = cases.const_probe(N, 512)
    out = run(mx.ones((2, 512), mx.float16), q, tile(rows=32))
    assert (out == 512 * c).all().item()
    out = run(mx.ones((1, 512), mx.float16), q, ready(tile(), -1, 3))
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
    # What lies ready is a single row: a plan of one serves more, too.
    tolerance.assert_bits(run(x, q, ready(tile(), -1, 1)), out)


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
    for how in READY[:2]:
        p = ready(tile(), *how)
        tolerance.assert_bits(run(buffer[3 : 3 + K][None], moved, p), out[:1])
    assert not matmul.narrow_loads(True)
    try:
        tolerance.assert_bits(run(x, q, tile()), out)
        tolerance.assert_bits(run(x[:1], q, ready(tile(), 8, 2)), out[:1])
    finally:
        matmul.narrow_loads(False)


def test_scales_of_floats_that_begin_between_two_vectors():
    """A step has four: 16 bytes, where those of other types are 8."""
    q = cases.random_weights(40, 512, "affine", 4, 64, "float32")
    x, p = cases.activations(1, 512, "float32"), ready(tile(groups=4), -1, 1)
    both = [mx.concatenate([mx.zeros((2,)), a.flatten()]) for a in q.args[1:]]
    mx.eval(both)
    scales, biases = (a[2:].reshape(q.scales.shape) for a in both)
    moved = replace(q, scales=scales, biases=biases)
    tolerance.assert_bits(run(x, moved, p), checked(x, q, p))


@pytest.mark.parametrize("dtype, bits", [("bfloat16", 4), ("float16", 8)])
def test_add(dtype, bits):
    q = case.weights(40, K, dtype, bits)
    x, res = cases.activations(9, K, dtype), cases.activations(9, 40, dtype)
    p = tile("qmm_codes_add")
    outs = [
        fused.prepare_add(Matmul(M, 40, K, dtype, bits), p)(x[:M], *q.args, res[:M])
        for M, p in ((9, p), (1, p), (1, ready(p, -1, 1)), (1, ready(p, 8, 2)))
    ]
    want = case.wide(res) + case.wide(x) @ case.matrix(q).T
    tolerance.assert_close(outs[0], want, case.rounded(want, dtype), dtype)
    for one in outs[1:]:
        tolerance.assert_bits(one, outs[0][:1])


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
    given = (*[weight] * (eps is not None), *gate.args, *up.args)
    for M, rows in ((1, 16), (9, 32), (1, 64)):
        p = tile("qmm_codes_glu", rows)
        make = fused.prepare_glu(Matmul(M, 40, K, dtype), activation, eps, p)
        outs[M, rows] = make(x[:M], *given)
    tolerance.assert_close(outs[9, 32], want, case.rounded(want, dtype), dtype)
    for how in READY:
        p = ready(tile("qmm_codes_glu"), *how)
        make = fused.prepare_glu(Matmul(1, 40, K, dtype), activation, eps, p)
        outs[how] = make(x[:1], *given)
    for key in ((1, 16), (1, 64), *READY):
        tolerance.assert_bits(outs[key], outs[9, 32][:1])


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
    # Tiles of 16 rows and of 32, and one row that lies ready: the same bits.
    p, alone = tile("qmm_codes_qkv"), (1, x[1:2, 1:2], cs[1:2])
    plans = [(3, x, cs, replace(p, rows=32)), (*alone, p)]
    plans += [(*alone, ready(p, *how)) for how in READY[:2]]
    for L, rows, turn, p in plans:
        members = tuple(Matmul(rows.size // K, n, K, dtype) for n in sizes)
        rotary = fused.Rotary(D, dims, traditional)
        launch = fused.prepare_qkv(members, rotary, eps, bias, p)
        angles = mx.array(turn.astype(np.float32))
        given = (rows, *[weight] * (eps is not None), *arrays, *biases, angles)
        q, kv = launch(*given)
        case.assert_behind(launch(*given, packed=True), q, kv)
        outs.append([q, *mx.split(kv, 2)])
        assert q.shape == (len(rows), 2, L, D)
    n = case.wide(x) if eps is None else case.norm(case.wide(x), case.wide(weight))
    for i, (q, y) in enumerate(zip(qs, outs[0], strict=True)):
        want = n @ case.matrix(q).T + (case.wide(biases[i]) if bias else 0)
        want = case.heads(want, D)
        if i < 2:
            want = case.rotate(want, cs, dims, traditional)
        tolerance.assert_close(y, want, case.rounded(want, dtype), dtype)
        for one in outs[1:]:
            tolerance.assert_bits(one[i][0, :, 0], y[1, :, 1])


@pytest.mark.parametrize("quick", [True, False])
def test_doctor_examines_every_format(monkeypatch, quick):
    chip = replace(H200, threadgroup_bytes=32768)  # what the CPU executor has
    monkeypatch.setattr(doctor_kernels, "device_chip", lambda: chip)
    found = doctor_kernels.codes_rows(quick)
    assert len(found) == (1 if quick else 12)
    assert {row.plan_one.ready > 0 for row in found} == {True, quick}
    assert {row.plan_many.kernel for row in found} == {"qmm_codes"}
    result = doctor_kernels.examine(found[-1])
    assert result.ok and result.exact, result


def test_check_compares_the_planned_kernel(monkeypatch):
    monkeypatch.setattr(check, "device_chip", lambda: H200)
    result = check.check(Matmul(1, 28672, 8192, "float16"))
    assert result.ok and result.kernel.startswith("qmm_codes "), result
