"""MLX's own quantised matmul kernels, run by the CPU executor: code nobody here wrote.

Expected values come from tests/ref.py, never from MLX's arithmetic.
"""

import mlx.core as mx
import mlx_headers
import numpy as np
import pytest
import ref
import tolerance

import mlx_phase

HEADERS = ("utils.h", "steel/gemm/gemm.h", "quantized_utils.h", "quantized.h")
ALIGNED = {"align_M": False, "align_N": False, "align_K": False}
NAMES = ["w", "scales", "biases", "x", "K", "N", "M"]
ATTRIBUTES = {
    "tid": "threadgroup_position_in_grid",
    "lid": "thread_index_in_threadgroup",
    "simd": "simdgroup_index_in_threadgroup, thread_index_in_simdgroup",
    "quad": "quadgroup_index_in_threadgroup, thread_index_in_quadgroup",
}
#: A simdgroup_matrix kernel has 128 threads, a vector kernel 64, the quad kernel 32.
GROUPS = {"affine_qmm_t": (32, 2, 2), "affine_qmv_quad": (32, 1, 1)}


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setenv("MLX_PHASE_EXECUTOR", "cpu")


def body(kernel: str, parameters: str) -> str:
    """A call of MLX's kernel with its arguments in MLX's order."""
    takes_m = kernel in ("affine_qmv_wide", "affine_qmm_t")
    lanes = [ATTRIBUTES["quad" if kernel == "affine_qmv_quad" else "simd"]]
    if kernel == "affine_qmm_t":
        lanes.insert(0, ATTRIBUTES["lid"])
    arguments = ["w", "scales", "biases", "x", "y", "K", "N"] + ["M"] * takes_m
    arguments += ["x_ndim - 2", "x_shape", "x_strides", "w_ndim - 2", "w_shape"]
    arguments += ["w_strides", "scales_strides", "biases_strides", ATTRIBUTES["tid"]]
    return f"{kernel}<T, {parameters}>({', '.join(arguments + lanes)});"


def check(kernel, parameters, shape, dtype, bits, group_size, tiles, batch=()):
    """Run a kernel on random [M, K] x [N, K]; compare with the oracle.

    `tiles` is the number of threadgroups along x and y; z counts the batch.
    """
    M, N, K = shape
    mx.random.seed(M * N * K + bits)
    kind = getattr(mx, dtype)
    weight = mx.random.normal((*batch, N, K)).astype(kind)
    w, scales, biases = mx.quantize(weight, group_size=group_size, bits=bits)
    x = mx.random.normal((*batch, M, K)).astype(kind)
    group = GROUPS.get(kernel, (32, 2, 1))
    count = (*tiles, int(np.prod(batch, initial=1)))
    (out,) = mlx_phase.metal_kernel(
        kernel,
        NAMES,
        ["y"],
        body(kernel, parameters),
        header=mlx_headers.header(*HEADERS, **ALIGNED),
    )(
        inputs=[w, scales, biases, x, K, N, M],
        output_shapes=[(*batch, M, N)],
        output_dtypes=[kind],
        grid=tuple(a * b for a, b in zip(count, group, strict=True)),
        threadgroup=group,
        template=[("T", kind)],
    )
    dequantized = ref.dequantize(w, scales, biases, group_size, bits, "affine")
    # What a kernel does not write stays NaN, and the oracle has none.
    tolerance.assert_close(
        out, ref.matmul(x, dequantized), ref.dense(x, dequantized, dtype), dtype
    )


@pytest.mark.parametrize(
    ("dtype", "bits", "group_size"),
    [
        ("float16", 4, 64),
        ("bfloat16", 8, 32),
        ("float32", 2, 128),
        ("float16", 3, 64),
        ("bfloat16", 5, 128),
        ("float32", 6, 32),
    ],
)
def test_qmv_fast(dtype, bits, group_size):
    parameters = f"{group_size}, {bits}, false"
    for M, N, K in ((1, 8, 512), (3, 24, 1536)):
        shape, tiles = (M, N, K), (M, N // 8)
        check("affine_qmv_fast", parameters, shape, dtype, bits, group_size, tiles)


def test_qmv_fast_with_rows_past_the_output():
    for N in (1, 7, 13):
        tiles = 2, -(-N // 8)
        check(
            "affine_qmv_fast", "64, 4, false, true", (2, N, 512), "bfloat16", 4, 64,
            tiles,
        )  # fmt: skip


def test_qmv_fast_batched():
    check(
        "affine_qmv_fast", "32, 4, true", (2, 16, 512), "float16", 4, 32, (2, 2), (3,)
    )


@pytest.mark.parametrize(
    ("dtype", "bits", "group_size"),
    [("float16", 4, 64), ("bfloat16", 6, 32), ("float32", 3, 128)],
)
def test_qmv_of_any_shape(dtype, bits, group_size):
    """N not a multiple of 8 (nor of 4), and K that ends in the middle of a block."""
    for M, N, groups in ((1, 3, 1), (2, 5, 2), (1, 12, 5), (2, 67, 9)):
        shape, tiles = (M, N, groups * group_size), (M, -(-N // 8))
        parameters = f"{group_size}, {bits}, false"
        check("affine_qmv", parameters, shape, dtype, bits, group_size, tiles)


@pytest.mark.parametrize(
    ("rows", "vectors", "dtype", "bits"),
    [
        (1, 2, "float16", 4),
        (2, 2, "bfloat16", 4),
        (3, 3, "float32", 5),
        (4, 4, "float16", 8),
        (5, 5, "bfloat16", 2),
        (7, 4, "float32", 4),
    ],
)
def test_qmv_wide(rows, vectors, dtype, bits):
    """Several rows of x from one read of the weights; 7 rows take two reads."""
    tiles = -(-rows // vectors), -(-67 // 8)
    shape, parameters = (rows, 67, 320), f"64, {bits}, {vectors}, 8, false"
    check("affine_qmv_wide", parameters, shape, dtype, bits, 64, tiles)


@pytest.mark.parametrize(
    ("dtype", "bits", "width"), [("float16", 4, 128), ("bfloat16", 8, 64)]
)
def test_qmv_quad(dtype, bits, width):
    shape, parameters = (3, 70, width), f"64, {bits}, {width}, false"
    check("affine_qmv_quad", parameters, shape, dtype, bits, 64, (3, 2))


@pytest.mark.parametrize(
    ("dtype", "bits", "group_size"),
    [("float16", 4, 64), ("bfloat16", 3, 32), ("float32", 8, 128)],
)
def test_qmm_t_with_edges(dtype, bits, group_size):
    """Tiles of 32 x 32 that stick out of M = 33 and of N = 67."""
    shape, parameters = (33, 67, 384), f"{group_size}, {bits}, false, false"
    check("affine_qmm_t", parameters, shape, dtype, bits, group_size, (3, 2))


def test_qmm_t_aligned_and_batched():
    shape, parameters = (32, 64, 128), "64, 4, true, true"
    check("affine_qmm_t", parameters, shape, "bfloat16", 4, 64, (2, 1), (2,))


def test_a_function_constant_without_a_value_is_named():
    with pytest.raises(KeyError, match="align_K"):
        mlx_headers.header("quantized.h", align_M=True, align_N=True)
