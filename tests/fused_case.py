"""Oracles of the fused decode launches, float64 NumPy; imports no mlx_phase."""

import math

import cases
import mlx.core as mx
import numpy as np
import ref
import tolerance

EPS = 1e-5


def wide(a) -> np.ndarray:
    return ref.to_numpy(a).astype(np.float64)


def weights(N: int, K: int, dtype: str, bits=4, group=64, seed=0) -> cases.Weights:
    return cases.random_weights(N, K, "affine", bits, group, dtype, seed=seed)


def matrix(q: cases.Weights) -> np.ndarray:
    return ref.dequantize(*q.args, q.group_size, q.bits, q.mode).astype(np.float64)


def norm(x: np.ndarray, weight: np.ndarray, eps: float = EPS) -> np.ndarray:
    """RMS norm over the last axis."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def silu(g: np.ndarray) -> np.ndarray:
    return g / (1 + np.exp(-g))


def gelu_approx(g: np.ndarray) -> np.ndarray:
    return 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))


def gelu(g: np.ndarray) -> np.ndarray:
    return 0.5 * g * (1 + np.vectorize(math.erf)(g / math.sqrt(2)))


def angles(L: int, start: int, D: int, dims: int, traditional: bool) -> np.ndarray:
    """cos and sin [L, D] as the kernels take them; 0 where nothing rotates."""
    pair = np.arange(dims // 2)
    theta = np.arange(start, start + L)[:, None] * 10000.0 ** (-2 * pair / dims)
    out = np.zeros((L, D))
    first, second = places(dims, traditional)
    out[:, first], out[:, second] = np.cos(theta), np.sin(theta)
    return out


def places(dims: int, traditional: bool) -> tuple[np.ndarray, np.ndarray]:
    """First and second dims of the pairs that rotate."""
    pair = np.arange(dims // 2)
    if traditional:
        return 2 * pair, 2 * pair + 1
    return pair, pair + dims // 2


def rotate(x: np.ndarray, cs: np.ndarray, dims: int, traditional: bool) -> np.ndarray:
    """x [B, H, L, D] with pairs turned by cs [L, D]."""
    first, second = places(dims, traditional)
    c, s = cs[:, first], cs[:, second]
    out = x.copy()
    out[..., first] = x[..., first] * c - x[..., second] * s
    out[..., second] = x[..., second] * c + x[..., first] * s
    return out


def assert_behind(both: mx.array, q: mx.array, kv: mx.array) -> None:
    """One array has the bits of q and then those of kv."""
    want = mx.concatenate([q.reshape(-1), kv.reshape(-1)])
    tolerance.assert_bits(both.reshape(-1), want)


def heads(y: np.ndarray, D: int) -> np.ndarray:
    """[B, L, N] -> [B, N / D, L, D]."""
    B, L, N = y.shape
    return y.reshape(B, L, N // D, D).transpose(0, 2, 1, 3)


def rounded(a: np.ndarray, dtype: str) -> np.ndarray:
    """The same numbers rounded to ``dtype`` once: the least error there can be."""
    return ref.round_to(a.astype(np.float32), dtype)


def vector(K: int, dtype: str, seed: int) -> mx.array:
    rng = np.random.default_rng(seed)
    return mx.array(rng.uniform(0.5, 1.5, K).astype(np.float32)).astype(
        getattr(mx, dtype)
    )
