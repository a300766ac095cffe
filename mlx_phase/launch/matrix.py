"""Launcher of small M on matrix units. It runs the kernel or raises, never stock."""

from __future__ import annotations

import mlx.core as mx

from ..plan import Plan
from ..plan_exact import STAGES, CodesPlan
from ..plan_matrix import plan_matrix
from ..problem import Matmul
from .matmul import Launch, device_chip, kernel, tiles


def template(problem: Matmul, p: Plan) -> list[tuple[str, object]]:
    """Template arguments of the kernel that ``p`` names, in the order of its text."""
    args = [("T", getattr(mx, problem.x_dtype)), ("bits", problem.bits)]
    args += [("group", problem.group_size)]
    tile = [("R", p.rows // 16), ("KS", p.k_simdgroups)]
    if isinstance(p, CodesPlan):
        # More rows than one are counted on the device: a kernel for 8, and one for 16.
        rows = [("NB", -(-problem.M // 8)), ("ONE", problem.M == 1)]
        tile += [("SG", p.simdgroups), ("U", p.groups), ("ST", STAGES)]
        # What lies ready is a single row.
        return [*args, *rows, *tile, ("XS", p.ready if problem.M == 1 else 0)]
    return [*args, ("M", problem.M), *tile]


def prepare(problem: Matmul, p: Plan | None = None) -> Launch:
    """A function ``(x, w, scales, biases) -> y``; exact rows with a CodesPlan only.

    x: [..., K] with M rows in all; w: packed uint32 [N, K * bits / 32]; y: [..., N] of
    x's dtype. ValueError if no kernel supports the problem.
    """
    p = p or plan_matrix(problem, device_chip())
    run = kernel(p.kernel)
    threads = 32 * p.simdgroups
    launch = {
        "template": template(problem, p),
        "grid": (tiles(p, problem.N) * threads, 1, 1),
        "threadgroup": (threads, 1, 1),
        "output_dtypes": [getattr(mx, problem.x_dtype)],
    }

    def call(x: mx.array, *weights: mx.array) -> mx.array:
        shape = [(*x.shape[:-1], problem.N)]
        return run(inputs=[x, *weights], output_shapes=shape, **launch)[0]

    return call
