"""Fewer launches and less Python a step: siblings and traced parents of one model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import mlx.core as mx
import mlx.nn as nn

from . import check as checks
from . import ops
from .attention_hooks import marked, stock_class
from .block import fused
from .executor import executor_name
from .gated import Gated, gate_parent, judge
from .layers import PhaseQuantizedLinear, adopted, join, part
from .parents import adopt_parent, adopted_parent, is_pure, release_parent
from .patch_report import Report
from .plan import supports_shared
from .problem import Matmul
from .siblings import NAMES, shares_x


def fuse(
    report: Report, modules: list[nn.Module], problems: dict[int, Matmul], check: bool
) -> None:
    """Join drop-ins that read the same x, trace modules that only chain drop-ins.

    ``problems`` maps id(drop-in) to what it computes for M = 1. The report counts both.
    """
    verdicts: dict[tuple[Matmul, ...], bool] = {}
    joined: list[tuple[tuple[str, ...], list[nn.Module]]] = []
    chains: list[nn.Module] = []
    for parent in modules:
        kind = stock_class(parent)
        for names in NAMES:
            members = [parent.get(name) for name in names]
            if not all(_fits(m, problems) for m in members):
                continue
            group = tuple(problems[id(m)] for m in members)
            if supports_shared(group) or not shares_x(kind, names):
                continue
            if group not in verdicts:
                verdicts[group] = _passes(report, group, check)
            if verdicts[group]:
                joined.append((names, members))
        # The CPU executor cannot be traced.
        traceable = executor_name() != "cpu" and not marked(parent)
        if traceable and _chains(parent, kind, problems):
            report.traced[kind.__name__] += 1
            chains.append(parent)
    # The checks above can be interrupted, so changes come last. What an earlier patch
    # made goes first: it may not be wanted any more.
    unfuse(modules)
    for names, members in joined:
        join(members)
        report.shared[" + ".join(names)] += 1
    for parent in chains:
        adopt_parent(parent, list(parent.children().values()))


def fuse_gates(report: Report, modules: list[nn.Module], check: bool) -> None:
    """Have gate, up and the activation of traced MLPs share a launch.

    Those of fused blocks do so in their blocks. The report counts them.
    """
    inside = {id(m) for b in modules if fused(b) for m in b.children().values()}
    for mlp in modules:
        if not adopted_parent(mlp) or id(mlp) in inside:
            continue
        # Each by itself: what an MLP computes may hang on anything that it holds.
        if (activation := judge(mlp, check)) is not None:
            gate_parent(mlp, activation)
            report.shared["gate, up and activation"] += 1


def gates(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str]]:
    """MLPs whose gate, up and activation share a launch, and the activation."""
    return [(m, m._gate) for m in modules if isinstance(m, Gated)]


def gate_again(gated: list[tuple[nn.Module, str]]) -> None:
    """Have them do so again, as far as they are still traced."""
    for mlp, activation in gated:
        kinds = {type(m) for m in mlp.children().values()}
        if adopted_parent(mlp) and kinds == {PhaseQuantizedLinear}:
            gate_parent(mlp, activation)


def unfuse(modules: Iterable[nn.Module]) -> None:
    """Give traced parents their class back and have siblings compute alone."""
    for module in modules:
        if adopted_parent(module):
            release_parent(module)
        elif adopted(module):
            part(module)


def _fits(m: object, problems: dict[int, Matmul]) -> bool:
    return type(m) is PhaseQuantizedLinear and id(m) in problems


def launches(
    modules: list[nn.Module], problems: dict[int, Matmul]
) -> Counter[tuple[Matmul, ...]]:
    """The launches of one decode step with M = 1: matrices of each -> how often."""
    joined = {id(m._joined): m._joined for m in modules if getattr(m, "_joined", None)}
    found = Counter(siblings.problems(1) for siblings in joined.values())
    alone = [m for m in modules if id(m) in problems and m._joined is None]
    # A module that two parents share is one layer.
    found.update((problems[i],) for i in {id(m) for m in alone})
    return found


def _passes(report: Report, group: tuple[Matmul, ...], check: bool) -> bool:
    chosen = ops.choose(group, report.exact)
    if isinstance(chosen, str) or not check:
        return not isinstance(chosen, str)
    result = checks.check(*group, chosen=chosen)
    if result not in report.kernels:
        report.kernels.append(result)
    return result.ok


def _chains(parent: nn.Module, kind: type, problems: dict[int, Matmul]) -> bool:
    children = parent.children().values()
    return (
        len(children) > 1
        and all(_fits(m, problems) for m in children)
        and not any(isinstance(v, mx.array) for v in parent.values())
        and is_pure(kind)
    )
