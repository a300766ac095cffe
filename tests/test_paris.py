"""The demo model end to end: its kernels against the float32 dequantised model."""

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import ref
from mlx_lm.models import llama

import mlx_phase
from mlx_phase import ops
from mlx_phase.bench import __main__ as cli

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
TOKENS = 8  # seven of the answer and the end of the turn


def generate(model, loaded, **options):
    """(token ids, text, log probabilities [TOKENS, vocab]) of a greedy answer."""
    chat = [{"role": "user", "content": QUESTION}]
    ids = loaded.tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    parts = list(
        mlx_lm.stream_generate(
            model, loaded.tokenizer, ids, max_tokens=TOKENS, **options
        )
    )
    tokens, text = [part.token for part in parts], "".join(part.text for part in parts)
    return tokens, text, np.stack([np.array(part.logprobs) for part in parts])


@pytest.fixture(scope="session")
def right(smollm2):
    """What mlx-lm's llama answers with nn.Linear and dequantised float32 weights."""
    dense = llama.Model(llama.ModelArgs.from_dict(smollm2.config))
    weights = []
    for path, m in smollm2.model.named_modules():
        if (weight := m.get("weight")) is not None and "scales" in m:
            form = m.group_size, m.bits, m.mode
            weight = mx.dequantize(m.weight, m.scales, m.get("biases"), *form)
        if weight is not None:
            weights.append((f"{path}.weight", weight))
    dense.load_weights(weights)  # strict: nothing missing, nothing left over
    assert {a.dtype for _, a in weights} == {mx.float32}
    # mx.dequantize is stock code; the oracle has its own.
    m, wide = smollm2.model.layers[3].mlp.up_proj, dense.layers[3].mlp.up_proj.weight
    oracle = ref.dequantize(m.weight, m.scales, m.biases, m.group_size, m.bits, m.mode)
    np.testing.assert_allclose(np.array(wide), oracle, rtol=1e-6, atol=1e-7)
    return generate(dense, smollm2)


def test_the_dequantised_model_knows_paris(right):
    assert len(right[0]) == TOKENS and right[1] == ANSWER


def test_kernels_answer_as_the_dequantised_model(smollm2, right):
    with mlx_phase.patched(smollm2.model) as report:
        assert report.n_replaced == 211 and not report.left and not report.failed
        ops.reset_served()
        # At most 16 rows a step: the kernels compute the prompt too, and stock nothing.
        tokens, text, logprobs = generate(smollm2.model, smollm2, prefill_step_size=16)
        served = ops.served()
    assert not served.stock, served.stock
    names = {name.split()[0] for name in served.kernels}
    # Blocks are fused, the head is a matrix of its own; new caches are not joint yet.
    attention = {"sdpa_split", "sdpa_split_joint"}
    assert names == {"qmv", "qmv_qkv", "qmv_add", "qmv_glu"} | attention
    assert {"M=16", "M=1"} <= {w for name in served.kernels for w in name.split()}
    # q, k, v in one launch, gate and up in one, o and down, for each token and block.
    assert sum(n for name, n in served.kernels.items() if "M=1 " in name) >= 8 * 121
    assert tokens == right[0] and text == ANSWER
    # Both sum in float32; 2e-4 of log probabilities that reach -30.
    assert np.abs(logprobs - right[2]).max() < 2e-4


def test_the_bench_prints_the_answer(smollm2, right, monkeypatch, capsys):
    monkeypatch.setattr(cli, "load", lambda spec: smollm2)
    options = ["--model", "smollm2", "--prompt", QUESTION, "--tokens", str(TOKENS)]
    assert cli.main([*options, "--repeats", "1", "--no-stock"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == ANSWER
    assert "qmv" in out and "qmm affine" in " ".join(out.split())
