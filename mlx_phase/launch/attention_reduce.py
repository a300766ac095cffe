"""The second launch of decode attention: states of chunks -> output."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from ..problem import Sdpa
from .matmul import kernel


def reduce_template(
    problem: Sdpa,
    threads: int = 256,
    columns: int = 32,
    runs: int = 1,
    fold: int = 1,
) -> list[tuple[str, object]]:
    """Template arguments of ``sdpa_reduce``: ``threads`` of a threadgroup and the
    elements of a row, 4 to a lane, that 4 to 32 lanes of a simdgroup share. Each of
    ``runs`` has ``fold`` states.
    """
    args = [("T", getattr(mx, problem.dtype)), ("DV", problem.v_head_dim)]
    # Chunks that a lane asks for at once. H200, one query of 32/8 heads over 128k keys:
    # 6.5 us with 8, where loads did not wait for maxima, and in other runs 7.2 to 7.5
    # with 4. Unmeasured for prompts.
    some = 8 if runs * columns > 32 * threads else 4
    args += [("DS", columns), ("TG", threads), ("U", max(1, some // fold))]
    args += [("FOLD", fold), ("ONE", problem.q_len == 1)]
    return [*args, ("SINKS", problem.sinks)]


@lru_cache(maxsize=4096)
def reduce_launch(
    problem: Sdpa,
    rows: int,
    states: int,
    threads: int = 0,
    columns: int = 32,
    fold: int = 1,
) -> dict[str, object]:
    """Template and grid of ``sdpa_reduce`` for ``rows`` [B, Hq, q_len] of states.

    fold: states of a run. threads: 64 to 256, as many as there are runs for; the bits
    are the same. H200, 16 queries of 64/8 heads over 1k keys: 3.3 us with 64, 5.6 with
    256.
    """
    strands, runs = 128 // columns, -(-states // fold)
    want = 32 // strands * runs
    threads = threads or next(t for t in (64, 128, 256) if t >= want or t > 128)
    simdgroups, share = threads // 32, 1  # simdgroups of a slice, as the kernel has it
    while share < simdgroups and share * strands < runs:
        share *= 2
    slices = -(-problem.v_head_dim // (columns * simdgroups // share))
    return {
        "template": reduce_template(problem, threads, columns, runs, fold),
        "grid": (threads * slices, rows, 1),
        "threadgroup": (threads, 1, 1),
    }


def out_shape(p: Sdpa) -> tuple[int, ...]:
    # [B, q_len, Hq, Dv] in memory is what a model reshapes next, without a copy.
    if p.q_len == 1:
        return (p.batch, p.q_heads, 1, p.v_head_dim)
    return (p.batch, p.q_len, p.q_heads, p.v_head_dim)


def by_head(out: mx.array, q_len: int) -> mx.array:
    return out if q_len == 1 else out.transpose(0, 2, 1, 3)


def merge(
    problem: Sdpa,
    o: mx.array,
    ml: mx.array,
    sinks: mx.array | None = None,
    fold: int = 1,
) -> mx.array:
    """Output [B, Hq, q_len, Dv] from the states of chunks, in a fixed order.

    o: fp32 [B, Hq, q_len, states, Dv]; ml: fp32 [B, Hq, q_len, states, 2], the max in
    natural log units and the sum; the o of a state whose max is -inf is not read.
    fold: states of a run, which are merged first.
    """
    rows = problem.batch * problem.q_heads * problem.q_len
    how = reduce_launch(problem, rows, o.shape[3], fold=fold)
    shape, dtype = out_shape(problem), getattr(mx, problem.dtype)
    out = reduced(o, ml, sinks, output_shapes=[shape], output_dtypes=[dtype], **how)
    return by_head(out, problem.q_len)


def reduced(o: mx.array, ml: mx.array, sinks: mx.array | None, **how) -> mx.array:
    """The launch that merges states of chunks."""
    inputs = [o, ml] if sinks is None else [o, ml, sinks]
    without = ("sinks",) * (sinks is None)
    return kernel("sdpa_reduce", False, False, without)(inputs=inputs, **how)[0]
