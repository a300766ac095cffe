"""Template rows of the kernels that multiply codes: checks compile, nothing runs."""

from dataclasses import replace

import fused_rows

from mlx_phase.chip import lookup
from mlx_phase.launch import fused, matrix
from mlx_phase.plan_exact import plan_block, plan_codes
from mlx_phase.problem import Matmul

EPS = fused_rows.EPS
ROTARY, NEIGHBOURS = fused.Rotary(128, 128, False), fused.Rotary(64, 32, True)


def _one(M=1, dtype="bfloat16", bits=4, group=64, N=4096) -> Matmul:
    return Matmul(M, N, 4096, dtype, bits, group)


def _three(M=1, dtype="bfloat16", bits=4, group=64) -> tuple[Matmul, ...]:
    return tuple(_one(M, dtype, bits, group, n) for n in (4096, 1024, 1024))


# Kernel, matrices, what else its template takes: every dtype, bits, group and choice.
CASES = (
    ("qmm_codes", (_one(),), ()),
    ("qmm_codes", (_one(16, "float16", 8, 32),), ()),
    ("qmm_codes", (_one(9, "float32", 4, 128),), ()),
    ("qmm_codes_add", (_one(8, N=14336),), ()),
    ("qmm_codes_add", (_one(1, "float16", 8),), ()),
    ("qmm_codes_glu", (_one(N=14336),) * 2, ("silu", EPS)),
    ("qmm_codes_glu", (_one(16, "float16", 8),) * 2, ("gelu_approx", None)),
    ("qmm_codes_qkv", _three(), (ROTARY, EPS)),
    ("qmm_codes_qkv", _three(12, "float16", 8, 128), (NEIGHBOURS, None)),
    ("qmm_codes_qkv_bias", _three(4), (ROTARY, EPS)),
    ("qmm_codes_qkv_bias", _three(1, bits=8), (ROTARY, EPS)),
)

#: The kernels that these rows reach.
KERNELS = {kernel for kernel, *_ in CASES}


def arguments(kernel, members, choices, narrow=False) -> tuple:
    """(name, inputs, outputs, body, header, template) as the launcher passes them."""
    # What a Mac has: the strict check counts it.
    first, h200 = members[0], replace(lookup("h200"), threadgroup_bytes=32768)
    if kernel == "qmm_codes":
        values = matrix.template(first, plan_codes(first, h200))
    else:
        planned = kernel.replace("qmm_codes", "qmv").removesuffix("_bias")
        normed = choices[-1:] == (EPS,)
        dims = (choices[0].head_dim, choices[0].dims) if planned == "qmv_qkv" else ()
        p = plan_block(planned, members, h200, normed, dims)
        values = {
            "qmv_add": lambda: matrix.template(first, p),
            "qmv_glu": lambda: fused.glu_template(p, first, *choices),
            "qmv_qkv": lambda: fused.qkv_template(p, members, *choices),
        }[planned]()
    return fused_rows.launched(kernel, first.x_dtype, values, narrow)


def rows(narrow: bool = False) -> dict[str, tuple]:
    """Test id -> (name, inputs, outputs, body, header, template) of a launch."""
    found = {}
    for kernel, members, choices in CASES:
        m = members[0]
        name = f"{kernel}-{m.bits}-{m.group_size}-{m.x_dtype}-M{m.M}"
        found[name] = arguments(kernel, members, choices, narrow)
    return found
