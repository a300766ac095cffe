"""Gated MLPs outside fused blocks: gate, up and the activation in one launch.

A model whose blocks are not fused, or whose steps are not traced, has them still. Rows
keep their bits for every M: a launch that is off is off for all M of its module.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from .block_launch import TOLERANCE, Memo, glu
from .block_match import activation_of, far, glu_names
from .layers import PhaseQuantizedLinear
from .parents import _Parent, adopt_parent, release_parent
from .routes import counted
from .traced import ERRORS

# Rows of x that are compared with stock, beside one that goes far.
ROWS = (1, 3)
# What else is set in a module than what it computes with.
_STATE = ("_training", "_no_grad", "__class__")


class Gated(_Parent):
    """Mixed into an MLP's class by :func:`gate_parent`."""

    _gate: str
    _memo: Memo
    _off: bool

    def _compute(self, x: mx.array) -> mx.array:
        names, down = glu_names(self), self["down_proj"]
        training = any(m._train for m in self.children().values())
        if self._off or training or x.dtype != self[names[0]]["scales"].dtype:
            return super()._compute(x)
        g = glu(self._memo, self, names, self._gate, x)
        if g is not None:
            return down(g)
        if down._exact:
            self._lost()
        return super()._compute(x)

    def _lost(self) -> None:
        # Layers add up otherwise: no M may take the launch, until the next patch.
        if self["down_proj"]._exact:
            object.__setattr__(self, "_off", True)
            self._memo.clear()
        super()._lost()

    def pop(self, *args):
        value = super().pop(*args)
        # nn.Module also calls it for each plain attribute that is set, such as an
        # activation that is a function.
        if args[0] not in _STATE and "_stock" in self.__dict__:
            release_parent(self)
        return value


def gate_parent(mlp: nn.Module, activation: str) -> None:
    """Have a traced MLP launch its gate, up and ``activation`` together."""
    release_parent(mlp)
    adopt_parent(mlp, list(mlp.children().values()), Gated)
    for name, value in (("_gate", activation), ("_memo", Memo()), ("_off", False)):
        object.__setattr__(mlp, name, value)


def judge(mlp: nn.Module, check: bool) -> str | None:
    """The activation of a traced MLP if a launch gives what its own code gives.

    Compared with one row of x, with check with three too, and one that goes far.
    """
    names, layers = glu_names(mlp), mlp.children().values()
    if not names or any(type(m) is not PhaseQuantizedLinear for m in layers):
        return None
    gate = mlp[names[0]]
    if gate.mode != "affine":
        return None  # no launch takes it
    K, dtype = gate["weight"].shape[1] * 32 // gate.bits, gate["scales"].dtype
    xs = [mx.random.normal((n, K), dtype, key=mx.random.key(n)) for n in ROWS]
    try:
        with counted():
            activation = activation_of(mlp, names, K, dtype)
            if activation is None:
                return None
            rows = [far(gate, xs[0]), *xs[: 1 + check]]
            alike = [_agrees(mlp, names, activation, x) for x in rows]
    except ERRORS:
        return None
    mlp._traces.clear()
    return activation if all(alike) else None


def _agrees(mlp: nn.Module, names: tuple, activation: str, x: mx.array) -> bool:
    if (g := glu(Memo(), mlp, names, activation, x)) is None:
        return False
    both = mlp["down_proj"](g), mlp._stock.__call__(mlp, x)
    ours, stock = (y.astype(mx.float32) for y in both)
    size = (stock * stock).sum(-1)
    off = mx.sqrt(((ours - stock) ** 2).sum(-1) / size).max().item()
    # Rounding is in no direction, so that a factor shows.
    factor = mx.abs((ours * stock).sum(-1) / size - 1).max().item()
    return off <= TOLERANCE[x.dtype] and factor <= TOLERANCE[x.dtype] / 8
