"""Profiles of kernels whose counts are known by hand, and predictions from them."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from sanitize_bugs import GROUP, L, ramp

import mlx_phase
from mlx_phase.chip import CPU, lookup
from mlx_phase.counters import LANES, Cost, clock_ghz, cost, predict
from mlx_phase.executor import ExecutorError

M1_MAX = lookup("M1 Max 32")


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setenv("MLX_PHASE_EXECUTOR", "cpu")


def profile(body, a=None, shape=(64,), threads=64, **options):
    kernel = mlx_phase.metal_kernel("counted", ["a"], ["out"], body, **options)
    (found,) = mlx_phase.profile_kernel(
        kernel,
        inputs=[ramp(64) if a is None else a],
        output_shapes=[shape],
        output_dtypes=[mx.float32],
        grid=(threads, 1, 1),
        threadgroup=(64, 1, 1),
    )
    return found


def test_a_copy():
    p = profile(L + "out[g] = a[g];", ramp(192), (192,), 192)
    assert (p.threadgroups, p.simdgroups, p.threads) == (3, 6, 192)
    assert (p.device_read, p.device_written) == (768, 768)
    assert (p.loads, p.stores, p.load_lines, p.store_lines) == (6, 6, 6, 6)
    assert (p.unique_read, p.unique_written, p.memory_bytes) == (768, 768, 1536)
    assert p.coalescing == 1


def test_lanes_far_apart_take_a_line_each():
    p = profile(L + "out[g] = a[g * 40];", ramp(64 * 40))
    assert p.loads == 2 and p.load_lines == 64
    assert p.unique_read == 256 and p.coalescing == 1 / 32
    (a, out) = p.arrays
    assert (a.name, a.role, a.read, a.lines) == ("a", "input", 256, 64)
    assert (out.role, out.written, out.read) == ("output", 256, 0)


def test_checked_indices_cost_nothing():
    body = L + "float4 v = ((const device float4*)a)[l & 15]; out[g] = v[l & 3];"
    p = profile(body)
    assert p.instructions["bitwise"] == 4 and not p.instructions["branch"]


@pytest.mark.parametrize(
    "by, kind, count",
    [("3", "imul", 4), ("8", "shift", 4), ("a_shape[0]", "idivide", 2)],
)
def test_a_division_by_a_constant_is_none(by, kind, count):
    found = profile(L + f"out[g] = float((int(l) - 20) / {by});").instructions
    counts = {k: found.get(k, 0) for k in ("imul", "shift", "idivide")}
    assert counts == {"imul": 0, "shift": 0, "idivide": 0} | {kind: count}


def test_neighbours_are_joined_from_either_side():
    p = profile(L + "out[g] = a[4 * (l & 7) + 1] * 2.0f - a[4 * (l & 7)];")
    back = profile(L + "float v = a[4 * (l & 7)]; out[g] = a[4 * (l & 7) + 1] - v;")
    assert p.loads == back.loads == 2


def test_a_vector_is_one_load_and_neighbours_are_joined():
    vector = (
        L + "float4 v = ((const device float4*)a)[l]; out[l] = v.x + v.y + v.z + v.w;"
    )
    single = (
        L + "float s = 0; for (int i = 0; i < 4; i++) s += a[4 * l + i]; out[l] = s;"
    )
    for body in (vector, single):
        p = profile(body, ramp(256))
        assert (p.loads, p.load_lines, p.device_read) == (2, 8, 1024)


def test_the_same_line_for_all_rows():
    p = profile(L + "out[l] = a[l % 8];")
    assert p.device_read == 256 and p.unique_read == 32 and p.load_lines == 2


@pytest.mark.parametrize("step, conflicts", [(1, 0), (2, 1), (32, 31), (33, 0)])
def test_bank_conflicts(step, conflicts):
    body = (
        L + f"threadgroup float t[64 * 33];\nt[l * {step}] = a[l];\n" + GROUP
        + f"out[l] = t[l * {step}];"
    )  # fmt: skip
    p = profile(body)
    # two simdgroups, each stores and loads once
    assert p.bank_conflicts == 4 * conflicts
    assert (p.threadgroup_loads, p.threadgroup_stores) == (2, 2)
    assert p.threadgroup_read == p.threadgroup_written == 256
    assert p.threadgroup_memory == 64 * 33 * 4 and p.barriers == 1


def test_collectives_by_simdgroup():
    p = profile(L + "out[l] = simd_sum(a[l]) + simd_shuffle_xor(a[l], 1);", threads=128)
    assert p.collectives == {"simd_sum": 4, "simd_shuffle_xor": 4}
    assert p.barriers == 0


@pytest.mark.parametrize(
    "body, kind, each",
    [
        ("float s = a[l];\nfor (int i = 0; i < 9; i++) s = fma(s, s, 1.0f);", "fma", 9),
        ("float s = a[l] * a[l] + 1;", "fma", 1),
        ("float s = as_type<uint>(a[l]);", "convert", 1),
        ("float s = as_type<float>(as_type<uint>(a[l]) & 0x12345678);", "bitwise", 1),
        # a bit field is one instruction, the other half of a register none
        ("float s = as_type<float>(as_type<uint>(a[l]) >> 4 & 15);", "shift", 1),
        ("float s = as_type<float>(as_type<uint>(a[l]) >> 4 & 15);", "bitwise", 0),
        ("float s = exp2(a[l]);", "exp", 1),
        ("float s = (float)((const device bfloat*)a)[l];", "bfloat", 1),
        ("float s = (float)((const device half*)a)[l];", "convert", 0),
        ("float s = a[l] > 3 ? a[l] : 0;", "compare", 1),
    ],
)  # fmt: skip
def test_instructions_by_kind(body, kind, each):
    p = profile(L + body + "\nout[l] = s;")
    assert p.instructions[kind] == 2 * each, p.instructions


def test_a_simdgroup_goes_on_as_long_as_its_longest_lane():
    body = L + "float s = a[l];\nfor (uint i = 0; i < l; i++) s = fma(s, s, 1.0f);\n"
    p = profile(body + "out[l] = s;")
    assert p.instructions["fma"] == 31 + 63


def test_products_of_tiles():
    body = (
        L + "simdgroup_float8x8 m, s(0.0f);\nsimdgroup_load(m, a, 8);\n"
        "for (int i = 0; i < 3; i++) simdgroup_multiply_accumulate(s, m, m, s);\n"
        "if (l < 32) simdgroup_store(s, out, 8);"
    )
    p = profile(body)
    assert p.collectives == {"simdgroup_multiply_accumulate": 6}
    assert cost(p).fma == 6 * 20


def test_results_stay_right_and_nothing_is_left_behind():
    kernel = mlx_phase.metal_kernel("left", ["a"], ["out"], L + "out[l] = a[l] + 1;")
    call = dict(
        inputs=[ramp(64)], output_shapes=[(64,)], output_dtypes=[mx.float32],
        grid=(64, 1, 1), threadgroup=(64, 1, 1),
    )  # fmt: skip

    def twice():
        (b,) = kernel(**call)
        return kernel(**call | {"inputs": [b]})[0]

    kept = []
    found = mlx_phase.profile_kernel(lambda: kept.append(twice()))
    assert [p.kernel for p in found] == ["left", "left"]
    assert np.array_equal(np.array(kept[0]), np.arange(64) + 2)
    assert np.array_equal(np.array(kernel(**call)[0]), np.arange(64) + 1)


def test_errors_are_said():
    with pytest.raises(ExecutorError, match="no kernel was launched on the CPU"):
        mlx_phase.profile_kernel(lambda: mx.zeros(3))
    with pytest.raises(ExecutorError, match="simd_sum.*never arrive"):
        profile(L + "if (l > 3) out[l] = simd_sum(a[l]);")


def test_the_largest_part_is_the_time():
    assert clock_ghz(M1_MAX) == pytest.approx(1.296, rel=1e-3)
    work = Cost(slots=3e6, fma=1e6, slow=2e6, memory_bytes=4e6)
    found = predict(work, M1_MAX)
    # 32 cores, four schedulers each; 400 GB/s
    assert found.parts["memory"] == pytest.approx(10.0)
    assert found.parts["instructions"] == pytest.approx(3e6 / (128 * 1296), rel=1e-3)
    assert found.bound == "instructions" and found.us == found.parts["instructions"]
    assert predict(replace(work, memory_bytes=4e7), M1_MAX).bound == "memory"
    assert predict(replace(work, slow=9e6), M1_MAX).bound == "slow unit"
    quarter = predict(replace(work, memory_bytes=4e7), M1_MAX, misses=0.25)
    assert quarter.parts["memory"] == pytest.approx(25.0)
    assert predict(replace(work, memory_bytes=4e7), M1_MAX, misses=0).us == found.us
    with pytest.raises(ValueError, match="no bandwidth or FP32 rate"):
        predict(work, CPU)


def test_costs_add_and_scale():
    work = Cost(1, 2, 3, 4)
    assert work.times(2).plus(work) == Cost(3, 6, 9, 12)
    assert work.cycles == 3 * LANES
    p = profile(L + "out[l] = simd_sum(float(as_type<uint>(a[l])));")
    # a load, a conversion, a sum, a store: in each of two simdgroups
    assert cost(p).slots >= 2 * (1 + 1 + 15 + 1) and cost(p).slow == 2 * 4
