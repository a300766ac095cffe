"""Launches of one matmul by the kernel that its plan names."""

from __future__ import annotations

from types import ModuleType

from ..plan import Plan
from ..plan_exact import CodesPlan
from ..plan_qmm import TilePlan
from ..problem import Matmul
from . import matmul, matrix, qmm


def _launcher(p: Plan) -> ModuleType:
    if isinstance(p, TilePlan):
        return qmm
    small = isinstance(p, CodesPlan) or p.kernel.startswith("qmm_small")
    return matrix if small else matmul


def template(problem: Matmul, p: Plan) -> list[tuple[str, object]]:
    """Template arguments of the kernel that ``p`` names, in the order of its text."""
    return _launcher(p).template(problem, p)


def prepare(problem: Matmul, p: Plan) -> matmul.Launch:
    """A function ``(x, w, scales, biases) -> y``; ValueError if no kernel takes it."""
    return _launcher(p).prepare(problem, p)
