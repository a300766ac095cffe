"""What is in a model: its matmul layers, what each computes, why one is left."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx
import mlx.nn as nn

from .arguments import DTYPES, check_quantized, defaults
from .layers import PLAIN, QUANTIZED
from .plan import supports
from .problem import Matmul


def named(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of a model with their dotted paths, layers in order."""
    # A module shared by two parents is one layer.
    seen: dict[int, tuple[str, nn.Module]] = {}
    for path, module in model.named_modules():
        seen.setdefault(id(module), (path or "(the model)", module))
    return sorted(seen.values(), key=lambda item: _natural(item[0]))


def _natural(path: str) -> list[tuple[bool, int, str]]:
    # layers.2 before layers.10
    parts = path.split(".")
    return [(not p.isdigit(), int(p) if p.isdigit() else 0, p) for p in parts]


def activations_of(modules: list[tuple[str, nn.Module]]) -> mx.Dtype:
    """The dtype a model likely computes in: its embedding's, else the commonest."""
    found = Counter()
    for _, m in modules:
        for key in ("scales", "weight", "bias"):
            a = m.get(key)
            if isinstance(a, mx.array) and a.dtype in DTYPES:
                if isinstance(m, (nn.Embedding, nn.QuantizedEmbedding)):
                    return a.dtype
                found[a.dtype] += 1
    return found.most_common(1)[0][0] if found else mx.float32


def format_of(m: nn.Module) -> str:
    """A layer's weights in a few words."""
    weight, scales = m.get("weight"), m.get("scales")
    dtype = getattr(scales if scales is not None else weight, "dtype", None)
    shape = "x".join(map(str, getattr(weight, "shape", ())))
    text = str(dtype).removeprefix("mlx.core.")
    if scales is None:
        return f"{text} {shape}"
    mode = getattr(m, "mode", "affine")
    group, bits = getattr(m, "group_size", "?"), getattr(m, "bits", "?")
    if None in (group, bits):
        # Layers of experts keep what `nn.quantize` was given.
        group, bits = defaults(mode, group, bits)
    return f"{mode} {bits}-bit g{group} {text} scales"


def problem_of(m: nn.Module, activations: mx.Dtype) -> Matmul | str:
    """The M = 1 problem of a layer, or a sentence why the kernels do not take it."""
    weight = m["weight"]
    if weight.ndim != 2:
        return f"{weight.ndim}-D weights: the kernels take one matrix"
    if m.get("scales") is None:
        if weight.dtype not in DTYPES:
            return f"weights are {weight.dtype}"
        n, k = weight.shape
        dtype = DTYPES[weight.dtype]
        problem = Matmul(1, n, k, dtype, 8 * weight.itemsize, 0, "none")
        return supports(problem) or problem
    scales, biases = m["scales"], m.get("biases")
    dtype = scales.dtype if m.mode == "affine" else activations
    k = weight.shape[-1] * 32 // m.bits
    try:
        group_size, bits = defaults(m.mode, m.group_size, m.bits)
        x = mx.zeros((1, k), dtype)
        check_quantized(x, weight, scales, biases, True, group_size, bits, m.mode)
    except (TypeError, ValueError) as e:
        return str(e)
    if biases is not None and biases.dtype != scales.dtype:
        return f"scales are {scales.dtype} but biases {biases.dtype}"
    dtype = DTYPES.get(dtype, str(dtype))
    problem = Matmul(1, weight.shape[0], k, dtype, bits, group_size, m.mode)
    return supports(problem) or problem


def why_left(m: nn.Module, linear: bool | str) -> str | None:
    """Why a matmul layer stays stock by its class; None if it is no such layer."""
    name = type(m).__name__
    if not isinstance(m.get("weight"), mx.array):
        return None
    for stock in (*QUANTIZED, *PLAIN):
        if isinstance(m, stock) and type(m) is not stock:
            return f"{name} is a subclass of {stock.__name__}: only exact types"
    if type(m) in QUANTIZED:
        return "linear=False"
    if type(m) in PLAIN:
        return 'plain weights: pass linear="all"' if linear else "linear=False"
    if m.get("scales") is not None or "Linear" in name:
        return f"{name}: no kernel for this class"
    return None
