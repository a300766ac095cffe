"""Drop-in gathered products: arguments checked, empty shapes, then kernel or stock."""

from __future__ import annotations

import math
from functools import partial

import mlx.core as mx
import numpy as np

from .arguments import DTYPES, check_quantized, defaults, fail
from .launch.gather import prepare, prepare_list
from .launch.matmul import Launch, device_chip
from .plan_gather import GatherPlan, bucket, plan_gather, stays_stock
from .problem import Gather, Matmul
from .routes import ROUTES, Route, empty_route, new_route, stock_route

OP = "gather_qmm"


def variant(problem: Gather, chosen: GatherPlan) -> str:
    """Name of one compiled kernel: equal names are the same compiled text."""
    g, m, p = problem, problem.matmul, chosen
    parts = [p.kernel, f"{m.mode} {m.bits}-bit g{m.group_size} {m.x_dtype}"]
    if g.activation:
        numbers = f"({g.alpha:g}, {g.limit:g})" * (g.activation == "clipped")
        parts.append(g.activation + numbers)
    parts += ["bias"] * g.bias + ["lhs"] * (g.each == 0) + ["to"] * g.scattered
    if p.tile:
        parts += [f"{name}={size}" for name, size in p.tile._asdict().items()]
        return " ".join(parts)
    parts += [f"R={p.rows}", f"SG={p.simdgroups}", f"KS={p.k_simdgroups}"]
    return " ".join(parts + [f"SHARE={p.share}"])


def kernel_route(problem: Gather | Route) -> Route:
    """The kernel of a problem, or stock with the reason; a route is its own.

    Its launch takes (x, rhs, w, scales, biases, bias, lhs=None), the biases where there
    are any.
    """
    if isinstance(problem, Route):
        return problem
    problem = bucket(problem)
    if (found := ROUTES.get((problem,))) is not None:
        return found
    if reason := stays_stock(problem, device_chip()):
        return stock_route(reason)
    chosen = plan_gather(problem, device_chip())
    make = partial(prepare, problem, chosen)
    name = variant(problem, chosen)
    return new_route((problem,), (problem,), chosen, name, make)


def tile_list(problem: Gather) -> Launch:
    """A function ``experts -> tiles`` for kernels on sorted pairs as ``problem``'s."""
    problem = bucket(problem)
    return prepare_list(problem, plan_gather(problem, device_chip()))


def _check(x, w, scales, biases, lhs, rhs, transpose, group_size, bits, mode) -> None:
    try:
        check_quantized(x, w, scales, biases, transpose, group_size, bits, mode)
    except (TypeError, ValueError) as e:
        raise type(e)(str(e).replace("quantized_matmul", OP, 1)) from None
    if x.ndim < 2:
        fail(f"x has shape {x.shape}", "pass x of shape (..., rows, K)", OP)
    for name, a in (("lhs_indices", lhs), ("rhs_indices", rhs)):
        if a is None:
            continue
        if not isinstance(a, mx.array):
            raise TypeError(f"{OP}: {name} is a {type(a).__name__}; pass an mx.array")
        if not mx.issubdtype(a.dtype, mx.integer):
            fail(f"{name} are {a.dtype}", "pass integers", OP)


def _shape(x, w, lhs, rhs, transpose: bool, bits: int) -> tuple[int, ...]:
    """Shape of the result: that of the indices, rows of x, columns."""
    left = x.shape[:-2] if lhs is None else lhs.shape
    right = w.shape[:-2] if rhs is None else rhs.shape
    try:
        pairs = np.broadcast_shapes(tuple(left), tuple(right))
    except ValueError:
        fail(
            f"indices of x {left} and of w {right} do not broadcast",
            "make them equal or 1; without indices the leading dimensions count",
            OP,
        )
    columns = w.shape[-2] if transpose else w.shape[-1] * 32 // bits
    return (*pairs, x.shape[-2], columns)


def _each(batch: tuple[int, ...], pairs: tuple[int, ...]) -> int:
    """How many pairs in turn read a row, x having ``batch`` of them; 0: not in turn."""
    padded = (1,) * (len(pairs) - len(batch)) + tuple(batch)
    same = len(pairs)
    while same and padded[same - 1] == 1:
        same -= 1
    return math.prod(pairs[same:]) if padded[:same] == pairs[:same] else 0


def gathered(
    x,
    w,
    scales,
    biases,
    lhs,
    rhs,
    transpose,
    group_size,
    bits,
    mode,
    *,
    bias=None,
    sorted_indices=False,
    exact=True,
) -> Gather | Route:
    """Check the arguments of a gathered product: its problem, or the route of others.

    bias [E, N], if given, belongs to w's experts; exact as in `Gather`. Raises one
    ValueError (TypeError: no array), before anything is launched, for arguments that do
    not belong together.
    """
    group_size, bits = defaults(mode, group_size, bits)
    _check(x, w, scales, biases, lhs, rhs, transpose, group_size, bits, mode)
    shape = _shape(x, w, lhs, rhs, transpose, bits)
    pairs = shape[:-2]
    inputs = [x] if biases is None else [x, scales, biases]
    if 0 in shape or x.shape[-1] == 0:
        return empty_route(shape, mx.result_type(*inputs))
    if not transpose:
        return stock_route(f"{OP} transpose=False: the kernels take x @ w.T only")
    # Without dimensions an index is no array in a kernel's text.
    named = [a for a in (lhs, rhs) if a is not None]
    if rhs is None or not pairs or any(a.shape != pairs for a in named):
        return stock_route(f"{OP}: the kernels take one expert index for each result")
    if w.ndim != 3:
        return stock_route(f"{OP}: the kernels take weights of shape [E, N, words]")
    if bias is not None:
        if bias.shape != w.shape[:2]:
            fail(f"bias has shape {bias.shape}", f"pass one of {w.shape[:2]}", OP)
        inputs.append(bias)
    if any(a.dtype != x.dtype for a in inputs):
        names = (str(a.dtype).removeprefix("mlx.core.") for a in inputs)
        return stock_route(f"{OP} mixed dtypes: {', '.join(names)}")
    if x.dtype not in DTYPES:
        return stock_route(f"the kernels take float16, bfloat16, float32: {x.dtype}")
    each = _each(x.shape[:-2], pairs) if lhs is None else 0
    if each == 0 and lhs is None:
        return stock_route(f"{OP}: rows of x {x.shape} are not read in turn")
    (E, N), K = w.shape[:2], x.shape[-1]
    m = Matmul(x.shape[-2], N, K, DTYPES[x.dtype], bits, group_size, mode)
    count = math.prod(pairs)
    options = {"sorted": bool(sorted_indices), "exact": exact}
    return Gather(m, E, count, each, bias is not None, **options)


def gather_qmm(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    lhs_indices: mx.array | None = None,
    rhs_indices: mx.array | None = None,
    transpose: bool = True,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    global_scale: mx.array | None = None,
    *,
    sorted_indices: bool = False,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """Drop-in for `mx.gather_qmm`: x [..., 1, K] and packed w [E, N, K*bits/32].

    Returns [*indices, 1, N] in stock's dtype. Few pairs of a row and an expert go to a
    kernel, many that are sorted to tiles where the plan has them for this chip; both
    read the indices on the device. What the kernels do not take goes to stock, counted
    with the reason in `ops.served()`. An index beyond the experts reads the last one
    where a kernel serves. Raises ValueError for arguments that do not belong together.
    """
    args = (x, w, scales, biases, lhs_indices, rhs_indices, transpose)
    found = gathered(*args, group_size, bits, mode, sorted_indices=sorted_indices)
    route = kernel_route(found)
    if route.name != "empty" and (stream is not None or global_scale is not None):
        what = "an explicit stream" if stream is not None else "a global scale"
        route = stock_route(what)
    route.calls += 1
    if route.launch is not None:
        weights = [w, scales, *([] if biases is None else [biases])]
        return route.launch(x, rhs_indices, *weights, lhs=lhs_indices)
    return mx.gather_qmm(
        *args,
        group_size,
        bits,
        mode,
        global_scale,
        sorted_indices=sorted_indices,
        stream=stream,
    )
