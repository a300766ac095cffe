"""The CUDA executor: NVRTC compiles its text, and a GPU agrees with NumPy."""

from __future__ import annotations

import executor_cases_launch  # noqa: F401  registers its cases
import executor_cases_library  # noqa: F401
import mlx.core as mx
import numpy as np
import pytest
from executor_cases import CASES, Case

from mlx_phase.executor import (
    ExecutorError,
    cuda,
    cuda_check,
    cuda_module,
    cuda_text,
    nvrtc,
    signature,
)
from mlx_phase.executor.signature import METAL_TYPES, Arg

#: One of each pair of types that share their code; a GPU runs all of them.
COMPILED = [
    n for n in CASES if not n.endswith(("_uint32", "_int16", "_uint8", "_int32"))
]


@pytest.fixture(autouse=True)
def cache(request, tmp_path, monkeypatch):
    # What the CPU compiles, parsed headers above all, may be found in the usual place.
    if "executor" not in request.fixturenames:
        monkeypatch.setenv("MLX_PHASE_CACHE", str(tmp_path))


def metal_type(dtype: mx.Dtype) -> str:
    return METAL_TYPES[str(dtype).rpartition(".")[2]]


def compiled(case: Case, arch: str = "sm_80", **options) -> str:
    """PTX of a case; skips where NVRTC is not installed."""
    inputs = [
        Arg(name, metal_type(a.dtype), a.ndim, a.size)
        for name, a in ((n, mx.array(v)) for n, v in case.inputs.items())
    ]
    outputs = [
        Arg(name, metal_type(d), e.ndim, e.size)
        for name, d, e in zip(case.outputs, case.dtypes, case.expected, strict=True)
    ]
    _, ragged, extent = cuda._grid_shape(case.grid, case.threadgroup)
    options = {"ragged": ragged, "partial": extent is not None} | options
    try:
        return cuda_check.compile_check(
            case.name,
            inputs,
            outputs,
            case.source,
            case.header,
            case.template,
            atomic_outputs=case.options.get("atomic_outputs", False),
            arch=arch,
            **options,
        )
    except nvrtc.NvrtcMissing as error:
        pytest.skip(str(error))


def simple(source: str, header: str = "", **options) -> str:
    one = np.zeros(32, np.float32)
    case = Case("simple", source, {"x": mx.array(one)}, [one], [mx.float32])
    case.header = header
    return compiled(case, **options)


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_for_sm_80(name):
    assert ".target sm_80" in compiled(CASES[name]())


@pytest.mark.parametrize(
    "name", ["matrix_half", "matrix_bfloat", "half_arithmetic", "quantized_matvec"]
)
def test_compiles_for_sm_90(name):
    assert ".target sm_90a" in compiled(CASES[name](), "sm_90a")


@pytest.mark.parametrize("options", [{"ragged": True}, {"partial": True}])
def test_collectives_compile_where_lanes_are_missing(options):
    assert "shfl.sync" in compiled(CASES["collectives_of_vectors"](), **options)


def test_vectors_are_one_load():
    ptx = simple(
        """
        uint i = thread_position_in_grid.x;
        half4 h; h = ((const device half4*)x)[i];
        uint4 q[2]; q[0] = ((const device uint4*)x)[i + 1]; q[1] = q[0];
        y[i] = dot(h, h) + (q[0].x ^ q[0].y ^ q[1].z ^ q[1].w);
        """
    )
    loads = [line.split()[0] for line in ptx.splitlines() if "ld.global" in line]
    assert sorted(load.replace(".nc", "") for load in loads) == [
        "ld.global.v4.u16",
        "ld.global.v4.u32",
    ]
    assert ".local" not in ptx


def test_matrices_use_tensor_cores():
    assert "mma.sync.aligned.m16n8k8" in compiled(CASES["matrix_half"]())
    assert "mma.sync" not in compiled(CASES["matrix_float"]())


def test_no_check_where_threadgroups_divide_the_grid():
    source = "y[thread_position_in_grid.x] = 1;"
    assert "setp" not in simple(source)
    assert "setp" in simple(source, partial=True)


def test_compile_error_names_the_users_line():
    with pytest.raises(ExecutorError, match=r"simple \(source\)\(3\).*oops") as raised:
        simple("\nuint i = thread_position_in_grid.x;\ny[i] = oops;")
    assert "kernel simple does not compile for sm_80" in str(raised.value)
    with pytest.raises(ExecutorError, match=r"simple \(header\)\(2\).*missing"):
        simple("y[0] = f();", "\nfloat f() { return missing; }")


def test_copying_a_swizzle_is_refused():
    with pytest.raises(ExecutorError, match="deleted"):
        simple("float4 v = 1; auto s = v.xy; y[thread_position_in_grid.x] = v.x;")


def test_every_attribute_is_known():
    kinds = {name: kind for name, (kind, _) in cuda_text.ATTRIBUTES.items()}
    assert kinds == signature.ATTRIBUTES


def test_text_for_mlx_is_short():
    kernel = cuda_text.Kernel("k", ("x", "s"), ("y",), "y[0] = x_strides[0] * s;")
    template = signature.template_arguments([("T", mx.float16), ("N", -3)])
    variant = cuda_text.Variant((False, True), template)
    assert cuda_text.call(kernel, variant) == (
        "::msl::kernel_k<::msl::float16_t, -3>(::msl::msl_input(in0), "
        "(const ::msl::int64_t*)in0_strides.data(), *::msl::msl_input(in1), "
        "::msl::msl_output(out0));\n"
    )


@pytest.mark.parametrize(
    "executor", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_numpy(name, executor, monkeypatch):
    monkeypatch.setenv("MLX_PHASE_EXECUTOR", executor)
    from mlx_phase import metal_kernel

    case = CASES[name]()
    kernel = metal_kernel(
        case.name,
        list(case.inputs),
        list(case.outputs),
        case.source,
        case.header,
        **case.options,
    )
    outputs = kernel(
        inputs=list(case.inputs.values()),
        output_shapes=[e.shape for e in case.expected],
        output_dtypes=case.dtypes,
        grid=case.grid,
        threadgroup=case.threadgroup,
        template=case.template or None,
        init_value=case.init_value,
    )
    for output, expected in zip(outputs, case.expected, strict=True):
        if output.dtype == mx.bfloat16:
            output = output.astype(mx.float32)
        np.testing.assert_allclose(np.array(output), expected, rtol=case.rtol)


@pytest.mark.parametrize("most", [None, 168])
def test_a_template_argument_limits_registers(most, monkeypatch):
    """Of the function that is launched, whoever writes it: MLX does where strides are
    asked for, behind the header that it is given."""
    given = {}
    monkeypatch.setattr(mx.fast, "cuda_kernel", lambda **how: given.update(how))
    kernel = cuda_text.Kernel("k", ("x",), ("y",), "y[0] = x[0] + N;")
    template = [("N", 3)] + ([("REGISTERS", most)] if most else [])
    variant = cuda_text.Variant((False,), signature.template_arguments(template))
    cuda._build(kernel, variant, True)
    made = "__global__ void f(const float* in0, float* out0)"
    texts = {
        cuda_module.entry(kernel): cuda_module.module(
            kernel, variant, ["float"], ["float"]
        ),
        "f": f"{given['header']}\n{made} {{ {given['source']} }}",
    }
    limit = f"#define __global__ __attribute__((global)) __maxnreg__({most})"
    assert (limit in texts[cuda_module.entry(kernel)]) == (most is not None)
    for name, text in texts.items():
        try:
            ptx = nvrtc.compile_ptx(text, name)
        except nvrtc.NvrtcMissing as error:
            pytest.skip(str(error))
        assert (f".maxnreg {most}" in ptx) == (most is not None)
        assert (".maxnreg" in ptx) == (most is not None)
