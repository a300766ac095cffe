"""Canary of the gathered kernels: each matches an oracle here before it may serve."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx
import numpy as np

from . import check as checks
from .check import FLOOR, Checked, canary, rounded
from .gather_ops import variant
from .launch.gather import prepare
from .launch.matmul import device_chip
from .plan_gather import GatherPlan, plan_gather
from .problem import Gather

# The expert of each pair, one of them asked for by nobody; a pair's row of x, of y.
PICKS = np.array([2, 2, 2, 2, 2, 0, 2, 0])
ROWS_OF = np.array([1, 3, 0, 2, 3, 3, 0, 1])
PLACES = np.array([4, 0, 7, 3, 1, 6, 2, 5])
EXPERTS = 3


def small(problem: Gather) -> Gather:
    """The same kernel on eight pairs: N and K small, tails reached."""
    (m,) = checks.small((problem.matmul,))
    each = problem.each if problem.each < 2 else 4
    return replace(problem, matmul=m, experts=EXPERTS, pairs=len(PICKS), each=each)


def activated(g: Gather, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """act(gate) * up: see `problem.Gather`."""
    if g.activation == "clipped":
        a = np.minimum(gate, g.limit)
        return (np.clip(up, -g.limit, g.limit) + 1) * a / (1 + np.exp(-g.alpha * a))
    inner = gate
    if g.activation == "gelu_approx":
        inner = 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    return gate / (1 + np.exp(-inner)) * up


def _products(x: np.ndarray, picks, sides, dtype: str | None) -> list[np.ndarray]:
    """Of each side's experts with the pairs' x; as dense ones in ``dtype`` if given."""
    found = []
    for weights, bias in sides:
        if dtype is None:
            w, rows = [a.astype(np.float64) for a in weights], x.astype(np.float64)
        else:
            w, rows = [rounded(a, dtype) for a in weights], x
        y = np.stack([r @ w[e].T for r, e in zip(rows, picks, strict=True)])
        y = y.astype(np.float32)
        found.append((y if dtype is None else rounded(y, dtype)) + bias[picks])
    return found


@dataclass(frozen=True)
class Canary:
    """Inputs of a :func:`small` problem as a launch takes them; ``sides``: weights and
    bias of gate and up, or of the one matrix, as float32."""

    x: mx.array
    rhs: mx.array
    weights: list[mx.array]
    maps: dict[str, mx.array]
    rows: np.ndarray
    sides: list[tuple[list[np.ndarray], np.ndarray]]


def inputs(g: Gather) -> Canary:
    """Inputs of a problem of eight pairs: `PICKS`, with rows and places where asked."""
    m, rng = g.matmul, np.random.default_rng(0)
    rows = ROWS_OF if g.each == 0 else np.arange(g.pairs) // g.each
    picks = np.sort(PICKS) if g.sorted else PICKS
    dtype = getattr(mx, m.x_dtype)
    arrays, sides = [], []
    for side in range(2 if g.activation else 1):
        made = [canary(m, EXPERTS * side + e) for e in range(EXPERTS)]
        arrays += [mx.stack(a) for a in zip(*(q[0][1:] for q in made), strict=True)]
        bias = np.zeros((EXPERTS, m.N), np.float32)
        if g.bias:
            bias = rounded(rng.normal(size=bias.shape).astype(np.float32), m.x_dtype)
            arrays.append(mx.array(bias).astype(dtype))
        sides.append(([weights for _, weights in made], bias))
    # Products about 2 in size, where activations bend.
    size = 2 / np.std(sides[0][0]) / m.K**0.5
    x = mx.array((size * rng.normal(size=(rows.max() + 1, m.K))).astype(np.float32))
    maps = {"lhs": mx.array(ROWS_OF, mx.uint32)} if g.each == 0 else {}
    maps |= {"to": mx.array(PLACES, mx.uint32)} if g.scattered else {}
    rhs = mx.array(picks, mx.uint32)
    return Canary(x.astype(dtype), rhs, arrays, maps, rows, sides)


def _run(g: Gather, chosen: GatherPlan) -> float:
    """Worst error over the allowed one, which grows with what the products are."""
    m, c = g.matmul, inputs(g)
    wide, picks = np.array(c.x.astype(mx.float32))[c.rows], np.array(c.rhs)
    right = _products(wide, picks, c.sides, None)
    dense = _products(wide, picks, c.sides, m.x_dtype)
    largest = np.abs(right[0]).max()
    if g.activation:
        largest *= 1 + np.abs(right[1]).max()
        right = [activated(g, *right)]
        dense = [rounded(activated(g, *dense), m.x_dtype)]
    y = prepare(g, chosen)(c.x, c.rhs, *c.weights, **c.maps)
    y = np.array(y.astype(mx.float32))[PLACES if g.scattered else slice(None), 0]
    if not np.isfinite(y).all():
        return float("inf")
    allowed = 2 * np.abs(right[0] - dense[0]).max() + FLOOR[m.x_dtype] * largest
    return float(np.abs(y - right[0]).max() / allowed)


def check(problem: Gather, chosen: GatherPlan | None = None) -> Checked:
    """Compile and evaluate the kernel planned for a problem, once per process.

    A kernel that does not compile, run or match is switched off for the process.
    """
    chosen = chosen or plan_gather(problem, device_chip())
    run = partial(_run, small(problem), chosen)
    return checks.judged(variant(problem, chosen), problem, run)
