"""One trace per decode step: the layers of a model as a single compiled call.

A decode step is bound by the host, and building its graph in Python is half of that.
The stock code of the model runs once, on caches whose offset is an array
(`step_cache.py`); later steps replay that graph.
"""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from . import routes
from .attention_step import attention_of_step
from .class_swap import copied, mixed, swap_back
from .executor import executor_name
from .ops import Route, counted
from .plan import MAX_M
from .step_cache import Position, StepCache, Untraceable, grow

# Traces kept: one per number of rows and length of the buffers.
MAX_TRACES = 16


class Trace:
    """A compiled step and the routes that it calls, each with how often."""

    __slots__ = ("call", "routes", "kernels", "generation")

    def __init__(self) -> None:
        self.call: Callable[..., list[mx.array]]
        self.routes: list[tuple[Route, int]] = []
        self.kernels: list[Route] = []
        self.generation = routes.generation()

    def note(self, called: list[Route]) -> None:
        """Keep what one run of the model's code called."""
        self.routes = list(Counter(called).items())
        # Others are stock for good, by their reason.
        self.kernels = [route for route, _ in self.routes if route.launch is not None]

    def stale(self) -> bool:
        """Whether a kernel in it was switched off since, or all plans have changed."""
        if self.generation != routes.generation():
            return True
        return any(route.launch is None for route in self.kernels)

    def count(self) -> None:
        """Count the calls of one replay."""
        for route, calls in self.routes:
            route.calls += calls


class Steps:
    """The traces of one model and what they were made from."""

    def __init__(self, decoder: nn.Module):
        self._decoder = weakref.ref(decoder)
        self.reason: str | None = None
        self._forget()

    def _forget(self) -> None:
        self._traces: dict[tuple, Trace] = {}
        self._made_from: tuple[list, ...] | None = None

    def takes(self, tokens: mx.array, caches: list | None) -> bool:
        """Whether a call is a decode step that can be traced."""
        return self._fits(tokens, caches) and all(
            c.keys is not None and c.offset == caches[0].offset for c in caches
        )

    def starts(self, tokens: mx.array, caches: list | None) -> bool:
        """Whether a call is a short prompt on new caches, which have no buffers yet."""
        return (
            self._fits(tokens, caches)
            and tokens.shape[1] > 1
            and all(c.keys is None for c in caches)
        )

    def _fits(self, tokens: mx.array, caches: list | None) -> bool:
        """Whether there are as few rows, and such caches, as traces take."""
        if self.reason is not None or not caches or tokens.ndim != 2:
            return False
        decoder = self._decoder()
        return (
            0 < tokens.size <= MAX_M
            and not decoder._train
            and len(caches) == len(decoder.layers)
            and all(type(c) is KVCache for c in caches)
        )

    def run(self, tokens: mx.array, caches: list[KVCache]) -> mx.array | None:
        """The step's output [B, L, hidden], caches advanced; None: not traceable.

        The caches' content changes only when the step has been built.
        """
        start, length = caches[0].offset, tokens.shape[1]
        for cache in caches:
            grow(cache, start + length)
        keys = caches[0].keys
        key = (tokens.shape, tokens.dtype, keys.shape, keys.dtype)
        trace = self._traces.get(key)
        if trace is not None and (trace.stale() or not self._unchanged()):
            self._forget()
            trace = None
        args = [tokens, mx.array(start, mx.int32)]
        args += [a for c in caches for a in (c.keys, c.values)]
        if trace is None:
            trace = self._new(key)
            try:
                h, *buffers = trace.call(*args)
            except (
                Untraceable,
                AttributeError,
                TypeError,
                ValueError,
                RuntimeError,
            ) as e:
                # The model's own code, given arrays where it counts in Python.
                self.reason = f"{type(e).__name__}: {e}"
                self._forget()
                return None
        else:
            h, *buffers = trace.call(*args)
        del args  # the last reference lets a buffer be written in place
        trace.count()
        for i, cache in enumerate(caches):
            cache.keys, cache.values = buffers[2 * i], buffers[2 * i + 1]
            cache.offset = start + length
        return h

    def _new(self, key: tuple) -> Trace:
        while len(self._traces) >= MAX_TRACES:
            del self._traces[next(iter(self._traces))]
        decoder, stock = self._decoder, self._decoder()._untraced
        trace = self._traces[key] = Trace()

        def step(tokens: mx.array, start: mx.array, *buffers: mx.array):
            position = Position(start, *tokens.shape)
            pairs = zip(buffers[::2], buffers[1::2], strict=True)
            caches = [StepCache(k, v, position) for k, v in pairs]
            with attention_of_step(position.lens):
                h = stock.__call__(decoder(), tokens, caches)
            return [h, *(a for c in caches for a in (c.keys, c.values))]

        def traced_step(*args):
            # Runs once a stream. Calls are counted by each replay, so not here.
            with counted() as called:
                out = step(*args)
            trace.note(called)
            return out

        # The CPU executor evaluates its inputs, so there the same code runs untraced.
        trace.call = step if executor_name() == "cpu" else mx.compile(traced_step)
        self._remember()
        return trace

    def _remember(self) -> None:
        """Note what the traces hold as constants: weights and modules, by identity."""
        homes, keys, values = [], [], []
        decoder = self._decoder()
        for _, module in decoder.named_modules():
            lists = [v for v in module.values() if isinstance(v, list)]
            # Weak: a model that is dropped frees its memory at once.
            own = weakref.proxy(module) if module is decoder else module
            for home in (own, *lists):
                homes += [home] * len(home)
                keys += range(len(home)) if isinstance(home, list) else home.keys()
                values += home if isinstance(home, list) else home.values()
        whole = list({id(h): h for h in homes}.values())
        self._made_from = homes, keys, values, whole, list(map(len, whole))

    def _unchanged(self) -> bool:
        homes, keys, values, whole, sizes = self._made_from
        try:
            now = map(operator.getitem, homes, keys)
            return all(map(operator.is_, now, values)) and (
                all(map(operator.eq, map(len, whole), sizes))
            )
        except (KeyError, IndexError):
            return False


class _Traced:
    """Mixed into the class of the module that owns a model's layers."""

    _steps: Steps
    _untraced: type
    _train: bool = False

    def _set_training_mode(self, mode: bool) -> None:
        super()._set_training_mode(mode)
        # A module is made in training mode: only a call says that it is meant.
        object.__setattr__(self, "_train", bool(mode))

    def __call__(self, inputs, cache=None, *args, **options):
        steps = self._steps
        plain = not options and all(a is None for a in args)
        if plain and steps.takes(inputs, cache):
            if (h := steps.run(inputs, cache)) is not None:
                return h
        elif plain and steps.starts(inputs, cache):
            # Rows after the first run as they would one by one: the same bits.
            first = self._untraced.__call__(self, inputs[:, :1], cache)
            return mx.concatenate([first, self(inputs[:, 1:], cache)], axis=1)
        return self._untraced.__call__(self, inputs, cache, *args, **options)

    def __reduce_ex__(self, protocol):
        return copied(self, self._untraced, _OWN)


# What `trace_steps` keeps beside the parameters.
_OWN = ("_steps", "_untraced", "_train")


def find_decoder(model: nn.Module) -> nn.Module | None:
    """The module that owns the decoder layers and is called as (inputs, cache)."""
    for _, module in model.named_modules():
        code = getattr(type(module).__call__, "__code__", None)
        names = code.co_varnames[1:3] if code else ()
        layers = module.get("layers")
        if isinstance(layers, list) and layers and names == ("inputs", "cache"):
            return module
    return None


def traced(module: nn.Module) -> bool:
    """Whether decode steps of a module are traced now."""
    return isinstance(module, _Traced)


def trace_steps(decoder: nn.Module) -> None:
    """Trace decode steps of ``decoder`` from now on."""
    if traced(decoder):
        release_steps(decoder)
    stock = type(decoder)
    object.__setattr__(decoder, "_untraced", stock)
    object.__setattr__(decoder, "_steps", Steps(decoder))
    decoder.__class__ = mixed(_Traced, stock)


def release_steps(decoder: nn.Module) -> None:
    """Give a decoder its own class back."""
    swap_back(decoder, decoder._untraced, _OWN)
