"""Template rows of prefill attention, for the checks that compile and do not run."""

import sdpa_rows

from mlx_phase.launch.prefill_attention import template
from mlx_phase.plan_prefill_attention import MAX_HEAD_DIM, PrefillPlan
from mlx_phase.problem import Sdpa

#: The kernels that these rows reach.
KERNELS = {"sdpa_prefill", "sdpa_prefill_codes"}
KERNELS |= {"sdpa_prefill_wide", "sdpa_prefill_wide_codes"}

# (problem, rows and simdgroups of a tile, its keys, one chunk): every dtype, bits, mask
# and mode.
CASES = (
    (Sdpa(32, 8, 128, 128, q_len=64, causal=True), 16, 4, 32, True),
    (Sdpa(32, 8, 128, 128, q_len=64, k_bits=4, v_bits=4), 16, 4, 32, False),
    (Sdpa(3, 3, 72, 72, 64, mask="additive", dtype="float16"), 8, 8, 32, False),
    (Sdpa(16, 2, 192, 128, 64, mask="bool", sinks=True), 8, 4, 16, True),
    (Sdpa(8, 2, 112, 112, 64, dtype="float32", lens=True), 8, 4, 32, True),
    (Sdpa(8, 2, 64, 64, 64, dtype="float16", k_bits=8, v_bits=4), 16, 4, 32, True),
    (Sdpa(8, 2, 64, 64, 64, dtype="float32", k_bits=16, v_bits=8), 8, 2, 32, True),
    (Sdpa(64, 1, 576, 512, 64, causal=True, sinks=True), 32, 8, 16, True),
    (Sdpa(64, 1, 576, 512, 64, k_bits=4, v_bits=8, mask="bool"), 32, 8, 16, False),
    (Sdpa(8, 1, 512, 512, 64, dtype="float16", mask="additive"), 16, 8, 16, False),
    (Sdpa(8, 1, 512, 512, 64, dtype="float32", k_bits=8, v_bits=8), 8, 8, 16, True),
)


def rows(narrow: bool = False) -> dict[str, tuple]:
    """Test id -> (name, inputs, outputs, body, header, template) of a launch."""
    found = {}
    for problem, *tile, direct in CASES:
        coded = "_codes" * (min(problem.k_bits, problem.v_bits) < 16)
        wide = "_wide" * (problem.v_head_dim > MAX_HEAD_DIM)
        plan = PrefillPlan(f"sdpa_prefill{wide}{coded}", *tile, 2, "test")
        text = sdpa_rows.arguments_of(plan.kernel, problem, direct, narrow)
        form = f"{problem.dtype}-{problem.head_dim}-k{problem.k_bits}-v{problem.v_bits}"
        found[f"{text[0]}-{form}"] = (*text, template(problem, plan, direct))
    return found
