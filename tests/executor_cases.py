"""Metal kernels with the results NumPy gives: what every executor must agree on."""
# ruff: noqa: E501 (Metal text)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

RNG = np.random.default_rng(7)


@dataclass
class Case:
    """One kernel call. ``expected`` holds one NumPy array for each output."""

    name: str
    source: str
    inputs: dict[str, Any]
    expected: list[np.ndarray]
    dtypes: list[mx.Dtype]
    grid: tuple[int, int, int] = (32, 1, 1)
    threadgroup: tuple[int, int, int] = (32, 1, 1)
    header: str = ""
    template: list[tuple[str, Any]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    init_value: float | None = None
    outputs: tuple[str, ...] = ("y",)
    rtol: float = 0.0


CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    """Register a function that builds a case."""
    CASES[make.__name__] = make
    return make


def simd(name: str, x: np.ndarray, lines: list[str], expected: list, dtype: mx.Dtype):
    """A case whose line i writes one value per lane to row i of the output."""
    body = "uint i = thread_index_in_simdgroup;\nT v = x[i];\n"
    body += "".join(f"y[{row} * 32 + i] = {line};\n" for row, line in enumerate(lines))
    rows = np.stack([np.broadcast_to(np.asarray(e), 32) for e in expected])
    inputs = {"x": mx.array(x).astype(dtype)}
    return Case(name, body, inputs, [rows], [dtype], template=[("T", dtype)])


LANES = np.arange(32)
NUMBERS = {
    "float32": mx.float32,
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
    "int32": mx.int32,
    "uint32": mx.uint32,
    "int64": mx.int64,
    "int16": mx.int16,
    "uint8": mx.uint8,
}


def _reductions(name: str) -> Case:
    x = RNG.permutation(32) % 7
    ones = np.where(LANES % 11 == 0, 2, 1)
    lines = [
        "simd_sum(v)",
        "simd_max(v)",
        "simd_min(v)",
        "simd_product(T(1 + (i % 11 == 0)))",
    ]
    want = [x.sum(), x.max(), x.min(), ones.prod()]
    lines += ["simd_prefix_inclusive_sum(v)", "simd_prefix_exclusive_sum(v)"]
    want += [np.cumsum(x), np.cumsum(x) - x]
    lines += ["simd_prefix_inclusive_product(T(1 + (i % 11 == 0)))"]
    lines += ["simd_prefix_exclusive_product(T(1 + (i % 11 == 0)))"]
    want += [np.cumprod(ones), np.cumprod(ones) // ones]
    quads = x.reshape(8, 4)
    lines += ["quad_sum(v)", "quad_max(v)", "quad_min(v)"]
    want += [np.repeat(quads.sum(1), 4), np.repeat(quads.max(1), 4)]
    want += [np.repeat(quads.min(1), 4)]
    lines += ["quad_prefix_inclusive_sum(v)", "quad_prefix_exclusive_sum(v)"]
    scan = np.cumsum(quads, 1)
    want += [scan.ravel(), (scan - quads).ravel()]
    if "float" not in name:
        lines += ["simd_and(T(v | 8))", "simd_or(v)", "simd_xor(v)", "quad_or(v)"]
        want += [np.bitwise_and.reduce(x | 8), np.bitwise_or.reduce(x)]
        want += [np.bitwise_xor.reduce(x)]
        want += [np.repeat(np.bitwise_or.reduce(quads, 1), 4)]
    return simd(f"reduce_{name}", x, lines, want, NUMBERS[name])


def _shuffles(name: str) -> Case:
    x = RNG.permutation(32)
    up, quad = np.maximum(LANES - 3, -1), LANES & ~3
    fill = 100 + LANES
    lines = ["simd_shuffle(v, ushort(31 - i))", "simd_broadcast(v, ushort(5))"]
    want = [x[::-1], x[5]]
    lines += ["simd_shuffle_xor(v, ushort(9))", "simd_broadcast_first(v)"]
    want += [x[LANES ^ 9], x[0]]
    lines += ["simd_shuffle_up(v, ushort(3))"]
    want += [np.where(up < 0, x, x[up])]
    lines += ["simd_shuffle_down(v, ushort(5))"]
    want += [np.where(LANES + 5 < 32, x[np.minimum(LANES + 5, 31)], x)]
    lines += [
        "simd_shuffle_rotate_up(v, ushort(7))",
        "simd_shuffle_rotate_down(v, ushort(7))",
    ]
    want += [np.roll(x, 7), np.roll(x, -7)]
    lines += ["simd_shuffle_and_fill_up(v, T(100 + i), ushort(4))"]
    want += [np.concatenate([fill[28:], x[:28]])]
    lines += ["simd_shuffle_and_fill_down(v, T(100 + i), ushort(4))"]
    want += [np.concatenate([x[4:], fill[:4]])]
    lines += ["simd_shuffle_and_fill_up(v, T(100 + i), ushort(2), ushort(8))"]
    want += [
        np.concatenate(
            [np.r_[fill[b + 6 : b + 8], x[b : b + 6]] for b in (0, 8, 16, 24)]
        )
    ]
    lines += ["quad_shuffle(v, ushort(3 - i % 4))", "quad_broadcast(v, ushort(2))"]
    want += [x[quad + 3 - LANES % 4], x[quad + 2]]
    lines += ["quad_shuffle_xor(v, ushort(1))", "quad_shuffle_rotate_up(v, ushort(1))"]
    want += [x[LANES ^ 1], x[quad + (LANES - 1) % 4]]
    lines += ["quad_shuffle_rotate_down(v, ushort(1))"]
    want += [x[quad + (LANES + 1) % 4]]
    return simd(f"shuffle_{name}", x, lines, want, NUMBERS[name])


for _name in NUMBERS:
    CASES[f"reduce_{_name}"] = lambda name=_name: _reductions(name)
    CASES[f"shuffle_{_name}"] = lambda name=_name: _shuffles(name)


@case
def collectives_of_vectors() -> Case:
    x = RNG.integers(0, 9, (32, 4)).astype(np.float32)
    source = """
        uint i = thread_index_in_simdgroup;
        float4 v = ((const device float4*)x)[i];
        device float4* out = (device float4*)y;
        out[i] = simd_sum(v);
        out[32 + i] = simd_max(v);
        out[64 + i] = simd_shuffle(v, ushort(i ^ 5));
        out[96 + i] = float4(simd_sum(half4(v)));
        out[128 + i] = float4(quad_sum(v.xy), simd_broadcast(v.zw, ushort(3)));
    """
    quad = np.repeat(x.reshape(8, 4, 4).sum(1), 4, axis=0)
    total = np.broadcast_to(x.sum(0), (32, 4))
    last = np.c_[quad[:, :2], np.broadcast_to(x[3, 2:], (32, 2))]
    rows = [total, np.broadcast_to(x.max(0), (32, 4)), x[LANES ^ 5], total, last]
    return Case("vectors", source, {"x": mx.array(x)}, [np.stack(rows)], [mx.float32])


@case
def votes() -> Case:
    source = """
        uint i = thread_index_in_simdgroup;
        bool odd = i % 3 == 1;
        uint64_t vote = (uint64_t)simd_ballot(odd);
        y[i] = (uint)vote;
        y[32 + i] = simd_all(i < 32) + 2 * simd_all(odd) + 4 * simd_any(odd) + 8 * simd_any(i > 31);
        y[64 + i] = simd_is_first();
        y[96 + i] = quad_all(i < 4) + 2 * quad_any(i == 9);
        y[128 + i] = simd_ballot(odd).any() + 2 * simd_ballot(odd).all();
    """
    bits = sum(1 << i for i in range(32) if i % 3 == 1)
    quad = (LANES < 4) + 2 * (LANES // 4 == 2)
    rows = [np.full(32, bits), np.full(32, 5), LANES == 0, quad, np.full(32, 1)]
    x = {"x": mx.zeros(32)}
    return Case("votes", source, x, [np.stack(rows)], [mx.uint32])


@case
def half_arithmetic() -> Case:
    a, b = RNG.normal(size=(2, 32)).astype(np.float16)
    source = """
        uint i = thread_index_in_simdgroup;
        half p = a[i], q = b[i];
        y[i] = p + q;
        y[32 + i] = p * q - p;
        y[64 + i] = p / q;
        y[96 + i] = 2 * p;
        half r = p; r += 1.5f; r *= q; y[128 + i] = -r;
        y[160 + i] = half(float(p) * q);
        y[192 + i] = max(p, q);
        y[224 + i] = as_type<half>(ushort(as_type<ushort>(p) ^ 0x8000));
        y[256 + i] = p < q ? p : q;
    """
    one = ((a.astype(np.float32) + np.float32(1.5)).astype(np.float16)) * b
    rows = [a + b, a * b - a, a / b, 2 * a, -one]
    rows += [(a.astype(np.float32) * b).astype(np.float16), np.maximum(a, b), -a]
    rows += [np.minimum(a, b)]
    inputs = {"a": mx.array(a), "b": mx.array(b)}
    return Case("half_arithmetic", source, inputs, [np.stack(rows)], [mx.float16])


@case
def bfloat_rounding() -> Case:
    x = RNG.normal(size=32).astype(np.float32)
    source = """
        uint i = thread_index_in_simdgroup;
        y[i] = bfloat(x[i]);
        y[32 + i] = bfloat(x[i]) * bfloat(3.0f);
        bfloat16_t z = x[i]; z += bfloat16_t(1); y[64 + i] = z;
        y[96 + i] = bfloat(float(half(float(bfloat(x[i])))));
    """

    def near(v: np.ndarray) -> np.ndarray:
        return np.array(mx.array(v).astype(mx.bfloat16).astype(mx.float32))

    rows = [near(x), near(near(x) * 3), near(near(x) + 1), near(x).astype(np.float16)]
    rows[3] = near(rows[3].astype(np.float32))
    return Case(
        "bfloat_rounding", source, {"x": mx.array(x)}, [np.stack(rows)], [mx.bfloat16]
    )


@case
def address_spaces() -> Case:
    """`constant` implies const; overloads may differ in nothing but their space."""
    header = """
    constant int TABLE[4] = {2, 3, 5, 7};
    int value(constant int& n) { return n; }
    template <typename U> U first(const device U* p) { return p[0]; }
    template <typename U> U first(const threadgroup U* p) { return p[0]; }
    """
    source = """
    uint i = thread_index_in_simdgroup;
    threadgroup int shared[32];
    shared[i] = 10 * x[i];
    simdgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = first(x + i) + first(&shared[i]) + value(n) * TABLE[i % 4];
    """
    expected = 11 * LANES + 100 * np.resize([2, 3, 5, 7], 32)
    inputs = {"x": mx.array(LANES).astype(mx.int32), "n": 100}
    return Case("address_spaces", source, inputs, [expected], [mx.int32], header=header)
