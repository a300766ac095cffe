"""Drop-in attention: who serves, bad input, and prefill over a quantised cache."""

import mlx.core as mx
import numpy as np
import pytest
import ref_attention
from attention_models import tiny
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from test_fuse import model as fusible
from tolerance import assert_close

import mlx_phase
from mlx_phase import attention_ops, ops
from mlx_phase.attention_ops import sdpa
from mlx_phase.chip import lookup
from mlx_phase.routes import start_anew

SCALE = 0.125


def arrays(q_len, k_len, batch=1, heads=2, kv_heads=1, D=64, dtype=mx.float32, seed=0):
    keys = mx.random.split(mx.random.key(seed), 3)
    shapes = [(batch, heads, q_len, D)] + 2 * [(batch, kv_heads, k_len, D)]
    return [
        mx.random.normal(s, key=k).astype(dtype)
        for s, k in zip(shapes, keys, strict=True)
    ]


def packed(a, group=64, bits=8):
    return mx.quantize(a, group_size=group, bits=bits)


def right(q, k, v, mask=None, sinks=None):
    causal = isinstance(mask, str)
    mask = None if causal else mask
    options = (SCALE, mask, causal, sinks)
    o = ref_attention.attention(q, k, v, *options)
    return o, ref_attention.dense(q, k, v, *options, str(q.dtype).split(".")[-1])


@pytest.fixture
def no_stock_attention(monkeypatch):
    def refuse(*args, **options):
        raise AssertionError("stock attention was called")

    monkeypatch.setattr(attention_ops, "STOCK", refuse)


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("q_len, mask", [(1, "causal"), (3, "causal"), (1, None)])
def test_up_to_16_queries_run_on_the_kernels(bits, q_len, mask, no_stock_attention):
    q, k, v = arrays(q_len, 9)
    ops.reset_served()
    if bits == 16:
        o = sdpa(q, k, v, scale=SCALE, mask=mask)
    else:
        o = sdpa(q, packed(k), packed(v), scale=SCALE, mask=mask)
        k, v = (mx.dequantize(*packed(a), group_size=64, bits=8) for a in (k, v))
    served = ops.served()
    assert not served.stock and list(served.kernels.values()) == [1]
    assert_close(o, *right(q, k, v, mask), "float32")


@pytest.mark.parametrize("shape", [(1, 2, 1, 64), (0, 2, 1, 64), (1, 2, 0, 64)])
def test_nothing_to_attend_launches_nothing(shape, no_stock_attention):
    q, k = mx.ones(shape), mx.ones((shape[0], 1, 0, 64))
    ops.reset_served()
    assert mx.array_equal(sdpa(q, k, k, scale=SCALE), mx.zeros(shape))
    assert not ops.served()


def test_what_stays_stock_is_counted_with_its_reason():
    def reason(*args, **options):
        ops.reset_served()
        o = sdpa(*args, scale=SCALE, **options)
        mx.eval(o)
        ((text, calls),) = ops.served().stock.items()
        assert calls == 1
        return text

    q, k, v = arrays(1, 5)
    assert "head dims (32, 32)" in reason(q[..., :32], k[..., :32], v[..., :32])
    assert "mixed dtypes" in reason(q.astype(mx.float16), k, v)
    # A second time from memory.
    assert "mixed dtypes" in reason(q.astype(mx.float16), k, v)
    six = [packed(a, bits=6) for a in (k, v)]
    assert "6-bit" in reason(q, *six, bits=6)
    mask = mx.zeros((1, 5), mx.float16)
    assert "mask of" in reason(q, k, v, mask=mask)


Q, K, V = arrays(2, 5)
PACKED = packed(K)


@pytest.mark.parametrize(
    "args, options, message",
    [
        ((Q[0], K, V), {}, "q has shape"),
        ((Q, K, V[:, :, :4]), {}, "keys and values alike"),
        ((Q, K[..., :32], V), {}, "head_dim of q is 64, of k 32"),
        ((mx.concatenate([Q, Q]), K, V), {}, "q has batch 2, k 1"),
        ((Q, *2 * [mx.ones((1, 3, 5, 64))]), {}, "2 query heads on 3 kv heads"),
        ((Q, K, V), {"mask": "window"}, 'None, "causal" or an array'),
        ((Q, K, V), {"mask": mx.ones((3, 5), mx.bool_)}, "broadcasts to"),
        ((Q, K, V), {"sinks": mx.ones((3,))}, "sinks have shape"),
        ((Q, PACKED, V), {}, "one of k and v is quantised"),
        ((Q, PACKED[:2], PACKED[:2]), {}, "2 parts"),
        ((Q, PACKED, PACKED), {"bits": 7}, "7 bits with groups of 64"),
        ((Q, PACKED, PACKED), {"group_size": 32}, "in groups of 32"),
        ((Q, (Q, Q, Q), (Q, Q, Q)), {}, "words of k are mlx.core.float32"),
    ],
)
def test_bad_input_gives_one_clear_error(args, options, message, no_stock_attention):
    # First a good call, which is remembered and must not let a bad one through.
    mx.eval(sdpa(Q, K, V, scale=SCALE))
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        sdpa(*args, scale=SCALE, **options)


@pytest.mark.parametrize("at", range(3))
def test_what_is_no_array_is_named(at):
    args = [Q, K, V]
    args[at] = np.ones((1, 1, 5, 64), np.float32)
    with pytest.raises(TypeError, match=f"attention: {'qkv'[at]} is a ndarray"):
        sdpa(*args, scale=SCALE)
    with pytest.raises(TypeError, match="mask is a int"):
        sdpa(Q, K, V, scale=SCALE, mask=3)


MASKS = {
    "none": None,
    "causal": "causal",
    "bool": mx.random.bernoulli(0.7, (1, 1, 40, 50), key=mx.random.key(1)),
    "bool row": mx.arange(50) % 3 > 0,
    "per head": mx.random.normal((1, 4, 40, 50), key=mx.random.key(2)),
}


@pytest.mark.parametrize("bits, group", [(8, 64), (4, 32)])
@pytest.mark.parametrize("mask", MASKS)
def test_prefill_over_a_quantised_cache_by_blocks(mask, bits, group, monkeypatch):
    q, k, v = arrays(40, 50, heads=4, kv_heads=2)
    parts = [packed(a, group, bits) for a in (k, v)]
    form = {"group_size": group, "bits": bits}
    shapes = []

    def stock(q, k, v, **options):
        shapes.append((q.shape[2], k.shape[2]))
        return attention_ops.STOCK(q, k, v, **options)

    # Room for the scores of 16 rows at once.
    monkeypatch.setattr(attention_ops, "SCORE_BYTES", 4 * 4 * 50 * 16)
    options = {"scale": SCALE, "mask": MASKS[mask]}
    o = attention_ops.by_blocks(q, *parts, **options, **form, stock=stock)
    keys = [26, 42, 50] if mask == "causal" else [50] * 3
    assert shapes == list(zip([16, 16, 8], keys, strict=True))
    k, v = (mx.dequantize(*a, **form) for a in parts)
    assert_close(o, *right(q, k, v, MASKS[mask]), "float32")
    if mask == "per head":
        return  # mlx-lm's function cannot broadcast it over shared heads
    theirs = base.quantized_scaled_dot_product_attention(
        q + 0, *parts, SCALE, MASKS[mask], group, bits
    )
    assert mx.abs(o - theirs).max().item() < 1e-5


def test_queries_before_the_first_key_give_zeros():
    q, k, v = arrays(20, 3)
    o = attention_ops.by_blocks(q, packed(k), packed(v), scale=SCALE, mask="causal")
    assert o.shape == (1, 2, 20, 64) and not mx.any(o[:, :, :17]).item()
    k, v = (mx.dequantize(*packed(a), group_size=64, bits=8) for a in (k, v))
    whole, dense = right(q, k, v, "causal")
    assert_close(o, whole, dense, "float32")


PROMPT = mx.random.randint(0, 48, (1, 100), key=mx.random.key(4))


@pytest.mark.parametrize("kind", [KVCache, lambda: QuantizedKVCache(64, 8)])
def test_a_prompt_at_once_and_in_chunks(kind):
    # One layer: in a second one a last bit may round a key to another code.
    model = tiny(layers=1)

    def logits(*lengths):
        caches, at, outs = [kind()], 0, []
        for n in lengths:
            outs.append(model(PROMPT[:, at : at + n], cache=caches))
            at += n
        return mx.concatenate(outs, axis=1)

    stock = logits(100)
    with mlx_phase.patched(model, linear=False, check=False, steps=False):
        ops.reset_served()
        outs = logits(100), logits(40, 17, 43)
        served = ops.served()
        mx.eval(outs)
    assert not served.stock and list(served.kernels.values()) == [4]
    assert next(iter(served.kernels)).startswith("sdpa_prefill")
    for o in outs:
        assert mx.abs(o - stock).max().item() < 2e-5 * mx.abs(stock).max().item()
    assert mx.array_equal(logits(100), stock).item()


def test_where_stock_is_faster_a_quantised_cache_is_read_by_blocks(monkeypatch):
    monkeypatch.setattr(attention_ops, "device_chip", lambda: lookup("m5-max"))
    model = tiny()
    caches = [[QuantizedKVCache(64, 8) for _ in range(2)] for _ in range(2)]
    stock = model(PROMPT[:, :30], cache=caches[0])
    start_anew()
    with mlx_phase.patched(model, linear=False, check=False, steps=False):
        ops.reset_served()
        ours = model(PROMPT[:, :30], cache=caches[1])
    start_anew()
    attention_ops._LEFT.clear()
    ((reason, calls),) = ops.served().items()
    assert reason.startswith("q_len > 16: stock attention of a dequantised cache")
    assert calls == 2
    assert mx.abs(ours - stock).max().item() < 2e-5 * mx.abs(stock).max().item()


def test_patching_fused_blocks_again_marks_attention_only():
    model, before = fusible(head_dim=64), mx.fast.scaled_dot_product_attention
    for _ in range(2):
        report = mlx_phase.patch(model, check=False)
        assert "2 modules (Attention)" in report.attention
    assert "TransformerBlock" not in report.attention
    mlx_phase.unpatch(model)
    assert mx.fast.scaled_dot_product_attention is before


@pytest.mark.cuda
@pytest.mark.parametrize("bits", [16, 8])
def test_a_cache_is_read_in_place(bits):
    a = mx.random.normal((1, 8, 2**15 + 256, 128), mx.bfloat16)
    parts = [a] if bits == 16 else packed(a)
    kept = [x[:, :, : 2**15] for x in parts]
    mx.eval(kept)
    k = kept[0] if bits == 16 else tuple(kept)
    q = mx.random.normal((1, 32, 1, 128), mx.bfloat16)
    mx.eval(sdpa(q, k, k, scale=SCALE))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    ops.reset_served()
    mx.eval(sdpa(q, k, k, scale=SCALE))
    assert ops.served().kernels
    assert mx.get_peak_memory() - before < sum(x.nbytes for x in kept) / 4


# A key that differs in its last bit may round to another code of 8 bits.
@pytest.mark.parametrize("kind, limit", [(KVCache, 2e-4), (QuantizedKVCache, 2e-2)])
def test_smollm2_on_the_kernels_is_the_stock_model(kind, limit, smollm2):
    model = smollm2.model
    text = (
        "The capital of Italy is Rome, that of Spain is Madrid, and that of France is"
    )
    ids = mx.array([smollm2.tokenizer.encode(text)])

    def logits():
        caches = [kind() for _ in model.layers]
        first = model(ids, cache=caches)[:, -1]
        return first, model(mx.argmax(first, axis=-1)[None], cache=caches)[:, -1]

    right = logits()
    with mlx_phase.patched(model, linear=False, check=False):
        ops.reset_served()
        ours = logits()
    served = ops.served()
    # A prompt of 17 tokens and a step.
    assert list(served.kernels.values()) == [30, 30] and not served.stock
    for a, b in zip(ours, right, strict=True):
        assert mx.argmax(a).item() == mx.argmax(b).item()
        assert mx.abs(a - b).max().item() < limit * mx.abs(b).max().item()
