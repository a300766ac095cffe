"""CUDA kernels that are compiled here, kept on disk and launched without MLX's NVRTC.

MLX compiles a custom kernel anew in each process, 3 s each, and builds, copies and
hashes its text on every call. A module of ours is compiled once for a machine, and
later calls name it only.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable

import mlx.core as mx

from mlx_phase.executor import cuda_store, cuda_text, nvrtc
from mlx_phase.executor.cuda_text import Kernel, Variant
from mlx_phase.executor.error import ExecutorError
from mlx_phase.executor.signature import METAL_TYPES


def supported(kernel: Kernel) -> bool:
    """Whether a kernel can be launched as a module: MLX must be able to launch one,
    NVRTC must be found, and strides are known only to MLX."""
    return (
        hasattr(mx.fast, "precompiled_cuda_kernel")
        and not kernel.takes_shapes()
        and _compiler() is not None
    )


def build(
    kernel: Kernel,
    variant: Variant,
    types: tuple[tuple[mx.Dtype, ...], tuple[mx.Dtype, ...]],
    ensure_row_contiguous: bool,
) -> Callable[..., list[mx.array]]:
    """A function that launches ``kernel`` on inputs and outputs of these types, with
    the keywords of MLX's kernels. The module has been compiled and loaded.

    Raises ExecutorError with the compiler's log.
    """
    kinds = [[_metal_type(d) for d in side] for side in types]
    text = cuda_text.module(kernel, variant, *kinds, guarded=True)
    name, cubin = _compiled(kernel, text)
    launch = functools.partial(
        mx.fast.precompiled_cuda_kernel,
        name=name,
        ensure_row_contiguous=ensure_row_contiguous,
    )
    # MLX finds a loaded module by its name, so that this copy of it is the last.
    loaded = launch(
        compiled_source=cubin,
        scalars=[0],
        inputs=[mx.zeros((1,), mx.uint32)] * (len(types[0]) + variant.partial),
        output_shapes=[(1,)] * len(types[1]),
        output_dtypes=types[1],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
    )
    mx.eval(loaded)
    return functools.partial(launch, compiled_source=b"", scalars=[1])


def _metal_type(dtype: mx.Dtype) -> str:
    return METAL_TYPES[str(dtype).rpartition(".")[2]]


def _compiled(kernel: Kernel, text: str) -> tuple[str, bytes]:
    """The module of a text and its name, which is also that of its function."""
    arch, version = _compiler()
    key = f"{arch} {version} {cuda_store.library_hash()} {text}"
    name = f"{cuda_text.entry(kernel)}_{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    text = text.replace(f" {cuda_text.entry(kernel)}(", f" {name}(")

    def compiled() -> bytes:
        try:
            return nvrtc.compile_cubin(text, name, arch)
        except nvrtc.NvrtcError as error:
            raise ExecutorError(
                f"kernel {kernel.name} does not compile for {arch}:\n{error}"
            ) from error

    return name, cuda_store.kept(f"{name}.cubin", compiled)


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
