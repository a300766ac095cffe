"""The kernel text that ``mx.fast.metal_kernel`` generates around a body.

MLX finds the kernel's parameters by looking for their names in the body; the same
rules here, so that a body runs elsewhere exactly where it runs under MLX. MLX's own
prelude is not part of the text. No import of mlx: dtypes are names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: MLX dtype name -> Metal type name.
METAL_TYPES = {
    "bool": "bool",
    "uint8": "uint8_t",
    "uint16": "uint16_t",
    "uint32": "uint32_t",
    "uint64": "uint64_t",
    "int8": "int8_t",
    "int16": "int16_t",
    "int32": "int32_t",
    "int64": "int64_t",
    "float16": "float16_t",
    "bfloat16": "bfloat16_t",
    "float32": "float",
    "complex64": "complex64_t",
}

#: Attribute -> type, in the order in which MLX emits them.
ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}

#: Inputs with fewer elements than this are `constant`, larger ones `device`.
CONSTANT_BELOW = 8


@dataclass(frozen=True)
class Arg:
    """One array as the signature sees it. ``dtype`` is a Metal type name."""

    name: str
    dtype: str
    ndim: int
    size: int

    @property
    def is_constant(self) -> bool:
        """Whether MLX puts it into the constant address space."""
        return self.size < CONSTANT_BELOW

    @property
    def mark(self) -> str:
        """What MLX appends to the type in a function name."""
        return "s" if self.ndim == 0 else "c" if self.is_constant else ""


@dataclass(frozen=True)
class Param:
    """One buffer parameter: ``type`` and ``name`` as declared, and what feeds it.

    ``kind`` is input, shape, strides, ndim or output; ``index`` counts within the
    inputs or the outputs.
    """

    kind: str
    index: int
    type: str
    name: str


@dataclass(frozen=True)
class TemplateArg:
    """One template parameter: ``kind`` is typename, int or bool."""

    kind: str
    name: str
    value: str


@dataclass(frozen=True)
class MetalSource:
    """The text of one specialised kernel and its parts, in order of appearance."""

    function_name: str
    header: str
    signature: str
    source: str
    instantiation: str
    params: tuple[Param, ...]
    attributes: tuple[tuple[str, str], ...]
    template: tuple[TemplateArg, ...]
    is_valid: bool

    @property
    def text(self) -> str:
        """What MLX compiles, after its prelude."""
        return f"{self.header}{self.signature}{self.source}\n}}\n{self.instantiation}"

    @property
    def specialised_name(self) -> str:
        """The function with its template arguments, as C++ names it."""
        if not self.template:
            return self.function_name
        values = ", ".join(argument.value for argument in self.template)
        return f"{self.function_name}<{values}>"


def template_arguments(
    template: Sequence[tuple[str, object]] | None,
) -> tuple[TemplateArg, ...]:
    """Normalise ``[(name, value), ...]``; a value is a bool, an int or a dtype.

    Raises ValueError for other values, as MLX does.
    """
    out = []
    for name, value in template or ():
        if isinstance(value, bool):
            out.append(TemplateArg("bool", name, str(int(value))))
        elif isinstance(value, int) and -(2**31) <= value < 2**31:
            out.append(TemplateArg("int", name, str(value)))
        elif (metal := METAL_TYPES.get(str(value).rpartition(".")[2])) and not (
            isinstance(value, (str, int))
        ):
            out.append(TemplateArg("typename", name, metal))
        else:
            raise ValueError(
                f"[metal_kernel] Invalid template argument {name}={value!r}. Must be "
                "`mlx.core.Dtype`, `int` (32 bits) or `bool`."
            )
    return tuple(out)


def _params(
    inputs: Sequence[Arg], outputs: Sequence[Arg], source: str, atomic_outputs: bool
) -> tuple[Param, ...]:
    params = []
    for i, arg in enumerate(inputs):
        space = "constant" if arg.is_constant else "device"
        mark = "&" if arg.ndim == 0 else "*"
        params.append(Param("input", i, f"const {space} {arg.dtype}{mark}", arg.name))
        if arg.ndim == 0:
            continue
        # Substrings, as in MLX: an input k also asks for its strides in mask_strides.
        for kind, kind_type in (
            ("shape", "const constant int*"),
            ("strides", "const constant int64_t*"),
            ("ndim", "const constant int&"),
        ):
            name = f"{arg.name}_{kind}"
            if name in source:
                params.append(Param(kind, i, kind_type, name))
    for i, arg in enumerate(outputs):
        elem = f"atomic<{arg.dtype}>" if atomic_outputs else arg.dtype
        params.append(Param("output", i, f"device {elem}*", arg.name))
    return tuple(params)


def metal_source(
    name: str,
    inputs: Sequence[Arg],
    outputs: Sequence[Arg],
    source: str,
    header: str = "",
    template: Sequence[tuple[str, object]] | None = None,
    atomic_outputs: bool = False,
) -> MetalSource:
    """Generate the text of a kernel for arrays of these dtypes, ranks and sizes.

    ``is_valid`` is False where MLX's text is broken: it closes the parameter list
    early if there are several outputs, shape or stride buffers, and no attribute.
    """
    arguments = template_arguments(template)
    params = _params(inputs, outputs, source, atomic_outputs)
    attributes = tuple((a, t) for a, t in ATTRIBUTES.items() if a in source)
    words = [f"custom_kernel_{name}"]
    if arguments:
        words += [""] + [argument.value.replace("-", "_") for argument in arguments]
    words += [arg.dtype + arg.mark for arg in inputs]
    words += [arg.dtype for arg in outputs]
    function_name = "_".join(words)

    lines = []
    instantiation = ""
    if arguments:
        names = ", ".join(f"{a.kind} {a.name}" for a in arguments)
        values = ", ".join(a.value for a in arguments)
        lines.append(f"template <{names}>")
        instantiation = (
            f'\ntemplate [[host_name("{function_name}")]] [[kernel]] '
            f"decltype({function_name}<{values}>) {function_name}<{values}>;\n"
        )
    lines.append(f"[[kernel]] void {function_name}(")
    is_valid = True
    for i, param in enumerate(params):
        last = i >= len(inputs) + len(outputs) - 1 and param.kind == "output"
        closes = last and not attributes
        is_valid &= not closes or i == len(params) - 1
        end = ") {" if closes else ","
        lines.append(f"  {param.type} {param.name} [[buffer({i})]]{end}")
    for i, (attribute, kind) in enumerate(attributes):
        end = "," if i < len(attributes) - 1 else ") {"
        lines.append(f"  {kind} {attribute} [[{attribute}]]{end}")
    signature = "\n".join(lines) + "\n"
    return MetalSource(
        function_name,
        header,
        signature,
        source,
        instantiation,
        params,
        attributes,
        arguments,
        is_valid,
    )
