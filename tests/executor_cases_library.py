"""Cases of the language and its library: vectors, functions, atomics, matrices."""
# ruff: noqa: E501 (Metal text)

from __future__ import annotations

import mlx.core as mx
import numpy as np
from executor_cases import RNG, Case, case

F32 = np.float32


@case
def swizzles() -> Case:
    x = RNG.integers(-9, 9, (32, 4)).astype(F32)
    source = """
        uint i = thread_position_in_grid.x;
        float4 v = ((const device float4*)x)[i];
        device float4* out = (device float4*)y + i * 8;
        out[0] = v.wzyx;
        float4 a = v; a.xz = v.yw; a.w *= 2; out[1] = a;
        float4 b = v; b.yx = b.xy; b.zw += v.xy * 3; out[2] = b;
        float3 c = v.yzw; c.rb = float2(1, 2); out[3] = float4(c, v.x);
        float4 d = float4(v.xy, 5, 6) - float4(1, v.zw, 2); d[2] = v[3]; out[4] = d;
        float2 e = float2(v.x); e = -e.yx + v.zw; out[5] = float4(e, v.xx);
        bool4 m = v > 0; out[6] = select(v, float4(7), m) + float4(any(m), all(m), 0, 0);
        float4 f = v; f /= 2; f = 1 - f; f++; out[7] = clamp(f, -1.0f, float4(2, 3, 4, 5));
    """
    out = np.zeros((32, 8, 4), F32)
    X, Y, Z, W = x.T
    out[:, 0] = x[:, ::-1]
    out[:, 1] = np.c_[Y, Y, W, W * 2]
    out[:, 2] = np.c_[Y, X, Z + 3 * X, W + 3 * Y]
    out[:, 3] = np.c_[np.ones(32), Z, np.full(32, 2), X]
    out[:, 4] = np.c_[X - 1, Y - Z, W, np.full(32, 4)]
    out[:, 5] = np.c_[Z - X, W - X, X, X]
    m = x > 0
    out[:, 6] = np.where(m, 7, x)
    out[:, 6, 0] += m.any(1)
    out[:, 6, 1] += m.all(1)
    out[:, 7] = np.clip(2 - x / 2, -1, [2, 3, 4, 5])
    return Case("swizzles", source, {"x": mx.array(x)}, [out], [mx.float32])


@case
def integer_vectors() -> Case:
    x = RNG.integers(0, 1 << 31, (32, 4)).astype(np.uint32)
    source = """
        uint i = thread_position_in_grid.x;
        uint4 v = ((const device uint4*)x)[i];
        device uint4* out = (device uint4*)y + i * 4;
        out[0] = (v >> 4 & 0xf0f) | (v << 3) ^ ~v;
        uint4 a = v; a %= 7; a += uint4(1, 2, 3, 4); out[1] = a;
        uchar4 b = as_type<uchar4>(v.x); ushort2 s = as_type<ushort2>(v.y);
        out[2] = uint4(b) + uint4(uint2(s), popcount(v.zw));
        out[3] = min(max(v, v.yxwz), 1000000000u) + uint4(v == v.yyyy);
    """
    out = np.zeros((32, 4, 4), np.uint32)
    out[:, 0] = (x >> 4 & 0xF0F) | (x << 3) ^ ~x
    out[:, 1] = x % 7 + [1, 2, 3, 4]
    bits = np.array([[bin(v).count("1") for v in row] for row in x[:, 2:]])
    halves = np.ascontiguousarray(x[:, 1:2]).view(np.uint16)
    out[:, 2] = np.ascontiguousarray(x[:, :1]).view(np.uint8) + np.c_[halves, bits]
    out[:, 3] = np.minimum(np.maximum(x, x[:, [1, 0, 3, 2]]), 10**9)
    out[:, 3] += x == x[:, 1:2]
    return Case("integer_vectors", source, {"x": mx.array(x)}, [out], [mx.uint32])


UNARY = {
    "exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2, "log10": np.log10,
    "sqrt": np.sqrt, "sin": np.sin, "cos": np.cos, "tan": np.tan, "sinh": np.sinh,
    "cosh": np.cosh, "tanh": np.tanh, "asin": lambda v: np.arcsin(v / 4),
    "acos": lambda v: np.arccos(v / 4), "atan": np.arctan, "asinh": np.arcsinh,
    "acosh": lambda v: np.arccosh(v + 1), "atanh": lambda v: np.arctanh(v / 4),
    "floor": np.floor, "ceil": np.ceil, "rint": np.rint, "trunc": np.trunc,
    "rsqrt": lambda v: 1 / np.sqrt(v), "exp10": lambda v: 10**v, "abs": np.abs,
    "fract": lambda v: v - np.floor(v), "sign": np.sign,
}  # fmt: skip
ARGUMENT = {"asin": "x[i] / 4", "acos": "x[i] / 4", "atanh": "x[i] / 4"}
ARGUMENT["acosh"] = "x[i] + 1"


@case
def float_functions() -> Case:
    x = np.linspace(0.05, 3.9, 32).astype(F32)
    wide = x.astype(np.float64)
    lines = [f"{f}({ARGUMENT.get(f, 'x[i]')})" for f in UNARY]
    want = [reference(wide) for reference in UNARY.values()]
    lines += ["fast::exp(x[i])", "precise::log(x[i])", "metal::fast::tanh(x[i])"]
    want += [np.exp(wide), np.log(wide), np.tanh(wide)]
    lines += ["fma(x[i], 2.0f, 1.0f)", "pow(x[i], 2.5f)", "atan2(x[i], 2.0f)"]
    want += [wide * 2 + 1, wide**2.5, np.arctan2(wide, 2)]
    lines += ["fmod(x[i], 0.7f)", "mix(x[i], 3.0f, 0.25f)", "saturate(x[i] - 1)"]
    want += [np.fmod(x, F32(0.7)), wide * 0.75 + 0.75, np.clip(wide - 1, 0, 1)]
    lines += ["step(2.0f, x[i])", "ldexp(x[i], 3)", "copysign(x[i], -1.0f)"]
    want += [np.where(x < 2, 0, 1), wide * 8, -wide]
    lines += ["smoothstep(0.0f, 4.0f, x[i])", "log1p(x[i])", "round(x[i])"]
    want += [3 * (wide / 4) ** 2 - 2 * (wide / 4) ** 3, np.log1p(wide)]
    want += [np.floor(wide + 0.5)]
    lines += ["(float)isnan(x[i] / 0.0f - INFINITY)", "(float)isinf(x[i] / 0.0f)"]
    want += [np.ones(32), np.ones(32)]
    lines += ["dot(float3(x[i], 1, 2), float3(3, 4, 5))", "length(float2(x[i], 2))"]
    want += [3 * wide + 14, np.hypot(wide, 2)]
    lines += [
        "cross(float3(x[i], 1, 2), float3(3, 4, 5)).y",
        "normalize(float2(x[i], 2)).x",
    ]
    want += [6 - 5 * wide, wide / np.hypot(wide, 2)]
    lines += ["max(x[i], NAN)", "min(NAN, x[i])", "median3(x[i], 1.0f, 2.0f)"]
    want += [wide, wide, np.clip(wide, 1, 2)]
    body = "uint i = thread_position_in_grid.x;\n"
    body += "".join(f"y[{row} * 32 + i] = {line};\n" for row, line in enumerate(lines))
    inputs = {"x": mx.array(x)}
    out = [np.stack(want)]
    return Case("float_functions", body, inputs, out, [mx.float32], rtol=3e-5)


@case
def integer_functions() -> Case:
    x = RNG.integers(1, 1 << 32, 32).astype(np.uint32)
    big = [int(v) for v in x]
    lines = [
        "popcount(v)",
        "clz(v)",
        "ctz(v)",
        "reverse_bits(v)",
        "extract_bits(v, 5, 9)",
    ]
    want = [
        [bin(v).count("1") for v in big],
        [32 - v.bit_length() for v in big],
        [(v & -v).bit_length() - 1 for v in big],
        [int(f"{v:032b}"[::-1], 2) for v in big],
        [v >> 5 & 511 for v in big],
    ]
    lines += ["insert_bits(v, 77u, 8, 7)", "mulhi(v, 0x9e3779b9u)", "rotate(v, 11u)"]
    want += [
        [v & ~0x7F00 | 77 << 8 for v in big],
        [v * 0x9E3779B9 >> 32 for v in big],
        [(v << 11 | v >> 21) & 0xFFFFFFFF for v in big],
    ]
    lines += [
        "absdiff(v, 5000u)",
        "hadd(v, 9u)",
        "rhadd(v, 9u)",
        "(uint)abs(-(int)(v >> 1))",
    ]
    want += [
        [abs(v - 5000) for v in big],
        [(v + 9) >> 1 for v in big],
        [(v + 10) >> 1 for v in big],
        [v >> 1 for v in big],
    ]
    lines += ["clz((ushort)(v >> 20))", "(uint)mulhi((ulong)v << 32, (ulong)v)"]
    want += [[16 - (v >> 20).bit_length() for v in big]]
    want += [[(v << 32) * v >> 64 for v in big]]
    lines += ["addsat(v, 0xf0000000u)", "subsat(v, 0xf0000000u)", "ceildiv(v >> 8, 7u)"]
    want += [
        [min(v + 0xF0000000, 0xFFFFFFFF) for v in big],
        [max(v - 0xF0000000, 0) for v in big],
        [-(-(v >> 8) // 7) for v in big],
    ]
    body = "uint i = thread_position_in_grid.x; uint v = x[i];\n"
    body += "".join(f"y[{row} * 32 + i] = {line};\n" for row, line in enumerate(lines))
    inputs = {"x": mx.array(x)}
    out = [np.array(want, np.uint32)]
    return Case("integer_functions", body, inputs, out, [mx.uint32])


@case
def limits() -> Case:
    source = """
        uint i = thread_position_in_grid.x;
        if (i > 0) return;
        y[0] = Limits<float>::max; y[1] = Limits<float>::min; y[2] = Limits<half>::finite_min;
        y[3] = Limits<bfloat16_t>::finite_max; y[4] = max(Limits<float>::finite_min, -1.0f);
        y[5] = metal::numeric_limits<half>::epsilon(); y[6] = Limits<int>::max == 2147483647;
        y[7] = metal::is_same_v<float16_t, half> && !metal::is_integral_v<float>;
        y[8] = (float)(Limits<uchar>::max) + metal::numeric_limits<short>::lowest();
        y[9] = (float)(half)metal::numeric_limits<half>::max() + table[i + 2];
        complex64_t c = z[1] * z[2]; c += 1.0f; y[10] = c.real; y[11] = c.imag;
    """
    z = np.array([0, 1 + 2j, 3 - 1j], np.complex64)
    out = np.array(
        [np.inf, -np.inf, -65504, 3.3895314e38, -1, 2**-10, 1, 1, 255 - 32768]
        + [65504 + 7, 6, 5],
        F32,
    )
    header = "constant constexpr float table[4] = {1, 3, 7, 15};\n"
    return Case(
        "limits", source, {"z": mx.array(z)}, [out], [mx.float32], header=header
    )


@case
def atomics() -> Case:
    x = RNG.integers(0, 8, 256).astype(np.uint32)
    source = """
        uint i = thread_position_in_grid.x;
        atomic_fetch_add_explicit(&counts[x[i]], 1u, memory_order_relaxed);
        atomic_fetch_max_explicit(&extremes[0], x[i] * 10 + i % 10, memory_order_relaxed);
        atomic_fetch_or_explicit(&extremes[1], 1u << x[i], memory_order_relaxed);
        atomic_fetch_xor_explicit(&extremes[2], i, memory_order_relaxed);
        atomic_fetch_add_explicit(&sum[0], 0.5f, memory_order_relaxed);
        float seen = atomic_load_explicit(&sum[1], memory_order_relaxed);
        while (!atomic_compare_exchange_weak_explicit(
            &sum[1], &seen, seen + 2.0f, memory_order_relaxed, memory_order_relaxed)) {}
        if (i == 3) atomic_store_explicit(&sum[2], 9.0f, memory_order_relaxed);
    """
    i = np.arange(256)
    counts = np.bincount(x, minlength=8)
    extremes = [(x * 10 + i % 10).max(), np.bitwise_or.reduce(1 << x.astype(int)), 0]
    sums = np.array([128, 512, 9], F32)
    return Case(
        "atomics",
        source,
        {"x": mx.array(x)},
        [counts, np.array(extremes), sums],
        [mx.uint32, mx.uint32, mx.float32],
        grid=(256, 1, 1),
        threadgroup=(64, 1, 1),
        options={"atomic_outputs": True},
        init_value=0,
        outputs=("counts", "extremes", "sum"),
    )


def _matrix(name: str, dtype: mx.Dtype, out: mx.Dtype, right=None) -> Case:
    a, b = RNG.integers(-4, 5, (2, 16, 16)).astype(F32)
    source = """
        simdgroup_matrix<T, 8, 8> l, lt;
        simdgroup_matrix<R, 8, 8> r, f;
        simdgroup_matrix<U, 8, 8> acc = make_filled_simdgroup_matrix<U, 8, 8>(U(2));
        for (uint k = 0; k < 2; k++) {
          simdgroup_load(l, a + k * 8, 16);
          simdgroup_load(r, b, 16, ulong2(8, k * 8));
          simdgroup_multiply_accumulate(acc, l, r, acc);
        }
        simdgroup_store(acc, y, 16);
        simdgroup_load(lt, a, 16, ulong2(8, 0), true);
        simdgroup_load(f, b, 16);
        simdgroup_multiply(acc, lt, f);
        acc.thread_elements()[0] *= U(2);
        acc.thread_elements()[1] *= U(2);
        simdgroup_store(acc, y, 16, ulong2(8, 0));
        simdgroup_store(simdgroup_matrix<U, 8, 8>(U(3)), y, 16, ulong2(0, 8));
        simdgroup_store(acc, y, 16, ulong2(8, 8), true);
        (void)thread_index_in_simdgroup;
    """
    second = 2 * a[:8, 8:].T @ b[:8, :8]
    want = np.block([[a[:8] @ b[:, 8:] + 2, second], [3 * np.eye(8), second.T]])
    right = right or dtype
    inputs = {"a": mx.array(a).astype(dtype), "b": mx.array(b).astype(right)}
    template = [("T", dtype), ("R", right), ("U", out)]
    header = "#include <metal_simdgroup_matrix>\n"
    return Case(name, source, inputs, [want], [out], header=header, template=template)


@case
def matrix_float() -> Case:
    return _matrix("matrix_float", mx.float32, mx.float32)


@case
def matrix_half() -> Case:
    return _matrix("matrix_half", mx.float16, mx.float32)


@case
def matrix_half_accumulator() -> Case:
    return _matrix("matrix_half_accumulator", mx.float16, mx.float16)


@case
def matrix_bfloat() -> Case:
    return _matrix("matrix_bfloat", mx.bfloat16, mx.float32)


@case
def matrix_mixed() -> Case:
    return _matrix("matrix_mixed", mx.bfloat16, mx.bfloat16, mx.float16)


@case
def packed_vectors() -> Case:
    x = RNG.integers(0, 99, (32, 3)).astype(F32)
    source = """
        uint i = thread_position_in_grid.x;
        float3 v = ((const device packed_float3*)x)[i];
        ((device packed_float3*)y)[i] = v.zyx + sizeof(float3) - sizeof(packed_float3);
    """
    want = x[:, ::-1] + 4
    return Case("packed_vectors", source, {"x": mx.array(x)}, [want], [mx.float32])
