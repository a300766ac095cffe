"""Exact rows: problem and chip -> vector kernels or matrix units. Pure, no mlx.

A row of x has the same bits for every M from 1 to 16, so which family computes a
matrix follows from (N, K, format, chip), never from M.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from .chip import Chip
from .plan import (
    Plan,
    plan,
    plan_fused,
    plan_shared,
    supports,
    supports_fused,
    told,
)
from .problem import DTYPE_BYTES, Matmul

#: Stages of threadgroup memory: one is filled while another is multiplied.
STAGES = 2

# Chip family -> least N of a launch that matrix units compute for every M, codes as
# they are; first match wins, no row: never. Where matrices run on the FMA pipes
# (Apple7-9) eight rows cost as much as one, so M = 1 would pay for them. H200, 4-bit
# group 64, bf16, cold weights: 4096 -> 14336 takes 13.8 us at M = 1 and 14.2 at M = 8,
# qmv 14.0 at M = 1 in an earlier run; 4096 -> 1024 took 5.1 (qmv 3.6) when x did not
# lie ready: bench/results/h200-small-m-sweep.txt.
_FROM = (("Hopper", 2048),)

# (least N, least K) -> k_simdgroups, groups a step, tiles of a threadgroup for one row
# of x, rows of W of a simdgroup for more; first match wins. One row lies ready in
# threadgroup memory, with 16 rows of W a simdgroup: fewer registers, so more of them at
# a time. H200, bf16, 4-bit group 64, cold, 2026-11-30, one run, us at M = 1 / 8: 8192
# -> 28672 takes 38.7 / 48.3 with (2, 4), 46.3 / 54.9 with (4, 2); at M = 1 / 4 / 16
# 14336 -> 4096 takes 12.5 / 13.6 / 19.6 with (8, 4), 11.7 / 14.9 / 27.4 with (4, 8),
# and in another run 14.0 with (4, 4): bench/results/h200-small-m-sweep.txt.
_TILES = ((8192, 0, 2, 4, 2, 32), (0, 4097, 8, 4, 1, 16), (0, 0, 4, 4, 1, 16))
_READY = 2048  # elements of x that simdgroups make ready together

# Kernel of a block's launch -> the same on matrix units.
_BLOCK = {
    "qmv_add": "qmm_codes_add",
    "qmv_glu": "qmm_codes_glu",
    "qmv_qkv": "qmm_codes_qkv",
}


@dataclass(frozen=True)
class CodesPlan(Plan):
    """Choices for one launch of the ``qmm_codes`` family.

    groups: groups of a row in a step; ``k_simdgroups`` and it order the additions, all
    else changes speed only. ready: groups of a single row of x that lie ready in
    threadgroup memory, -1: each simdgroup has its own.
    """

    groups: int
    ready: int = 0


def supports_codes(problem: Matmul) -> str | None:
    """None if ``qmm_codes`` computes ``problem``, otherwise a sentence why not."""
    p = problem
    if (why := supports(p)) is not None:
        return why
    if p.mode != "affine" or p.bits not in (4, 8):
        return f"{p.mode} {p.bits}-bit: codes of 4 or 8 bits are multiplied as they are"
    if p.N < 32 or p.K % (2 * p.group_size):
        return f"N = {p.N}, K = {p.K}: N is below 32 or K is no pair of groups"
    return None


def on_codes(problem: Matmul, chip: Chip) -> bool:
    """Whether matrix units compute ``problem`` at every M on ``chip``."""
    least = next((n for family, n in _FROM if family in chip.family), None)
    # Tensor cores of NVIDIA have no fp32: those products go through shuffles.
    if least is None or problem.N < least or problem.x_dtype == "float32":
        return False
    return supports_codes(replace(problem, M=1)) is None


def _fits(p: Matmul, chip: Chip, t: CodesPlan) -> bool:
    # A row's step in a stage: codes, and a scale and a bias of at most 4 bytes.
    step = t.groups * (p.group_size * p.bits // 8 + 2 * DTYPE_BYTES[p.x_dtype])
    # A group of x lies there with its sum and its squares; a simdgroup's own are eight.
    # Where there are no tensor cores, operands of bfloat16 are floats.
    ready = max(t.ready, 0) or -t.ready * 8 * t.simdgroups
    element = 2 if "Hopper" in chip.family and p.x_dtype != "float32" else 4
    used = t.simdgroups * STAGES * t.rows * step
    used += ready * (p.group_size * element + 8)
    return p.K % (t.groups * p.group_size) == 0 and used <= chip.threadgroup_bytes


def plan_codes(
    problem: Matmul, chip: Chip, kernel: str = "qmm_codes", normed: bool = False
) -> CodesPlan:
    """The plan of ``kernel``; ValueError if :func:`supports_codes` says no.

    normed: x is normed in the launch.
    """
    if (why := supports_codes(problem)) is not None:
        raise ValueError(f"no matrix kernel for {problem}: {why}")
    p = problem
    ks, groups, tiles, rows = next(t[2:] for t in _TILES if p.N >= t[0] and p.K >= t[1])

    def one(ks: int, groups: int, tiles: int) -> CodesPlan:
        """The tile of one row; its order of additions is that of all M."""
        ready = max(_READY // p.group_size, 8 * ks) if normed or tiles > 1 else -1
        reason = f"M = {p.M} rows as columns of a matrix, K over {ks} simdgroups"
        sizes = (16, ks * tiles, ks, 1, True, reason, groups, ready)
        return CodesPlan(kernel, *sizes)

    halves = [n for n in (ks, ks // 2, ks // 4, ks // 8) if n]
    tries = (one(*t, 1) for t in product(halves, (groups, 2)))
    found = next(t for t in tries if _fits(p, chip, t))
    if p.M == 1:
        more = one(found.k_simdgroups, found.groups, tiles)
    else:
        found = replace(found, ready=0)
        more = replace(found, rows=rows)
    return told(more if _fits(p, chip, more) else found, chip, p)


@lru_cache(maxsize=4096)
def plan_launch(problems: tuple[Matmul, ...], chip: Chip) -> Plan:
    """The exact plan of one launch; ValueError if ``supports_launch`` says no."""
    if len(problems) > 1:
        return plan_shared(problems, chip)
    if on_codes(problems[0], chip):
        return plan_codes(problems[0], chip)
    return plan(problems[0], chip)


@lru_cache(maxsize=4096)
def plan_block(
    kernel: str,
    members: tuple[Matmul, ...],
    chip: Chip,
    normed: bool = False,
    dims: tuple[int, ...] = (),
) -> Plan:
    """The plan of a decoder block's fused launch, as ``plan.plan_fused``.

    normed: x is normed in the launch. dims: head_dim and how many of it rotate.
    """
    whole = replace(members[0], N=sum(m.N for m in members))
    if not _block_on_codes(kernel, members, whole, chip, normed, dims):
        return plan_fused(kernel, members, chip)
    return plan_codes(whole, chip, _BLOCK[kernel], normed)


def _block_on_codes(
    kernel: str,
    members: tuple[Matmul, ...],
    whole: Matmul,
    chip: Chip,
    normed: bool,
    dims: tuple[int, ...],
) -> bool:
    if supports_fused(kernel, members) or any(supports_codes(m) for m in members):
        return False
    # x times the norm's weight has to fit into x's dtype before it is scaled down.
    if normed and whole.x_dtype == "float16" or not on_codes(whole, chip):
        return False
    # Tiles are of one matrix, and a pair that rotates is of two tiles.
    if len({m.bits for m in members}) > 1 or any(n % 32 for n in dims):
        return False
    return kernel != "qmv_qkv" or all(m.N % 32 == 0 for m in members)
