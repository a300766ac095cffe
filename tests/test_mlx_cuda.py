"""MLX's own Metal kernels through NVRTC: they compile as CUDA, without a GPU."""

import mlx.core as mx
import mlx_headers
import pytest
import test_mlx_attention as attention
import test_mlx_quantized as quantized

from mlx_phase.executor import nvrtc
from mlx_phase.executor.cuda_check import compile_check
from mlx_phase.executor.signature import Arg

T = "bfloat16_t"


@pytest.fixture(autouse=True)
def compiler():
    try:
        nvrtc.version(), nvrtc.include_paths()
    except nvrtc.NvrtcMissing as missing:
        pytest.skip(str(missing))


def array(name, dtype=T):
    return Arg(name, dtype, 4, 4096)


def scalar(name, dtype="int32_t"):
    return Arg(name, dtype, 0, 1)


@pytest.mark.parametrize(
    ("kernel", "parameters"),
    [
        ("affine_qmv_fast", "64, 4, false"),
        ("affine_qmv_wide", "64, 4, 3, 8, false"),
        ("affine_qmm_t", "64, 4, false, false"),
    ],
)
def test_quantized(kernel, parameters):
    inputs = [array("w", "uint32_t"), array("scales"), array("biases"), array("x")]
    inputs += [scalar("K"), scalar("N"), scalar("M")]
    compile_check(
        kernel,
        inputs,
        [array("y")],
        quantized.body(kernel, parameters),
        mlx_headers.header(*quantized.HEADERS, **quantized.ALIGNED),
        [("T", mx.bfloat16)],
    )


@pytest.mark.parametrize("source", [attention.ONE_PASS, attention.FIRST])
def test_attention(source):
    inputs = [array(name) for name in ("q", "k", "v", "mask", "sinks")]
    inputs += [scalar("N"), scalar("scale", "float"), scalar("gqa"), scalar("heads")]
    outputs = [array("out"), array("sums", "float"), array("maxs", "float")]
    template = [("T", mx.bfloat16), ("D", 64)]
    compile_check("sdpa", inputs, outputs, source, attention.header(), template)


def test_softmax():
    """Its `constant int&` takes what the signature calls `const constant int&`."""
    text = "#define SOFTMAX_N_READS 4\n" + mlx_headers.header("softmax.h")
    source = attention.row_reduction("softmax_looped")
    inputs, template = [array("x"), scalar("N")], [("T", mx.bfloat16)]
    compile_check("softmax", inputs, [array("out")], source, text, template)
