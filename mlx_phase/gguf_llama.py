"""A llama GGUF as an mlx-lm llama model."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from .gguf import GGUF, QUANTISED, TensorInfo, arrays
from .model_error import ModelError

# GGUF names -> mlx-lm names; a block's own names carry no prefix.
_GLOBAL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_FREQS = "rope_freqs.weight"


class FactorRoPE(nn.Module):
    """Interleaved rotary embedding with one factor per frequency.

    Llama 3.1 and later store their frequency scaling as `rope_freqs.weight`
    (head_dim / 2 divisors), not as metadata.
    """

    def __init__(self, dims: int, base: float, factors: mx.array):
        super().__init__()
        self.dims = dims
        # The underscore keeps it out of parameters(), as in mlx-lm.
        periods = base ** (mx.arange(0, dims, 2, dtype=mx.float32) / dims)
        self._freqs = periods * factors.astype(mx.float32)

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Rotate x [B, heads, L, head_dim]; positions start at `offset`."""
        return mx.fast.rope(
            x,
            self.dims,
            traditional=True,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=self._freqs,
        )


def config(gguf: GGUF) -> dict[str, Any]:
    """The mlx-lm config of a llama GGUF, `quantization` per layer included."""
    architecture = gguf.require("general.architecture", str)
    if architecture != "llama":
        raise ModelError(
            f"{gguf.path}: architecture {architecture!r} is not supported, only "
            "'llama'; use an MLX conversion of the model (a folder or a hub id)"
        )
    if gguf.get("split.count", int, 1) > 1:
        raise ModelError(
            f"{gguf.path}: this is one part of a split model; merge the parts first "
            "(llama-gguf-split --merge)"
        )
    if gguf.get("llama.expert_count", int, 0) > 0:
        raise ModelError(f"{gguf.path}: mixture-of-experts GGUF is not supported")

    hidden = gguf.require("llama.embedding_length", int)
    heads = gguf.require("llama.attention.head_count", int)
    if heads < 1 or hidden < 1:
        raise ModelError(f"{gguf.path}: {heads} heads of a hidden size {hidden}")
    head_dim = gguf.get("llama.attention.key_length", int, hidden // heads)
    rotated = gguf.get("llama.rope.dimension_count", int, head_dim)
    value_dim = gguf.get("llama.attention.value_length", int, head_dim)
    if rotated != head_dim or value_dim != head_dim:
        raise ModelError(
            f"{gguf.path}: head_dim {head_dim} with {rotated} rotated dimensions and "
            f"value length {value_dim}; only equal ones are supported"
        )
    embedding = _tensor(gguf, "token_embd.weight")
    result: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": gguf.require("llama.block_count", int),
        "intermediate_size": gguf.require("llama.feed_forward_length", int),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.get("llama.attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "rms_norm_eps": gguf.require(
            "llama.attention.layer_norm_rms_epsilon", (int, float)
        ),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": gguf.get("llama.context_length", int, None),
        "rope_theta": gguf.get("llama.rope.freq_base", (int, float), 10000.0),
        # GGUF stores the rows of q and k interleaved.
        "rope_traditional": True,
        "rope_scaling": _rope_scaling(gguf),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors,
    }
    layers = {
        _mlx_name(gguf, info.name)[0]: _quantised(info)
        for info in gguf.tensors.values()
        if info.type in QUANTISED
    }
    if layers:
        # As mlx-lm writes it: the usual setting, then every layer by name.
        usual = max(layers.values(), key=list(layers.values()).count)
        result["quantization"] = {**usual, **layers}
    return result


def _tensor(gguf: GGUF, name: str) -> TensorInfo:
    if name not in gguf.tensors:
        raise ModelError(f"{gguf.path}: tensor {name!r} is missing")
    return gguf.tensors[name]


def _quantised(info: TensorInfo) -> dict[str, Any]:
    bits, group_size = QUANTISED[info.type]
    return {"bits": bits, "group_size": group_size, "mode": "affine"}


def _rope_scaling(gguf: GGUF) -> dict[str, Any] | None:
    """mlx-lm's rope_scaling; ModelError for a type that cannot be reproduced."""
    factor = gguf.get("llama.rope.scale_linear", (int, float), 1.0)
    factor = gguf.get("llama.rope.scaling.factor", (int, float), factor)
    default = "linear" if factor not in (0, 1) else "none"
    kind = gguf.get("llama.rope.scaling.type", str, default)
    if kind == "none":
        return None
    if kind != "linear":
        raise ModelError(
            f"{gguf.path}: rope scaling {kind!r} is not supported (supported: none, "
            "linear, factors in rope_freqs.weight); use an MLX conversion of the model"
        )
    if not factor > 0:
        raise ModelError(f"{gguf.path}: rope scaling factor {factor} is not positive")
    return {"type": "linear", "factor": float(factor)}


def _mlx_name(gguf: GGUF, name: str) -> tuple[str, str]:
    """(module path, 'weight' | 'bias') of a GGUF tensor name."""
    match = _NAME.fullmatch(name)
    block, stem, leaf = match.groups() if match else (None, name, "")
    table = _GLOBAL if block is None else _BLOCK
    if match is None or stem not in table:
        raise ModelError(
            f"{gguf.path}: tensor {name!r} is not part of a llama model as this reader "
            "knows it; the model needs something that would be left out"
        )
    prefix = "" if block is None else f"model.layers.{int(block)}."
    return prefix + table[stem], leaf


def build(
    gguf: GGUF, config: dict[str, Any], dtype: mx.Dtype | None = None
) -> llama.Model:
    """The evaluated mlx-lm model, each matrix in the bits that the file gives it.

    `dtype` is that of activations, scales, biases and plain weights; None keeps
    what the file has (float16 where anything is quantised).
    """
    _check_sizes(gguf, config)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    expected = {name: array.shape for name, array in tree_flatten(model.parameters())}
    given = {
        ".".join(_mlx_name(gguf, info.name)): info
        for info in gguf.tensors.values()
        if info.name != _FREQS
    }
    for name in sorted(expected.keys() ^ given.keys()):
        kind = "is missing" if name in expected else "has no place in the model"
        raise ModelError(f"{gguf.path}: {name} {kind} (of {len(expected)} tensors)")
    for name, shape in expected.items():
        _check_shape(gguf, given[name], shape)

    def quantise(path: str, module: nn.Module) -> bool | dict[str, Any]:
        info = given.get(f"{path}.weight")
        return info is not None and info.type in QUANTISED and _quantised(info)

    nn.quantize(model, class_predicate=quantise)
    loaded = arrays(gguf)
    dtype = dtype or _activation_dtype(gguf, loaded)
    weights = []
    for name, info in given.items():
        array = loaded[info.name]
        if info.type not in QUANTISED:
            # One dtype throughout: a float32 norm would make every activation float32.
            weights.append((name, array.astype(dtype)))
            continue
        stem, file_stem = name.removesuffix(".weight"), info.name[: -len(".weight")]
        weights.append((name, array))
        weights += [
            (f"{stem}.{part}", loaded[f"{file_stem}.{part}"].astype(dtype))
            for part in ("scales", "biases")
        ]
    model.load_weights(weights, strict=True)
    if _FREQS in gguf.tensors:
        _use_factors(gguf, model, config, loaded[_FREQS])
    model.eval()
    mx.eval(model.parameters())
    return model


def _check_sizes(gguf: GGUF, config: dict[str, Any]) -> None:
    """Sizes that would break while the model is built, before it is."""
    for key in ("num_hidden_layers", "intermediate_size", "num_key_value_heads"):
        if config[key] < 1:
            raise ModelError(f"{gguf.path}: {key} is {config[key]}")
    layers = {name.split(".")[1] for name in gguf.tensors if name.startswith("blk.")}
    if len(layers) != config["num_hidden_layers"]:
        raise ModelError(
            f"{gguf.path}: metadata says {config['num_hidden_layers']} layers, the "
            f"file has tensors of {len(layers)}"
        )
    if config["num_attention_heads"] % config["num_key_value_heads"]:
        raise ModelError(
            f"{gguf.path}: {config['num_attention_heads']} heads cannot share "
            f"{config['num_key_value_heads']} key/value heads"
        )
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    if head_dim < 2 or head_dim % 2:
        raise ModelError(f"{gguf.path}: head_dim {head_dim} is not an even number")
    shapes = {
        "output_norm.weight": (hidden,),
        "token_embd.weight": (config["vocab_size"], hidden),
        "blk.0.attn_q.weight": (config["num_attention_heads"] * head_dim, hidden),
        "blk.0.attn_k.weight": (config["num_key_value_heads"] * head_dim, hidden),
        "blk.0.ffn_up.weight": (config["intermediate_size"], hidden),
    }
    for name, shape in shapes.items():
        _check_shape(gguf, _tensor(gguf, name), shape)


def _check_shape(gguf: GGUF, info: TensorInfo, shape: tuple[int, ...]) -> None:
    if info.shape != shape:
        raise ModelError(
            f"{gguf.path}: tensor {info.name!r} has shape {info.shape}, the metadata "
            f"asks for {shape}"
        )


def _activation_dtype(gguf: GGUF, loaded: dict[str, mx.array]) -> mx.Dtype:
    """float16 where anything is quantised, else the dtype of the embedding."""
    if any(info.type in QUANTISED for info in gguf.tensors.values()):
        return mx.float16
    return loaded["token_embd.weight"].dtype


def _use_factors(
    gguf: GGUF, model: llama.Model, config: dict[str, Any], factors: mx.array
) -> None:
    """Put the file's rope factors into every layer."""
    head_dim = config["head_dim"]
    if factors.shape != (head_dim // 2,) or config["rope_scaling"] is not None:
        raise ModelError(
            f"{gguf.path}: rope_freqs.weight of shape {factors.shape} with rope "
            f"scaling {config['rope_scaling']}; expected ({head_dim // 2},) and none"
        )
    rope = FactorRoPE(head_dim, config["rope_theta"], factors)
    for layer in model.layers:
        layer.self_attn.rope = rope
