"""Decode attention of Apple chips: the vector kernel and matrix units, as predicted."""

from __future__ import annotations

from dataclasses import replace

from ..chip import lookup
from ..counters import LANES
from ..plan_attention import SdpaPlan, plan_sdpa
from .counters_attention import HEADS, problem_of, profiled, time

#: Query heads of a KV head, bits of the caches, queries.
CASES = [(g, bits, q) for bits in (16, 8, 4) for g in (2, 4, 8) for q in (1, 4)]
CHIP = "M4 Max 40"

_VECTOR = SdpaPlan("sdpa_split", 256, 16, 2, 4, 2, True, "vector", ahead=False)
_MATRIX = SdpaPlan("sdpa_matrix", 256, 4, 16, 4, 8, True, "matrix", ahead=False)


def units() -> str:
    """Both kernels by heads, caches and queries; ``*``: what the plan takes."""
    chip = lookup(CHIP)
    lines = [
        "| heads per KV head | cache | q_len | vector: slots | µs | matrix: slots | "
        "FMA units | µs |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for heads, bits, q_len in CASES:
        problem = problem_of(q_len, heads * HEADS[1], bits)
        chosen = plan_sdpa(problem, chip).kernel
        cells = [f"{heads}", "plain" if bits == 16 else f"{bits} bits", f"{q_len}"]
        for plan in (_VECTOR, _MATRIX):
            plan = replace(plan, kernel=plan.kernel + "_codes" * (bits < 16))
            found = profiled(problem, plan)
            work, predicted = found.cost.times(LANES), time(found, chip)
            cells.append(f"{work.slots:.1f}")
            if not plan.kernel.startswith(_VECTOR.kernel):
                cells.append(f"{work.fma:.1f}")
            star = "*" * (plan.kernel == chosen)
            cells.append(f"{predicted.us:.0f} ({predicted.bound[0].lower()}){star}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
