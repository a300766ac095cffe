"""Fused launches of layers: their arrays, what they compute, the route that is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from operator import is_
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from .arguments import DTYPES
from .launch.fused import planned, prepare_glu
from .ops import apart, variant
from .plan import supports_fused
from .problem import Matmul
from .routes import ROUTES, Route, keep_route

# Largest relative difference of a fused module's own part from stock's (2-norm). Stock
# rounds to the dtype between its layers, a fused launch does not.
TOLERANCE = {mx.float32: 1e-3, mx.float16: 1e-2, mx.bfloat16: 4e-2}
ARRAYS = ("weight", "scales", "biases", "bias")


class Matrix(NamedTuple):
    """A layer's arrays, or some of its rows."""

    layer: nn.Module
    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    bias: mx.array | None


class Memo(dict):
    """What is made of a block's arrays, for as long as those are the same objects."""

    def of(self, name: Any, sources: Sequence, make: Callable[[], Any]) -> Any:
        """``make()``, evaluated, or what it gave for the same sources."""
        known = self.get(name)
        if known is None or not all(map(is_, known[0], sources)):
            known = self[name] = sources, make()
            mx.eval(known[1])
        return known[1]


def arrays_of(*matrices: Matrix) -> list[mx.array]:
    """What launches get of matrices."""
    return [a for m in matrices for a in (m.weight, m.scales, m.biases)]


def matrices_of(
    memo: Memo, owner: nn.Module, names: tuple[str, ...], rows: list[int]
) -> list[Matrix]:
    """Matrices of so many rows: of a layer each, or all of one layer, as views."""
    found = []
    for name in names:
        layer = owner[name]
        arrays = [*map(layer.get, ARRAYS)]
        parts = [arrays]
        if len(names) < len(rows):
            ends = list(pairwise([0, *accumulate(rows)]))
            parts = memo.of(name, arrays, partial(_sliced, arrays, ends))
        found += [Matrix(layer, *part) for part in parts]
    return found


def _sliced(arrays: list, ends: list[tuple[int, int]]) -> list[list]:
    return [[None if a is None else a[i:j] for a in arrays] for i, j in ends]


def matmul_of(m: Matrix, x: mx.array, biased: bool = False) -> Matmul | None:
    """What a matrix computes for x; None unless affine, of x's dtype and exact."""
    layer = m.layer
    arrays = [m.scales, m.biases, *([m.bias] if biased else [])]
    if (m.bias is not None and not biased) or any(
        a is None or a.dtype != x.dtype for a in arrays
    ):
        return None
    (N, words), M = m.weight.shape, x.size // x.shape[-1]
    K, dtype = words * 32 // layer.bits, DTYPES[x.dtype]
    p = Matmul(M, N, K, dtype, layer.bits, layer.group_size, layer.mode)
    # Fused kernels are exact ones: matrix units take the layer alone.
    return None if apart((p,), layer._exact) else p


def route_of(
    kernel: str, members: tuple[Matmul | None, ...], make: Callable, *how
) -> Route | None:
    """The route of a fused launch of ``members``; None if it does not take them.

    how: epsilon of the norm before it, the rotary embedding after it, and more that
    tells its launches apart.
    """
    if None in members:
        return None
    # Looked up first: steps that are not traced come here for every layer.
    key = (kernel, members, *how)
    if (route := ROUTES.get(key)) is None:
        if supports_fused(kernel, members):
            return None
        name = variant(members[0], planned(kernel, members, *how[:2]))
        route = keep_route(key, name, make)
    return route if route.launch is not None else None


def kept(key: tuple, name: str, make: Callable) -> Route | None:
    """The route under ``key``, made if there is none; None if its kernel is off."""
    route = ROUTES.get(key) or keep_route(key, name, make)
    return route if route.launch is not None else None


def launch(route: Route, *arrays: mx.array, **how) -> Any:
    """What a route's kernel gives, counted."""
    route.calls += 1
    return route.launch(*arrays, **how)


def glu(
    memo: Memo,
    mlp: nn.Module,
    names: tuple[str, ...],
    activation: str,
    x: mx.array,
    weight: mx.array | None = None,
    eps: float | None = None,
) -> mx.array | None:
    """act(gate) * up of x, in one launch; None where no launch takes it.

    names: of the two layers, or of one with the rows of both. x is normed with
    ``weight`` and ``eps`` if there are.
    """
    rows = sum(mlp[n]["weight"].shape[0] for n in names) // 2
    gate, up = matrices_of(memo, mlp, names, [rows, rows])
    if weight is not None and weight.dtype != x.dtype:
        return None
    members = tuple(matmul_of(m, x) for m in (gate, up))
    make = partial(prepare_glu, members[0], activation, eps)
    route = route_of("qmv_glu", members, make, eps, None, activation)
    if route is None:
        return None
    norm = [] if weight is None else [weight]
    return launch(route, x, *norm, *arrays_of(gate, up))
