"""Compile a kernel for CUDA as MLX would, without a GPU and without MLX's headers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_phase.executor import cuda_text, nvrtc, signature
from mlx_phase.executor.cuda_text import Kernel, Variant
from mlx_phase.executor.error import ExecutorError

#: What MLX's generated text takes from its own headers, without CCCL, whose cuda::std
#: headers take 3 s to compile: enough to compile the function that MLX would build.
STAND_IN = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
namespace cuda { namespace std {
template <typename T, unsigned long n> struct array {
  T e[n];
  const T* data() const { return e; }
};
} }
namespace mlx { namespace core { namespace cu {
typedef signed char int8_t; typedef unsigned char uint8_t;
typedef short int16_t; typedef unsigned short uint16_t;
typedef int int32_t; typedef unsigned int uint32_t;
typedef long long int64_t; typedef unsigned long long uint64_t;
struct alignas(8) complex64_t { float re, im; };
using Shape = ::cuda::std::array<int, 10>;
using Strides = ::cuda::std::array<int64_t, 10>;
} } }
"""

_CUDA_TYPES = {"float16_t": "__half", "bfloat16_t": "__nv_bfloat16"}


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
    body = cuda_text.call(kernel, variant)
    parameters = []
    for i, arg in enumerate(inputs):
        parameters.append(f"const {_CUDA_TYPES.get(arg.dtype, arg.dtype)}* in{i}")
        if arg.ndim:
            for suffix, kind in (("shape", "Shape"), ("strides", "Strides")):
                if f"in{i}_{suffix}" in body:
                    parameters.append(f"const __grid_constant__ {kind} in{i}_{suffix}")
            if f"in{i}_ndim" in body:
                parameters.append(f"const __grid_constant__ int in{i}_ndim")
    if partial:
        parameters.append(f"const uint32_t* {cuda_text.GRID_NAME}")
    for i, arg in enumerate(outputs):
        parameters.append(f"{_CUDA_TYPES.get(arg.dtype, arg.dtype)}* out{i}")
    lines = [STAND_IN, cuda_text.definition(kernel, variant)]
    lines += ['#line 1 "generated"', "namespace mlx::core::cu {"]
    lines.append(f"__global__ void custom_kernel_{name}({', '.join(parameters)}) {{")
    lines += [body, "}", "}", ""]
    try:
        # Code for the linker is not optimised yet, which takes longer than the rest.
        options = () if ptx else ("-dlto",)
        made = nvrtc.compile_ptx("\n".join(lines), name, arch, options)
        return made if ptx else ""
    except nvrtc.NvrtcError as error:
        raise ExecutorError(
            f"kernel {name} does not compile for {arch}:\n{error}"
        ) from error
