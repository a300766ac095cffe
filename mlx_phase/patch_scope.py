"""A patch for as long as a block of code runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.nn as nn

from . import step_patch
from .attention_hooks import marked
from .fuse import gate_again, gates, unfuse
from .layers import adopted, set_exact
from .parents import adopted_parent
from .patch import attend, patch, release_all, validate
from .patch_report import Report
from .patch_scan import named


@contextmanager
def patched(model: nn.Module, **options) -> Iterator[Report]:
    """`with patched(model) as report:` patches inside, also when the block raises.

    Takes the options of `patch`. What was patched before is as it was before.
    """
    validate(model)
    modules = [m for _, m in named(model)]
    before = {id(m) for m in modules if adopted(m) or adopted_parent(m)}
    attending = {id(m) for m in modules if marked(m)}
    stepping = {id(m) for m in modules if step_patch.installed(m)}
    exact = [(m, m._exact) for m in modules if adopted(m)]
    launching = gates(modules)
    report = patch(model, **options)
    try:
        yield report
    finally:
        kept = all(adopted(m) for m, _ in exact)  # no unpatch in the block
        again = [m for m in modules if id(m) in attending and (kept or marked(m))]
        attend(named(model), again)
        for m, was in exact:
            if adopted(m):
                set_exact(m, was)
        if any(was != report.exact for _, was in exact):
            step_patch.trace_again(modules)
        now = [m for _, m in named(model)]
        step_patch.remove(m for m in now if id(m) not in stepping)
        new = [m for m in now if id(m) not in before]
        unfuse(new)
        release_all([m for m in new if adopted(m)])
        gate_again(launching)
        lost = any(id(m) in stepping and not step_patch.installed(m) for m in now)
        if lost and kept:  # options of this patch took it off
            step_patch.install(model, report.checked)
            step_patch.remove(m for m in now if id(m) not in stepping)
