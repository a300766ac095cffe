"""Models whose structure matches but that compute something else, and stale traces."""

import importlib
import threading

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from block_models import family
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from test_traced import TOKENS, model
from test_traced_compiled import calls, compiled  # noqa: F401

import mlx_phase
from mlx_phase import routes, step_patch
from mlx_phase.attention_step import attention_of_step
from mlx_phase.block import fused
from mlx_phase.block_match import _adds_one

traced_module = importlib.import_module("mlx_phase.traced")


def steps(m, *lengths: int) -> mx.array:
    """Logits of a prompt's last token and of steps after it."""
    caches = make_prompt_cache(m)
    outs, at = [m(TOKENS[:, :1], cache=caches)], 1
    for length in lengths:
        outs.append(m(TOKENS[:, at : at + length], cache=caches))
        at += length
    return mx.concatenate(outs, axis=1)


@pytest.mark.parametrize("name", ["granite", "ministral3"])
def test_blocks_that_compute_something_else_are_left_without_checks_too(name):
    """Granite scales its residuals; Ministral gives its blocks one argument more."""
    m = family(name)
    want = steps(m, 1, 1)
    report = mlx_phase.patch(m, check=False)
    assert not any(map(fused, m.layers)) and report.steps.unfused
    np.testing.assert_allclose(steps(m, 1, 1), want, atol=1e-4)


class Clipped(nn.Module):
    """An MLP whose large values are clipped."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.gate_proj, self.up_proj = mlp.gate_proj, mlp.up_proj
        self.down_proj = mlp.down_proj

    def __call__(self, x: mx.array) -> mx.array:
        gate, up = mx.minimum(self.gate_proj(x), 7), mx.clip(self.up_proj(x), -7, 7)
        return self.down_proj(nn.silu(gate) * up)


class Tempered(llama.Attention):
    """Attention that counts more far from the beginning."""

    def __call__(self, x, mask=None, cache=None):
        far = mx.array(cache.offset) > 8192
        return super().__call__(x, mask, cache) * mx.where(far, 2.0, 1.0)


def test_clips_and_scales_by_position_are_noticed():
    m = model()
    m.layers[0].mlp = Clipped(m.layers[0].mlp)
    m.layers[1].self_attn.__class__ = Tempered
    why = " ".join(mlx_phase.patch(m, check=False).steps.unfused)
    assert "its activation is none of" in why and "differs from stock" in why


def test_layer_norms_are_told_from_rms_norms():
    """Over many numbers random x has hardly a mean to take away."""
    norm = nn.LayerNorm(8192, bias=False)
    norm.weight = 0.1 * norm.weight
    assert _adds_one(norm) is None
    norm = nn.RMSNorm(8192)
    shifted = type("Shifted", (nn.RMSNorm,), {})(8192)
    shifted.__class__.__call__ = lambda n, x: mx.fast.rms_norm(x, 1 + n.weight, n.eps)
    shifted.weight = 200 * norm.weight.astype(mx.bfloat16)
    assert (_adds_one(norm), _adds_one(shifted)) == (False, True)


def test_mlps_that_differ_in_a_number_are_compared_each():
    m = model()
    m.layers[1].mlp.limit = 7.0
    mlx_phase.patch(m, check=False)
    a, b = map(step_patch._signature, m.layers)
    assert a != b
    m.layers[0].mlp.limit = 7.0
    assert step_patch._signature(m.layers[0]) == b


def test_layers_that_are_one_block_are_fused_once():
    m = model()
    m.model.layers = [m.layers[0]] * 2
    want = steps(m, 17, 1)
    mlx_phase.patch(m, check=False)
    assert fused(m.layers[0])
    np.testing.assert_allclose(steps(m, 17, 1), want, atol=1e-4)
    mlx_phase.unpatch(m)
    assert type(m.layers[0]) is llama.TransformerBlock


def test_a_new_trace_does_not_hide_that_older_ones_are_stale(compiled, calls):  # noqa: F811
    m = model()
    traced_module.trace_steps(m.model)
    steps(m, 1, 1)
    norm = m.layers[0].input_layernorm
    norm.weight = 2 * norm.weight
    caches = make_prompt_cache(m)
    m(TOKENS[:, :20], cache=caches)
    m(TOKENS[:, 20:23], cache=caches)  # three tokens: a trace of its own
    have = m(TOKENS[:, 23:24], cache=caches)
    traced_module.release_steps(m.model)
    caches = make_prompt_cache(m)
    m(TOKENS[:, :23], cache=caches)
    want = m(TOKENS[:, 23:24], cache=caches)
    np.testing.assert_allclose(have, want, atol=1e-4)


@pytest.mark.parametrize("change", [routes.enable_all, routes.prepare_again])
def test_traces_do_not_keep_launches_that_were_prepared_again(change):
    trace = traced_module.Trace()
    assert not trace.stale()
    change()
    assert trace.stale()


def test_threads_that_trace_at_once_put_stock_back():
    stock = mx.fast.scaled_dot_product_attention
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with attention_of_step([]):
            inside.set()
            leave.wait(5)

    def second() -> None:
        with attention_of_step([]):
            leave.wait(5)

    threads = [threading.Thread(target=f) for f in (first, second)]
    threads[0].start()
    inside.wait(5)
    threads[1].start()
    threads[1].join(0.1)
    leave.set()
    for thread in threads:
        thread.join()
    assert mx.fast.scaled_dot_product_attention is stock


class LastOnly(llama.Model):
    """Logits of the last token alone."""

    def __call__(self, inputs, cache=None):
        return super().__call__(inputs, cache)[:, -1]


def test_a_head_that_gives_other_rows_is_left_out():
    m = model()
    m.__class__ = LastOnly
    want = [m(TOKENS[:, :5], cache=(c := make_prompt_cache(m)))]
    want.append(m(TOKENS[:, 5:6], cache=c))
    report = mlx_phase.patch(m)
    assert report.steps.decoder == "LlamaModel" and report.steps.reason is None
    assert not traced_module.traced(m) and traced_module.traced(m.model)
    have = [m(TOKENS[:, :5], cache=(c := make_prompt_cache(m)))]
    have.append(m(TOKENS[:, 5:6], cache=c))
    for a, b in zip(have, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_training_of_what_is_inside_ends_the_steps_of_the_head():
    m = model()
    mlx_phase.patch(m, check=False)
    caches = make_prompt_cache(m)
    m(TOKENS[:, :5], cache=caches)
    assert m._steps.takes(TOKENS[:, 5:6], caches)
    m.model.train()
    assert m._steps.takes(TOKENS[:, 5:6], caches) is None
    m.model.eval()
    assert m._steps.takes(TOKENS[:, 5:6], caches)
