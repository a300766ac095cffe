"""The sanitizer on right kernels: silent, same bits; and what it takes and refuses."""

import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from sanitize_bugs import GROUP, L, ramp

import mlx_phase
from mlx_phase.executor import ExecutorError, SanitizerError, cpu, sanitize

RNG = np.random.default_rng(0)
VALUES = mx.array(RNG.normal(size=64).astype(np.float32))
VIEW = mx.array(RNG.normal(size=(8, 12)).astype(np.float32))[1:7:2, 10:2:-3]

TREE = (
    L + "threadgroup float t[64];\nt[l] = a[l];\n" + GROUP
    + "for (uint n = 32; n > 0; n /= 2) {\n  if (l < n) t[l] += t[l + n];\n  " + GROUP
    + "}\nout[l] = t[0];"
)  # fmt: skip
PING_PONG = (
    L + "threadgroup float t[2][64];\nfloat s = 0;\n"
    "for (uint k = 0; k < 4; k++) {\n  t[k % 2][l] = a[l] + k;\n  " + GROUP
    + "  s += t[k % 2][63 - l];\n}\nout[l] = s;"
)  # fmt: skip
WITHIN_SIMDGROUP = (
    L + "threadgroup float t[64];\nt[l] = a[l];\n"
    "simdgroup_barrier(mem_flags::mem_threadgroup);\nout[l] = t[l ^ 31];"
)
DEVICE_BARRIER = (
    L + "out[l] = a[l];\nthreadgroup_barrier(mem_flags::mem_device);\n"
    "float v = out[63 - l];\nthreadgroup_barrier(mem_flags::mem_device);\nout[l] = v;"
)
COUNTER = (
    "threadgroup atomic_int n;\n" + L
    + "if (l == 0) atomic_store_explicit(&n, 0, memory_order_relaxed);\n" + GROUP
    + "if (a[l] > 0) atomic_fetch_add_explicit(&n, 1, memory_order_relaxed);\n" + GROUP
    + "out[l] = atomic_load_explicit(&n, memory_order_relaxed);"
)  # fmt: skip
TILES = (
    L + "simdgroup_float8x8 m, sum(0.0f);\nsimdgroup_load(m, a, 8);\n"
    "simdgroup_multiply_accumulate(sum, m, m, sum);\n"
    "if (l < 32) simdgroup_store(sum, out, 8);"
)
SAME_VALUES = L + "out[l] = a[l];\nout[l ^ 1] = a[l ^ 1];\nif (l > 60) out[5] = a[5];"
STRIDED = (
    L + "uint i = l % 3, j = l / 3 % 3;\n"
    "out[l] = a[i * a_strides[0] + j * a_strides[1]] + a_shape[1];"
)
VECTORS = (
    L + "float4 v = ((const device float4*)a)[l / 4];\nv[l % 4] += 1;\n"
    "float s = 0;\nfor (int i = 0; i < 4; i++) s += v[i];\nout[l] = s;"
)
RIGHT = {
    "tree": TREE,
    "ping_pong": PING_PONG,
    "within_simdgroup": WITHIN_SIMDGROUP,
    "device_barrier": DEVICE_BARRIER,
    "counter": COUNTER,
    "tiles": TILES,
    "same_values": SAME_VALUES,
    "strided": STRIDED,
    "vectors": VECTORS,
}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setenv("MLX_PHASE_EXECUTOR", "cpu")
    monkeypatch.delenv("MLX_PHASE_SANITIZE", raising=False)


def run(body, a=VALUES, checks=None, shape=(64,), init=None, name="right", **options):
    kernel = mlx_phase.metal_kernel(
        name, ["a"], ["out"], body, sanitize=checks, **options
    )
    (out,) = kernel(
        inputs=[a],
        output_shapes=[shape],
        output_dtypes=[mx.float32],
        grid=(64, 1, 1),
        threadgroup=(64, 1, 1),
        init_value=init,
    )
    return np.array(out)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_kernel_gives_the_same_bits(name):
    a, options = VALUES, {}
    if name == "strided":
        a, options = VIEW, {"ensure_row_contiguous": False}
    plain = run(RIGHT[name], a, False, **options)
    np.testing.assert_array_equal(run(RIGHT[name], a, "all", **options), plain)


def test_checks_are_chosen_one_by_one():
    stray = L + "out[l] = a[l + 1] * 0;"
    for checks in ("race", "init", "sync", "race,init,sync"):
        run(stray, checks=checks)
    with pytest.raises(SanitizerError, match="mem: read of 4 bytes"):
        run(stray, checks="sync,mem")


def test_the_environment_reaches_kernels_made_before(monkeypatch):
    stray = mlx_phase.metal_kernel("made", ["a"], ["out"], L + "out[l] = a[l + 1];")
    call = dict(
        inputs=[VALUES], output_shapes=[(64,)], output_dtypes=[mx.float32],
        grid=(64, 1, 1), threadgroup=(64, 1, 1),
    )  # fmt: skip
    stray(**call)
    monkeypatch.setenv("MLX_PHASE_SANITIZE", "mem")
    with pytest.raises(SanitizerError, match="kernel 'made': mem"):
        stray(**call)
    monkeypatch.setenv("MLX_PHASE_SANITIZE", "0")
    stray(**call)


def test_partial_allows_unwritten_outputs_and_no_more():
    some = L + "if (l < 60) out[l] = a[l];"
    with pytest.raises(SanitizerError, match="4 of 64 elements"):
        run(some, checks="init")
    assert np.isnan(run(some, checks="init,partial")[60:]).all()
    assert (run(some, checks="init", init=3.0)[60:] == 3).all()
    with pytest.raises(SanitizerError, match="takes what nobody wrote"):
        run(some + "\nif (l < 60) out[l] += out[l + 1] * 0;", checks="init,partial")


def test_a_view_that_starts_off_a_vector_is_misaligned_and_a_whole_array_is_not():
    body = L + "out[l] = ((const device float4*)a)[l / 8].x;"
    buffer = ramp(72)
    run(body, ramp(64), "mem")
    run(body, buffer[8:], "mem")
    with pytest.raises(SanitizerError, match="misaligned access to const float4"):
        run(body, buffer[6:70], "mem")


def test_a_read_before_the_first_element_of_a_reversed_view():
    body = L + "out[l] = a[int(l % 8) * int(a_strides[0]) {}];"
    options = {"ensure_row_contiguous": False}
    backwards = ramp(24)[::-3]
    assert run(body.format(""), backwards, "all", **options)[7] == 2
    with pytest.raises(SanitizerError, match="between the elements") as found:
        run(body.format("- 1"), backwards, "all", **options)
    assert found.value.index == -1 and found.value.buffer == "a"


def test_inputs_stay_what_they_were():
    before = np.array(VALUES)
    run(L + "((device float*)a)[l] = 0;\nout[l] = 1;", checks="race")
    np.testing.assert_array_equal(np.array(VALUES), before)


def test_threads_beyond_the_grid_and_empty_outputs():
    assert run("out[0] = a[0];", checks="all", shape=(0,)).shape == (0,)
    kernel = mlx_phase.metal_kernel(
        "edge", ["a"], ["out"], "uint i = thread_position_in_grid.x; out[i] = a[i];",
        sanitize="all",
    )  # fmt: skip
    (out,) = kernel(
        inputs=[ramp(50)], output_shapes=[(50,)], output_dtypes=[mx.float32],
        grid=(50, 1, 1), threadgroup=(32, 1, 1),
    )  # fmt: skip
    assert np.array_equal(np.array(out), np.arange(50))


def test_helpers_are_named_with_their_callers():
    header = "inline float get(const device float* p, uint i) {\n  return p[i];\n}\n"
    body = L + "float s = get(a, l);\nout[l] = s + get(a, l + 32);"
    with pytest.raises(SanitizerError, match="header line 2, inlined into source line"):
        run(body, checks="mem", header=header)


def test_the_example_of_the_documentation():
    page = (Path(__file__).parents[1] / "docs" / "sanitizer.md").read_text()
    blocks = re.findall(r"```(\w*)\n(.*?)```", page, re.S)
    example = next(i for i, (_, text) in enumerate(blocks) if "reverse" in text)
    with pytest.raises(SanitizerError) as found:
        exec(compile(blocks[example][1], "docs/sanitizer.md", "exec"), {})
    said = " ".join(blocks[example + 1][1].split())
    assert said == f"SanitizerError: {found.value}"


def test_the_seed_of_the_random_order(monkeypatch):
    monkeypatch.setenv("MLX_PHASE_SANITIZE_SEED", "x")
    with pytest.raises(ExecutorError, match="SEED='x' is not a number"):
        run("out[thread_position_in_grid.x] = 1;", checks="sync")


@pytest.mark.parametrize(
    ("value", "checks"),
    [
        (None, ""), ("", ""), ("0", ""), (False, ""), ("1", "init mem race sync"),
        (True, "init mem race sync"), ("all", "init mem race sync"),
        (" mem , race", "mem race"), ("partial", "init mem partial race sync"),
        ("init,partial", "init partial"), ("all,partial", "init mem partial race sync"),
    ],
)  # fmt: skip
def test_names_of_checks(value, checks):
    assert sorted(sanitize.parse(value)) == checks.split()


def test_unknown_checks_and_other_executors_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="no such check: memory.*mem, race, init"):
        mlx_phase.metal_kernel("k", ["a"], ["out"], "", sanitize="mem,memory")
    monkeypatch.setenv("MLX_PHASE_SANITIZE", "memory")
    # Not the caller's fault: what the commands catch and say in one line.
    with pytest.raises(ExecutorError, match="MLX_PHASE_SANITIZE: .* check: memory"):
        sanitize.chosen(None)
    monkeypatch.delenv("MLX_PHASE_SANITIZE")
    monkeypatch.setenv("MLX_PHASE_EXECUTOR", "cuda")
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    with pytest.raises(ExecutorError, match="runs kernels on the CPU: unset"):
        mlx_phase.metal_kernel("k", ["a"], ["out"], "", sanitize="mem")
    monkeypatch.delenv("MLX_PHASE_EXECUTOR")
    kernel = mlx_phase.metal_kernel("k", ["a"], ["out"], "", sanitize="mem")
    assert isinstance(kernel, cpu.CpuKernel)
