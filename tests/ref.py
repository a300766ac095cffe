"""Float32 oracle for quantised matmul, written from the packed words (numpy only).

It imports nothing of mlx_phase and calls no MLX arithmetic, so a shared mistake
cannot hide. Sums run in float64: the oracle's own error is below every tolerance.
"""

import mlx.core as mx
import numpy as np

# OCP microscaling: sign bit, then 2 exponent and 1 mantissa bit.
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
FLOAT_MODES = ("mxfp4", "mxfp8", "nvfp4")


def to_numpy(a: mx.array | np.ndarray | None) -> np.ndarray | None:
    """Array as numpy; bfloat16 and float16 become float32 (exact)."""
    if a is None or isinstance(a, np.ndarray):
        return a
    if a.dtype in (mx.bfloat16, mx.float16):
        a = a.astype(mx.float32)
    return np.array(a)


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes of a little-endian bit stream: uint32 [..., W] -> uint32 [..., K].

    Code i takes bits i*bits .. (i+1)*bits, across word borders for 3, 5 and 6 bits.
    """
    words = words.astype(np.uint64)
    count = words.shape[-1] * 32 // bits
    start = np.arange(count) * bits
    word, shift = start // 32, (start % 32).astype(np.uint64)
    after = np.concatenate([words[..., 1:], np.zeros_like(words[..., :1])], axis=-1)
    wide = words[..., word] | (after[..., word] << np.uint64(32))
    mask = np.uint64((1 << bits) - 1)
    return ((wide >> shift) & mask).astype(np.uint32)


def decode_e2m1(codes: np.ndarray) -> np.ndarray:
    """4-bit float codes -> float32."""
    magnitude = E2M1[codes & 7]
    return np.where(codes & 8, -magnitude, magnitude).astype(np.float32)


def decode_e4m3(codes: np.ndarray) -> np.ndarray:
    """8-bit float codes (e4m3fn: no infinities, 0x7f is NaN) -> float32."""
    codes = codes.astype(np.uint32)
    exponent = ((codes >> 3) & 15).astype(np.int32)
    mantissa = (codes & 7).astype(np.float32)
    normal = np.ldexp(1.0 + mantissa / 8.0, exponent - 7)
    subnormal = np.ldexp(mantissa / 8.0, -6)
    out = np.where(exponent == 0, subnormal, normal)
    out = np.where((codes & 0x7F) == 0x7F, np.nan, out)
    return np.where(codes & 0x80, -out, out).astype(np.float32)


def decode_e8m0(codes: np.ndarray) -> np.ndarray:
    """Power-of-two scale bytes -> float32 (2**-127 .. 2**127)."""
    return np.ldexp(np.float32(1.0), codes.astype(np.int32) - 127).astype(np.float32)


def dequantize(w, scales, biases, group_size: int, bits: int, mode: str) -> np.ndarray:
    """Packed [..., N, W] with scales [..., N, K/group] -> float32 [..., N, K]."""
    codes = unpack(to_numpy(w), bits)
    s, b = to_numpy(scales), to_numpy(biases)
    if mode == "affine":
        s = np.repeat(s.astype(np.float32), group_size, axis=-1)
        b = np.repeat(b.astype(np.float32), group_size, axis=-1)
        return s * codes.astype(np.float32) + b
    if mode not in FLOAT_MODES:
        raise ValueError(f"the oracle knows no mode {mode!r}")
    value = decode_e4m3(codes) if mode == "mxfp8" else decode_e2m1(codes)
    scale = decode_e4m3(s) if mode == "nvfp4" else decode_e8m0(s)
    return value * np.repeat(scale, group_size, axis=-1)


def matmul(x, weight: np.ndarray) -> np.ndarray:
    """x [..., K] times float32 weight [..., N, K] transposed -> float32 [..., N]."""
    x = to_numpy(x).astype(np.float64)
    wide = weight.astype(np.float64)
    return (x @ np.swapaxes(wide, -1, -2)).astype(np.float32)


def quantized_matmul(x, w, scales, biases, group_size, bits, mode="affine"):
    """The right answer of mx.quantized_matmul(..., transpose=True), float32."""
    return matmul(x, dequantize(w, scales, biases, group_size, bits, mode))


def round_to(a: np.ndarray, dtype: str) -> np.ndarray:
    """Float32 values rounded to the nearest `dtype` value, still as float32."""
    a = np.asarray(a, np.float32)
    if dtype == "float32":
        return a
    if dtype == "float16":
        return a.astype(np.float16).astype(np.float32)
    if dtype != "bfloat16":
        raise ValueError(f"the oracle knows no dtype {dtype!r}")
    u = a.view(np.uint32).astype(np.uint64)
    even = (u + 0x7FFF + ((u >> 16) & 1)) & 0xFFFF0000
    return np.where(np.isnan(a), a, even.astype(np.uint32).view(np.float32))


def dense(x, weight: np.ndarray, dtype: str) -> np.ndarray:
    """The same product as a dense `dtype` matmul with float32 sums would give it."""
    x = round_to(to_numpy(x), dtype)
    w = round_to(weight, dtype)
    return round_to(x @ np.swapaxes(w, -1, -2), dtype)
