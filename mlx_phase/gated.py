"""Gated MLPs outside fused blocks: gate, up and the activation in one launch.

A model whose blocks are not fused, or whose steps are not traced, has them still. Rows
keep their bits for every M: a launch that is off is off for all M of its module.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from .block_launch import TOLERANCE, Memo, glu
from .block_match import activation_of, glu_names
from .layers import PhaseQuantizedLinear
from .parents import _Parent, adopt_parent, release_parent
from .routes import counted
from .traced import ERRORS

# Rows of x that are compared with stock.
ROWS = (1, 3)


class Gated(_Parent):
    """Mixed into an MLP's class by :func:`gate_parent`."""

    _gate: str | None

    def _compute(self, x: mx.array) -> mx.array:
        down = self["down_proj"]
        if self._gate is None or x.dtype != down["scales"].dtype:
            return super()._compute(x)
        g = glu(self._memo, self, glu_names(self), self._gate, x)
        if g is None:
            self._lost()
            return super()._compute(x)
        return down(g)

    def _lost(self) -> None:
        if self["down_proj"]._exact:
            object.__setattr__(self, "_gate", None)
        super()._lost()

    def pop(self, *args):
        value = super().pop(*args)
        # An activation that is a function is a plain attribute.
        if not args[0].startswith("_") and "_stock" in self.__dict__:
            release_parent(self)
        return value


def gate_parent(mlp: nn.Module, activation: str) -> None:
    """Have a traced MLP launch its gate, up and ``activation`` together."""
    release_parent(mlp)
    adopt_parent(mlp, list(mlp.children().values()), Gated)
    object.__setattr__(mlp, "_gate", activation)
    object.__setattr__(mlp, "_memo", Memo())


def judge(mlp: nn.Module, check: bool) -> str | None:
    """The activation of a traced MLP if a launch gives what its own code gives.

    Compared with one row of x, with check with three too.
    """
    names, layers = glu_names(mlp), mlp.children().values()
    if not names or any(type(m) is not PhaseQuantizedLinear for m in layers):
        return None
    gate = mlp[names[0]]
    K, dtype = gate["weight"].shape[1] * 32 // gate.bits, gate["scales"].dtype
    try:
        activation = activation_of(mlp, names, K, dtype)
        rows = ROWS[: 1 + check] if activation else ()
        alike = [_agrees(mlp, names, activation, n, K, dtype) for n in rows]
    except ERRORS:
        return None
    return activation if alike and all(alike) else None


def _agrees(
    mlp: nn.Module, names: tuple, activation: str, rows: int, K: int, dtype: mx.Dtype
) -> bool:
    x = mx.random.normal((rows, K), dtype, key=mx.random.key(rows))
    with counted():
        if (g := glu(Memo(), mlp, names, activation, x)) is None:
            return False
        both = mlp["down_proj"](g), mlp._stock.__call__(mlp, x)
    ours, stock = (y.astype(mx.float32) for y in both)
    off = mx.linalg.norm(ours - stock) / mx.linalg.norm(stock)
    return off.item() <= TOLERANCE[dtype]
