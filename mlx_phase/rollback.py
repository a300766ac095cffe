"""Drafts that mlx-lm could not take out of a cache: the next step says so.

A full rotating cache drops no tokens. mlx-lm's speculative loop does not look at what
its trimming gives back and would go on behind drafts that were rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

# Caches that hold so many rejected tokens at their end.
OWED: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def noted(trim: Callable[..., int], caches: Sequence[Any], tokens: int) -> int:
    """What ``trim`` gives, mlx-lm's ``trim_prompt_cache``; notes what it left in."""
    dropped = trim(caches, tokens)
    if dropped < tokens:
        OWED.update((c, tokens - dropped) for c in caches)
    return dropped


def refuse(caches: Sequence[Any] | None) -> None:
    """ValueError if one of ``caches`` holds rejected drafts."""
    for cache in caches if OWED and caches else ():
        if cache is not None and (tokens := OWED.get(cache)):
            full = [c for c in caches if c is not None and not c.is_trimmable()]
            name = type((full or [cache])[0]).__name__
            raise ValueError(
                f"{tokens} rejected drafts could not be taken out of the cache: "
                f"{name} drops no tokens once it is full, so what follows would be "
                "wrong; decode without a draft model, or stop before the window is full"
            )
