"""Hooks on attention: only inside patched models, gone without a trace, every cache."""

import copy
import gc
import pickle
import sys
import threading

import mlx.core as mx
import pytest
from attention_models import TOKENS, steps, tiny, with_own_attention
from mlx_lm.models import base, llama
from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)
from tolerance import assert_bits

import mlx_phase
from mlx_phase import attention_hooks, attention_ops, layers, ops, routes

# Traced steps have tests of their own.
PLAIN = {"check": False, "steps": False}


def functions():
    quantized = base.quantized_scaled_dot_product_attention
    trim = sys.modules["mlx_lm.generate"].trim_prompt_cache
    return mx.fast.scaled_dot_product_attention, quantized, trim


@pytest.fixture(autouse=True)
def stock_functions():
    """Every test leaves the two functions as it found them."""
    # Models of other test files that are still about would leave in mid-test.
    gc.collect()
    for m in list(attention_hooks._MARKED.values()):
        attention_hooks.unmark(m)
    before = functions()
    yield before
    assert functions() == before


def sdpa_calls():
    served = ops.served()
    return sum(n for name, n in served.kernels.items() if name.startswith("sdpa"))


def marked(model):
    return [m for _, m in model.named_modules() if attention_hooks.marked(m)]


CACHES = {
    "plain": lambda: [KVCache(), KVCache()],
    "8-bit": lambda: [QuantizedKVCache(64, 8), QuantizedKVCache(64, 8)],
    "4-bit": lambda: [QuantizedKVCache(32, 4), QuantizedKVCache(32, 4)],
    # The ring is written over from the seventh token on.
    "rotating": lambda: [RotatingKVCache(max_size=6), RotatingKVCache(max_size=6)],
    "mixed": lambda: [QuantizedKVCache(64, 8), RotatingKVCache(max_size=6)],
}
BATCHES = {
    "batch": lambda: [BatchKVCache([2, 0]), BatchKVCache([2, 0])],
    "batch rotating": lambda: [BatchRotatingKVCache(6, [2, 0]) for _ in range(2)],
}


@pytest.mark.parametrize("kind", [*CACHES, *BATCHES])
def test_every_cache_gives_what_stock_gives(kind):
    model, prompt = tiny(), TOKENS
    make = CACHES.get(kind) or BATCHES[kind]
    if kind in BATCHES:
        prompt = mx.concatenate([TOKENS, TOKENS + 1])
    right = steps(model, make(), prompt)
    with mlx_phase.patched(model, **PLAIN):
        ops.reset_served()
        ours = steps(model, make(), prompt)
        served = ops.served()
    # Prompt of 5, two tokens and three at once, in two layers: none of it stock.
    assert sdpa_calls() == 8 and not served.stock, dict(served)
    for a, b in zip(ours, right, strict=True):
        # Stock gives a padded row the mean of all values, we give 0: not compared.
        a, b = (x[:, -1] for x in (a, b))
        assert mx.abs(a - b).max().item() < 2e-5 * mx.abs(b).max().item()


def test_caches_reach_the_kernel_as_they_are(monkeypatch):
    model, caches, given, got = tiny(layers=1), [KVCache()], [], []
    real = KVCache.keys_and_values
    prepare = attention_ops.prepare

    def keys_and_values(self):
        given.append(real(self))
        return given[-1]

    def spy(*args):
        call = prepare(*args)

        def run(q, k, v, **options):
            got.append((k, v))
            return call(q, k, v, **options)

        return run

    monkeypatch.setattr(KVCache, "keys_and_values", keys_and_values)
    monkeypatch.setattr(attention_ops, "prepare", spy)
    routes.ROUTES.clear()
    with mlx_phase.patched(model, **PLAIN):
        steps(model, caches)
    # Views of a buffer of 256 keys, and no copy or cast between cache and kernel.
    assert len(got) == len(given) == 4 and caches[0].keys.shape[2] == 256
    for mine, kept in zip(got, given, strict=True):
        assert mine[0] is kept[0] and mine[1] is kept[1]


def test_patch_and_unpatch_restore_the_identical_functions(stock_functions):
    model = tiny()
    kinds = [type(m) for _, m in model.named_modules()]
    report = mlx_phase.patch(model, steps=False)
    assert all(a is not b for a, b in zip(functions(), stock_functions, strict=True))
    assert len(marked(model)) == 2 and "2 modules (Attention)" in report.attention
    assert mlx_phase.patch(model, steps=False).attention == report.attention
    assert [k.kernel.split()[0] for k in report.kernels] == ["sdpa_split"]
    assert isinstance(model.layers[0].self_attn, llama.Attention)
    text = str(mlx_phase.unpatch(model))
    assert "attention of 2 modules" in text
    assert all(a is b for a, b in zip(functions(), stock_functions, strict=True))
    assert [type(m) for _, m in model.named_modules()] == kinds
    assert "was not patched" in str(mlx_phase.unpatch(model))


def test_attention_false_changes_nothing_and_takes_an_earlier_patch_back():
    model, before = tiny(), functions()
    report = mlx_phase.patch(model, attention=False)
    assert functions() == before and not marked(model)
    assert report.attention == "stock (attention=False)"
    mlx_phase.patch(model, **PLAIN)
    assert len(marked(model)) == 2
    mlx_phase.patch(model, attention=False)
    assert functions() == before and not marked(model)


def test_only_the_patched_model_is_touched():
    model, other = tiny(), tiny(seed=1)
    right = other(TOKENS)
    q = mx.ones((1, 2, 1, 64))
    with mlx_phase.patched(model, **PLAIN):
        ops.reset_served()
        assert_bits(other(TOKENS), right)
        mx.fast.scaled_dot_product_attention(q, q, q, scale=1.0)
        assert not ops.served()
        assert not marked(tiny(seed=2))
        model(TOKENS)
        assert sdpa_calls() == 2


def test_another_thread_inside_a_call_is_outside():
    model, found = tiny(layers=1), []
    attention = model.layers[0].self_attn
    rope = attention.rope

    def other(x, offset=0):
        def run():
            found.append(attention_hooks._here.state)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        found.append(attention_hooks._here.state)
        return rope(x, offset=offset)

    attention.rope = other
    with mlx_phase.patched(model, **PLAIN):
        model(TOKENS)
    off, on = attention_hooks.OFF, attention_hooks.ON
    assert found == [off, on, off, on]


def test_an_exception_inside_leaves_nothing_switched_on():
    model = tiny(layers=1)

    def broken(x, offset=0):
        raise KeyError("inside")

    with mlx_phase.patched(model, **PLAIN):
        model.layers[0].self_attn.rope = broken
        with pytest.raises(KeyError, match="inside"):
            model(TOKENS)
        assert attention_hooks._here.state == attention_hooks.OFF


def test_two_models_share_the_hooks_and_the_last_takes_them_away(stock_functions):
    a, b = tiny(), tiny(seed=1)
    right = a(TOKENS)
    mlx_phase.patch(a, **PLAIN)
    hooks = functions()
    with mlx_phase.patched(b, **PLAIN):
        assert functions() == hooks
        mlx_phase.unpatch(a)
        assert functions() == hooks
        ops.reset_served()
        assert_bits(a(TOKENS), right)
        assert sdpa_calls() == 0
        b(TOKENS)
        assert sdpa_calls() == 2
    assert functions() == stock_functions


def test_a_dropped_model_takes_the_hooks_away(stock_functions):
    model = tiny()
    mlx_phase.patch(model, **PLAIN)
    assert functions() != stock_functions
    del model
    gc.collect()
    assert functions() == stock_functions


def test_a_wrapper_of_another_package_stays(stock_functions):
    model, calls = tiny(), []
    mlx_phase.patch(model, **PLAIN)
    ours = mx.fast.scaled_dot_product_attention

    def wrapper(*args, **options):
        calls.append(1)
        return ours(*args, **options)

    mx.fast.scaled_dot_product_attention = wrapper
    try:
        mlx_phase.unpatch(model)
        assert mx.fast.scaled_dot_product_attention is wrapper
        right = model(TOKENS)
        mlx_phase.patch(model, **PLAIN)
        assert mx.fast.scaled_dot_product_attention is wrapper
        ops.reset_served()
        out = model(TOKENS)
        assert sdpa_calls() == 2 and len(calls) == 4
        assert mx.abs(out - right).max().item() < 2e-5 * mx.abs(right).max().item()
    finally:
        mx.fast.scaled_dot_product_attention = ours
        mlx_phase.unpatch(model)


def test_copies_are_patched_too():
    model = tiny(layers=1)
    mlx_phase.patch(model, **PLAIN)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        ops.reset_served()
        twin(TOKENS)
        assert sdpa_calls() == 1
        mlx_phase.unpatch(twin)
        assert not marked(twin) and marked(model)
    mlx_phase.unpatch(model)


def test_training_runs_stock():
    model = tiny(layers=1)
    right = model(TOKENS)
    with mlx_phase.patched(model, **PLAIN):
        model.train()
        ops.reset_served()
        assert_bits(model(TOKENS), right)
        assert ops.served() == {layers.TRAINING: 1}
        model.eval()
        model(TOKENS)
        assert sdpa_calls() == 1


def test_attention_of_its_own_is_named():
    model = with_own_attention()
    before = functions()
    report = mlx_phase.patch(model)
    assert functions() == before and not marked(model)
    assert "1 Attention compute attention in their own code: stock" in str(report)
    assert report.attention.startswith("stock")
