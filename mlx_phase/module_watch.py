"""Counts changes of modules, so that a trace need not look at each of its weights.

While anyone watches, `nn.Module` counts what is set and dropped in the dict that each
module is. Lists inside it, and dict's own methods called past a module, are not seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from weakref import finalize

import mlx.nn as nn

CHANGING = ("__setitem__", "__delitem__", "__ior__")
CHANGING += ("pop", "popitem", "clear", "setdefault")
_changes = _watchers = 0
# Numbers that no two threads share.
_numbers = count(1)
_own: dict[str, Callable] = {}
_hooks: dict[str, Callable] = {}
# A garbage collector may call `_leave` at any place of any thread.
_HOOKING = threading.RLock()


def changes() -> int:
    """A number that is another one after any change.

    Also where there was none, while others' methods stand where those that count were.
    """
    global _changes
    if [*map(vars(nn.Module).get, _hooks)] != [*_hooks.values()]:
        _changes = next(_numbers)
    return _changes


def watch(owner: object) -> None:
    """Count changes for as long as ``owner`` lives."""
    global _watchers
    with _HOOKING:
        _watchers += 1
        if not _hooks:
            _own.update((k, v) for k, v in vars(nn.Module).items() if k in CHANGING)
            for name in CHANGING:
                _hooks[name] = _counting(getattr(nn.Module, name))
                setattr(nn.Module, name, _hooks[name])
    finalize(owner, _leave).atexit = False


def _leave() -> None:
    global _watchers
    with _HOOKING:
        _watchers -= 1
        if _watchers:
            return
        for name, hook in _hooks.items():
            # A method that others have put over it stays.
            if vars(nn.Module).get(name) is not hook:
                continue
            if name in _own:
                setattr(nn.Module, name, _own[name])
            else:
                delattr(nn.Module, name)
        _own.clear()
        _hooks.clear()


def _counting(method: Callable) -> Callable:
    def change(self, *args):
        global _changes
        try:
            return method(self, *args)
        finally:
            # Afterwards, or a thread that looks in between would see nothing new.
            _changes = next(_numbers)

    return change
