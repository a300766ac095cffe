"""Plans for every row of the chip table: limits of the hardware, and what is printed."""

import re

import pytest

from mlx_phase import source
from mlx_phase.chip import CHIPS, lookup
from mlx_phase.plan import MAX_M, plan, plan_shared, split_k
from mlx_phase.problem import FP_MODES, Matmul

NS = (1, 8, 64, 1000, 4096, 128256)
KS = (128, 1024, 4096, 14336, 53248)
FORMATS = [(4, 64, "affine"), (8, 32, "affine"), (16, 0, "none")]
FORMATS += [(*FP_MODES["nvfp4"], "nvfp4")]


def threadgroup_bytes(p) -> int:
    """Threadgroup memory of a plan's kernel, as its text declares it."""
    body = source.load(p.kernel).body
    assert re.findall(r"\bthreadgroup (.*?);", body) == ["float part[KS>1?SG*R*M:1]"]
    return 4 * (p.simdgroups * p.rows * M_OF(p) if p.k_simdgroups > 1 else 1)


def M_OF(p) -> int:
    return int(re.search(r"M = (\d+)", p.reason).group(1))


@pytest.mark.parametrize("chip", CHIPS, ids=lambda c: c.key)
def test_k2_every_plan_fits_the_chip(chip):
    """A threadgroup above the limit is silently wrong on some chips (mlx#2205)."""
    for bits, group, mode in FORMATS:
        for M in range(1, MAX_M + 1):
            for N in NS:
                for K in KS:
                    problem = Matmul(M, N, K, "float16", bits, group, mode)
                    fits(plan(problem, chip), problem, chip)


def fits(p, problem, chip):
    # msl.md's limits: 1024 threads in general, 256 for kernels with many registers.
    assert 32 <= 32 * p.simdgroups <= 256, (problem, p)
    assert p.simdgroups % p.k_simdgroups == 0, (problem, p)
    # ~24 accumulators a lane, or they spill.
    assert p.rows * problem.M <= 24, (problem, p)
    assert threadgroup_bytes(p) <= 32 * 1024
    assert p.splits == 1 or problem.K // p.splits >= 512, (problem, p)
    # Exact rows: the order of additions must not depend on M.
    assert (p.k_simdgroups, p.splits) == split_k(problem, chip)


def test_k2_shared_launches_fit_too():
    for chip in CHIPS:
        for M in range(1, MAX_M + 1):
            for K in KS:
                for ns in ((4096, 1024, 1024), (14336, 14336), (8, 4)):
                    members = tuple(Matmul(M, n, K) for n in ns)
                    p = plan_shared(members, chip)
                    fits_shared = 32 * p.simdgroups <= 256 and p.rows * M <= 24
                    assert fits_shared and p.splits == 1, (members, p)
                    assert threadgroup_bytes(p) <= 32 * 1024
