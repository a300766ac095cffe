"""Which decoder blocks have a structure that is fused, and what of it is where.

No model file is named: modules are told by their names, kinds and shapes, and what a
block computes is compared with its own code before it is fused (`step_patch.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .launch.fused import ACTIVATIONS, Rotary
from .layers import STOCK, PhaseQuantizedLinear
from .rotary import Rope, no_rope, rotary_of
from .routes import counted

ATTENTION = "self_attn"
MLPS = ("mlp", "block_sparse_moe", "feed_forward")
QKV = (("q_proj", "k_proj", "v_proj"), ("qkv_proj",))
GLU = (("gate_proj", "up_proj"), ("gate_up_proj",))
# Norms before and after attention, before and after the MLP.
NORMS = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
)
HEADS = ("n_heads", "num_heads", "num_attention_heads")
KV_HEADS = ("n_kv_heads", "num_kv_heads", "num_key_value_heads")
FUNCTIONS = {name: getattr(nn, name) for name in ACTIVATIONS}
# Some models clip their gates, at 7 or 10.
FAR = 64
SCALES = ("scale", "sm_scale", "softmax_scale")


@dataclass(frozen=True)
class Parts:
    """Names of a block's modules. glu is empty where the MLP computes by itself."""

    norms: tuple[str | None, str | None, str | None, str | None]
    qkv: tuple[str, ...]
    mlp: str
    glu: tuple[str, ...]


@dataclass(frozen=True)
class Fused:
    """What is known of a block when it was patched."""

    parts: Parts
    activation: str | None  # None: the MLP computes by itself
    rotary: Rotary | None  # None: q and k rotate by the block's own rope
    normed: bool  # q and k have a norm for each head
    plus_one: bool  # norms multiply by 1 + weight
    heads: int
    kv_heads: int
    head_dim: int
    scale: float

    @property
    def rows(self) -> list[int]:
        """Rows of the matrices of q, k and v."""
        return [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]


def match(block: nn.Module) -> Parts | str:
    """The parts of a block, or why its structure is none that is fused."""
    children = block.children()
    attention = children.pop(ATTENTION, None)
    mlp_name = next((name for name in MLPS if name in children), None)
    mlp = children.pop(mlp_name, None)
    if not isinstance(attention, nn.Module) or not isinstance(mlp, nn.Module):
        return f"no {ATTENTION} and mlp"
    norms = next((n for n in NORMS if set(children) == {*n} - {None}), None)
    if norms is None:
        return f"its other modules are {', '.join(sorted(children)) or 'none'}"
    if odd := [n for n in children if not _is_norm(block[n])]:
        return f"{odd[0]} is no RMS norm"
    inside = set(attention.children())
    qkv = next((q for q in QKV if {*q} <= inside), None)
    if qkv is None:
        return f"attention without {QKV[0][0]} or {QKV[1][0]}"
    if extra := inside - {*qkv, "o_proj", "rope", "q_norm", "k_norm"} | _arrays(
        attention, "sinks"
    ):
        return f"attention also has {', '.join(sorted(extra))}"
    if extra := _arrays(block):
        return f"also has {', '.join(sorted(extra))}"
    if not callable(rope_of(attention)):
        return "attention whose rope is no module"
    glu = glu_names(mlp)
    if glu and (extra := _arrays(mlp)):
        return f"the MLP also has {', '.join(sorted(extra))}"
    layers = [(attention, name) for name in (*qkv, "o_proj")]
    layers += [(mlp, name) for name in (*glu, "down_proj") if glu]
    for owner, name in layers:
        kind = type(owner.get(name))
        if kind is not PhaseQuantizedLinear:
            kind = STOCK.get(kind, kind).__name__
            return f"{name} ({kind}) is no quantised layer on the kernels"
    return Parts(norms, qkv, mlp_name, glu)


def rope_of(attention: nn.Module) -> Rope:
    """An attention's rotary embedding; layers may be without."""
    rope = attention.get("rope")
    return no_rope if rope is None else rope


def _arrays(module: nn.Module, *known: str) -> set[str]:
    return {k for k, v in module.items() if isinstance(v, mx.array)} - {*known}


def _is_norm(module: nn.Module) -> bool:
    weight, eps = module.get("weight"), getattr(module, "eps", None)
    return (
        isinstance(weight, mx.array)
        and weight.ndim == 1
        and isinstance(eps, float)
        and len(module) == 1
    )


def _adds_one(norm: nn.Module) -> bool | None:
    """Whether a norm multiplies by 1 + weight; None: it is no RMS norm."""
    if type(norm) is nn.RMSNorm:
        return False
    weight = norm["weight"]
    # Other norms take the mean away.
    x = 1 + mx.random.normal((2, weight.size), weight.dtype, key=mx.random.key(0))
    y = norm(x)
    off = {
        adds: _apart(mx.fast.rms_norm(x, weight + adds, norm.eps), y)
        for adds in (False, True)
    }
    return _nearest(off, 0.01)


def _number(module: nn.Module, names: tuple[str, ...]) -> float | None:
    return next((v for n in names if (v := getattr(module, n, None)) is not None), None)


def read(block: nn.Module, parts: Parts) -> Fused | str:
    """What a step needs of a block; or why it has none."""
    attention = block[ATTENTION]
    heads, kv_heads = _number(attention, HEADS), _number(attention, KV_HEADS)
    scale = _number(attention, SCALES)
    if not heads or not kv_heads or not isinstance(scale, int | float):
        return "the numbers of heads or the scale have other names"
    rows = [attention[name]["weight"].shape[0] for name in parts.qkv]
    shares = heads if len(rows) == 3 else heads + 2 * kv_heads
    D = rows[0] // shares
    want = [heads * D, kv_heads * D, kv_heads * D]
    if rows != (want if len(rows) == 3 else [sum(want)]):
        return f"projections of {rows} rows, {heads} and {kv_heads} heads"
    qk = [attention[n] for n in ("q_norm", "k_norm") if n in attention]
    if qk and not (
        len(qk) == 2
        and all(_is_norm(n) and n["weight"].size == D for n in qk)
        and qk[0].eps == qk[1].eps
    ):
        return "its norms of q and k are not one for each head"
    plus = {_adds_one(n) for n in [*qk, *(block[n] for n in parts.norms if n)]}
    if len(plus) > 1 or None in plus:
        return "a norm is no RMS norm, or they differ in kind"
    activation = None
    if parts.glu:
        like = next(block[n]["weight"] for n in parts.norms if n)
        activation = activation_of(block[parts.mlp], parts.glu, like.size, like.dtype)
        if activation is None:
            return f"its activation is none of {', '.join(ACTIVATIONS)}"
    rotary, adds = rotary_of(rope_of(attention), D), plus.pop()
    scale = float(scale)
    return Fused(parts, activation, rotary, bool(qk), adds, heads, kv_heads, D, scale)


def _apart(x: mx.array, y: mx.array) -> float:
    """How far rows of x are from those of y, each in sizes of y's (2-norm), summed."""
    off = mx.linalg.norm(x.astype(mx.float32) - y, axis=-1)
    size = mx.linalg.norm(y.astype(mx.float32), axis=-1)
    return mx.where(off == 0, 0, off / size).sum().item()


def _nearest(off: dict, most: float) -> Any:
    """The key of the least value; None if that is above ``most``, or not a number."""
    best = min(off, key=off.get)
    return best if off[best] <= most else None


def glu_names(mlp: nn.Module) -> tuple[str, ...]:
    """A gated MLP's layers before its down_proj; empty where it is built otherwise."""
    inside = set(mlp.children())
    return next((g for g in GLU if inside == {*g, "down_proj"}), ())


def far(layer: nn.Module, x: mx.array) -> mx.array:
    """x times so much that a layer's outputs reach FAR."""
    return x * (FAR / mx.abs(layer(x)).max())


def activation_of(
    mlp: nn.Module, names: tuple[str, ...], K: int, dtype: mx.Dtype
) -> str | None:
    """What an MLP does to its gate of x [..., K]; None: nothing that is known."""
    x = mx.random.normal((1, K), dtype, key=mx.random.key(1))
    with counted():
        x = mx.concatenate([x, far(mlp[names[0]], x)])
        parts = [mlp[name](x) for name in names]
        gate, up = parts if len(parts) == 2 else mx.split(parts[0], 2, axis=-1)
        y = mlp(x)
        off = {
            name: _apart(mlp["down_proj"](f(gate) * up), y)
            for name, f in FUNCTIONS.items()
        }
    return _nearest(off, 0.05)
