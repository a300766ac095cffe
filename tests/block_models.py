"""Tiny random models of many families, for tests of whole decode steps."""

import importlib

import mlx.core as mx
import mlx.nn as nn

SHAPE = {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 192}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 96}
SHAPE |= {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 512}
SHAPE |= {"head_dim": 64, "tie_word_embeddings": True}
WINDOW = {"sliding_window": 12}
EXPERTS = {"num_experts_per_tok": 2}
ROUTED = EXPERTS | {"n_routed_experts": 4, "moe_intermediate_size": 64}
ROUTED |= {"n_shared_experts": 1, "first_k_dense_replace": 1}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA4 = {"rope_theta": 1e4, "rope_type": "default", "llama_4_scaling_beta": 0.1}
LLAMA4 |= {"original_max_position_embeddings": 64}
FAMILIES = {
    "gemma3_text": WINDOW | {"sliding_window_pattern": 2, "query_pre_attn_scalar": 64},
    "gemma": {},
    "phi3": {"partial_rotary_factor": 0.5},
    "gpt_oss": WINDOW | EXPERTS | {"num_local_experts": 4, "rope_scaling": YARN},
    "mixtral": EXPERTS | {"num_local_experts": 4},
    "qwen3_moe": EXPERTS
    | {"num_experts": 4, "decoder_sparse_step": 1, "moe_intermediate_size": 64}
    | {"mlp_only_layers": [1], "norm_topk_prob": True},
    "glm4": {"attention_bias": True, "partial_rotary_factor": 0.5},
    "exaone4": WINDOW | {"sliding_window_pattern": "LG", "rope_scaling": None},
    "deepseek": ROUTED,
    "glm4_moe": ROUTED
    | {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
    | {"rope_scaling": None, "use_qk_norm": True, "attention_bias": True}
    | {"partial_rotary_factor": 0.5, "norm_topk_prob": True},
    "phi": {"partial_rotary_factor": 0.5},
    "gemma2": WINDOW
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    | {"query_pre_attn_scalar": 64},
    "olmo2": {},
    "ministral3": {"layer_types": ["full_attention"] * 2, "rope_parameters": LLAMA4},
    "granite": {"attention_multiplier": 0.1, "embedding_multiplier": 2.0}
    | {"residual_multiplier": 0.5, "logits_scaling": 2.0}
    | {"attention_bias": False, "mlp_bias": False},
}


def family(name: str, dtype=mx.float32, mode="affine", **more) -> nn.Module:
    """A quantised model of a family; nothing in it is 0 or 1 that could be else."""
    mx.random.seed(0)
    module = importlib.import_module(f"mlx_lm.models.{name}")
    args = {"model_type": name} | SHAPE | FAMILIES[name] | more
    m = module.Model(module.ModelArgs.from_dict(args))
    if "lm_head" in m and getattr(m, "tie_word_embeddings", None) is False:
        m.sanitize({})  # ties the head
    for _, layer in m.named_modules():
        for key in ("bias", "weight", "sinks"):
            if key in layer and layer[key].ndim == 1:
                layer[key] = layer[key] + 0.3 * mx.random.normal(layer[key].shape)
    m.set_dtype(dtype)
    if mode == "affine":
        nn.quantize(m, group_size=64, bits=4)
    else:  # MLX makes bfloat16 of such embeddings
        linear = lambda _, layer: type(layer) is nn.Linear  # noqa: E731
        nn.quantize(m, group_size=32, bits=4, mode=mode, class_predicate=linear)
    mx.eval(m.parameters())
    return m
