"""Experts of MoE layers: problem and chip -> kernel and tile. Pure functions."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from functools import lru_cache

from .chip import Chip
from .plan import pack_size, supports
from .plan_qmm import MOST, Tile
from .problem import Gather

# Pairs of a row and an expert that the vector kernels take: 16 rows, 16 experts each.
MAX_PAIRS = 256
ACTIVATIONS = {"silu": 0, "gelu_approx": 1, "clipped": 2}

# Chip family -> (least k_simdgroups, simdgroups a core should have in flight). First
# match wins, the last row is any other chip. H200, 2026-11-30, 128 experts of 768 x
# 2048, 4 bits, 8 of a row, us of gate with up and of down: KS 1 7.5 and 5.5, KS 2 8.2
# and 9.0, KS 4 9.8 and 9.5; of 16 rows 71 and 53, 84 and 107, 120 and 118. Else
# unmeasured.
_FILL = (("CPU", 1, 0), ("Hopper", 1, 0), ("", 1, 24))
# Pairs that are in flight at least: the fewest experts of a row in known models is 2,
# most have 4 to 8. KS must not depend on pairs, or rows would not be exact.
_PAIRS = 4

# (chip family, most sorted pairs that the vector kernels take: a power of two, as
# `bucket` rounds up to one). First match wins. H200, as above: 128 pairs 71 and 53 us,
# in the best tile 165 and 78. Else unmeasured.
_VECTORS = (("Hopper", 256), ("", 64))
# (chip family, pairs of an expert up to, tile). First match wins, the last rows are any
# other chip. H200, as above, 4096 pairs: 64 x 128 280 and 174 us, 64 x 64 356 and 192,
# 32 x 64 428 and 214, 128 x 128 559 and 331 (stock 5123 and 2631). Else unmeasured.
_TILES = (
    ("CPU", MOST, Tile(32, 32, 32, 1, 1)),
    ("Hopper", 8, Tile(16, 64, 64, 1, 4)),
    ("Hopper", 16, Tile(32, 64, 64, 1, 4)),
    ("Hopper", MOST, Tile(64, 128, 32, 1, 4)),
    ("", 48, Tile(32, 64, 32, 1, 2)),
    ("", MOST, Tile(64, 64, 32, 2, 2)),
)
# (chip family, kernels, why stock serves, None: a kernel does). First match wins, the
# last row is any other chip. Neural accelerators: published prefill of M5 is 3-4 x that
# of its shaders.
_ACCELERATED = "MLX takes the neural accelerators, these kernels can't"
_STOCK = (
    ("CDNA", "gather", "no executor for this chip"),
    ("", "gather_qmv", None),
    ("", "gather_glu", None),
    ("CPU", "gather_qmm", None),
    ("Apple10", "gather_qmm", _ACCELERATED),
    ("Apple11", "gather_qmm", _ACCELERATED),
    ("Apple", "gather_qmm", None),
    ("Hopper", "gather_qmm", None),
    ("", "gather_qmm", "tiles were not timed against stock"),
)


@dataclass(frozen=True)
class GatherPlan:
    """Choices for one problem. ``k_simdgroups`` changes the order of additions, so it
    depends on (N, K, chip) alone: a pair has the bits it has alone, if exact.

    rows, simdgroups, k_simdgroups: as in `Plan`. share: neighbouring pairs of one
    expert that a threadgroup computes with one read of the weights. tile: that of
    pairs times rows of W on matrix units, where the others do not count.
    """

    kernel: str
    rows: int
    simdgroups: int
    k_simdgroups: int
    share: int
    exact: bool
    reason: str
    tile: Tile | None = None


def supports_gather(problem: Gather) -> str | None:
    """None if a kernel computes ``problem``, otherwise a sentence why not."""
    g, m = problem, problem.matmul
    if (why := supports(m)) is not None:
        return why
    if m.mode == "none":
        return "plain weights: only quantised experts have a kernel"
    if m.M != 1:
        return f"{m.M} rows of x for each expert: the kernels take one"
    # Inputs under 8 elements are `constant` in MSL, and the kernels take `device`.
    if m.N < 4 or g.experts * m.N < 8 or g.experts * m.N * m.K < 8 * m.group_size:
        return f"{g.experts} experts of {m.N} x {m.K} weights are too few"
    if in_tiles(g):
        return None
    if not in_turn(g):
        return "rows named by arrays need sorted pairs, eight or more"
    if g.pairs > MAX_PAIRS:
        return f"more than {MAX_PAIRS} pairs that are not sorted by expert"
    return None


def stays_stock(problem: Gather, chip: Chip) -> str | None:
    """Why stock computes a problem on ``chip``; None if a kernel does."""
    if (why := supports_gather(problem)) is not None:
        return why
    kernel = plan_gather(problem, chip).kernel
    tiled = kernel.startswith("gather_qmm")
    if tiled and problem.matmul.x_dtype == "float32" and chip.arch.startswith("sm_"):
        return "float32 has no tensor cores without a loss of digits"
    found = (w for f, k, w in _STOCK if f in chip.family and kernel.startswith(k))
    why = next(found)
    return None if why is None else f"experts on {chip.name}: {why}"


def in_tiles(problem: Gather) -> bool:
    """Whether the pairs are of a kind and number that can be cut in tiles."""
    g = problem
    return g.sorted and g.each < 2 and g.pairs >= 8


def in_turn(problem: Gather) -> bool:
    """Whether the vector kernels can find the rows: two arrays of them are too many."""
    g = problem
    return not g.scattered and not (g.activation and not g.each)


@lru_cache(maxsize=4096)
def plan_gather(problem: Gather, chip: Chip) -> GatherPlan:
    """The plan of a problem; ValueError if :func:`supports_gather` says no."""
    if (why := supports_gather(problem)) is not None:
        raise ValueError(f"no kernel for {problem}: {why}")
    most = next(row[1] for row in _VECTORS if row[0] in chip.family)
    if problem.exact:
        most = MAX_PAIRS
    if in_tiles(problem) and (problem.pairs > most or not in_turn(problem)):
        return _told(plan_tiles(problem, chip), problem, chip)
    return _told(_plan_vectors(problem, chip), problem, chip)


def _plan_vectors(problem: Gather, chip: Chip) -> GatherPlan:
    m = problem.matmul
    # A simdgroup's rows are half gate, half up.
    tiles = -(-m.N // (2 if problem.activation else 4))
    ks, fill = next(row[1:] for row in _FILL if row[0] in chip.family)
    steps = m.K // (pack_size(m) * 32)
    while ks < 8 and tiles * _PAIRS * ks < fill * chip.gpu_cores and steps >= 2 * ks:
        ks *= 2
    kernel = "gather_glu" if problem.activation else "gather_qmv"
    kernel += "" if m.mode == "affine" else "_fp"
    share = 1
    if problem.sorted and problem.each == 1 and not problem.activation:
        # About half of an expert's pairs, so that most find others in their block.
        share = 4 if problem.pairs >= 8 * problem.experts else 2
    reason = f"{problem.pairs} pairs, each reads its expert's weights"
    if share > 1:
        reason = f"{problem.pairs} pairs, {share} of an expert share a read"
    return GatherPlan(kernel, 4, max(2, ks), ks, share, True, reason)


def plan_tiles(problem: Gather, chip: Chip) -> GatherPlan:
    """The plan on matrix units, for sorted pairs that :func:`in_tiles` takes."""
    m, count = problem.matmul, problem.pairs / problem.experts
    tile = next(
        tile for family, most, tile in _TILES if family in chip.family and count <= most
    )
    if m.x_dtype == "float32":
        # Twice the bytes of threadgroup memory an element.
        tile = Tile(min(tile.BM, 64), min(tile.BN, 64), 32, *tile[3:])
    kernel = "gather_qmm_glu" if problem.activation else "gather_qmm"
    kernel += "" if m.mode == "affine" else "_fp"
    reason = (
        f"{problem.pairs} sorted pairs of {problem.experts} experts: tiles of "
        f"{tile.BM} x {tile.BN}, weights decoded once in each"
    )
    return GatherPlan(kernel, tile.BN, tile.SM * tile.SN, 1, 1, False, reason, tile)


def bucket(problem: Gather) -> Gather:
    """The problem that stands for all of as many pairs: a power of two of sorted ones,
    so that routes and compiled kernels are few."""
    if not in_tiles(problem):
        return problem
    return replace(problem, pairs=pairs_bucket(problem.pairs))


def pairs_bucket(pairs: int) -> int:
    """The number that stands for ``pairs`` sorted ones: the next power of two."""
    return 1 << (pairs - 1).bit_length()


def _told(p: GatherPlan, g: Gather, chip: Chip) -> GatherPlan:
    if os.environ.get("MLX_PHASE_PRINT_PLANS", "0") not in ("", "0"):
        m, tile = g.matmul, p.tile and tuple(p.tile)
        print(
            f"mlx_phase plan on {chip.name}: {g.pairs} pairs of {g.experts} experts "
            f"N={m.N} K={m.K} {m.mode} {m.bits}-bit g{m.group_size} {m.x_dtype} "
            f"{g.activation} -> {p.kernel} rows={p.rows} simdgroups={p.simdgroups} "
            f"k_simdgroups={p.k_simdgroups} share={p.share} tile={tile}: {p.reason}",
            file=sys.stderr,
        )
    return p
