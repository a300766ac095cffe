"""Attention kernels that fail their check: named, off, and stock serves."""

import importlib

import mlx.core as mx
from attention_models import TOKENS, tiny
from tolerance import assert_bits

import mlx_phase
from mlx_phase import ops


def test_a_failing_kernel_is_named_and_stock_serves(monkeypatch):
    check = importlib.import_module("mlx_phase.attention_check")
    monkeypatch.setattr(importlib.import_module("mlx_phase.check"), "_RESULTS", {})

    def wrong(problem, chosen):
        return lambda q, k, v, **options: mx.zeros_like(q)

    monkeypatch.setattr(check, "prepare", wrong)
    model = tiny()
    right = model(TOKENS[:, :1])
    report = mlx_phase.patch(model, steps=False)
    (failed,) = report.failed
    assert failed.kernel.startswith("sdpa_split") and "wrong result" in failed.error
    ops.reset_served()
    assert_bits(model(TOKENS[:, :1]), right)
    (reason,) = ops.served().stock
    assert "is off: wrong result" in reason
    mlx_phase.unpatch(model)


def test_other_row_counts_are_checked_on_first_use(monkeypatch):
    check = importlib.import_module("mlx_phase.attention_check")
    checks = importlib.import_module("mlx_phase.check")
    monkeypatch.setattr(checks, "_RESULTS", {})
    model = tiny(layers=1)
    report = mlx_phase.patch(model, steps=False)
    assert not report.failed and len(checks.results()) == 1

    def broken(problem, chosen):
        raise RuntimeError("does not compile")

    monkeypatch.setattr(check, "prepare", broken)
    ops.reset_served()
    model(TOKENS)
    (reason,) = ops.served().stock
    assert "does not compile" in reason
    mlx_phase.unpatch(model)
