"""Plans for every row of the chip table: limits of the hardware, what is printed."""

import re

import pytest

from mlx_phase import source
from mlx_phase.chip import CHIPS, lookup
from mlx_phase.plan import MAX_M, MAX_SHARED, Plan, plan, plan_shared, split_k
from mlx_phase.plan_matrix import plan_matrix, supports_matrix
from mlx_phase.problem import FP_MODES, Matmul

ROWS = range(1, MAX_M + 1)
NS = (1, 8, 64, 1000, 4096, 128256)
KS = (128, 1024, 4096, 14336, 53248)
FORMATS = [(4, 64, "affine"), (8, 32, "affine"), (16, 0, "none")]
FORMATS += [(*FP_MODES["nvfp4"], "nvfp4")]


def check_limits(p: Plan, M: int) -> None:
    """What every chip has: threads and threadgroup memory, and registers."""
    # 1024 in general, and 256 for kernels with many registers.
    assert 32 <= 32 * p.simdgroups <= 256, p
    assert p.simdgroups % p.k_simdgroups == 0, p
    # About 24 accumulators a lane, or they spill; up to 32 where x is shared.
    shared = p.lean and p.simdgroups > 2 * p.k_simdgroups
    assert p.rows * M <= (32 if shared else 24), p
    # The sums of squares of a fused norm beside the accumulators.
    floats = p.simdgroups * (p.rows * M + M) if p.k_simdgroups > 1 else 1
    if shared:  # one or two slices of x, and its sums: shared_size of lean.h
        units = p.k_simdgroups * M
        assert units <= MAX_SHARED, p
        floats = 4 * units * (64 * (1 if units > 8 else 2) + 16)
        # Up to 16 sums of each lane, by four, and a gap.
        floats = max(floats, 4 * 160 * p.simdgroups if p.rows * M > 12 else 0)
    assert 4 * floats <= 20 * 1024, p


MEMORY = {
    "qmv_reduce": [],
    "qk_norm": ["float row[D]"],
    "add_norm": ["float sums[TG/32]"],
    "gemv": ["float part[KS>1?SG*R*M:1]"],
    "qmv_glu": ["Shared part[shared_size<M,R,SG,KS,NORM>()]"],
    "qmv_qkv": ["Shared part[shared_size<M,R,SG,KS,NORM>()]"],
    "qmv_qkv_bias": ["Shared part[shared_size<M,R,SG,KS,NORM>()]"],
    "qmm_small": ["float part[KS*R*((M+7)/8)*128]"],
    "qmm_small_fp": ["float part[KS*R*((M+7)/8)*128]"],
}


PAIRS = "float part[KS>1?SG*R{}:1]"
MEMORY |= {k: [PAIRS.format("*SHARE")] for k in ("gather_qmv", "gather_qmv_fp")}
MEMORY |= {k: [PAIRS.format("")] for k in ("gather_glu", "gather_glu_fp")}

# test_codes_plan.py has the bounds of the stages.
STAGES = "uint4 shared[shared_chunks<T,bits,group,NB,R,SG,KS,U,ST,{},XS>()]"
MEMORY |= {k: [STAGES.format("false")] for k in ("qmm_codes", "qmm_codes_add")}
MEMORY |= {
    k: [STAGES.format("NORM")]
    for k in ("qmm_codes_glu", "qmm_codes_qkv", "qmm_codes_qkv_bias")
}

# test_qmm_plan.py has the bounds of the tiles.
TILE = ["uint4 tile[2*(BM+BN)*BK*sizeof(T)/16]"]
MEMORY["gather_tiles"] = ["int part[TH/32]"]
TILED = ("qmm", "qmm_fp", "qmm_plain", "qmm_add", "qmm_glu", "gather_qmm")
TILED += ("gather_qmm_fp", "gather_qmm_glu", "gather_qmm_glu_fp")
MEMORY |= {k: TILE for k in TILED}


@pytest.mark.parametrize("kernel", [k for k in source.KERNELS if "sdpa" not in k])
def test_threadgroup_memory_is_what_the_limits_count(kernel):
    text = source.load(kernel)
    declared = re.findall(r"\bthreadgroup (\w+ \w+\[.*?);", text.header + text.body)
    sums = ["Shared part[shared_size<M,R,SG,KS,false>()]"]
    assert declared == MEMORY.get(kernel, sums)


@pytest.mark.parametrize("chip", CHIPS, ids=lambda c: f"{c.key}-{c.bandwidth_gbs}")
def test_matrix_plans_fit_the_chip(chip):
    for N in NS:
        for K in KS:
            for M in (8, 16):
                problem = Matmul(M, N, K)
                if supports_matrix(problem) is not None:
                    continue
                p = plan_matrix(problem, chip)
                assert p.simdgroups == p.k_simdgroups and 32 * p.simdgroups <= 256
                floats = p.k_simdgroups * (p.rows // 16) * ((M + 7) // 8) * 128
                assert p.rows % 16 == 0 and 4 * floats <= 32 * 1024, p


@pytest.mark.parametrize("chip", CHIPS, ids=lambda c: f"{c.key}-{c.bandwidth_gbs}")
def test_k2_every_plan_fits_the_chip(chip):
    """A threadgroup above the limit is silently wrong on some chips (mlx#2205)."""
    for bits, group, mode in FORMATS:
        for N in NS:
            for K in KS:
                for M in ROWS:
                    problem = Matmul(M, N, K, "float16", bits, group, mode)
                    p = plan(problem, chip)
                    check_limits(p, M)
                    assert p.splits == 1 or K // (p.splits * p.k_simdgroups) >= 512, p
                    # Exact rows: the order of additions does not depend on M.
                    assert (p.k_simdgroups, p.splits) == split_k(problem, chip)


@pytest.mark.parametrize(
    "name, splits",
    [
        ("m4-pro-20", {256: 2, 1024: 1, 4096: 1}),
        ("m4-max-40", {256: 4, 956: 2, 960: 1, 1024: 1, 4096: 1}),
        ("m3-ultra-80", {256: 4, 1024: 2, 1916: 2, 1920: 1, 4096: 1}),
    ],
)
def test_k_is_split_on_apple_where_rows_leave_cores_with_few_simdgroups(name, splits):
    found = {N: split_k(Matmul(1, N, 4096), lookup(name)) for N in splits}
    assert found == {N: (ks, 1) for N, ks in splits.items()}


def test_apple_halves_tiles_where_that_leaves_the_fullest_core_fewer_rows():
    """40 cores: tiles of 32 rows for one core each, then of 16 for two or three."""
    chip = lookup("m4-max-40")
    for M, most in {4: 4, 5: 8, 8: 8}.items():
        found = {N: plan(Matmul(M, N, 4096), chip) for N in (1280, 1284, 1920, 1924)}
        sizes = [found[N].simdgroups for N in found]
        assert sizes == [most, 4, 4, most] and {p.rows for p in found.values()} == {4}


@pytest.mark.parametrize("Ns", [(4096, 1024, 1024), (14336, 14336), (8, 4)])
def test_k2_shared_launches_fit_every_chip(Ns):
    for chip in CHIPS:
        for K in KS:
            plans = [
                plan_shared(tuple(Matmul(M, N, K) for N in Ns), chip) for M in ROWS
            ]
            for M, p in zip(ROWS, plans, strict=True):
                check_limits(p, M)
            assert len({(p.k_simdgroups, p.splits) for p in plans}) == 1


@pytest.fixture
def nothing_planned():
    plan.cache_clear()
    plan_shared.cache_clear()


def test_each_plan_is_printed_once(nothing_planned, capsys, monkeypatch):
    monkeypatch.setenv("MLX_PHASE_PRINT_PLANS", "1")
    chip = lookup("h200")
    one, pair = Matmul(1, 4096, 8192), (Matmul(2, 64, 128), Matmul(2, 8, 128))
    for _ in range(2):
        p, shared = plan(one, chip), plan_shared(pair, chip)
    plan(Matmul(1, 96, 64, "float16", mode="none"), chip)
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    # A shared launch prints itself, not the whole that it was planned as.
    assert len(lines) == 3 and not captured.out
    for text in ("H200", "M=1 N=4096 K=8192 affine 4-bit g64 bfloat16", "-> qmv "):
        assert text in lines[0]
    assert f"k_simdgroups={p.k_simdgroups} splits={p.splits}: {p.reason}" in lines[0]
    assert "N=64+8 " in lines[1] and f"-> qmv_pair rows={shared.rows}" in lines[1]
    assert "plain float16 -> gemv" in lines[2]


@pytest.mark.parametrize("value", ["", "0", None])
def test_plans_are_silent_unless_asked(nothing_planned, capsys, monkeypatch, value):
    if value is None:
        monkeypatch.delenv("MLX_PHASE_PRINT_PLANS", raising=False)
    else:
        monkeypatch.setenv("MLX_PHASE_PRINT_PLANS", value)
    plan(Matmul(1, 4096, 8192), lookup("h200"))
    assert capsys.readouterr() == ("", "")
