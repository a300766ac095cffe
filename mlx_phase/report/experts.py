"""Which kernel a pass gives its experts on a chip, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..plan import MAX_M
from ..plan_gather import bucket, plan_gather, stays_stock
from ..problem import Gather
from ..step import Operation
from .analysis import Analysis


def gathered(analysis: Analysis, rows: int, members: list[Operation]) -> Gather:
    """What a patched block asks for: gate with up and SiLU, or the way back."""
    shapes, glu = analysis.shapes, len(members) > 1
    k, down = shapes.active_experts, members[0].name.endswith("down_proj")
    m = replace(members[0].problem, M=1, batch=1)
    g = Gather(m, shapes.experts, rows * k, 1 if down else k)
    if glu:
        g = replace(g, activation="silu")
    if rows > MAX_M:
        # As `switch_layers` sorts them.
        g = replace(g, each=0 if glu else 1, scattered=down, sorted=True)
        g = replace(g, exact=False)
    return g


def choose(analysis: Analysis, problem: Gather, count: int) -> dict[str, Any] | str:
    """The record of ``count`` launches of a problem; why stock computes it, if so."""
    if (why := stays_stock(problem, analysis.chip)) is not None:
        return why
    p = plan_gather(bucket(problem), analysis.chip)
    own = f"{p.simdgroups // p.k_simdgroups}x{p.rows}"
    # The list of tiles is a launch that both products share.
    lists = p.tile is not None and problem.activation != ""
    return {
        "kernel": p.kernel,
        "tile": f"{p.tile.BM}x{p.tile.BN}" if p.tile else own,
        "split": str(p.k_simdgroups) if p.k_simdgroups > 1 else "none",
        "launches": count * (2 if lists else 1),
        "exact": p.exact,
        "reason": p.reason,
    }
