"""Decode attention of Apple chips: the vector kernel and matrix units, as predicted."""

from __future__ import annotations

from functools import reduce

import mlx.core as mx

from ..chip import lookup
from ..counters import LANES, Cost, cost, predict
from ..executor.profile import profile_kernel
from ..launch import attention
from ..plan_attention import SdpaPlan, plan_sdpa
from ..problem import Sdpa
from .counters_kernels import DTYPE, GROUP

#: The profiled attention: KV heads, head_dim, keys. The predicted one: KV heads, keys.
KV_HEADS, HEAD_DIM, K_LEN = 2, 128, 512
TIMED = 8, 8192
#: Query heads of a KV head, bits of the caches, queries.
CASES = [(g, bits, q) for bits in (16, 8, 4) for g in (2, 4, 8) for q in (1, 4)]
CHIP = "M4 Max 40"

_VECTOR = SdpaPlan("sdpa_split", 256, 16, 2, 4, 2, True, "vector", ahead=False)
_MATRIX = SdpaPlan("sdpa_matrix", 256, 4, 16, 4, 8, True, "matrix", ahead=False)


def _problem(heads: int, bits: int, q_len: int) -> Sdpa:
    return Sdpa(
        *(KV_HEADS * heads, KV_HEADS, HEAD_DIM, HEAD_DIM, q_len, 1),
        dtype=str(DTYPE).rpartition(".")[2],
        causal=q_len > 1,
        **dict(k_bits=bits, k_group=GROUP, v_bits=bits, v_group=GROUP),
    )


def _cost(problem: Sdpa, plan: SdpaPlan) -> Cost:
    """Per element of K and V, the merge of chunks included; bytes are ideal ones."""
    key = mx.random.key(problem.q_len)
    shapes = (problem.q_heads, problem.q_len), (KV_HEADS, K_LEN), (KV_HEADS, K_LEN)
    q, k, v = (
        mx.random.normal((1, *s, HEAD_DIM), key=key).astype(DTYPE) for s in shapes
    )
    if problem.k_bits < 16:
        form = dict(group_size=GROUP, bits=problem.k_bits)
        k, v = mx.quantize(k, **form), mx.quantize(v, **form)
    run = attention.prepare(problem, plan)
    profiles = profile_kernel(run, q, k, v, scale=HEAD_DIM**-0.5)
    whole = reduce(Cost.plus, map(cost, profiles))
    return whole.times(1 / (2 * KV_HEADS * HEAD_DIM * K_LEN))


def units() -> str:
    """Both kernels by heads, caches and queries; ``*``: what the plan takes."""
    chip = lookup(CHIP)
    lines = [
        "| heads per KV head | cache | q_len | vector: slots | µs | matrix: slots | "
        "FMA units | µs |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for heads, bits, q_len in CASES:
        problem = _problem(heads, bits, q_len)
        chosen = plan_sdpa(problem, chip).kernel
        cells = [f"{heads}", "plain" if bits == 16 else f"{bits} bits", f"{q_len}"]
        for plan in (_VECTOR, _MATRIX):
            name = plan.kernel + "_codes" * (bits < 16)
            found = _cost(problem, SdpaPlan(**(vars(plan) | {"kernel": name})))
            work = found.times(LANES)
            elements = 2 * TIMED[0] * HEAD_DIM * TIMED[1]
            time = predict(found.times(elements), chip)
            cells.append(f"{work.slots:.1f}")
            if plan is _MATRIX:
                cells.append(f"{work.fma:.1f}")
            star = "*" * (name == chosen)
            cells.append(f"{time.us:.0f} ({time.bound[0].lower()}){star}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
