"""The prefill kernels under every check: the sanitizer has nothing to say."""

import cases
import pytest
from test_qmm import FOUR, ONE, planned

from mlx_phase.launch import qmm
from mlx_phase.problem import Matmul

M, N = 37, 21  # both end inside a tile


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    monkeypatch.setenv("MLX_PHASE_EXECUTOR", "cpu")
    monkeypatch.setenv("MLX_PHASE_SANITIZE", "mem,race,init,sync")


@pytest.mark.parametrize(
    "mode,bits,group,dtype,tile,splits",
    [
        ("affine", 4, 32, "bfloat16", FOUR, 2),
        ("affine", 3, 32, "float16", ONE, 1),
        ("nvfp4", 4, 16, "float32", ONE, 1),
    ],
)
def test_quantised(mode, bits, group, dtype, tile, splits):
    """K is one group over a step."""
    K = tile.BK + group
    q = cases.random_weights(N, K, mode, bits, group, dtype)
    kernel = "qmm" if mode == "affine" else "qmm_fp"
    problem = Matmul(M, N, K, dtype, bits, group, mode)
    run = qmm.prepare(problem, planned(kernel, tile, splits))
    y = run(cases.activations(M, K, dtype), *(a for a in q.args if a is not None))
    assert y.shape == (M, N)


@pytest.mark.parametrize("K", [40, 41])
def test_plain(K):
    x, w = cases.activations(M, K, "float16"), cases.activations(N, K, "float16")
    run = qmm.prepare(
        Matmul(M, N, K, "float16", mode="none"), planned("qmm_plain", ONE)
    )
    assert run(x, w).shape == (M, N)


def test_residual_and_gate():
    q = cases.random_weights(N, 96, "affine", 4, 32, "bfloat16")
    x, res = (cases.activations(M, k, "bfloat16") for k in (96, N))
    problem = Matmul(M, N, 96, "bfloat16", 4, 32)
    add = qmm.prepare_add(problem, False, planned("qmm_add", ONE))
    assert add(x, *q.args, res).shape == (M, N)
    glu = qmm.prepare_glu(problem, "silu", planned("qmm_glu", ONE))
    assert glu(x, *q.args, *q.args).shape == (M, N)
