"""Kernels of MoE experts on this device: compiled, right, pairs exact."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import cycle

import mlx.core as mx

from .doctor_kernels import Examined, examined
from .gather_check import check, inputs, small
from .launch.gather import prepare
from .launch.matmul import device_chip
from .plan_gather import plan_gather, stays_stock
from .problem import (
    AFFINE_BITS,
    AFFINE_GROUPS,
    DTYPE_BYTES,
    FP_MODES,
    Gather,
    Matmul,
)

EXPERTS, TOP_K, TOKENS = 32, 4, 8
CLIPPED = {"activation": "clipped", "alpha": 1.702, "limit": 7.0}
# Few pairs, then a prompt's in tiles: gate with up, and the way back.
FEW_GLU = ({"activation": "silu"}, {"activation": "gelu_approx"}, CLIPPED)
FEW = ({"each": TOP_K}, {"sorted": True}, {"each": 0})
MANY = {"pairs": 4096, "sorted": True, "exact": False}
GLU_TILES = tuple(MANY | {"each": 0} | kind for kind in FEW_GLU)
TILES = (MANY | {"scattered": True}, MANY | {"each": 0}, MANY)


def rows(quick: bool) -> list[Gather]:
    """Each kernel with all formats and dtypes, its choices in turn; ``quick``: once.

    Those that this chip leaves to stock are not there.
    """
    modes = [(mode, *FP_MODES[mode]) for mode in FP_MODES]
    forms = [("affine", b, g) for b in AFFINE_BITS for g in AFFINE_GROUPS] + modes
    if quick:
        # Each kernel on affine codes and on those of another mode.
        forms = [("affine", 4, 64), ("mxfp4", 4, 32)]
    kinds = [tuple({"each": TOP_K} | k for k in FEW_GLU), FEW, GLU_TILES, TILES]
    turns, dtypes, found = [cycle(kind) for kind in kinds], cycle(DTYPE_BYTES), []
    for mode, bits, group in forms:
        for turn in turns * (1 if quick else len(DTYPE_BYTES)):
            m = Matmul(1, 768, 2048, next(dtypes), bits, group, mode)
            options = {"pairs": TOKENS * TOP_K, "bias": mode == "mxfp4"} | next(turn)
            found.append(Gather(m, EXPERTS, **options))
    return [g for g in found if stays_stock(g, device_chip()) is None]


def examine(problem: Gather, clock=time.perf_counter) -> Examined:
    """Check the kernel of a problem, and compare its last pair's bits with it alone."""
    checked = check(problem)
    first, pairs = replace(checked, ms=0.0), small(problem).pairs
    return examined(
        first, checked, pairs, f"{pairs} pairs", lambda: _exact(problem, clock)
    )


def _exact(problem: Gather, clock) -> tuple[bool | None, float]:
    """(the last pair as alone, None without the promise; milliseconds of a launch)."""
    g, chosen = small(problem), plan_gather(problem, device_chip())
    c, run = inputs(g), prepare(g, chosen)
    whole = run(c.x, c.rhs, *c.weights, **c.maps)
    mx.eval(whole)
    start = clock()
    mx.eval(run(c.x, c.rhs, *c.weights, **c.maps))
    ms = 1e3 * (clock() - start)
    if not chosen.exact:
        return None, ms
    alone = prepare(replace(g, pairs=1, each=1), replace(chosen, share=1))
    row = int(c.rows[-1])
    y = alone(c.x[row : row + 1], c.rhs[-1:], *c.weights)
    return mx.array_equal(y, whole[-1:]).item(), ms
