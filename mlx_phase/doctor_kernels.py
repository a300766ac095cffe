"""Every kernel of every plan row on this device: compiled, right, rows exact."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle, product

from . import check as checks
from .check import evaluate
from .executor import ExecutorError
from .launch.matmul import device_chip
from .plan import Plan
from .plan_exact import on_codes, plan_codes, plan_launch
from .plan_matrix import on_matrix, plan_matrix
from .plan_qmm import plan_qmm, stays_stock
from .problem import AFFINE_BITS, AFFINE_GROUPS, DTYPE_BYTES, FP_MODES, Matmul
from .tune_plans import Problems

DTYPES = tuple(DTYPE_BYTES)
# One M for each tile of the plan, beside M = 1.
ROWS = (4, 8, 16)
# (N, K) that fill a chip, and that split K over simdgroups and over threadgroups.
SHAPES = ((14336, 4096), (1024, 4096), (256, 8192), (8, 16384))
# Rows of x on matrix units: a tile of 8 and one of 16, the smaller in part.
MATRIX_ROWS = (7, 16)
# Prompts whose tiles are the smallest and the largest.
PREFILL_ROWS = (32, 4096)
SPLITS = 3  # for a chip whose table never splits over threadgroups
SHARED = ((4096, 1024, 1024), (14336, 14336))


@dataclass(frozen=True)
class Row:
    """A launch with M = 1 (matrix units: few rows) and a larger M, with their plans."""

    one: Problems
    many: Problems
    plan_one: Plan
    plan_many: Plan


@dataclass(frozen=True)
class Examined:
    """Result of one row. ``exact``: each row of x has the bits it has alone; None where
    the plan does not promise it.

    ``worst`` is the larger error over what is allowed, ``first_ms`` the time of
    compiling and checking both kernels, ``run_ms`` of a launch after that.
    """

    kernel: str
    M: int
    ok: bool
    exact: bool | None
    worst: float
    first_ms: float
    run_ms: float | None
    error: str | None


def rows(quick: bool) -> list[Row]:
    """All formats, dtypes and tiles; ``quick``: each in turn, a few dozen kernels."""
    modes = [(*FP_MODES[mode], mode) for mode in FP_MODES]
    plain = [(8 * size, 0, "none", dtype) for dtype, size in DTYPE_BYTES.items()]
    found: list[Row] = []
    shapes = cycle(SHAPES)
    if quick:
        turns = zip(AFFINE_BITS, cycle(AFFINE_GROUPS), strict=False)
        for i, form in enumerate([(b, g, "affine") for b, g in turns] + modes):
            # Shifted every third time, so that other groups, dtypes and M meet.
            dtype, m = DTYPES[(i + i // 3) % 3], ROWS[(i + 2 * (i // 3)) % 3]
            found.append(_row((*form, dtype), m, (next(shapes),)))
        for case, m in zip(plain, ROWS, strict=True):
            found.append(_row(case, m, (next(shapes),)))
    else:
        forms = [(b, g, "affine") for b in AFFINE_BITS for g in AFFINE_GROUPS]
        typed = [(*form, d) for form, d in product(forms + modes, DTYPES)] + plain
        for case, m in product(typed, ROWS):
            found.append(_row(case, m, (next(shapes),)))
    form = (4, 64, "affine")
    for Ns, dtype in zip(SHARED, ("bfloat16", "float16"), strict=True):
        found.append(_row((*form, dtype), 4, [(N, 4096) for N in Ns]))
    split = _row((*form, "bfloat16"), 2, (SHAPES[-1],))
    halves = {"splits": max(SPLITS, split.plan_one.splits)}
    plans = replace(split.plan_one, **halves), replace(split.plan_many, **halves)
    return [*found, Row(split.one, split.many, *plans)]


def matrix_rows(quick: bool) -> list[Row]:
    """Formats and dtypes that this chip takes to matrix units; ``quick``: two."""
    modes = [(*FP_MODES[mode], mode) for mode in FP_MODES]
    forms = [(b, g, "affine") for b in AFFINE_BITS for g in AFFINE_GROUPS] + modes
    todo = product(forms, DTYPES)
    if quick:
        todo = (((4, 64, "affine"), "bfloat16"), (modes[0], "float16"))
    found, chip = [], device_chip()
    for (bits, group, mode), dtype in todo:
        few, many = (
            Matmul(m, *SHAPES[0], dtype, bits, group, mode) for m in MATRIX_ROWS
        )
        if on_matrix(many, chip):
            plans = plan_matrix(few, chip), plan_matrix(many, chip)
            found.append(Row((few,), (many,), *plans))
    return found


def codes_rows(quick: bool) -> list[Row]:
    """Formats and dtypes whose codes are multiplied at every M; ``quick``: one."""
    found, chip = [], device_chip()
    forms = product((4, 8), AFFINE_GROUPS, ("bfloat16", "float16"))
    # x lies ready for a threadgroup, and for each of its simdgroups.
    shapes = cycle((SHAPES[0], (4096, 4096), (4096, 4096)))
    for bits, group, dtype in ((4, 64, "bfloat16"),) if quick else forms:
        N, K = next(shapes)
        one, many = (Matmul(m, N, K, dtype, bits, group) for m in (1, 9))
        if on_codes(one, chip):
            found.append(
                Row((one,), (many,), plan_codes(one, chip), plan_codes(many, chip))
            )
    return found


def prefill_rows(quick: bool) -> list[Row]:
    """Formats and dtypes of prompts that kernels compute here; ``quick``: two."""
    modes = [(*FP_MODES[mode], mode) for mode in FP_MODES]
    forms = [(b, g, "affine") for b in AFFINE_BITS for g in AFFINE_GROUPS] + modes
    todo = product([*forms, (16, 0, "none")], DTYPES)
    if quick:
        todo = (((4, 64, "affine"), "bfloat16"), ((16, 0, "none"), "float16"))
    found, chip = [], device_chip()
    for (bits, group, mode), dtype in todo:
        few, many = (
            Matmul(m, *SHAPES[0], dtype, bits, group, mode) for m in PREFILL_ROWS
        )
        if stays_stock(many, chip) is None:
            found.append(
                Row((few,), (many,), plan_qmm(few, chip), plan_qmm(many, chip))
            )
    return found


def _row(case: tuple[int, int, str, str], m: int, shapes) -> Row:
    bits, group, mode, dtype = case
    one = tuple(Matmul(1, N, K, dtype, bits, group, mode) for N, K in shapes)
    many = tuple(replace(p, M=m) for p in one)
    chip = device_chip()
    return Row(one, many, plan_launch(one, chip), plan_launch(many, chip))


def examine(row: Row, clock=time.perf_counter) -> Examined:
    """Check the kernels of a row and compare the bits of its rows of x."""
    first = checks.check(*row.one, chosen=row.plan_one)
    many = checks.check(*row.many, chosen=row.plan_many)
    M = row.many[0].M
    return examined(first, many, M, f"M = {M}", lambda: _exact(row, clock))


def examined(
    first: checks.Checked,
    many: checks.Checked,
    M: int,
    rows: str,
    bits: Callable[[], tuple[bool | None, float]],
) -> Examined:
    """What two checks say, and ``bits``: (``rows`` as alone, ms of a launch)."""
    error, exact, run_ms = first.error or many.error, None, None
    if error is None:
        try:
            exact, run_ms = bits()
        except (ExecutorError, RuntimeError) as e:
            # MLX reports compile and launch errors of a kernel as these two.
            error = str(e)
    if exact is False:
        error = f"rows of {rows} have other bits than alone"
    worst, ms = max(first.worst, many.worst), first.ms + many.ms
    return Examined(many.kernel, M, error is None, exact, worst, ms, run_ms, error)


def _exact(row: Row, clock) -> tuple[bool | None, float]:
    """(first and last row of x as alone, milliseconds of a launch)."""
    # K of one row: no shorter, where it lies ready in turns.
    many = tuple(
        replace(m, K=o.K)
        for m, o in zip(
            checks.small(row.many, row.plan_many),
            checks.small(row.one, row.plan_one),
            strict=True,
        )
    )
    arrays = [checks.canary(p, i)[0] for i, p in enumerate(many)]
    x, weights = arrays[0][0], [a for each in arrays for a in each[1:]]
    whole = evaluate(many, row.plan_many, x, weights)
    start = clock()
    evaluate(many, row.plan_many, x, weights)
    ms = 1e3 * (clock() - start)
    if not row.plan_many.exact:
        return None, ms
    one = tuple(replace(p, M=1) for p in many)
    for m in {0, row.many[0].M - 1}:
        alone = evaluate(one, row.plan_one, x[m : m + 1], weights)
        same = (
            a.tobytes() == w[m : m + 1].tobytes()
            for a, w in zip(alone, whole, strict=True)
        )
        if not all(same):
            return False, ms
    return True, ms
