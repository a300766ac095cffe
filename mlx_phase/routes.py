"""Where calls go: a kernel or stock, counted, and switched off for the process.

Routes are shared per problem, so counting calls and switching a kernel off reach every
layer that uses it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.core as mx

Probe = Callable[[tuple, object, str], "str | None"]


class Route:
    """Where a call goes: a kernel (`launch` set) or stock (`reason` set).

    `make` prepares the kernel, now or when it is switched on again.
    """

    __slots__ = ("name", "launch", "reason", "calls", "make")

    def __init__(self, name: str, make: Callable | None, reason: str | None = None):
        self.name, self.make, self.reason, self.calls = name, make, reason, 0
        self.launch = None if reason else make()


class Served(dict):
    """Calls per kernel name and per fallback reason, also apart (.kernels, .stock)."""

    def __init__(self, kernels: dict[str, int], stock: dict[str, int]):
        super().__init__(**kernels, **stock)
        self.kernels, self.stock = kernels, stock


# By the problems of a matmul launch, or by what attention_ops knows a call by.
ROUTES: dict[tuple, Route] = {}
_STOCK: dict[str, Route] = {}
_OFF: dict[str, str] = {}
_probe: list[Probe] = []
_generation = 0


def generation() -> int:
    """A number that changes when all routes do: what holds launches is stale then."""
    return _generation


def start_anew() -> None:
    """Forget every route: plans or checks have changed."""
    global _generation
    _generation += 1
    ROUTES.clear()


def served() -> Served:
    """How often each kernel served since the last reset, and why stock did."""
    kernels: dict[str, int] = {}
    stock = {r.reason: r.calls for r in _STOCK.values() if r.calls}
    for route in ROUTES.values():
        table, key = (stock, route.reason) if route.reason else (kernels, route.name)
        if route.calls:
            table[key] = table.get(key, 0) + route.calls
    return Served(kernels, stock)


def reset_served() -> None:
    """Set all counters of `served` to zero."""
    for route in [*ROUTES.values(), *_STOCK.values()]:
        route.calls = 0


@contextmanager
def counted() -> Iterator[list[Route]]:
    """The routes that are called inside, each once per call; `served` forgets them."""
    before = {r: r.calls for r in [*ROUTES.values(), *_STOCK.values()]}
    routes: list[Route] = []
    yield routes
    for route in [*ROUTES.values(), *_STOCK.values()]:
        was = before.get(route, 0)
        routes += [route] * (route.calls - was)
        route.calls = was


def off() -> dict[str, str]:
    """Kernels switched off in this process, with the reason each."""
    return dict(_OFF)


def disable(name: str, reason: str) -> None:
    """Stock serves instead of kernel `name` (see `variant`) for the process."""
    _OFF[name] = reason
    for route in ROUTES.values():
        if route.name == name:
            route.launch, route.reason = None, f"{name} is off: {reason}"


def enable_all() -> None:
    """Switch every kernel on again, also in layers that already use stock."""
    global _generation
    _generation += 1
    _OFF.clear()
    for route in ROUTES.values():
        if route.launch is None:
            route.launch, route.reason = route.make(), None


def prepare_again() -> None:
    """Prepare every kernel anew: the launcher's text has changed."""
    global _generation
    _generation += 1
    for route in ROUTES.values():
        if route.launch is not None:
            route.launch = route.make()


def set_probe(probe: Probe | None) -> bool:
    """Have `probe` judge kernels before first use; True if routes start anew."""
    if new := probe is not None and _probe != [probe]:
        start_anew()
    _probe[:] = [probe] if probe else []
    return new


def stock_route(reason: str) -> Route:
    """The shared route of calls that stay with stock for `reason`."""
    if reason not in _STOCK:
        _STOCK[reason] = Route("stock", None, reason)
    return _STOCK[reason]


def empty_route(shape: tuple[int, ...], dtype: mx.Dtype) -> Route:
    """Zeros without a launch: stock divides by zero there (SIGFPE on CPU)."""
    return Route("empty", lambda: lambda *_, **__: mx.zeros(shape, dtype))


def new_route(key: tuple, problems: tuple, chosen, name: str, make: Callable) -> Route:
    """Probe the kernel of ``chosen`` and keep its route under ``key``."""
    if name not in _OFF and _probe and (error := _probe[0](problems, chosen, name)):
        _OFF[name] = error
    return keep_route(key, name, make)


def keep_route(key: tuple, name: str, make: Callable) -> Route:
    """The route of kernel ``name`` under ``key``; stock if the kernel is off."""
    reason = f"{name} is off: {_OFF[name]}" if name in _OFF else None
    route = ROUTES[key] = Route(name, make, reason)
    return route
