"""The uses of metal_kernel that MLX documents, on the CPU executor.

The docstring's example runs as it stands. Of the custom-kernel page: a strided
elementwise kernel, and bilinear sampling whose gradient adds atomically after a
simd_sum, wrapped in mx.custom_function.
"""

import re
import textwrap

import mlx.core as mx
import numpy as np
import pytest

from mlx_phase.executor.cpu import metal_kernel


def test_docstring_example_runs_unchanged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    text = mx.fast.metal_kernel.__doc__
    code = textwrap.dedent(re.split(r"\.\. code-block:: python\n", text)[1])
    monkeypatch.setattr(mx.fast, "metal_kernel", metal_kernel)
    names = {"mx": mx}
    exec(compile(code, "docstring", "exec"), names)  # its last line is an assert
    assert names["b"].dtype == mx.float16
    assert "custom_kernel_myexp" in capsys.readouterr().out


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_strided_elementwise(dtype: mx.Dtype) -> None:
    kernel = metal_kernel(
        name="myexp_strided",
        input_names=["inp"],
        output_names=["out"],
        source="""
            uint elem = thread_position_in_grid.x;
            // elem_to_loc is one of the helpers that MLX puts in front
            uint loc = elem_to_loc(elem, inp_shape, inp_strides, inp_ndim);
            T value = inp[loc];
            out[elem] = metal::exp(value);
        """,
        ensure_row_contiguous=False,
    )
    x = mx.random.normal((6, 16)).astype(dtype)[::2, 1::3]
    (got,) = kernel(
        inputs=[x],
        template=[("T", mx.float32)],
        grid=(x.size, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )
    want = mx.exp(x.astype(mx.float32)).astype(dtype)
    assert got.dtype == dtype
    np.testing.assert_allclose(
        np.array(got.astype(mx.float32)), np.array(want.astype(mx.float32)), rtol=1e-6
    )


# Where a sample lies among the four pixels around it, of one (point, channel).
PLACE = """
    const int H = x_shape[1], W = x_shape[2], C = x_shape[3];
    uint elem = thread_position_in_grid.x;
    uint point = elem / CHANNELS;
    int channel = elem % CHANNELS;
    int start = point / (grid_shape[1] * grid_shape[2]) * H * W * C + channel;
    float px = ((grid[2 * point] + 1) * W - 1) / 2;
    float py = ((grid[2 * point + 1] + 1) * H - 1) / 2;
    int left = floor(px), top = floor(py);
    T fx = px - left, fy = py - top;
"""
FORWARD = (
    PLACE.replace("CHANNELS", "C")
    + """
    T sum = 0;
    for (int corner = 0; corner < 4; corner++) {
      int col = left + (corner & 1), row = top + (corner >> 1);
      T weight = (corner & 1 ? fx : 1 - fx) * (corner >> 1 ? fy : 1 - fy);
      // Read first, discard outside: what a GPU allows.
      T pixel = x[start + (row * W + col) * C];
      sum += row >= 0 && row < H && col >= 0 && col < W ? weight * pixel : 0;
    }
    out[elem] = sum;
"""
)
# Channels are padded to whole simdgroups, so that a simd_sum stays within one point.
BACKWARD = (
    PLACE.replace(
        "CHANNELS", "(ceildiv(C, threads_per_simdgroup) * threads_per_simdgroup)"
    )
    + """
    T dx = 0, dy = 0;
    if (channel < C) {
      T cot = cotangent[point * C + channel];
      for (int corner = 0; corner < 4; corner++) {
        int col = left + (corner & 1), row = top + (corner >> 1);
        if (row < 0 || row >= H || col < 0 || col >= W) continue;
        T wx = corner & 1 ? fx : 1 - fx, wy = corner >> 1 ? fy : 1 - fy;
        int at = start + (row * W + col) * C;
        atomic_fetch_add_explicit(&x_grad[at], wx * wy * cot, memory_order_relaxed);
        dx += (corner & 1 ? wy : -wy) * x[at] * cot;
        dy += (corner >> 1 ? wx : -wx) * x[at] * cot;
      }
    }
    dx = simd_sum(dx);
    dy = simd_sum(dy);
    if (thread_index_in_simdgroup == 0) {
      device atomic<T>* to = grid_grad + 2 * point;
      atomic_fetch_add_explicit(to, dx * W / 2, memory_order_relaxed);
      atomic_fetch_add_explicit(to + 1, dy * H / 2, memory_order_relaxed);
    }
"""
)


def reference(x: mx.array, grid: mx.array) -> mx.array:
    """Bilinear sampling with stock ops. x [B, H, W, C], grid [B, h, w, 2]."""
    B, H, W, _ = x.shape
    px = ((grid[..., 0] + 1) * W - 1) / 2
    py = ((grid[..., 1] + 1) * H - 1) / 2
    left, top = (mx.stop_gradient(mx.floor(p)) for p in (px, py))
    batch = mx.arange(B)[:, None, None]
    out = 0
    for dy in (0, 1):
        for dx in (0, 1):
            col, row = (left + dx).astype(mx.int32), (top + dy).astype(mx.int32)
            wx = px - left if dx else 1 - (px - left)
            wy = py - top if dy else 1 - (py - top)
            inside = (row >= 0) & (row < H) & (col >= 0) & (col < W)
            pixel = x[batch, mx.clip(row, 0, H - 1), mx.clip(col, 0, W - 1)]
            out = out + (wx * wy * inside)[..., None] * pixel
    return out


def test_custom_function_with_atomic_gradient() -> None:
    forward = metal_kernel("sample", ["x", "grid"], ["out"], FORWARD)
    backward = metal_kernel(
        "sample_grad",
        ["x", "grid", "cotangent"],
        ["x_grad", "grid_grad"],
        BACKWARD,
        atomic_outputs=True,
    )

    @mx.custom_function
    def sample(x: mx.array, grid: mx.array) -> mx.array:
        shape = (*grid.shape[:3], x.shape[3])
        return forward(
            inputs=[x, grid],
            template=[("T", x.dtype)],
            output_shapes=[shape],
            output_dtypes=[x.dtype],
            grid=(np.prod(shape), 1, 1),
            threadgroup=(256, 1, 1),
        )[0]

    @sample.vjp
    def sample_vjp(primals: list, cotangent: mx.array, _: mx.array) -> tuple:
        x, grid = primals
        padded = -(-x.shape[3] // 32) * 32
        return tuple(
            backward(
                inputs=[x, grid, cotangent],
                template=[("T", x.dtype)],
                output_shapes=[x.shape, grid.shape],
                output_dtypes=[x.dtype, x.dtype],
                grid=(np.prod(grid.shape[:3]) * padded, 1, 1),
                threadgroup=(256, 1, 1),
                init_value=0,
            )
        )

    mx.random.seed(3)
    x = mx.random.normal((2, 9, 12, 40))
    grid = mx.random.uniform(-1.2, 1.2, (2, 5, 7, 2))
    weight = mx.random.normal((2, 5, 7, 40))
    np.testing.assert_allclose(sample(x, grid), reference(x, grid), atol=1e-5)
    gradients = [
        mx.grad(lambda x, grid, f=f: (weight * f(x, grid)).sum(), argnums=(0, 1))(
            x, grid
        )
        for f in (sample, reference)
    ]
    for got, want in zip(*gradients, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4 * float(mx.abs(want).max()))
