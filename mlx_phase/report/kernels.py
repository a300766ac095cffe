"""Which kernel each operation of each phase gets on a chip, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..plan import MAX_M, Plan, plan, plan_shared, supports, supports_shared
from ..problem import Attention, Matmul
from ..roofline import kv_bytes, machine_balance
from ..step import ATTENTION, Operation, Pass
from .analysis import Analysis, grouped, side

# A launch costs about this much: the seed's figure for a persistent-kernel decision.
LAUNCH_US = 5.0
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
        for members in _launches(group, operations):
            chosen = _choose(analysis, members)
            records.append(
                {
                    "phase": phase,
                    "operation": group,
                    "M": members[0].problem.M if group != ATTENTION else None,
                    **chosen,
                    "bottleneck": bottleneck(analysis, members, chosen),
                }
            )
    return records


def _launches(group: str, operations: list[Operation]) -> list[list[Operation]]:
    """Operations that one row shows: siblings of one format, others apart."""
    if group == ATTENTION or len({o.count for o in operations}) > 1:
        return [[o] for o in operations]
    return [operations]


def _choose(analysis: Analysis, members: list[Operation]) -> dict[str, Any]:
    first = members[0].problem
    if isinstance(first, Attention):
        kernel, why = mlx_attention(first, analysis)
        return _stock(kernel, why, members)
    products = tuple(o.problem for o in members)
    if members[0].name.startswith("expert"):
        why = "experts are 3-D weights (gather_qmm): kernels take one matrix"
        return _stock("stock MLX", why, members)
    refused = next((why for p in products if (why := supports(p))), None)
    if refused:
        return _stock("stock MLX", refused, members)
    chip, launches = analysis.chip, members[0].count
    if len(products) > 1 and supports_shared(products) is None:
        return _ours(plan_shared(products, chip), launches)
    plans = [plan(p, chip) for p in products]
    record = _ours(plans[0], sum(o.count for o in members))
    if len(set(plans)) > 1:
        for key, values in (
            ("tile", [_tile(p) for p in plans]),
            ("split", [_split(p) for p in plans]),
        ):
            record[key] = " / ".join(dict.fromkeys(values))
    if first.mode == "none":
        record["reason"] += (
            '; plain weights: served with patch(linear="all"), else stock'
        )
    return record


def _stock(kernel: str, why: str, members: list[Operation]) -> dict[str, Any]:
    return {
        "kernel": kernel,
        "tile": "MLX's own",
        "split": "MLX's own",
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


def _tile(p: Plan) -> str:
    own = p.simdgroups // p.k_simdgroups
    return f"{p.rows * own} rows = {own} x {p.rows}"


def _split(p: Plan) -> str:
    inside = f"K/{p.k_simdgroups} in a threadgroup" if p.k_simdgroups > 1 else "none"
    return f"{inside}, K/{p.splits} over them" if p.splits > 1 else inside


def mlx_attention(a: Attention, analysis: Analysis) -> tuple[str, str]:
    """(stock kernel, why) of MLX's attention; on other than Apple GPUs, just stock."""
    none_yet = "mlx_phase has no attention kernel yet"
    if a.kv_bits < 16:
        why = f"{none_yet}; mlx-lm multiplies a quantised cache without fusing"
        return "stock MLX (quantized matmuls)", why
    chip = analysis.chip
    if not chip.arch.startswith("applegpu"):
        return "stock MLX", none_yet
    group = a.q_heads // a.kv_heads
    if a.q_len > 8:
        fused = a.head_dim in _FULL_DIMS
        kernel = "stock MLX sdpa_full" if fused else "stock MLX (unfused)"
        shown = "takes" if fused else "does not take"
        return kernel, f"{none_yet}; MLX's fused kernel {shown} head_dim {a.head_dim}"
    rows = a.q_len * group
    if rows > 32 or a.head_dim not in _VECTOR_DIMS:
        why = f"q_len {a.q_len} x {group} heads a kv head > 32 rows"
        if rows <= 32:
            why = f"head_dim {a.head_dim}"
        return "stock MLX (unfused)", f"{none_yet}; MLX's vector kernel refuses {why}"
    two = a.k_len >= 1024 and chip.device_class in ("s", "d")
    two = two or (a.k_len >= 4096 and group > 1)
    if two:
        why = f"{none_yet}; MLX splits {a.k_len} keys over threadgroups and merges"
        return "stock MLX sdpa_vector_2pass", why
    why = f"{none_yet}; {a.k_len} keys: MLX uses one threadgroup a head"
    return "stock MLX sdpa_vector", why


def bottleneck(analysis: Analysis, members: list[Operation], chosen: dict) -> str:
    """What is expected to bind an operation: bytes, math, or the launch itself."""
    flops, moved = sum(o.flops for o in members), sum(o.bytes for o in members)
    launches, balance = chosen["launches"], analysis.balance
    ours = not chosen["kernel"].startswith("stock")
    if ours:
        balance = machine_balance(analysis.fma_chip(1))
    where = side(flops, moved, balance)
    if where == "unknown":
        return "unknown chip"
    us = sum(o.bound.us or 0.0 for o in members) / launches
    if us < LAUNCH_US:
        return f"launch ({us:.1f} us of work)"
    if where != "memory":
        math = "FMA rate (no matrix units)" if ours else "compute"
        return math if where == "compute" else f"{math} and bandwidth (knee)"
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
