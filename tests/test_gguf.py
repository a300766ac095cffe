"""GGUF: values, names and layout against the model they were written from."""

import struct

import gguf_models
import gguf_writer
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.rope_utils import Llama3RoPE

from mlx_phase import gguf, gguf_llama, gguf_tokenizer
from mlx_phase.model_error import ModelError

IDS = mx.array([[5, 17, 200, 3, 3, 91, 260]])


def typed(tensors, kind):
    """Tensors in a GGUF type; norms and biases stay F32, as converters do."""
    return {k: (w, "F32" if w.ndim == 1 else kind) for k, w in tensors.items()}


def build(path, metadata, tensors, dtype=mx.float32):
    file = gguf.read(gguf_writer.write(path, metadata, tensors))
    config = gguf_llama.config(file)
    return gguf_llama.build(file, config, dtype), config


def decoded(source, tensors):
    """`source` with the float values that its GGUF tensors decode to."""
    weights = []
    for name, _ in tree_flatten(source.parameters()):
        array, kind = tensors[gguf_models.gguf_name(name)]
        data = gguf_writer.encode(array, kind)
        array = gguf_writer.decode(data, kind, array.shape)
        heads = gguf_models.heads_of(source.args, name)
        array = gguf_models.unpermute(array, heads) if heads else array
        weights.append((name, mx.array(array)))
    source.load_weights(weights)
    return source


def assert_same_logits(out, ref):
    out, ref = np.array(out), np.array(ref)
    assert np.isfinite(ref).all() and ref.std() > 0.1
    # Scales are float16, so a code times its scale rounds to about 2^-11.
    np.testing.assert_allclose(out, ref, rtol=0, atol=2e-3 * np.abs(ref).max())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", gguf_writer.TYPES)
def test_logits_equal_the_source_model(tmp_path, kind, tied):
    source = gguf_models.model(tied)
    tensors = typed(gguf_models.tensors(source), kind)
    model, config = build(tmp_path / "m.gguf", gguf_models.metadata(source), tensors)
    assert config["tie_word_embeddings"] is tied
    ref = decoded(source, tensors)(IDS)
    assert_same_logits(model(IDS), ref)
    if kind == "F32":
        np.testing.assert_allclose(np.array(model(IDS)), np.array(ref), atol=1e-4)


def test_each_layer_keeps_its_own_bits(tmp_path):
    source = gguf_models.model(tied=False)
    tensors = typed(gguf_models.tensors(source), "Q4_1")
    for name, kind in (
        ("token_embd.weight", "Q8_0"),
        ("blk.0.ffn_down.weight", "F16"),
        ("blk.1.attn_v.weight", "Q4_0"),
        ("output.weight", "Q8_0"),
    ):
        tensors[name] = (tensors[name][0], kind)
    model, config = build(tmp_path / "m.gguf", gguf_models.metadata(source), tensors)
    embedding, blocks = model.model.embed_tokens, model.model.layers
    assert isinstance(embedding, nn.QuantizedEmbedding) and embedding.bits == 8
    assert isinstance(blocks[0].mlp.down_proj, nn.Linear)
    assert blocks[1].self_attn.v_proj.bits == 4
    assert isinstance(model.lm_head, nn.QuantizedLinear) and model.lm_head.bits == 8
    assert config["quantization"]["lm_head"]["bits"] == 8
    assert "model.layers.0.mlp.down_proj" not in config["quantization"]
    assert_same_logits(model(IDS), decoded(source, tensors)(IDS))


@pytest.mark.parametrize(
    "kind, dtype",
    [("Q4_1", mx.float16), ("F16", mx.float16), ("BF16", mx.bfloat16)],
)
def test_file_decides_dtype(tmp_path, kind, dtype):
    source = gguf_models.model()
    tensors = typed(gguf_models.tensors(source), kind)
    metadata = gguf_models.metadata(source)
    model, _ = build(tmp_path / "m.gguf", metadata, tensors, dtype=None)
    floats = {a.dtype for _, a in tree_flatten(model.parameters())} - {mx.uint32}
    assert floats == {dtype} and model(IDS).dtype == dtype


def test_bf16_keeps_its_range(tmp_path):
    big = np.full((2, 32), 1e9, np.float32)
    path = gguf_writer.write(tmp_path / "m.gguf", {}, {"a.weight": (big, "BF16")})
    array = gguf.arrays(gguf.read(path))["a.weight"]
    assert array.dtype == mx.bfloat16
    np.testing.assert_allclose(np.array(array.astype(mx.float32)), big, rtol=0.01)


@pytest.mark.parametrize("name", gguf_writer.K_QUANTS)
def test_k_quants(tmp_path, name):
    raw, values = gguf_writer.random_k_quant(name, rows=3)
    path = gguf_writer.write(tmp_path / "m.gguf", {}, {"a.weight": raw})
    file = gguf.read(path)
    assert file.tensors["a.weight"].type == name
    array = (loaded := gguf.arrays(file))["a.weight"]
    if name == "Q4_K":
        scales, biases = loaded["a.scales"], loaded["a.biases"]
        array = mx.dequantize(array, scales, biases, group_size=32, bits=4)
        np.testing.assert_allclose(np.array(array), values, rtol=0, atol=1e-6)
        return
    array = np.array(array.astype(mx.float32))
    np.testing.assert_allclose(array, values, rtol=2e-3, atol=2e-3)


def test_biases_and_odd_head_dim(tmp_path):
    source = gguf_models.model(attention_bias=True, mlp_bias=True, head_dim=32)
    tensors = typed(gguf_models.tensors(source), "F32")
    metadata = gguf_models.metadata(source, llama__attention__key_length=32)
    model, config = build(tmp_path / "m.gguf", metadata, tensors)
    assert config["attention_bias"] and config["head_dim"] == 32
    np.testing.assert_allclose(
        np.array(model(IDS)), np.array(source(IDS)), rtol=0, atol=1e-4
    )


def test_rope_scaling(tmp_path):
    linear = {"type": "linear", "factor": 4.0}
    source = gguf_models.model(rope_scaling=linear)
    tensors = typed(gguf_models.tensors(source), "F32")
    more = {
        "llama__rope__scaling__type": "linear",
        "llama__rope__scaling__factor": 4.0,
    }
    metadata = gguf_models.metadata(source, **more)
    model, _ = build(tmp_path / "m.gguf", metadata, tensors)
    ref = np.array(source(IDS))
    np.testing.assert_allclose(np.array(model(IDS)), ref, rtol=0, atol=1e-4)
    plain, _ = build(tmp_path / "p.gguf", gguf_models.metadata(source), tensors)
    assert np.abs(np.array(plain(IDS)) - ref).max() > 1e-2


def test_rope_factors_of_llama3(tmp_path):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
    scaling.update(high_freq_factor=4.0, original_max_position_embeddings=64)
    source = gguf_models.model(rope_scaling=scaling)
    rope = source.model.layers[0].self_attn.rope
    assert isinstance(rope, Llama3RoPE)
    base = source.args.rope_theta ** (np.arange(0, 16, 2) / 16)
    factors = (np.array(rope._freqs) / base).astype(np.float32)
    assert factors.max() > 4
    tensors = typed(gguf_models.tensors(source), "F32")
    tensors["rope_freqs.weight"] = (factors, "F32")
    model, _ = build(tmp_path / "m.gguf", gguf_models.metadata(source), tensors)
    np.testing.assert_allclose(
        np.array(model(IDS)), np.array(source(IDS)), rtol=0, atol=1e-4
    )


# --- broken files -------------------------------------------------------------


def whole(tmp_path, change=None, drop=(), extra=None, **more):
    """Load a tiny F32 file after `change(metadata, tensors)`; all three stages."""
    source = gguf_models.model(tied=False)
    metadata = {**gguf_models.metadata(source), **(extra or {})}
    tensors = typed(gguf_models.tensors(source), "F32")
    for name in drop:
        (metadata if name in metadata else tensors).pop(name)
    if change:
        change(metadata, tensors)
    path = gguf_writer.write(tmp_path / "m.gguf", metadata, tensors, **more)
    file = gguf.read(path)
    config = gguf_llama.config(file)
    gguf_tokenizer.build(file, config["vocab_size"])
    return gguf_llama.build(file, config, mx.float32)


def test_whole_loads(tmp_path):
    assert whole(tmp_path)(IDS).shape == (1, 7, 288)


def _raw(type_id, columns=64):
    return lambda _, t: t.update(
        {"output.weight": (type_id, (288, columns), b"\0" * 9)}
    )


@pytest.mark.parametrize(
    "message, arguments",
    [
        ("not a GGUF file.*b'GGML'", {"magic": b"GGML"}),
        ("version 1 is not supported", {"version": 1}),
        ("version 50331648 .*big-endian", {"version": 3 << 24}),
        ("'output.weight' has type Q5_1, which is not", {"change": _raw(7)}),
        ("'output.weight' has type IQ4_XS", {"change": _raw(23)}),
        ("has type number 77", {"change": _raw(77)}),
        ("rows of 40 elements are no multiple of the 32", {"change": _raw(2, 40)}),
        ("'output.weight' ends at byte", {"change": _raw(8)}),
        ("'general.architecture' is missing", {"drop": ["general.architecture"]}),
        ("'llama.block_count' is missing", {"drop": ["llama.block_count"]}),
        ("'tokenizer.ggml.merges' is missing", {"drop": ["tokenizer.ggml.merges"]}),
        ("architecture 'mamba' is not", {"extra": {"general.architecture": "mamba"}}),
        ("'output_norm.weight' is missing", {"drop": ["output_norm.weight"]}),
        ("layers.1.mlp.up_proj.weight is missing", {"drop": ["blk.1.ffn_up.weight"]}),
        ("says 3 layers, the file has", {"extra": {"llama.block_count": 3}}),
        ("expected int", {"extra": {"llama.block_count": "two"}}),
        ("head_dim 21 with", {"extra": {"llama.attention.head_count": 3}}),
        ("attn_k.weight' has shape", {"extra": {"llama.attention.head_count_kv": 1}}),
        ("rope scaling 'yarn'", {"extra": {"llama.rope.scaling.type": "yarn"}}),
        ("mixture-of-experts", {"extra": {"llama.expert_count": 8}}),
        ("one part of a split", {"extra": {"split.count": 2}}),
        ("tokenizer model 'llama'", {"extra": {"tokenizer.ggml.model": "llama"}}),
        ("pre-split 'tekken'", {"extra": {"tokenizer.ggml.pre": "tekken"}}),
        ("merge 0 .'q zz'.", {"extra": {"tokenizer.ggml.merges": ["q zz"]}}),
        ("is 999, not one of", {"extra": {"tokenizer.ggml.eos_token_id": 999}}),
        ("general.alignment is 12", {"extra": {"general.alignment": 12}}),
        ("array of nested arrays", {"extra": {"a.b": [[1], [2]]}}),
    ],
)
def test_broken_file_says_what_is_wrong(tmp_path, message, arguments):
    arguments = dict(arguments)
    if message.startswith("head_dim 21"):
        arguments["extra"] = {**arguments["extra"], "llama.rope.dimension_count": 16}
    with pytest.raises(ModelError, match=message) as info:
        whole(tmp_path, **arguments)
    assert "m.gguf" in str(info.value)


def test_tensor_that_has_no_place(tmp_path):
    extra = (np.ones((4, 4), np.float32), "F32")
    with pytest.raises(ModelError, match="blk.0.attn_q_norm.weight.*not part"):
        whole(tmp_path, lambda _, t: t.update({"blk.0.attn_q_norm.weight": extra}))


def test_unreadable_and_empty_files(tmp_path):
    with pytest.raises(ModelError, match="cannot read"):
        gguf.read(tmp_path / "absent.gguf")
    (tmp_path / "empty.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match="0 bytes are too few"):
        gguf.read(tmp_path / "empty.gguf")


def small_file():
    metadata = {"general.architecture": "llama", "a": [1, 2], "b": ["x", "y"], "c": 2.0}
    tensors = {"t.weight": (np.ones((2, 32), np.float32), "Q8_0")}
    return gguf_writer.build(metadata, tensors)


def test_truncated_anywhere(tmp_path):
    data, path = small_file(), tmp_path / "t.gguf"
    path.write_bytes(data)
    assert gguf.read(path).metadata["b"] == ["x", "y"]
    padding = -(2 * 34) % gguf_writer.ALIGNMENT
    for length in range(len(data) - padding - 1, -1, -1):
        path.write_bytes(data[:length])
        with pytest.raises(ModelError, match="truncated|too few"):
            gguf.read(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(4, 200), st.binary(min_size=1, max_size=8))
def test_damaged_header_never_crashes(tmp_path, at, junk):
    data = bytearray(small_file())
    data[at : at + len(junk)] = junk
    path = tmp_path / "f.gguf"
    path.write_bytes(data)
    try:
        mx.eval(gguf.arrays(gguf.read(path)))
    except ModelError as error:
        assert str(path) in str(error)


def test_huge_counts_are_refused_at_once(tmp_path):
    path = tmp_path / "h.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**63, 2**63) + b"\0" * 64)
    with pytest.raises(ModelError, match="corrupted"):
        gguf.read(path)
