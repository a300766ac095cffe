"""Which launches multiply codes on matrix units, and tiles that fit. Nothing runs."""

from dataclasses import replace

import pytest

from mlx_phase import check, ops
from mlx_phase.chip import lookup
from mlx_phase.plan import plan_fused
from mlx_phase.plan_exact import plan_block, plan_codes, plan_launch
from mlx_phase.problem import Matmul

H200 = lookup("h200")


def test_plan_is_one_family_for_every_m():
    for M in range(1, 17):
        one = plan_launch((Matmul(M, 14336, 4096),), H200)
        assert (one.kernel, one.k_simdgroups, one.groups) == ("qmm_codes", 2, 4)
        assert plan_launch((Matmul(M, 1024, 4096),), H200).kernel == "qmv"
        assert plan_launch((Matmul(M, 14336, 4096),), lookup("m4max")).kernel == "qmv"
        assert plan_launch((Matmul(M, 4096, 4096, "float32"),), H200).kernel == "qmv"
        assert plan_launch((Matmul(M, 4096, 4096, bits=3),), H200).kernel == "qmv"


@pytest.mark.parametrize("bits, group", [(4, 32), (4, 128), (8, 32), (8, 64), (8, 128)])
@pytest.mark.parametrize("N", [2048, 28672])
@pytest.mark.parametrize("K", [4096, 8448])
@pytest.mark.parametrize("normed", [True, False])
def test_plans_fit_threadgroup_memory(bits, group, N, K, normed):
    """Stages, and what lies ready of one row; all M add in one order."""
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        for room in (49152, 32768):
            chip = replace(H200, threadgroup_bytes=room)
            one, many = (
                plan_codes(Matmul(m, N, K, dtype, bits, group), chip, normed=normed)
                for m in (1, 16)
            )
            own = 8 * one.simdgroups if one.ready < 0 else one.ready
            assert own > 0 == many.ready and own % 8 == 0
            step = one.k_simdgroups * one.groups
            assert one.ready < 0 or one.ready % step == 0
            for p, groups in ((one, own), (many, 0)):
                assert (p.k_simdgroups, p.groups) == (one.k_simdgroups, one.groups)
                stage = p.rows * p.groups * (group * bits // 8 + 2 * size)
                used = p.simdgroups * 2 * stage + groups * (group * size + 8)
                assert used <= room and K % (p.groups * group) == 0


def test_tensor_cores_use_what_threadgroup_memory_they_have():
    """Eight simdgroups share the K of a down projection: 45 KB."""
    p = plan_codes(Matmul(1, 4096, 14336), H200, "qmm_codes_add")
    assert (p.k_simdgroups, p.groups, p.ready) == (8, 4, -1)
    assert lookup("m4max").threadgroup_bytes == 32768


def test_canary_takes_more_than_one_turn():
    """The second begins with a barrier, and ends early."""
    one = Matmul(1, 28672, 8192)
    p = plan_codes(one, H200)
    (small,) = check.small((one,), p)
    turns, rest = divmod(small.K // one.group_size, p.ready)
    assert turns == 1 and 0 < rest < p.ready and rest % p.groups == 0


def test_blocks_stay_with_vectors_where_matrices_cannot():
    def kernel(name, *members, **how):
        return plan_block(name, members, H200, **how).kernel

    one, small = Matmul(1, 4096, 4096), Matmul(1, 64, 4096)
    assert kernel("qmv_add", one) == "qmm_codes_add"
    assert kernel("qmv_glu", one, one, normed=True) == "qmm_codes_glu"
    half = replace(one, x_dtype="float16")
    assert kernel("qmv_glu", half, half, normed=True) == "qmv_glu"
    assert kernel("qmv_glu", half, half) == "qmm_codes_glu"
    assert kernel("qmv_qkv", one, small, small, dims=(64, 64)) == "qmm_codes_qkv"
    assert kernel("qmv_qkv", one, small, small, dims=(80, 80)) == "qmv_qkv"
    assert kernel("qmv_qkv", one, small, replace(small, bits=8)) == "qmv_qkv"
    assert kernel("qmv_add", small) == "qmv_add"
    m4 = lookup("m4max")
    assert plan_block("qmv_add", (one,), m4) == plan_fused("qmv_add", (one,), m4)


def test_blocks_of_inexact_models_are_fused_and_shared_launches_go_apart(monkeypatch):
    monkeypatch.setattr(ops, "device_chip", lambda: H200)
    for M in (1, 8):
        one = Matmul(M, 4096, 4096)
        assert not ops.apart((one,), exact=False)
        assert ops.apart((one, one), exact=False) == (M > 1)
        assert not ops.apart((one, one), exact=True)
    # 3 bits have no codes kernel: matrix units take the layer alone.
    assert ops.apart((Matmul(8, 4096, 4096, bits=3),), exact=False)


def test_only_the_plan_that_is_taken_is_printed(monkeypatch, capsys):
    monkeypatch.setenv("MLX_PHASE_PRINT_PLANS", "1")
    plan_block.cache_clear()
    plan_block("qmv_add", (Matmul(5, 4096, 4096),), H200)
    (line,) = capsys.readouterr().err.splitlines()
    assert "qmm_codes_add" in line


def test_refusals_say_why():
    for problem, words in (
        (Matmul(17, 64, 128), "M = 17"),
        (Matmul(1, 64, 64), "no pair of groups"),
        (Matmul(1, 8, 128), "N is below 32"),
        (Matmul(1, 64, 128, bits=3), "codes of 4 or 8 bits"),
    ):
        with pytest.raises(ValueError, match=words):
            plan_codes(problem, H200)
