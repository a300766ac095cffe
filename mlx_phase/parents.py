"""Modules that only chain drop-ins, such as an MLP: their call is traced once.

A decode step is bound by the host, and most of that time builds the graph. Where a
module's output is a function of x alone, one traced call replaces the Python of its
layers and activations.
"""

from __future__ import annotations

import ast
import weakref
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

from .class_swap import copied, mixed, swap_back
from .ops import Route, counted
from .plan import MAX_M
from .siblings import call_tree

# What may stand in a traced __call__: expressions and local names, nothing that
# reads or changes state outside.
_ALLOWED = (
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign,
    ast.Expr, ast.Call, ast.Name, ast.Attribute, ast.BinOp, ast.UnaryOp, ast.operator,
    ast.unaryop, ast.Constant, ast.Load, ast.Store, ast.Tuple, ast.Subscript,
    ast.keyword, ast.Slice,
)  # fmt: skip


def is_pure(kind: type) -> bool:
    """Whether ``kind.__call__(self, x)`` computes from x and its layers alone.

    Read from the source: only calls, operators and local names, and no annotation
    or default beyond x.
    """
    if (tree := call_tree(kind)) is None:
        return False
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return False
    args = function.args
    if len(args.args) != 2 or args.vararg or args.kwarg or args.kwonlyargs:
        return False
    own = args.args[0].arg
    body = [n for statement in function.body for n in ast.walk(statement)]
    places = [n for n in body if isinstance(n, ast.Attribute | ast.Subscript)]
    if any(isinstance(n.ctx, ast.Store) for n in places):
        return False
    random = any(isinstance(n, ast.Attribute) and n.attr == "random" for n in body)
    uses_self = any(isinstance(n, ast.Name) and n.id == own for n in body)
    return uses_self and not random and all(isinstance(n, _ALLOWED) for n in body)


class _Parent:
    """Mixed into a parent's class by :func:`adopt_parent`."""

    _traces: dict[tuple, tuple[Callable, list[Route]]]
    _stock: type

    def __call__(self, x: mx.array) -> mx.array:
        trace = self._traces.get((x.shape, x.dtype)) or self._trace(x)
        if trace is None:  # many rows, or stock serves a layer
            return self._stock.__call__(self, x)
        call, routes = trace
        for route in routes:
            if route.launch is None:
                # A kernel was switched off since: the layers know what to do.
                self._lost()
                return self._stock.__call__(self, x)
            route.calls += 1
        return call(x)

    def _compute(self, x: mx.array) -> mx.array:
        """What a trace holds."""
        return self._stock.__call__(self, x)

    def _lost(self) -> None:
        """A kernel of a trace does not serve any more."""
        self._traces.clear()

    def __setitem__(self, key: str, value) -> None:
        # Another child or weight: what was proved of this module may not hold.
        super().__setitem__(key, value)
        if "_stock" in self.__dict__:
            release_parent(self)

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        self._traces.clear()

    def pop(self, *args):
        # nn.Module also calls it for each plain attribute that is set.
        value = super().pop(*args)
        self._traces.clear()
        return value

    def _trace(self, x: mx.array) -> tuple[Callable, list[Route]] | None:
        if x.size > MAX_M * x.shape[-1] or 0 in x.shape:
            return None
        layers = self.children().values()
        if any(m.__dict__.get("_owner") is not self._traces for m in layers):
            # New weights would not end the trace: a layer went back to stock, or
            # another parent has it too.
            return None
        # Weak: a model that is dropped frees its memory at once.
        stock, me = self._stock, weakref.ref(self)
        # The first call binds the layers and shows who serves.
        with counted() as routes:
            self._compute(x)
        if not routes or any(r.launch is None for r in routes):
            # Remembered, since counting is slow: from now on the layers decide.
            self._traces[x.shape, x.dtype] = lambda x: stock.__call__(me(), x), []
            return None

        def traced(x: mx.array) -> mx.array:
            # Runs once a stream. Calls are counted in __call__, so not here.
            with counted():
                return me()._compute(x)

        trace = self._traces[x.shape, x.dtype] = mx.compile(traced), routes
        return trace

    def __reduce_ex__(self, protocol):
        return copied(self, self._stock, _OWN)


# What `adopt_parent` keeps beside the parameters.
_OWN = ("_traces", "_stock", "_gate", "_memo", "_off")


def adopted_parent(module: nn.Module) -> bool:
    """Whether calls of a module are traced now."""
    return isinstance(module, _Parent)


def adopt_parent(
    parent: nn.Module, layers: list[nn.Module], mixin: type = _Parent
) -> None:
    """Trace calls of ``parent``, whose only layers are the drop-ins ``layers``."""
    stock = type(parent)
    traces: dict = {}
    object.__setattr__(parent, "_traces", traces)
    object.__setattr__(parent, "_stock", stock)
    for layer in layers:
        # New weights or training mode end the traces; those of one parent only.
        if layer._owner is not None:
            layer._owner.clear()
        object.__setattr__(layer, "_owner", traces)
    parent.__class__ = mixed(mixin, stock)


def release_parent(parent: nn.Module) -> None:
    """Give a parent its own class back."""
    swap_back(parent, parent._stock, _OWN)
