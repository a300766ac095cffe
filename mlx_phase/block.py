"""Decoder blocks in five launches and two cache writes, inside a traced step.

A block is matched by its structure (pre-norm attention, gated MLP) and then compared
with its own stock code on this machine (`step_patch.py`). What one launch does not
cover, such as mxfp4, runs through the block's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention

from .arguments import DTYPES
from .class_swap import copied, mixed, swap_back
from .launch.fused import (
    Rotary,
    prepare_add,
    prepare_glu,
    prepare_qk_norm,
    prepare_qkv,
)
from .launch.matmul import device_chip
from .layers import PhaseQuantizedLinear
from .ops import apart, variant
from .plan import plan_fused, supports_fused
from .problem import Matmul
from .rotary import rotary_of
from .routes import ROUTES, Route, keep_route
from .step_cache import StepCache

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True)
class Fused:
    """What the source of a block does not say in arrays: found when it was patched."""

    activation: str
    rotary: Rotary | None  # None: q and k rotate by the block's own rope
    normed: bool  # q and k have a norm for each head
    heads: int
    kv_heads: int
    head_dim: int
    scale: float


def why_not(block: nn.Module) -> str | None:
    """Why a block has not the structure that is fused; None if it has."""
    attention, mlp = block.get("self_attn"), block.get("mlp")
    if not isinstance(attention, nn.Module) or not isinstance(mlp, nn.Module):
        return "no self_attn and mlp"
    for owner, names in ((attention, ATTENTION), (mlp, MLP)):
        for name in names:
            if type(owner.get(name)) is not PhaseQuantizedLinear:
                return f"{name} is no quantised layer on the kernels"
    for name in NORMS:
        if type(block.get(name)) is not nn.RMSNorm:
            return f"{name} is no nn.RMSNorm"
    extra = set(block.children()) - {"self_attn", "mlp", *NORMS}
    known = {*ATTENTION, "rope", "q_norm", "k_norm"}
    extra |= set(attention.children()) - known
    extra |= set(mlp.children()) - set(MLP)
    if extra:
        return f"also has {', '.join(sorted(extra))}"
    if not callable(attention.get("rope")):
        return "attention without rope"
    return None


def read(block: nn.Module, activation: str) -> Fused:
    """What :func:`step` needs of a block that :func:`why_not` lets pass."""
    attention = block["self_attn"]
    heads, kv_heads = attention.n_heads, attention.n_kv_heads
    D = attention["q_proj"]["weight"].shape[0] // heads
    norms = [attention.get(f"{name}_norm") for name in "qk"]
    rotary = rotary_of(attention["rope"], D)
    if any(norms) and not (
        all(type(n) is nn.RMSNorm for n in norms) and norms[0].eps == norms[1].eps
    ):
        rotary = None
    scale = float(attention.scale)
    return Fused(activation, rotary, any(norms), heads, kv_heads, D, scale)


def _problem(layer: nn.Module, x: mx.array, bias: bool = False) -> Matmul | None:
    """What a layer computes for x; None unless it is affine, of x's dtype and exact."""
    w, scales = layer["weight"], layer["scales"]
    arrays = [scales, layer.get("biases"), *([layer["bias"]] if bias else [])]
    if (not bias and "bias" in layer) or any(
        a is None or a.dtype != x.dtype for a in arrays
    ):
        return None
    K = w.shape[1] * 32 // layer.bits
    M, dtype = x.size // x.shape[-1], DTYPES[x.dtype]
    p = Matmul(M, w.shape[0], K, dtype, layer.bits, layer.group_size, layer.mode)
    # Fused kernels are exact ones: matrix units take the layer alone.
    return None if apart((p,), layer._exact) else p


def _route(
    kernel: str, members: tuple[Matmul | None, ...], make: Callable, *more
) -> Route | None:
    """The route of a fused launch of ``members``; None if it does not take them."""
    if None in members or supports_fused(kernel, members):
        return None
    plan = plan_fused(kernel, members, device_chip())
    return _kept((kernel, members, *more), variant(members[0], plan), make)


def _kept(key: tuple, name: str, make: Callable) -> Route | None:
    route = ROUTES.get(key) or keep_route(key, name, make)
    return route if route.launch is not None else None


def _launch(route: Route, *arrays: mx.array) -> Any:
    route.calls += 1
    return route.launch(*arrays)


def _weights(*layers: nn.Module) -> list[mx.array]:
    return [m[name] for m in layers for name in ("weight", "scales", "biases")]


def _qkv(block, f: Fused, x: mx.array, cache: StepCache) -> Sequence[mx.array]:
    """q, k, v [B, heads, L, D] of x [B, L, hidden], normed and rotated."""
    attention, norm = block["self_attn"], block["input_layernorm"]
    layers = [attention[name] for name in ATTENTION[:3]]
    bias = all("bias" in m for m in layers)
    members = tuple(_problem(m, x, bias) for m in layers)
    rotary = f.rotary and (replace(f.rotary, dims=0) if f.normed else f.rotary)
    make = partial(prepare_qkv, members, rotary, norm.eps, bias)
    route = None
    if rotary is not None and norm["weight"].dtype == x.dtype:
        route = _route("qmv_qkv", members, make, rotary, norm.eps, bias)
    if route is None:
        return _qkv_of_layers(attention, f, norm(x), cache)
    angles = cache.position.angles(attention["rope"], f.rotary)
    biases = [m["bias"] for m in layers] if bias else []
    arrays = (x, norm["weight"], *_weights(*layers), *biases, angles)
    q, k, v = _launch(route, *arrays)
    if f.normed:
        norms, dtype = [attention["q_norm"], attention["k_norm"]], members[0].x_dtype
        key = ("qk_norm", dtype, f.rotary, norms[0].eps)
        name = f"qk_norm {dtype} D={f.head_dim}"
        make = partial(prepare_qk_norm, dtype, f.rotary, norms[0].eps)
        if (route := _kept(key, name, make)) is None:
            return _qkv_of_layers(attention, f, norm(x), cache)
        q, k = _launch(route, q, k, *(n["weight"] for n in norms), angles)
    return q, k, v


def _qkv_of_layers(attention, f: Fused, x: mx.array, cache) -> Sequence[mx.array]:
    B, L, _ = x.shape
    parts = []
    for name, heads in zip("qkv", (f.heads, f.kv_heads, f.kv_heads), strict=True):
        y = attention[f"{name}_proj"](x).reshape(B, L, heads, f.head_dim)
        if f"{name}_norm" in attention:
            y = attention[f"{name}_norm"](y)
        y = y.transpose(0, 2, 1, 3)
        parts.append(y if name == "v" else attention["rope"](y, offset=cache.offset))
    return parts


def _add(layer: nn.Module, x: mx.array, res: mx.array) -> mx.array:
    members = (_problem(layer, x),)
    route = _route("qmv_add", members, partial(prepare_add, *members))
    if route is None:
        return res + layer(x)
    return _launch(route, x, *_weights(layer), res)


def _glu(block, f: Fused, h: mx.array) -> mx.array | None:
    """act(gate) * up of the normed h; None where no launch takes it."""
    norm, layers = block["post_attention_layernorm"], [block["mlp"][n] for n in MLP[:2]]
    if norm["weight"].dtype != h.dtype:
        return None
    members = tuple(_problem(m, h) for m in layers)
    make = partial(prepare_glu, members[0], f.activation, norm.eps)
    route = _route("qmv_glu", members, make, f.activation, norm.eps)
    if route is None:
        return None
    return _launch(route, h, norm["weight"], *_weights(*layers))


def step(
    block: nn.Module, f: Fused, x: mx.array, mask: str | None, cache: StepCache
) -> mx.array:
    """The block's output [B, L, hidden] for a step's x; B * L is 1..16."""
    attention, (B, L, _) = block["self_attn"], x.shape
    q, k, v = _qkv(block, f, x, cache)
    k, v = cache.update_and_fetch(k, v)
    o = scaled_dot_product_attention(q, k, v, cache=cache, scale=f.scale, mask=mask)
    if L > 1:
        o = o.transpose(0, 2, 1, 3)
    h = _add(attention["o_proj"], o.reshape(B, L, -1), x)
    g = _glu(block, f, h)
    if g is None:
        return h + block["mlp"](block["post_attention_layernorm"](h))
    return _add(block["mlp"]["down_proj"], g, h)


class _Block:
    """Mixed into a block's class by :func:`adopt_block`."""

    _fused: Fused
    _unfused: type

    def __call__(self, x, mask=None, cache=None, *args, **options):
        if type(cache) is StepCache and not args and not options:
            # Layers may have been exchanged since, for example by adapters.
            if (mask is None or isinstance(mask, str)) and why_not(self) is None:
                return step(self, self._fused, x, mask, cache)
        return self._unfused.__call__(self, x, mask, cache, *args, **options)

    def __reduce_ex__(self, protocol):
        return copied(self, self._unfused, _OWN)


# What `adopt_block` keeps beside the parameters.
_OWN = ("_fused", "_unfused")


def fused(block: nn.Module) -> bool:
    """Whether traced steps of a block run fused."""
    return isinstance(block, _Block)


def adopt_block(block: nn.Module, found: Fused) -> None:
    """Run ``block`` fused in traced steps."""
    stock = type(block)
    object.__setattr__(block, "_unfused", stock)
    object.__setattr__(block, "_fused", found)
    block.__class__ = mixed(_Block, stock)


def release_block(block: nn.Module) -> None:
    """Give a block its own class back."""
    swap_back(block, block._unfused, _OWN)
