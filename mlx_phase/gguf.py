"""The GGUF container: checked before MLX touches it, then read.

`mx.load` maps the file and follows its offsets; a broken file must be refused
here, with a reason, before that. Format: github.com/ggml-org/ggml docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from . import gguf_q4k
from .model_error import ModelError

VERSIONS = (2, 3)
MAX_DIMS = 4
# GGUF value types: id -> (name, struct code). 8 is a string, 9 an array.
_SCALARS = {
    0: ("uint8", "B"),
    1: ("int8", "b"),
    2: ("uint16", "H"),
    3: ("int16", "h"),
    4: ("uint32", "I"),
    5: ("int32", "i"),
    6: ("float32", "f"),
    7: ("bool", "?"),
    10: ("uint64", "Q"),
    11: ("int64", "q"),
    12: ("float64", "d"),
}
_STRING, _ARRAY = 8, 9

# Tensor types that can be read: id -> (name, elements a block, bytes a block).
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    12: ("Q4_K", 256, 144),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
# Types that stay quantised in MLX: name -> (bits, group size).
QUANTISED = {"Q4_0": (4, 32), "Q4_1": (4, 32), "Q4_K": (4, 32), "Q8_0": (8, 32)}
# Names of the others, for the message only.
_OTHER_TYPES = {
    **{6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 11: "Q3_K", 13: "Q5_K", 15: "Q8_K"},
    **{16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL"},
    **{21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32"},
    **{27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"},
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the file: shape in row-major order, `start` in bytes."""

    name: str
    shape: tuple[int, ...]
    type: str
    start: int
    nbytes: int


@dataclass(frozen=True)
class GGUF:
    """A checked file: metadata as Python values and tensor infos by name."""

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Metadata value of the given type, or `default`; wrong type: ModelError."""
        value = self.metadata.get(key, default)
        if key in self.metadata and not _is(value, kind):
            raise ModelError(
                f"{self.path}: metadata {key!r} is {_show(value)}, "
                f"expected {getattr(kind, '__name__', kind)}"
            )
        return value

    def require(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """As `get`, but a missing key is a ModelError too."""
        if key not in self.metadata:
            raise ModelError(
                f"{self.path}: metadata {key!r} is missing; the file is incomplete "
                "or was written by a converter that this reader does not know"
            )
        return self.get(key, kind)


def _is(value: Any, kind: type | tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, kind)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class _Reader:
    """Bounds-checked little-endian reads over the mapped file."""

    def __init__(self, path: Path, data: mmap.mmap, size: int):
        self.path, self.data, self.size, self.at = path, data, size, 0

    def fail(self, reason: str) -> ModelError:
        return ModelError(f"{self.path}: corrupted GGUF, {reason}")

    def take(self, count: int, what: str) -> int:
        """Advance by `count` bytes; returns where they start."""
        start = self.at
        if count > self.size - start:
            raise self.fail(
                f"truncated in {what} (byte {start}: needs {count} bytes, file has "
                f"{self.size - start} left); download or copy it again"
            )
        self.at = start + count
        return start

    def unpack(self, code: str, what: str) -> Any:
        start = self.take(struct.calcsize("<" + code), what)
        return struct.unpack_from("<" + code, self.data, start)[0]

    def string(self, what: str) -> str:
        length = self.unpack("Q", what)
        start = self.take(length, what)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8 ({error.reason})") from error

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self.array(what)
        if kind not in _SCALARS:
            raise self.fail(f"{what} has unknown value type {kind}")
        return self.unpack(_SCALARS[kind][1], what)

    def array(self, what: str) -> list[Any]:
        kind, count = self.unpack("I", what), self.unpack("Q", what)
        if kind == _STRING:
            if count * 8 > self.size - self.at:
                self.take(count * 8, what)
            return [self.string(what) for _ in range(count)]
        if kind not in _SCALARS:
            name = "nested arrays" if kind == _ARRAY else f"unknown value type {kind}"
            raise self.fail(f"{what} is an array of {name}, which cannot be read")
        code = _SCALARS[kind][1]
        dtype = np.dtype("<" + code if code != "?" else "?")
        start = self.take(count * dtype.itemsize, what)
        return np.frombuffer(self.data, dtype, count, start).tolist()


def read(path: str | Path) -> GGUF:
    """Check the structure of a GGUF file and read its metadata.

    Every count, offset and size is checked against the file's length. Raises
    ModelError for a broken file, an unknown version or a tensor type that
    cannot be read.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size < 24:
            raise ModelError(
                f"{path}: corrupted GGUF, {size} bytes are too few for a header"
            )
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{path}: cannot read, {error.strerror or error}") from error
    reader = _Reader(path, data, size)
    reader.take(4, "header")
    if data[:4] != b"GGUF":
        raise ModelError(
            f"{path}: not a GGUF file (it starts with {data[:4]!r}, not b'GGUF')"
        )
    version = reader.unpack("I", "header")
    if version not in VERSIONS:
        swapped = version & 0xFFFF == 0 and version != 0
        raise ModelError(
            f"{path}: GGUF version {version} is not supported (supported: 2, 3)"
            + ("; the file is big-endian" if swapped else "")
        )
    n_tensors, n_values = reader.unpack("Q", "header"), reader.unpack("Q", "header")
    metadata: dict[str, Any] = {}
    for index in range(n_values):
        key = reader.string(f"metadata key {index}")
        if key in metadata:
            raise reader.fail(f"metadata {key!r} appears twice")
        what = f"metadata {key!r}"
        metadata[key] = reader.value(reader.unpack("I", what), what)
    infos = [_tensor_head(reader, index) for index in range(n_tensors)]
    tensors = _place(reader, metadata.get("general.alignment", 32), infos)
    return GGUF(path, version, metadata, tensors)


def _tensor_head(reader: _Reader, index: int) -> tuple[str, tuple[int, ...], int, int]:
    """(name, row-major shape, type id, offset) of one tensor's description."""
    name = reader.string(f"name of tensor {index}")
    what = f"description of tensor {name!r}"
    n_dims = reader.unpack("I", what)
    if not 1 <= n_dims <= MAX_DIMS:
        raise reader.fail(f"tensor {name!r} has {n_dims} dimensions (1 to {MAX_DIMS})")
    dims = tuple(reader.unpack("Q", what) for _ in range(n_dims))
    if min(dims) < 1:
        raise reader.fail(f"tensor {name!r} has an empty dimension: {dims}")
    kind, offset = reader.unpack("I", what), reader.unpack("Q", what)
    if kind not in TENSOR_TYPES:
        known = ", ".join(entry[0] for entry in TENSOR_TYPES.values())
        raise ModelError(
            f"{reader.path}: tensor {name!r} has type "
            f"{_OTHER_TYPES.get(kind, f'number {kind}')}, which is not supported; "
            f"re-quantise the model to one of {known} (best: Q4_1, Q4_0 or Q8_0)"
        )
    return name, dims[::-1], kind, offset


def _place(
    reader: _Reader,
    alignment: Any,
    infos: list[tuple[str, tuple[int, ...], int, int]],
) -> dict[str, TensorInfo]:
    """Tensor infos with absolute starts, each inside the file."""
    if not _is(alignment, int) or alignment < 8 or alignment % 8:
        raise reader.fail(f"general.alignment is {_show(alignment)}, not 8, 16, 32 ...")
    base = -(-reader.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in infos:
        if name in tensors:
            raise reader.fail(f"tensor {name!r} appears twice")
        type_name, block, block_bytes = TENSOR_TYPES[kind]
        if shape[-1] % block:
            raise reader.fail(
                f"tensor {name!r}: rows of {shape[-1]} elements are no multiple "
                f"of the {block} that {type_name} packs together"
            )
        elements = 1
        for dim in shape:
            elements *= dim
        nbytes = elements // block * block_bytes
        if offset % alignment:
            raise reader.fail(f"tensor {name!r} starts at an unaligned offset {offset}")
        if base + offset + nbytes > reader.size:
            raise reader.fail(
                f"tensor {name!r} ends at byte {base + offset + nbytes} but the file "
                f"has {reader.size}: truncated; download or copy it again"
            )
        tensors[name] = TensorInfo(name, shape, type_name, base + offset, nbytes)
    return tensors


def arrays(gguf: GGUF) -> dict[str, mx.array]:
    """Tensors as MLX arrays by file name (`blk.0.attn_q.weight`, `.scales` ...).

    Q4_0, Q4_1, Q4_K and Q8_0 stay quantised (affine, group 32), Q2_K and Q6_K
    become dense float16, BF16 stays bfloat16.
    """
    try:
        loaded = mx.load(str(gguf.path), format="gguf")
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"{gguf.path}: MLX cannot read it, {error}") from error
    for info in gguf.tensors.values():
        if info.type not in ("BF16", "Q4_K"):
            continue
        raw = np.fromfile(gguf.path, np.uint8, info.nbytes, offset=info.start)
        if info.type == "BF16":
            # mx.load makes float16 of it, which overflows above 65504.
            weight = mx.array(raw.view("<u2")).view(mx.bfloat16)
            loaded[info.name] = weight.reshape(info.shape)
        else:
            # mx.load (0.32.4) scales every second group with its neighbour's scale.
            stem = info.name.removesuffix(".weight")
            parts = map(mx.array, gguf_q4k.repack(raw, info.shape))
            names = (info.name, f"{stem}.scales", f"{stem}.biases")
            loaded.update(zip(names, parts, strict=True))
    return loaded
