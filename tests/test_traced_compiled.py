"""Traced steps as a GPU runs them: compiled, with stock in place of the kernels."""

import importlib

import numpy as np
import pytest
from mlx_lm.models import llama
from test_traced import model, run

from mlx_phase import routes

traced_module = importlib.import_module("mlx_phase.traced")


@pytest.fixture
def compiled(monkeypatch):
    """Steps are compiled, as on a GPU; stock stands in for the kernels."""
    monkeypatch.setattr(traced_module, "executor_name", lambda: "apple")
    ops_of_attention = importlib.import_module("mlx_phase.attention_ops")
    monkeypatch.setattr(ops_of_attention, "attend", lambda *a, **k: None)


def test_a_model_that_counts_in_python_is_not_traced(compiled):
    m = model()

    class Counting(llama.TransformerBlock):
        def __call__(self, x, mask=None, cache=None):
            steps = len(range(cache.offset)) + 1
            return super().__call__(x * steps / steps, mask, cache)

    m.layers[0].__class__ = Counting
    want = run(m, 5, [1, 2])
    traced_module.trace_steps(m.model)
    np.testing.assert_allclose(run(m, 5, [1, 2]), want, atol=1e-5)
    assert m.model._steps.reasons


@pytest.fixture
def calls(monkeypatch):
    """One entry for each run of the model's own code."""
    found, stock = [], llama.LlamaModel.__call__
    monkeypatch.setattr(
        llama.LlamaModel, "__call__", lambda *a: found.append(1) or stock(*a)
    )
    return found


def test_stock_attention_in_a_trace_is_replayed_too(monkeypatch, calls):
    monkeypatch.setattr(traced_module, "executor_name", lambda: "apple")
    m = model(num_attention_heads=4, num_key_value_heads=2)  # heads of 32: no kernel
    want = run(m, 9, [1] * 6)
    traced_module.trace_steps(m.model)
    calls.clear()
    np.testing.assert_allclose(run(m, 9, [1] * 6), want, atol=1e-5)
    assert len(calls) <= 1 + 1 + 1  # a prompt of 9: its first token, the rest; a step


def test_new_plans_renew_the_trace(compiled, calls):
    m = model()
    traced_module.trace_steps(m.model)
    run(m, 9, [1, 1])
    calls.clear()
    run(m, 9, [1, 1])
    replayed = len(calls)
    routes.start_anew()
    calls.clear()
    run(m, 9, [1, 1])
    assert replayed == 1 and len(calls) > replayed


def test_compiled_trace_gives_the_same(compiled, calls):
    m = model()
    want = run(m, 250, [1, 1, 3, 3, 1])
    traced_module.trace_steps(m.model)
    calls.clear()
    np.testing.assert_allclose(run(m, 250, [1, 1, 3, 3, 1]), want, atol=1e-5)
    # The prompt, and a trace for each of: 1 row, 3 rows, and both after growth.
    assert len(calls) == 1 + 4
    assert not m.model._steps.reasons


def test_the_head_is_replayed_too(compiled, monkeypatch):
    m = model(tie_word_embeddings=False)
    want = run(m, 20, [1, 1, 3, 1])
    traced_module.trace_steps(m)
    heads, head = [], type(m.lm_head).__call__
    monkeypatch.setattr(
        type(m.lm_head), "__call__", lambda s, x: heads.append(s) or head(s, x)
    )
    np.testing.assert_array_equal(run(m, 20, [1, 1, 3, 1]), want)
    assert sum(s is m.lm_head for s in heads) == 1 + 2
    assert not m._steps.reasons


class Counting(llama.Model):
    """Its head counts in Python how far the text is."""

    def __call__(self, inputs, cache=None):
        return super().__call__(inputs, cache) * len(range(cache[0].offset))


def test_layers_are_traced_where_the_head_cannot_be(compiled):
    m = model()
    m.__class__ = Counting
    want = run(m, 20, [1, 3, 1])
    for module in (m.model, m):
        traced_module.trace_steps(module)
    np.testing.assert_array_equal(run(m, 20, [1, 3, 1]), want)
    assert m._steps.reasons.keys() == {True, False} and not m.model._steps.reasons
    assert len(m.model._steps._traces) == 2
