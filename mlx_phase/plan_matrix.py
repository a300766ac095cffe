"""Small M on matrix units: problem and chip -> tile. Pure functions over tables.

For callers that do not need exact rows: a row's bits depend on M here.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from .chip import Chip
from .plan import MAX_M, Plan, supports, told
from .plan_exact import on_codes
from .problem import Matmul

STEP = 128  # weights of a row that a simdgroup takes at once

# Chip family -> rows of x from which matrix units are taken. First match wins, the last
# row is any other chip. Where matrices run on the FMA pipes (Apple7-9) they win by
# reuse alone, from about 6 rows on: predicted. H200, 4-bit group 64, bf16, 2026-11-29:
# 8192 -> 28672 takes 74 us for up to 8 rows, qmv 58 for 2 and 96 for 4.
_FROM = (("Hopper", 4), ("", 6))

# Chip family -> (rows of W of a simdgroup, simdgroups a core should have in flight).
# First match wins, the last row is any other chip. H200, same shape: 74 us with 4
# simdgroups sharing K, 16 rows each; elsewhere unmeasured.
_TILES = (("CPU", 16, 0), ("Hopper", 16, 16), ("", 16, 24))


def supports_matrix(problem: Matmul) -> str | None:
    """None if ``qmm_small`` computes ``problem``, otherwise a sentence why not."""
    p = problem
    if (why := supports(p)) is not None:
        return why
    if p.mode == "none":
        return "plain weights: only quantised ones are multiplied on matrices"
    # Inputs under 8 elements are `constant` in MSL, and the kernel takes `device`.
    if p.N * p.K < 8 * p.group_size or p.M * p.K < 8:
        return f"{p.N} rows of {p.K} weights are too few"
    return None


def first_rows(problem: Matmul, chip: Chip) -> int:
    """Rows of x from which ``qmm_small`` is the plan where rows need not be exact.

    One more than any kernel takes where it never is. ``problem.M`` does not matter.
    """
    # Tensor cores of NVIDIA have no fp32: those products go through shuffles.
    slow = problem.x_dtype == "float32" and chip.arch.startswith("sm_")
    # What matrix units compute for every M is exact and faster.
    if (
        slow
        or on_codes(problem, chip)
        or supports_matrix(replace(problem, M=MAX_M)) is not None
    ):
        return MAX_M + 1
    return next(first for family, first in _FROM if family in chip.family)


def on_matrix(problem: Matmul, chip: Chip) -> bool:
    """Whether ``qmm_small`` computes ``problem`` where rows need not be exact."""
    return first_rows(problem, chip) <= problem.M <= MAX_M


@lru_cache(maxsize=4096)
def plan_matrix(problem: Matmul, chip: Chip) -> Plan:
    """The plan of ``qmm_small``; ValueError if :func:`supports_matrix` says no."""
    if (why := supports_matrix(problem)) is not None:
        raise ValueError(f"no matrix kernel for {problem}: {why}")
    rows, fill = next(row[1:] for row in _TILES if row[0] in chip.family)
    tiles = -(-problem.N // rows)
    steps = -(-problem.K // STEP)
    ks = 2
    while ks < 8 and tiles * ks < fill * chip.gpu_cores and steps >= 4 * ks:
        ks *= 2
    kernel = "qmm_small" if problem.mode == "affine" else "qmm_small_fp"
    reason = f"M = {problem.M} rows as columns of a matrix, K over {ks} simdgroups"
    return told(Plan(kernel, rows, ks, ks, 1, False, reason), chip, problem)
