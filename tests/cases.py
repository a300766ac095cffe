"""Shared shapes and probes with exact answers."""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np

AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)
# mode -> (bits, group size); affine has its own two lists.
FLOAT_MODES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
DTYPES = ("float16", "bfloat16", "float32")
FORMATS = [("affine", b, g) for b in AFFINE_BITS for g in AFFINE_GROUPS] + [
    (mode, b, g) for mode, (b, g) in FLOAT_MODES.items()
]


@dataclass
class Weights:
    """Quantised weights of logical shape [N, K] with the arguments they go with."""

    w: mx.array
    scales: mx.array
    biases: mx.array | None
    group_size: int
    bits: int
    mode: str = "affine"

    @property
    def args(self) -> tuple:
        """Positional arguments after x."""
        return self.w, self.scales, self.biases

    @property
    def kwargs(self) -> dict:
        """Keyword arguments of quantized_matmul."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    def rows(self, start: int, stop: int) -> "Weights":
        """Rows start..stop as lazy views."""
        cut = [None if a is None else a[start:stop] for a in self.args]
        return Weights(*cut, self.group_size, self.bits, self.mode)


def quantise(dense: mx.array, mode="affine", bits=4, group_size=64) -> Weights:
    """Quantise [N, K] with MLX; odd row counts work for every mode."""
    n = dense.shape[0]
    # mx.quantize(mode="nvfp4") fails on CPU when rows x K is no multiple of 32.
    even = mx.concatenate([dense, dense[:1]]) if n % 2 else dense
    parts = mx.quantize(even, group_size=group_size, bits=bits, mode=mode)
    w, scales, *biases = (a[:n] for a in parts)
    return Weights(w, scales, biases[0] if biases else None, group_size, bits, mode)


def random_weights(n, k, mode="affine", bits=4, group_size=64, dtype="float32", seed=0):
    """Seeded normal weights / sqrt(K), quantised by MLX in `dtype`."""
    rng = np.random.default_rng([seed, n, k, bits])
    dense = mx.array(rng.normal(size=(n, k)).astype(np.float32) / k**0.5)
    return quantise(dense.astype(getattr(mx, dtype)), mode, bits, group_size)


def exact_weights(n, k, mode="affine", bits=4, group_size=64, dtype="float32", seed=0):
    """Random codes with short scales: each single weight is exact in float32."""
    rng = np.random.default_rng([seed, n, k, bits])
    words = mx.array(rng.integers(0, 2**32, (n, k * bits // 32), dtype=np.uint32))
    groups = (n, k // group_size)
    if mode == "affine":
        scales = mx.array(rng.integers(1, 16, groups) / 64.0, getattr(mx, dtype))
        biases = mx.array(rng.integers(-8, 8, groups) / 8.0, getattr(mx, dtype))
        return Weights(words, scales, biases, group_size, bits, mode)
    if mode == "mxfp8":
        # 0x7f and 0xff are NaN; clearing one exponent bit avoids both.
        words = words & mx.array(0xBFBFBFBF, mx.uint32)
    low, high = (0x20, 0x60) if mode == "nvfp4" else (120, 132)
    scales = mx.array(rng.integers(low, high, groups, dtype=np.uint8))
    return Weights(words, scales, None, group_size, bits, mode)


def const_values(n: int, mode: str = "affine") -> np.ndarray:
    """Row constants of the const probe, exact in every format."""
    if mode == "nvfp4":
        return np.array([-3, -1.5, 0, 1.5, 3], np.float32)[np.arange(n) % 5]
    return (np.arange(n) % 7 - 3).astype(np.float32)


def const_probe(n, k, mode="affine", bits=4, group_size=64, dtype="float16"):
    """(weights, row constants): with x = 1 the product is exactly K * constant."""
    c = const_values(n, mode)
    dense = mx.broadcast_to(mx.array(c)[:, None], (n, k)).astype(getattr(mx, dtype))
    return quantise(dense, mode, bits, group_size), c


def one_hot_positions(k: int, group_size: int) -> list[int]:
    """Positions that catch unpack order, tails and scale indices."""
    return sorted({0, 1, k // 2, k - group_size - 1, k - 2, k - 1} - {-1})


def one_hot(k: int, at: int, dtype: str = "float32") -> mx.array:
    """[1, K] with a single 1."""
    return (mx.arange(k)[None] == at).astype(getattr(mx, dtype))


def poisoned(x: mx.array, tail: int = 64) -> mx.array:
    """x as a view of a buffer whose rows go on with NaN."""
    nan = mx.full((*x.shape[:-1], tail), float("nan"), dtype=x.dtype)
    buffer = mx.concatenate([x, nan], axis=-1)
    mx.eval(buffer)
    return buffer[..., : x.shape[-1]]


def activations(m: int, k: int, dtype: str = "float32", seed: int = 1) -> mx.array:
    """Seeded normal activations [M, K]."""
    rng = np.random.default_rng([seed, m, k])
    x = mx.array(rng.normal(size=(m, k)).astype(np.float32))
    return x.astype(getattr(mx, dtype))
