"""Template rows of the prefill kernels: checks compile them, nothing runs."""

from dataclasses import replace

from mlx_phase import source
from mlx_phase.chip import lookup
from mlx_phase.executor.signature import METAL_TYPES, Arg
from mlx_phase.launch import qmm
from mlx_phase.plan_qmm import TilePlan, plan_qmm
from mlx_phase.problem import Matmul

#: The kernels that these rows reach.
KERNELS = {"qmm", "qmm_fp", "qmm_plain", "qmm_add", "qmm_glu"}

# (kernel, problem, chip): each row of the plan's tables, every dtype and kind of codes.
ROWS = (
    ("qmm", Matmul(32, 4096, 4096, "bfloat16", 4, 64), "h200"),
    ("qmm", Matmul(64, 1024, 4096, "float16", 3, 32), "h200"),
    ("qmm", Matmul(256, 4096, 4096, "bfloat16", 6, 128), "h200"),
    ("qmm", Matmul(2048, 14336, 4096, "bfloat16", 8, 64), "h200"),
    ("qmm", Matmul(64, 4096, 4096, "float32", 2, 64), "m4-max"),
    ("qmm_fp", Matmul(512, 4096, 4096, "float16", 4, 16, "nvfp4"), "a100-80gb"),
    ("qmm_fp", Matmul(32, 4096, 4096, "bfloat16", 8, 32, "mxfp8"), "m1"),
    ("qmm_plain", Matmul(128, 4096, 4096, "float16", mode="none"), "a100-80gb"),
    ("qmm_add", Matmul(2048, 4096, 4096, "bfloat16", 4, 64), "h200"),
    ("qmm_glu", Matmul(512, 4096, 4096, "float16", 4, 64), "a100-80gb"),
)


def _arguments(kernel: str, problem: Matmul, plan: TilePlan, narrow: bool) -> tuple:
    text, metal = source.load(kernel, narrow), METAL_TYPES[problem.x_dtype]
    codes = metal if problem.mode == "none" else "uint32_t"
    scales = "uint8_t" if kernel == "qmm_fp" else metal
    types = {"w": codes, "w0": codes, "w1": codes, "scales": scales}
    inputs = [Arg(n, types.get(n, metal), 2, 1 << 20) for n in text.input_names]
    outputs = [Arg("y", "float" if plan.splits > 1 else metal, 2, 1 << 16)]
    values = qmm.template(problem, plan)
    if kernel in ("qmm_add", "qmm_glu"):
        values = [*values[:-1], ("RES" if kernel == "qmm_add" else "ACT", 1)]
    return text.name, inputs, outputs, text.body, text.header, values


def rows(narrow: bool = False) -> dict[str, tuple]:
    """Test id -> (name, inputs, outputs, body, header, template) of a launch."""
    found = {}
    for kernel, problem, chip in ROWS:
        plan = plan_qmm(problem, lookup(chip))
        if kernel in ("qmm_add", "qmm_glu"):
            plan = replace(plan, splits=1)
        form = f"{problem.x_dtype}-{problem.bits}-{problem.group_size}-M{problem.M}"
        found[f"{kernel}-{form}"] = _arguments(kernel, problem, plan, narrow)
    return found
