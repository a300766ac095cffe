"""The generated kernel text against the text that MLX itself prints.

MLX records a metal_kernel call without a GPU inside ``mx.export_function``, and prints
the text with ``verbose=True``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest

from mlx_phase.executor.signature import (
    METAL_TYPES,
    Arg,
    metal_source,
    template_arguments,
)

ATTRIBUTE_BODY = """
  uint a = dispatch_quadgroups_per_threadgroup + dispatch_simdgroups_per_threadgroup;
  uint b = dispatch_threads_per_threadgroup.x + grid_origin.x + grid_size.x;
  uint c = quadgroup_index_in_threadgroup + quadgroups_per_threadgroup;
  uint d = simdgroup_index_in_threadgroup + simdgroups_per_threadgroup;
  uint e = thread_execution_width + thread_index_in_quadgroup;
  uint f = thread_index_in_simdgroup + thread_index_in_threadgroup;
  uint g = thread_position_in_grid.x + thread_position_in_threadgroup.x;
  uint h = threadgroup_position_in_grid.x + threadgroups_per_grid.x;
  uint i = threads_per_grid.x + threads_per_simdgroup + threads_per_threadgroup.x;
"""


@dataclass
class Case:
    """A metal_kernel and one call of it."""

    inputs: dict[str, Any]
    source: str
    outputs: dict[str, mx.Dtype] = field(default_factory=lambda: {"out": mx.float32})
    header: str = ""
    template: list[tuple[str, Any]] | None = None
    atomic: bool = False
    name: str = "case"


def zeros(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.zeros(shape, dtype)


CASES = {
    "device_constant_scalar": Case(
        {"x": zeros(8), "few": zeros(7), "s": mx.array(2.0, mx.float16)},
        "out[thread_position_in_grid.x] = x[0];",
    ),
    "no_attribute": Case({"x": zeros(8)}, "out[0] = x[0];"),
    "no_attribute_with_shape": Case({"x": zeros(8)}, "out[0] = x_shape[0] + x_ndim;"),
    "mlx_closes_early": Case(
        {"x": zeros(8)},
        "out[0] = x_shape[0];",
        {"out": mx.float32, "second": mx.bool_, "third": mx.int8},
    ),
    "python_scalars": Case(
        {"x": zeros(8), "i": 3, "big": 12345678901, "f": 2.5, "b": True},
        "out[grid_size_x] = x[0] + i;",
    ),
    "every_attribute_atomic": Case(
        {"x": zeros(2, 4)},
        ATTRIBUTE_BODY,
        {"out": mx.int32, "second": mx.uint32},
        atomic=True,
    ),
    "template": Case(
        {"x": zeros(9)},
        "\n  out[thread_position_in_grid.x] = x[0];\n",
        template=[("T", mx.bfloat16), ("N", 5), ("B", False), ("Q", mx.bool_)],
        name="with_name",
    ),
    "negative_template": Case(
        {"x": zeros(9)}, "out[0] = N;", template=[("N", -3), ("B", True)]
    ),
    "empty_template": Case({"x": zeros(9)}, "out[0] = 1;", template=[]),
    "name_within_name": Case(
        {"q": zeros(9), "k": zeros(9), "mask": zeros(9)},
        "out[0] = mask_strides[0] + k_shape[0];",
    ),
    "header": Case(
        {"x": zeros(9)},
        "// thread_index_in_simdgroup in a comment counts\nout[0] = f(x_ndim);",
        header="#include <metal_math>\nint f(int a) { return a + grid_size; }",
    ),
    "empty_and_rank": Case(
        {"none": zeros(0, 3), "one": zeros(1, 1), "s": zeros()},
        "out[0] = none_shape[0] + one_strides[0] + s_ndim + s_shape;",
    ),
    "types": Case(
        {
            f"x_{name}": mx.zeros(
                (9,), getattr(mx, name if name != "bool" else "bool_")
            )
            for name in METAL_TYPES
        },
        "out[thread_position_in_grid.x] = 1;",
        {"out": mx.complex64, "second": mx.bfloat16},
        template=[("T", mx.complex64), ("U", mx.uint64)],
    ),
}


def printed_by_mlx(case: Case, tmp_path: Any, read: Callable[[], str]) -> str:
    kernel = mx.fast.metal_kernel(
        name=case.name,
        input_names=list(case.inputs),
        output_names=list(case.outputs),
        source=case.source,
        header=case.header,
        atomic_outputs=case.atomic,
    )
    options = {} if case.template is None else {"template": case.template}

    def call(_: mx.array) -> Any:
        return kernel(
            inputs=list(case.inputs.values()),
            output_shapes=[(3,)] * len(case.outputs),
            output_dtypes=list(case.outputs.values()),
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            verbose=True,
            **options,
        )

    read()
    mx.export_function(str(tmp_path / "case.mlxfn"), call, mx.zeros(3))
    text = read()
    begin, end = "```\n", "\n```\n"
    return text[text.index(begin) + len(begin) : text.rindex(end)]


def metal_type(dtype: mx.Dtype) -> str:
    return METAL_TYPES[str(dtype).rpartition(".")[2]]


def generate(case: Case) -> Any:
    arrays = {n: mx.array(v) for n, v in case.inputs.items()}
    return metal_source(
        case.name,
        [Arg(n, metal_type(a.dtype), a.ndim, a.size) for n, a in arrays.items()],
        [Arg(n, metal_type(d), 1, 3) for n, d in case.outputs.items()],
        case.source,
        case.header,
        case.template,
        case.atomic,
    )


@pytest.mark.skipif(mx.metal.is_available(), reason="MLX would run the kernels")
@pytest.mark.parametrize("name", CASES)
def test_same_text_as_mlx(name: str, tmp_path: Any, capfd: Any) -> None:
    case = CASES[name]
    expected = printed_by_mlx(case, tmp_path, lambda: capfd.readouterr().out)
    assert generate(case).text == expected


def test_marks_text_that_mlx_breaks() -> None:
    valid = {name: generate(case).is_valid for name, case in CASES.items()}
    assert [name for name, ok in valid.items() if not ok] == ["mlx_closes_early"]


def test_params_tell_what_feeds_them() -> None:
    source = generate(CASES["name_within_name"])
    assert [(p.kind, p.index, p.name) for p in source.params] == [
        ("input", 0, "q"),
        ("input", 1, "k"),
        ("shape", 1, "k_shape"),
        ("strides", 1, "k_strides"),
        ("input", 2, "mask"),
        ("strides", 2, "mask_strides"),
        ("output", 0, "out"),
    ]


def test_specialised_name() -> None:
    source = generate(CASES["negative_template"])
    assert source.function_name == "custom_kernel_case__-3_1".replace("-", "_") + (
        "_float_float"
    )
    assert source.specialised_name == source.function_name + "<-3, 1>"


@pytest.mark.parametrize("value", [2.5, "float", None, mx.float64, 2**31, -(2**31) - 1])
def test_refuses_template_values(value: Any) -> None:
    with pytest.raises(ValueError, match="Invalid template argument N="):
        template_arguments([("N", value)])
