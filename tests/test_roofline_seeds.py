"""Worked numbers of two texts, as they round them, against step and roofline.

"Profile Prefill vs Decode" (fanout.sh, inference-eng, 12-05): Llama 3 8B in bfloat16 on
an H100. "Optimize Prefill Vs Decode Kernels": intensities and machine balances.
"""

import pytest

from mlx_phase import step
from mlx_phase.chip import UNKNOWN, lookup
from mlx_phase.presets import PRESETS
from mlx_phase.problem import Attention, Matmul
from mlx_phase.roofline import (
    attended,
    attention_bytes,
    attention_flops,
    kv_bytes,
    machine_balance,
    matmul_bound,
)
from mlx_phase.shapes import model_shapes

H100 = lookup("h100-sxm")
LLAMA = model_shapes({**PRESETS["llama-8b"], "dtype": "bfloat16"})
WEIGHTS = 2 * LLAMA.parameters


def test_llama_3_8b_is_the_model_of_the_text():
    assert LLAMA.parameters / 1e9 == pytest.approx(8.03, abs=0.005)
    assert WEIGHTS / 1e9 == pytest.approx(16.06, abs=0.005)
    assert LLAMA.layer_parameters / 1e9 == pytest.approx(6.98, abs=0.005)


def test_prefill_of_2000_tokens_takes_32_ms_and_is_bound_by_math():
    ms = step.napkin_prefill(LLAMA.parameters, 2000, H100) * 1e3
    assert ms == pytest.approx(32, abs=0.6)
    reading = step.napkin_decode(WEIGHTS, 0, H100) * 1e3
    assert reading == pytest.approx(4.8, abs=0.05) and reading < ms
    # Operation by operation: no math for the embedding, one row of the head.
    (whole,) = step.prefill(LLAMA, H100, 2000)
    # 28.2 of products, 1.1 of attention, 0.3 to read the head.
    assert whole.seconds * 1e3 == pytest.approx(29.6, abs=0.05)
    assert all(
        o.bound.side == "compute" for o in whole.operations if o.name != "lm_head"
    )


def test_decode_step_takes_4_9_ms_with_0_26_gb_of_cache():
    cache = 2000 * step.kv_bytes_per_token(LLAMA)
    assert step.kv_bytes_per_token(LLAMA) == 128 * 1024
    assert cache / 1e9 == pytest.approx(0.26, abs=0.005)
    seconds = step.napkin_decode(WEIGHTS, cache, H100)
    assert seconds * 1e3 == pytest.approx(4.9, abs=0.05)
    math = 2 * LLAMA.parameters / (H100.matmul_tflops * 1e12)
    assert math * 1e3 == pytest.approx(0.016, abs=0.0005)
    assert seconds / math == pytest.approx(300, rel=0.02)
    # The step that is run reads one row of the embedding table, not all of it.
    real = step.decode(LLAMA, H100, 2000)
    assert WEIGHTS - real.weight_bytes == 2 * 128256 * 4096
    assert all(o.bound.side == "memory" for o in real.operations)


def test_attention_share_of_prefill_and_its_crossover():
    assert step.attention_share(LLAMA, 2000) == pytest.approx(0.036, abs=0.0005)
    assert step.attention_share(LLAMA, 32_000) == pytest.approx(0.375, abs=0.001)
    assert step.attention_crossover(LLAMA) == pytest.approx(53_250, abs=5)
    closed_form = LLAMA.layer_parameters / (LLAMA.layers * 4096)
    assert step.attention_crossover(LLAMA) == pytest.approx(closed_form, abs=2)


def test_batch_64_takes_9_8_ms_a_step_and_gains_32_times():
    cache = 2000 * step.kv_bytes_per_token(LLAMA)
    one = step.napkin_decode(WEIGHTS, cache, H100)
    many = step.napkin_decode(WEIGHTS, 64 * cache, H100)
    assert 64 * cache / 1e9 == pytest.approx(16.8, abs=0.05)
    assert many * 1e3 == pytest.approx(9.8, abs=0.05)
    assert 64 * one / many == pytest.approx(32, abs=0.5)
    # Short contexts get closer to 64 times.
    short = [step.decode(LLAMA, H100, 16, b).seconds for b in (1, 64)]
    assert 55 < 64 * short[0] / short[1] < 64


def test_wall_time_of_a_request():
    assert step.request_split(0.050, 300, 0.0055) == pytest.approx(0.97, abs=0.005)
    bounds = step.prefill(LLAMA, H100, 2000)[0], step.decode(LLAMA, H100, 2000)
    assert step.request_split(bounds[0].seconds, 300, bounds[1].seconds) > 0.95


def test_four_prompts_take_four_times_as_long():
    one = step.forward(LLAMA, H100, 2000, 2000, 1, head_rows=1).seconds
    four = step.forward(LLAMA, H100, 2000, 2000, 4, head_rows=4).seconds
    assert four / one == pytest.approx(4, rel=0.02)


@pytest.mark.parametrize("M, intensity", [(2048, 1300), (1, 1), (8, 8)])
def test_intensity_of_a_square_product(M, intensity):
    product = Matmul(M, 8192, 8192, "float16", 16, 0, "none")
    assert matmul_bound(product, H100).intensity == pytest.approx(intensity, rel=0.06)


@pytest.mark.parametrize("chip, balance", [("h100-sxm", 295), ("mi300x", 245)])
def test_machine_balance(chip, balance):
    assert machine_balance(lookup(chip)) == pytest.approx(balance, abs=0.5)


def test_pairs_are_those_of_the_mask():
    for q_len, k_len, window in [(5, 5, None), (3, 9, None), (7, 9, 4), (1, 9, 4)]:
        for w in (window, 20):
            visible = sum(min(k_len - q_len + 1 + i, w or k_len) for i in range(q_len))
            a = Attention(q_len, k_len, 4, 2, 8, 8, window=w)
            assert attended(a) == visible
            assert attention_flops(a) == 2 * 4 * 16 * visible


def test_bytes_of_the_cache():
    plain = Attention(2, 100, 4, 2, 64, 64, batch=3)
    assert kv_bytes(plain) == 3 * 100 * 2 * 128 * 2
    assert attention_bytes(plain) == kv_bytes(plain) + 3 * 2 * 4 * 128 * 2
    eight = Attention(2, 100, 4, 2, 64, 64, batch=3, kv_bits=8)
    assert kv_bytes(eight) == 3 * 100 * (2 * 128 + 4 * 2 * 2)
    windowed = Attention(2, 100, 4, 2, 64, 64, window=10)
    assert kv_bytes(windowed) == 11 * 2 * 128 * 2


def test_chunks_of_a_prompt_do_the_same_math_and_read_the_weights_again():
    (whole,) = step.prefill(LLAMA, H100, 2000)
    parts = step.prefill(LLAMA, H100, 2000, chunk=512)
    assert [p.rows for p in parts] == [512, 512, 512, 464]
    assert sum(p.flops for p in parts) == whole.flops
    layers = whole.weight_bytes - 2 * 128256 * 4096
    assert sum(p.weight_bytes for p in parts) == 4 * layers + 2 * 128256 * 4096


def test_break_even_of_speculation():
    assert step.expected_tokens(1.0, 4) == 5
    assert step.expected_tokens(0.5, 2) == 1.75
    # 1 + a + a^2 = 1.75 at a = 0.5
    assert step.break_even(1.75, 2) == pytest.approx(0.5)
    assert step.break_even(1.55, 2, draft_cost=0.1) == pytest.approx(0.5)
    # Published small-M times of one matrix, llama.cpp on an M4 Pro: no gain at all.
    assert step.break_even(1023.2 / 137.6, 7) == pytest.approx(0.98, abs=0.01)
    assert step.break_even(5, 4) is None
    k, gain = step.best_draft([(1, 1.0), (3, 1.5), (7, 4.0)], 0.8, 0.0)
    assert (k, gain) == (3, pytest.approx(2.952 / 1.5))


def test_where_the_bound_flips():
    # M K N / (M K + K N + M N) = 295.2 for the narrowest: K = 4096, N = 1024.
    balance = machine_balance(H100)
    rows = 1 / (1 / balance - 1 / 4096 - 1 / 1024)
    assert step.compute_bound_rows(LLAMA, H100) == pytest.approx(rows, abs=1)
    context = step.kv_crossover(LLAMA, H100)
    assert context == pytest.approx((WEIGHTS - 2 * 128256 * 4096) / 131072, abs=2)
    assert step.first(lambda n: n > 10, 8) is None


def test_an_unknown_chip_has_no_times():
    whole = step.decode(LLAMA, UNKNOWN, 100)
    assert whole.seconds is None and whole.bytes > 0
    assert step.napkin_decode(1, 1, UNKNOWN) is None
    assert step.napkin_prefill(1, 1, UNKNOWN) is None
    assert step.compute_bound_rows(LLAMA, UNKNOWN) is None
