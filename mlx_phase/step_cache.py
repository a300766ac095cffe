"""A layer's KVCache as a traced step sees it: shapes fixed, offset on the device.

The stock cache slices by a Python number, which would make every step another graph.
Here the buffers keep their length between growths, new keys go to an offset that is
an array, and attention is told how many keys there are.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from .launch.fused import Rotary
from .rotary import Rope, angles, same_rope


class Untraceable(RuntimeError):
    """A model asks its cache for something that a fixed trace cannot give."""


class Position:
    """Where a step's tokens go, shared by the layers of one trace.

    start: int32 scalar array, keys that exist before the step. length: its tokens.
    lens: int32 [batch], keys that exist after it.
    """

    def __init__(self, start: mx.array, batch: int, length: int):
        self.start = start
        self.index = start + mx.arange(length, dtype=mx.int32)
        # Kernels read it as it lies in memory, so no broadcast.
        self.lens = start + mx.full((batch,), length, mx.int32)
        self._angles: dict[tuple, mx.array] = {}
        self._places: dict[tuple, mx.array] = {}

    def places(self, shape: tuple[int, ...]) -> mx.array:
        """The position of each element of new keys [B, Hkv, L, D] along axis 2."""
        if shape not in self._places:
            index = self.index[None, None, :, None]
            self._places[shape] = mx.broadcast_to(index, shape)
        return self._places[shape]

    def angles(self, rope: Rope, rotary: Rotary) -> mx.array:
        """cos and sin of the step's positions, once for all layers with such a rope."""
        key = (rotary, *same_rope(rope))
        if key not in self._angles:
            length = self.index.shape[0]
            self._angles[key] = angles(rope, rotary, length, self.start)
        return self._angles[key]


class StepCache:
    """One layer's cache inside the trace; stands in for ``KVCache``."""

    def __init__(self, keys: mx.array, values: mx.array, position: Position):
        self.keys, self.values, self.position = keys, values, position

    @property
    def offset(self) -> mx.array:
        """Position of the step's first token, int32 scalar on the device."""
        return self.position.start

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Write [B, Hkv, L, D] at the offset; gives the whole buffers."""
        self.keys = self._put(self.keys, keys)
        self.values = self._put(self.values, values)
        return self.keys, self.values

    def _put(self, buffer: mx.array, new: mx.array) -> mx.array:
        if new.dtype != buffer.dtype:
            raise Untraceable(f"new keys are {new.dtype}, the cache is {buffer.dtype}")
        return mx.put_along_axis(buffer, self.position.places(new.shape), new, axis=2)

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> str | None:
        """None or "causal", aligned to the keys there are."""
        if return_array or window_size is not None:
            raise Untraceable("the model wants its mask as an array or with a window")
        return None if N == 1 else "causal"


def grow(cache: KVCache, need: int) -> None:
    """Give ``cache`` room for ``need`` keys, at least.

    An eighth more each time, so that a long generation is traced few times.
    """
    length = cache.keys.shape[2]
    if need <= length:
        return
    more = max(need - length, length // 8)
    more = -(-more // cache.step) * cache.step
    for name in ("keys", "values"):
        old = getattr(cache, name)
        room = mx.zeros((*old.shape[:2], more, old.shape[3]), old.dtype)
        setattr(cache, name, mx.concatenate([old, room], axis=2))
