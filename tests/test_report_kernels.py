"""The kernel table of the report against plan and the rules of stock MLX."""

from dataclasses import replace

import pytest
from report_case import MOE, analysis, rows

from mlx_phase.model_config import config_of
from mlx_phase.plan import plan, plan_shared
from mlx_phase.plan_attention import plan_sdpa
from mlx_phase.plan_qmm import plan_qmm, stays_stock
from mlx_phase.problem import Attention, Matmul, Sdpa
from mlx_phase.report import kernels, verdict


@pytest.mark.parametrize("chip", ["h200", "m1", "m3-ultra"])
def test_decode_kernels_are_those_of_the_plan(chip):
    a = analysis(chip=chip)
    qkv = tuple(Matmul(1, n, 4096) for n in (4096, 1024, 1024))
    for operation, p in (
        ("QKV", plan_shared(qkv, a.chip)),
        ("output", plan(Matmul(1, 4096, 4096), a.chip)),
        ("gate/up", plan_shared((Matmul(1, 14336, 4096),) * 2, a.chip)),
        ("down", plan(Matmul(1, 4096, 14336), a.chip)),
        ("head", plan(Matmul(1, 128256, 4096), a.chip)),
    ):
        (row,) = rows(a, "decode", operation)
        own = p.simdgroups // p.k_simdgroups
        assert row["kernel"] == p.kernel
        assert row["tile"] == f"{own}x{p.rows}"
        assert row["split"] == (str(p.k_simdgroups) if p.k_simdgroups > 1 else "none")
        assert row["reason"] == p.reason and row["exact"]


def test_a_split_over_threadgroups_costs_a_second_launch():
    a = analysis({**MOE, "num_experts": 32})
    p = plan(Matmul(1, 32, 2048), a.chip)
    (row,) = rows(a, "decode", "router")
    assert p.splits > 1 and row["split"] == f"{p.k_simdgroups}x{p.splits}"
    assert row["launches"] == 48 * 2
    assert row["bottleneck"].startswith("launch")


def test_what_no_kernel_takes_is_stock_with_the_reason_of_supports():
    a = analysis(batch=20)
    (row,) = rows(a, "decode", "down")
    p = plan_qmm(Matmul(20, 4096, 14336), a.chip)
    assert (row["kernel"], row["exact"], row["reason"]) == ("qmm", False, p.reason)
    (row,) = rows(a, "prefill", "gate/up")
    assert row["kernel"] == "qmm" and row["tile"] == "64x64"
    a = analysis(chip="m5-max")
    (row,) = rows(a, "prefill", "gate/up")
    assert row["kernel"] == "stock MLX"
    assert row["reason"] == stays_stock(Matmul(2048, 14336, 4096), a.chip)


def test_experts_are_those_of_the_plan():
    a = analysis(MOE)
    found = {}
    for phase in ("decode", "prefill"):
        for name in ("gate/up", "down"):
            (row,) = rows(a, phase, f"expert {name}")
            found[phase, name] = row["kernel"], row["launches"], row["exact"]
    assert found == {
        ("decode", "gate/up"): ("gather_glu", 48, True),
        ("decode", "down"): ("gather_qmv", 48, True),
        # With the list of tiles.
        ("prefill", "gate/up"): ("gather_qmm_glu", 96, False),
        ("prefill", "down"): ("gather_qmm", 48, False),
    }
    (row,) = rows(analysis(MOE, chip="m5-max"), "prefill", "expert down")
    assert row["kernel"] == "stock MLX" and "neural accelerators" in row["reason"]
    assert row["launches"] == 48


def test_plain_weights_need_linear_all():
    (row,) = rows(analysis("llama-8b:bits=16"), "decode", "down")
    assert row["kernel"] == "gemv" and 'linear="all"' in row["reason"]


@pytest.mark.parametrize(
    "options, kernel, chunks",
    [
        ({}, "sdpa_split", 9),
        ({"context": 100}, "sdpa_split", 1),
        ({"kv_bits": 8}, "sdpa_matrix_codes", 9),
        ({"draft": 3}, "sdpa_split", 9),
    ],
)
def test_decode_attention_is_that_of_the_plan(options, kernel, chunks):
    a = analysis(chip="m4", **options)
    phase = "verify" if "draft" in options else "decode"
    (row,) = rows(a, phase, "attention")
    bits = options.get("kv_bits", 16)
    q_len = 1 + options.get("draft", 0)
    p = Sdpa(32, 8, 128, 128, q_len, k_bits=bits, v_bits=bits, causal=q_len > 1)
    p = plan_sdpa(p, a.chip)
    assert row["kernel"] == p.kernel == kernel and row["exact"]
    assert row["tile"] == f"1x{p.rows}"
    assert row["split"] == f"{p.simdgroups}x{chunks}"
    assert row["launches"] == 32 * (1 + (chunks > 1))
    assert row["reason"].startswith(p.reason)


def test_attention_that_no_kernel_takes_is_stock_with_the_reason_of_supports():
    a = analysis(chip="m4-max")
    (row,) = rows(a, "prefill", "attention")
    assert row["kernel"] == "stock MLX sdpa_full" and not row["exact"]
    assert row["reason"].startswith("q_len > 32: stock attention of a plain cache")
    (row,) = rows(analysis(chip="m5-max", kv_bits=8), "prefill", "attention")
    assert row["kernel"] == "stock MLX (dequantised)"
    assert "blocks of rows" in row["reason"]


def test_prompts_over_a_quantised_cache_are_ours_before_neural_accelerators():
    (row,) = rows(analysis(chip="m4-max", kv_bits=8), "prefill", "attention")
    assert row["kernel"] == "sdpa_prefill_codes" and not row["exact"]
    assert row["tile"] == "8x8" and row["split"] == "none"


@pytest.mark.parametrize(
    "chip, changes, kernel",
    [
        ("m4-max", {}, "stock MLX sdpa_vector, 2-pass"),
        ("m4", {}, "stock MLX sdpa_vector"),
        ("m4", {"k_len": 4096}, "stock MLX sdpa_vector, 2-pass"),
        ("m4-max", {"k_len": 100}, "stock MLX sdpa_vector"),
        ("m4-max", {"window": 512}, "stock MLX sdpa_vector"),
        ("m4-max", {"q_len": 8}, "stock MLX sdpa_vector, 2-pass"),
        ("m4-max", {"q_len": 8, "kv_heads": 4}, "stock MLX (unfused)"),
        ("m4-max", {"head_dim": 80}, "stock MLX (unfused)"),
        ("m4-max", {"kv_bits": 8}, "stock MLX (quantized matmuls)"),
        ("h200", {}, "stock MLX"),
    ],
)
def test_stock_attention_as_mlx_chooses_it(chip, changes, kernel):
    problem = replace(Attention(1, 2049, 32, 8, 128, 128), **changes)
    assert kernels.mlx_attention(problem, analysis(chip=chip))[0] == kernel


def test_mixed_formats_share_only_where_all_siblings_are_alike():
    q = {"group_size": 64, "bits": 4}
    q["model.layers.0.self_attn.v_proj"] = {"group_size": 64, "bits": 6}
    found = rows(analysis({**MOE, "quantization": q}), "decode", "QKV")
    assert {r["kernel"] for r in found} == {"qmv"}
    assert [r["operation"] for r in found] == [f"QKV ({name})" for name in "qkvv"]
    assert [r["launches"] for r in found] == [48, 48, 1, 47]


def test_a_window_bounds_the_keys():
    types = ["sliding_attention", "full_attention"] * 16
    llama = config_of("llama-8b").config
    a = analysis({**llama, "sliding_window": 512, "layer_types": types})
    full, windowed = rows(a, "decode", "attention")
    assert full["operation"] == "attention" and "2049 keys" in full["reason"]
    assert windowed["operation"] == "attention (window 512)"
    assert "512 keys in 2 chunks" in windowed["reason"]


def test_bottlenecks_follow_the_roofline():
    a = analysis(chip="h100-sxm", prompt=2000, batch=64, context=2000)
    assert rows(a, "prefill", "down")[0]["bottleneck"] == "compute"
    assert rows(a, "decode", "attention")[0]["bottleneck"] == "KV traffic"
    # Decode kernels use no matrix units: 16 rows of 4 bits are too much for FMA.
    a = analysis(chip="m5-max", draft=15)
    assert rows(a, "decode", "down")[0]["bottleneck"] == "weight bandwidth"
    assert rows(a, "verify", "down")[0]["bottleneck"] == "FMA rate"
    assert "Matrix units" in " ".join(verdict.flips(a))
    assert rows(analysis("tiny"), "decode", "down")[0]["bottleneck"].startswith(
        "launch"
    )
