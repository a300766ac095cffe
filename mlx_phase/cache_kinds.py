"""mlx-lm's caches around a traced step: which fit, their room, what is noted after.

The caches stay what they are: saved, loaded, trimmed and merged as ever. After a step
they are as their own code would have left them, but for spare room at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from .step_cache import (
    BatchRotatingStep,
    BatchStep,
    Position,
    QuantizedStep,
    RotatingStep,
    StepCache,
)


def room_for(length: int, need: int, step: int, most: int | None = None) -> int:
    """Keys to add for ``need``: an eighth more, so that texts are traced seldom, to a
    multiple of ``step``, so that layers of two kinds grow together."""
    if need <= length:
        return 0
    whole = -(-max(need, length + length // 8) // step) * step
    return (whole if most is None else min(whole, most)) - length


def extended(a: mx.array, more: int) -> mx.array:
    """A buffer [..., length, width] with room for so many keys more."""
    room = mx.zeros((*a.shape[:2], more, a.shape[3]), a.dtype)
    return mx.concatenate([a, room], axis=2)


def _ring_room(c: Any, seen: int, L: int) -> int:
    """Room in a ring that has seen so many tokens; gives how many keys it dropped."""
    length = c.keys.shape[2]
    if more := room_for(length, min(seen + L, c.max_size), c.step, c.max_size):
        c.keys, c.values = extended(c.keys, more), extended(c.values, more)
        c._idx = seen
    # A prompt leaves more keys than the window.
    dropped = max(0, length - c.max_size)
    if dropped:
        c.keys, c.values = c._trim(dropped, c.keys), c._trim(dropped, c.values)
        c._idx = c.max_size
    return dropped


class Kind:
    """How steps of L tokens treat a ``KVCache``; other kinds differ where they say."""

    view: type[StepCache] = StepCache
    # Offsets are arrays, so whether layers agree on them is not known without a look.
    batched = False

    def state(self, c: Any, L: int) -> tuple | None:
        """What caches that share a `Position` have in common, all that says what room
        they need among it; None: no such step."""
        return c.offset, self.buffers(c)[0].shape[2]

    def states(self, caches: Sequence[Any], L: int) -> list[tuple | None]:
        """The state of each; None also where there are no buffers."""
        return [None if self.new(c) else self.state(c, L) for c in caches]

    def new(self, c: Any) -> bool:
        """Whether a cache has no buffers yet."""
        return c.keys is None

    def empty(self, c: Any, L: int) -> bool:
        """Whether a new cache takes a prompt of L tokens, the first of them apart."""
        return True

    def room(self, c: Any, L: int) -> None:
        """Make room for the step, as the cache's own update would."""
        if more := room_for(c.keys.shape[2], c.offset + L, c.step):
            c.keys, c.values = extended(c.keys, more), extended(c.values, more)

    def fixed(self, c: Any) -> tuple:
        """What a trace takes as constant: arguments of `view` behind the position."""
        return ()

    def buffers(self, c: Any) -> Sequence[mx.array]:
        """The arrays that a trace takes and gives back."""
        return c.keys, c.values

    def place(self, c: Any, L: int) -> tuple[int, int]:
        """Where the step's first key goes, and the keys there are after the step."""
        return c.offset, c.offset + L

    def lens(self, c: Any, B: int, keys: int) -> mx.array:
        """`Position.lens`."""
        return mx.array([keys] * B, mx.int32)

    def starts(self, c: Any) -> list[mx.array]:
        """`Position.start`, then `Position.left` where there is padding."""
        return [mx.array(c.offset, mx.int32)]

    def after(self, at: Position, L: int, fixed: tuple) -> list[mx.array]:
        """What `starts` gives after the step, computed in the trace if at all."""
        return []

    def done(self, c: Any, L: int, buffers: Sequence, after: list[mx.array]) -> None:
        """Note a step in the cache."""
        c.keys, c.values = buffers
        c.offset += L

    def all_buffers(self, caches: Sequence[Any]) -> list[mx.array]:
        """The buffers of caches, one after the other."""
        return [a for c in caches for a in self.buffers(c)]

    def all_done(
        self, caches: Sequence[Any], L: int, arrays: Sequence, after: list[mx.array]
    ) -> None:
        """Note a step in caches: ``arrays`` in the order of `all_buffers`."""
        turns = zip(*[iter(arrays)] * (len(arrays) // len(caches)), strict=True)
        for c, buffers in zip(caches, turns, strict=True):
            self.done(c, L, buffers, after)


class Quantized(Kind):
    """``QuantizedKVCache``."""

    view = QuantizedStep

    def room(self, c: Any, L: int) -> None:
        if more := room_for(c.keys[0].shape[2], c.offset + L, c.step):
            c.keys = tuple(extended(a, more) for a in c.keys)
            c.values = tuple(extended(a, more) for a in c.values)

    def fixed(self, c: Any) -> tuple:
        return c.group_size, c.bits

    def buffers(self, c: Any) -> Sequence[mx.array]:
        return *c.keys, *c.values

    def done(self, c: Any, L: int, buffers: Sequence, after: list[mx.array]) -> None:
        c.keys, c.values = tuple(buffers[:3]), tuple(buffers[3:])
        c.offset += L


class Rotating(Kind):
    """``RotatingKVCache``."""

    view = RotatingStep

    def state(self, c: Any, L: int) -> tuple | None:
        return self.fits(c, c.keys.shape[2], L)

    def fits(self, c: Any, length: int, L: int) -> tuple | None:
        """`state` of a cache whose buffers have this length."""
        if c.offset > length < c.max_size:
            return None
        # Several tokens that wrap make the stock cache longer than its window.
        if L > 1 and (c.offset + L > c.max_size or c._idx != c.offset):
            return None
        return c.offset, c._idx, c.max_size, c.keep, length

    def empty(self, c: Any, L: int) -> bool:
        return L <= c.max_size

    def room(self, c: Any, L: int) -> None:
        _ring_room(c, c.offset, L)
        if c._idx == c.max_size:
            c._idx = c.keep

    def fixed(self, c: Any) -> tuple:
        return (c.max_size,)

    def place(self, c: Any, L: int) -> tuple[int, int]:
        return c._idx, min(c.offset + L, self.buffers(c)[0].shape[2])

    def done(self, c: Any, L: int, buffers: Sequence, after: list[mx.array]) -> None:
        c.keys, c.values = buffers
        c.offset += L
        c._idx += L


class _Batch(Kind):
    view = BatchStep
    batched = True

    def state(self, c: Any, L: int) -> tuple | None:
        return (c._idx, c.keys.shape[2]) if self.empty(c, L) else None

    def empty(self, c: Any, L: int) -> bool:
        # A cache that was loaded lacks the attribute.
        return getattr(c, "_right_padding", None) is None

    def room(self, c: Any, L: int) -> None:
        if more := room_for(c.keys.shape[2], c._idx + L, c.step):
            c.keys, c.values = extended(c.keys, more), extended(c.values, more)

    def place(self, c: Any, L: int) -> tuple[int, int]:
        return c._idx, c._idx + L

    def starts(self, c: Any) -> list[mx.array]:
        return [c.offset, c.left_padding]

    def after(self, at: Position, L: int, fixed: tuple) -> list[mx.array]:
        return [at.start + L]

    def done(self, c: Any, L: int, buffers: Sequence, after: list[mx.array]) -> None:
        c.keys, c.values = buffers
        c._idx += L
        # The cache's own code adds to these in place, so each has an array of its own.
        c.offset = copy(after[0])


class _BatchRotating(_Batch):
    view = BatchRotatingStep

    def state(self, c: Any, L: int) -> tuple | None:
        length = c.keys.shape[2]
        if L > 1 or not self.empty(c, L) or c._offset > length < c.max_size:
            return None
        if not c.rotated and c._idx < c.max_size and c._idx != c._offset:
            return None
        return c._offset, c._idx, c.max_size, c.rotated, length

    def empty(self, c: Any, L: int) -> bool:
        return L <= 2 and getattr(c, "_lengths", None) is None

    def room(self, c: Any, L: int) -> None:
        if dropped := _ring_room(c, c._offset, L):
            c.left_padding = c.left_padding - dropped
        if c._idx == c.max_size:
            c.rotated, c._idx = True, 0

    def fixed(self, c: Any) -> tuple:
        return c.max_size, c.rotated

    def place(self, c: Any, L: int) -> tuple[int, int]:
        return c._idx, min(c._offset + L, c.keys.shape[2])

    def after(self, at: Position, L: int, fixed: tuple) -> list[mx.array]:
        rotated = fixed[1]
        return [at.start + L, at.left - L] if rotated else [at.start + L]

    def done(self, c: Any, L: int, buffers: Sequence, after: list[mx.array]) -> None:
        super().done(c, L, buffers, after)
        c._offset += L
        if len(after) > 1:
            c.left_padding = copy(after[1])


KINDS: dict[type, Kind] = {
    KVCache: Kind(),
    QuantizedKVCache: Quantized(),
    RotatingKVCache: Rotating(),
    BatchKVCache: _Batch(),
    BatchRotatingKVCache: _BatchRotating(),
}
