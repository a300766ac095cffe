"""Template rows of the decode kernels, for the checks that compile and do not run.

One row per weight format; dtypes and shapes take turns. Then launches that several
matrices share, and the reduce.
"""

from itertools import cycle

import mlx.core as mx

from mlx_phase import source
from mlx_phase.chip import lookup
from mlx_phase.executor.signature import METAL_TYPES, Arg
from mlx_phase.launch.matmul import template
from mlx_phase.plan import Plan, plan, plan_shared
from mlx_phase.problem import AFFINE_BITS, AFFINE_GROUPS, FP_MODES, Matmul

DTYPES = ("bfloat16", "float16", "float32")
FORMATS = [(b, g, "affine") for b in AFFINE_BITS for g in AFFINE_GROUPS]
FORMATS += [(*FP_MODES[mode], mode) for mode in FP_MODES]
FORMATS += [(16, 0, "none")] * 3
# (M, N, K): the plan's tiles of M, and shapes that split K and that do not
SHAPES = (
    (1, 4096, 4096),
    (2, 128, 4096),
    (4, 512, 512),
    (8, 4096, 1024),
    (16, 8, 8192),
)
# Rows of matrices that share a launch, with (M, dtype, bits, group)
SHARED = (
    ((4096, 1024, 1024), 1, "bfloat16", 4, 64),
    ((14336, 14336), 1, "bfloat16", 4, 64),
    ((64, 32), 5, "float16", 3, 32),
    ((64, 32, 8), 16, "float32", 8, 128),
)


def rows(chips: tuple[str, ...]) -> list[tuple[tuple[Matmul, ...], Plan]]:
    """(problems, plan) that reach every format, dtype, tile and split."""
    found = []
    turns = zip(FORMATS, cycle(DTYPES), cycle(SHAPES), cycle(chips), strict=False)
    for (bits, group, mode), dtype, (M, N, K), chip in turns:
        problem = Matmul(M, N, K, dtype, bits, group, mode)
        found.append(((problem,), plan(problem, lookup(chip))))
    for (Ns, M, dtype, bits, group), chip in zip(SHARED, cycle(chips), strict=False):
        problems = tuple(Matmul(M, N, 4096, dtype, bits, group) for N in Ns)
        found.append((problems, plan_shared(problems, lookup(chip))))
    return found


def row_name(row: tuple[tuple[Matmul, ...], Plan]) -> str:
    """Short name for test ids."""
    (p, *_), chosen = row
    form = f"{p.mode}-{p.bits}-{p.group_size}"
    tile = f"M{p.M}-R{chosen.rows}-KS{chosen.k_simdgroups}-S{chosen.splits}"
    lean = "-lean" * chosen.lean
    return f"{chosen.kernel}{lean}-{form}-{p.x_dtype}-{tile}"


def arguments(problems: tuple[Matmul, ...], p: Plan, narrow: bool = False) -> tuple:
    """(name, inputs, outputs, body, header, template) as the launcher passes them.

    narrow: the text without vector loads.
    """
    first, text = problems[0], source.load(p.kernel, narrow, p.lean)
    metal = METAL_TYPES[first.x_dtype]
    scales = metal if first.mode == "affine" else "uint8_t"
    # w0, s0, b0 belong to the first of several matrices.
    types = {"x": metal, "w": "uint32_t", "s": scales, "b": metal}
    if first.mode == "none":
        types["w"] = metal
    size = first.N * first.K
    inputs = [Arg(n, types[n[0]], 2, size) for n in text.input_names]
    out = "float" if p.splits > 1 else metal
    outputs = [Arg(n, out, 2, first.M * first.N) for n in text.output_names]
    return text.name, inputs, outputs, text.body, text.header, template(first, p)


def reduce_arguments(dtype: str, splits: int) -> tuple:
    """The same of the kernel that sums the partials of ``splits`` threadgroups."""
    text = source.load("qmv_reduce")
    inputs = [Arg("p", "float", 2, splits * 128)]
    outputs = [Arg("y", METAL_TYPES[dtype], 2, 128)]
    values = [("T", getattr(mx, dtype)), ("SPLITS", splits)]
    return text.name, inputs, outputs, text.body, text.header, values
