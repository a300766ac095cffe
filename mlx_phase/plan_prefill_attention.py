"""Attention of many query rows: problem and chip -> kernel and tile, or stock and why.

Pure functions over tables. Rows of a prefill are not exact rows: their bits depend on
q_len and k_len.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from functools import lru_cache

from .chip import Chip
from .plan_attention import MAX_Q_LEN, supports_form
from .problem import DTYPE_BYTES, Sdpa

MAX_TILE_BYTES = 32768  # threadgroup memory that every Apple GPU has
MIN_STEPS = 8  # of a chunk: fewer would not pay for the merge
WIDE = "_wide"  # kernels for larger head dims than a simdgroup can hold:
MAX_HEAD_DIM = 256
# Head dims (of K and of V alike) of MLX's fused prefill, elsewhere it keeps all scores.
FUSED = {"applegpu": (64, 72, 80, 96, 128), "sm": tuple(range(8, 129, 8))}


@dataclass(frozen=True)
class PrefillPlan:
    """Choices for one problem; all change speed and the order of additions.

    rows: query rows of a simdgroup. simdgroups: of a threadgroup; in the wide kernels
    they share their rows. keys: of a step. threadgroups: fill the chip; where a problem
    has fewer, its keys are split into chunks.
    """

    kernel: str
    rows: int
    simdgroups: int
    keys: int
    threadgroups: int
    reason: str
    exact: bool = False

    @property
    def tile_rows(self) -> int:
        """Query rows of a threadgroup."""
        return self.rows * (1 if WIDE in self.kernel else self.simdgroups)


# Chip family, larger head dim up to -> rows, simdgroups, keys, threadgroups a core.
# First match wins, the last rows are any other chip. What a lane of a simdgroup keeps:
# rows x (Dv + D / 2 of 16 bits) / 32 registers, and Apple has 128; above 256 that is
# the share of eight simdgroups, in the wide kernels. Unmeasured on Apple.
_TILES = (
    ("Hopper", 128, 16, 8, 64, 1),
    ("Hopper", 256, 8, 8, 32, 1),
    ("Hopper", 576, 32, 8, 16, 1),
    ("", 80, 16, 4, 32, 2),
    ("", 128, 8, 8, 32, 2),
    ("", 256, 8, 8, 16, 2),
    ("", 576, 16, 8, 16, 2),
)

# Chip family, codes in the cache (None: or not), MLX's prefill is fused -> longest
# prompt that the kernels take, a power of two. First match wins, the last rows are any
# other chip. Rows for Apple are predictions. H200, bf16, causal, us of ours and of
# stock, on codes its attention of the dequantised cache, 2026-11-30: 32/8 heads of 128,
# 512 queries on 2k keys 100 and 31 (4 bits 102 and 55), 2048 on 8k 1304 and 398 (8 bits
# 1409 and 1178); 16/2 of 256, 2048 on 8k 2187 and 1617 (8 bits 2544 and 1974), on 2k
# 331 and 544, but keys are no part of a plan; 64/1 of 576/512, 2048 on 8k 34135 and
# 7719. Those of 256 are of the clock, but 2048 on 8k plain; under 512 queries untimed.
ALL, NONE = 1 << 30, 0
_TAKEN = (
    # An emulation is there to run kernels.
    ("CPU", None, None, ALL),
    # Neural accelerators multiply four times as fast, and only stock reaches them.
    ("Apple10", None, None, NONE),
    ("Apple11", None, None, NONE),
    # Stock reads keys for each head again and in one piece: short prompts are ours.
    ("Apple", False, True, 32),
    ("Apple", None, None, ALL),
    ("", None, None, NONE),
)


def fused(problem: Sdpa, chip: Chip) -> bool:
    """Whether MLX's own prefill of a plain cache keeps no scores in memory."""
    p = problem
    if p.head_dim != p.v_head_dim and chip.arch.startswith("applegpu"):
        return False
    if p.dtype == "float32" and chip.arch.startswith("sm_"):
        return False
    kinds = (dims for arch, dims in FUSED.items() if chip.arch.startswith(arch))
    return max(p.head_dim, p.v_head_dim) in next(kinds, ())


def supports_prefill(problem: Sdpa) -> str | None:
    """None if the prefill kernels compute ``problem``, or why not."""
    return supports_form(problem)


def stays_stock(problem: Sdpa, chip: Chip) -> str | None:
    """None if the kernels take ``problem`` on ``chip``, or why stock keeps it."""
    coded, own = min(problem.k_bits, problem.v_bits) < 16, fused(problem, chip)
    most = next(
        row[3]
        for row in _TAKEN
        if row[0] in chip.family and row[1] in (None, coded) and row[2] in (None, own)
    )
    if chip.arch.startswith("sm_") and problem.dtype == "float32":
        return "q_len > 16 in float32: tensor cores have none"
    if problem.q_len <= most:
        return None
    cache = "a dequantised cache" if coded else "a plain cache"
    rows = f"q_len > {max(most, MAX_Q_LEN)}"
    return f"{rows}: stock attention of {cache} stays on {chip.family}"


def tile_bytes(problem: Sdpa, rows: int, simdgroups: int, keys: int) -> int:
    """Threadgroup memory of tiles of ``keys`` keys and values, or of their scores."""
    if max(problem.head_dim, problem.v_head_dim) > MAX_HEAD_DIM:
        width = DTYPE_BYTES[problem.dtype]
        return rows * (keys * (4 * simdgroups + 2 * width) + 8)
    dims = (problem.head_dim, problem.v_head_dim)
    return sum(-(-d // 16) * 16 for d in dims) * keys * DTYPE_BYTES[problem.dtype]


def chunks_of(problem: Sdpa, p: PrefillPlan, q_len: int, k_len: int) -> int:
    """Chunks of keys: so many that the threadgroups fill the chip, if possible."""
    rows = problem.q_heads // problem.kv_heads * q_len
    tiles = -(-rows // p.tile_rows) * problem.batch * problem.kv_heads
    steps = -(-k_len // p.keys)
    chunks = max(1, min(p.threadgroups // tiles, steps // MIN_STEPS))
    # None is empty: steps are dealt out in equal numbers.
    return -(-steps // -(-steps // chunks))


def bucket(q_len: int) -> int:
    """What a prompt of ``q_len`` is planned as: the next power of two."""
    return 1 << (q_len - 1).bit_length()


@lru_cache(maxsize=4096)
def plan_prefill(problem: Sdpa, chip: Chip) -> PrefillPlan:
    """The plan for ``problem``; ValueError if :func:`supports_prefill` says no.

    It does not depend on k_len or batch, and on q_len only as far as `stays_stock`.
    """
    p = problem
    if (why := supports_prefill(p)) is not None:
        raise ValueError(f"no kernel for {p}: {why}")
    dim = max(p.head_dim, p.v_head_dim)
    rows, simdgroups, keys, a_core = next(
        row[2:] for row in _TILES if row[0] in chip.family and dim <= row[1]
    )
    if p.dtype == "float32" and dim > 64:
        rows = 8  # q takes twice the registers
    while tile_bytes(p, rows, simdgroups, keys) > MAX_TILE_BYTES:
        keys //= 2
    kernel = "sdpa_prefill" + WIDE * (dim > MAX_HEAD_DIM)
    kernel += "_codes" * (min(p.k_bits, p.v_bits) < 16)
    chosen = PrefillPlan(kernel, rows, simdgroups, keys, a_core * chip.gpu_cores, "")
    reason = f"{chosen.tile_rows} query rows read {keys} keys at a time once"
    chosen = replace(chosen, reason=reason)
    if os.environ.get("MLX_PHASE_PRINT_PLANS", "0") not in ("", "0"):
        print(
            f"mlx_phase plan on {chip.name}: attention {p.q_heads}/{p.kv_heads} heads "
            f"of {p.head_dim}/{p.v_head_dim} prefill k{p.k_bits} v{p.v_bits} {p.dtype} "
            f"-> {kernel} rows={rows} simdgroups={simdgroups} keys={keys}: {reason}",
            file=sys.stderr,
        )
    return chosen
