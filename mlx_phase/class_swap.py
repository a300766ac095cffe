"""Classes made at run time: a module's own class with a mixin of this package."""

from __future__ import annotations

from functools import cache, update_wrapper
from types import FunctionType

import mlx.nn as nn


@cache
def mixed(mixin: type, stock: type) -> type:
    """``stock`` with ``mixin`` in front of it, under stock's names and signature."""
    # mlx-lm finds what belongs to a model by the module of its class.
    own = {name: getattr(stock, name) for name in ("__module__", "__qualname__")}
    kinds = map(vars, mixin.__mro__)
    call = next((kind["__call__"] for kind in kinds if "__call__" in kind), None)
    if call is not None:
        # mlx-lm asks for the arguments that a model takes: each class has its own.
        parts = call.__code__, call.__globals__, None, call.__defaults__
        copy = FunctionType(*parts, call.__closure__)
        own["__call__"] = update_wrapper(copy, stock.__call__)
    return type(stock.__name__, (mixin, stock), own)


def restored(kind: type, items: dict, state: dict) -> nn.Module:
    """A module from what was copied or pickled; made classes have no name to find."""
    module = kind.__new__(kind)
    dict.update(module, items)
    module.__dict__.update(state)
    return module


def copied(module: nn.Module, stock: type, own: tuple[str, ...]) -> tuple:
    """For ``__reduce_ex__``: a copy is of class ``stock``, without ``own`` names."""
    state = {k: v for k, v in module.__dict__.items() if k not in own}
    return restored, (stock, dict(module), state)


def train_along(module: nn.Module) -> None:
    """Put a mixin of ``module`` in the training mode of those inside it.

    Modules are made in training mode, so mixins note calls of ``train`` and ``eval``
    in ``_train``; a new one has heard of none.
    """
    if any(getattr(m, "_train", False) for m in module.modules()):
        object.__setattr__(module, "_train", True)


def swap_back(module: nn.Module, stock: type, own: tuple[str, ...]) -> None:
    """Give a module its class back and drop the mixin's ``own`` attributes."""
    module.__class__ = stock
    for name in own:
        module.__dict__.pop(name, None)
