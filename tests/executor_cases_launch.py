"""Cases of the launch: attributes, grids, scalars, strides, threadgroup memory."""
# ruff: noqa: E501 (Metal text)

from __future__ import annotations

import mlx.core as mx
import numpy as np
from executor_cases import RNG, Case, case

F32 = np.float32


@case
def strides() -> Case:
    base = RNG.normal(size=(3, 8, 5)).astype(F32)
    x = mx.array(base)[:, 1:7:2, :].transpose(2, 0, 1)
    source = """
        uint i = thread_position_in_grid.x;
        y[i] = x[elem_to_loc(i, x_shape, x_strides, x_ndim)];
        if (i == 0) { y[45] = x_shape[1]; y[46] = x_strides[0]; y[47] = x_ndim; }
        uint3 p = uint3(i % 3, i / 3 % 3, i / 9);
        y[48 + i] = x[elem_to_loc_3(p, x_strides)];
        y[93 + i] = x[elem_to_loc<uint>(p, x_shape, x_strides, x_ndim)];
    """
    flat = base[:, 1:7:2, :].transpose(2, 0, 1).ravel()
    want = np.concatenate([flat, [3, 1, 3], flat, flat])
    options = {"ensure_row_contiguous": False}
    return Case(
        "strides", source, {"x": x}, [want], [mx.float32], (45, 1, 1), options=options
    )


@case
def scalars_and_templates() -> Case:
    x = RNG.normal(size=64).astype(F32)
    source = """
        uint i = thread_position_in_grid.x;
        T v = T(x[i]) * T(scale) + T(K);
        if (NEGATE) v = -v;
        y[i] = twice(v) + small[1] + (flag ? 1 : 0);
        n[i] = count;
    """
    half = x.astype(np.float16) * np.float16(2.5) + np.float16(-3)
    inputs = {
        "x": mx.array(x),
        "scale": 2.5,
        "small": mx.array([1.0, 4.0]),
        "count": mx.array(2**40),
        "flag": mx.array(True),
    }
    return Case(
        "scalars",
        source,
        inputs,
        [(-half * np.float16(2)).astype(F32) + 5, np.full(64, 2**40)],
        [mx.float32, mx.int64],
        grid=(64, 1, 1),
        header="template <typename T> METAL_FUNC T twice(T v) { return v + v; }\n",
        template=[("T", mx.float16), ("K", -3), ("NEGATE", True)],
        outputs=("y", "n"),
    )


@case
def names_inside_names() -> Case:
    source = """
        uint i = thread_position_in_grid.x;
        y[i] = mask[i * mask_strides[0]] + k + out_k[i];
    """
    x = RNG.integers(0, 9, (2, 32)).astype(F32)
    inputs = {"k": 3.0, "mask": mx.array(x[0]), "out_k": mx.array(x[1])}
    return Case("names", source, inputs, [x[0] + x[1] + 3], [mx.float32])


@case
def many_inputs() -> Case:
    names = [f"a{i}" for i in range(13)]
    arrays = RNG.integers(0, 9, (13, 32)).astype(F32)
    terms = " + ".join(f"{i + 1} * {n}[i] * {n}_shape[0]" for i, n in enumerate(names))
    source = f"uint i = thread_position_in_grid.x; y[i] = {terms};"
    inputs = {n: mx.array(a) for n, a in zip(names, arrays, strict=True)}
    want = 32 * np.arange(1, 14) @ arrays
    return Case("many_inputs", source, inputs, [want], [mx.float32])


@case
def threadgroup_memory() -> Case:
    x = RNG.normal(size=(4, 64)).astype(F32)
    source = """
        uint i = thread_position_in_grid.x, t = thread_index_in_threadgroup;
        threadgroup T tile[2][W], spare[2]; // comment with threadgroup float no[1];
        threadgroup float last;
        if (true) { tile[t / W][t % W] = x[i]; }
        if (t == 63) last = x[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        spare[0] = spare[1] = 0;
        y[i] = reversed(&tile[0][0], 63 - t) + last;
    """
    header = """
        template <typename T>
        METAL_FUNC T reversed(const threadgroup T* p, uint i) { return p[i]; }
    """
    return Case(
        "threadgroup_memory",
        source,
        {"x": mx.array(x)},
        [x[:, ::-1] + x[:, -1:]],
        [mx.float32],
        grid=(256, 1, 1),
        threadgroup=(64, 1, 1),
        header=header,
        template=[("T", mx.float32), ("W", 32)],
    )


@case
def partial_threadgroups() -> Case:
    source = """
        uint i = thread_position_in_grid.x;
        y[i] = 1 + i;
        y[1000 + i] = simd_sum(1.0f);
        y[2000 + i] = simd_max((float)i);
        y[3000 + i] = threads_per_grid.x + threads_per_threadgroup.x;
        y[4000 + i] = simd_prefix_inclusive_sum(1.0f) + simd_all(i < 1000);
    """
    i = np.arange(1000)
    lanes = np.where(i < 992, 32, 8)
    last = np.minimum(i // 32 * 32 + 31, 999)
    groups = np.where(i < 768, 256, 232)
    want = np.stack([i + 1, lanes, last, 1000 + groups, i % 32 + 2])
    return Case(
        "partial", source, {"x": mx.zeros(8)}, [want], [mx.float32],
        grid=(1000, 1, 1), threadgroup=(256, 1, 1),
    )  # fmt: skip


@case
def partial_in_two_dimensions() -> Case:
    source = """
        uint3 p = thread_position_in_grid;
        y[p.y * 33 + p.x] = p.x + 100 * p.y + 10000 * threadgroup_position_in_grid.x;
    """
    r, c = np.mgrid[:7, :33]
    want = c + 100 * r + 10000 * (c // 16)
    return Case(
        "partial2", source, {"x": mx.zeros(8)}, [want], [mx.uint32],
        grid=(33, 7, 1), threadgroup=(16, 4, 1),
    )  # fmt: skip


@case
def short_simdgroups() -> Case:
    source = """
        uint i = thread_position_in_grid.x;
        y[i] = simd_sum((float)i);
        y[60 + i] = simd_min((float)i) + simd_any(i == 21);
        y[120 + i] = simd_broadcast_first((float)i);
        threadgroup_barrier(mem_flags::mem_none);
        y[180 + i] = quad_sum((float)i);
    """
    groups = np.arange(60).reshape(3, 20)
    first = np.repeat(groups[:, 0], 20)
    want = [np.repeat(groups.sum(1), 20), first + (np.arange(60) // 20 == 1), first]
    want += [np.repeat(np.arange(60).reshape(15, 4).sum(1), 4)]
    return Case(
        "short", source, {"x": mx.zeros(8)}, [np.stack(want)], [mx.float32],
        grid=(60, 1, 1), threadgroup=(20, 1, 1),
    )  # fmt: skip


@case
def small_grid() -> Case:
    """The threadgroup shrinks to the grid: one group of 40 threads."""
    source = """
        uint i = thread_position_in_grid.x;
        y[i] = threads_per_threadgroup.x + 100 * simdgroups_per_threadgroup + simd_sum(1.0f);
    """
    want = 240 + np.where(np.arange(40) < 32, 32, 8)
    return Case(
        "small_grid", source, {"x": mx.zeros(8)}, [want], [mx.float32],
        grid=(40, 1, 1), threadgroup=(256, 1, 1),
    )  # fmt: skip


VECTORS = (
    "thread_position_in_grid thread_position_in_threadgroup threadgroup_position_in_grid "
    "threadgroups_per_grid threads_per_grid threads_per_threadgroup grid_size grid_origin "
    "dispatch_threads_per_threadgroup"
).split()
SCALARS = (
    "thread_index_in_simdgroup simdgroup_index_in_threadgroup thread_index_in_threadgroup "
    "simdgroups_per_threadgroup threads_per_simdgroup thread_execution_width "
    "quadgroup_index_in_threadgroup thread_index_in_quadgroup quadgroups_per_threadgroup "
    "dispatch_simdgroups_per_threadgroup dispatch_quadgroups_per_threadgroup"
).split()


@case
def attributes() -> Case:
    grid, block = (16, 12, 4), (8, 4, 2)
    terms = [f"out[{i}] = {n};" for i, n in enumerate(VECTORS)]
    numbers = [f"y[at + {27 + i}] = {n};" for i, n in enumerate(SCALARS)]
    source = (
        "uint3 p = thread_position_in_grid;\n"
        "uint at = ((p.z * 12 + p.y) * 16 + p.x) * 38;\n"
        "device packed_uint3* out = (device packed_uint3*)(y + at);\n"
    )
    source += "\n".join(terms) + "\n" + "\n".join(numbers)
    z, y, x = np.meshgrid(*(np.arange(n) for n in grid[::-1]), indexing="ij")
    position = np.stack([x, y, z], -1)
    inner, outer = position % block, position // block
    linear = (inner[..., 2] * 4 + inner[..., 1]) * 8 + inner[..., 0]
    want = np.zeros((4, 12, 16, 38), np.uint32)
    vectors = [position, inner, outer, [2, 3, 2], grid, block, grid, [0, 0, 0], block]
    for i, value in enumerate(vectors):
        want[..., 3 * i : 3 * i + 3] = value
    scalars = [linear % 32, linear // 32, linear, 2, 32, 32, linear // 4, linear % 4]
    for i, value in enumerate([*scalars, 16, 2, 16]):
        want[..., 27 + i] = value
    return Case(
        "attributes", source, {"x": mx.zeros(8)}, [want], [mx.uint32],
        grid=grid, threadgroup=block,
    )  # fmt: skip


QMV = """
template <typename T, int GS, int M>
METAL_FUNC void qmv_rows(const device uint4* w, const device T* scales, const device T* biases,
    const device T* x, device T* y, const int K, const int N, const uint row, const uint lane) {
  float acc[M];
  _Pragma("clang loop unroll(full)") for (int m = 0; m < M; m++) acc[m] = 0;
  for (int c = lane; c < K / 32; c += 32) {
    uint4 q = w[(size_t)row * (K / 32) + c];
    float s = scales[(size_t)row * (K / GS) + c * 32 / GS];
    float b = biases[(size_t)row * (K / GS) + c * 32 / GS];
    _Pragma("clang loop unroll(full)") for (int m = 0; m < M; m++) {
      const device vec<T, 4>* xp = (const device vec<T, 4>*)(x + (size_t)m * K + c * 32);
      float dot = 0, sum = 0;
      _Pragma("clang loop unroll(full)") for (int j = 0; j < 4; j++) {
        float4 lo = float4(xp[2 * j]), hi = float4(xp[2 * j + 1]);
        uint u = q[j];
        float2 a = float2(as_type<half2>((u & 0x000f000fu) | 0x64006400u)) - 1024.0f;
        uint4 d = uint4(u, u >> 4, u >> 8, u >> 12) & 15, e = uint4(u >> 16, u >> 20, u >> 24, u >> 28) & 15;
        dot = fma(a.x, lo.x, dot); dot = fma(a.y, hi.x, dot);
        dot += metal::dot(float3(d.yzw), lo.yzw) + metal::dot(float3(e.yzw), hi.yzw);
        sum += (lo.x + lo.y) + (lo.z + lo.w) + (hi.x + hi.y) + (hi.z + hi.w);
      }
      acc[m] = fma(s, dot, fma(b, sum, acc[m]));
    }
  }
  for (int m = 0; m < M; m++) {
    float t = simd_sum(acc[m]);
    if (lane == 0) y[(size_t)m * N + row] = T(t);
  }
}
"""


@case
def quantized_matvec() -> Case:
    K, N, M, group = 1024, 8, 3, 64
    w, scales, biases = mx.quantize(
        mx.array(RNG.normal(size=(N, K)).astype(F32)), group
    )
    x = mx.array(RNG.normal(size=(M, K)).astype(F32))
    dense = np.array(mx.dequantize(w, scales, biases, group)).astype(np.float64)
    source = """
        uint row = thread_position_in_grid.x / 32;
        qmv_rows<T, GS, M>((const device uint4*)w, scales, biases, x, y, K, N, row,
                           thread_index_in_simdgroup);
    """
    inputs = {"w": w, "scales": scales, "biases": biases, "x": x, "K": K, "N": N}
    template = [("T", mx.float32), ("GS", group), ("M", M)]
    return Case(
        "qmv_like", source, inputs, [np.array(x) @ dense.T], [mx.float32],
        grid=(32 * N, 1, 1), threadgroup=(64, 1, 1), header=QMV, template=template,
        rtol=2e-4,
    )  # fmt: skip
