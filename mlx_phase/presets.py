"""Synthetic models: real shapes, seeded random quantised weights, no download.

A spec is `name` or `name:key=value,...`, for example
`llama-8b:bits=6,group=32,dtype=float16`. Keys: bits (2, 3, 4, 5, 6, 8; 16 or 32 =
plain weights), group, mode (affine, mxfp4, mxfp8, nvfp4), dtype (float16,
bfloat16, float32), layers (fewer layers of the same shapes), seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import llama, qwen3

from .model_error import ModelError


def _llama(
    hidden: int, inner: int, layers: int, heads: int, factor: float, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        **more,
    }


def _qwen3(
    hidden: int, inner: int, layers: int, heads: int, tied: bool
) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": tied,
    }


_PLAIN_ROPE: dict[str, Any] = {"rope_scaling": None, "max_position_embeddings": 32768}
# Shapes of the published config.json files; `tiny` is nobody's.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _llama(
        256,
        768,
        4,
        4,
        1.0,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=512,
        tie_word_embeddings=True,
        **_PLAIN_ROPE,
    ),
    "llama-1b": _llama(2048, 8192, 16, 32, 32.0, head_dim=64, tie_word_embeddings=True),
    "llama-3b": _llama(3072, 8192, 28, 24, 32.0, tie_word_embeddings=True),
    "llama-8b": _llama(4096, 14336, 32, 32, 8.0),
    "llama-70b": _llama(8192, 28672, 80, 64, 8.0),
    "mistral-7b": _llama(
        4096,
        14336,
        32,
        32,
        1.0,
        vocab_size=32768,
        **{**_PLAIN_ROPE, "rope_theta": 1000000.0},
    ),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, tied=False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, tied=False),
}
_CLASSES = {"llama": llama, "qwen3": qwen3}
DTYPES = {
    "float16": mx.float16,
    "bfloat16": mx.bfloat16,
    "float32": mx.float32,
}
# mode -> (bits, group sizes), what mx.quantize takes.
_MODES = {
    "affine": ((2, 3, 4, 5, 6, 8), (32, 64, 128)),
    "mxfp4": ((4,), (32,)),
    "mxfp8": ((8,), (32,)),
    "nvfp4": ((4,), (16,)),
}
# Root mean square of the random codes of each floating-point mode.
_CODE_RMS = {"mxfp4": 2.93, "mxfp8": 0.63, "nvfp4": 2.93}


@dataclass(frozen=True)
class Options:
    """How a preset's weights are made; bits 16 or 32 are plain weights."""

    bits: int = 4
    group: int = 64
    mode: str = "affine"
    dtype: str = "bfloat16"
    layers: int = 0
    seed: int = 0

    @property
    def plain(self) -> bool:
        """True where weights are not quantised."""
        return self.bits >= 16


def parse(spec: str, dtype: str = "bfloat16") -> tuple[str, Options]:
    """(preset name, options) of `name:key=value,...`; `dtype` is the default one.

    Raises ModelError that names the bad key or value and lists the good ones.
    """
    name, _, text = spec.partition(":")
    given: dict[str, Any] = {"dtype": dtype}
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not equals or key not in Options.__dataclass_fields__:
            keys = ", ".join(Options.__dataclass_fields__)
            raise ModelError(f"model {spec!r}: bad option {item!r} (options: {keys})")
        if key in ("mode", "dtype"):
            given[key] = value
        elif value.isascii() and value.isdigit():
            given[key] = int(value)
        else:
            raise ModelError(f"model {spec!r}: {key} must be a number, not {value!r}")
    if given.get("mode") in _MODES and given["mode"] != "affine":
        bits, groups = _MODES[given["mode"]]
        given = {"bits": bits[0], "group": groups[0], **given}
    plain = {16: "bfloat16", 32: "float32"}.get(given.get("bits", 0))
    if plain and "dtype=" not in text:
        given["dtype"] = plain
    options = Options(**given)
    _check(spec, options, PRESETS[name])
    return name, options


def _check(spec: str, options: Options, config: dict[str, Any]) -> None:
    choices: dict[str, tuple[Any, ...]] = {
        "mode": tuple(_MODES),
        "dtype": tuple(DTYPES),
        "layers": tuple(range(config["num_hidden_layers"] + 1)),
    }
    if options.mode in _MODES and not options.plain:
        choices["bits"], choices["group"] = _MODES[options.mode]
        if options.mode != "affine":
            # MLX dequantises these embeddings to bfloat16; float16 norms would
            # turn every activation into float32.
            choices["dtype"] = ("bfloat16", "float32")
    elif options.plain:
        choices["bits"] = (8 * DTYPES.get(options.dtype, mx.float16).size,)
    for key, good in choices.items():
        value = getattr(options, key)
        if value not in good:
            listed = ", ".join(map(str, good)) if len(good) < 9 else f"0 to {good[-1]}"
            raise ModelError(f"model {spec!r}: {key}={value} is not one of {listed}")


def model_config(name: str, options: Options) -> dict[str, Any]:
    """The mlx-lm config of a preset, with `quantization` where it is quantised."""
    config = dict(PRESETS[name])
    if options.layers:
        config["num_hidden_layers"] = options.layers
    if not options.plain:
        config["quantization"] = {
            "group_size": options.group,
            "bits": options.bits,
            "mode": options.mode,
        }
    return config


def _skeleton(config: dict[str, Any]) -> nn.Module:
    # Arrays of a fresh module are lazy: never evaluated, they take no memory.
    module = _CLASSES[config["model_type"]]
    return module.Model(module.ModelArgs.from_dict(config))


def _matrices(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            yield path, module


def nbytes(name: str, options: Options) -> int:
    """Bytes of the built model's parameters, without building it."""
    model = _skeleton(model_config(name, options))
    itemsize = DTYPES[options.dtype].size
    total = matrices = 0
    for _, module in _matrices(model):
        size = module.weight.size
        matrices += size
        if options.plain:
            total += size * itemsize
            continue
        affine = options.mode == "affine"
        total += size * options.bits // 8
        total += size // options.group * (2 * itemsize if affine else 1)
    every = sum(array.size for _, array in tree_flatten(model.parameters()))
    return total + (every - matrices) * itemsize


def build(name: str, options: Options) -> tuple[nn.Module, dict[str, Any]]:
    """(model, config) of a preset, evaluated on the default device.

    Packed weights are random bits, never quantised from floats, so memory stays
    at the model's size plus one plain matrix where weights are plain. Scales
    give weights a standard deviation of 1 / sqrt(K): activations stay finite.
    """
    config = model_config(name, options)
    model = _skeleton(config)
    dtype = DTYPES[options.dtype]
    matrices = list(_matrices(model))
    keys = mx.random.split(mx.random.key(options.seed), len(matrices))
    for key, (path, module) in zip(keys, matrices, strict=True):
        filled = _fill(module, key, options, dtype)
        mx.eval(filled.parameters())
        model.update_modules(tree_unflatten([(path, filled)]))
    model.set_dtype(dtype)
    model.eval()
    mx.eval(model.parameters())
    return model, config


def _fill(
    module: nn.Module, key: mx.array, options: Options, dtype: mx.Dtype
) -> nn.Module:
    """A layer of the same shape [N, K] with random weights."""
    N, K = module.weight.shape
    std = 1.0 / math.sqrt(K)
    if options.plain:
        limit = std * math.sqrt(3.0)
        module.weight = mx.random.uniform(-limit, limit, (N, K), dtype, key)
        return module
    args = {"group_size": options.group, "bits": options.bits, "mode": options.mode}
    if isinstance(module, nn.Embedding):
        result: nn.Module = nn.QuantizedEmbedding(N, K, **args)
    else:
        result = nn.QuantizedLinear(K, N, bias=False, **args)
    key, scale_key = mx.random.split(key)
    words = N * K * options.bits // 32
    # split() returns two random words a key: raw bits, without a float detour.
    packed = mx.random.split(key, (words + 1) // 2).reshape(-1)[:words]
    result.weight = packed.reshape(N, -1)
    shape = (N, K // options.group)
    spread = mx.random.uniform(0.5, 1.5, shape, mx.float32, scale_key)
    if options.mode == "affine":
        top = 2**options.bits - 1
        result.scales = (spread * std * math.sqrt(12 / (top * (top + 2)))).astype(dtype)
        result.biases = result.scales * (-top / 2)
        return result
    scale = spread * std / _CODE_RMS[options.mode]
    if options.mode == "nvfp4":
        result.scales = mx.to_fp8(scale)
    else:
        # mx scales are powers of two, stored as exponent + 127.
        result.scales = (mx.round(mx.log2(scale)) + 127).astype(mx.uint8)
    if options.mode == "mxfp8":
        # Clearing the top exponent bit leaves no NaN among the random codes.
        result.weight = result.weight & 0xBFBFBFBF
    return result
