"""Launchers of decode attention. They run kernels or raise, never stock."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import mlx.core as mx

from ..plan_attention import MAX_SIMDGROUPS, SdpaPlan, plan_sdpa
from ..problem import Sdpa
from .attention_reduce import by_head, merge, out_shape
from .matmul import device_chip, kernel

# A cache: a plain view, or (codes, scales, biases) as mlx-lm's QuantizedKVCache has it.
# Of a joint problem k has all arrays, and v is None.
Cache = mx.array | Sequence[mx.array] | None
MASKS = {"none": 0, "bool": 1, "additive": 2}


def template(
    problem: Sdpa,
    p: SdpaPlan,
    direct: bool,
    scale: float = 1.0,
    packed: bool = False,
    fold: int = 1,
) -> list[tuple[str, object]]:
    """Template arguments of the kernel that ``p`` names; direct: there is one chunk;
    fold: chunks of a run that a threadgroup takes.

    Joint kernels have the scale and what all rows see among them, and those of plain
    caches whether q has the fresh keys behind it.
    """
    p = spread(p, direct)
    args = form(problem, "_codes" in p.kernel)
    args += [("L", p.lanes), ("U", p.keys), ("R", p.rows), ("KP", p.simdgroups)]
    args += [("W", row_blocks(problem, p, direct)), ("CHUNK", p.chunk)]
    args += [("WINDOW", problem.window > 0), ("G", problem.q_heads // problem.kv_heads)]
    args += [("ALONE", problem.batch == 1), ("ONE", problem.q_len == 1)]
    args += [("MASK", MASKS[problem.mask]), ("SINKS", problem.sinks and direct)]
    args += [("LENS", problem.lens), ("DIRECT", direct)]
    if problem.joint:
        (bits,) = struct.unpack("<i", struct.pack("<f", scale))
        args += [("SCALE", bits), ("KEYS", problem.window), ("CAUSAL", problem.causal)]
        args += [("PACKED", packed)] * ("_codes" not in p.kernel)
    if not p.kernel.startswith("sdpa_matrix"):
        return args
    args += [("AHEAD", p.ahead), ("MEM", p.threadgroup_bytes)]
    return args + [("FOLD", fold), ("REGISTERS", p.registers)]


def _blocks(problem: Sdpa, p: SdpaPlan) -> int:
    return -(-problem.q_heads // problem.kv_heads * problem.q_len // p.rows)


def spread(p: SdpaPlan, direct: bool) -> SdpaPlan:
    """The plan of one chunk: few rows a threadgroup, as most cores have nothing to do.

    H200, bf16, 32/8 heads of 128, 256 keys: 4 queries in 7.1 us with threadgroups of 8
    rows and 8.4 of 16, 16 queries in 7.1 and 10.8 (of 32).
    """
    small = direct and p.kernel.startswith("sdpa_matrix") and p.rows > 8
    return replace(p, rows=8, ahead=True) if small else p


def row_blocks(problem: Sdpa, p: SdpaPlan, direct: bool = False) -> int:
    """Blocks of query rows of a threadgroup, which read the same keys."""
    # What comes ahead is each block's own: H200, 16 queries of 32/8 heads over 1k, 8k,
    # 32k, 128k keys in 11.7, 42, 131, 490 us, 14.5, 47, 149, 560 with two blocks. Many
    # long rows have their queries in threadgroup memory, runs what they have so far.
    long = "_codes" not in p.kernel and p.rows * problem.head_dim >= 4096
    alone = direct or p.ahead or long or p.fold > 1
    if p.kernel.startswith("sdpa_matrix") and alone:
        return 1
    return min(_blocks(problem, p), max(1, MAX_SIMDGROUPS // p.simdgroups))


# Threadgroup memory that a ring of codes, what runs hold and a merge in one pass need:
# 8 bits, four queries over 128k keys: 119 us in runs with 36 KiB, 113 without runs.
RING_AND_RUNS = 44 * 1024


def fold_of(problem: Sdpa, p: SdpaPlan, chunks: int) -> int:
    """Chunks of a run that a threadgroup takes: all, where that fills half the chip."""
    fits = "_codes" not in p.kernel or p.threadgroup_bytes >= RING_AND_RUNS
    runs = -(-chunks // p.fold) * _blocks(problem, p)
    runs *= problem.batch * problem.kv_heads
    return p.fold if fits and 2 * runs >= p.threadgroups else 1


def turns(problem: Sdpa, p: SdpaPlan, runs: int) -> int:
    """Threadgroups for the runs of a kv head, so that each takes as many."""
    if not p.threadgroups:
        return runs
    W = row_blocks(problem, p)
    each = -(-_blocks(problem, p) // W) * W * problem.batch * problem.kv_heads
    most = max(1, p.threadgroups // each)
    return -(-runs // -(-runs // most))


# Inputs under 8 elements are `constant` in MSL, and kernels read others; only tiny
# caches, and a token's few scales, are so small.
LEAST = 8


def padded(a: mx.array) -> mx.array:
    """A part of a quantised cache that the kernels can read."""
    return a if a.size >= LEAST else mx.pad(a, [(0, 0), (0, 0), (0, 8), (0, 0)])


def _behind(a: mx.array) -> mx.array:
    """The same for arrays without strides: what is there stays where it is."""
    if a.size >= LEAST:
        return a
    return mx.pad(a, [(0, -(-LEAST // a[0].size)), (0, 0), (0, 0), (0, 0)])


def arguments(q, k, v, mask, sinks, lens, numbers, coded: bool) -> list[mx.array]:
    """Inputs of a kernel in the order of its text, from those of `prepare`'s function.

    coded: it takes (codes, scales, biases) of k and of v, where one may be plain.
    """
    if v is None:
        return [q, *map(_behind, k), lens, *[sinks] * (sinks is not None)]
    # Numbers stand in the place of what is not there: it is not read.
    last = [numbers if sinks is None else sinks, numbers if lens is None else lens]
    if coded:
        k = [*map(padded, k)] if isinstance(k, (tuple, list)) else [k, q, q]
        v = [*map(padded, v)] if isinstance(v, (tuple, list)) else [v, q, q]
        inputs = [q, *k, *v]
    else:
        inputs = [q, k, v]
    if mask is None:
        mask = numbers
    elif mask.ndim != 4:
        mask = mask.reshape(*[1] * (4 - mask.ndim), *mask.shape)
    return [*inputs, mask, *last, numbers]


def form(problem: Sdpa, coded: bool) -> list[tuple[str, object]]:
    """The template arguments that all these kernels begin with."""
    args = [("T", getattr(mx, problem.dtype))]
    args += [("D", problem.head_dim), ("DV", problem.v_head_dim)]
    if coded:
        args += [("KB", min(problem.k_bits, 16)), ("KG", problem.k_group)]
        args += [("VB", min(problem.v_bits, 16)), ("VG", problem.v_group)]
    return args


@lru_cache(maxsize=256)
def _numbers(scale: float, window: int, causal: bool) -> mx.array:
    return mx.array([scale, window, causal], mx.float32)


def prepare(problem: Sdpa, p: SdpaPlan | None = None) -> Callable[..., Any]:
    """``f(q, k, v, *, scale, mask=None, sinks=None, lens=None) -> o`` for any k_len.

    q [B, Hq, q_len, D]; k and v [B, Hkv, k_len, D or Dv], views of a cache that are
    read in place, or (codes, scales, biases) of it; o [B, Hq, q_len, Dv] of q's dtype.
    The last axis of q, k and v is contiguous, or o is NaN. mask: broadcastable to [B,
    Hq, q_len, k_len], bool (True: attend) or added to the scores. sinks: [Hq]. lens:
    int32 [B], keys of each batch row that exist, this step's included; o of no keys is
    0. ValueError if no kernel supports the problem.

    Of a joint problem v is None and k three arrays: kv [2 B, Hkv, k_len, D], keys and
    then values; recent [2 B, Hkv, room, D], those of earlier steps that kv lacks; fresh
    [2 B, Hkv, q_len, D], this step's. Of codes each is three arrays: kv's, then those
    of recent, then fresh. Two arrays: fresh lies behind q in one array, which stands in
    the place of q, as large as [B, Hq + 2 Hkv, q_len, D]. lens is [3, B]: keys that
    exist, up to k_len; the place in kv of the first recent one; that of the first fresh
    one, at most ``room - q_len`` behind. The function gives (o, arrays of the next
    step's recent). An array that is not contiguous is copied.
    """
    p = p or plan_sdpa(problem, device_chip())
    # Other chips' plans run here too, as far as there is room.
    room = min(p.threadgroup_bytes, device_chip().threadgroup_bytes)
    p = replace(p, threadgroup_bytes=room)
    dtype = getattr(mx, problem.dtype)
    B, H, q_len, DV = problem.batch, problem.q_heads, problem.q_len, problem.v_head_dim
    coded = "_codes" in p.kernel

    @lru_cache(maxsize=4096)
    def launch(
        chunks: int, scale: float, packed: bool, *kept: tuple[int, ...]
    ) -> tuple[dict[str, object], int]:
        direct = chunks == 1
        fold = 1 if direct else fold_of(problem, p, chunks)
        W = row_blocks(problem, p, direct)
        threads = 32 * p.simdgroups * W
        width = threads * -(-_blocks(problem, spread(p, direct)) // W)
        runs = -(-chunks // fold)
        groups = turns(problem, p, runs) + problem.joint
        state = (B, H, q_len, runs)
        out = (out_shape(problem), dtype) if direct else ((*state, DV), mx.float32)
        types = [mx.uint32, dtype, dtype] if coded else [dtype]
        outs = [out, *zip(kept, types[: len(kept)], strict=True)]
        if not (direct and kept):
            outs.append(((1,) if direct else (*state, 2), mx.float32))
        how = {
            "template": template(problem, p, direct, scale, packed, fold),
            "grid": (width, groups, B * problem.kv_heads),
            "threadgroup": (threads, 1, 1),
            "output_shapes": [shape for shape, _ in outs],
            "output_dtypes": [kind for _, kind in outs],
        }
        return how, p.fold // fold

    def call(
        q: mx.array,
        k: Cache,
        v: Cache,
        *,
        scale: float,
        mask: mx.array | None = None,
        sinks: mx.array | None = None,
        lens: mx.array | None = None,
    ) -> mx.array | tuple[mx.array, list[mx.array]]:
        numbers = None
        if not problem.joint:
            numbers = _numbers(scale, problem.window, problem.causal)
        inputs = arguments(q, k, v, mask, sinks, lens, numbers, coded)
        k_len = inputs[1].shape[2]
        if not k_len and not problem.joint:
            return by_head(mx.zeros(out_shape(problem), dtype), q_len)
        chunks = max(1, -(-k_len // p.chunk))
        recent, without, packed = (), (), False
        if problem.joint:
            third, packed = -(-len(k) // 3), len(k) == 2
            recent = k[third : 2 * third]
            if sinks is not None and chunks > 1:
                inputs.pop()  # the reduce has them
            sunk = sinks is not None and chunks == 1
            absent = {"fresh": packed, "sinks": not sunk, "ml": chunks == 1}
            without = tuple(name for name, yes in absent.items() if yes)
        # Others have it in an array.
        scale = float(scale) if problem.joint else 1.0
        how, fold = launch(chunks, scale, packed, *[a.shape for a in recent])
        run = kernel(p.kernel, problem.joint, False, without)
        out, *more = run(inputs=inputs, **how)
        kept, ml = more[: len(recent)], more[-1]
        if chunks == 1:
            o = by_head(out, q_len)
        else:
            o = merge(problem, out, ml, sinks, fold)
        return (o, kept) if recent else o

    return call


prepare_cached = lru_cache(maxsize=4096)(prepare)
