"""CPU executor: what lanes do together, against NumPy.

The expected values are computed from the definition of each operation, on whole and on
partial simdgroups (a grid of 44 threads: lanes 0-31 and 0-11).
"""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from cpu_case import run, small_values, to_numpy

LANE = "uint l = thread_position_in_grid.x; "
SIZES = [32, 44, 64]
TYPES = [
    mx.float32,
    mx.float16,
    mx.bfloat16,
    mx.int32,
    mx.uint32,
    mx.int64,
    mx.uint64,
    mx.int16,
    mx.uint8,
]
RNG = np.random.default_rng(7)


def groups(a: np.ndarray, width: int) -> list[np.ndarray]:
    return [a[i : i + width] for i in range(0, len(a), width)]


def lanes(
    expressions: list[str], x: mx.array, dtype: mx.Dtype | None = None
) -> np.ndarray:
    """Each expression on every lane: [expressions, lanes]. One kernel for all."""
    n = x.shape[0]
    body = LANE + "".join(
        f"out[{i} * n + l] = {expression}; " for i, expression in enumerate(expressions)
    )
    body = f"const uint n = threads_per_grid.x; {body}"
    shape = (len(expressions), n)
    got = run(
        body, x, shape=shape, dtype=dtype or x.dtype, grid=(n, 1, 1), group=(64, 1, 1)
    )
    return to_numpy(got)


def spread(f: Callable, a: np.ndarray, width: int) -> np.ndarray:
    """Apply f to each group and give its result to all of its lanes."""
    return np.concatenate([np.full(len(g), f(g)) for g in groups(a, width)])


def check_reductions(
    n: int, dtype: mx.Dtype, low: int, high: int, reductions: dict
) -> None:
    x = small_values(n, dtype, low, high)
    a = to_numpy(x)
    cases = [(p, w, op) for p, w in (("simd", 32), ("quad", 4)) for op in reductions]
    got = lanes([f"{prefix}_{op}(a[l])" for prefix, _, op in cases], x)
    for row, (prefix, width, op) in zip(got, cases, strict=True):
        want = spread(lambda g, op=op: reductions[op](g, dtype=a.dtype), a, width)
        np.testing.assert_array_equal(row, want.astype(a.dtype), err_msg=prefix + op)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_sum_min_max(n: int, dtype: mx.Dtype) -> None:
    least = {
        "sum": np.sum,
        "min": lambda g, dtype: g.min(),
        "max": lambda g, dtype: g.max(),
    }
    check_reductions(n, dtype, 1, 9, least)


@pytest.mark.parametrize("dtype", [mx.int32, mx.uint8, mx.int64], ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_bitwise(n: int, dtype: mx.Dtype) -> None:
    bitwise = {
        "and": np.bitwise_and.reduce,
        "or": np.bitwise_or.reduce,
        "xor": np.bitwise_xor.reduce,
    }
    check_reductions(n, dtype, 0, 127, bitwise)


@pytest.mark.parametrize("dtype", [mx.float32, mx.int32, mx.uint64], ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_product_and_prefix(n: int, dtype: mx.Dtype) -> None:
    check_reductions(n, dtype, 1, 3, {"product": np.prod})
    x = small_values(n, dtype, 1, 3)
    a = to_numpy(x)
    names, wanted = [], []
    for prefix, width in (("simd", 32), ("quad", 4)):
        for op, scan, first in (("sum", np.cumsum, 0), ("product", np.cumprod, 1)):
            inclusive = [scan(g, dtype=a.dtype) for g in groups(a, width)]
            exclusive = [np.concatenate([[first], g[:-1]]) for g in inclusive]
            for kind, want in (("inclusive", inclusive), ("exclusive", exclusive)):
                names.append(f"{prefix}_prefix_{kind}_{op}")
                wanted.append(np.concatenate(want))
    for row, name, want in zip(
        lanes([f"{name}(a[l])" for name in names], x), names, wanted, strict=True
    ):
        np.testing.assert_array_equal(row, want, err_msg=name)


def test_sum_is_a_butterfly_in_the_type_of_the_value() -> None:
    for dtype, kind in ((mx.float32, np.float32), (mx.float16, np.float16)):
        x = mx.array(RNG.standard_normal(32)).astype(dtype)
        a = np.array(x)
        for step in (16, 8, 4, 2, 1):
            a = (a[:step] + a[step : 2 * step]).astype(kind)
        assert np.all(lanes(["simd_sum(a[l])"], x) == a[0])


# Expected source lane; None where Metal keeps the lane's own value.
SHUFFLES = {
    "shuffle(a[l], (ushort)((l % {w} * 7) % {w}))": lambda i, w: i * 7 % w,
    "shuffle_up(a[l], 3)": lambda i, w: i - 3 if i >= 3 else i,
    "shuffle_down(a[l], 2)": lambda i, w: i + 2 if i + 2 < w else i,
    "shuffle_xor(a[l], 3)": lambda i, w: i ^ 3,
    "shuffle_rotate_up(a[l], 3)": lambda i, w: (i - 3) % w,
    "shuffle_rotate_down(a[l], 3)": lambda i, w: (i + 3) % w,
    "broadcast(a[l], 2)": lambda i, w: 2,
    "broadcast_first(a[l])": lambda i, w: 0,
}


@pytest.mark.parametrize("dtype", [*TYPES, mx.bool_, mx.complex64], ids=str)
def test_shuffles(dtype: mx.Dtype) -> None:
    high = 2 if dtype == mx.bool_ else 99
    x = small_values(64, mx.float32, 0, high).astype(dtype)
    a = to_numpy(x)
    cases = [(p, w, call) for p, w in (("simd", 32), ("quad", 4)) for call in SHUFFLES]
    got = lanes([f"{p}_{call.format(w=w)}" for p, w, call in cases], x)
    for row, (prefix, width, call) in zip(got, cases, strict=True):
        index = [
            i // width * width + SHUFFLES[call](i % width, width) for i in range(64)
        ]
        np.testing.assert_array_equal(row, a[index], err_msg=f"{prefix}_{call}")


def test_shuffle_and_fill() -> None:
    x, fill = small_values(32, mx.int32, 0, 99), small_values(32, mx.int32, 100, 199)
    a, b = np.array(x), np.array(fill)
    body = LANE + "".join(
        f"out[{i} * 32 + l] = simd_shuffle_and_fill_{call}; "
        for i, call in enumerate(
            (
                "up(a[l], b[l], 5)",
                "down(a[l], b[l], 5)",
                "up(a[l], b[l], 3, 8)",
                "down(a[l], b[l], 3, 8)",
            )  # fmt: skip
        )
    )
    got = np.array(run(body, x, fill, shape=(4, 32), dtype=mx.int32, grid=(32, 1, 1)))
    for row, (delta, modulo) in zip(
        got, ((-5, 32), (5, 32), (-3, 8), (3, 8)), strict=True
    ):
        for i in range(32):
            start, to = i // modulo * modulo, i % modulo + delta
            inside = 0 <= to < modulo
            assert row[i] == (a if inside else b)[start + to % modulo]


@pytest.mark.parametrize("n", SIZES)
def test_votes(n: int) -> None:
    x = small_values(n, mx.int32, 0, 3)
    a = np.array(x)
    names, wanted = [], []
    for p, width in (("simd", 32), ("quad", 4)):

        def per_group(f: Callable, width: int = width) -> np.ndarray:
            return spread(f, a, width)

        names += [f"(uint)(uint64_t){p}_ballot(a[l] > 0)"]
        wanted += [per_group(lambda g: sum(1 << i for i, v in enumerate(g) if v > 0))]
        for name, f in (("all", np.all), ("any", np.any)):
            names += [f"{p}_{name}(a[l] > 0)", f"{p}_ballot(a[l] > 0).{name}()"]
            wanted += [per_group(lambda g, f=f: f(g > 0))] * 2
        names += [f"{p}_is_first()", f"(uint)(uint64_t){p}_active_threads_mask()"]
        wanted += [np.arange(n) % 32 % width == 0]
        wanted += [per_group(lambda g: (1 << len(g)) - 1)]
    for row, name, want in zip(lanes(names, x, mx.uint32), names, wanted, strict=True):
        np.testing.assert_array_equal(row, want, err_msg=name)


def test_vectors_in_collectives() -> None:
    x = small_values(32 * 4, mx.float32).reshape(32, 4)
    body = (
        LANE
        + """
      float4 v = ((const device float4*)a)[l];
      ((device float4*)out)[l] = simd_sum(v);
      ((device float4*)out)[32 + l] = simd_max(v);
      ((device float4*)out)[64 + l] = simd_shuffle_xor(v, 1);
      ((device float4*)out)[96 + l] = float4(simd_sum(v.xy), simd_broadcast(v.zw, 3));
    """
    )
    got = np.array(run(body, x, shape=(4, 32, 4), grid=(32, 1, 1)))
    a = np.array(x)
    np.testing.assert_array_equal(got[0], np.tile(a.sum(0), (32, 1)))
    np.testing.assert_array_equal(got[1], np.tile(a.max(0), (32, 1)))
    np.testing.assert_array_equal(got[2], a[np.arange(32) ^ 1])
    np.testing.assert_array_equal(got[3], np.tile([*a.sum(0)[:2], *a[3, 2:]], (32, 1)))


def test_simdgroups_and_quads_may_part_ways() -> None:
    body = """
      uint l = thread_index_in_threadgroup;
      float v = l;
      if (simdgroup_index_in_threadgroup == 1) v = simd_sum(v);
      if ((l & 4) == 0) v = quad_max(v);
      out[l] = v;
    """
    a = np.arange(64, dtype=np.float32)
    a[32:] = a[32:].sum()
    for i in range(0, 64, 8):
        a[i : i + 4] = a[i : i + 4].max()
    np.testing.assert_array_equal(np.array(run(body, shape=(64,))), a)
