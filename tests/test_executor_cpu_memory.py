"""CPU executor: threadgroup memory, barriers, atomics and simdgroup matrices."""

import mlx.core as mx
import numpy as np
import pytest
from cpu_case import run, small_values, to_numpy

LANE = "uint l = thread_position_in_grid.x; "


def test_barrier_orders_threadgroup_memory() -> None:
    # A reversal through threadgroup memory, twice: the second write must wait for all
    # reads of the first.
    body = """
      threadgroup float x[256];
      uint l = thread_index_in_threadgroup;
      for (int step = 0; step < 3; step++) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        x[l] = a[threadgroup_position_in_grid.x * 256 + l] + step;
        threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
        out[threadgroup_position_in_grid.x * 256 + l] = x[255 - l];
        simdgroup_barrier(mem_flags::mem_none);
      }
    """
    x = mx.arange(1024, dtype=mx.float32)
    got = run(body, x, shape=(1024,), group=(256, 1, 1))
    want = np.arange(1024).reshape(4, 256)[:, ::-1].reshape(-1) + 2
    np.testing.assert_array_equal(np.array(got), want)


def test_threadgroup_variables() -> None:
    body = """
      threadgroup T rows[2][ROWS], single;
      threadgroup atomic_int count[1];
      threadgroup alignas(64) float aligned[3];
      uint l = thread_index_in_threadgroup;
      if (l == 0) single = T(a[0]);
      if (l == 0) atomic_store_explicit(&count[0], 5, memory_order_relaxed);
      rows[l / ROWS][l % ROWS] = T(l);
      aligned[l % 3] = 1;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      atomic_fetch_add_explicit(&count[0], 2, memory_order_relaxed);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      out[l] = float(rows[1 - l / ROWS][l % ROWS]) + 100 * float(single)
             + 1000 * atomic_load_explicit(&count[0], memory_order_relaxed);
    """
    got = run(
        body,
        mx.array([3.0, 4.0]),
        shape=(32,),
        template=[("T", mx.bfloat16), ("ROWS", 16)],
    )
    want = (np.arange(32) + 16) % 32 + 300 + 1000 * (5 + 64)
    np.testing.assert_array_equal(np.array(got), want)


def test_threadgroup_memory_starts_poisoned() -> None:
    body = LANE + "threadgroup float x[8]; out[l] = x[l % 8];"
    assert np.isnan(np.array(run(body, shape=(64,), group=(32, 1, 1)))).all()


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint32, mx.float32, mx.int64], ids=str)
def test_device_atomics(dtype: mx.Dtype) -> None:
    x = small_values(512, dtype, 1, 50)
    a = np.array(x)
    body = (
        LANE
        + """
      atomic_fetch_add_explicit(&out[0], a[l], memory_order_relaxed);
      atomic_fetch_sub_explicit(&out[1], a[l], memory_order_relaxed);
      atomic_fetch_max_explicit(&out[2], a[l], memory_order_relaxed);
      atomic_fetch_min_explicit(&out[3], a[l], memory_order_relaxed);
    """
    )
    got = run(
        body, x, shape=(4,), dtype=dtype, grid=(512, 1, 1), group=(64, 1, 1),
        atomic_outputs=True, init_value=7,
    )  # fmt: skip
    total, seven = a.sum(dtype=a.dtype), np.full(1, 7, a.dtype)
    want = [seven + total, seven - total, [a.max()], [min(7, a.min())]]
    np.testing.assert_array_equal(np.array(got), np.concatenate(want))


def test_integer_and_exchanging_atomics() -> None:
    body = (
        LANE
        + """
      atomic_fetch_or_explicit(&out[0], 1 << (l % 20), memory_order_relaxed);
      atomic_fetch_and_explicit(&out[1], ~(1 << (l % 20)), memory_order_relaxed);
      atomic_fetch_xor_explicit(&out[2], 1 << (l % 32), memory_order_relaxed);
      int seen = atomic_load_explicit(&out[3], memory_order_relaxed);
      while (!atomic_compare_exchange_weak_explicit(
          &out[3], &seen, seen + 3, memory_order_relaxed, memory_order_relaxed)) {}
      atomic_exchange_explicit(&out[4], 9, memory_order_relaxed);
    """
    )
    got = run(
        body, shape=(5,), dtype=mx.int32, grid=(96, 1, 1), group=(32, 1, 1),
        atomic_outputs=True, init_value=0,
    )  # fmt: skip
    assert got.tolist() == [(1 << 20) - 1, 0, -1, 288, 9]


def test_atomics_on_half() -> None:
    body = (
        LANE + "atomic_fetch_add_explicit(&out[0], half(a[l]), memory_order_relaxed);"
    )
    got = run(
        body, mx.ones(64), shape=(1,), dtype=mx.float16, grid=(64, 1, 1),
        atomic_outputs=True, init_value=0.5,
    )  # fmt: skip
    assert got.item() == 64.5


MATMUL = """
  simdgroup_matrix<T, 8, 8> x, w;
  simdgroup_matrix<float, 8, 8> sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (int k = 0; k < K; k += 8) {
    simdgroup_load(x, a, K, ulong2(k, 0));
    simdgroup_load(w, b, K, ulong2(k, 0), TRANSPOSE);
    simdgroup_multiply_accumulate(sum, x, w, sum);
  }
  simdgroup_store(sum, out, 8);
"""


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_simdgroup_matrix_multiplies(dtype: mx.Dtype) -> None:
    x, w = (
        small_values(8 * 24, dtype).reshape(8, 24),
        small_values(8 * 24, dtype).reshape(8, 24),
    )
    got = run(
        "uint t = thread_index_in_simdgroup;" + MATMUL, x, w, shape=(8, 8),
        grid=(32, 1, 1), template=[("T", dtype), ("K", 24), ("TRANSPOSE", True)],
    )  # fmt: skip
    np.testing.assert_array_equal(np.array(got), to_numpy(x) @ to_numpy(w).T)


def test_simdgroup_matrix_layout_is_apples() -> None:
    body = """
      uint l = thread_index_in_simdgroup;
      simdgroup_float8x8 m;
      simdgroup_load(m, a);
      out[2 * l] = m.thread_elements()[0];
      out[2 * l + 1] = m.thread_elements()[1];
      simdgroup_matrix<float, 8, 8> diagonal(3.0f), product;
      simdgroup_multiply(product, m, diagonal);
      product.thread_elements()[0] += 1000;
      simdgroup_store(product, out + 64, 8, ulong2(0, 0), true);
    """
    got = np.array(run(body, mx.arange(64.0), shape=(128,), grid=(32, 1, 1)))
    for lane in range(32):
        row = ((lane // 4) & 4) + (lane // 2) % 4
        col = ((lane // 4) & 2) * 2 + (lane % 2) * 2
        assert got[2 * lane : 2 * lane + 2].tolist() == [
            row * 8 + col,
            row * 8 + col + 1,
        ]
    stored = got[64:].reshape(8, 8).T
    want = 3 * np.arange(64).reshape(8, 8)
    want[:, ::2] += 1000
    np.testing.assert_array_equal(stored, want)
