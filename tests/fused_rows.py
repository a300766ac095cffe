"""Template rows of the fused decode launches, for checks that only compile."""

from mlx_phase import source
from mlx_phase.chip import lookup
from mlx_phase.executor.signature import METAL_TYPES, Arg
from mlx_phase.launch import fused
from mlx_phase.launch.matmul import template
from mlx_phase.plan import plan_fused
from mlx_phase.problem import Matmul

EPS = 1e-5
HALVES, PARTIAL = fused.Rotary(128, 128, False), fused.Rotary(80, 32, True)


def _one(M=1, dtype="bfloat16", bits=4, group=64, N=4096) -> Matmul:
    return Matmul(M, N, 4096, dtype, bits, group)


def _three(M=1, dtype="bfloat16", bits=(4, 4, 4), group=64) -> tuple[Matmul, ...]:
    return tuple(
        _one(M, dtype, b, group, n)
        for b, n in zip(bits, (4096, 1024, 1024), strict=True)
    )


# Kernel, matrices, what else its template takes: every dtype, bits, tile and choice.
CASES = (
    ("qmv_add", (_one(),), ()),
    ("qmv_add", (_one(4, "float16", 8, 32),), ()),
    ("qmv_add", (_one(16, "float32", 3, 128),), ()),
    ("qmv_glu", (_one(N=14336),) * 2, ("silu", EPS)),
    ("qmv_glu", (_one(8, "float16", 6, 32),) * 2, ("gelu_approx", EPS)),
    ("qmv_glu", (_one(2, "float32", 2, 64),) * 2, ("gelu", None)),
    ("qmv_qkv", _three(), (HALVES, EPS)),
    ("qmv_qkv", _three(3, "float16", (4, 4, 6)), (PARTIAL, EPS)),
    ("qmv_qkv", _three(16, "float32", (5, 5, 5), 32), (HALVES, None)),
    ("qmv_qkv_bias", _three(), (HALVES, EPS)),
    ("qmv_qkv_bias", _three(2, "float16", (8, 8, 4)), (PARTIAL, None)),
    ("qk_norm", (_one(),), (HALVES, EPS)),
    ("qk_norm", (_one(dtype="float32"),), (PARTIAL, EPS)),
    ("add_norm", (_one(),), (2560, EPS)),
    ("add_norm", (_one(dtype="float16"),), (5376, EPS)),
)


def rows(chips: tuple[str, ...]) -> list[tuple]:
    """(kernel, matrices, choices, chip)."""
    return [(*case, chips[i % len(chips)]) for i, case in enumerate(CASES)]


def row_name(row: tuple) -> str:
    """Short name for test ids."""
    kernel, (m, *_), _, chip = row
    return f"{kernel}-{m.bits}-{m.group_size}-{m.x_dtype}-M{m.M}-{chip}"


def launched(kernel, dtype: str, values: list, narrow: bool, lean=False) -> tuple:
    """(name, inputs, outputs, body, header, template) of a launch of a block.

    In bfloat16 keys and values lie behind q in one array. Without a norm there is none
    of its weights.
    """
    without = ("nw",) * (("NORM", False) in values)
    if dtype == "bfloat16":
        without += {"qk_norm": ("kv", "kvo")}.get(kernel, ("kv",) * ("_qkv" in kernel))
    text, metal = source.load(kernel, narrow, lean, without), METAL_TYPES[dtype]
    types = {"cs": "float"} | {f"w{i}": "uint32_t" for i in ("", 0, 1, 2)}
    inputs = [Arg(n, types.get(n, metal), 2, 4096) for n in text.input_names]
    outputs = [Arg(n, metal, 2, 4096) for n in text.output_names]
    return text.name, inputs, outputs, text.body, text.header, values


def arguments(kernel, members, choices, chip, narrow=False) -> tuple:
    """(name, inputs, outputs, body, header, template) as the launcher passes them."""
    first, lean = members[0], False
    if kernel == "qk_norm":
        packed = first.x_dtype == "bfloat16"
        values = fused.qk_norm_template(first.x_dtype, *choices, 4, packed)
    elif kernel == "add_norm":
        values = fused.add_norm_template(first.x_dtype, *choices)
    else:
        planned = "qmv_qkv" if kernel == "qmv_qkv_bias" else kernel
        p = plan_fused(planned, members, lookup(chip))
        lean = p.lean
        values = {
            "qmv_add": lambda: template(first, p)[:-1],
            "qmv_glu": lambda: fused.glu_template(p, first, *choices),
            "qmv_qkv": lambda: fused.qkv_template(p, members, *choices),
        }[planned]()
    return launched(kernel, first.x_dtype, values, narrow, lean)
