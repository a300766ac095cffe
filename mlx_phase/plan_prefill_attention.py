"""Attention of many query rows: problem and chip -> kernel and tile, or stock and why.

Pure functions over tables. Rows of a prefill are not exact rows: their bits depend on
q_len and k_len.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import lru_cache

from .chip import Chip
from .plan_attention import MAX_Q_LEN, supports_form
from .problem import DTYPE_BYTES, Sdpa

MAX_HEAD_DIM = 256
MAX_TILE_BYTES = 32768  # threadgroup memory that every Apple GPU has
MIN_STEPS = 8  # of a chunk: fewer would not pay for the merge
# Head dims (of K and of V alike) of MLX's fused prefill, elsewhere it keeps all scores.
FUSED = {"applegpu": (64, 72, 80, 96, 128), "sm": tuple(range(8, 129, 8))}


@dataclass(frozen=True)
class PrefillPlan:
    """Choices for one problem; all change speed and the order of additions.

    rows: query rows of a simdgroup. simdgroups: of a threadgroup. keys: in threadgroup
    memory at once. threadgroups: fill the chip; where a problem has fewer, its keys are
    split into chunks.
    """

    kernel: str
    rows: int
    simdgroups: int
    keys: int
    threadgroups: int
    reason: str
    exact: bool = False


# Chip family, larger head dim up to -> rows, simdgroups, keys, threadgroups a core.
# First match wins, the last rows are any other chip. What a lane of a simdgroup keeps:
# rows x (Dv + D / 2 of 16 bits) / 32 registers, and Apple has 128. Unmeasured on Apple.
_TILES = (
    ("Hopper", 128, 16, 8, 64, 1),
    ("Hopper", 256, 8, 8, 32, 1),
    ("", 80, 16, 4, 32, 2),
    ("", 128, 8, 8, 32, 2),
    ("", 256, 8, 8, 16, 2),
)

# Chip family, codes in the cache (None: or not), MLX's prefill is fused -> longest
# prompt that the kernels take, a power of two. First match wins, the last rows are any
# other chip. H200, bf16, 32/8 heads of 128, 2048 queries on 8192 keys, GPU time,
# 2026-11-29: 1281 us (8 bits 1384) against 753 of torch's SDPA on a plain cache, so
# long prompts stay stock. Rows for Apple are predictions.
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
    # Short prompts were not compared with MLX yet.
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
    p = problem
    if (why := supports_form(p)) is not None:
        return why
    if max(p.head_dim, p.v_head_dim) > MAX_HEAD_DIM:
        return (
            f"head dims ({p.head_dim}, {p.v_head_dim}): the output of 8 rows does not "
            f"fit in registers above {MAX_HEAD_DIM}"
        )
    return None


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


def tile_bytes(problem: Sdpa, keys: int) -> int:
    """Threadgroup memory of tiles of ``keys`` keys and values."""
    dims = (problem.head_dim, problem.v_head_dim)
    return sum(-(-d // 16) * 16 for d in dims) * keys * DTYPE_BYTES[problem.dtype]


def chunks_of(problem: Sdpa, p: PrefillPlan, q_len: int, k_len: int) -> int:
    """Chunks of keys: so many that the threadgroups fill the chip, if possible."""
    rows = problem.q_heads // problem.kv_heads * q_len
    tiles = -(-rows // (p.rows * p.simdgroups)) * problem.batch * problem.kv_heads
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
    while tile_bytes(p, keys) > MAX_TILE_BYTES:
        keys //= 2
    coded = min(p.k_bits, p.v_bits) < 16
    kernel = "sdpa_prefill" + "_codes" * coded
    reason = f"{rows * simdgroups} query rows read {keys} keys at a time once"
    fill = a_core * chip.gpu_cores
    chosen = PrefillPlan(kernel, rows, simdgroups, keys, fill, reason)
    if os.environ.get("MLX_PHASE_PRINT_PLANS", "0") not in ("", "0"):
        print(
            f"mlx_phase plan on {chip.name}: attention {p.q_heads}/{p.kv_heads} heads "
            f"of {p.head_dim}/{p.v_head_dim} prefill k{p.k_bits} v{p.v_bits} {p.dtype} "
            f"-> {kernel} rows={rows} simdgroups={simdgroups} keys={keys}: {reason}",
            file=sys.stderr,
        )
    return chosen
