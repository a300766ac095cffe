"""CPU executor: arrays, scalars, templates, types and the arguments of a call."""

import ctypes
import os

import mlx.core as mx
import numpy as np
import pytest
from cpu_case import run, small_values, to_numpy

from mlx_phase.executor import ExecutorError, cpu_build, cpu_launch
from mlx_phase.executor.cpu import metal_kernel
from mlx_phase.executor.signature import Arg, metal_source

I = "uint i = thread_position_in_grid.x; "  # noqa: E741
COPY = I + "out[i] = a[i];"
EVERY_DTYPE = [
    mx.bool_,
    mx.uint8,
    mx.uint16,
    mx.uint32,
    mx.uint64,
    mx.int8,
    mx.int16,
    mx.int32,
    mx.int64,
    mx.float16,
    mx.bfloat16,
    mx.float32,
    mx.complex64,
]


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
def test_copies_every_type(dtype: mx.Dtype) -> None:
    x = small_values(100, mx.float32, 0, 2).astype(dtype)
    got = run(COPY, x, shape=(100,), dtype=dtype, group=(48, 1, 1))
    assert got.dtype == dtype
    np.testing.assert_array_equal(to_numpy(got), to_numpy(x))


def test_views_are_copied_only_if_asked() -> None:
    base = mx.arange(48.0).reshape(6, 8)
    views = [base.T, base[:, ::2], base[2:5], base[1], base.reshape(2, 3, 8)[:, 1]]
    views.append(mx.broadcast_to(base[:, :1], (6, 5)))
    strided = "out[i] = a[elem_to_loc(i, a_shape, a_strides, a_ndim)];"
    for view in views:
        for source, contiguous in ((COPY, True), (I + strided, False)):
            got = run(
                source, view, shape=view.shape, grid=(view.size, 1, 1),
                ensure_row_contiguous=contiguous,
            )  # fmt: skip
            np.testing.assert_array_equal(np.array(got), np.array(view))


def test_shape_strides_ndim() -> None:
    x = mx.zeros((3, 4, 10), mx.bfloat16)[:, :, ::2]
    body = """
      out[0] = a_ndim;
      for (int d = 0; d < a_ndim; d++) out[1 + d] = a_shape[d];
      for (int d = 0; d < a_ndim; d++) out[4 + d] = a_strides[d];
      out[7] = thread_position_in_grid.x;
    """
    options = {"shape": (8,), "dtype": mx.int64, "grid": (1, 1, 1)}
    got = run(body, x, ensure_row_contiguous=False, **options)
    assert got.tolist() == [3, 3, 4, 5, 40, 10, 2, 0]
    assert run(body, x, **options).tolist() == [3, 3, 4, 5, 20, 5, 1, 0]


def test_scalars_and_small_inputs() -> None:
    got = run(
        I + "out[i] = a + b + c + (d ? 1 : 0) + e[i] + f;",
        3, 2.5, mx.array(0.25, mx.float16), True, mx.array([1.0, 2.0]), np.float32(10),
        shape=(2,),
    )  # fmt: skip
    assert got.tolist() == [17.75, 18.75]
    big = run(I + "out[i] = a + i;", 2**40, shape=(2,), dtype=mx.int64)
    assert big.tolist() == [2**40, 2**40 + 1]


def test_template_arguments() -> None:
    header = """
      #include <metal_stdlib>
      template <typename T, int N> METAL_FUNC T repeat(const thread T& x) {
        T sum = 0;
        for (int i = 0; i < N; i++) sum += x;
        return sum;
      }
      constant constexpr float scale = 2.0;
    """
    body = I + "out[i] = NEGATE ? -repeat<T, N>(T(i)) : scale * repeat<T, N>(T(i));"
    for negate, want in ((True, [0, -3, -6]), (False, [0, 6, 12])):
        template = [("T", mx.float16), ("N", 3), ("NEGATE", negate)]
        got = run(body, shape=(3,), header=header, template=template)
        assert got.tolist() == want
    # 1 and True are equal as dictionary keys, and different as template arguments.
    kinds = [
        run(I + "out[i] = sizeof(decltype(V));", shape=(1,), template=[("V", v)]).item()
        for v in (1, True)
    ]
    assert kinds == [4, 1]


def test_grid_attributes() -> None:
    body = """
      uint3 g = thread_position_in_grid;
      uint at = (g.z * threads_per_grid.y + g.y) * threads_per_grid.x + g.x;
      out[at * 8] = threadgroup_position_in_grid.x + 10 * threadgroup_position_in_grid.y
          + 100 * threadgroup_position_in_grid.z;
      out[at * 8 + 1] = thread_index_in_threadgroup;
      out[at * 8 + 2] = threads_per_threadgroup.x * 100 + threads_per_threadgroup.y * 10
          + threads_per_threadgroup.z;
      out[at * 8 + 3] = threadgroups_per_grid.x * 100 + threadgroups_per_grid.y * 10
          + threadgroups_per_grid.z;
      out[at * 8 + 4] = simdgroup_index_in_threadgroup * 100
          + thread_index_in_simdgroup;
      out[at * 8 + 5] = dispatch_threads_per_threadgroup.x * 100
          + threads_per_simdgroup;
      out[at * 8 + 6] = quadgroup_index_in_threadgroup * 10 + thread_index_in_quadgroup;
      out[at * 8 + 7] = simdgroups_per_threadgroup * 100 + quadgroups_per_threadgroup;
    """
    grid, group = (11, 5, 3), (4, 5, 2)
    got = run(
        body, shape=(3, 5, 11, 8), dtype=mx.int32, grid=grid, group=group
    )  # the last threadgroups of x and z are partial, as Metal launches them
    for z, y, x in np.ndindex(3, 5, 11):
        place = (x // 4, y // 5, z // 2)
        size = tuple(
            min(g, n - p * g) for g, n, p in zip(group, grid, place, strict=True)
        )
        index = (x % 4) + size[0] * ((y % 5) + size[1] * (z % 2))
        count = size[0] * size[1] * size[2]
        assert got[z, y, x].tolist() == [
            place[0] + 10 * place[1] + 100 * place[2],
            index,
            size[0] * 100 + size[1] * 10 + size[2],
            312,
            index // 32 * 100 + index % 32,
            432,
            index // 4 * 10 + index % 4,
            -(-count // 32) * 100 + -(-count // 4),
        ]


def test_arithmetic_rounds_in_its_own_type() -> None:
    x = mx.array([1.0, 2048.0, 0.1, 3.14159, 60000.0, float("nan"), float("inf"), 7])
    y = mx.array([0.001, 1.0, 0.2, 2.71828, 60000.0, 1.0, 1.0, 0.003])
    for dtype in (mx.float16, mx.bfloat16):
        a, b = x.astype(dtype), y.astype(dtype)
        body = I + "out[i] = a[i] * b[i] + a[i];"
        got = run(body, a, b, shape=(8,), dtype=dtype)
        want = (a.astype(mx.float32) * b.astype(mx.float32)).astype(dtype)
        want = (want.astype(mx.float32) + a.astype(mx.float32)).astype(dtype)
        np.testing.assert_array_equal(to_numpy(got), to_numpy(want))


def test_float_math_is_not_contracted_and_fma_is() -> None:
    x, y, z = (mx.array([v] * 8) for v in (1.0 + 2**-13, 1.0 - 2**-13, -1.0))
    plain = run(I + "out[i] = a[i] * b[i] + c[i];", x, y, z, shape=(8,))
    fused = run(I + "out[i] = fma(a[i], b[i], c[i]);", x, y, z, shape=(8,))
    assert plain.tolist() == [0.0] * 8
    assert fused.tolist() == [-(2.0**-26)] * 8
    single = run(I + "out[i] = sizeof(1.0);", shape=(1,))
    assert single.item() == 4, "a literal without suffix is a float in Metal"


def test_vectors() -> None:
    body = """
      uint i = thread_position_in_grid.x;
      float4 v = ((const device float4*)a)[i];
      v.xy = v.yx;
      half2 h = half2(v.zw) * half2(2);
      float3 w = float3(h.x, v.wx);
      out[i] = dot(w, float3(1, 10, 100)) + (v.x > v.y ? 1000 : 0);
    """
    x = small_values(32 * 4, mx.float32).reshape(32, 4)
    p, q, r, s = np.array(x).T
    want = 2 * r + 10 * s + 100 * q + 1000 * (q > p)
    np.testing.assert_array_equal(np.array(run(body, x)), want)


def test_outputs_start_as_nan_or_init_value() -> None:
    body = "if (thread_position_in_grid.x == 1) out[1] = 5;"
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        got = to_numpy(run(body, shape=(4,), dtype=dtype))
        np.testing.assert_array_equal(np.isnan(got), [True, False, True, True])
        again = to_numpy(run(body, shape=(4,), dtype=dtype))
        np.testing.assert_array_equal(got, again)
    assert run(body, shape=(4,), init_value=2).tolist() == [2, 5, 2, 2]
    large = run(body, shape=(1 << 20,), grid=(2, 1, 1))
    assert mx.isnan(large).sum().item() == (1 << 20) - 1


def test_several_outputs_are_separate_arrays() -> None:
    kernel = metal_kernel("two", ["a"], ["x", "y"], I + "x[i] = a[i]; y[i] = i;")
    call = {
        "inputs": [mx.arange(8.0)],
        "output_shapes": [(8,), (2, 4)],
        "output_dtypes": [mx.float32, mx.int32],
        "grid": (8, 1, 1),
        "threadgroup": (8, 1, 1),
    }
    x, y = kernel(**call)
    again, _ = kernel(**(call | {"inputs": [mx.zeros(8)]}))
    assert x.tolist() == list(range(8))
    assert y.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert again.tolist() == [0.0] * 8


def test_nothing_is_launched_for_empty_grids_and_outputs() -> None:
    body = (
        "uint z = thread_position_in_grid.x; out[z] = 1 / (int)(z - z);"  # would trap
    )
    assert run(body, shape=(3, 0), grid=(8, 1, 1)).shape == (3, 0)
    assert mx.isnan(run(body, shape=(3,), grid=(0, 1, 1))).all().item()
    assert run(I + "out[i] = a_shape[0] + a_shape[1];", mx.zeros((0, 3)), shape=(2,)
               ).tolist() == [3, 3]  # fmt: skip


def test_verbose_prints_the_generated_text(capsys: pytest.CaptureFixture) -> None:
    run(COPY, mx.zeros(32), name="shown", verbose=True)
    printed = capsys.readouterr().out
    assert printed.startswith("Generated source code for `shown`:\n```\n")
    assert "[[kernel]] void custom_kernel_shown_float_float(" in printed
    assert COPY in printed


def test_results_do_not_depend_on_the_number_of_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = mx.random.normal((64 * 64,))
    body = I + "out[i] = simd_sum(a[i]) * exp(a[i]);"
    results = []
    for threads in ("1", "2", "7"):
        monkeypatch.setenv("MLX_PHASE_CPU_THREADS", threads)
        results.append(np.array(run(body, x, shape=(4096,), group=(64, 1, 1))))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_reads_just_outside_an_array_are_forgiven() -> None:
    # A GPU returns garbage there, and kernels that throw it away are right. The array
    # is large enough to have its own mapping, so that these reads fault at first; the
    # sums show that what the first attempt wrote is undone.
    body = (
        I
        + """
      float stray = a[(int)i - 3000000] + b[8 * (int)i - 1000000];
      atomic_fetch_add_explicit(&out[0], stray == 7 ? 0 : 1, memory_order_relaxed);
      float twice = a[i] + b[0] - b[-(int)i];
      atomic_fetch_add_explicit(&out[1], twice, memory_order_relaxed);
    """
    )
    x = mx.arange(1 << 23, dtype=mx.float32)
    view = mx.arange(1 << 22, dtype=mx.float32)[::-1][5:]
    got = run(
        body, x, view, shape=(2,), dtype=mx.float32, grid=(2048, 1, 1),
        group=(256, 1, 1), atomic_outputs=True, init_value=3,
        ensure_row_contiguous=False,
    )  # fmt: skip
    assert got.tolist() == [3 + 2048, 3 + 2048 * 2047]


def test_writes_outside_an_array_are_not_forgiven() -> None:
    body = I + "float s = a[(int)i - 3000000]; ((device float*)a)[i] = s;"
    with pytest.raises(ExecutorError, match="which is not mapped"):
        run(body, mx.zeros(1 << 23), shape=(8,))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_works_after_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_PHASE_CPU_THREADS", "2")
    library = cpu_launch.load(
        "forked", metal_source("forked", [], [Arg("o", "float", 1, 9)], I + "o[i] = i;")
    )
    run(COPY, mx.zeros(4096), shape=(4096,), group=(64, 1, 1))
    child = os.fork()
    if child == 0:
        # MLX itself is not used in the child: its own threads did not survive.
        os._exit(_launch_without_mlx(library))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _launch_without_mlx(library: object) -> int:
    memory = (ctypes.c_float * 4096)()
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(memory))
    block = ctypes.create_string_buffer(cpu_launch.ARGS_AT)
    cpu_launch.LAUNCH.pack_into(
        block, 0, library.entry, ctypes.addressof(pointers), 4096, 1, 1, 64, 1, 1,
        0, 0, 0, 0, 2, 0,
    )  # fmt: skip
    code = cpu_build.runtime().emu_launch(block)
    return code or int(list(memory) != [float(i) for i in range(4096)])


def test_structures_agree_with_the_runtime() -> None:
    assert cpu_build.runtime().emu_launch_bytes() == cpu_launch.ARGS_AT
