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
_SHARED = 32768  # bytes of threadgroup memory that every chip has

# Chip family -> least N of a launch that matrix units compute for every M, codes as
# they are; first match wins, no row: never. Where matrices run on the FMA pipes
# (Apple7-9) eight rows cost as much as one, so M = 1 would pay for them. H200, 4-bit
# group 64, bf16, cold weights, 2026-11-29: 4096 -> 14336 takes 15.1 us at M = 1 (qmv
# 14.0 in the same run) and 14.6 at M = 8; 4096 -> 1024 takes 5.1 (qmv 3.6): bench/
# results/h200-small-m-sweep.txt.
_FROM = (("Hopper", 2048),)

# (least N, least K) -> (k_simdgroups, groups a step, rows); first match wins. Same
# sweep: 4096 -> 128256 takes 90 us with (2, 4, 32) and 104 us with (4, 4, 16), 8192 ->
# 28672 44.5 us with (4, 2, 32) and 51.7 us with (2, 4, 32), 4096 -> 4096 6.5 us with
# (4, 4, 16) and 9.0 us with (4, 2, 32).
_TILES = ((8192, 8192, 4, 2, 32), (8192, 0, 2, 4, 32), (0, 0, 4, 4, 16))

# Kernel of a block's launch -> the same on matrix units.
_BLOCK = {
    "qmv_add": "qmm_codes_add",
    "qmv_glu": "qmm_codes_glu",
    "qmv_qkv": "qmm_codes_qkv",
}


@dataclass(frozen=True)
class CodesPlan(Plan):
    """Choices for one launch of the ``qmm_codes`` family. ``rows`` changes speed only.

    groups: groups of a row in a step; ``k_simdgroups`` and it order the additions.
    """

    groups: int


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


def _fits(p: Matmul, ks: int, groups: int, rows: int) -> bool:
    # A row's step in a stage: codes, and a scale and a bias of at most 4 bytes.
    step = groups * (p.group_size * p.bits // 8 + 2 * DTYPE_BYTES[p.x_dtype])
    even = p.K % (groups * p.group_size) == 0
    return even and ks * STAGES * rows * step <= _SHARED


def plan_codes(problem: Matmul, chip: Chip, kernel: str = "qmm_codes") -> CodesPlan:
    """The plan of ``kernel``; ValueError if :func:`supports_codes` says no."""
    if (why := supports_codes(problem)) is not None:
        raise ValueError(f"no matrix kernel for {problem}: {why}")
    ks, groups, rows = next(
        t[2:] for t in _TILES if problem.N >= t[0] and problem.K >= t[1]
    )
    tries = product((ks, ks // 2, 1), (groups, 2), (rows, 16))
    ks, groups, rows = next(t for t in tries if _fits(problem, *t))
    reason = f"M = {problem.M} rows as columns of a matrix, K over {ks} simdgroups"
    found = CodesPlan(kernel, rows, ks, ks, 1, True, reason, groups)
    return told(found, chip, problem)


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
    return plan_codes(whole, chip, _BLOCK[kernel])


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
