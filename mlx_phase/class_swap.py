"""Classes made at run time: a module's own class with a mixin of this package."""

from __future__ import annotations

from functools import cache

import mlx.nn as nn


@cache
def mixed(mixin: type, stock: type) -> type:
    """``stock`` with ``mixin`` in front of it, under stock's name."""
    return type(stock.__name__, (mixin, stock), {})


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


def swap_back(module: nn.Module, stock: type, own: tuple[str, ...]) -> None:
    """Give a module its class back and drop the mixin's ``own`` attributes."""
    module.__class__ = stock
    for name in own:
        module.__dict__.pop(name, None)
