"""The caches of a model in groups that agree on where a traced step goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import mlx.core as mx

from .cache_kinds import Kind
from .joint_kinds import KINDS
from .step_cache import Position, StepCache


@dataclass(frozen=True)
class Form:
    """A group of caches as a trace takes it: what is constant."""

    kind: Kind
    fixed: tuple
    caches: int
    shape: tuple[int, ...]
    dtype: mx.Dtype

    def views(self, arrays: list[mx.array]) -> list[StepCache]:
        """What stands in for the caches, from the arrays of `Group.inputs`."""
        first = 4 if self.kind.batched else 3
        index, lens, *starts = arrays[:first]
        at, each = Position(index, lens, *starts), (len(arrays) - first) // self.caches
        return [
            self.kind.view(arrays[i : i + each], at, *self.fixed)
            for i in range(first, len(arrays), each)
        ]

    def results(self, views: list[StepCache], L: int) -> list[mx.array]:
        """What `Group.note` takes, when a step has used the views."""
        after = self.kind.after(views[0].position, L, self.fixed)
        return [a for view in views for a in view.buffers()] + after


class Group:
    """Caches of one kind that agree on where a step goes."""

    def __init__(self, kind: Kind, caches: list):
        self.kind, self.caches = kind, caches

    def agree(self, known: list[tuple] | None) -> bool:
        """Whether offsets that are arrays are equal. ``known``: what `note` gave."""
        if not self.kind.batched or len(self.caches) == 1:
            return True
        starts = [tuple(self.kind.starts(c)) for c in self.caches]
        if known is not None and len(known) == len(starts):
            pairs = zip(starts, known, strict=True)
            if all(all(map(is_, s, k)) for s, k in pairs):
                return True
        columns = [mx.stack(column) for column in zip(*starts, strict=True)]
        # Reads arrays once after a batch has changed.
        return all(bool((c == c[:1]).all()) for c in columns)

    def inputs(self, B: int, L: int) -> list[mx.array]:
        """Arrays of a step of B sequences and L tokens; makes room in the caches."""
        kind, first = self.kind, self.caches[0]
        before = kind.state(first, L)
        kind.room(first, L)
        # They are in one state, so where the first has room all have.
        if kind.state(first, L) != before:
            for cache in self.caches[1:]:
                kind.room(cache, L)
        at, keys = kind.place(first, L)
        numbers = (
            mx.array([*range(at, at + L)], mx.int32),
            kind.lens(first, B, keys),
        )
        return [*numbers, *kind.starts(first), *kind.all_buffers(self.caches)]

    def form(self) -> Form:
        """What a trace takes as constant, when there is room."""
        kind, first = self.kind, self.caches[0]
        buffer = kind.buffers(first)[0]
        return Form(
            kind, kind.fixed(first), len(self.caches), buffer.shape, buffer.dtype
        )

    def note(self, L: int, arrays: list[mx.array]) -> list[tuple] | None:
        """Note a step in the caches; gives the arrays that all of them hold now."""
        kind, n = self.kind, len(self.kind.buffers(self.caches[0])) * len(self.caches)
        kind.all_done(self.caches, L, arrays[:n], arrays[n:])
        return [tuple(kind.starts(c)) for c in self.caches] if kind.batched else None


def grouped(caches: Sequence[Any], L: int) -> tuple[list[Group], tuple] | None:
    """Groups of a step's caches and each layer's group; None: one does not fit.

    Caches without buffers fit no step.
    """
    kinds = [*map(KINDS.get, map(type, caches))]
    if None in kinds:
        return None
    # Most often all are alike: this is on the path of each step.
    if kinds.count(kinds[0]) == len(kinds):
        states = kinds[0].states(caches, L)
    else:
        pairs = zip(kinds, caches, strict=True)
        states = [kind.states([c], L)[0] for kind, c in pairs]
    keys = [*zip(kinds, states, strict=True)]
    if keys.count(keys[0]) == len(keys):
        groups, layout = {keys[0]: Group(kinds[0], [*caches])}, (0,) * len(keys)
    else:
        groups = {key: Group(key[0], []) for key in keys}
        for key, c in zip(keys, caches, strict=True):
            groups[key].caches.append(c)
        order = [*groups]
        layout = tuple(map(order.index, keys))
    if any(state is None for _, state in groups):
        return None
    return [*groups.values()], layout


def fit_empty(caches: Sequence[Any], L: int) -> bool:
    """Whether new caches fit a short prompt of L tokens, the first of them apart."""
    kinds = [KINDS.get(type(c)) for c in caches]
    return all(
        kind is not None and kind.new(c) and kind.empty(c, L)
        for kind, c in zip(kinds, caches, strict=True)
    )
