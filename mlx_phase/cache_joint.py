"""Keys and values of a cache in one array, for as long as only traced steps use them.

Those of the last tokens lie beside it, so that most steps write to no cache. Code of
mlx-lm sees keys and values as ever: whoever asks such a cache for them, or for what is
made of them, makes a plain cache of it again.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from .class_swap import mixed
from .joint_step import RECENT

# A cache that is asked within so many tokens of a step, so many times in a row, stays
# plain: to join it copies all of it.
SOON, TIMES = 16, 3
_asked: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
# Held for a whole step, or another thread that asks would take caches from under it.
USING = threading.RLock()


def _held(name: str) -> property:
    return property(
        lambda c: getattr(part(c), name), lambda c, value: setattr(part(c), name, value)
    )


class _Joint:
    """Mixed into a cache's class by :func:`join`.

    arrays: kv [2 B, Hkv, length, D], keys and then values, or three of codes; and then
    as many recent [2 B, Hkv, RECENT, D], what is to take its places from ``held`` to
    :func:`end`. length: of kv. since: its offset when it was joined, and by which
    thread.
    """

    keys, values = _held("keys"), _held("values")
    kv = property(lambda c: c.arrays[: len(c.arrays) // 2])
    recent = property(lambda c: c.arrays[len(c.arrays) // 2 :])
    nbytes = property(lambda c: sum(a.nbytes for a in c.kv))

    def empty(self) -> bool:
        return False

    def __reduce_ex__(self, protocol):
        return part(self).__reduce_ex__(protocol)


_KINDS = KVCache, RotatingKVCache, QuantizedKVCache
_JOINT = {kind: mixed(_Joint, kind) for kind in _KINDS}
_PLAIN = {joint: kind for kind, joint in _JOINT.items()}
JOINT, JOINT_RING, JOINT_CODES = _PLAIN


def end(c: Any) -> int:
    """The place of the next key of a cache."""
    return getattr(c, "_idx", c.offset)


def forget_trimmed(c: Any) -> None:
    """Count the keys that the array still holds: trimming takes the last ones."""
    c.held = min(c.held, end(c))


def settle(c: Any) -> None:
    """Write the recent keys and values of a joint cache to its array."""
    forget_trimmed(c)
    first, last = c.held, end(c)
    if first < last:
        for a, recent in zip(c.kv, c.recent, strict=True):
            a[:, :, first:last] = recent[:, :, : last - first]
        c.held = last


def part(c: Any) -> Any:
    """Make a joint cache the plain one that it was; gives the cache."""
    own = vars(c)
    with USING:
        # A cache that is just made, as by `type(c).from_state`, has none.
        if "arrays" in own:
            settle(c)
            # Arrays of their own, so that each can be written in place.
            parts = [[*map(mx.contiguous, mx.split(a, 2))] for a in c.kv]
            since, thread = c.since
            if thread != threading.get_ident():
                # No other thread evaluates what is to be done on a stream of this one.
                mx.eval(parts)
            halves = [*zip(*parts, strict=True)]
            one = len(parts) == 1
            own["keys"], own["values"] = [h[0] for h in halves] if one else halves
            _asked[c] = _asked.get(c, 0) + 1 if c.offset - since < SOON else 0
        c.__class__ = _PLAIN.get(type(c), type(c))
        for name in ("arrays", "held", "since", "length"):
            own.pop(name, None)
    return c


def join(c: Any) -> bool:
    """Join a plain cache, unless it is empty, uneven or asked too often."""
    if c.keys is None or _asked.get(c, 0) >= TIMES:
        return False
    many = not isinstance(c.keys, mx.array)
    pairs = [*zip(c.keys, c.values, strict=True)] if many else [(c.keys, c.values)]
    if any(k.shape != v.shape or k.dtype != v.dtype for k, v in pairs):
        return False
    length = pairs[0][0].shape[2]
    if length > getattr(c, "max_size", length):
        return False  # a prompt left more than the ring keeps; the next step drops it
    kv = [*map(mx.concatenate, pairs)]
    recent = [mx.zeros((*a.shape[:2], RECENT, a.shape[3]), a.dtype) for a in kv]
    c.arrays, c.length = (*kv, *recent), length
    c.held, c.since = end(c), (c.offset, threading.get_ident())
    c.__class__ = _JOINT[type(c)]
    del vars(c)["keys"], vars(c)["values"]
    return True


def join_plain(caches: Sequence[Any], apart: Collection[int]) -> None:
    """Join the plain caches, but for those of layers ``apart``."""
    joined = False
    for layer, c in enumerate(caches):
        if layer in apart:
            if type(c) in _PLAIN:
                part(c)
        elif type(c) in _JOINT:
            joined = join(c) or joined
    if joined:
        # One was asked: layers share what says where a step goes if they hold as much.
        for c in caches:
            if type(c) in _PLAIN:
                settle(c)
