"""Layers that read the same x, such as q, k and v projections, in one launch.

A decode step is bound by its launches. The first of the siblings that is called with
an x computes all of them; the others find their result waiting if they are called
with the very same array object, and compute on their own otherwise.
"""

from __future__ import annotations

import ast
import inspect
import textwrap

import mlx.core as mx
import mlx.nn as nn

from .arguments import DTYPES
from .ops import Bound, kernel_route
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


def _nothing() -> None:
    return None


class Siblings:
    """Two or three quantised layers with the same x, K, bits and group size."""

    def __init__(self, members: list[nn.Module]):
        self.members = members
        self.bound: dict[tuple, Bound] = {}
        # [x, results not fetched yet]: replaced as a whole, so threads cannot mix.
        self.waiting: list | None = None
        self.unused = 0

    def __reduce__(self):
        # A copy or pickle of a layer is on its own.
        return _nothing, ()

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
        bound = self.bound.get((x.shape, x.dtype)) or self._bind(x)
        if bound is None:
            return None
        if bound.route.launch is None:
            # For every M: alone, K is split otherwise, and rows have to stay exact.
            self._separate()
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
        self._separate()
        return True

    def _separate(self) -> None:
        self.waiting = None
        for m in self.members:
            object.__setattr__(m, "_siblings", None)
            object.__setattr__(m, "_joined", None)

    def _bind(self, x: mx.array) -> Bound | None:
        if x.size > MAX_M * x.shape[-1] or 0 in x.shape:
            return None
        parts = [(m["weight"], m["scales"], m["biases"]) for m in self.members]
        problems = self.problems(x.size // x.shape[-1])
        if problems[0].K != x.shape[-1] or x.dtype != parts[0][1].dtype:
            # The layer itself says what is wrong with x.
            return None
        route = kernel_route(*problems)
        bound = Bound(route, [a for part in parts for a in part])
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


def shares_x(parent: type, names: tuple[str, ...]) -> bool:
    """Whether ``parent.__call__`` gives all ``names`` the same, unchanged variable.

    Read from the source: an in-place change of x between two calls would keep the
    object and not its value.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(parent.__call__)))
    except (OSError, TypeError, SyntaxError):
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
        elif isinstance(node, ast.Assign):
            changed += [t for t in node.targets if isinstance(t, ast.Subscript)]
    roots = {n.id for t in changed for n in ast.walk(t) if isinstance(n, ast.Name)}
    return not used & (roots | {None})
