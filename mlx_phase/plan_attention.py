"""Decode attention: problem and chip -> kernel and tile. Pure functions over tables.

``MLX_PHASE_PRINT_PLANS=1`` prints each plan on stderr when it is first made.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import lru_cache

from .chip import Chip
from .problem import (
    CACHE_BITS,
    CACHE_GROUPS,
    DTYPE_BYTES,
    HEAD_DIM_PAIRS,
    HEAD_DIMS,
    Sdpa,
)

MAX_Q_LEN = 16
MAX_SIMDGROUPS = 8  # of a threadgroup: 256 threads, which every Apple GPU takes


@dataclass(frozen=True)
class SdpaPlan:
    """Choices for one problem. ``rows``, ``threadgroups``, ``threadgroup_bytes`` (what
    a kernel may declare), ``registers`` (of a lane, at most, where a compiler can be
    told) and, of plain keys, ``ahead`` change speed only; all others but ``reason``
    change the order of additions, so they depend on dims, format and chip alone, never
    on q_len, batch or k_len (exact rows).

    chunk: keys of a state. lanes: lanes that share a key. keys: keys of a lane
    group (matrix units: of a simdgroup) between two updates of its softmax. simdgroups:
    of a threadgroup, how many share the keys of the chunk. rows: query rows that a
    simdgroup holds. fold: chunks of a run, whose states are added up in order before
    runs are merged, by the threadgroup that takes them or in the merge. threadgroups:
    that fill the chip, more runs than that are taken in turns (0: one each). ahead: a
    simdgroup of matrix units asks for its keys and values a step before, which takes
    registers, and codes a ring in threadgroup memory.
    """

    kernel: str
    chunk: int
    lanes: int
    keys: int
    simdgroups: int
    rows: int
    exact: bool
    reason: str
    threadgroups: int = 0
    ahead: bool = True
    threadgroup_bytes: int = 32768
    registers: int = 255
    fold: int = 1


# Chip family, query heads per kv head from, more of the bits of K and V up to, larger
# of the head dims up to -> kernel, chunk, lanes, keys, simdgroups, most rows. First
# match wins, the last rows are any other chip. A lane of the vector kernel holds about
# 16 floats of q and o per row (128 / 16 lanes, twice). H200, bf16, 32/8 heads of 128,
# 32k keys, 2026-11-29, us with the reduce: vector 99.5, matrix: see below. 16 rows of
# 256 spill if loads come early: 16/2 heads, 32k keys, 4 queries 76.9, with 8 rows 54.6.
# Apple: matrix units where the vector kernel's instructions and not memory would bound
# one query, as counters predict (docs/counters.md); unmeasured.
_TILES = (
    ("Hopper", 1, 32, 128, "sdpa_matrix", 256, 4, 16, 4, 16),
    ("Hopper", 1, 32, 256, "sdpa_matrix", 256, 4, 16, 4, 8),
    ("Hopper", 1, 32, 64, "sdpa_split", 256, 8, 4, 4, 4),
    ("Hopper", 1, 32, 128, "sdpa_split", 256, 16, 4, 4, 4),
    ("Hopper", 1, 32, 256, "sdpa_split", 128, 32, 4, 4, 4),
    ("Apple", 8, 32, 128, "sdpa_matrix", 256, 4, 16, 4, 8),
    ("Apple", 4, 8, 128, "sdpa_matrix", 256, 4, 16, 4, 8),
    ("", 1, 32, 64, "sdpa_split", 256, 8, 2, 4, 2),
    ("", 1, 32, 128, "sdpa_split", 256, 16, 2, 4, 2),
    ("", 1, 32, 256, "sdpa_split", 128, 32, 2, 4, 2),
    ("", 1, 32, 576, "sdpa_split", 64, 32, 2, 4, 2),
)

# Matrix units of Hopper: larger of the head dims up to, more of the bits of K and V up
# to, smaller of the groups from -> chunk, keys, simdgroups, most rows, fold. 32 keys
# are two tiles. Codes of long heads have a ring of threadgroup memory for each
# simdgroup: 8 bits leave room for two. H200, bf16, 32/8 heads of 128, one query,
# 2026-11-30, us of both launches at 1k / 8k / 32k / 128k keys
# (bench/results/h200-attention-sweep.txt): plain 9.5 / 15.1 / 39.5 / 137.9 (an earlier
# text with chunk 512: 13.2 / 16.3 / 39.5 / 134.6; with 8 simdgroups: 9.3 / 15.7 / 41.5
# / 139.8); codes on 2026-12-01: 8 bits 8.5 / 10.8 / 24.7 / 74.9 (168 registers, 12
# simdgroups a core: 8.8 / 11.2 / 25.2 / 83.6; before, 9.0 / 11.3 / 25.4 / 76.8, chunk
# 512: 11.4 / 12.8 / 24.7 / 73.5; 4 simdgroups, one tile: 8.1 / 11.1 / 26.4 / 79.6); 4
# bits 8.3 / 9.7 / 17.2 / 48.4 (chunk 384: 7.7 / 9.9 / 17.6 / 47.3; before, 8.4 / 9.8 /
# 16.9 / 49.3, chunk 256: 7.4 / 9.5 / 18.9 / 52.0; 128 registers, 16 simdgroups a core:
# 9.5 / 10.4 / 18.0 / 51.3). Runs of 1 / 4 / 8 chunks, in one run, plain at
# 32k 40.0 / 38.9 / 48.6, at 128k 136.9 / 130.8 / 128.3, four queries 159.5 / 149.3 /
# 145.8; 8 bits of 1 / 4 at 128k 80.8 / 77.4; 4 bits of 1 / 2 52.3 / 52.0, four queries
# 92.9 / 100.6.
_MATRIX = (
    (64, 4, 64, 512, 32, 4, 16, 1),
    (64, 8, 64, 256, 32, 4, 16, 1),
    (128, 4, 64, 512, 32, 4, 8, 1),
    (128, 8, 64, 256, 32, 2, 8, 4),
    (128, 8, 0, 256, 16, 4, 16, 1),
    (128, 16, 0, 256, 16, 4, 16, 4),
    (256, 16, 0, 256, 16, 4, 16, 1),
)


def supports_sdpa(problem: Sdpa) -> str | None:
    """None if the decode-attention kernels compute ``problem``, or why not."""
    if (why := supports_form(problem)) is not None:
        return why
    if problem.q_len > MAX_Q_LEN:
        return f"q_len = {problem.q_len}: decode kernels take 1..{MAX_Q_LEN}"
    return None


def supports_form(problem: Sdpa) -> str | None:
    """None if attention kernels know what ``problem`` is made of, for any q_len."""
    p = problem
    if p.dtype not in DTYPE_BYTES:
        return f"queries are {p.dtype}, kernels take {', '.join(DTYPE_BYTES)}"
    dims = (p.head_dim, p.v_head_dim)
    if dims not in HEAD_DIM_PAIRS and (dims[0] not in HEAD_DIMS or dims[0] != dims[1]):
        return f"head dims {dims}: kernels have {HEAD_DIMS} and {HEAD_DIM_PAIRS}"
    if min(p.q_heads, p.kv_heads, p.batch, p.q_len) < 1 or p.k_len < 0:
        return "empty problem"
    if p.q_heads % p.kv_heads:
        return f"{p.q_heads} query heads are no multiple of {p.kv_heads} kv heads"
    if p.mask not in ("none", "bool", "additive"):
        return f"mask {p.mask!r}: kernels take none, bool and additive"
    if p.window < 0:
        return f"window = {p.window} is negative"
    for name, bits, group, dim in (
        ("k", p.k_bits, p.k_group, p.head_dim),
        ("v", p.v_bits, p.v_group, p.v_head_dim),
    ):
        if bits >= 16:
            continue
        if bits not in CACHE_BITS or group not in CACHE_GROUPS or dim % group:
            return (
                f"{name} has {bits}-bit codes in groups of {group} of {dim}: kernels "
                f"have bits {CACHE_BITS} and groups {CACHE_GROUPS}"
            )
    return _why_not_joint(p) if p.joint else None


def _why_not_joint(p: Sdpa) -> str | None:
    if p.mask != "none" or not p.lens:
        return "a joint cache has its keys counted on the device, and no mask"
    k, v = (p.head_dim, p.k_bits, p.k_group), (p.v_head_dim, p.v_bits, p.v_group)
    if k != v:
        return "keys and values in one array are of one head dim and format"
    return None


def row_block(rows: int, most: int) -> int:
    """Rows of a simdgroup: blocks of at most ``most`` that are as even as can be."""
    return -(-rows // -(-rows // most))


@lru_cache(maxsize=4096)
def plan_sdpa(problem: Sdpa, chip: Chip) -> SdpaPlan:
    """The plan for ``problem``; ValueError if :func:`supports_sdpa` says no."""
    p = problem
    if (why := supports_sdpa(p)) is not None:
        raise ValueError(f"no kernel for {p}: {why}")
    dim, G = max(p.head_dim, p.v_head_dim), p.q_heads // p.kv_heads
    # Without them a float32 product is slower; codes come in packs of 32 of K, 64 of V.
    tensor_cores = p.dtype != "float32" and not (
        p.head_dim % (16 if p.k_bits >= 16 else 32)
        or p.v_head_dim % (16 if p.v_bits >= 16 else 64)
    )
    bits, group = max(p.k_bits, p.v_bits), min(p.k_group, p.v_group)
    kernel, chunk, lanes, keys, simdgroups, most = next(
        row[4:]
        for row in _TILES
        if row[0] in chip.family
        and G >= row[1]
        and bits <= row[2]
        and dim <= row[3]
        and (tensor_cores or row[4] != "sdpa_matrix")
    )
    if p.dtype == "float32":
        keys = min(keys, 2)  # a key takes twice the registers
    if min(p.k_bits, p.v_bits) < 16:
        kernel += "_codes"
    if p.joint:
        kernel += "_joint"
    rows, threadgroups, registers, fold = row_block(G * p.q_len, most), 0, 255, 1
    matrix, hopper = kernel.startswith("sdpa_matrix"), chip.family == "Hopper"
    memory = chip.threadgroup_bytes
    if ahead := matrix and hopper:
        chunk, keys, simdgroups, most, fold = next(
            (*row[3:6], min(most, row[6]), row[7])
            for row in _MATRIX
            if dim <= row[0] and bits <= row[1] and group >= row[2]
        )
    if matrix:
        rows = min(most, -(-G * p.q_len // 8) * 8)
    if matrix and hopper:
        coded = "_codes" in kernel
        if not coded and p.head_dim == dim == 256 and G * p.q_len > 8:
            # Without registers for early loads, and with q in threadgroup memory. H200,
            # 16/2 heads, 32k keys, us: 16 queries 129 (187 with blocks of 8, loads
            # early), 4 39.9 (54.4), 2 28.0 (33.3); at 8k 39.8 (55.3), 19.0, 18.1.
            rows, ahead = 16, False
        # Registers leave room for so many simdgroups on a core (ptxas): NVRTC is told
        # (REGISTERS). 8 bits, several blocks of rows: 12 fill it better. 32k keys, 4
        # queries of 32/8 heads: 34.8 us in a sweep, 38.5 with 8 and the text before.
        # One block: 82.8 and 81.9 at 128k keys.
        few = G * p.q_len <= 8
        full = coded and dim > 64 and (group < 64 or keys > 16 and bits > 4 and few)
        full = full or rows > 8 or dim > 128
        resident = 8 if full else 12 if coded or dim > 64 else 16
        threadgroups = resident * chip.gpu_cores // simdgroups
        memory = min(memory, 227 * 1024 * simdgroups // resident - 1024)
        registers = min(255, 65536 // (32 * resident) // 8 * 8)
    reason = f"{G} x {p.q_len} query rows read a chunk of {chunk} keys once"
    chosen = SdpaPlan(
        *(kernel, chunk, lanes, keys, simdgroups, rows),
        *(True, reason, threadgroups, ahead, memory, registers, fold),
    )
    if os.environ.get("MLX_PHASE_PRINT_PLANS", "0") not in ("", "0"):
        print(
            f"mlx_phase plan on {chip.name}: attention {p.q_heads}/{p.kv_heads} heads "
            f"of {p.head_dim}/{p.v_head_dim} q_len={p.q_len} k{p.k_bits} v{p.v_bits} "
            f"{p.dtype} -> {kernel} chunk={chunk} lanes={lanes} keys={keys} "
            f"simdgroups={simdgroups} rows={rows}: {reason}",
            file=sys.stderr,
        )
    return chosen
