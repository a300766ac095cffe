"""Drop-in matmuls: arguments checked, empty shapes, then a kernel or stock."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import mlx.core as mx

from .arguments import DTYPES, check_linear, check_quantized, defaults, product
from .executor import executor_name
from .launch.decode import prepare, template
from .launch.matmul import device_chip, prepare_shared
from .plan import MAX_M, Plan, supports_launch
from .plan_exact import on_codes, plan_codes, plan_launch
from .plan_matrix import on_matrix, plan_matrix
from .plan_qmm import bucket, plan_qmm, stays_stock
from .problem import Matmul
from .routes import (
    ROUTES,
    Route,
    empty_route,
    new_route,
    start_anew,
    stock_route,
)
from .routes import counted as counted
from .routes import disable as disable
from .routes import enable_all as enable_all
from .routes import off as off
from .routes import prepare_again as prepare_again
from .routes import reset_served as reset_served
from .routes import served as served
from .routes import set_probe as set_probe

Problems = tuple[Matmul, ...]
Decide = Callable[[Problems, bool], "Plan | str | None"]

# What `use_plans` got, with its token; empty: the table of plan.py alone.
_stored: list[tuple[Decide, object]] = []


def variant(problem: Matmul, chosen: Plan) -> str:
    """Name of one compiled kernel: equal names are the same compiled text."""
    p = problem
    layout = p.x_dtype
    if p.mode != "none":
        layout = f"{p.mode} {p.bits}-bit g{p.group_size} {p.x_dtype}"
    # Dtype, bits and group are in the layout already.
    tile = [f"{k}={v}" for k, v in template(p, chosen) if k.isupper() and k != "T"]
    return " ".join([chosen.kernel, layout, *tile])


def use_plans(decide: Decide | None, token: object = None) -> bool:
    """Ask `decide` before the table for each plan (None: the table alone).

    It is called with the problems and whether rows have to be exact, and gives a Plan,
    a sentence why stock serves, or None where the table decides. Equal tokens are equal
    plans. True if the plans changed: routes and their counts start anew, and drop-in
    layers have to forget theirs.
    """
    if [token] * (decide is not None) == [t for _, t in _stored]:
        return False
    _stored[:] = [] if decide is None else [(decide, token)]
    start_anew()
    return True


def choose(problems: Problems, exact: bool = True) -> Plan | str:
    """The plan of a launch, stored or from the table; a sentence if stock serves.

    exact: a row has the same bits for every M up to 16 (no kernel's rows are exact
    above). Otherwise matrix units may compute one matrix; plans that were raced are of
    vector kernels, so of these only the verdict for stock stands above the table's M
    for matrix units. ValueError if no kernel supports the problems.
    """
    if problems[0].M > MAX_M:
        chip = device_chip()
        return stays_stock(problems[0], chip) or plan_qmm(problems[0], chip)
    chip = device_chip()
    if len(problems) == 1 and on_codes(problems[0], chip):
        return plan_codes(problems[0], chip)
    found = _stored[0][0](problems, exact) if _stored else None
    if isinstance(found, str):
        return found
    if not exact and len(problems) == 1 and on_matrix(problems[0], chip):
        return plan_matrix(problems[0], chip)
    return found or plan_launch(problems, chip)


def apart(problems: Problems, exact: bool) -> bool:
    """Whether matrices that share x are better launched one by one: on matrix units.

    Of one problem: whether it is better launched alone than fused, as its fused
    launch multiplies by vectors.
    """
    chip = device_chip()
    # Codes have fused launches, but none that several matrices share.
    shared = len(problems) > 1 and problems[0].M > 1
    units = (on_matrix(p, chip) or shared and on_codes(p, chip) for p in problems)
    return not exact and any(units)


def _prepare(problems: Problems, chosen: Plan) -> Callable:
    if len(problems) > 1:
        return prepare_shared(problems, chosen)
    return prepare(problems[0], chosen)


def kernel_route(*problems: Matmul, exact: bool = True) -> Route:
    """The kernel of a problem, or of several that share x and a launch; or stock.

    exact as in `choose`. A stock route carries the reason why not.
    """
    if len(problems) == 1 and problems[0].M > MAX_M:
        # One route for all M with one plan: prompts have any length.
        problems = (replace(problems[0], M=bucket(problems[0].M)),)
        exact = False
    key = problems, exact
    if (route := ROUTES.get(key)) is None:
        one = len(problems) == 1 and problems[0].M > MAX_M
        if not one and (reason := supports_launch(problems)):
            return stock_route(reason)
        chosen = choose(problems, exact)
        if isinstance(chosen, str):
            return stock_route(chosen)
        name, make = variant(problems[0], chosen), partial(_prepare, problems, chosen)
        route = new_route(key, problems, chosen, name, make)
    if route.launch is None and not exact and problems[0].M <= MAX_M:
        # Off: exact rows are allowed too, and are other kernels from some M on.
        return kernel_route(*problems)
    return route


class Bound:
    """A route with its weights: `call(*inputs)` launches, unless it went stock."""

    __slots__ = ("route", "call")

    def __init__(self, route: Route, weights: list[mx.array], trace: bool = True):
        self.route = route
        launch = route.launch
        if launch is None or route.name == "empty" or executor_name() == "cpu":
            trace = False
        if not trace:
            # The CPU executor cannot be traced. A kernel may be switched on later.
            self.call = lambda *xs: route.launch(*xs, *weights)
        else:
            # Traced once: a call then builds no arguments (host time decides decode).
            mx.eval(weights)
            self.call = mx.compile(lambda *xs: launch(*xs, *weights))


def route_quantized(
    x, w, scales, biases, transpose, group_size, bits, mode, exact=True
) -> Route:
    """Check the arguments of a quantised product and choose who computes it.

    Raises one ValueError, before anything is launched, for shapes, dtypes, group
    sizes, bits and modes that do not belong together and for missing biases.
    """
    group_size, bits = defaults(mode, group_size, bits)
    check_quantized(x, w, scales, biases, transpose, group_size, bits, mode)
    shape, k = product(x.shape, w.shape, transpose, bits)
    inputs = [x] if biases is None else [x, scales, biases]
    if 0 in shape or k == 0:
        return empty_route(shape, mx.result_type(*inputs))
    if not transpose:
        return stock_route("transpose=False: the kernels take x @ w.T only")
    if w.ndim > 2:
        return stock_route("batched weights: the kernels take w of shape [N, words]")
    if any(a.dtype != x.dtype for a in inputs):
        names = (str(a.dtype).removeprefix("mlx.core.") for a in inputs)
        return stock_route(f"mixed dtypes of x, scales, biases: {', '.join(names)}")
    if x.dtype not in DTYPES:
        return stock_route(f"the kernels take float16, bfloat16, float32: {x.dtype}")
    dtype = DTYPES[x.dtype]
    problem = Matmul(x.size // k, shape[-1], k, dtype, bits, group_size, mode)
    return kernel_route(problem, exact=exact)


def quantized_matmul(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    transpose: bool = True,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """Drop-in for `mx.quantized_matmul`: x [..., K] and packed w [N, K*bits/32].

    Returns [..., N] in stock's dtype. Up to 16 rows of x go to a kernel with exact
    rows, more to a prefill kernel, whose rows are not exact, where the plan has one
    for this chip; what the kernels do not take goes to stock, counted with the reason
    in `served()`. Empty x or w give an empty result (or zeros for K = 0) and launch
    nothing. Raises ValueError for arguments that do not belong together.
    """
    route = route_quantized(x, w, scales, biases, transpose, group_size, bits, mode)
    if stream is not None and route.name != "empty":
        route = stock_route("an explicit stream")
    route.calls += 1
    if route.launch is not None:
        return route.launch(x, w, scales, *([] if biases is None else [biases]))
    return mx.quantized_matmul(
        x, w, scales, biases, transpose, group_size, bits, mode, stream=stream
    )


def route_linear(x: mx.array, weight: mx.array, bias: mx.array | None = None) -> Route:
    """Check x [..., K], weight [N, K], bias [N] and choose who computes the product.

    Raises ValueError where they do not belong together.
    """
    check_linear(x, weight, bias)
    n, k = weight.shape
    shape = (*x.shape[:-1], n)
    if 0 in shape or k == 0:
        return empty_route(shape, mx.result_type(x, weight))
    if x.dtype != weight.dtype:
        return stock_route(f"mixed dtypes of x, weight: {x.dtype}, {weight.dtype}")
    if x.dtype not in DTYPES:
        return stock_route(f"the kernels take float16, bfloat16, float32: {x.dtype}")
    bits = 8 * x.itemsize
    return kernel_route(Matmul(x.size // k, n, k, DTYPES[x.dtype], bits, 0, "none"))


def linear(x: mx.array, weight: mx.array, bias: mx.array | None = None) -> mx.array:
    """x [..., K] @ weight [N, K].T (+ bias [N]) for plain weights -> [..., N].

    Kernel or stock as `quantized_matmul`. Raises ValueError for wrong shapes.
    """
    route = route_linear(x, weight, bias)
    route.calls += 1
    if route.launch is not None:
        y = route.launch(x, weight)
        return y if bias is None else y + bias
    return x @ weight.T if bias is None else mx.addmm(bias, x, weight.T)
