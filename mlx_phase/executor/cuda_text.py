"""Turn Metal kernel text into CUDA's: pure text, no mlx.

The kernel becomes a function template in namespace msl (include/metal_cuda.h), which is
called by a module of ours (`cuda_module.py`) or by the body that mx.fast.cuda_kernel
takes. So Metal's names mean the same as on Metal, the template arguments are real ones,
and the text that MLX copies on every call is short.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from mlx_phase.executor import text as rewrite
from mlx_phase.executor.signature import TemplateArg
from mlx_phase.executor.twins import drop_twins

INCLUDE = Path(__file__).parent / "include"

#: Input that carries the grid's size where threadgroups do not divide it.
GRID_NAME = "msl_extent"

_POSITION = "msl_block() * msl_block_size() + msl_thread()"
_BLOCK = {
    False: "msl_block_size()",
    True: "min(msl_block_size(), msl_grid - msl_block() * msl_block_size())",
}

#: Attribute name -> (type, expression); {block} is the actual threadgroup size.
ATTRIBUTES = {
    "thread_position_in_grid": ("uint3", _POSITION),
    "thread_position_in_threadgroup": ("uint3", "msl_thread()"),
    "threadgroup_position_in_grid": ("uint3", "msl_block()"),
    "threadgroups_per_grid": ("uint3", "msl_blocks()"),
    "threads_per_grid": ("uint3", "msl_grid"),
    "threads_per_threadgroup": ("uint3", "{block}"),
    "grid_size": ("uint3", "msl_grid"),
    "grid_origin": ("uint3", "uint3(0)"),
    "thread_index_in_simdgroup": ("uint", "msl_lane()"),
    "simdgroup_index_in_threadgroup": ("uint", "msl_linear() / 32u"),
    "thread_index_in_threadgroup": ("uint", "msl_linear(msl_thread(), {block})"),
    "simdgroups_per_threadgroup": ("uint", "(msl_volume({block}) + 31u) / 32u"),
    "threads_per_simdgroup": ("uint", "32u"),
    "thread_execution_width": ("uint", "32u"),
    "quadgroup_index_in_threadgroup": ("uint", "msl_linear() / 4u"),
    "thread_index_in_quadgroup": ("uint", "msl_lane() % 4u"),
    "quadgroups_per_threadgroup": ("uint", "(msl_volume({block}) + 3u) / 4u"),
    "dispatch_threads_per_threadgroup": ("uint3", "msl_block_size()"),
    "dispatch_simdgroups_per_threadgroup": (
        "uint",
        "(msl_volume(msl_block_size()) + 31u) / 32u",
    ),
    "dispatch_quadgroups_per_threadgroup": (
        "uint",
        "(msl_volume(msl_block_size()) + 3u) / 4u",
    ),
}


@dataclass(frozen=True)
class Variant:
    """What changes the generated text of one kernel.

    scalars: for each input, whether it is 0-dimensional (Metal passes a reference).
    template: template arguments with their values, which MLX therefore never sees: it
        would paste them into the text again on every call.
    ragged: warps may lack lanes.  partial: threads beyond the grid must leave.
    """

    scalars: tuple[bool, ...]
    template: tuple[TemplateArg, ...]
    ragged: bool = False
    partial: bool = False


@dataclass(frozen=True)
class Kernel:
    """Metal text of a kernel as the caller of metal_kernel gave it."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    source: str
    header: str = ""
    atomic_outputs: bool = False

    def may_be_scalar(self, index: int) -> bool:
        """Whether input ``index`` can be 0-dimensional, as far as the source shows.

        It cannot if it is indexed, cast to a pointer, or asked for its shape.
        """
        name = re.escape(self.input_names[index])
        array = rf"\b{name}\s*\[|\*\s*\)\s*{name}\b|\b{name}_(shape|strides|ndim)\b"
        return re.search(array, self.source) is None

    def shaped(self) -> list[int]:
        """The inputs whose shape, strides or ndim the source asks for."""
        named = enumerate(self.input_names)
        return [i for i, name in named if _described(self, name, False)]

    def takes_strides(self) -> bool:
        """Whether the source asks for the strides of an input."""
        return any("strides" in _described(self, n, False) for n in self.input_names)

    def mlx_inputs(self, variant: Variant) -> list[str]:
        """Input names for MLX: none is the end of another, so that the search for
        ``<name>_shape`` in the body finds exactly what the body uses."""
        names = [f"in{i}" for i in range(len(self.input_names))]
        return names + [GRID_NAME] * variant.partial

    def mlx_outputs(self) -> list[str]:
        """Output names for MLX."""
        return [f"out{i}" for i in range(len(self.output_names))]


def translate(metal: str) -> str:
    """Rewrite Metal text for NVRTC where macros cannot; line numbers stay."""
    code = rewrite.remove_metal_includes(rewrite.strip_comments(metal))
    code = rewrite.remove_attributes(drop_twins(code))
    code = re.sub(
        r'_Pragma\(\s*"clang loop unroll\((?:full|enable)\)"\s*\)', _UNROLL, code
    )
    code = re.sub(
        r"#pragma clang loop unroll\((?:full|enable)\)", "#pragma unroll", code
    )
    code = re.sub(r"#pragma METAL[^\n]*", "", code)
    return rewrite.rewrite_threadgroup(code, _shared)


_UNROLL = '_Pragma("unroll")'


def _shared(elem: str, name: str, dims: str, align: str) -> str:
    aligned = f"alignas({align}) " if align else ""
    return f"__shared__ {aligned}{elem} {name}{dims};"


def definition(kernel: Kernel, variant: Variant) -> str:
    """The text to include before MLX's function: library, header, kernel function."""
    header, source = translate(kernel.header), translate(kernel.source)
    types = [f"typename msl_in{i}" for i in range(len(kernel.input_names))]
    types += [f"typename msl_out{i}" for i in range(len(kernel.output_names))]
    template = [f"{a.kind} {a.name}" for a in variant.template]
    parameters = ", ".join(_parameters(kernel, variant))
    return "\n".join(
        [
            f"#define MSL_RAGGED {int(variant.ragged or variant.partial)}",
            rewrite.swizzle_macros(header + source)
            + f'#include "{(INCLUDE / "metal_cuda.h").as_posix()}"',
            "namespace msl {",
            f'#line 1 "{kernel.name} (header)"',
            header,
            f"template <{', '.join(template + types)}>",
            f"METAL_FUNC void kernel_{kernel.name}({parameters}) {{",
            *_attributes(kernel.source, variant),
            f'#line 1 "{kernel.name} (source)"',
            source,
            "}",
            "}  // namespace msl",
            "",
        ]
    )


def call(kernel: Kernel, variant: Variant) -> str:
    """The body for MLX's generated function: one call of the kernel function."""
    arguments = []
    for i, name in enumerate(kernel.input_names):
        scalar = variant.scalars[i]
        arguments.append(f"{'*' * scalar}::msl::msl_input(in{i})")
        for suffix in _described(kernel, name, scalar):
            value = f"in{i}_{suffix}"
            if suffix == "strides":
                value = f"(const ::msl::int64_t*){value}.data()"
            elif suffix == "shape":
                value = f"(const int*){value}.data()"
            arguments.append(value)
    output = "msl_atomic_output" if kernel.atomic_outputs else "msl_output"
    arguments += [f"::msl::{output}(out{i})" for i in range(len(kernel.output_names))]
    if variant.partial:
        arguments.append(GRID_NAME)
    template = ", ".join(map(_value, variant.template))
    template = f"<{template}>" if template else ""
    return f"::msl::kernel_{kernel.name}{template}({', '.join(arguments)});\n"


def _value(argument: TemplateArg) -> str:
    """A template argument's value as it is spelled outside namespace msl."""
    if argument.kind == "typename" and argument.value not in ("float", "bool"):
        return f"::msl::{argument.value}"
    return argument.value


def _described(kernel: Kernel, name: str, scalar: bool) -> list[str]:
    """Which of shape, strides and ndim the source asks for, as MLX finds them."""
    if scalar:
        return []
    found = [s for s in ("shape", "strides", "ndim") if f"{name}_{s}" in kernel.source]
    return found


def _parameters(kernel: Kernel, variant: Variant) -> list[str]:
    parameters = []
    for i, name in enumerate(kernel.input_names):
        mark = "&" if variant.scalars[i] else "* __restrict__"
        parameters.append(f"const msl_in{i}{mark} {name}")
        kinds = {
            "shape": "const int* {}_shape",
            "strides": "const int64_t* {}_strides",
            "ndim": "const int& {}_ndim",
        }
        for suffix in _described(kernel, name, variant.scalars[i]):
            parameters.append(kinds[suffix].format(name))
    for i, name in enumerate(kernel.output_names):
        parameters.append(f"msl_out{i}* __restrict__ {name}")
    if variant.partial:
        parameters.append("const uint* msl_extent")
    return parameters


def _attributes(source: str, variant: Variant) -> list[str]:
    """Definitions of the attributes that the source names, and the grid's edge."""
    lines = []
    named = {name: value for name, value in ATTRIBUTES.items() if name in source}
    if variant.partial:
        lines.append(
            "const uint3 msl_grid(msl_extent[0], msl_extent[1], msl_extent[2]);"
        )
        lines.append(f"if (any({_POSITION} >= msl_grid)) return;")
    elif any(value == "msl_grid" for _, value in named.values()):
        lines.append("const uint3 msl_grid = msl_blocks() * msl_block_size();")
    for name, (kind, value) in named.items():
        block = _BLOCK[variant.partial]
        lines.append(f"{kind} {name} = {value.format(block=block)};")
    return lines
