"""Layers that read the same x, such as q, k and v projections, in one launch.

A decode step is bound by its launches. The first of the siblings that is called with
an x computes all of them; the others find their result waiting if they are called
with the very same array object, and compute on their own otherwise.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import weakref

import mlx.core as mx
import mlx.nn as nn

from .arguments import DTYPES
from .ops import Bound, apart, kernel_route
from .plan import MAX_M
from .problem import Matmul

# Names under which model files keep matrices that read the same x.
NAMES = (
    ("q_proj", "k_proj", "v_proj"),
    ("wq", "wk", "wv"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
# Results that nobody fetched, in a row, after which siblings go separate ways.
MAX_UNUSED = 8


class Siblings:
    """Two or three quantised layers with the same x, K, bits and group size."""

    def __init__(self, members: list[nn.Module]):
        # Weak: a model that is dropped frees its memory at once, without a collection.
        self._members = [weakref.ref(m) for m in members]
        # None: each alone, on matrix units.
        self.bound: dict[tuple, Bound | None] = {}
        # [x, results not fetched yet]: replaced as a whole, so threads cannot mix.
        self.waiting: list | None = None
        self.unused = 0

    @property
    def members(self) -> list[nn.Module]:
        """The layers, without those that no longer exist."""
        return [m for ref in self._members if (m := ref()) is not None]

    def take(self, index: int, x: mx.array) -> mx.array | None:
        """Member ``index``'s product with x, or None where it must compute alone."""
        waiting = self.waiting
        if waiting is not None:
            if waiting[0] is x and (y := waiting[1].pop(index, None)) is not None:
                if not waiting[1]:
                    self.waiting, self.unused = None, 0
                return y
            if self._give_up():
                return None
        try:
            bound = self.bound[x.shape, x.dtype]
        except KeyError:
            bound = self._bind(x)
        if bound is None:
            return None
        if bound.route.launch is None:
            # For every M: alone, K is split otherwise, and rows have to stay exact.
            self.separate()
            return None
        bound.route.calls += 1
        ys = dict(enumerate(bound.call(x)))
        y = ys.pop(index)
        self.waiting = [x, ys]
        return y

    def _give_up(self) -> bool:
        self.waiting = None
        self.unused += 1
        if self.unused < MAX_UNUSED:
            return False
        self.separate()
        return True

    def forget(self) -> None:
        """Drop what was made with weights that are no longer the members'."""
        self.bound.clear()
        self.waiting = None

    def separate(self) -> None:
        """Have each member compute alone from now on, in traced calls too."""
        self.forget()
        for m in self.members:
            # A member that is stock again, or in another group, is not ours.
            if getattr(m, "_joined", None) is self:
                object.__setattr__(m, "_siblings", None)
                object.__setattr__(m, "_joined", None)
                if m._owner is not None:
                    m._owner.clear()

    def _bind(self, x: mx.array) -> Bound | None:
        if x.size > MAX_M * x.shape[-1] or 0 in x.shape:
            return None
        members = self.members
        if len(members) < len(self._members):
            self.separate()
            return None
        if not all(_regular(m, x) for m in members):
            # The layer itself says what is wrong.
            return None
        problems = self.problems(x.size // x.shape[-1])
        exact = any(m._exact for m in members)
        if apart(problems, exact):
            self.bound[x.shape, x.dtype] = None
            return None
        route = kernel_route(*problems, exact=exact)
        names = ("weight", "scales", "biases")
        bound = Bound(route, [m[name] for m in members for name in names])
        self.bound[x.shape, x.dtype] = bound
        return bound

    def problems(self, M: int) -> tuple[Matmul, ...]:
        """What the members compute for M rows of x."""
        return tuple(
            Matmul(
                M,
                m["weight"].shape[0],
                m["weight"].shape[1] * 32 // m.bits,
                DTYPES[m["scales"].dtype],
                m.bits,
                m.group_size,
                m.mode,
            )
            for m in self.members
        )


def _regular(m: nn.Module, x: mx.array) -> bool:
    """Whether the arrays of an affine layer belong together and fit x."""
    w, scales, biases = m["weight"], m.get("scales"), m.get("biases")
    if scales is None or biases is None or w.ndim != 2:
        return False
    K = w.shape[1] * 32 // m.bits
    groups = (w.shape[0], K // m.group_size)
    return (
        x.shape[-1] == K
        and scales.shape == biases.shape == groups
        and x.dtype == scales.dtype == biases.dtype
    )


def call_tree(kind: type) -> ast.Module | None:
    """The parsed source of ``kind.__call__``; None where there is none to read."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(kind.__call__)))
    except (OSError, TypeError, SyntaxError):
        return None


def shares_x(parent: type, names: tuple[str, ...]) -> bool:
    """Whether ``parent.__call__`` gives all ``names`` the same, unchanged variable.

    Read from the source: an in-place change of x between two calls would keep the
    object and not its value.
    """
    if (tree := call_tree(parent)) is None:
        return False
    given: dict[str, list] = {name: [] for name in names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in given:
                plain = len(node.args) == 1 and isinstance(node.args[0], ast.Name)
                given[node.func.attr].append(node.args[0].id if plain else None)
    used = {name for calls in given.values() for name in calls}
    if any(len(calls) != 1 for calls in given.values()) or len(used) != 1:
        return False
    changed: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign):
            changed.append(node.target)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            changed.append(node)
    roots = {n.id for t in changed for n in ast.walk(t) if isinstance(n, ast.Name)}
    return not used & (roots | {None})
