"""Attention kernels that fail their check: named, off, and stock serves."""

import importlib

import mlx.core as mx
import pytest
from attention_models import TOKENS, tiny
from tolerance import assert_bits

import mlx_phase
from mlx_phase import ops
from mlx_phase.chip import lookup
from mlx_phase.launch import attention
from mlx_phase.plan_attention import plan_sdpa
from mlx_phase.problem import Sdpa


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


@pytest.mark.parametrize("joint", [False, True])
def test_runs_of_chunks_are_checked(monkeypatch, joint):
    """Only long contexts have whole ones: one that is wrong is found before."""
    check = importlib.import_module("mlx_phase.attention_check")
    monkeypatch.setattr(importlib.import_module("mlx_phase.check"), "_RESULTS", {})
    problem = Sdpa(8, 2, 64, 64, lens=joint, joint=joint)
    plan = plan_sdpa(problem, lookup("h200"))
    folds, real = set(), attention.template

    def template(*args):
        folds.add(args[-1] if len(args) == 6 else 1)
        return real(*args)

    monkeypatch.setattr(attention, "template", template)
    assert check.check(problem, plan).ok and folds == {1, plan.fold} == {1, 4}

    merge = attention.merge

    def wrong(*args):
        # The merge of whole runs has nothing left to fold.
        return merge(*args) * (2 if args[-1] == 1 else 1)

    monkeypatch.setattr(importlib.import_module("mlx_phase.check"), "_RESULTS", {})
    monkeypatch.setattr(attention, "merge", wrong)
    assert "wrong result" in check.check(problem, plan).error
    ops.enable_all()
