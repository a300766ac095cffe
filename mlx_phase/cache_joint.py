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
from mlx_lm.models.cache import KVCache, RotatingKVCache

from .class_swap import mixed
from .step_cache import RECENT

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

    kv [2 B, Hkv, length, D]: keys, then values; recent [2 B, Hkv, RECENT, D]: those
    that are to take its places from ``held`` to :func:`end`. since: its offset when it
    was joined, and by which thread.
    """

    keys, values = _held("keys"), _held("values")
    nbytes = property(lambda c: c.kv.nbytes)

    def empty(self) -> bool:
        return False

    def __reduce_ex__(self, protocol):
        return part(self).__reduce_ex__(protocol)


JOINT, JOINT_RING = mixed(_Joint, KVCache), mixed(_Joint, RotatingKVCache)
_PLAIN = {JOINT: KVCache, JOINT_RING: RotatingKVCache}


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
        c.kv[:, :, first:last] = c.recent[:, :, : last - first]
        c.held = last


def part(c: Any) -> Any:
    """Make a joint cache the plain one that it was; gives the cache."""
    own = vars(c)
    with USING:
        # A cache that is just made, as by `type(c).from_state`, has none.
        if "kv" in own:
            settle(c)
            # Arrays of their own, so that each can be written in place.
            halves, (since, thread) = [*map(mx.contiguous, mx.split(c.kv, 2))], c.since
            if thread != threading.get_ident():
                # No other thread evaluates what is to be done on a stream of this one.
                mx.eval(halves)
            own["keys"], own["values"] = halves
            _asked[c] = _asked.get(c, 0) + 1 if c.offset - since < SOON else 0
        c.__class__ = _PLAIN.get(type(c), type(c))
        for name in ("kv", "recent", "held", "since"):
            own.pop(name, None)
    return c


def join(c: Any) -> None:
    """Join a plain cache, unless it is empty, uneven or asked too often."""
    k, v = c.keys, c.values
    if k is None or k.shape != v.shape or k.dtype != v.dtype:
        return
    if k.shape[2] > getattr(c, "max_size", k.shape[2]):
        return  # a prompt left more than the ring keeps; the next step drops it
    if _asked.get(c, 0) < TIMES:
        c.kv, c.since = mx.concatenate([k, v]), (c.offset, threading.get_ident())
        room = (*c.kv.shape[:2], RECENT, c.kv.shape[3])
        c.recent, c.held = mx.zeros(room, c.kv.dtype), end(c)
        c.__class__ = next(joint for joint, kind in _PLAIN.items() if kind is type(c))
        del vars(c)["keys"], vars(c)["values"]


def join_plain(caches: Sequence[Any], apart: Collection[int]) -> None:
    """Join the plain caches, but for those of layers ``apart``."""
    for layer, c in enumerate(caches):
        if layer in apart:
            if type(c) in _PLAIN:
                part(c)
        elif type(c) is KVCache or type(c) is RotatingKVCache:
            join(c)
