"""Who serves a prompt's attention on which chip, and with which tile."""

from dataclasses import replace

import pytest

from mlx_phase import attention_check
from mlx_phase.chip import CHIPS, lookup
from mlx_phase.plan_attention import MAX_Q_LEN
from mlx_phase.plan_prefill_attention import (
    MAX_TILE_BYTES,
    bucket,
    chunks_of,
    fused,
    plan_prefill,
    stays_stock,
    supports_prefill,
    tile_bytes,
)
from mlx_phase.problem import HEAD_DIM_PAIRS, HEAD_DIMS, Sdpa

PROBLEM = Sdpa(32, 8, 128, 128, q_len=512, causal=True)
CODES = {"k_bits": 8, "v_bits": 8}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_plan_fits_every_gpu(dtype):
    for chip in CHIPS:
        for D, DV in [(d, d) for d in HEAD_DIMS] + list(HEAD_DIM_PAIRS):
            p = Sdpa(8, 2, D, DV, 64, dtype=dtype)
            chosen = plan_prefill(p, chip)
            tile = chosen.rows, chosen.simdgroups, chosen.keys
            assert tile[0] in (8, 16, 32) and tile[2] in (16, 32, 64)
            assert tile[1] <= 8 and not chosen.exact
            assert tile_bytes(p, *tile) <= MAX_TILE_BYTES
            wide = "wide" in chosen.kernel
            assert wide == (max(D, DV) > 256)
            assert chosen.tile_rows == tile[0] * (1 if wide else tile[1])
            # Each takes 64 elements of V, and 8 rows of scores have one that adds them.
            assert not wide or 64 * tile[1] == DV and tile[0] <= 8 * tile[1]


def test_what_no_kernel_takes_is_an_error():
    p = Sdpa(8, 2, 40, 40, 64)
    assert "head dims (40, 40)" in supports_prefill(p)
    with pytest.raises(ValueError, match="no kernel for"):
        plan_prefill(p, lookup("m1"))


def test_a_plan_depends_on_neither_length_nor_batch():
    chip = lookup("m2-max")
    for change in ({"q_len": 17}, {"k_len": 9000}, {"batch": 4}, {"causal": False}):
        assert plan_prefill(replace(PROBLEM, **change), chip) == plan_prefill(
            PROBLEM, chip
        )


@pytest.mark.parametrize(
    "chip, changes, served",
    [
        ("m4-max", {}, False),
        ("m4-max", {"q_len": 32}, True),
        ("m4-max", {"head_dim": 192}, True),
        ("m4-max", {"head_dim": 256, "v_head_dim": 256}, True),
        ("m4-max", {"head_dim": 576, "v_head_dim": 512}, True),
        ("m4-max", CODES, True),
        ("m5-max", {"q_len": 32}, False),
        ("m5-max", CODES, False),
        ("m5-max", {"head_dim": 256, "v_head_dim": 256}, False),
        ("cpu", {}, True),
    ],
)
def test_stock_stays_where_it_is_not_beaten(chip, changes, served):
    p, chip = replace(PROBLEM, **changes), lookup(chip)
    why = stays_stock(p, chip)
    assert (why is None) == served
    assert served or why.startswith("q_len > ") and chip.family in why


def test_what_stock_fuses():
    assert fused(PROBLEM, lookup("m1")) and fused(PROBLEM, lookup("h200"))
    for dim in (112, 192, 256):
        assert not fused(replace(PROBLEM, head_dim=dim), lookup("m1"))
    wide = replace(PROBLEM, head_dim=256, v_head_dim=256)
    assert not fused(wide, lookup("h200"))
    assert not fused(PROBLEM, lookup("cpu"))


def test_prompts_share_plans_by_powers_of_two():
    assert [bucket(n) for n in (17, 32, 33, 600, 2048)] == [32, 32, 64, 1024, 2048]
    assert bucket(MAX_Q_LEN + 1) > MAX_Q_LEN


def test_keys_are_split_until_the_chip_is_full():
    p = plan_prefill(PROBLEM, lookup("h200"))
    assert chunks_of(PROBLEM, p, 2048, 8192) == 1
    few = chunks_of(PROBLEM, p, 17, 8192)
    assert 8 < few <= p.threadgroups // 8
    # A chunk keeps enough steps to pay for the merge, and none is empty.
    assert chunks_of(PROBLEM, p, 17, 300) == 1
    for k_len in range(250, 9000, 333):
        n = chunks_of(PROBLEM, p, 17, k_len)
        steps = -(-k_len // p.keys)
        assert (n - 1) * -(-steps // n) < steps


@pytest.mark.parametrize("chip", ["m1", "m4-max", "h200"])
def test_the_check_at_patch_time_runs_one_chunk_and_several(chip, monkeypatch):
    """Also where two kv heads fill a chip that one head would not: the M1 here."""
    p = Sdpa(8, 1, 256, 256, q_len=32, causal=True)
    chosen = plan_prefill(p, lookup(chip))
    assert chunks_of(p, chosen, 17, 4096) > 1
    seen = []

    def error(p, chosen) -> float:
        seen.append(chunks_of(p, chosen, p.q_len, p.k_len))
        return 0.0

    monkeypatch.setattr(attention_check, "_error", error)
    attention_check._run(attention_check.small(p, chosen), chosen)
    assert seen == [2, 1]
