"""Small launches run an unoptimised build, and the same bits come from either one."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from kernel_rows import arguments

from mlx_phase.chip import CPU
from mlx_phase.executor import cpu_launch, cpu_tiers, signature
from mlx_phase.executor.cpu import metal_kernel
from mlx_phase.executor.cpu_tiers import FAST_BYTES, Tiers
from mlx_phase.plan import plan
from mlx_phase.problem import Matmul

SOURCE = """
uint i = thread_position_in_grid.x;
float sum = 0.0f;
for (int k = 0; k < N; k++) sum += x[i] * simd_sum(x[i] + float(k));
y[i] = sum;
"""


@pytest.fixture
def builds(monkeypatch, tmp_path):
    """Loads of the test's kernels, as whether each was the fast build."""
    monkeypatch.setenv("MLX_PHASE_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu_launch, "_LIBRARIES", {})
    loads, real = [], cpu_tiers.load

    def load(name, metal, fast):
        loads.append(fast)
        return real(name, metal, fast)

    monkeypatch.setattr(cpu_tiers, "load", load)
    return loads


def kernel():
    return metal_kernel("tiers", ["x"], ["y"], SOURCE)


def run(made, size=64):
    x = mx.random.normal((size,), key=mx.random.key(size))
    (y,) = made(
        inputs=[x],
        output_shapes=[(size,)],
        output_dtypes=[mx.float32],
        grid=(size, 1, 1),
        threadgroup=(32, 1, 1),
        template=[("N", 3)],
    )
    return np.array(y)


def test_time_in_launches_pays_for_the_fast_build(builds, monkeypatch):
    made = kernel()
    first = run(made)
    assert builds == [False]
    monkeypatch.setattr(cpu_tiers, "FAST_SECONDS", 0.0)
    assert np.array_equal(run(made), first) and builds == [False, True]
    assert np.array_equal(run(made), first) and builds == [False, True]
    assert first.any()


def test_large_launches_get_the_fast_build_at_once(builds):
    made = kernel()
    run(made, FAST_BYTES // 4)
    assert builds == [True]
    run(made)
    assert builds == [True]


def test_a_large_launch_after_a_small_one_gets_it_too(builds):
    made = kernel()
    run(made)
    run(made, FAST_BYTES // 4)
    assert builds == [False, True]


def test_a_fast_build_on_disk_is_taken(builds, monkeypatch):
    run(kernel(), FAST_BYTES // 4)
    monkeypatch.setattr(cpu_launch, "_LIBRARIES", {})  # as in another process
    run(kernel())
    assert builds == [True, True]


@pytest.mark.parametrize("M, dtype", [(1, "bfloat16"), (4, "float16")])
def test_both_builds_give_the_same_bits(M, dtype):
    problem = Matmul(M, 16, 512, dtype, 4, 64)
    chosen = plan(problem, CPU)
    name, ins, outs, body, header, values = arguments((problem,), chosen)
    metal = signature.metal_source(name, ins, outs, body, header, values)
    kind = getattr(mx, dtype)
    w = mx.random.normal((16, 512), key=mx.random.key(1)).astype(kind)
    x = mx.random.normal((M, 512), key=mx.random.key(2)).astype(kind)
    arrays = [x, *mx.quantize(w, group_size=64, bits=4)]
    results = []
    for fast in (False, True):
        y = mx.zeros((M, 16), kind)
        mx.eval(arrays, y)
        tiers = Tiers(name, metal, FAST_BYTES if fast else 0)
        tiers.library = cpu_launch.load(name, metal, fast)
        tiers.launch(
            cpu_launch.Call(
                name, ((), ()), metal, arrays, list(map(memoryview, arrays)), [y], None,
                (16 // chosen.rows * 32, 1, 1), (32 * chosen.simdgroups, 1, 1),
            )
        )  # fmt: skip
        results.append(np.array(y.astype(mx.float32)))
    assert results[0].any() and np.array_equal(*results)
