"""The sanitizer: every planted bug is found and named, and nothing else is."""

import re

import mlx.core as mx
import pytest
from sanitize_bugs import BUGS, INIT, MEM, RACE, SYNC, Bug

import mlx_phase
from mlx_phase.executor import SanitizerError

ALL = "mem,race,init,sync"


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setenv("MLX_PHASE_EXECUTOR", "cpu")
    monkeypatch.delenv("MLX_PHASE_SANITIZE", raising=False)


def run(bug: Bug, sanitize=ALL, name="planted") -> mx.array:
    options = dict(bug.options)
    call = {k: options.pop(k) for k in ("init_value",) if k in options}
    kernel = mlx_phase.metal_kernel(
        name, ["a"], ["out"], bug.body, sanitize=sanitize, **options
    )
    (out,) = kernel(
        inputs=[bug.a],
        output_shapes=[bug.shape],
        output_dtypes=[bug.dtype],
        grid=(bug.threads, 1, 1),
        threadgroup=(bug.group, 1, 1),
        **call,
    )
    return out


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name):
    bug = BUGS[name]
    with pytest.raises(SanitizerError) as caught:
        run(bug, name=name)
    error = caught.value
    text = str(error)
    assert error.check == bug.check and error.kernel == name, text
    assert text.startswith(f"kernel '{name}': {bug.check}: ")
    assert re.search(bug.says, text), text
    if bug.line is not None:
        assert error.place == f"source line {bug.line}", text
        assert f"thread {error.thread} of threadgroup {error.threadgroup}" in text
    if bug.buffer is not None:
        assert error.buffer == bug.buffer and bug.buffer in text
    if bug.index is not None:
        assert error.index == bug.index, text


def test_each_check_has_its_bugs():
    assert min(map(len, (MEM, RACE, INIT, SYNC))) >= 5
