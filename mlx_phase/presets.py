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
from importlib import import_module
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from .model_error import ModelError
from .preset_configs import PRESETS

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
        return self.bits in (16, 32)


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
    module = import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    if config["tie_word_embeddings"] and "lm_head" in model:
        model.sanitize({})  # no weights of a head: it is tied
    return model


def _matrices(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding | SwitchLinear):
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
    """A layer of the same shape [N, K], or [experts, N, K], with random weights."""
    *many, N, K = module.weight.shape
    std = 1.0 / math.sqrt(K)
    if options.plain:
        limit = std * math.sqrt(3.0)
        module.weight = mx.random.uniform(
            -limit, limit, module.weight.shape, dtype, key
        )
        return module
    args = {"group_size": options.group, "bits": options.bits, "mode": options.mode}
    if isinstance(module, nn.Embedding):
        result: nn.Module = nn.QuantizedEmbedding(N, K, **args)
    elif isinstance(module, SwitchLinear):
        result = QuantizedSwitchLinear(K, N, *many, bias=False, **args)
    else:
        result = nn.QuantizedLinear(K, N, bias=False, **args)
    if "bias" in module:
        result.bias = module.bias
    key, scale_key = mx.random.split(key)
    words = module.weight.size * options.bits // 32
    # split() returns two random words a key: raw bits, without a float detour.
    packed = mx.random.split(key, (words + 1) // 2).reshape(-1)[:words]
    result.weight = packed.reshape(*many, N, -1)
    shape = (*many, N, K // options.group)
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
