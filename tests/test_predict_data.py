"""The published rows behind the prediction, and the shapes of their models."""

import pytest

from mlx_phase import predict_data, predict_fit
from mlx_phase.predict_data import chip_of, published, quantized, shapes_of

LLAMA = shapes_of("Llama-3.1-8B", "4-bit")


@pytest.mark.parametrize(
    "quant, gigabytes", [("F16", 13.247), ("Q8_0", 7.056), ("Q4_0", 3.782)]
)
def test_bytes_of_llama_2_7b_are_those_of_the_gguf_files(quant, gigabytes):
    # File size less the embedding, plus the cache of 64 tokens.
    moved = sum(predict_fit.decode_bytes(shapes_of("LLaMA-2 7B", quant), 64))
    assert moved / 1e9 == pytest.approx(gigabytes, rel=2e-3)


@pytest.mark.parametrize(
    "name, billions",
    [
        ("LLaMA-2 7B", 6.74),
        ("Llama-3.1-8B", 8.03),
        ("Llama-3.2-3B", 3.21),
        ("Mistral-7B-v0.3", 7.25),
        ("Qwen2.5-Coder-7B", 7.62),
        ("Qwen2.5-14B", 14.77),
        ("Qwen2.5-32B", 32.76),
        ("Qwen3-0.6B", 0.6),
        ("Qwen3-4B", 4.02),
        ("Qwen3-8B", 8.19),
        ("Qwen3-32B", 32.76),
        ("Qwen3-30B-A3B", 30.53),
        ("gemma3-1b", 1.0),
        ("gemma3-27b", 27.0),
        ("Phi-4-mini", 3.84),
        ("gpt-oss-20b", 20.91),
        ("gpt-oss-120b", 116.8),
    ],
)
def test_shapes_have_as_many_weights_as_their_makers_say(name, billions):
    count = shapes_of(name, "4-bit").parameters / 1e9
    assert count == pytest.approx(billions, rel=0.008)


def test_bytes_of_experts_and_windows():
    sparse = shapes_of("Qwen3-30B-A3B", "4-bit")
    weights, _ = predict_fit.decode_bytes(sparse, 0)
    # 3.3 billion of 30.5 billion weights are active; the embedding is one row.
    assert weights == pytest.approx(3.04e9 * 4.5 / 8, rel=0.01)
    sliding = shapes_of("gpt-oss-20b", "MXFP4")
    short = predict_fit.decode_bytes(sliding, 128)[1]
    assert predict_fit.decode_bytes(sliding, 256)[1] == pytest.approx(1.5 * short)


def test_prefill_flops_of_llama_3_8b():
    # Seed text: 2 * 8e9 * 2000 FLOPs and attention's 3.6 %; here without the head.
    flops = predict_fit.prefill_flops(LLAMA, 2000)
    assert 2 * 6.98e9 * 2000 < flops < 2 * 8.03e9 * 2000
    attention = flops - 2 * LLAMA.layer_parameters * 2000
    assert attention == pytest.approx(2 * 4096 * 2000**2 * 32, rel=1e-3)


def test_published_rows_are_whole_and_sourced():
    rows = published()
    assert len(rows) == 200
    for row in rows:
        assert row.source and row.grade in ("A", "B", "C")
        assert bool(row.group) != bool(row.left_out)
        assert row.decode_tok_s and row.decode_tok_s > 0
        if row.group:
            assert row.group in predict_fit.GROUPS
            assert row.context_tokens and row.quant in predict_data.QUANTS
            assert chip_of(row).name == row.chip
            # 400 is also written 409.6; a wrong part of a name is off by far more.
            assert chip_of(row).bandwidth_gbs == pytest.approx(
                row.bandwidth_gbs, rel=0.03
            )


def test_an_unknown_format_is_named():
    with pytest.raises(ValueError, match="Q4_K_M"):
        quantized(predict_data.published_models()["Qwen3-4B"], "Q4_K_M")
