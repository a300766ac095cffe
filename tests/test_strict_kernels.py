"""Every kernel of this project passes the strict check, with exact rows."""

import codes_rows
import fused_rows
import gather_rows
import matrix_rows
import prefill_rows
import pytest
import qmm_rows
import sdpa_rows
from kernel_rows import DTYPES, arguments, reduce_arguments, row_name, rows

from mlx_phase import source
from mlx_phase.chip import lookup
from mlx_phase.executor import strict
from mlx_phase.plan import plan
from mlx_phase.problem import Matmul

ROWS = rows(("m1", "h200", "m3-max"))
ATTENTION = sdpa_rows.rows(("m1", "m3-max"))
FUSED = fused_rows.rows(("m1", "h200"))


@pytest.mark.parametrize("row", ROWS, ids=row_name)
def test_kernel_is_strict(row):
    strict.assert_clean(*arguments(*row), exact_rows=True)


@pytest.mark.parametrize(
    "row", {(p.kernel, p.lean): (m, p) for m, p in ROWS}.values(), ids=row_name
)
def test_text_without_vector_loads_is_strict(row):
    strict.assert_clean(*arguments(*row, narrow=True), exact_rows=True)


@pytest.mark.parametrize("row", FUSED, ids=fused_rows.row_name)
def test_fused_kernel_is_strict(row):
    strict.assert_clean(*fused_rows.arguments(*row), exact_rows=True)


@pytest.mark.parametrize(
    "row", {r[0]: r for r in FUSED}.values(), ids=fused_rows.row_name
)
def test_fused_text_without_vector_loads_is_strict(row):
    strict.assert_clean(*fused_rows.arguments(*row, narrow=True), exact_rows=True)


@pytest.mark.parametrize("row", ATTENTION, ids=sdpa_rows.row_name)
def test_attention_is_strict(row):
    strict.assert_clean(*sdpa_rows.arguments(*row), exact_rows=True)


@pytest.mark.parametrize(
    "row", {r[1].kernel: r for r in ATTENTION}.values(), ids=sdpa_rows.row_name
)
def test_attention_without_vector_loads_is_strict(row):
    strict.assert_clean(*sdpa_rows.arguments(*row, narrow=True), exact_rows=True)


@pytest.mark.parametrize("problem", sdpa_rows.PROBLEMS[:3], ids=lambda p: p.dtype)
@pytest.mark.parametrize("chunks,fold", [(2, 1), (9, 4), (33, 1), (300, 1), (300, 4)])
def test_merge_of_chunks_is_strict(problem, chunks, fold):
    kernel = sdpa_rows.reduce_arguments(problem, chunks, fold)
    strict.assert_clean(*kernel, exact_rows=True)


def test_rows_reach_every_kernel_and_choice():
    plans = [p for _, p in ROWS]
    kernels = {p.kernel for p in plans} | {"qmv_reduce", "sdpa_reduce"}
    kernels |= {p.kernel for _, p, _ in ATTENTION}
    kernels |= {row[0] for row in FUSED} | matrix_rows.KERNELS
    kernels |= qmm_rows.KERNELS  # in test_qmm_kernels.py
    kernels |= prefill_rows.KERNELS  # in test_prefill_kernels.py
    kernels |= gather_rows.KERNELS  # in test_gather_kernels.py
    kernels |= codes_rows.KERNELS  # in test_matrix_kernels.py
    assert kernels == set(source.KERNELS)
    assert any(p.splits > 1 for p in plans)
    assert len({p.k_simdgroups for p in plans}) > 1
    assert len({p.rows for p in plans}) > 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_is_strict(dtype):
    strict.assert_clean(*reduce_arguments(dtype, 3), exact_rows=True)


MUTATIONS = [
    ("14", "header", "fma(v[i],h[r][i],dot[r*M+m])", "v[i]*h[r][i]+dot[r*M+m]"),
    ("1", "header", "thread float*acc", "float*acc"),
    ("11", "header", "float t=SHARES?", "if(lane<9)return 0;float t=SHARES?"),
    ("6", "header", "if(WIDE", "if constexpr(WIDE"),
    ("3", "header", "int P=in_place", "int Q=1;threadgroup float a;int P=in_place"),
    ("7", "body", "simdgroup_index_in_threadgroup", "simdgroup_number"),
]


@pytest.mark.parametrize("rule, part, old, new", MUTATIONS)
def test_planted_in_a_real_kernel(rule, part, old, new):
    """The check is not blind on real text: each planted fault is found."""
    problem = Matmul(2, 4096, 4096, "float16")
    name, ins, outs, body, header, values = arguments(
        (problem,), plan(problem, lookup("m1"))
    )
    assert old in (header if part == "header" else body)
    if part == "header":
        header = header.replace(old, new, 1)
    else:
        body = body.replace(old, new)
    findings = strict.check(name, ins, outs, body, header, values, exact_rows=True)
    assert rule in {f.rule for f in findings}
