"""The demo model end to end: its kernels against the float32 dequantised model."""

import os

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import ref
from mlx_lm.generate import generate_step
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
def dense(smollm2):
    """mlx-lm's llama with nn.Linear and dequantised float32 weights."""
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
    return dense


@pytest.fixture(scope="session")
def right(smollm2, dense):
    """What it answers."""
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


def same(have: list, want: list) -> None:
    """The same tokens, and log probabilities but for the order of float32 sums."""
    assert [t for t, _ in have] == [t for t, _ in want]
    pairs = zip(have, want, strict=True)
    assert max(mx.abs(a - b).max().item() for (_, a), (_, b) in pairs) < 5e-4


def test_sixty_four_steps_are_those_of_the_dequantised_model(smollm2, dense):
    ids = mx.array(smollm2.tokenizer.encode("The three laws of motion are"))
    options = {"max_tokens": 64, "prefill_step_size": 16}
    want = list(generate_step(ids, dense, **options))
    with mlx_phase.patched(smollm2.model, check=False):
        ops.reset_served()
        have = list(generate_step(ids, smollm2.model, **options))
        assert not ops.served().stock
    same(have, want)


def test_a_prompt_of_600_tokens_is_that_of_the_dequantised_model(
    smollm2, dense, monkeypatch
):
    # The first layers and the head; all of them take three minutes on two cores.
    layers = None if os.environ.get("MLX_PHASE_SLOW") else 4
    for model in (smollm2.model.model, dense.model):
        monkeypatch.setitem(model, "layers", model.layers[:layers])
    text = "The capital of France is Paris, a city on the Seine. " * 60
    ids = mx.array(smollm2.tokenizer.encode(text)[:600])
    want = list(generate_step(ids, dense, max_tokens=4))
    with mlx_phase.patched(smollm2.model, check=False):
        ops.reset_served()
        have = list(generate_step(ids, smollm2.model, max_tokens=4))
        served = ops.served()
    assert {"qmm", "sdpa_prefill"} < {k.split()[0] for k in served.kernels}
    assert not served.stock
    same(have, want)


def test_the_bench_prints_the_answer(smollm2, right, monkeypatch, capsys):
    monkeypatch.setattr(cli, "load", lambda spec: smollm2)
    options = ["--model", "smollm2", "--prompt", QUESTION, "--tokens", str(TOKENS)]
    assert cli.main([*options, "--repeats", "1", "--no-stock"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == ANSWER
    assert "qmv" in out and "qmm affine" in " ".join(out.split())
