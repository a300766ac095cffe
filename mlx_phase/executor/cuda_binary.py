"""CUDA kernels that are compiled here, kept on disk and launched without MLX's NVRTC.

MLX compiles a custom kernel anew in each process, 3 s each, and builds, copies and
hashes its text on every call. A module of ours is compiled once for a machine, and
later calls only name it.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable

import mlx.core as mx

from mlx_phase.executor import cuda_module, cuda_store, nvrtc
from mlx_phase.executor.cuda_text import Kernel, Variant
from mlx_phase.executor.error import ExecutorError
from mlx_phase.executor.signature import METAL_TYPES

#: Types of inputs, numbers of axes of those that are `shaped` (else 0), output types.
Types = tuple[tuple[mx.Dtype, ...], tuple[int, ...], tuple[mx.Dtype, ...]]


def supported(kernel: Kernel) -> bool:
    """Whether a kernel can be launched as a module: MLX must be able to launch one,
    NVRTC must be found, and strides are known only to MLX."""
    return (
        hasattr(mx.fast, "precompiled_cuda_kernel")
        and not kernel.takes_strides()
        and _compiler() is not None
    )


def build(
    kernel: Kernel, variant: Variant, ensure_row_contiguous: bool, types: Types
) -> Callable[..., list[mx.array]] | None:
    """A function that launches ``kernel`` on arrays of these types, with the keywords
    of MLX's launch of modules: ``scalars`` is [1, and the sizes of `shaped` inputs].
    The module has been compiled and loaded; None where only MLX may manage: it would
    not find a module again, Metal lacks a type, or this NVRTC is not for this GPU.

    Raises ExecutorError with the compiler's log.
    """
    inputs, ndims, outputs = types
    if mx.float64 in inputs:
        return None
    kinds = [[_metal_type(d) for d in side] for side in (inputs, outputs)]
    text = cuda_module.module(kernel, variant, *kinds, ndims)
    try:
        name, cubin = _compiled(kernel, text)
    except nvrtc.NvrtcUnfit:
        return None
    launch = functools.partial(
        mx.fast.precompiled_cuda_kernel,
        name=name,
        ensure_row_contiguous=ensure_row_contiguous,
    )
    # MLX copies and hashes a module in every launch, to find the one that it loaded. An
    # alias of the same hash finds it too. Both are launched here, to do nothing.
    scalars = [0] * (1 + sum(ndims))
    try:
        for source in (cubin, alias := _alias(cubin)):
            loaded = launch(
                compiled_source=source,
                scalars=scalars,
                inputs=[mx.zeros((1,), mx.uint32)] * (len(inputs) + variant.partial),
                output_shapes=[(1,)] * len(outputs),
                output_dtypes=outputs,
                grid=(1, 1, 1),
                threadgroup=(1, 1, 1),
                stream=mx.gpu,
            )
            mx.eval(loaded)
    except (RuntimeError, TypeError):
        # MLX calls this launch experimental: another version may take other arguments.
        return None
    return functools.partial(launch, compiled_source=alias)


# std::hash of a string, as in GCC's library: MurmurHash64A, of which each step can be
# undone.
_MUL, _SEED, _MASK = 0xC6A4A7935BD1E995, 0xC70F6907, (1 << 64) - 1


def _mix(value: int) -> int:
    return value ^ value >> 47  # its own inverse


def _hash(data: bytes) -> int:
    value, whole = _SEED ^ len(data) * _MUL & _MASK, len(data) // 8 * 8
    for (word,) in struct.iter_unpack("<Q", data[:whole]):
        value = (value ^ _mix(word * _MUL & _MASK) * _MUL) * _MUL & _MASK
    if tail := data[whole:]:
        value = (value ^ int.from_bytes(tail, "little")) * _MUL & _MASK
    return _mix(_mix(value) * _MUL & _MASK)


def _alias(data: bytes) -> bytes:
    """Eight bytes that have the hash of ``data``."""
    undo = pow(_MUL, -1, 1 << 64)
    value = _mix(_mix(_hash(data)) * undo & _MASK) * undo & _MASK
    value ^= _SEED ^ 8 * _MUL & _MASK
    return (_mix(value * undo & _MASK) * undo & _MASK).to_bytes(8, "little")


def _metal_type(dtype: mx.Dtype) -> str:
    return METAL_TYPES[str(dtype).rpartition(".")[2]]


def _compiled(kernel: Kernel, text: str) -> tuple[str, bytes]:
    """The module of a text and its name, which is also that of its function."""
    arch, version = _compiler()
    key = f"{arch} {version} {cuda_store.library_hash()} {text}"
    name = (
        f"{cuda_module.entry(kernel)}_{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    )
    text = text.replace(f" {cuda_module.entry(kernel)}(", f" {name}(")

    def compiled() -> bytes:
        try:
            return nvrtc.compile_cubin(text, name, arch)
        except nvrtc.NvrtcUnfit:
            raise
        except nvrtc.NvrtcError as error:
            raise ExecutorError(
                f"kernel {kernel.name} does not compile for {arch}:\n{error}"
            ) from error

    return name, cuda_store.kept_sealed(f"{name}.cubin", compiled)


@functools.cache
def _compiler() -> tuple[str, tuple[int, int]] | None:
    """The GPU's architecture and the version of NVRTC; None without one of them."""
    if not mx.cuda.is_available():
        return None
    try:
        nvrtc.include_paths()
        version = nvrtc.version()
    except nvrtc.NvrtcMissing:
        return None
    arch = str(mx.device_info(mx.gpu)["architecture"]).rstrip("a")
    # Some instructions are for exactly one architecture, as MLX asks for too.
    return arch + "a" * (int(arch.removeprefix("sm_")) >= 90), version
