"""Problem and chip -> which kernel with which tile. Pure functions over tables.

``MLX_PHASE_PRINT_PLANS=1`` prints each plan on stderr when it is first made.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, replace
from functools import lru_cache

from .chip import Chip
from .problem import (
    AFFINE_BITS,
    AFFINE_GROUPS,
    DTYPE_BYTES,
    FP_MODES,
    Matmul,
)

MAX_M = 16  # rows of the exact decode family; prefill kernels take over above
MIN_SPLIT_K = 512  # a split with less K costs more in the reduce than it wins


@dataclass(frozen=True)
class Plan:
    """Choices for one problem. ``rows`` and ``simdgroups`` change speed only;
    ``k_simdgroups`` and ``splits`` change the order of additions, so they depend on
    (N, K, chip) and never on M (exact rows).

    rows: output rows a simdgroup owns. simdgroups: per threadgroup. k_simdgroups:
    of these, how many share rows and split K. splits: threadgroups that split K,
    summed by ``qmv_reduce``. lean: the text with the sums of ``lean.h``.
    """

    kernel: str
    rows: int
    simdgroups: int
    k_simdgroups: int
    splits: int
    exact: bool
    reason: str
    lean: bool = field(default=False, kw_only=True)


# Chip family -> (least k_simdgroups, simdgroups a core should have in flight: if not,
# it doubles). First match wins, the last row is any other chip. H200, 4-bit group 64,
# fp16, 2026-11-29: 8192 -> 28672 takes 45.2 us with 2 and 48.8 us with 1; 4096 -> 1024
# takes 3.5 us with 4 and 5.4 us with 2. Apple: with 6, lanes wait for 12 KiB of W at
# M = 1, twice what bandwidth x latency asks for, and no more is predicted to take less
# time; a split prepares x for half as many rows (docs/counters.md; unmeasured here).
# CPU: lanes run one after another.
_FILL = (("CPU", 1, 0), ("Hopper", 2, 8), ("Apple", 1, 6), ("", 1, 24))

# M up to -> rows. At most ~24 accumulators a lane, or they spill. H200, M = 4:
# 4096 -> 14336 takes 28.1 us with 4 rows, 29.5 us with 8; unmeasured on Apple.
_ROWS = ((4, 4), (8, 2), (16, 1))

# Families whose instructions bound a decode step: they get the sums of lean.h. Hopper
# waits for memory, and a half costs an instruction to widen there. CPU: barriers and
# shuffles cost the emulation more, from 4 rows on it takes twice the time.
_LEAN = ("Apple",)
# M up to -> rows, simdgroups for each that splits K: more than 2 of them share x, and
# up to 32 accumulators a lane pay. Predicted by counters (docs/counters.md; 10.8 cycles
# a weight at M = 8 with 4 rows, 12.3 with 2), unmeasured on Apple.
_LEAN_TILES = ((2, 4, 1), (4, 4, 4), (8, 4, 8), (16, 2, 8))
MAX_HALVED = 8  # rows of x up to which 4 simdgroups prepare x for 4 rows of W each
MAX_SHARED = 16  # rows of x, of all that split K, that threadgroup memory has room for


def supports(problem: Matmul) -> str | None:
    """None if the decode family computes ``problem``, otherwise a sentence why not."""
    p = problem
    if p.x_dtype not in DTYPE_BYTES:
        return f"activations are {p.x_dtype}, kernels take {', '.join(DTYPE_BYTES)}"
    if p.batch != 1:
        return "weights are batched (3-D), kernels take one matrix"
    if p.M > MAX_M:
        return f"M = {p.M} rows: decode kernels take 1..{MAX_M}"
    if min(p.M, p.N, p.K) < 1:
        return f"empty problem (M, N, K) = ({p.M}, {p.N}, {p.K})"
    if p.mode == "none":
        return None if p.K >= 8 else f"K = {p.K} is below 8"
    if p.mode == "affine":
        if p.bits not in AFFINE_BITS or p.group_size not in AFFINE_GROUPS:
            return (
                f"affine {p.bits}-bit group {p.group_size}: kernels have bits "
                f"{AFFINE_BITS} and groups {AFFINE_GROUPS}"
            )
    elif p.mode not in FP_MODES:
        return f"mode {p.mode!r}: kernels have affine, {', '.join(FP_MODES)}"
    elif (p.bits, p.group_size) != FP_MODES[p.mode]:
        has = (p.bits, p.group_size)
        return f"{p.mode} is {FP_MODES[p.mode]} (bits, group), not {has}"
    if p.K % p.group_size:
        return f"K = {p.K} is not a multiple of group_size = {p.group_size}"
    return None


def pack_size(problem: Matmul) -> int:
    """Weights a lane takes per step (``pack_size`` of qmv.metal, 8 in gemv.metal)."""
    if problem.mode == "none":
        return 8
    return 16 if problem.bits in (6, 8) or problem.group_size == 16 else 32


def split_k(problem: Matmul, chip: Chip) -> tuple[int, int]:
    """(k_simdgroups, splits) that fill ``chip`` for this (N, K), whatever M is."""
    ks, fill = next(row[1:] for row in _FILL if row[0] in chip.family)
    tiles = -(-problem.N // 4)
    steps = problem.K // (pack_size(problem) * 32)
    while ks < 8 and tiles * ks < fill * chip.gpu_cores and steps >= 2 * ks:
        ks *= 2
    # Splitting over threadgroups costs a second launch: only for grids that leave
    # most cores without a threadgroup.
    splits = 1
    if tiles * 4 < chip.gpu_cores:
        splits = min(-(-chip.gpu_cores * 2 // tiles), problem.K // (MIN_SPLIT_K * ks))
    return ks, max(1, splits)


@lru_cache(maxsize=4096)
def plan(problem: Matmul, chip: Chip) -> Plan:
    """The plan for ``problem`` on ``chip``; ValueError if :func:`supports` says no."""
    return told(_plan(problem, chip), chip, problem)


def told(p: Plan, chip: Chip, *problems: Matmul) -> Plan:
    """``p``, printed if asked for. Callers are cached, so that is once a plan."""
    if os.environ.get("MLX_PHASE_PRINT_PLANS", "0") not in ("", "0"):
        first, N = problems[0], "+".join(str(m.N) for m in problems)
        form = f"{first.mode} {first.bits}-bit g{first.group_size}"
        form = "plain" if first.mode == "none" else form
        print(
            f"mlx_phase plan on {chip.name}: M={first.M} N={N} K={first.K} {form} "
            f"{first.x_dtype} -> {p.kernel} rows={p.rows} "
            f"simdgroups={p.simdgroups} k_simdgroups={p.k_simdgroups} "
            f"splits={p.splits}: {p.reason}",
            file=sys.stderr,
        )
    return p


def _plan(problem: Matmul, chip: Chip) -> Plan:
    why = supports(problem)
    if why is not None:
        raise ValueError(f"no kernel for {problem}: {why}")
    ks, splits = split_k(problem, chip)
    kernel = {"none": "gemv", "affine": "qmv"}.get(problem.mode, "qmv_fp")
    lean = kernel != "gemv" and any(family in chip.family for family in _LEAN)
    rows, simdgroups = tile(problem, ks, chip, lean)
    bound = f"M = {problem.M}: weights read once"
    if simdgroups > 2 * ks:
        bound += f", x widened once for {simdgroups // ks} simdgroups"
    if ks > 1:
        bound += f", K over {ks} simdgroups to fill {chip.gpu_cores} cores"
    if splits > 1:
        bound += f", K over {splits} threadgroups and a reduce"
    return Plan(kernel, rows, simdgroups, ks, splits, True, bound, lean=lean)


def tile(problem: Matmul, ks: int, chip: Chip, lean: bool) -> tuple[int, int]:
    """(rows, simdgroups) if ``ks`` simdgroups split K."""
    M = problem.M
    if lean:
        rows, each = next(t[1:] for t in _LEAN_TILES if M <= t[0])
        groups = min(8, each * ks)
        if M <= MAX_HALVED and groups // 2 > 2 * ks:
            # Half a tile where it leaves the fullest core fewer rows of one or two.
            half = rows * groups // 2 // ks
            most = [-(-problem.N // n // chip.gpu_cores) for n in (half, 2 * half)]
            groups //= 1 + (most[0] < 2 * most[1] <= 4)
        if groups > 2 * ks and M * ks <= MAX_SHARED:
            return rows, groups
    return next(r for m, r in _ROWS if M <= m), max(2, ks)


# Members of a launch that several matrices share -> its kernel.
_SHARED = {2: "qmv_pair", 3: "qmv_triple"}


def supports_shared(members: tuple[Matmul, ...]) -> str | None:
    """None if one launch computes all ``members`` from the same x, or why not."""
    if len(members) not in _SHARED:
        return f"{len(members)} matrices: a launch takes {tuple(_SHARED)}"
    for member in members:
        if (why := supports(member)) is not None:
            return why
        if member.mode != "affine":
            return f"mode {member.mode}: only affine matrices share a launch"
        if replace(member, N=members[0].N) != members[0]:
            return f"{member} and {members[0]} differ in more than N"
        if member.N < 4 or member.N * member.K // member.group_size < 8:
            return f"N = {member.N} is too small"
    return None


@lru_cache(maxsize=4096)
def plan_shared(members: tuple[Matmul, ...], chip: Chip) -> Plan:
    """The plan of one launch for several matrices with the same x.

    KS is the one of all rows together: sharing fills the chip. Never splits K over
    threadgroups. ValueError if :func:`supports_shared` says no.
    """
    if (why := supports_shared(members)) is not None:
        raise ValueError(f"no shared launch: {why}")
    whole = _plan(replace(members[0], N=sum(m.N for m in members)), chip)
    reason = f"{len(members)} matrices read the same x; {whole.reason}"
    shared = replace(whole, kernel=_SHARED[len(members)], splits=1, reason=reason)
    return told(shared, chip, *members)


def supports_fused(kernel: str, members: tuple[Matmul, ...]) -> str | None:
    """None if a block's fused ``kernel`` takes ``members``, or why not."""
    for m in members:
        if (why := supports(m)) is not None:
            return why
        if m.mode != "affine":
            return f"mode {m.mode}: fused kernels take affine matrices"
        like = replace(m, N=members[0].N)
        if kernel == "qmv_qkv":  # the only one that takes mixed bits
            like = replace(like, bits=members[0].bits)
        if like != members[0]:
            return f"{m} and {members[0]} do not share a launch"
        if m.N % 4 or m.K < 64:
            return f"N = {m.N}, K = {m.K}: fused kernels take N % 4 = 0 and K >= 64"
    if kernel == "qmv_glu" and members[0].N != members[1].N:
        return f"gate has {members[0].N} rows, up has {members[1].N}"
    return None


@lru_cache(maxsize=4096)
def plan_fused(kernel: str, members: tuple[Matmul, ...], chip: Chip) -> Plan:
    """The plan of a decoder block's fused launch: tiles as for all rows together.

    ValueError if :func:`supports_fused` says no.
    """
    if (why := supports_fused(kernel, members)) is not None:
        raise ValueError(f"no {kernel}: {why}")
    whole = _plan(replace(members[0], N=sum(m.N for m in members)), chip)
    # Pairs of rows (gate with up, or two that rotate) need a simdgroup of their own.
    rows = max(2, whole.rows)
    fused = replace(whole, kernel=kernel, rows=rows, splits=1)
    return told(fused, chip, *members)


def supports_launch(problems: tuple[Matmul, ...]) -> str | None:
    """None if one launch computes ``problems`` (one, or several with the same x)."""
    if len(problems) > 1:
        return supports_shared(problems)
    return supports(problems[0])
