"""Every kernel of this project passes the strict check, with exact rows.

One row of template arguments per weight format; dtypes, M and chips take turns.
"""

from itertools import cycle

import pytest

from mlx_phase import source
from mlx_phase.chip import lookup
from mlx_phase.executor import strict
from mlx_phase.executor.signature import METAL_TYPES, Arg
from mlx_phase.launch.matmul import template
from mlx_phase.plan import plan
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


def rows():
    """(problem, chip name) that reach every format, dtype, tile and split."""
    turns = zip(FORMATS, cycle(DTYPES), cycle(SHAPES), cycle(("m1", "m3-max")))
    for (bits, group, mode), dtype, (M, N, K), chip in turns:
        yield Matmul(M, N, K, dtype, bits, group, mode), chip


def arguments(problem, p, name=None):
    """The arguments of ``strict.check`` for what the launcher passes."""
    text = source.load(name or p.kernel)
    metal = METAL_TYPES[problem.x_dtype]
    scales = metal if problem.mode == "affine" else "uint8_t"
    types = {"x": metal, "w": "uint32_t", "scales": scales, "biases": metal}
    if problem.mode == "none":
        types["w"] = metal
    values = template(problem, p)
    if name == "qmv_reduce":
        types, values = {"p": "float"}, [values[0], ("SPLITS", p.splits)]
    size = problem.N * problem.K
    inputs = [Arg(n, types[n], 2, size) for n in text.input_names]
    out = "float" if p.splits > 1 and name is None else metal
    outputs = [Arg(n, out, 2, problem.M * problem.N) for n in text.output_names]
    return text.name, inputs, outputs, text.body, text.header, values


@pytest.mark.parametrize("problem, chip", list(rows()))
def test_kernel_is_strict(problem, chip):
    p = plan(problem, lookup(chip))
    strict.assert_clean(*arguments(problem, p), exact_rows=True)


def test_rows_reach_every_kernel_and_choice():
    plans = [plan(problem, lookup(chip)) for problem, chip in rows()]
    split = {"qmv_reduce"} if any(p.splits > 1 for p in plans) else set()
    assert {p.kernel for p in plans} | split == set(source.KERNELS)
    assert len({p.k_simdgroups for p in plans}) > 1
    assert len({p.rows for p in plans}) > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_is_strict(dtype):
    problem = Matmul(16, 8, 8192, dtype)
    p = plan(problem, lookup("m3-max"))
    assert p.splits > 1
    strict.assert_clean(*arguments(problem, p, "qmv_reduce"), exact_rows=True)


MUTATIONS = [
    ("14", "header", "fma(xi,h[r][i],dot[r*M+m])", "xi*h[r][i]+dot[r*M+m]"),
    ("1", "header", "thread float*acc", "float*acc"),
    ("11", "header", "simd_sum(acc[i])", "lane<9?acc[i]:0;if(lane<9)simd_sum(acc[i])"),
    ("6", "header", "if(WIDE", "if constexpr(WIDE"),
    ("3", "header", "int P=in_place", "int Q=1;threadgroup float a;int P=in_place"),
    ("7", "body", "simdgroup_index_in_threadgroup", "simdgroup_number"),
]


@pytest.mark.parametrize("rule, part, old, new", MUTATIONS)
def test_planted_in_a_real_kernel(rule, part, old, new):
    """The check is not blind on real text: each planted fault is found."""
    problem = Matmul(2, 4096, 4096, "float16")
    name, ins, outs, body, header, values = arguments(
        problem, plan(problem, lookup("m1"))
    )
    assert old in (header if part == "header" else body)
    if part == "header":
        header = header.replace(old, new, 1)
    else:
        body = body.replace(old, new)
    findings = strict.check(name, ins, outs, body, header, values, exact_rows=True)
    assert rule in {f.rule for f in findings}
