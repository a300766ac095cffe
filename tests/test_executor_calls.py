"""Executors: bad calls, bad machines, and which executor is chosen."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from cpu_case import run

from mlx_phase import executor
from mlx_phase.executor import ExecutorError, apple, cpu_build, cpu_compiler
from mlx_phase.executor.cpu import metal_kernel

L = "uint l = thread_index_in_threadgroup; "

GOOD_CALL = {
    "inputs": [np.ones(4, np.float32)],
    "output_shapes": [(4,)],
    "output_dtypes": [mx.float32],
    "grid": (4, 1, 1),
    "threadgroup": (4, 1, 1),
}
BAD_CALLS = [
    ({"inputs": []}, ValueError, "Expected `inputs` to have size 1 but got size 0"),
    (
        {"output_shapes": []},
        ValueError,
        "`output_shapes` to have size 1 but got size 0",
    ),
    (
        {"output_dtypes": []},
        ValueError,
        "`output_dtypes` to have size 1 but got size 0",
    ),
    ({"output_dtypes": ["float32"]}, TypeError, "must be mlx dtypes"),
    ({"output_dtypes": [mx.float64]}, ValueError, "float64 is not supported"),
    ({"output_shapes": [(-1,)]}, ValueError, "sizes >= 0"),
    ({"grid": (4, 1)}, TypeError, "`grid` must be three ints"),
    ({"grid": (4.0, 1, 1)}, TypeError, "`grid` must be three ints"),
    ({"grid": (-4, 1, 1)}, ValueError, "`grid` must have sizes from 0"),
    ({"threadgroup": 4}, TypeError, "`threadgroup` must be three ints"),
    ({"threadgroup": (0, 1, 1)}, ExecutorError, "has 0 threads"),
    ({"template": [("T", 2.5)]}, ValueError, "Invalid template argument T=2.5"),
    (
        {"template": []},
        ExecutorError,
        "unknown type name 'T'|undeclared identifier 'T'",
    ),
    ({"wrong": 1}, TypeError, "wrong"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_CALLS)
def test_bad_calls(change: dict, error: type, message: str) -> None:
    body = "out[thread_position_in_grid.x] = T(a[0]);"
    kernel = metal_kernel("bad", ["a"], ["out"], body)
    good = GOOD_CALL | {"template": [("T", mx.float32)]}
    assert kernel(**good)[0].tolist() == [1.0] * 4
    with pytest.raises(error, match=message):
        kernel(**(good | change))


def test_bad_kernels() -> None:
    with pytest.raises(ValueError, match="at least one output"):
        metal_kernel("bad", ["a"], [], "")
    with pytest.raises(ValueError, match="Unknown compile option `speed`"):
        metal_kernel("bad", ["a"], ["o"], "", compile_options={"speed": "fast"})
    with pytest.raises(
        ValueError, match="math_mode to be 'safe', 'relaxed', or 'fast'"
    ):
        metal_kernel("bad", ["a"], ["o"], "", compile_options={"math_mode": "wild"})
    with pytest.raises(TypeError, match="list of strings"):
        metal_kernel("bad", "a", ["o"], "")
    double = mx.zeros(9, mx.float64, stream=mx.cpu)
    with pytest.raises(ValueError, match="a: mlx.core.float64 is not supported"):
        run("out[0] = thread_position_in_grid.x;", double)
    kernel = metal_kernel("early", ["a"], ["x", "y"], "x[0] = a_shape[0];")
    call = GOOD_CALL | {"output_shapes": [(4,)] * 2, "output_dtypes": [mx.float32] * 2}
    with pytest.raises(ExecutorError, match="MLX generates broken Metal"):
        kernel(**call)
    with pytest.raises(ExecutorError, match="MLX_PHASE_CPU_THREADS='many'"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MLX_PHASE_CPU_THREADS", "many")
            run(L + "out[l] = 1;")


def test_machine_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    cpu_compiler.compiler.cache_clear()
    with pytest.raises(ExecutorError, match="pip install ziglang"):
        cpu_compiler.compiler()
    cpu_compiler.compiler.cache_clear()


def test_cache_folder_is_used_and_may_be_unwritable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    cpu_build.runtime()  # its own library lies elsewhere
    monkeypatch.setenv("MLX_PHASE_CACHE", str(tmp_path))
    body = L + "out[l] = 123456;"
    run(body, name="cached")
    (library,) = (tmp_path / "cpu").glob("*.so")
    time = library.stat().st_mtime_ns
    run(body + " ", name="cached")  # other text: another entry
    assert len(list((tmp_path / "cpu").glob("*.so"))) == 2
    assert library.stat().st_mtime_ns == time
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLX_PHASE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ExecutorError, match="set MLX_PHASE_CACHE to a folder"):
        run(body + "  ", name="cached")


def test_headers_are_parsed_once_and_a_damaged_copy_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    cpu_build.runtime()
    monkeypatch.setenv("MLX_PHASE_CACHE", str(tmp_path))
    for value in (1, 2, 3):
        if value == 3:
            (parsed,) = (tmp_path / "cpu").glob("*.pch")
            parsed.write_bytes(parsed.read_bytes()[:1000])
        body = L + f"out[l] = {value};"
        assert (run(body, name="parsed") == value).all().item()


def test_a_library_that_was_cut_off_is_built_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("MLX_PHASE_CACHE", str(tmp_path))
    code = '__attribute__((visibility("default"))) int answer(void) { return 42; }'
    flags = ["-x", "c"]
    path = cpu_build.build(code, [*flags, *cpu_build.LEAN_FLAGS])
    path.write_bytes(path.read_bytes()[:100])
    assert cpu_build.load(code, flags).answer() == 42

    def refused(path: str) -> None:
        raise OSError(f"{path}: failed to map segment: Operation not permitted")

    monkeypatch.setattr(cpu_build, "CDLL", refused)
    with pytest.raises(ExecutorError, match="not permitted.*set MLX_PHASE_CACHE"):
        cpu_build.load(code, flags)


def test_choice_of_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"metal": False, "cuda": False}
    monkeypatch.setattr(mx.metal, "is_available", lambda: seen["metal"])
    monkeypatch.setattr(mx.cuda, "is_available", lambda: seen["cuda"])
    monkeypatch.delenv("MLX_PHASE_EXECUTOR", raising=False)
    assert executor.executor_name() == "cpu"
    seen["cuda"] = True
    assert executor.executor_name() == "cuda"
    seen["metal"] = True
    assert executor.executor_name() == "apple"
    for name in ("apple", "cuda", "cpu"):
        monkeypatch.setenv("MLX_PHASE_EXECUTOR", name)
        assert executor.executor_name() == name
    seen["metal"] = False
    monkeypatch.setenv("MLX_PHASE_EXECUTOR", "apple")
    with pytest.raises(ExecutorError, match="needs a Mac with an Apple GPU"):
        executor.metal_kernel("x", ["a"], ["o"], "")
    monkeypatch.setenv("MLX_PHASE_EXECUTOR", "gpu")
    with pytest.raises(ExecutorError, match="'gpu': use one of apple, cuda, cpu"):
        executor.executor_name()


def test_apple_passes_everything_through(monkeypatch: pytest.MonkeyPatch) -> None:
    got = {}
    monkeypatch.setattr(mx.fast, "metal_kernel", lambda **kw: got.update(kw) or "it")
    assert apple.metal_kernel("n", ["a"], ["o"], "body", "head", False, True) == "it"
    assert got == {
        "name": "n",
        "input_names": ["a"],
        "output_names": ["o"],
        "source": "body",
        "header": "head",
        "ensure_row_contiguous": False,
        "atomic_outputs": True,
    }
    options = {"math_mode": "fast"}
    apple.metal_kernel("n", ["a"], ["o"], "body", compile_options=options)
    assert got["compile_options"] == options
