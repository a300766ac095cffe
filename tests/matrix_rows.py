"""Template rows of the kernels on matrix units: checks compile them, nothing runs."""

import sdpa_rows

from mlx_phase import source
from mlx_phase.chip import lookup
from mlx_phase.executor.signature import METAL_TYPES, Arg
from mlx_phase.launch import matrix
from mlx_phase.plan_attention import SdpaPlan
from mlx_phase.plan_matrix import plan_matrix
from mlx_phase.problem import Matmul, Sdpa

#: The kernels that these rows reach.
KERNELS = {"sdpa_matrix", "sdpa_matrix_codes", "sdpa_matrix_joint"}
KERNELS |= {"sdpa_matrix_codes_joint"}
KERNELS |= {"qmm_small", "qmm_small_fp"}

# Codes of an even number of groups come through the ring.
_RING = dict(k_bits=8, v_bits=4, k_group=32, v_group=32)
# (problem, rows of a simdgroup, one chunk): every dtype, bits, mask and mode.
_ATTENTION = (
    (Sdpa(32, 8, 128, 128, q_len=4, causal=True), 16, False),
    (Sdpa(32, 8, 64, 64, dtype="float16", mask="bool", sinks=True), 8, True),
    (Sdpa(8, 2, 112, 112, dtype="float32", mask="additive", lens=True), 8, False),
    (Sdpa(16, 2, 256, 256, window=64, causal=True), 8, False),
    (Sdpa(16, 2, 256, 256, q_len=4, causal=True), 16, False),
    (Sdpa(32, 8, 128, 128, k_bits=4, v_bits=4, k_group=32, v_group=32), 8, False),
    (Sdpa(32, 8, 128, 128, lens=True, sinks=True, joint=True), 8, False),
    (Sdpa(32, 8, 128, 128, lens=True, joint=True), 8, True),
    (Sdpa(16, 2, 256, 256, q_len=4, causal=True, lens=True, joint=True), 16, False),
    (Sdpa(32, 8, 64, 64, dtype="float16", **_RING), 16, True),
    (Sdpa(32, 8, 128, 128, k_bits=8, v_bits=8, lens=True, joint=True), 8, False),
    (Sdpa(8, 8, 64, 64, k_bits=16, v_bits=8, dtype="float32", mask="bool"), 8, False),
)
_MATMUL = (
    Matmul(8, 4096, 4096, "bfloat16", 4, 64),
    Matmul(16, 1024, 4096, "float16", 3, 32),
    Matmul(6, 4096, 1024, "float32", 8, 128),
    Matmul(12, 4096, 4096, "bfloat16", 6, 64),
    Matmul(9, 4096, 4096, "float16", 4, 16, "nvfp4"),
    Matmul(16, 4096, 4096, "bfloat16", 8, 32, "mxfp8"),
)


def _attention(problem: Sdpa, rows: int, direct: bool, narrow: bool) -> tuple:
    coded = min(problem.k_bits, problem.v_bits) < 16
    name = "sdpa_matrix" + "_codes" * coded + "_joint" * problem.joint
    # Many long rows have q in threadgroup memory, and no early loads.
    ahead = rows * problem.head_dim < 4096
    tile = (256, 4, 32 if coded else 16, 4, rows)
    plan = SdpaPlan(name, *tile, True, "test", ahead=ahead)
    return sdpa_rows.arguments(problem, plan, direct, narrow)


def _matmul(problem: Matmul, narrow: bool) -> tuple:
    plan = plan_matrix(problem, lookup("h200"))
    text, metal = source.load(plan.kernel, narrow), METAL_TYPES[problem.x_dtype]
    scales = metal if problem.mode == "affine" else "uint8_t"
    types = {"x": metal, "w": "uint32_t", "scales": scales, "biases": metal}
    inputs = [Arg(n, types[n], 2, 1 << 20) for n in text.input_names]
    outputs = [Arg("y", metal, 2, 1 << 16)]
    values = matrix.template(problem, plan)
    return text.name, inputs, outputs, text.body, text.header, values


def rows(narrow: bool = False) -> dict[str, tuple]:
    """Test id -> (name, inputs, outputs, body, header, template) of a launch."""
    found = {}
    for problem, block, direct in _ATTENTION:
        made = _attention(problem, block, direct, narrow)
        form = f"{problem.dtype}-{problem.head_dim}-k{problem.k_bits}-v{problem.v_bits}"
        found[f"{made[0]}-{form}-R{block}"] = made
    for problem in _MATMUL:
        made = _matmul(problem, narrow)
        form = f"{problem.x_dtype}-{problem.bits}-{problem.group_size}-M{problem.M}"
        found[f"{made[0]}-{form}"] = made
    return found
