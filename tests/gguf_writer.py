"""A minimal GGUF writer for tests: header, metadata, plain and quantised tensors."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

ALIGNMENT = 32
# A tensor as raw bytes: (type id, row-major shape, data).
Raw = tuple[int, tuple[int, ...], bytes]
TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "BF16": 30}


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def value(item: Any) -> tuple[int, bytes]:
    """(GGUF value type, payload) of a Python value; ints become uint32."""
    if isinstance(item, bool):
        return 7, struct.pack("<?", item)
    if isinstance(item, int):
        return 4, struct.pack("<I", item)
    if isinstance(item, float):
        return 6, struct.pack("<f", item)
    if isinstance(item, str):
        return 8, string(item)
    if isinstance(item, list):
        parts = [value(part) for part in item]
        kind = parts[0][0] if parts else 8
        return 9, struct.pack("<IQ", kind, len(parts)) + b"".join(p for _, p in parts)
    raise TypeError(type(item))


def encode(weights: np.ndarray, kind: str) -> bytes:
    """Bytes of a float32 array in a GGUF tensor type (blocks of 32 in a row)."""
    if kind == "F32":
        return weights.astype("<f4").tobytes()
    if kind == "F16":
        return weights.astype("<f2").tobytes()
    if kind == "BF16":
        return (weights.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    blocks = weights.reshape(-1, 32).astype(np.float32)
    out = []
    for block in blocks:
        if kind == "Q8_0":
            scale = np.float16(np.abs(block).max() / 127)
            q = np.rint(block / np.float32(scale or 1)).clip(-127, 127)
            out.append(scale.tobytes() + q.astype(np.int8).tobytes())
            continue
        if kind == "Q4_0":
            peak = block[np.abs(block).argmax()]
            scale, low = np.float16(peak / -8), None
            q = np.rint(block / np.float32(scale or 1) + 8)
        else:
            low = np.float16(block.min())
            scale = np.float16((block.max() - block.min()) / 15)
            q = np.rint((block - np.float32(low)) / np.float32(scale or 1))
        q = q.clip(0, 15).astype(np.uint8)
        head = scale.tobytes() + (low.tobytes() if low is not None else b"")
        # The low nibbles hold elements 0..15 of a block, the high ones 16..31.
        out.append(head + (q[:16] | (q[16:] << 4)).tobytes())
    return b"".join(out)


def decode(data: bytes, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Float32 array of GGUF tensor bytes, the inverse of `encode`."""
    if kind == "F32":
        return np.frombuffer(data, "<f4").reshape(shape)
    if kind == "F16":
        return np.frombuffer(data, "<f2").astype(np.float32).reshape(shape)
    if kind == "BF16":
        bits = np.frombuffer(data, "<u2").astype(np.uint32) << 16
        return bits.view(np.float32).reshape(shape)
    size = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind]
    rows = []
    for start in range(0, len(data), size):
        block = data[start : start + size]
        scale = np.frombuffer(block[:2], "<f2").astype(np.float32)
        if kind == "Q8_0":
            rows.append(scale * np.frombuffer(block[2:], np.int8))
            continue
        packed = np.frombuffer(block[-16:], np.uint8)
        q = np.concatenate([packed & 15, packed >> 4]).astype(np.float32)
        low = -8 * scale
        if kind == "Q4_1":
            low = np.frombuffer(block[2:4], "<f2").astype(np.float32)
        rows.append(scale * q + low)
    return np.concatenate(rows).reshape(shape)


def _q4_k(block: bytes) -> np.ndarray:
    d, dmin = np.frombuffer(block[:4], "<f2").astype(np.float32)
    packed, codes = block[4:16], np.frombuffer(block[16:], np.uint8)
    out = []
    for j in range(8):
        if j < 4:
            scale, low = packed[j] & 63, packed[j + 4] & 63
        else:
            scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4
            low = (packed[j + 4] >> 4) | (packed[j] >> 6) << 4
        q = codes[j // 2 * 32 :][:32] >> (4 * (j % 2)) & 15
        out.append(d * scale * q - dmin * low)
    return np.concatenate(out)


def _q6_k(block: bytes) -> np.ndarray:
    low = np.frombuffer(block[:128], np.uint8)
    high = np.frombuffer(block[128:192], np.uint8)
    scales = np.frombuffer(block[192:208], np.int8).astype(np.float32)
    d = np.frombuffer(block[208:], "<f2").astype(np.float32)
    out = []
    for j in range(8):
        half, part = divmod(j, 4)
        four = low[half * 64 + part % 2 * 32 :][:32] >> (4 * (part // 2)) & 15
        two = high[half * 32 :][:32] >> (2 * part) & 3
        q = (four | two << 4).astype(np.float32) - 32
        out.append(d * np.repeat(scales[2 * j : 2 * j + 2], 16) * q)
    return np.concatenate(out)


def _q2_k(block: bytes) -> np.ndarray:
    scales, codes = block[:16], np.frombuffer(block[16:80], np.uint8)
    d, dmin = np.frombuffer(block[80:], "<f2").astype(np.float32)
    out = []
    for j in range(16):
        half, part = divmod(j, 8)
        q = codes[half * 32 + part % 2 * 16 :][:16] >> (2 * (part // 2)) & 3
        out.append(d * (scales[j] & 15) * q - dmin * (scales[j] >> 4))
    return np.concatenate(out)


# name -> (type id, bytes a block of 256, byte offsets of its float16 scales, decoder)
K_QUANTS = {
    "Q2_K": (10, 84, (80, 82), _q2_k),
    "Q4_K": (12, 144, (0, 2), _q4_k),
    "Q6_K": (14, 210, (208,), _q6_k),
}


def random_k_quant(name: str, rows: int) -> tuple[Raw, np.ndarray]:
    """A tensor of random codes [rows, 512] and its float32 values."""
    type_id, size, scales, decoder = K_QUANTS[name]
    rng = np.random.default_rng(type_id)
    blocks = rng.integers(0, 256, (rows * 2, size), np.uint8)
    for at in scales:
        blocks[:, at : at + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    values = np.stack([decoder(block.tobytes()) for block in blocks])
    return (type_id, (rows, 512), blocks.tobytes()), values.reshape(rows, 512)


def build(
    metadata: dict[str, Any],
    tensors: dict[str, tuple[np.ndarray, str] | Raw],
    version: int = 3,
    magic: bytes = b"GGUF",
) -> bytes:
    """GGUF file bytes; a tensor is (float32 array, type name) or raw bytes."""
    head = magic + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, item in metadata.items():
        kind, payload = value(item)
        head += string(key) + struct.pack("<I", kind) + payload
    data = b""
    for name, tensor in tensors.items():
        if len(tensor) == 2:
            weights, type_name = tensor
            blob = encode(weights, type_name)
            tensor = (TYPES[type_name], weights.shape, blob)
        type_id, shape, blob = tensor
        head += string(name) + struct.pack("<I", len(shape))
        head += b"".join(struct.pack("<Q", dim) for dim in reversed(shape))
        head += struct.pack("<IQ", type_id, len(data))
        data += blob + b"\0" * (-len(blob) % ALIGNMENT)
    return head + b"\0" * (-len(head) % ALIGNMENT) + data


def write(path: Path, *args: Any, **kwargs: Any) -> Path:
    """Write `build(...)` to `path`; returns it."""
    path.write_bytes(build(*args, **kwargs))
    return path
