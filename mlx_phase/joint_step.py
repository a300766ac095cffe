"""Joint caches as a traced step sees them (`step_cache.py`, `cache_joint.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import mlx.core as mx

from .step_cache import Packed, Position, QuantizedStep, RotatingStep, StepCache

# Tokens whose keys may lie beside a joint cache: more are written less often, but each
# step copies those there are.
RECENT = 32


class JointStep(StepCache):
    """The same for joint caches: kv [2 B, Hkv, length, D], keys and then values, and
    recent [2 B, Hkv, RECENT, D], what comes in the place of some of its last; or three
    arrays each.

    A step leaves kv as it is: attention gets its keys beside it and gives the next
    recent ones. Whole keys and values are made for who asks for them alone.
    """

    # Attention of plain keys takes q and the step's keys in one array.
    packs = True

    def __init__(self, buffers: Sequence[mx.array], position: Position):
        half = len(buffers) // 2
        self.kv, self.recent = buffers[:half], buffers[half:]
        self.position, self.unread = position, False
        self.held, self.now = position.lens[1, 0], position.lens[2, 0]
        self._arrays: tuple[mx.array, ...] | None = None
        # q and fresh keys in one array, and the views of both.
        self._packed: tuple = None, None, None
        self._halves = self.keys, self.values = self._merged(self.now)

    def _merged(self, end: mx.array) -> list[mx.array | Packed]:
        """Whole keys and values, with the recent ones before place ``end``."""
        at = mx.arange(self.kv[0].shape[2]) - self.held
        recent = mx.clip(at, 0, RECENT - 1)
        there = ((at >= 0) & (at < end - self.held))[:, None]
        parts = [
            mx.split(mx.where(there, mx.take(b, recent, axis=2), a), 2)
            for a, b in zip(self.kv, self.recent, strict=True)
        ]
        return [self._whole(half) for half in zip(*parts, strict=True)]

    def buffers(self) -> list[mx.array]:
        """The arrays it was made of, with the step's keys in them."""
        now = self.keys, self.values
        if not all(map(is_, now, self._halves)):
            # A model has set them, as where they must wait for what it sends.
            self.came_apart, self._halves = True, now
            both = zip(*map(self._parts, now), strict=True)
            self.kv = [*map(mx.concatenate, both)]
            last = self.held + mx.arange(RECENT)
            last = mx.minimum(last, self.kv[0].shape[2] - 1)
            self.recent = [mx.take(a, last, axis=2) for a in self.kv]
        return [*self.kv, *self.recent]

    @property
    def lens(self) -> mx.array:
        """As `StepCache`."""
        return self.position.lens[0]

    def joint(self, q: mx.array, keys: mx.array, values: mx.array) -> tuple | None:
        """As `StepCache`."""
        if not all(map(is_, (keys, values), self._halves)) or self._arrays is None:
            return None
        if q is self._packed[1]:
            return self._packed[0], *self._arrays[:-1]
        return q, *self._arrays

    def take_packed(self, both: mx.array) -> tuple[mx.array, mx.array]:
        """Views of q and of the keys and values that lie behind it in one array.

        both: [1, Hq + 2 Hkv, L, D]. Attention with this q, once these others are
        written, gets the array itself.
        """
        _, heads, L, D = both.shape
        ours = self.kv[0].shape[1]
        q = both[:, : heads - 2 * ours]
        kv = both[:, heads - 2 * ours :].reshape(2, ours, L, D)
        self._packed = both, q, kv
        return q, kv

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple:
        """As `StepCache`."""
        self.came_apart = True
        return self.write(mx.concatenate([keys, values]))

    def write(self, new: mx.array) -> tuple:
        """Take the step's keys and values [2 B, Hkv, L, D]; gives the whole ones."""
        self.buffers()
        if new is not self._packed[2]:
            self._packed = None, None, None
        fresh, self.unread = self._coded(new), True
        self._arrays = (*self.kv, *self.recent, *fresh)
        self.recent = self._put(self.recent, fresh)
        self._halves = self.keys, self.values = self._merged(self.now + new.shape[2])
        return self.keys, self.values

    def _places(self, shape: tuple[int, ...]) -> mx.array:
        at = (self.position.index - self.held)[None, None, :, None]
        return mx.broadcast_to(at, shape)


class JointRing(RotatingStep, JointStep):
    """The same for rotating caches that are joint: places count in the ring."""


class JointCodes(QuantizedStep, JointStep):
    """The same for quantised caches that are joint."""

    packs = False
