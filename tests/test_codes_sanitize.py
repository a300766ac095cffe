"""Codes on matrix units under every check: the sanitizer has nothing to say."""

import cases
import fused_case as case
import mlx.core as mx
import numpy as np
import pytest

from mlx_phase.launch import fused, matmul, matrix
from mlx_phase.plan_exact import CodesPlan
from mlx_phase.problem import Matmul

K = 384


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    monkeypatch.setenv("MLX_PHASE_EXECUTOR", "cpu")
    monkeypatch.setenv("MLX_PHASE_SANITIZE", "mem,race,init,sync")


def tile(kernel: str, rows=16, ks=2, groups=2, tiles=1, ready=0) -> CodesPlan:
    how = ks * tiles, ks, 1, True, "test", groups, ready
    return CodesPlan(kernel, rows, *how)


# Both formats; one column block and two; a tail of N; simdgroups without a step.
@pytest.mark.parametrize(
    "dtype, bits, M, N, ks, rows",
    [("bfloat16", 4, 9, 37, 2, 16), ("float16", 8, 1, 64, 4, 16)],
)
def test_codes(dtype, bits, M, N, ks, rows):
    q = cases.random_weights(N, K, "affine", bits, 64, dtype)
    p = tile("qmm_codes", rows, ks)
    run = matrix.prepare(Matmul(M, N, K, dtype, bits), p)
    assert run(cases.activations(M, K, dtype), *q.args).shape == (M, N)


@pytest.mark.parametrize("tiles, ready", [(3, -1), (2, 8)])
def test_one_row_that_lies_ready(tiles, ready):
    """In turns, with simdgroups that have no step in the last, and tails of N."""
    dtype, N, k = "bfloat16", 40, 10 * 64
    x, weight = cases.activations(1, k, dtype), case.vector(k, dtype, 1)
    gate, up = (case.weights(N, k, dtype, seed=i) for i in range(2))
    p = tile("qmm_codes_glu", tiles=tiles, ready=ready)
    glu = fused.prepare_glu(Matmul(1, N, k, dtype), "silu", case.EPS, p)
    assert glu(x, weight, *gate.args, *up.args).shape == (1, N)


def test_text_without_vector_loads():
    q = cases.random_weights(32, K, "affine", 4, 64, "float16")
    x = cases.activations(2, K + 1, "float16").flatten()[1 : 1 + 2 * K].reshape(2, K)
    before = matmul.narrow_loads(True)
    try:
        run = matrix.prepare(Matmul(2, 32, K, "float16"), tile("qmm_codes"))
        assert run(x, *q.args).shape == (2, 32)
    finally:
        matmul.narrow_loads(before)


def test_fused():
    dtype, M = "bfloat16", 3
    x, weight = cases.activations(M, K, dtype), case.vector(K, dtype, 1)
    qs = [case.weights(n, K, dtype, seed=n) for n in (40, 64, 32, 32)]
    res = cases.activations(M, 40, dtype)
    add = fused.prepare_add(Matmul(M, 40, K, dtype), tile("qmm_codes_add"))
    assert add(x, *qs[0].args, res).shape == (M, 40)
    glu = fused.prepare_glu(
        Matmul(M, 40, K, dtype), "silu", case.EPS, tile("qmm_codes_glu", 16)
    )
    assert glu(x, weight, *qs[0].args, *qs[0].args).shape == (M, 40)
    members = tuple(Matmul(M, n, K, dtype) for n in (64, 32, 32))
    for traditional, bias in ((False, True), (True, False)):
        rotary = fused.Rotary(32, 32, traditional)
        cs = mx.array(case.angles(M, 5, 32, 32, traditional).astype(np.float32))
        p = tile("qmm_codes_qkv", 32 if bias else 16)
        qkv = fused.prepare_qkv(members, rotary, case.EPS, bias, p)
        arrays = [a for q in qs[1:] for a in q.args]
        biases = [case.vector(m.N, dtype, m.N) for m in members] if bias else []
        q, kv = qkv(x.reshape(1, M, K), weight, *arrays, *biases, cs)
        assert q.shape == (1, 2, M, 32) and kv.shape == (2, 1, M, 32)
