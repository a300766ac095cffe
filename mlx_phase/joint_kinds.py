"""Joint caches around a traced step: see `cache_kinds.py` and `cache_joint.py`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import mlx.core as mx

from .cache_joint import JOINT, JOINT_CODES, JOINT_RING, end, forget_trimmed, settle
from .cache_kinds import KINDS, Kind, Quantized, Rotating, extended, room_for
from .joint_step import RECENT, JointCodes, JointRing, JointStep


def _grow(c: Any, more: int) -> None:
    if more:
        c.arrays = (*[extended(a, more) for a in c.kv], *c.recent)
        c.length += more


class _Joint(Kind):
    # Most caches of most steps: their methods on many take no call for each.
    view = JointStep
    _state, _arrays = attrgetter("offset", "held", "length"), attrgetter("arrays")

    def state(self, c: Any, L: int) -> tuple | None:
        return self._state(c)

    def states(self, caches: Sequence[Any], L: int) -> list[tuple | None]:
        return [*map(self._state, caches)]

    def new(self, c: Any) -> bool:
        return False

    def room(self, c: Any, L: int) -> None:
        forget_trimmed(c)
        if c.offset + L - c.held > RECENT:
            settle(c)
        _grow(c, room_for(c.length, c.offset + L, c.step))

    def lens(self, c: Any, B: int, keys: int) -> mx.array:
        return mx.array([[keys] * B, [c.held] * B, [end(c)] * B], mx.int32)

    def buffers(self, c: Any) -> Sequence[mx.array]:
        return c.arrays

    def all_buffers(self, caches: Sequence[Any]) -> list[mx.array]:
        return [*chain.from_iterable(map(self._arrays, caches))]

    def all_done(
        self, caches: Sequence[Any], L: int, arrays: Sequence, after: list[mx.array]
    ) -> None:
        turns = zip(*[iter(arrays)] * (len(arrays) // len(caches)), strict=True)
        for c, own in zip(caches, turns, strict=True):
            c.arrays = own
            c.offset += L


class _JointRing(_Joint, Rotating):
    view = JointRing

    def state(self, c: Any, L: int) -> tuple | None:
        found = self.fits(c, c.length, L)
        return None if found is None else (*found, c.held)

    def states(self, caches: Sequence[Any], L: int) -> list[tuple | None]:
        return [self.state(c, L) for c in caches]

    def room(self, c: Any, L: int) -> None:
        forget_trimmed(c)
        need = min(c.offset + L, c.max_size)
        _grow(c, room_for(c.length, need, c.step, c.max_size))
        if c._idx == c.max_size:
            settle(c)
            c._idx = c.held = c.keep
        elif c._idx + L - c.held > RECENT:
            settle(c)

    def all_done(
        self, caches: Sequence[Any], L: int, arrays: Sequence, after: list[mx.array]
    ) -> None:
        super().all_done(caches, L, arrays, after)
        for c in caches:
            c._idx += L


class _JointCodes(_Joint, Quantized):
    view = JointCodes


KINDS |= {JOINT: _Joint(), JOINT_RING: _JointRing(), JOINT_CODES: _JointCodes()}
