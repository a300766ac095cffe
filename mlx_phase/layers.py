"""Drop-in layers: the stock classes with another product, made by class swap.

`adopt` turns a layer into its drop-in and `release` turns it back. Parameters stay
the very same arrays, `isinstance` holds, and nothing is added to `parameters()`.
"""

from weakref import WeakValueDictionary

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import (
    QuantizedAllToShardedLinear,
    QuantizedShardedToAllLinear,
)
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from .gather_ops import gathered
from .gather_ops import kernel_route as gather_route
from .ops import MAX_M, Bound, Route, route_linear, route_quantized, stock_route
from .plan_gather import MAX_PAIRS
from .plan_qmm import bucket
from .problem import Gather
from .siblings import Siblings

TRAINING = "layer in training mode: the kernels have no gradient"
# Shapes a layer remembers; decode uses a handful, so more means odd use.
MAX_CACHED = 64
# Layers that may hold routes, by id: copies of layers are among them.
_BOUND: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()


# What `adopt`, `join` and the layer itself keep beside the parameters.
_OWN = ("_routes", "_train", "_siblings", "_sibling", "_joined", "_owner", "_exact")


class _Phase:
    """What the drop-ins share: routes by (shape, dtype) of x, kept off the params."""

    _routes: dict[tuple, Bound]
    _siblings: Siblings | None = None
    _sibling: int = 0
    _joined: Siblings | None = None
    _owner: dict | None = None
    _train: bool = False
    _exact: bool = True

    def _find(self, x: mx.array) -> Bound:
        key, M = (x.shape, x.dtype), x.size // max(1, x.shape[-1])
        if many := M > MAX_M:
            # One for all prompts with one plan. A trace would hardly be used again.
            key = bucket(M), x.shape[-1], x.dtype
            if (bound := self._routes.get(key)) is not None:
                return bound
        route = stock_route(TRAINING) if self._train else self._choose(x)
        keep = len(self._routes) < MAX_CACHED
        bound = Bound(route, self._weights(), trace=keep and not many)
        if keep:
            self._routes[key] = bound
            _BOUND[id(self)] = self
        return bound

    def _weights(self) -> list[mx.array]:
        arrays = (self["weight"], self["scales"], self.get("biases"))
        return [a for a in arrays if a is not None]

    def _choose(self, x: mx.array) -> Route:
        return route_quantized(
            x,
            self["weight"],
            self["scales"],
            self.get("biases"),
            True,
            self.group_size,
            self.bits,
            self.mode,
            self._exact,
        )

    def _product(self, x: mx.array) -> mx.array | None:
        """x @ W.T without bias, or None where stock has to serve."""
        bound = self._routes.get((x.shape, x.dtype)) or self._find(x)
        bound.route.calls += 1
        return None if bound.route.launch is None else bound.call(x)

    def __setitem__(self, key: str, value) -> None:
        # New weights may have another shape or dtype than the routes assume.
        super().__setitem__(key, value)
        self._forget()

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        self._forget()

    def pop(self, *args):
        # nn.Module also calls it for each plain attribute that is set.
        value = super().pop(*args)
        self._forget()
        return value

    def __getstate__(self) -> dict:
        # A copy (also copy.copy) or pickle is on its own and binds its own weights.
        state = {k: v for k, v in self.__dict__.items() if k not in _OWN}
        return state | {"_routes": {}, "_train": self._train, "_exact": self._exact}

    def _set_training_mode(self, mode: bool) -> None:
        super()._set_training_mode(mode)
        object.__setattr__(self, "_train", bool(mode))
        object.__setattr__(self, "_siblings", None if mode else self._joined)
        self._forget()

    def _forget(self) -> None:
        # Unpickling sets items before attributes.
        self.__dict__.get("_routes", {}).clear()
        if self._joined is not None:
            self._joined.forget()
        if self._owner is not None:
            self._owner.clear()


class PhaseQuantizedLinear(_Phase, nn.QuantizedLinear):
    """nn.QuantizedLinear on the decode kernels."""

    def __call__(self, x: mx.array) -> mx.array:
        y, siblings = None, self._siblings
        if siblings is not None:
            y = siblings.take(self._sibling, x)
        if y is None and (y := self._product(x)) is None:
            return nn.QuantizedLinear.__call__(self, x)
        return y + self["bias"] if "bias" in self else y


class PhaseQuantizedEmbedding(_Phase, nn.QuantizedEmbedding):
    """nn.QuantizedEmbedding whose `as_linear` (tied head) uses the kernels."""

    def as_linear(self, x: mx.array) -> mx.array:
        if (y := self._product(x)) is None:
            return nn.QuantizedEmbedding.as_linear(self, x)
        return y


class PhaseAllToSharded(_Phase, QuantizedAllToShardedLinear):
    """QuantizedAllToShardedLinear; its gradient hook only acts in training."""

    def __call__(self, x: mx.array) -> mx.array:
        if (y := self._product(x)) is None:
            return QuantizedAllToShardedLinear.__call__(self, x)
        return y + self["bias"] if "bias" in self else y


class PhaseShardedToAll(_Phase, QuantizedShardedToAllLinear):
    """QuantizedShardedToAllLinear: product, sum over the group, bias."""

    def __call__(self, x: mx.array) -> mx.array:
        if (y := self._product(x)) is None:
            return QuantizedShardedToAllLinear.__call__(self, x)
        y = mx.distributed.all_sum(y, group=self.group)
        return y + self["bias"] if "bias" in self else y


class _Plain(_Phase):
    def _weights(self) -> list[mx.array]:
        return [self["weight"]]

    def _choose(self, x: mx.array) -> Route:
        return route_linear(x, self["weight"], self.get("bias"))


class PhaseLinear(_Plain, nn.Linear):
    """nn.Linear (plain fp16, bf16 or fp32 weights) on the decode kernels."""

    def __call__(self, x: mx.array) -> mx.array:
        if (y := self._product(x)) is None:
            return nn.Linear.__call__(self, x)
        return y + self["bias"] if "bias" in self else y


class PhaseEmbedding(_Plain, nn.Embedding):
    """nn.Embedding whose `as_linear` (tied head) uses the kernels."""

    def as_linear(self, x: mx.array) -> mx.array:
        if (y := self._product(x)) is None:
            return nn.Embedding.as_linear(self, x)
        return y


class PhaseQuantizedSwitchLinear(_Phase, QuantizedSwitchLinear):
    """QuantizedSwitchLinear on the gathered kernels, its bias in the same launch."""

    def __call__(self, x, indices, sorted_indices=False):
        key = (x.shape, x.dtype, indices.shape, indices.dtype, bool(sorted_indices))
        bound = self._routes.get(key) or self._bind(key, x, indices)
        bound.route.calls += 1
        if bound.route.launch is None:
            return QuantizedSwitchLinear.__call__(self, x, indices, sorted_indices)
        return bound.call(x, indices)

    def _bind(self, key: tuple, x: mx.array, indices: mx.array) -> Bound:
        route = stock_route(TRAINING)
        if not self._train:
            route = gather_route(self.problem(x, indices, key[4]))
        few = indices.size <= MAX_PAIRS
        bound = Bound(route, self._weights(), trace=few)
        if few and route.launch is not None and len(self._routes) < MAX_CACHED:
            self._routes[key] = bound
            _BOUND[id(self)] = self
        return bound

    def _weights(self) -> list[mx.array]:
        return super()._weights() + ([self["bias"]] if "bias" in self else [])

    def problem(self, x, indices, sorted_indices: bool = False) -> Gather | Route:
        """What a call computes, or the route of calls that no kernel takes.

        ValueError for arguments that do not belong together.
        """
        if self.get("global_scale") is not None:
            return stock_route("a global scale")
        w, scales, biases = self["weight"], self["scales"], self.get("biases")
        args = (None, indices, True, self.group_size, self.bits, self.mode)
        # Also asked of a layer that is to be adopted.
        exact = getattr(self, "_exact", True)
        options = {"sorted_indices": sorted_indices, "exact": exact}
        bias = self.get("bias")
        return gathered(x, w, scales, biases, *args, bias=bias, **options)


QUANTIZED: dict[type, type] = {
    nn.QuantizedLinear: PhaseQuantizedLinear,
    nn.QuantizedEmbedding: PhaseQuantizedEmbedding,
    QuantizedAllToShardedLinear: PhaseAllToSharded,
    QuantizedShardedToAllLinear: PhaseShardedToAll,
}
PLAIN: dict[type, type] = {nn.Linear: PhaseLinear, nn.Embedding: PhaseEmbedding}
EXPERTS: dict[type, type] = {QuantizedSwitchLinear: PhaseQuantizedSwitchLinear}
DROP_INS = QUANTIZED | PLAIN | EXPERTS
STOCK: dict[type, type] = {p: s for s, p in DROP_INS.items()}


def adopted(layer: nn.Module) -> bool:
    """Whether a layer is a drop-in now."""
    return type(layer) in STOCK


def adopt(layer: nn.Module) -> None:
    """Swap a stock layer's class for its drop-in (exact types only)."""
    kind = DROP_INS[type(layer)]
    # Not a module item: those are parameters and children.
    object.__setattr__(layer, "_routes", {})
    try:
        layer.__class__ = kind
    except TypeError:
        object.__delattr__(layer, "_routes")
        raise
    _BOUND[id(layer)] = layer


def set_exact(layer: nn.Module, exact: bool) -> None:
    """Have a drop-in give a row the same bits for every M, or the faster kernel."""
    if layer._exact != exact:
        object.__setattr__(layer, "_exact", exact)
        layer._forget()


def forget_routes() -> None:
    """Have every drop-in of the process ask for its routes again: plans changed."""
    for layer in list(_BOUND.values()):
        if adopted(layer):
            layer._forget()


def release(layer: nn.Module) -> None:
    """Give a drop-in its stock class back; its arrays were never touched."""
    part(layer)
    # Traces of its parent hold its weights and would not hear of new ones.
    layer._forget()
    layer.__class__ = STOCK[type(layer)]
    for name in _OWN:
        layer.__dict__.pop(name, None)


def join(members: list[nn.Module]) -> None:
    """Have drop-ins that read the same x share a launch."""
    siblings = Siblings(members)
    for i, m in enumerate(members):
        object.__setattr__(m, "_joined", siblings)
        object.__setattr__(m, "_siblings", None if m._train else siblings)
        object.__setattr__(m, "_sibling", i)
        # A copy that only shares launches has no route of its own.
        _BOUND[id(m)] = m


def part(layer: nn.Module) -> None:
    """End the launches that a drop-in shares, for its siblings too."""
    if layer._joined is not None:
        layer._joined.separate()
