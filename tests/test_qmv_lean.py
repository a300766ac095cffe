"""The sums of lean.h: rows that share x in threadgroup memory, and rows that do not."""

from itertools import cycle

import cases
import pytest
import test_qmv
import tolerance

from mlx_phase.plan import Plan

# (simdgroups, k_simdgroups, splits, M) of rows that share x, in one slice and in two.
SHARED = ((8, 1, 1, 3), (8, 2, 1, 8), (8, 1, 3, 9), (4, 1, 1, 4), (8, 2, 2, 5))
LEAN = [("affine", b, cases.AFFINE_GROUPS[b % 3]) for b in cases.AFFINE_BITS]
LEAN += cases.FORMATS[-3:]


@pytest.mark.parametrize(
    "form,dtype,shared",
    list(zip(LEAN, cycle(cases.DTYPES), cycle(SHARED), strict=False)),
    ids=str,
)
def test_rows_that_share_x_have_the_bits_of_single_rows(form, dtype, shared):
    """K ends inside a step, N inside a tile."""
    (simdgroups, ks, splits, M), K = shared, 34 * max(32, form[2])
    q = cases.random_weights(37, K, *form, dtype)
    x = cases.activations(M, K, dtype)
    kernel = "qmv" if form[0] == "affine" else "qmv_fp"

    def tile(rows: int, groups: int) -> Plan:
        return Plan(kernel, rows, groups, ks, splits, True, "test", lean=True)

    out = test_qmv.run(x, q, tile(2, simdgroups))
    test_qmv.check(out, x, q)
    for m in (0, M - 1):
        alone = test_qmv.run(x[m : m + 1], q, tile(4, ks))
        tolerance.assert_bits(out[m : m + 1], alone)
