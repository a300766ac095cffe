"""Drop-in experts: quantised switch layers, and gate, up and down of an MoE block.

A block's indices stay on the device: kernels read them there, so a step is never held
up by the host. Few tokens take two launches, gate with up and the activation, and down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx
import mlx.nn as nn

from .executor import executor_name
from .gather_ops import kernel_route, tile_list
from .layers import MAX_CACHED, PhaseQuantizedSwitchLinear
from .parents import _Parent, release_parent
from .plan import MAX_M
from .plan_gather import pairs_bucket
from .problem import Gather
from .routes import Route

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Gate:
    """What an activation computes of gate and up: see `problem.Gather`."""

    activation: str
    alpha: float = 0.0
    limit: float = 0.0


def gate_of(activation: Callable) -> Gate | None:
    """Which of the kernels' activations ``activation(up, gate)`` is, by what it gives.

    None if it is none of them. Compared in float32 on values from -12 to 12, and far
    out, where others are clipped.
    """
    far = [sign * size for size in (30.0, 100.0, 1000.0) for sign in (-1, 1)]
    axis = mx.concatenate([mx.linspace(-12, 12, 49), mx.array(far)])
    up, gate = mx.meshgrid(axis, axis, indexing="ij")
    try:
        got = activation(up, gate)
    except (TypeError, ValueError, RuntimeError):
        return None
    if not isinstance(got, mx.array) or got.shape != up.shape:
        return None
    wanted = {
        Gate("silu"): nn.silu(gate) * up,
        Gate("gelu_approx"): nn.gelu_approx(gate) * up,
    }
    alpha, limit = (getattr(activation, n, None) for n in ("_alpha", "_limit"))
    if isinstance(alpha, float) and isinstance(limit, float):
        a = mx.minimum(gate, limit)
        clipped = (mx.clip(up, -limit, limit) + 1) * (a * mx.sigmoid(alpha * a))
        wanted[Gate("clipped", alpha, limit)] = clipped
    for found, right in wanted.items():
        if (mx.abs(got - right) <= 1e-4 + 1e-5 * mx.abs(right)).all().item():
            return found
    return None


class Experts(_Parent):
    """Mixed into SwitchGLU's class: gate, up and the activation are one launch."""

    _gate: Gate

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        key = (x.shape, x.dtype, indices.shape, indices.dtype)
        found = self._traces.get(key)
        if found is None:
            found = self._trace_experts(key, x, indices)
        if not found:
            return self._stock.__call__(self, x, indices)
        call, routes = found
        for route in routes:
            if route.launch is None:
                # A kernel was switched off since: the layers know what to do.
                self._traces.clear()
                return self._stock.__call__(self, x, indices)
            route.calls += 1
        return call(x, indices)

    def pop(self, *args):
        # nn.Module also calls it for each plain attribute that is set: an activation
        # that is a function is one.
        value = super().pop(*args)
        if args[0] == "activation":
            release_parent(self)
        return value

    def _trace_experts(
        self, key: tuple, x: mx.array, indices: mx.array
    ) -> tuple[Callable, list[Route]] | tuple[()]:
        layers = [self[name] for name in PROJECTIONS]
        if x.shape[:-1] != indices.shape[:-1] or any(
            # New weights would not end the trace: see `_Parent`.
            m.__dict__.get("_owner") is not self._traces or m._train
            for m in layers
        ):
            return ()
        if x.size > MAX_M * x.shape[-1]:
            # Prompts of any length share what serves as many pairs.
            pairs = pairs_bucket(indices.size)
            key = (pairs, indices.shape[-1], indices.dtype, x.shape[-1], x.dtype)
            if (known := self._traces.get(key)) is not None:
                return known
        # Asking is slow, so that stock serves is remembered too.
        found = experts_call(*layers, self._gate, x, indices) or ()
        if len(self._traces) < MAX_CACHED:
            self._traces[key] = found
        return found


def experts_call(
    gate: PhaseQuantizedSwitchLinear,
    up: PhaseQuantizedSwitchLinear,
    down: PhaseQuantizedSwitchLinear,
    kind: Gate,
    x: mx.array,
    indices: mx.array,
) -> tuple[Callable, list[Route]] | None:
    """A function (x [..., K], indices [..., k]) -> [..., k, N] and its routes.

    For as many rows as x has; up to 16 are exact. None where no kernels take all three
    layers.
    """
    first, second = (
        m.problem(mx.expand_dims(x, (-2, -3)), indices) for m in (gate, up)
    )
    if first != second or not isinstance(first, Gather):
        return None
    last = down.problem(mx.zeros((*indices.shape, 1, first.matmul.N), x.dtype), indices)
    if not isinstance(last, Gather):
        return None
    first, few = replace(first, **vars(kind)), x.size <= MAX_M * x.shape[-1]
    if not few:
        first = replace(first, each=0, sorted=True, exact=False)
        last = replace(last, sorted=True, scattered=True, exact=False)
    routes = [kernel_route(first), kernel_route(last)]
    if any(route.launch is None for route in routes):
        return None
    glu, back = (route.launch for route in routes)
    weights = [*gate._weights(), *up._weights()], down._weights()
    if not few:
        return partial(_many, glu, back, tile_list(first), *weights), routes
    call = partial(_few, glu, back, *weights)
    if executor_name() == "cpu":
        return call, routes
    mx.eval(weights)
    return mx.compile(lambda x, indices: call(x, indices)), routes


def _few(glu, back, halves, rest, x: mx.array, indices: mx.array) -> mx.array:
    # A model's indices are a slice: copied once, not for each launch.
    indices = mx.contiguous(indices)
    return back(glu(x, indices, *halves), indices, *rest).squeeze(-2)


def _many(glu, back, make_list, halves, rest, x, indices: mx.array) -> mx.array:
    """Pairs sorted by expert: x is read and y written where their tokens have them."""
    experts = indices.flatten()
    order = mx.argsort(experts)
    experts = experts[order]
    tiles = make_list(experts)
    rows = order // indices.shape[-1]
    hidden = glu(x, experts, *halves, lhs=rows, tiles=tiles)
    y = back(hidden, experts, *rest, to=order, tiles=tiles)
    return y.reshape(*indices.shape, y.shape[-1])
