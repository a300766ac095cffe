"""Prefill products (M > 16): problem and chip -> tile. Pure functions over tables.

Rows are not exact: a row's bits depend on the tile, and so on M and the chip.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from .chip import Chip
from .plan import MAX_M, MIN_SPLIT_K, Plan, supports, told
from .problem import Matmul

MOST = 1 << 30  # rows of x that no row of a table bounds


class Tile(NamedTuple):
    """Rows of x and of W of a threadgroup, K of a step, simdgroups along each side."""

    BM: int
    BN: int
    BK: int
    SM: int
    SN: int


@dataclass(frozen=True)
class TilePlan(Plan):
    """A `Plan` of a tile of x and W: ``rows`` is its BN, ``simdgroups`` SM * SN."""

    tile: Tile


# Chip family -> why stock serves, None: a kernel does. First match wins, the last row
# is any other chip: what nobody compared stays stock. Neural accelerators: published
# prefill of M5 is 3-4 x that of its shaders.
_ACCELERATED = "MLX takes the neural accelerators, these kernels can't"
_STOCK = (
    ("CPU", None),
    ("Apple10", _ACCELERATED),
    ("Apple11", _ACCELERATED),
    ("Apple", None),
    ("CDNA", "no executor for this chip"),
    ("Hopper", None),
    ("", "nothing says that stock is beaten"),
)

# On Hopper: dtype, mode, bits -> up to so many rows of x stock is as fast, and whether
# it is on matrices up to SMALL x SMALL too; others were not timed. H200, 4096 -> 14336,
# 2026-11-30, M 32, 128, 512, 2048, us (stock's). bf16, GPU time: 4 bits 62 (85), 111
# (144), 259 (560), 872 (1937); 8 bits 78 (67), 123 (121), 293 (395), 982 (1476); mxfp4
# 60 (165), 104 (232), 255 (920), 870 (3200). At 2048 -> 2048 these took less than stock
# at each M, as at M 512 27 (43), 30 (36) and 27 (91), but by the clock a graph of
# launches at 4 bits and M 512 took 59, stock's 51, and at 1024 as long. The others by
# the clock, bench/results/h200-prefill-sweep.txt: ties and losses up to these M, and
# for all of them at 2048 -> 2048 and M 128.
_HOPPER = {
    ("bfloat16", "affine", 3): (64, True),
    ("bfloat16", "affine", 4): (0, False),
    ("bfloat16", "affine", 6): (0, True),
    ("bfloat16", "affine", 8): (256, False),
    ("bfloat16", "mxfp4", 4): (0, False),
    ("bfloat16", "mxfp8", 8): (32, True),
    ("bfloat16", "nvfp4", 4): (0, True),
    ("float16", "affine", 4): (64, True),
    ("float16", "affine", 8): (256, True),
}
SMALL = 2048

# (chip family, M up to, tile, threadgroups a core should have). First match wins, the
# last rows are any other chip. 32 x 32 of y a simdgroup: on Apple 64 multiplies then
# stand against 8 loads (metal/README.md), predicted. CPU: a multiply of 32 lanes is one
# exchange between them, so a simdgroup alone, without others to wait for, is fastest.
# H200, as above in a sweep of 2026-11-29, us at 4096 -> 14336 (the second best tile):
# M 2048 967 (128 x 128 of eight simdgroups 1083), M 128 97 (128 x 128 105), M 64 71
# (64 x 64 x 32 77); 14336 -> 4096: M 64 in 4 shares of K 59, in 2 80; M 32 58 and 85.
_TILES = (
    ("CPU", MOST, Tile(32, 32, 32, 1, 1), 0),
    ("Hopper", 32, Tile(32, 64, 64, 1, 4), 4),
    ("Hopper", 64, Tile(64, 64, 64, 2, 2), 1.5),
    ("Hopper", 256, Tile(128, 64, 32, 2, 2), 1.5),
    ("Hopper", MOST, Tile(128, 128, 32, 2, 2), 1),
    ("Ampere", MOST, Tile(64, 64, 32, 2, 2), 2),
    ("", 32, Tile(32, 64, 32, 1, 2), 3),
    ("", MOST, Tile(64, 64, 32, 2, 2), 2),
)


def supports_qmm(problem: Matmul) -> str | None:
    """None if the prefill kernels compute ``problem``, otherwise a sentence why not."""
    p = problem
    if p.M <= MAX_M:
        return f"M = {p.M} rows: up to {MAX_M} take the decode kernels"
    if (why := supports(replace(p, M=MAX_M))) is not None:
        return why
    # Inputs under 8 elements are `constant` in MSL, and the kernels take `device`.
    if p.N * p.K < 8 * max(1, p.group_size if p.mode != "none" else 1):
        return f"{p.N} rows of {p.K} weights are too few"
    return None


def stays_stock(problem: Matmul, chip: Chip) -> str | None:
    """Why stock computes a prefill product on ``chip``; None if a kernel does."""
    if (why := supports_qmm(problem)) is not None:
        return why
    if problem.x_dtype == "float32" and chip.arch.startswith("sm_"):
        return "float32 has no tensor cores without a loss of digits"
    if problem.mode == "none" and chip.family != "CPU":
        return "plain weights: nothing says that stock's dense product is beaten"
    if "Hopper" in chip.family:
        form = f"{problem.mode} of {problem.bits} bits in {problem.x_dtype}"
        key = problem.x_dtype, problem.mode, problem.bits
        fast, small = _HOPPER.get(key, (None, True))
        if fast is None:
            return f"{form} was not timed against stock"
        if max(problem.N, problem.K) > SMALL:
            stock = problem.M <= fast
        else:
            stock = small or 256 < problem.M <= 1024
        if stock:
            return f"stock is as fast for M = {problem.M} of {form}"
    why = next(why for family, why in _STOCK if family in chip.family)
    return why and f"prefill on {chip.name}: {why}"


def bucket(M: int) -> int:
    """The M that stands for M in plans and routes: powers of two from 32 to 4096."""
    return min(4096, max(32, 1 << (M - 1).bit_length()))


@lru_cache(maxsize=4096)
def plan_qmm(problem: Matmul, chip: Chip) -> TilePlan:
    """The plan of a prefill product; ValueError if :func:`supports_qmm` says no."""
    p = problem
    if (why := supports_qmm(p)) is not None:
        raise ValueError(f"no prefill kernel for {p}: {why}")
    tile, fill = next(
        row[2:] for row in _TILES if row[0] in chip.family and p.M <= row[1]
    )
    if p.x_dtype == "float32":
        # Twice the bytes of threadgroup memory an element.
        tile = Tile(min(tile.BM, 64), min(tile.BN, 64), 32, *tile[3:])
    tiles = -(-p.M // tile.BM) * -(-p.N // tile.BN)
    splits = 1
    while (
        splits < 8
        and tiles * splits < fill * chip.gpu_cores
        and p.K >= 2 * splits * MIN_SPLIT_K
    ):
        splits *= 2
    kernel = {"none": "qmm_plain", "affine": "qmm"}.get(p.mode, "qmm_fp")
    reason = f"M = {p.M}: tiles of {tile.BM} x {tile.BN}, weights decoded once in each"
    if splits > 1:
        reason += f", K over {splits} threadgroups to fill {chip.gpu_cores} cores"
    simdgroups = tile.SM * tile.SN
    chosen = TilePlan(kernel, tile.BN, simdgroups, 1, splits, False, reason, tile)
    told(chosen, chip, p)
    return chosen
