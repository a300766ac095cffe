"""The canary: report K2. A kernel that fails is off, stock serves, it is named."""

from dataclasses import replace

import cases
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import ref

import mlx_phase
from mlx_phase import check, layers, ops, source
from mlx_phase.executor import ExecutorError
from mlx_phase.launch import matmul as launch
from mlx_phase.launch.matmul import device_chip, prepare
from mlx_phase.plan import plan
from mlx_phase.problem import Matmul


@pytest.fixture(autouse=True)
def clean_results():
    check.forget()
    yield
    check.forget()


def layer():
    mx.random.seed(0)
    dense = nn.Linear(128, 96, bias=False)
    return nn.QuantizedLinear.from_linear(dense, group_size=64, bits=4)


PROBLEM = Matmul(1, 96, 128, "float32", 4, 64, "affine")


def plant(monkeypatch, bad, rows=(1,)):
    """`bad(y)` replaces the result of the 4-bit kernels with M in `rows`."""

    def broken(problem, chosen=None):
        call = prepare(problem, chosen)
        if problem.bits != 4 or problem.M not in rows:
            return call
        return lambda *args: bad(call(*args))

    monkeypatch.setattr(check, "prepare", broken)


def refuse(y):
    raise ExecutorError("planted: does not compile")


FAILURES = {
    "does not compile": refuse,
    "wrong result": lambda y: y + 1,
    # One row of the tail missing, as of a grid that is too small.
    "times the allowed": lambda y: y * (mx.arange(y.shape[-1]) < y.shape[-1] - 1),
    "wrong result: inf": lambda y: y * float("nan"),
}


@pytest.mark.parametrize("message", FAILURES)
def test_k2_failing_kernel_is_off_named_and_stock_serves(message, monkeypatch):
    model, x = layer(), cases.activations(1, 128)
    stock = model(x)
    plant(monkeypatch, FAILURES[message])
    report = mlx_phase.patch(model)
    assert type(model) is nn.QuantizedLinear and report.n_replaced == 0
    (failed,) = report.failed
    assert message in failed.error and "M=1" in failed.kernel
    assert message in report.left[0].reason and failed.kernel in report.left[0].reason
    # Rich folds long cells, so single words are looked for.
    assert "OFF" in str(report) and "left" in str(report)
    assert mx.array_equal(model(x), stock)
    # Off for the process: other callers get stock too.
    y = ops.quantized_matmul(x, model.weight, model.scales, model.biases)
    assert mx.array_equal(y, stock) and not ops.served().kernels
    assert failed.kernel in ops.off()


def test_k2_other_kernels_go_on(monkeypatch):
    plant(monkeypatch, refuse)
    eight = nn.QuantizedLinear(128, 96, group_size=64, bits=8)
    model = nn.Sequential(layer(), eight)
    report = mlx_phase.patch(model)
    assert [r.path for r in report.replaced] == ["layers.1"]
    assert [r.path for r in report.left] == ["layers.0"]


def test_k2_rows_not_checked_at_patch_are_checked_before_use(monkeypatch):
    plant(monkeypatch, refuse, rows=(5,))
    model, x = layer(), cases.activations(5, 128)
    stock = model(x)
    unchecked = layer()
    mlx_phase.patch(unchecked, check=False)
    unchecked(x)
    report = mlx_phase.patch(model)
    assert report.n_replaced == 1 and not report.failed
    # Nor does a model without checks end the checks of this one.
    mlx_phase.patch(layer(), check=False)
    assert mx.array_equal(model(x), stock)
    (reason,) = ops.served().stock
    assert "does not compile" in reason and "M=5" in reason


def test_k2_check_all_covers_every_m(monkeypatch):
    seen = []

    def fake(problem, chosen=None):
        seen.append(problem.M)
        raise ExecutorError("planted")

    monkeypatch.setattr(check, "prepare", fake)
    report = mlx_phase.patch(layer(), check="all")
    assert sorted(seen) == list(range(1, 17)) and len(report.failed) == 16


def test_unrelated_exceptions_are_not_swallowed(monkeypatch):
    def broken(problem, chosen=None):
        raise KeyError("a bug, not a kernel that fails")

    monkeypatch.setattr(check, "prepare", broken)
    model = layer()
    with pytest.raises(KeyError):
        mlx_phase.patch(model)
    assert type(model) is nn.QuantizedLinear


def test_check_false_checks_nothing(monkeypatch):
    plant(monkeypatch, refuse)
    model = layer()
    report = mlx_phase.patch(model, check=False)
    assert report.n_replaced == 1 and not report.kernels and not check.results()


@pytest.mark.parametrize("mode,bits,group_size", cases.FORMATS)
def test_canary_weights_are_the_oracles(mode, bits, group_size):
    problem = replace(
        PROBLEM, N=19, K=1152, bits=bits, group_size=group_size, mode=mode
    )
    arrays, weight = check.canary(problem)
    arrays += [None] * (4 - len(arrays))
    want = ref.dequantize(*arrays[1:], group_size, bits, mode)
    assert np.isfinite(weight).all() and np.abs(weight).max() > 0
    np.testing.assert_array_equal(weight, want)


@pytest.mark.parametrize("mode,bits,group_size", [*cases.FORMATS, ("none", 32, 0)])
def test_every_kernel_passes_its_canary(mode, bits, group_size):
    problem = replace(PROBLEM, bits=bits, group_size=group_size, mode=mode)
    result = check.check(problem)
    assert result.ok, result.error
    assert result.worst <= 1
    assert check.check(replace(problem, N=8)) in check.results()


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_canary_in_every_dtype(dtype):
    results = check.check_all(
        [replace(PROBLEM, x_dtype=dtype, M=m, N=n) for m in (1, 2) for n in (96, 40)]
    )
    assert all(r.ok for r in results), results
    # Same tile for both N: one check each.
    names = {plan(replace(PROBLEM, M=m), device_chip()) for m in (1, 2)}
    assert len(results) >= len(names)


def test_vector_loads_go_off_where_a_misaligned_x_gives_other_bits(monkeypatch):
    """A device that drops the low address bits of a vector load, as Metal may."""
    problem = Matmul(1, 8, 128, "float16")
    chosen = plan(problem, device_chip())
    real, calls = check.evaluate, []

    def evaluate(problems, chosen, x, arrays):
        outs = real(problems, chosen, x, arrays)
        calls.append(launch._narrow)
        # Every second call has the misaligned x.
        if len(calls) % 2 == 0 and not launch._narrow:
            outs = [out + 1 for out in outs]
        return outs

    bound = nn.QuantizedLinear(128, 8)
    layers.adopt(bound)
    bound(mx.ones((1, 128)))
    monkeypatch.setattr(check, "evaluate", evaluate)
    check.forget()
    try:
        assert check.check(problem, chosen=chosen).ok
        assert calls == [False, False, True, True]
        assert not bound._routes  # traced calls hold the launch with vector loads
        assert "define ALIGNED(p, n) false" in source.load("qmv", True).header
        x, *weights = check.canary(problem)[0]
        narrow = launch.prepare(problem, chosen)(x, *weights)
    finally:
        launch.narrow_loads(False)
        check.forget()
    wide = launch.prepare(problem, chosen)(x, *weights)
    assert mx.array_equal(narrow, wide).item()
    # Nothing helps: the kernel is off.
    monkeypatch.setattr(
        check, "evaluate", lambda p, c, x, a: [np.random.rand(1, 8) for _ in p]
    )
    try:
        result = check.check(problem, chosen=chosen)
        assert not result.ok and "wrong result" in result.error
    finally:
        launch.narrow_loads(False)
        check.forget()
