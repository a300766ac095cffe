"""Which kernel each operation of each phase gets on a chip, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..plan import MAX_M, Plan, plan, plan_shared, supports, supports_shared
from ..plan_attention import MAX_Q_LEN, plan_sdpa, supports_sdpa
from ..plan_prefill_attention import (
    chunks_of,
    plan_prefill,
    stays_stock,
    supports_prefill,
)
from ..plan_qmm import TilePlan, plan_qmm
from ..plan_qmm import stays_stock as product_stays_stock
from ..problem import Attention, Matmul, Sdpa
from ..roofline import kv_bytes, machine_balance
from ..step import ATTENTION, Operation, Pass
from . import experts
from .analysis import Analysis, grouped, side

# Kernels on matrix units, which have a peak of their own.
_MATRIX = ("sdpa_matrix", "sdpa_prefill", "qmm", "gather_qmm")
# A launch costs about this much ("Optimize Prefill Vs Decode Kernels", design rules).
LAUNCH_US = 5.0
# Matrices that read the same x and share a launch where all of them are alike.
SIBLINGS = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"})
# mlx 0.32, scaled_dot_product_attention.cpp: what its fused kernels take.
_VECTOR_DIMS = (64, 96, 128, 192, 256)
_FULL_DIMS = (64, 72, 80, 96, 128)


def table(analysis: Analysis) -> list[dict[str, Any]]:
    """One record for each phase and operation, in a layer's order."""
    return [
        record
        for phase, forward in analysis.phases
        for record in _phase(analysis, phase, forward)
    ]


def _phase(analysis: Analysis, phase: str, forward: Pass) -> list[dict[str, Any]]:
    records = []
    for group, operations in grouped(forward.operations).items():
        launches = _launches(analysis, group, operations)
        for members in launches:
            chosen = _choose(analysis, forward.rows, members)
            records.append(
                {
                    "phase": phase,
                    "operation": _label(group, members, len(launches) > 1),
                    "M": _rows(members[0].problem),
                    **chosen,
                    "bottleneck": bottleneck(analysis, members, chosen),
                }
            )
    return records


def _label(group: str, members: list[Operation], part: bool) -> str:
    """The group's name, and which part of it where it takes several rows."""
    if group == ATTENTION:
        window = members[0].problem.window
        return f"{group} (window {window})" if window else group
    names = ", ".join(o.name.split()[-1].removesuffix("_proj") for o in members)
    return f"{group} ({names})" if part else group


def _rows(problem: Matmul | Attention) -> int:
    return problem.M if isinstance(problem, Matmul) else problem.q_len


def _launches(
    analysis: Analysis, group: str, operations: list[Operation]
) -> list[list[Operation]]:
    """Operations by the row that shows them: alike in format, count and plan."""
    if group == ATTENTION:
        return [[o] for o in operations]
    alike: dict[tuple, list[Operation]] = {}
    for o in operations:
        alike.setdefault((o.count, replace(o.problem, N=0)), []).append(o)
    rows = []
    for members in alike.values():
        if _shared(members) or _experts(members) or _refused(analysis, members):
            rows.append(members)
            continue
        same: dict[Plan, list[Operation]] = {}
        for o in members:
            same.setdefault(_plan_of(analysis, o.problem), []).append(o)
        rows += same.values()
    return rows


def _shared(members: list[Operation]) -> bool:
    """Whether one launch computes all: siblings that patch joins."""
    siblings = len(members) > 1 and {o.name for o in members} in SIBLINGS
    return siblings and supports_shared(tuple(o.problem for o in members)) is None


def _experts(members: list[Operation]) -> bool:
    return members[0].name.startswith("expert ")


def _plan_of(analysis: Analysis, problem: Matmul) -> Plan:
    make = plan_qmm if problem.M > MAX_M else plan
    return make(problem, analysis.chip)


def _refused(analysis: Analysis, members: list[Operation]) -> str | None:
    """Why stock computes these products, or None."""
    problems = [o.problem for o in members]
    if problems[0].M > MAX_M:
        whys = [product_stays_stock(p, analysis.chip) for p in problems]
    else:
        whys = [supports(p) for p in problems]
    return next(filter(None, whys), None)


def _choose(analysis: Analysis, rows: int, members: list[Operation]) -> dict[str, Any]:
    first = members[0].problem
    if isinstance(first, Attention):
        problem = _attention(first)
        if first.q_len > MAX_Q_LEN:
            why = supports_prefill(problem) or stays_stock(problem, analysis.chip)
            if why is None:
                return _our_prefill(problem, analysis, members)
        elif (why := supports_sdpa(problem)) is None:
            return _our_attention(problem, analysis, members)
        kernel, stock_why = mlx_attention(first, analysis)
        return _stock(kernel, f"{why}; {stock_why}", members)
    if _experts(members):
        problem = experts.gathered(analysis, rows, members)
        found = experts.choose(analysis, problem, members[0].count)
        if isinstance(found, str):
            return _stock("stock MLX", found, members)
        return found
    if (why := _refused(analysis, members)) is not None:
        return _stock("stock MLX", why, members)
    if _shared(members):
        chosen = plan_shared(tuple(o.problem for o in members), analysis.chip)
        return _ours(chosen, members[0].count)
    record = _ours(_plan_of(analysis, first), sum(o.count for o in members))
    if first.mode == "none":
        record["reason"] += (
            '; plain weights: served with patch(linear="all"), else stock'
        )
    return record


def _stock(kernel: str, why: str, members: list[Operation]) -> dict[str, Any]:
    return {
        "kernel": kernel,
        "tile": None,
        "split": None,
        "launches": sum(o.count for o in members),
        "exact": False,
        "reason": why,
    }


def _ours(chosen: Plan, launches: int) -> dict[str, Any]:
    return {
        "kernel": chosen.kernel,
        "tile": _tile(chosen),
        "split": _split(chosen),
        "launches": launches * (2 if chosen.splits > 1 else 1),
        "exact": chosen.exact,
        "reason": chosen.reason,
    }


def _attention(a: Attention) -> Sdpa:
    """What the kernels are asked for; a cache with a window holds no more keys."""
    form = {"k_bits": a.kv_bits, "v_bits": a.kv_bits}
    form |= {"k_group": a.kv_group, "v_group": a.kv_group}
    sizes = a.q_heads, a.kv_heads, a.head_dim, a.v_head_dim, a.q_len, a.batch
    return Sdpa(*sizes, a.dtype, causal=a.q_len > 1, k_len=_keys(a), **form)


def _keys(a: Attention) -> int:
    return min(a.k_len, (a.window or a.k_len) + a.q_len - 1)


def _our_attention(
    problem: Sdpa, analysis: Analysis, members: list[Operation]
) -> dict[str, Any]:
    chosen = plan_sdpa(problem, analysis.chip)
    chunks = -(-problem.k_len // chosen.chunk)
    parts = f"{problem.k_len} keys in {chunks} chunks of {chosen.chunk}"
    return {
        "kernel": chosen.kernel,
        "tile": f"1x{chosen.rows}",
        "split": f"{chosen.simdgroups}x{chunks}",
        "launches": sum(o.count for o in members) * (2 if chunks > 1 else 1),
        "exact": chosen.exact,
        "reason": f"{chosen.reason}; {parts}" + ", merged in order" * (chunks > 1),
    }


def _our_prefill(
    problem: Sdpa, analysis: Analysis, members: list[Operation]
) -> dict[str, Any]:
    p = plan_prefill(problem, analysis.chip)
    chunks = chunks_of(problem, p, problem.q_len, problem.k_len)
    return {
        "kernel": p.kernel,
        "tile": f"{p.simdgroups}x{p.rows}",
        "split": f"1x{chunks}" if chunks > 1 else "none",
        "launches": sum(o.count for o in members) * (2 if chunks > 1 else 1),
        "exact": p.exact,
        "reason": p.reason,
    }


def _tile(p: Plan) -> str:
    if isinstance(p, TilePlan):
        return f"{p.tile.BM}x{p.tile.BN}"
    own = p.simdgroups // p.k_simdgroups
    return f"{own}x{p.rows}"


def _split(p: Plan) -> str:
    if p.splits > 1:
        return f"{p.k_simdgroups}x{p.splits}"
    return str(p.k_simdgroups) if p.k_simdgroups > 1 else "none"


def mlx_attention(a: Attention, analysis: Analysis) -> tuple[str, str]:
    """(stock kernel, why) of MLX's attention; on other than Apple GPUs, just stock."""
    if a.kv_bits < 16 and a.q_len > MAX_Q_LEN:
        why = "patch dequantises the cache and takes blocks of rows"
        return "stock MLX (dequantised)", why
    if a.kv_bits < 16:
        why = "mlx-lm multiplies a quantised cache without fusing"
        return "stock MLX (quantized matmuls)", why
    chip = analysis.chip
    if not chip.arch.startswith("applegpu"):
        return "stock MLX", "MLX decides"
    group = a.q_heads // a.kv_heads
    if a.q_len > 8:
        fused = a.head_dim in _FULL_DIMS
        kernel = "stock MLX sdpa_full" if fused else "stock MLX (unfused)"
        shown = "takes" if fused else "does not take"
        return kernel, f"MLX's fused kernel {shown} head_dim {a.head_dim}"
    rows = a.q_len * group
    if rows > 32 or a.head_dim not in _VECTOR_DIMS:
        why = f"q_len {a.q_len} x {group} heads a kv head > 32 rows"
        if rows <= 32:
            why = f"head_dim {a.head_dim}"
        return "stock MLX (unfused)", f"MLX's vector kernel refuses {why}"
    keys = _keys(a)
    two = keys >= 1024 and chip.device_class in ("s", "d")
    two = two or (keys >= 4096 and group > 1)
    if two:
        why = f"MLX splits {keys} keys over threadgroups and merges"
        return "stock MLX sdpa_vector, 2-pass", why
    return "stock MLX sdpa_vector", f"{keys} keys: MLX uses one threadgroup a head"


def bottleneck(analysis: Analysis, members: list[Operation], chosen: dict) -> str:
    """What is expected to bind an operation: bytes, math, or the launch itself."""
    flops, moved = sum(o.flops for o in members), sum(o.bytes for o in members)
    launches, balance = chosen["launches"], analysis.balance
    ours = not chosen["kernel"].startswith("stock")
    if ours and not chosen["kernel"].startswith(_MATRIX):
        balance = machine_balance(analysis.fma_chip(1))
    where = side(flops, moved, balance)
    if where == "unknown":
        return "unknown chip"
    us = sum(o.bound.us or 0.0 for o in members) / launches
    if us < LAUNCH_US:
        return f"launch ({us:.1f} us of work)"
    if where != "memory":
        matrix = chosen["kernel"].startswith(_MATRIX)
        math = "FMA rate" if ours and not matrix else "compute"
        return math if where == "compute" else f"knee: {math} and bandwidth"
    if isinstance(members[0].problem, Attention):
        cache = sum(kv_bytes(o.problem) * o.count for o in members)
        return "KV traffic" if cache > moved / 2 else "activations"
    return "weight bandwidth"


def exact_rows(analysis: Analysis, M: int) -> bool:
    """Whether all products of ``M`` rows keep the bits of one row: none is stock."""
    products = [o for o in analysis.decode.operations if o.name != ATTENTION]
    dense = all(
        supports(replace(o.problem, M=M)) is None and not o.name.startswith("expert")
        for o in products
    )
    return M <= MAX_M and dense
