"""Hooks on the two functions through which mlx-lm models attend, and who uses them.

`mx.fast.scaled_dot_product_attention` and mlx-lm's quantised twin are looked up at each
call, so replacing them reaches every model file. The hooks act only inside calls of
modules that `mark` marked, in the thread of that call; to all others they are the stock
function. A third notes what mlx-lm's speculative loop does not see (`rollback.py`). The
last `unmark` puts the very same stock functions back. (Models that were dropped while
patched leave hooks that pass everything on, until the next `unmark`.)
"""

from __future__ import annotations

import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable
from weakref import WeakValueDictionary

import mlx.core as mx
import mlx.nn as nn

from . import rollback
from .attention_ops import attend, by_blocks
from .class_swap import restored
from .layers import TRAINING
from .parents import adopted_parent, release_parent
from .plan_attention import MAX_Q_LEN
from .routes import stock_route

ATTENTION = "scaled_dot_product_attention"
QUANTIZED = "quantized_scaled_dot_product_attention"
BASE, GENERATE = "mlx_lm.models.base", "mlx_lm.generate"
OFF, ON, TRAIN = 0, 1, 2


class _Here(threading.local):
    """Whether this thread is inside a marked module's call."""

    state = OFF


_here = _Here()


class _Hook:
    """One function of one module, replaced while any module is marked; anywhere: also
    outside of calls of marked modules."""

    def __init__(self, name: str, serve: Callable, anywhere: bool = False):
        self.name, self.serve, self.anywhere = name, serve, anywhere
        self.stock: Callable | None = None
        self.function: Callable | None = None

    def install(self, owner: types.ModuleType) -> None:
        """Put the hook in, unless it is there or another package wrapped it."""
        now = getattr(owner, self.name)
        if now is self.function or (self.function and now is not self.stock):
            return
        self.stock, serve, anywhere = now, self.serve, self.anywhere

        @functools.wraps(now)
        def function(*args, **kwargs):
            if anywhere:
                return serve(now, *args, **kwargs)
            state = _here.state
            if state == OFF:
                return now(*args, **kwargs)
            # Whatever serves may call this function: not a call of the model's.
            _here.state = OFF
            try:
                return serve(state, now, *args, **kwargs)
            finally:
                _here.state = state

        self.function = function
        setattr(owner, self.name, function)

    def remove(self, owner: types.ModuleType) -> None:
        """Put stock back. A wrapper that came later stays, and so does the hook."""
        if self.function is not None and getattr(owner, self.name) is self.function:
            setattr(owner, self.name, self.stock)
            self.stock = self.function = None


def _fast(state, stock, q, k, v, *, scale, mask=None, sinks=None, **options):
    if state == TRAIN:
        stock_route(TRAINING).calls += 1
    elif any(options.values()):
        stock_route(f"attention with {', '.join(options)}").calls += 1
    else:
        o = attend(q, k, v, scale=scale, mask=mask, sinks=sinks)
        if o is not None:
            return o
    return stock(q, k, v, scale=scale, mask=mask, sinks=sinks, **options)


def _quantized(
    state, stock, queries, q_keys, q_values, scale, mask, group_size=64, bits=8
):
    arrays = queries, q_keys, q_values
    options = {"scale": scale, "mask": mask, "group_size": group_size, "bits": bits}
    if state == TRAIN:
        stock_route(TRAINING).calls += 1
    else:
        o = attend(*arrays, **options)
        if o is not None:
            return o
        if queries.shape[2] > MAX_Q_LEN:
            return by_blocks(*arrays, **options)
    return stock(*arrays, **options)


_HOOKS = {
    "mlx.core.fast": _Hook(ATTENTION, _fast),
    BASE: _Hook(QUANTIZED, _quantized),
    GENERATE: _Hook("trim_prompt_cache", rollback.noted, anywhere=True),
}
# Modules that are marked now, copies too; one that is dropped leaves by itself.
_MARKED: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()


def _owners() -> list[tuple[types.ModuleType, _Hook]]:
    # Not imported means that no model of mlx-lm is there.
    found = {"mlx.core.fast": mx.fast}
    found |= {name: sys.modules.get(name) for name in (BASE, GENERATE)}
    return [(owner, _HOOKS[name]) for name, owner in found.items() if owner]


def _is_cache(a: object) -> bool:
    return hasattr(a, "is_trimmable")


class _Marked:
    """Mixed into the class of a module whose calls may use the kernels."""

    _stock: type
    # As for drop-in layers, what counts is train() after the patch.
    _train = False

    def __call__(self, *args, **kwargs):
        if rollback.OWED:
            # Whatever it is called: a layer's own cache.
            rollback.refuse([a for a in (*args, *kwargs.values()) if _is_cache(a)])
        before = _here.state
        _here.state = TRAIN if self._train else ON
        try:
            return super().__call__(*args, **kwargs)
        finally:
            _here.state = before

    def _set_training_mode(self, mode: bool) -> None:
        super()._set_training_mode(mode)
        object.__setattr__(self, "_train", bool(mode))

    def __reduce_ex__(self, protocol):
        # The class is made here and cannot be found by name.
        return _restore, (self._stock, dict(self), dict(vars(self)))


def _restore(kind: type, items: dict, state: dict) -> nn.Module:
    module = restored(kind, items, state)
    mark(module)
    return module


@functools.cache
def _marked_kind(stock: type) -> type:
    return type(stock.__name__, (_Marked, stock), {"_stock": stock})


def marked(module: nn.Module) -> bool:
    """Whether calls of a module may use the attention kernels."""
    return isinstance(module, _Marked)


def stock_class(module: nn.Module) -> type:
    """A module's class without what this package mixed into it."""
    own = __package__
    return next(k for k in type(module).__mro__ if k.__module__.split(".")[0] != own)


def mark(module: nn.Module) -> None:
    """Have calls of ``module`` use the attention kernels; installs the hooks."""
    if adopted_parent(module):
        release_parent(module)  # a traced call would not pass here
    if not marked(module):
        module.__class__ = _marked_kind(type(module))
    if id(module) not in _MARKED:
        weakref.finalize(module, _sweep).atexit = False
    _MARKED[id(module)] = module
    for owner, hook in _owners():
        hook.install(owner)


def unmark(module: nn.Module) -> None:
    """Give a module its own class back; the last one takes the hooks away."""
    if marked(module):
        module.__class__ = module._stock
        vars(module).pop("_train", None)
        _MARKED.pop(id(module), None)
    _sweep()


def _sweep() -> None:
    """Take the hooks away if no marked module is left, also by being dropped."""
    if not any(True for _ in _MARKED.values()):
        for owner, hook in _owners():
            hook.remove(owner)


def attends(kind: type) -> bool:
    """Whether a class reaches the hooked functions in its own code."""
    return ATTENTION in _names(kind) or QUANTIZED in _names(kind)


def attends_by_hand(kind: type) -> bool:
    """Whether a class has attention of its own: a softmax, and attention in a name."""
    names = _names(kind)
    said = "attention" in kind.__name__.lower() or any("att_" in n for n in names)
    return said and "softmax" in names and not attends(kind)


@functools.cache
def _names(kind: type) -> frozenset[str]:
    """Names in the methods of a class and in the functions of its file they call."""
    found: set[str] = set()
    todo: list[types.FunctionType] = []
    for base in kind.__mro__:
        if base is nn.Module:
            break
        todo += [f for f in vars(base).values() if isinstance(f, types.FunctionType)]
    seen = set()
    while todo:
        function = todo.pop()
        if function in seen:
            continue
        seen.add(function)
        names = _of_code(function.__code__)
        found |= names
        near = (function.__globals__.get(name) for name in names)
        todo += [
            f
            for f in near
            if isinstance(f, types.FunctionType) and f.__module__ == function.__module__
        ]
    return frozenset(found)


def _of_code(code: types.CodeType) -> set[str]:
    # Nested functions and comprehensions are constants of the code.
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*map(_of_code, inner))
