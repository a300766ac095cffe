"""The sums of lean.h: rows that share x in threadgroup memory, and rows that do not."""

from itertools import cycle

import cases
import pytest
import test_qmv
import tolerance

from mlx_phase.plan import Plan

# (simdgroups, k_simdgroups, splits, M, rows) of rows that share x, in one slice and in
# two, and whose sums go through threadgroup memory in one turn and in two.
SHARED = ((8, 1, 1, 3, 4), (8, 2, 1, 8, 4), (8, 1, 3, 9, 2), (4, 1, 1, 4, 4))
SHARED += ((8, 2, 2, 5, 4), (4, 1, 2, 7, 2))
LEAN = [("affine", b, cases.AFFINE_GROUPS[b % 3]) for b in cases.AFFINE_BITS]
LEAN += cases.FORMATS[-3:]
PLANNED = ("affine", 4, 128), "bfloat16", (8, 1, 1, 8, 4)  # an odd number of steps


@pytest.mark.parametrize(
    "form,dtype,shared",
    [*zip(LEAN, cycle(cases.DTYPES), cycle(SHARED), strict=False), PLANNED],
    ids=str,
)
def test_rows_that_share_x_have_the_bits_of_single_rows(form, dtype, shared):
    """K ends inside a step (with splits, the third of a part), N inside a tile."""
    simdgroups, ks, splits, M, rows = shared
    K = (34 if splits == 1 else 140) * max(32, form[2])
    q = cases.random_weights(37, K, *form, dtype)
    x = cases.activations(M, K, dtype)
    kernel = "qmv" if form[0] == "affine" else "qmv_fp"

    def tile(rows: int, groups: int) -> Plan:
        return Plan(kernel, rows, groups, ks, splits, True, "test", lean=True)

    out = test_qmv.run(x, q, tile(rows, simdgroups))
    test_qmv.check(out, x, q)
    for m in (0, M - 1):
        alone = test_qmv.run(x[m : m + 1], q, tile(4, ks))
        tolerance.assert_bits(out[m : m + 1], alone)
