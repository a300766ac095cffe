"""Compile a kernel for CUDA as MLX would, without a GPU and without MLX's headers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_phase.executor import cuda_module, nvrtc, signature
from mlx_phase.executor.cuda_text import Kernel, Variant
from mlx_phase.executor.error import ExecutorError


def compile_check(
    name: str,
    inputs: Sequence[signature.Arg],
    outputs: Sequence[signature.Arg],
    source: str,
    header: str = "",
    template: Sequence[tuple[str, Any]] | None = None,
    *,
    atomic_outputs: bool = False,
    arch: str = "sm_80",
    ragged: bool = False,
    partial: bool = False,
    ptx: bool = True,
) -> str:
    """Compile a kernel as MLX would and return its PTX; needs NVRTC, but no GPU.

    ``ptx`` False: stop before code is optimised, in a third of the time; returns "".
    Raises ExecutorError with the compiler's log, nvrtc.NvrtcMissing without NVRTC.
    """
    kernel = Kernel(
        name,
        tuple(a.name for a in inputs),
        tuple(a.name for a in outputs),
        source,
        header,
        atomic_outputs,
    )
    variant = Variant(
        tuple(a.ndim == 0 for a in inputs),
        signature.template_arguments(template),
        ragged,
        partial,
    )
    types = [[a.dtype for a in args] for args in (inputs, outputs)]
    text = cuda_module.module(kernel, variant, *types)
    try:
        # Code for the linker is not optimised yet, which takes longer than the rest.
        options = () if ptx else ("-dlto",)
        made = nvrtc.compile_ptx(text, name, arch, options)
        return made if ptx else ""
    except nvrtc.NvrtcError as error:
        raise ExecutorError(
            f"kernel {name} does not compile for {arch}:\n{error}"
        ) from error
