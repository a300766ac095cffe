"""A layer's cache as a traced step sees it: shapes fixed, offsets on the device.

A stock cache slices by Python numbers, which would make every step another graph. Here
the buffers keep their length between growths, new keys go to an index that is an
array, and attention is told how many keys there are (`cache_kinds.py` has the other
side, on the caches themselves).
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from .launch.fused import Rotary
from .rotary import Rope, angles, same_rope

Packed = tuple[mx.array, mx.array, mx.array]


class Untraceable(RuntimeError):
    """A model asks its cache for something that a fixed trace cannot give."""


class Position:
    """Where a step's tokens go, shared by the layers of one trace that agree on it.

    index: int32 [length], where in the buffers the step's keys go. lens: int32 [batch],
    keys that exist after it; for joint caches [3, batch], as `launch.attention` has it.
    start: int32 position of the first token for rotary embeddings, a scalar or one for
    each sequence [batch]. left: int32 [batch], keys at the left that are padding, or
    None.
    """

    def __init__(
        self,
        index: mx.array,
        lens: mx.array,
        start: mx.array,
        left: mx.array | None = None,
    ):
        self.index, self.lens, self.start, self.left = index, lens, start, left
        self._angles: dict[tuple, mx.array] = {}
        self._places: dict[tuple, mx.array] = {}

    def places(self, shape: tuple[int, ...]) -> mx.array:
        """The place of each element of new keys [B, Hkv, L, D] along axis 2."""
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

    def seen(self, length: int, window: int | None) -> mx.array:
        """bool [L, length], with padding [B, 1, L, length]: which keys a token sees."""
        keys, last = mx.arange(length, dtype=mx.int32), self.index[:, None]
        mask = keys <= last
        if window is not None:
            mask = mask & (keys > last - window)
        if self.left is not None:
            mask = mask & (keys >= self.left[:, None, None, None])
        return mask


class StepCache:
    """One layer's cache inside the trace; stands in for ``KVCache``."""

    # A joint cache was given keys and values in two arrays: a launch more than apart.
    came_apart = False
    # Attention had to have them whole, which is a copy of a joint cache.
    made_whole = False

    def __init__(self, buffers: Sequence[mx.array], position: Position):
        half = len(buffers) // 2
        self.keys, self.values = (
            self._whole(buffers[:half]),
            self._whole(buffers[half:]),
        )
        self.position = position
        # Keys that attention was not asked about: some models attend by themselves.
        self.unread = False

    def _whole(self, parts: Sequence[mx.array]) -> mx.array | Packed:
        return parts[0]

    def _parts(self, whole: mx.array | Packed) -> Sequence[mx.array]:
        return [whole] if isinstance(whole, mx.array) else whole

    def buffers(self) -> list[mx.array]:
        """The arrays it was made of, with the step's keys in them."""
        return [*self._parts(self.keys), *self._parts(self.values)]

    @property
    def offset(self) -> mx.array:
        """Position of the step's first token, on the device."""
        return self.position.start

    @property
    def length(self) -> int:
        """Keys that the buffers have room for."""
        return self.buffers()[0].shape[2]

    @property
    def lens(self) -> mx.array:
        """Keys that exist after the step, int32 [batch]."""
        return self.position.lens

    def joint(self, q: mx.array, keys: mx.array | Packed, values: mx.array | Packed):
        """The arrays of a joint problem that stand for these, if there are any."""
        return None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple:
        """Write [B, Hkv, L, D] at the index; gives the whole buffers."""
        self.keys = self._whole(self._put(self._parts(self.keys), self._coded(keys)))
        self.values = self._whole(
            self._put(self._parts(self.values), self._coded(values))
        )
        self.unread = True
        return self.keys, self.values

    def _coded(self, new: mx.array) -> Sequence[mx.array]:
        """New keys as the cache has them."""
        return [new]

    def _places(self, shape: tuple[int, ...]) -> mx.array:
        return self.position.places(shape)

    def _put(self, into: Sequence[mx.array], new: Sequence[mx.array]) -> list[mx.array]:
        """These arrays with what `_coded` gave at its places."""
        found = []
        for a, b in zip(into, new, strict=True):
            if a.dtype != b.dtype:
                raise Untraceable(f"new keys are {b.dtype}, the cache is {a.dtype}")
            found.append(mx.put_along_axis(a, self._places(b.shape), b, axis=2))
        return found

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """None, "causal" (aligned to the keys there are) or over the whole buffer."""
        if window_size is not None or (return_array and N > 1):
            return self.position.seen(self.length, window_size)
        return None if N == 1 else "causal"


class QuantizedStep(StepCache):
    """The same for ``QuantizedKVCache``: keys are (codes, scales, biases)."""

    def __init__(
        self,
        buffers: Sequence[mx.array],
        position: Position,
        group_size: int,
        bits: int,
    ):
        super().__init__(buffers, position)
        self.group_size, self.bits = group_size, bits

    def _whole(self, parts: Sequence[mx.array]) -> Packed:
        return tuple(parts)

    def _coded(self, new: mx.array) -> Sequence[mx.array]:
        return mx.quantize(new, group_size=self.group_size, bits=self.bits)


class RotatingStep(StepCache):
    """The same for ``RotatingKVCache``: one token, or several that do not wrap."""

    def __init__(self, buffers: Sequence[mx.array], position: Position, max_size: int):
        super().__init__(buffers, position)
        self.max_size = max_size

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:
        """As the stock cache: a ring holds no key that lies outside the window."""
        if (window_size or self.max_size) >= self.max_size:
            return super().make_mask(N, return_array)
        if N == 1:
            raise Untraceable("a window smaller than its rotating cache")
        return super().make_mask(N, return_array, window_size)


class BatchStep(StepCache):
    """The same for ``BatchKVCache``: each sequence begins after its padding."""

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """bool [B, 1, N, length] over the whole buffer."""
        return self.position.seen(self.length, window_size)


class BatchRotatingStep(StepCache):
    """The same for ``BatchRotatingKVCache`` and one token.

    rotated: the buffer has wrapped; its oldest key is the one after the new one.
    """

    def __init__(
        self, buffers: Sequence[mx.array], position: Position, max_size: int,
        rotated: bool,
    ):  # fmt: skip
        super().__init__(buffers, position)
        self.max_size, self.rotated = max_size, rotated

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array:
        """bool [B, 1, 1, length] over the whole buffer."""
        last, left = self.position.index, self.position.left
        age = last - mx.arange(self.length, dtype=mx.int32)
        if self.rotated:
            # This step drops the oldest key, so that padding is one shorter.
            age, last, left = age % self.length, self.length - 1, left - 1
        seen = (age >= 0) & (age < min(window_size or self.max_size, self.max_size))
        return seen & (last - age >= left[:, None, None, None])
