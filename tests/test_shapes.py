"""Shapes read from a config against the modules that mlx-lm builds from it."""

import importlib
from collections import Counter

import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchLinear

from mlx_phase.model_error import ModelError
from mlx_phase.model_size import bytes_per_token
from mlx_phase.presets import PRESETS, Options, build
from mlx_phase.problem import Attention
from mlx_phase.roofline import weight_bytes
from mlx_phase.shapes import attention, matmuls, model_shapes
from mlx_phase.shapes_config import KINDS

BASE = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 320,
    "vocab_size": 640,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 96, "num_experts": 8}
MIX = {"num_experts_per_tok": 2, "num_local_experts": 8}
QWEN = {
    "decoder_sparse_step": 1, "mlp_only_layers": [1], "norm_topk_prob": True,
    "shared_expert_intermediate_size": 192,
}  # fmt: skip
GRANITE = dict.fromkeys(
    ("logits_scaling", "attention_multiplier", "embedding_multiplier"), 1.0
) | {"residual_multiplier": 1.0, "attention_bias": False, "mlp_bias": False}
# What each family's ModelArgs demand beyond BASE.
MORE = {
    "qwen3": {"head_dim": 48, "tie_word_embeddings": False},
    "ministral3": {
        "head_dim": 48,
        "rope_parameters": {
            "rope_theta": 1e4, "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 4096,
        },
    },
    "smollm3": {"no_rope_layer_interval": 4},
    "granite": GRANITE,
    "seed_oss": {
        "head_dim": 48, "attention_bias": True, "attention_out_bias": False,
        "mlp_bias": False,
    },
    "internlm3": {"bias": False, "qkv_bias": False},
    "olmo3": {"sliding_window": 64},
    "gemma": {"head_dim": 48},
    "gemma2": {"head_dim": 48},
    "gemma3_text": {"head_dim": 48},
    "glm4": {
        "head_dim": 48, "attention_bias": True, "partial_rotary_factor": 0.5,
    },
    "starcoder2": {"norm_epsilon": 1e-5},
    "nemotron": {
        "hidden_act": "relu2", "attention_bias": False, "mlp_bias": False,
        "partial_rotary_factor": 0.5, "norm_eps": 1e-5,
    },
    "mixtral": MIX,
    "qwen2_moe": {**MOE, **QWEN},
    "qwen3_moe": {**MOE, **QWEN, "head_dim": 48, "tie_word_embeddings": True},
    "olmoe": {**MOE, "moe_intermediate_size": None},
    "granitemoe": {**GRANITE, **MIX},
    "gpt_oss": MIX,
}  # fmt: skip


def config(kind: str, **more) -> dict:
    return {"model_type": kind, **BASE, **MORE.get(kind, {}), **more}


def built(c: dict) -> nn.Module:
    """mlx-lm's model; its arrays are never evaluated."""
    name = {"mistral": "llama"}.get(c["model_type"], c["model_type"])
    module = importlib.import_module(f"mlx_lm.models.{name}")
    model = module.Model(module.ModelArgs.from_dict(c))
    if hasattr(model, "sanitize") and name == "gemma3_text":
        # It ties its head when the checkpoint has none, as all published ones.
        model.sanitize({"model.embed_tokens.weight": model.model.embed_tokens.weight})
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_are_those_of_the_model(kind):
    c = config(kind)
    model = built(c)
    real, table = Counter(), None
    for _, m in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module):
        if isinstance(m, nn.Linear | SwitchLinear):
            real[tuple(m.weight.shape)] += 1
        elif isinstance(m, nn.Embedding):
            table = tuple(m.weight.shape)
    shapes = model_shapes(c)
    ours = Counter()
    for w in shapes.weights:
        shape = (w.experts, w.N, w.K) if w.experts else (w.N, w.K)
        ours[shape] += w.count
    if shapes.tied:
        ours[table] -= 1
    assert +ours == real
    assert table == (shapes.vocab, shapes.hidden)


@pytest.mark.parametrize("kind", KINDS)
def test_module_names_of_quantised_layers_are_those_of_the_model(kind):
    c = config(kind)
    names = [
        path
        for path, m in built(c).named_modules()
        if isinstance(m, nn.Linear | nn.Embedding | SwitchLinear)
    ]
    usual = {"bits": 4, "group_size": 32}
    special = {path: {"bits": 8, "group_size": 64} for path in names}
    with_names = model_shapes({**c, "quantization": {**usual, **special}})
    formats = {w.format.bits for w in with_names.weights if w.K % 64 == 0}
    # A name that we spell otherwise would keep the usual 4 bits.
    assert formats == {8} and with_names.embedding.format.bits == 8


@pytest.mark.parametrize("spec", ["affine", "mxfp4", "nvfp4", "plain"])
def test_bytes_are_those_of_a_built_model(spec):
    options = {
        "affine": Options(bits=6, group=32),
        "mxfp4": Options(bits=4, group=32, mode="mxfp4"),
        "nvfp4": Options(bits=4, group=16, mode="nvfp4"),
        "plain": Options(bits=16),
    }[spec]
    model, c = build("tiny", options)
    shapes = model_shapes({**c, "dtype": options.dtype})
    ours = sum(weight_bytes(p) * n for _, p, n in matmuls(shapes, 1))
    norms = sum(m.weight.nbytes for m in model.modules() if isinstance(m, nn.RMSNorm))
    assert ours + norms == bytes_per_token(model)


def test_experts_reached_by_many_rows():
    shapes = model_shapes(config("qwen3_moe", num_experts=64, num_experts_per_tok=4))
    one = {op: p for op, p, _ in matmuls(shapes, 1)}["expert up_proj"]
    assert (one.M, one.batch) == (1, 4)
    many = {op: p for op, p, _ in matmuls(shapes, 512)}["expert up_proj"]
    assert (many.M, many.batch) == (32, 64)
    two = {op: p for op, p, _ in matmuls(shapes, 2)}["expert up_proj"]
    # Two tokens share few of 64 experts: 64 (1 - (60/64)^2) = 7.75.
    assert (two.M, two.batch) == (1, 8)
    some = {op: p for op, p, _ in matmuls(shapes, 16)}["expert up_proj"]
    # 64 uses of 41 experts: 1.56 rows each, rounded up.
    assert (some.M, some.batch) == (2, 41)


def test_prefill_needs_one_row_of_the_head():
    shapes = model_shapes(PRESETS["llama-8b"])
    rows = {op: p.M for op, p, _ in matmuls(shapes, 512, head_rows=1)}
    assert rows["lm_head"] == 1 and rows["q_proj"] == 512


def test_windows_as_mlx_lm_applies_them():
    types = ["sliding_attention", "full_attention"] * 2
    oss = model_shapes(config("gpt_oss", sliding_window=128, layer_types=types))
    assert oss.windows == ((None, 2), (128, 2))
    assert model_shapes(config("gemma3_text", num_hidden_layers=12)).windows == (
        (None, 2),
        (512, 10),
    )
    # mlx-lm has no window for qwen2, and for llama only with layer_types.
    assert model_shapes(config("qwen2", sliding_window=64)).windows == ((None, 4),)
    assert model_shapes(config("mistral", sliding_window=64)).windows == ((None, 4),)


def test_attention_of_a_step():
    shapes = model_shapes(PRESETS["llama-8b"])
    expected = Attention(1, 2000, 32, 8, 128, 128, 3, "bfloat16", 8, 32)
    assert attention(shapes, 1, 2000, 3, kv_bits=8, kv_group=32) == [(expected, 32)]
    with pytest.raises(ValueError, match=r"1\.\.k_len = 10, got 11"):
        attention(shapes, 11, 10)


def test_text_config_and_path_prefix_of_multimodal_models():
    inner = config("gemma3_text")
    inner.pop("model_type")
    q = {"bits": 4, "group_size": 64}
    q["language_model.model.layers.0.mlp.up_proj"] = {"bits": 8, "group_size": 64}
    shapes = model_shapes(
        {"model_type": "gemma3", "text_config": inner, "quantization": q}
    )
    counts = {w.format.bits: w.count for w in shapes.weights if "up" in w.operation}
    assert counts == {8: 1, 4: 3}
    assert "gemma3" in shapes.notes[0]


def test_formats_that_other_tools_wrote():
    oss = config("gpt_oss", quantization_config={"quant_method": "mxfp4"})
    by_name = {w.operation: w.format.mode for w in model_shapes(oss).weights}
    assert by_name["expert up_proj"] == "mxfp4" and by_name["q_proj"] == "none"
    awq = config("llama", quantization_config={"quant_method": "awq", "bits": 4})
    shapes = model_shapes({**awq, "tie_word_embeddings": False})
    by_name = {w.operation: w.format for w in shapes.weights}
    assert by_name["q_proj"].bits == 4 and by_name["lm_head"].mode == "none"
    # Its K of 320 is not a multiple of 128.
    assert by_name["down_proj"].mode == "none"


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"model_type": "mamba"}, "'mamba' has a structure that is not described"),
        ({"model_type": "qwen4"}, "Did you mean qwen"),
        ({"kv_lora_rank": 512}, "it has kv_lora_rank"),
        ({"hidden_size": "big"}, "hidden_size must be a whole number, not 'big'"),
        ({"vocab_size": None}, "config has no 'vocab_size'"),
        ({"hidden_size": 130}, "not a multiple of 4 heads"),
        ({"torch_dtype": "float8"}, "dtype 'float8' is not one of"),
        ({"quantization": {"bits": 7, "group_size": 64}}, "bits=7, group_size=64"),
        ({"quantization": {"bits": 4}}, "group_size=None"),
        ({"quantization_config": {"quant_method": "exl2"}}, "method 'exl2'"),
        ({"num_attention_heads": 0}, "num_attention_heads must not be 0"),
        ({"intermediate_size": None}, "no intermediate_size"),
    ],
)
def test_bad_configs_get_one_clear_error(change, complaint):
    with pytest.raises(ModelError) as error:
        model_shapes(config("llama") | change)
    assert complaint in str(error.value)


def test_a_dtype_of_transformers_is_read():
    assert model_shapes(config("llama", torch_dtype="float16")).dtype == "float16"
    silent = model_shapes(config("llama"))
    assert silent.dtype == "bfloat16" and "assumed" in silent.notes[0]
