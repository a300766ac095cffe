"""Whole decode steps: fused blocks in one trace, against the layers' own code."""

import copy
import gc
import inspect
import pickle
import weakref

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tolerance
from mlx_lm.models import llama, qwen2, qwen3
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache
from mlx_lm.utils import does_model_support_input_embeddings

import mlx_phase
from mlx_phase import ops, step_patch
from mlx_phase.block import fused
from mlx_phase.traced import find_decoder, traced

SHAPE = {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 192}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 96}
SHAPE |= {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 512}
TIED = {"tie_word_embeddings": True}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 128}
FAMILIES = {
    "llama": (llama, {"rope_scaling": LLAMA3, "num_key_value_heads": 2}),
    "llama-traditional": (llama, {"rope_traditional": True}),
    "qwen2": (qwen2, TIED),
    "qwen3": (qwen3, TIED | {"head_dim": 64}),
}
TOKENS = mx.random.randint(0, 96, (1, 300), key=mx.random.key(4))


def model(family="llama", dtype=mx.float32, **more) -> nn.Module:
    mx.random.seed(0)
    module, options = FAMILIES[family]
    args = {"model_type": module.__name__.split(".")[-1]} | SHAPE | options | more
    m = module.Model(module.ModelArgs.from_dict(args))
    # Biases and norms start as zeros and ones, which would hide a mistake.
    for _, layer in m.named_modules():
        for name in ("bias", "weight"):
            if name in layer and layer[name].ndim == 1:
                layer[name] = layer[name] + 0.3 * mx.random.normal(layer[name].shape)
    m.set_dtype(dtype)
    nn.quantize(m, group_size=64, bits=4)
    mx.eval(m.parameters())
    return m


def run(m, prompt: int, lengths: list[int], cache=None) -> mx.array:
    """Logits of all positions: a prompt, then steps of several tokens."""
    cache = cache or make_prompt_cache(m)
    outs, at = [m(TOKENS[:, :prompt], cache=cache)], prompt
    for length in lengths:
        outs.append(m(TOKENS[:, at : at + length], cache=cache))
        mx.eval(outs[-1], [c.state for c in cache])
        at += length
    assert all(c.offset == at for c in cache)
    return mx.concatenate(outs, axis=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_are_fused_and_right(family):
    m = model(family)
    lengths = [1, 1, 3, *[1] * 61]
    want = run(m, 20, lengths)
    report = mlx_phase.patch(m)
    assert sum(report.steps.blocks.values()) == 2, report.steps
    assert report.steps.reason is None
    ops.reset_served()
    have = run(m, 20, lengths)
    # Float32 all along, so only the order of sums differs.
    np.testing.assert_allclose(np.array(have), np.array(want), atol=2e-4, rtol=2e-4)
    kernels = {name.split()[0] for name in ops.served().kernels}
    assert {"qmv_add", "qmv_glu", "qmv_qkv"} <= kernels
    assert any(name.startswith("sdpa") for name in kernels)
    assert ("qk_norm" in kernels) == (family == "qwen3")


def test_a_step_of_many_rows_has_the_bits_of_single_steps():
    m = model("llama", mx.bfloat16)
    mlx_phase.patch(m, check=False)
    start, single = 254, make_prompt_cache(m)
    ones = run(m, start, [1] * 5, single)
    for lengths in ([5], [2, 3]):
        many = make_prompt_cache(m)
        tolerance.assert_bits(ones, run(m, start, lengths, many))
        for a, b in zip(single, many, strict=True):
            tolerance.assert_bits(a.state[0], b.state[0])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_head_is_in_the_trace_and_hidden_states_are_there_without(family):
    """lm_head, or embeddings that are tied to it; each caller has a trace."""
    tied = {"tie_word_embeddings": family != "llama"}
    m = model(family, mx.bfloat16, **tied)
    report = mlx_phase.patch(m, check=False)
    assert ("lm_head" in m) == (family == "llama")
    assert traced(m) and traced(m.model) and report.steps.decoder == "Model"
    head = m.lm_head if "lm_head" in m else m.model.embed_tokens.as_linear
    for rows in (1, 5):
        caches = make_prompt_cache(m), make_prompt_cache(m)
        for cache in caches:
            m.model(TOKENS[:, :20], cache)
        tokens = TOKENS[:, 20 : 20 + rows]
        hidden = m.model(tokens, cache=caches[1])
        assert hidden.shape == (1, rows, 128)
        tolerance.assert_bits(m(tokens, cache=caches[0]), head(hidden))
    assert m._steps._traces and m.model._steps._traces


def test_a_short_prompt_has_the_bits_of_single_steps():
    m = model("llama", mx.bfloat16)
    mlx_phase.patch(m, check=False)
    one_by_one = run(m, 1, [1] * 6)
    for prompt, lengths in ((7, []), (2, [5]), (4, [1, 2])):
        tolerance.assert_bits(one_by_one, run(m, prompt, lengths))


def test_batch_rows_have_the_bits_of_single_sequences():
    m = model("llama", mx.bfloat16)
    mlx_phase.patch(m, check=False)
    rows = mx.stack([TOKENS[0, :9], TOKENS[0, 100:109]])

    def last(tokens: mx.array) -> mx.array:
        cache = make_prompt_cache(m)
        m(tokens[:, :8], cache=cache)
        return m(tokens[:, 8:], cache=cache)

    both = last(rows)
    for i in range(2):
        tolerance.assert_bits(both[i : i + 1], last(rows[i : i + 1]))


def test_buffers_grow_and_old_keys_stay():
    m = model()
    mlx_phase.patch(m, check=False)
    cache = make_prompt_cache(m)
    run(m, 255, [], cache)
    keys = np.array(cache[0].keys[..., :255, :])
    m(TOKENS[:, 255:257], cache=cache)
    assert cache[0].keys.shape[2] >= 257 and cache[0].offset == 257
    np.testing.assert_array_equal(np.array(cache[0].keys[..., :255, :]), keys)
    # What lies behind the offset is never read.
    cache[0].keys[..., 257:, :] = float("nan")
    cache[0].values[..., 257:, :] = float("nan")
    assert not mx.isnan(m(TOKENS[:, 257:258], cache=cache)).any().item()


def test_trimmed_cache_goes_on_where_it_was():
    m = model()
    mlx_phase.patch(m, check=False)
    cache = make_prompt_cache(m)
    want = run(m, 12, [1, 1], cache)[:, -1:]
    m(TOKENS[:, 50:54], cache=cache)
    for c in cache:
        c.trim(5)
    np.testing.assert_allclose(m(TOKENS[:, 13:14], cache=cache), want, atol=1e-5)


def test_copies_of_a_cache_do_not_see_later_steps():
    m = model()
    mlx_phase.patch(m, check=False)
    cache = make_prompt_cache(m)
    run(m, 12, [1], cache)
    fork = copy.deepcopy(cache)
    a = m(TOKENS[:, 60:61], cache=cache)
    b = m(TOKENS[:, 61:62], cache=fork)
    mx.eval(a, b)
    again = make_prompt_cache(m)
    run(m, 12, [1], again)
    np.testing.assert_array_equal(a, m(TOKENS[:, 60:61], cache=again))


@pytest.mark.parametrize("case", ["padded prompt", "no cache", "17 rows"])
def test_what_is_no_such_step_runs_as_before(case):
    m = model()
    cache = make_prompt_cache(m)
    if case == "padded prompt":
        cache = [BatchKVCache([0]), BatchKVCache([0])]
    run(m, 5, [], cache)
    tokens = TOKENS[:, 5:6] if case != "17 rows" else TOKENS[:, 5:22]
    if case == "padded prompt":
        tokens = TOKENS[:, 5:22]
        for c in cache:
            c.prepare(right_padding=[2])
    if case == "no cache":
        cache = None
    fork = copy.deepcopy(cache)
    want = m(tokens, cache=cache)
    mlx_phase.patch(m, check=False)
    ops.reset_served()
    np.testing.assert_allclose(m(tokens, cache=fork), want, atol=2e-5)
    assert not any("qmv_glu" in name for name in ops.served().kernels)


def test_new_weights_and_layers_are_seen():
    m = model()
    mlx_phase.patch(m, check=False)
    cache = make_prompt_cache(m)
    run(m, 5, [1], cache)
    other = model(rope_theta=1e4)
    for change in (
        lambda x: x.model.norm.__setitem__("weight", x.model.norm["weight"] * 2),
        lambda x: x.model.layers[0].mlp.gate_proj.update(
            {"scales": x.model.layers[0].mlp.gate_proj["scales"] * 3}
        ),
        lambda x: x.model.layers.reverse(),
    ):
        fork, plain = copy.deepcopy(cache), copy.deepcopy(cache)
        change(m), change(other)
        want = other(TOKENS[:, 6:7], cache=plain)
        np.testing.assert_allclose(m(TOKENS[:, 6:7], cache=fork), want, atol=1e-4)


def test_unpatch_gives_every_class_back():
    m = model("qwen3")
    before = [(id(x), type(x)) for _, x in m.named_modules()]
    want = run(m, 5, [1, 2])
    mlx_phase.patch(m)
    assert traced(m.model) and all(fused(b) for b in m.layers)
    mlx_phase.patch(m)
    mlx_phase.unpatch(m)
    assert [(id(x), type(x)) for _, x in m.named_modules()] == before
    np.testing.assert_array_equal(run(m, 5, [1, 2]), want)
    with mlx_phase.patched(m, check=False):
        assert traced(m.model)
    assert [(id(x), type(x)) for _, x in m.named_modules()] == before


def test_copies_and_pickles_are_stock_and_nothing_is_kept_alive():
    m = model()
    mlx_phase.patch(m, check=False)
    want = run(m, 5, [1])
    for twin in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert not traced(twin.model) and not any(fused(b) for b in twin.layers)
        np.testing.assert_allclose(run(twin, 5, [1]), want, atol=2e-5)
    del twin
    gone = weakref.ref(m.model)
    gc.collect()
    gc.disable()
    try:
        del m
        assert gone() is None
    finally:
        gc.enable()


def test_a_block_that_computes_something_else_is_left_and_named():
    m = model()

    class Doubled(llama.TransformerBlock):
        def __call__(self, x, mask=None, cache=None):
            return 2 * super().__call__(x, mask, cache)

    m.layers[1].__class__ = Doubled
    report = mlx_phase.patch(m)
    assert report.steps.blocks == {"TransformerBlock": 1}
    assert "differs from stock" in str(report.steps)
    assert not fused(m.layers[1]) and traced(m.model)
    have = run(m, 5, [1])
    mlx_phase.unpatch(m)
    np.testing.assert_allclose(run(m, 5, [1]), have, atol=2e-4)


def test_calls_keep_their_signatures():
    m = model()
    modules = (m, m.model, m.layers[0], m.layers[0].mlp)
    before = [inspect.signature(x.__call__) for x in modules]
    assert does_model_support_input_embeddings(m)
    mlx_phase.patch(m, check=False)
    assert [inspect.signature(x.__call__) for x in modules] == before
    # mlx-lm finds a model's processors by the name of its class's module.
    assert {type(x).__module__ for x in modules} == {llama.__name__}
    assert does_model_support_input_embeddings(m)


def test_decoder_is_found():
    m = model()
    assert find_decoder(m) is m.model
    assert find_decoder(nn.Sequential(nn.Linear(4, 4))) is None
    assert "no module" in step_patch.install(nn.Linear(4, 4), True).reason
