"""Q4_K in MLX's layout: both scale 32 codes of 4 bits, so nothing is requantised."""

from __future__ import annotations

import numpy as np

BLOCK, BLOCK_BYTES = 256, 144


def repack(
    data: np.ndarray, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(weight uint32 [N, K/8], scales [N, K/32], biases) of Q4_K bytes [N, K].

    w = scale * code + bias in affine 4-bit, group 32; scales and biases are
    float32, where the products of the two levels of scales are exact.
    """
    blocks = data.reshape(-1, BLOCK_BYTES)
    d, dmin = blocks[:, :4].copy().view("<f2").astype(np.float32).T[..., None]
    # Twelve bytes hold eight 6-bit scales and minima: the first four in whole
    # bytes, the last four split into nibbles and the bytes' spare top bits.
    first, second, third = np.split(blocks[:, 4:16], 3, axis=1)
    scale = np.hstack([first & 63, third & 15 | first >> 6 << 4])
    low = np.hstack([second & 63, third >> 4 | second >> 6 << 4])
    # 32 bytes hold two groups, one in the low nibbles and one in the high.
    packed = blocks[:, 16:].reshape(-1, 4, 1, 32)
    codes = np.concatenate([packed & 15, packed >> 4], axis=2).reshape(-1, BLOCK)
    words = np.ascontiguousarray(codes[:, 0::2] | codes[:, 1::2] << 4).view("<u4")
    rows = (*shape[:-1], -1)
    return (
        words.reshape(rows),
        (d * scale).reshape(rows),
        (-dmin * low).reshape(rows),
    )
