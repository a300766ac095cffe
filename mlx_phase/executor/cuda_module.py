"""The CUDA text of a whole module around a Metal kernel: pure text, no mlx."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_phase.executor.cuda_text import GRID_NAME, Kernel, Variant, call, definition

#: What the generated text takes from MLX's headers. Those take 2 s to compile.
_STAND_IN = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
namespace mlx { namespace core { namespace cu {
typedef signed char int8_t; typedef unsigned char uint8_t;
typedef short int16_t; typedef unsigned short uint16_t;
typedef int int32_t; typedef unsigned int uint32_t;
typedef long long int64_t; typedef unsigned long long uint64_t;
struct alignas(8) complex64_t { float re, im; };
template <typename T> struct Ten {
  T e[10];
  const T* data() const { return e; }
};
using Shape = Ten<int>;
using Strides = Ten<int64_t>;
} } }
"""

#: A template argument of this name says how many registers a thread may take. NVRTC
#: 13.0 gave a kernel 180, so that two threadgroups fitted on a core: 168 leave room for
#: three.
REGISTERS = "REGISTERS"
#: Kinds of a shape, which the text finds in this order.
_SIZES = {"shape": "Shape", "strides": "Strides", "ndim": "int"}

_RAW = {"float16_t": "__half", "bfloat16_t": "__nv_bfloat16"}


def module(
    kernel: Kernel,
    variant: Variant,
    inputs: Sequence[str],
    outputs: Sequence[str],
    ndims: Sequence[int] | None = None,
) -> str:
    """The text of a whole module, compiled without MLX: one function, `entry(kernel)`.

    inputs, outputs: Metal's names of the arrays' types. Parameters are those of the
    function that MLX would generate. With the inputs' ``ndims``, shapes come after the
    outputs, as an int for each axis of `shaped` inputs, and before them one that is 0
    to do nothing; strides are not known then.
    """
    body, first, last, shapes = call(kernel, variant), [], ["const int run"], []
    for i, kind in enumerate(inputs):
        first.append(f"const {_RAW.get(kind, kind)}* in{i}")
        asked = [s for s in _SIZES if f"in{i}_{s}" in body]
        if ndims is None:
            sizes = [f"{_SIZES[s]} in{i}_{s}" for s in asked]
            first += [f"const __grid_constant__ {size}" for size in sizes]
        elif asked:
            axes = [f"in{i}_axis{axis}" for axis in range(ndims[i])]
            last += [f"const int {axis}" for axis in axes]
            shapes.append(f"const Shape in{i}_shape = {{{{{', '.join(axes)}}}}};")
            shapes.append(f"const int in{i}_ndim = {ndims[i]};")
    if variant.partial:
        first.append(f"const uint32_t* {GRID_NAME}")
    for i, kind in enumerate(outputs):
        first.append(f"{_RAW.get(kind, kind)}* out{i}")
    if ndims is not None:
        first += last
        body = "\n".join(["if (!run) return;", *shapes, body])
    function = f'extern "C" __global__ void {entry(kernel)}({", ".join(first)}) {{'
    text = definition(kernel, variant) + limit(variant)
    lines = [_STAND_IN, text, '#line 1 "generated"']
    lines += ["namespace mlx::core::cu {", function, body, "}", "}", ""]
    return "\n".join(lines)


def limit(variant: Variant) -> str:
    """Text before a function that is launched, for it to take no more registers."""
    for argument in variant.template:
        if argument.name == REGISTERS:
            most = f"__attribute__((global)) __maxnreg__({argument.value})"
            return f"#undef __global__\n#define __global__ {most}\n"
    return ""


def entry(kernel: Kernel) -> str:
    """The name of a module's function."""
    return f"mlx_phase_{kernel.name}"
