"""Drop-in matmuls: arguments checked, empty shapes, then a kernel or stock.

Every call takes a `Route`. Routes are shared per problem, so counting calls and
switching a kernel off for the process reach every layer that uses it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.core as mx

from .arguments import DTYPES, check_linear, check_quantized, defaults, product
from .executor import executor_name
from .launch.matmul import device_chip, prepare, prepare_shared, template
from .plan import MAX_M, Plan, plan_launch, supports_launch
from .problem import Matmul

PREFILL = f"M > {MAX_M}: no prefill kernel yet"
Problems = tuple[Matmul, ...]
Probe = Callable[[Problems, Plan, str], "str | None"]
Decide = Callable[[Problems], "Plan | str | None"]


class Route:
    """Where a call goes: a kernel (`launch` set) or stock (`reason` set)."""

    __slots__ = ("name", "launch", "reason", "calls")

    def __init__(self, name: str, launch: Callable | None, reason: str | None):
        self.name, self.launch, self.reason, self.calls = name, launch, reason, 0


class Served(dict):
    """Calls per kernel name and per fallback reason, also apart (.kernels, .stock)."""

    def __init__(self, kernels: dict[str, int], stock: dict[str, int]):
        super().__init__(**kernels, **stock)
        self.kernels, self.stock = kernels, stock


_ROUTES: dict[Problems, Route] = {}
_STOCK: dict[str, Route] = {}
_OFF: dict[str, str] = {}
_probe: list[Probe] = []
# What `use_plans` got, with its token; empty: the table of plan.py alone.
_stored: list[tuple[Decide, object]] = []


def served() -> Served:
    """How often each kernel served since the last reset, and why stock did."""
    kernels: dict[str, int] = {}
    stock = {r.reason: r.calls for r in _STOCK.values() if r.calls}
    for route in _ROUTES.values():
        table, key = (stock, route.reason) if route.reason else (kernels, route.name)
        if route.calls:
            table[key] = table.get(key, 0) + route.calls
    return Served(kernels, stock)


def reset_served() -> None:
    """Set all counters of `served` to zero."""
    for route in [*_ROUTES.values(), *_STOCK.values()]:
        route.calls = 0


@contextmanager
def counted() -> Iterator[list[Route]]:
    """The routes that are called inside, each once per call; `served` forgets them."""
    before = {r: r.calls for r in [*_ROUTES.values(), *_STOCK.values()]}
    routes: list[Route] = []
    yield routes
    for route in [*_ROUTES.values(), *_STOCK.values()]:
        was = before.get(route, 0)
        routes += [route] * (route.calls - was)
        route.calls = was


def variant(problem: Matmul, chosen: Plan) -> str:
    """Name of one compiled kernel: equal names are the same compiled text."""
    p = problem
    layout = p.x_dtype
    if p.mode != "none":
        layout = f"{p.mode} {p.bits}-bit g{p.group_size} {p.x_dtype}"
    # Dtype, bits and group are in the layout already.
    tile = [f"{k}={v}" for k, v in template(p, chosen) if k.isupper() and k != "T"]
    return " ".join([chosen.kernel, layout, *tile])


def off() -> dict[str, str]:
    """Kernels switched off in this process, with the reason each."""
    return dict(_OFF)


def disable(name: str, reason: str) -> None:
    """Stock serves instead of kernel `name` (see `variant`) for the process."""
    _OFF[name] = reason
    for route in _ROUTES.values():
        if route.name == name:
            route.launch, route.reason = None, f"{name} is off: {reason}"


def enable_all() -> None:
    """Switch every kernel on again, also in layers that already use stock."""
    _OFF.clear()
    for problems, route in _ROUTES.items():
        if route.launch is None:
            route.launch, route.reason = _prepare(problems, choose(problems)), None


def use_plans(decide: Decide | None, token: object = None) -> bool:
    """Ask `decide` before the table for each plan (None: the table alone).

    It gives a Plan, a sentence why stock serves, or None where the table decides.
    Equal tokens are equal plans. True if the plans changed: routes and their counts
    start anew, and drop-in layers have to forget theirs.
    """
    if [token] * (decide is not None) == [t for _, t in _stored]:
        return False
    _stored[:] = [] if decide is None else [(decide, token)]
    _ROUTES.clear()
    return True


def choose(problems: Problems) -> Plan | str:
    """The plan of a launch, stored or from the table; a sentence if stock serves.

    ValueError if no kernel supports the problems.
    """
    if _stored and (found := _stored[0][0](problems)) is not None:
        return found
    return plan_launch(problems, device_chip())


def prepare_again() -> None:
    """Prepare every kernel anew: the launcher's text has changed."""
    for problems, route in _ROUTES.items():
        if route.launch is not None:
            route.launch = _prepare(problems, choose(problems))


def set_probe(probe: Probe | None) -> bool:
    """Have `probe` judge kernels before first use; True if routes start anew."""
    if new := probe is not None and _probe != [probe]:
        _ROUTES.clear()
    _probe[:] = [probe] if probe else []
    return new


def stock_route(reason: str) -> Route:
    """The shared route of calls that stay with stock for `reason`."""
    if reason not in _STOCK:
        _STOCK[reason] = Route("stock", None, reason)
    return _STOCK[reason]


def empty_route(shape: tuple[int, ...], dtype: mx.Dtype) -> Route:
    """Zeros without a launch: stock divides by zero there (SIGFPE on CPU)."""
    return Route("empty", lambda *_: mx.zeros(shape, dtype), None)


def _prepare(problems: Problems, chosen: Plan) -> Callable:
    if len(problems) > 1:
        return prepare_shared(problems, chosen)
    return prepare(problems[0], chosen)


def kernel_route(*problems: Matmul) -> Route:
    """The kernel of a problem, or of several that share x and a launch; or stock.

    A stock route carries the reason why not.
    """
    if (route := _ROUTES.get(problems)) is not None:
        return route
    if reason := supports_launch(problems):
        return stock_route(reason)
    chosen = choose(problems)
    if isinstance(chosen, str):
        return stock_route(chosen)
    name = variant(problems[0], chosen)
    if name not in _OFF and _probe and (error := _probe[0](problems, chosen, name)):
        _OFF[name] = error
    if name in _OFF:
        route = Route(name, None, f"{name} is off: {_OFF[name]}")
    else:
        route = Route(name, _prepare(problems, chosen), None)
    _ROUTES[problems] = route
    return route


class Bound:
    """A route with its weights: `call(x)` launches, unless the route went stock."""

    __slots__ = ("route", "call")

    def __init__(self, route: Route, weights: list[mx.array]):
        self.route = route
        launch = route.launch
        if launch is None or route.name == "empty" or executor_name() == "cpu":
            # The CPU executor cannot be traced. A kernel may be switched on later.
            self.call = lambda x: route.launch(x, *weights)
        else:
            # Traced once: a call then builds no arguments (host time decides decode).
            mx.eval(weights)
            self.call = mx.compile(lambda x: launch(x, *weights))


def route_quantized(x, w, scales, biases, transpose, group_size, bits, mode) -> Route:
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
    if x.size // k > MAX_M:
        return stock_route(PREFILL)
    if x.dtype not in DTYPES:
        return stock_route(f"the kernels take float16, bfloat16, float32: {x.dtype}")
    return kernel_route(
        Matmul(x.size // k, shape[-1], k, DTYPES[x.dtype], bits, group_size, mode)
    )


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

    Returns [..., N] in stock's dtype. Up to 16 rows of x go to a kernel; what the
    kernels do not take goes to stock, counted with the reason in `served()`. Empty
    x or w give an empty result (or zeros for K = 0) and launch nothing. Raises
    ValueError for arguments that do not belong together.
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
    if x.size // k > MAX_M:
        return stock_route(PREFILL)
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
