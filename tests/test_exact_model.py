"""Whole models: a verification step has, bit for bit, the logits of single steps."""

import copy
import gc
import os
import sys
import threading

import mlx.core as mx
import pytest
import tolerance
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache
from test_traced import model

import mlx_phase
from mlx_phase import attention_ops, ops, routes
from mlx_phase.chip import CPU, lookup
from mlx_phase.plan import MAX_M, plan
from mlx_phase.problem import Matmul

# Compiling takes most of the time, and each M is a kernel of its own: both sides of
# each change of the plans' tiles, or every M if asked for.
EVERY = bool(os.environ.get("MLX_PHASE_EVERY_M"))
ROWS = tuple(range(1, MAX_M + 1)) if EVERY else (1, 2, 4, 5, 16)
# Steps cross the end of a buffer, and of a chunk of keys, at 256.
START = 250
TOKENS = mx.random.randint(0, 96, (4, START + MAX_M), key=mx.random.key(1))


def caches_of(m, bits: int) -> list:
    if not bits:
        return [KVCache() for _ in m.layers]
    return [QuantizedKVCache(64, bits) for _ in m.layers]


def step(m, caches: list, tokens: mx.array) -> mx.array:
    """Logits of a step on a copy of the caches."""
    caches = copy.deepcopy(caches)
    logits = m(tokens, cache=caches)
    mx.eval(logits)
    return logits


def singles(m, caches: list, tokens: mx.array) -> mx.array:
    """Logits of steps of one token each."""
    caches, outs = copy.deepcopy(caches), []
    for i in range(tokens.shape[1]):
        outs.append(m(tokens[:, i : i + 1], cache=caches))
        mx.eval(outs[-1], [c.state for c in caches])
    return mx.concatenate(outs, axis=1)


@pytest.mark.parametrize(
    ("family", "bits", "batch"),
    [
        ("llama", 0, 1),
        ("llama", 8, 1),
        ("qwen3", 0, 2),
        ("qwen3", 8, 2),
    ],
    ids=lambda v: str(v),
)
def test_a_verification_has_the_bits_of_single_steps(family, bits, batch):
    m = model(family, mx.bfloat16)
    mlx_phase.patch(m, check=False)
    caches, tokens = caches_of(m, bits), TOKENS[:batch]
    m(tokens[:, :START], cache=caches)
    ops.reset_served()
    want = singles(m, caches, tokens[:, START:])
    kernels = {name.split()[0] for name in ops.served().kernels}
    assert "qmv_qkv" in kernels
    assert any(name.startswith("sdpa_split") for name in kernels)
    for rows in ROWS:
        # Kernels take 16 rows, and those of all sequences count.
        length, odd = divmod(rows, batch)
        if length and not odd:
            have = step(m, caches, tokens[:, START : START + length])
            tolerance.assert_bits(have, want[:, :length])
    assert not ops.served().stock


@pytest.fixture
def mac(monkeypatch):
    """Plans are those of a Mac: its kernels, on the CPU."""
    chip = lookup("m4-max")
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_phase") and hasattr(module, "device_chip"):
            monkeypatch.setattr(module, "device_chip", lambda: chip)
    routes.start_anew()
    yield chip
    routes.start_anew()


def test_a_verification_on_a_mac_has_the_bits_of_single_steps(mac):
    m = model("llama", mx.bfloat16)
    mlx_phase.patch(m, check=False)
    caches = caches_of(m, 0)
    m(TOKENS[:1, :START], cache=caches)
    ops.reset_served()
    drafts = TOKENS[:1, START : START + 8]
    want = singles(m, caches, drafts)
    for rows in (3, 8):
        tolerance.assert_bits(step(m, caches, drafts[:, :rows]), want[:, :rows])
    assert plan(Matmul(8, 64, 64), mac).lean and not plan(Matmul(8, 64, 64), CPU).lean
    assert {"qmv_qkv", "qmv_glu"} <= {name.split()[0] for name in ops.served().kernels}
    assert not ops.served().stock


def test_rows_do_not_depend_on_their_neighbours():
    m = model("llama", mx.bfloat16)
    mlx_phase.patch(m, check=False)
    caches = caches_of(m, 0)
    m(TOKENS[:1, :START], cache=caches)
    drafts = TOKENS[:1, START : START + 5]
    other = mx.concatenate([drafts[:, :2], drafts[:, 2:] + 1], axis=1)
    have = step(m, caches, other)[:, :2]
    tolerance.assert_bits(have, step(m, caches, drafts)[:, :2])
    # A sequence alone and in a batch.
    both = caches_of(m, 0)
    m(mx.concatenate([TOKENS[1:2, :START], TOKENS[:1, :START]]), cache=both)
    for a, b in zip(both, caches, strict=True):
        a.keys[1], a.values[1] = b.keys[0], b.values[0]
    pair = step(m, both, mx.concatenate([TOKENS[1:2, START : START + 5], drafts]))
    tolerance.assert_bits(pair[1:], step(m, caches, drafts))


@pytest.fixture
def stock_stays():
    """MLX's own functions are back in place at the end of the test."""
    gc.collect()  # models that another test patched keep the hooks on attention
    stock = mx.quantized_matmul
    yield
    assert mx.quantized_matmul is stock
    assert mx.fast.scaled_dot_product_attention is attention_ops.STOCK


@pytest.mark.parametrize("bits", [0, 8])
def test_exact_rows_without_a_patch(bits, stock_stays):
    m = model("llama", mx.bfloat16)
    caches, tokens = caches_of(m, bits), TOKENS[:1, START : START + 5]
    m(TOKENS[:1, :START], cache=caches)
    ops.reset_served()
    with mlx_phase.exact_rows():
        have = step(m, caches, tokens)
        tolerance.assert_bits(have, singles(m, caches, tokens))
    assert not ops.served().stock
    kernels = {name.split()[0] for name in ops.served().kernels}
    assert {"qmv"} < kernels and len(kernels) == 2
    ops.reset_served()
    off = mx.abs(step(m, caches, tokens) - have).max().item()
    assert not ops.served() and off < 0.2


def test_exact_rows_leave_other_threads_and_errors_alone(stock_stays):
    x, w = mx.ones((2, 64)), mx.quantize(mx.ones((8, 64)))
    seen = []

    def other():
        ops.reset_served()
        mx.quantized_matmul(x, *w)
        seen.append(dict(ops.served()))

    with pytest.raises(ZeroDivisionError), mlx_phase.exact_rows():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        with mlx_phase.exact_rows():
            mx.eval(mx.quantized_matmul(x, *w))
        # The inner block's end leaves the outer one on, for 17 rows too.
        y = mx.quantized_matmul(mx.ones((17, 64)), *w)
        assert (y == 64).all().item()
        raise ZeroDivisionError
    assert seen == [{}] and not ops.served().stock
    assert [name.split()[0] for name in ops.served().kernels] == ["qmv", "qmm"]


def test_exact_rows_and_patches_end_in_any_order(stock_stays):
    m = model("llama")
    with mlx_phase.exact_rows():
        mlx_phase.patch(m, check=False)
    mlx_phase.unpatch(m)
    with mlx_phase.patched(m, check=False), mlx_phase.exact_rows():
        assert m(TOKENS[:1, :2], cache=make_prompt_cache(m)).shape == (1, 2, 96)
