"""One trace per decode step: the layers of a model as a single compiled call.

A decode step is bound by the host, and building its graph in Python is half of that.
The stock code of the model runs once, on stand-ins of its caches whose offsets are
arrays (`step_cache.py`); later steps replay that graph.
"""

from __future__ import annotations

import operator
import weakref
from operator import is_

import mlx.core as mx
import mlx.nn as nn

from . import rollback
from .attention_step import attention_of_step
from .cache_groups import Form, Group, fit_empty, grouped
from .cache_joint import USING, join_plain, part
from .class_swap import copied, mixed, swap_back
from .executor import executor_name
from .module_watch import changes, watch
from .ops import counted
from .plan import MAX_M
from .step_cache import Untraceable
from .trace import Trace

# Traces kept: one per number of rows and length of the buffers.
MAX_TRACES = 16
# Of a model's own code that is given arrays where it counts in Python.
ERRORS = (Untraceable, AttributeError, TypeError, ValueError, RuntimeError)


class Steps:
    """The traces of one module with ``layers`` and what they were made from."""

    def __init__(self, decoder: nn.Module):
        self._decoder = weakref.ref(decoder)
        # Why steps of one token (True), and of several, cannot be traced.
        self.reasons: dict[bool, str] = {}
        # Arrays that the last step left in caches of batches, for each group.
        self._left: list[list[tuple] | None] = []
        # Layers that give keys and values in two arrays, by their own word or as seen.
        self._apart = {
            i
            for i, layer in enumerate(decoder.layers)
            if not getattr(layer, "one_write", False)
        }
        # A head's trace holds its decoder, which may be in training by itself.
        inside = [m for _, m in decoder.named_modules() if m is not decoder]
        self._inside = [weakref.ref(m) for m in inside if traced(m)]
        self._forget()
        watch(self)

    def _forget(self) -> None:
        self._traces: dict[tuple, Trace] = {}
        self._made_from: tuple[list, ...] | None = None

    def takes(self, tokens: mx.array, caches: list | None) -> tuple | None:
        """The groups of a decode step's caches; None if it cannot be traced."""
        if not self._fits(tokens, caches):
            return None
        join_plain(caches, self._apart)
        found = grouped(caches, tokens.shape[1])
        left, self._left = self._left, []
        if found is not None:
            left += [None] * len(found[0])
            if all(map(Group.agree, found[0], left)):
                return found
        return None

    def starts(self, tokens: mx.array, caches: list | None) -> bool:
        """Whether a call is a short prompt on new caches, which have no buffers yet."""
        if not self._fits(tokens, caches) or tokens.shape[1] == 1:
            return False
        return fit_empty(caches, tokens.shape[1])

    def _fits(self, tokens: mx.array, caches: list | None) -> bool:
        """Whether there are as few rows, and as many caches, as traces take."""
        if not caches or tokens.ndim != 2 or tokens.shape[1] == 0:
            return False
        decoder = self._decoder()
        return (
            0 < tokens.size <= MAX_M
            and (tokens.shape[1] == 1) not in self.reasons
            and not decoder._train
            and not any(getattr(m(), "_train", False) for m in self._inside)
            and len(caches) == len(decoder.layers)
        )

    def run(
        self, tokens: mx.array, groups: list[Group], layout: tuple
    ) -> mx.array | None:
        """The step's output [B, L, hidden], caches advanced; None: not traceable.

        groups, layout: of `takes`. The caches' content changes only when the step has
        been built.
        """
        L = tokens.shape[1]
        args = [group.inputs(*tokens.shape) for group in groups]
        forms = [group.form() for group in groups]
        key = (tokens.shape, tokens.dtype, layout, *forms)
        # Before a new trace too: what is noted then holds for all of them.
        if self._traces and not self._unchanged():
            self._forget()
        if (trace := self._traces.get(key)) and trace.stale():
            self._forget()
            trace = None
        if trace is None:
            trace = self._new(key, layout, forms)
            try:
                h, *outs = trace.call(tokens, *args)
            except ERRORS as e:
                self.reasons[L == 1] = f"{type(e).__name__}: {e}"
                del self._traces[key]
                return None
        else:
            h, *outs = trace.call(tokens, *args)
        del args  # the last reference lets a buffer be written in place
        trace.count()
        self._left = [g.note(L, out) for g, out in zip(groups, outs, strict=True)]
        for group, i in trace.whole:
            part(groups[group].caches[i])
        return h

    def _new(self, key: tuple, layout: tuple, forms: list[Form]) -> Trace:
        while len(self._traces) >= MAX_TRACES:
            del self._traces[next(iter(self._traces))]
        decoder, stock, apart = self._decoder, self._decoder()._untraced, self._apart
        trace = self._traces[key] = Trace()

        def step(tokens: mx.array, *groups: list[mx.array]):
            views = [form.views(a) for form, a in zip(forms, groups, strict=True)]
            turns = [iter(v) for v in views]
            caches = [next(turns[group]) for group in layout]
            with attention_of_step(caches):
                h = stock.__call__(decoder(), tokens, caches)
            L = tokens.shape[1]
            outs = [f.results(v, L) for f, v in zip(forms, views, strict=True)]
            apart.update(i for i, c in enumerate(caches) if c.came_apart)
            found = ((g, v) for g, group in enumerate(views) for v in enumerate(group))
            trace.whole = [(g, i) for g, (i, c) in found if c.made_whole]
            return [h, *outs]

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
        decoder, self._looked = self._decoder(), changes()
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
        # Items of these change unseen.
        self._lists = [(h, [*h]) for h in whole if isinstance(h, list)]

    def _unchanged(self) -> bool:
        count = changes()
        if count != self._looked:
            if not self._all_unchanged():
                return False
            self._looked = count
        return all(len(a) == len(b) and all(map(is_, a, b)) for a, b in self._lists)

    def _all_unchanged(self) -> bool:
        homes, keys, values, whole, sizes = self._made_from
        try:
            now = map(operator.getitem, homes, keys)
            return all(map(is_, now, values)) and (
                all(map(operator.eq, map(len, whole), sizes))
            )
        except (KeyError, IndexError):
            return False


class _Traced:
    """Mixed into the class of the module that owns a model's layers, or of the one
    around it that has the head."""

    _steps: Steps
    _untraced: type
    _train: bool = False

    def _set_training_mode(self, mode: bool) -> None:
        super()._set_training_mode(mode)
        # A module is made in training mode: only a call says that it is meant.
        object.__setattr__(self, "_train", bool(mode))

    def __call__(self, inputs, cache=None, *args, **options):
        rollback.refuse(cache)
        steps = self._steps
        plain = not options and all(a is None for a in args)
        with USING:
            if plain and (found := steps.takes(inputs, cache)):
                if (h := steps.run(inputs, *found)) is not None:
                    return h
        if plain and steps.starts(inputs, cache):
            # Rows after the first run as they would one by one: the same bits.
            first = self._untraced.__call__(self, inputs[:, :1], cache)
            return mx.concatenate([first, self(inputs[:, 1:], cache)], axis=1)
        return self._untraced.__call__(self, inputs, cache, *args, **options)

    def __reduce_ex__(self, protocol):
        return copied(self, self._untraced, _OWN)


# What `trace_steps` keeps beside the parameters.
_OWN = ("_steps", "_untraced", "_train")


def find_decoder(model: nn.Module) -> nn.Module | None:
    """The module that owns the decoder layers and is called as (tokens, cache)."""
    for _, module in model.named_modules():
        layers = module.get("layers")
        if isinstance(layers, list) and layers and _takes_steps(module):
            return module
    return None


def _takes_steps(module: nn.Module) -> bool:
    # Some call their tokens x; callers give them by position.
    code = getattr(type(module).__call__, "__code__", None)
    return bool(code) and code.co_varnames[2 : code.co_argcount][:1] == ("cache",)


def find_outer(model: nn.Module, decoder: nn.Module) -> nn.Module | None:
    """The outermost module around ``decoder`` that is called alike: its head, too, can
    be in the trace; None if there is none."""
    own = [*map(id, decoder.layers)]
    for _, module in model.named_modules():
        # As a property it may make a new list each time.
        layers = getattr(module, "layers", None)
        if module is not decoder and isinstance(layers, list):
            if [*map(id, layers)] == own and _takes_steps(module):
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
