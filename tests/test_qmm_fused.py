"""Prefill products with a bias, a residual or a gate, against the float32 oracle."""

import cases
import mlx.core as mx
import numpy as np
import pytest
import ref
import tolerance
from test_qmm import FOUR, ONE, planned

from mlx_phase.launch import qmm
from mlx_phase.problem import Matmul

M, N, K = 19, 21, 96


def weights(dtype: str, seed: int) -> tuple[list[mx.array], np.ndarray]:
    q = cases.random_weights(N, K, "affine", 4, 32, dtype, seed)
    return list(q.args), ref.dequantize(*q.args, 32, 4, "affine")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("bias", [True, False])
def test_bias_and_residual(dtype, bias):
    arrays, weight = weights(dtype, 0)
    x = cases.activations(M, K, dtype)
    res = cases.activations(1, N, dtype)[0] if bias else cases.activations(M, N, dtype)
    problem = Matmul(M, N, K, dtype, 4, 32)
    out = qmm.prepare_add(problem, bias, planned("qmm_add", ONE))(x, *arrays, res)
    right = ref.matmul(x, weight) + ref.to_numpy(res)
    dense = ref.dense(x, weight, dtype) + ref.to_numpy(res)
    tolerance.assert_close(out, right, dense, dtype)


def activation(name: str, g: np.ndarray) -> np.ndarray:
    if name == "silu":
        return g / (1 + np.exp(-g))
    return 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))


@pytest.mark.parametrize(
    "dtype,name,tile", [("bfloat16", "silu", FOUR), ("float32", "gelu_approx", ONE)]
)
def test_gate_and_up(dtype, name, tile):
    """Rows of both matrices take turns in the tile; N ends inside a turn."""
    (a, gate), (b, up) = weights(dtype, 1), weights(dtype, 2)
    x = cases.activations(M, K, dtype)
    problem = Matmul(M, N, K, dtype, 4, 32)
    out = qmm.prepare_glu(problem, name, planned("qmm_glu", tile))(x, *a, *b)
    right = activation(name, ref.matmul(x, gate)) * ref.matmul(x, up)
    dense = activation(name, ref.dense(x, gate, dtype)) * ref.dense(x, up, dtype)
    tolerance.assert_close(out, right, dense, dtype)


def test_what_they_do_not_take_is_an_error():
    with pytest.raises(ValueError, match="silu, gelu_approx"):
        qmm.prepare_glu(Matmul(M, N, K), "relu")
    with pytest.raises(ValueError, match="bias of 7"):
        qmm.prepare_add(Matmul(M, 7, K), True)
    with pytest.raises(ValueError, match="affine"):
        qmm.prepare_add(Matmul(M, N, K, "float16", 8, 32, "mxfp8"), True)
