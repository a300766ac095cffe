"""Fused blocks of each family, in traced steps, against the families' own code."""

import copy

import mlx.core as mx
import numpy as np
import pytest
import tolerance
from block_models import family
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.lora import LoRALinear

import mlx_phase
from mlx_phase import ops
from mlx_phase.block import fused
from mlx_phase.traced import traced

TOKENS = mx.random.randint(0, 96, (1, 100), key=mx.random.key(4))
# Family -> what the report says was fused, and the kernels of a step.
FUSED = {
    "gemma3_text": ("2 TransformerBlock fused", "qmv_qkv qk_norm qmv_glu add_norm"),
    "phi3": ("2 TransformerBlock fused", "qmv_qkv qmv_add qmv_glu"),
    "gpt_oss": ("2 TransformerBlock (attention half) fused", "qmv_qkv qmv_add"),
    "qwen3_moe": ("1 Qwen3MoeDecoderLayer fused", "qmv_qkv qk_norm qmv_add qmv_glu"),
}
# The same for families that are tried with single tokens only.
SINGLE = {
    "gemma": ("2 TransformerBlock fused", "qmv_qkv qmv_add qmv_glu"),
    "mixtral": ("2 MixtralDecoderLayer (attention half) fused", "qmv_qkv qmv_add"),
    "glm4": ("2 Glm4DecoderLayer fused", "qmv_qkv qmv_glu add_norm"),
    "exaone4": ("2 TransformerBlock fused", "qmv_qkv qk_norm qmv_glu add_norm"),
}


def run(m, lengths: list[int], prompt: int = 4) -> mx.array:
    """Logits from the prompt's last on: steps of several tokens."""
    caches = make_prompt_cache(m)
    outs, at = [m(TOKENS[:, :prompt], cache=caches)[:, -1:]], prompt
    for length in lengths:
        outs.append(m(TOKENS[:, at : at + length], cache=caches))
        mx.eval(outs[-1], [c.state for c in caches])
        at += length
    return mx.concatenate(outs, axis=1)


@pytest.mark.parametrize("name", [*FUSED, *SINGLE])
def test_steps_are_fused_and_right(name):
    """Windows of 12 keys wrap on the way, and steps of several tokens go over."""
    m, single = family(name), name in SINGLE
    # Each number of rows is a kernel of its own to compile.
    lengths, prompt = ([1] * 64, 1) if single else ([1, 1, 3, *[1] * 56, 3], 4)
    want = run(m, lengths, prompt)
    report = mlx_phase.patch(m, check=not single)
    said, kernels = (FUSED | SINGLE)[name]
    assert said in str(report.steps) and report.steps.reason is None
    assert report.steps.several is None and not report.steps.unfused
    assert all(map(fused, m.layers))
    ops.reset_served()
    have = run(m, lengths, prompt)
    scale = mx.abs(want).max().item()
    # Float32 all along, so only the order of sums differs.
    np.testing.assert_allclose(have / scale, want / scale, atol=2e-5)
    served = {k.split()[0] for k in ops.served().kernels}
    assert {*kernels.split()} < served and not ops.served().stock
    assert mx.array_equal(have.argmax(-1), want.argmax(-1)).item()


@pytest.mark.parametrize("name", ["gemma3_text", "phi3", "gpt_oss"])
def test_a_step_of_many_rows_has_the_bits_of_single_steps(name):
    m = family(name)
    mlx_phase.patch(m, check=False)
    # Inside the window of 12: beyond it the stock cache reorders its keys.
    ones = run(m, [1] * 7)
    # Each number of rows is a kernel of its own to compile.
    for lengths in ([3, 1, 3], [4, 2, 1])[: 2 if name == "gemma3_text" else 1]:
        tolerance.assert_bits(ones, run(m, lengths))


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_drafts_of_another_model_change_no_token(name):
    m, draft = (family(name, sliding_window=40) for _ in range(2))
    norm = draft.model.norm
    norm["weight"] = norm["weight"] + 0.2 * mx.random.normal(norm["weight"].shape)
    mlx_phase.patch(m, check=False)
    mlx_phase.patch(draft, check=False)
    prompt, n = TOKENS[0, :5], {"max_tokens": 16}
    want = [int(t) for t, _ in generate_step(prompt, m, **n)]
    steps = speculative_generate_step(prompt, m, draft, num_draft_tokens=2, **n)
    tokens, _, from_draft = zip(*steps, strict=True)
    assert [*map(int, tokens)] == want and 0 < sum(from_draft) < 16


@pytest.mark.parametrize("name", ["exaone4", "phi3"])
def test_what_no_launch_covers_runs_through_the_layers(name):
    m = family(name, mode="mxfp4")
    want = run(m, [1])
    mlx_phase.patch(m, check=False)
    assert all(map(fused, m.layers))
    ops.reset_served()
    np.testing.assert_allclose(run(m, [1]), want, atol=1e-4)
    served = {k.split()[0] for k in ops.served().kernels}
    assert not {"qmv_qkv", "qmv_glu"} & served and "qmv_fp" in served


REASONS = {
    "gemma2": "attention that is not MLX's or mlx-lm's function",
    "olmo2": "its norms of q and k are not one for each head",
    "granite": "differs from stock",
}


def runs_as_before(name: str) -> tuple:
    """A patched model of a family and the report on its steps, in words."""
    m = family(name)
    lengths = [1, 3, 1]
    want = run(m, lengths)
    report = mlx_phase.patch(m)
    np.testing.assert_allclose(run(m, lengths), want, atol=1e-4)
    return m, report.steps


@pytest.mark.parametrize("name", REASONS)
def test_what_does_not_fit_is_named_and_runs_as_before(name):
    m, steps = runs_as_before(name)
    assert REASONS[name] in str(steps) and not any(map(fused, m.layers))
    assert traced(m.model) == (name != "gemma2")


# Decoders that call their tokens x.
CALLED_X = {
    "deepseek": "1 DeepseekDecoderLayer fused",
    "glm4_moe": "1 DecoderLayer fused",
    "phi": "not fused",
}


@pytest.mark.parametrize("name", CALLED_X)
def test_tokens_may_have_another_name(name):
    m, steps = runs_as_before(name)
    assert CALLED_X[name] in str(steps) and steps.reason is None
    assert traced(m.model)


def test_unpatch_restores_a_split_model_and_no_array_is_copied():
    m = family("phi3")
    before = [(id(x), type(x)) for _, x in m.named_modules()]
    arrays = [id(a) for _, a in arrays_of(m)]
    want = run(m, [1, 3])
    mlx_phase.patch(m, check=False)
    used = mx.get_active_memory()
    run(m, [1, 3])
    mx.synchronize()
    weights = sum(a.nbytes for _, a in arrays_of(m.layers[0].self_attn))
    # Rows of one matrix are views of it.
    assert mx.get_active_memory() - used < weights
    mlx_phase.unpatch(m)
    assert [(id(x), type(x)) for _, x in m.named_modules()] == before
    assert [id(a) for _, a in arrays_of(m)] == arrays
    np.testing.assert_array_equal(run(m, [1, 3]), want)


def arrays_of(m) -> list:
    return tree_flatten(m.parameters())


def test_new_weights_are_seen_through_views_and_shifted_norms():
    for name in ("phi3", "gemma3_text"):
        m = family(name)
        mlx_phase.patch(m, check=False)
        other, cache = family(name), make_prompt_cache(m)
        run(m, [1])
        m(TOKENS[:, :4], cache=cache)
        m(TOKENS[:, 4:5], cache=cache)
        for x in (m, other):
            norm = x.layers[1].post_attention_layernorm
            norm["weight"] = norm["weight"] * 2
            layer = x.layers[0].self_attn[{"phi3": "qkv_proj"}.get(name, "k_proj")]
            layer["scales"] = layer["scales"] * 1.5
        plain, fork = copy.deepcopy(cache), copy.deepcopy(cache)
        want = other(TOKENS[:, 5:6], cache=plain)
        np.testing.assert_allclose(m(TOKENS[:, 5:6], cache=fork), want, atol=1e-4)


def test_gelu_is_told_from_its_tanh_form():
    for name, activation in (("gemma", "gelu"), ("gemma3_text", "gelu_approx")):
        m = family(name)
        mlx_phase.patch(m, check=False)
        assert {b._fused.activation for b in m.layers} == {activation}


def test_adapted_layers_are_left_alone_and_named():
    m = family("phi3")
    mlx_phase.patch(m, check=False)
    layer = m.layers[0].self_attn
    adapter = LoRALinear.from_base(layer.qkv_proj, r=4)
    adapter.lora_b = 0.1 * mx.random.normal(adapter.lora_b.shape)
    layer.qkv_proj = adapter
    have = run(m, [1])
    report = mlx_phase.patch(m, check=False)
    assert "1 not fused (qkv_proj (LoRALinear) is no quantised" in str(report.steps)
    np.testing.assert_allclose(run(m, [1]), have, atol=1e-4)
    mlx_phase.unpatch(m)
    np.testing.assert_allclose(run(m, [1]), have, atol=1e-4)


def test_a_block_trains_as_stock():
    m = family("phi3")
    mlx_phase.patch(m, check=False)
    cache = make_prompt_cache(m)
    m(TOKENS[:, :4], cache=cache)
    m.train()
    ops.reset_served()
    m(TOKENS[:, 4:5], cache=cache)
    assert not ops.served().kernels
