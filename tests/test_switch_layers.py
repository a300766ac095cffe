"""Experts of tiny random models on the kernels: logits, traces, new weights, back."""

import copy
import math
import pickle

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tolerance
from block_models import family
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.gemma4_text import GeGLU
from mlx_lm.models.step3p5 import ClampedSwiGLU
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchMLP

import mlx_phase
from mlx_phase import ops, patch_experts, step_patch, switch_layers
from mlx_phase.switch_layers import Gate, gate_of

TOKENS = mx.random.randint(0, 96, (1, 60), key=mx.random.key(4))
# Experts alone: the rest of a model has tests of its own.
ONLY = {"attention": False, "steps": False}


def run(model: nn.Module) -> mx.array:
    """Logits of a prompt of 40 tokens, one token and three."""
    caches, outs = make_prompt_cache(model), []
    for start, stop in ((0, 40), (40, 41), (41, 44)):
        outs.append(model(TOKENS[:, start:stop], cache=caches))
        mx.eval(outs[-1])
    return mx.concatenate(outs, axis=1)


def close(a: mx.array, b: mx.array, limit: float = 2e-5) -> None:
    np.testing.assert_allclose(a, b, atol=limit * mx.abs(b).max().item(), rtol=0)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "qwen3_moe"])
def test_models_give_the_same_logits(name):
    model = family(name).eval()
    want = run(model)
    kinds = {id(m): type(m) for _, m in model.named_modules()}
    blocks = sum(kind is SwitchGLU for kind in kinds.values())
    report = mlx_phase.patch(model, **ONLY)
    assert report.by_kind["QuantizedSwitchLinear"] == 3 * blocks and not report.failed
    assert report.shared["gate_proj + up_proj + activation"] == blocks
    assert not [m for m in report.left if "Switch" in m.kind]
    ops.reset_served()
    close(run(model), want)
    calls = {}
    for kernel, n in ops.served().kernels.items():
        calls[kernel.split()[0]] = calls.get(kernel.split()[0], 0) + n
    # Two launches a block: a prompt in tiles, two steps.
    assert calls["gather_qmm_glu"] == calls["gather_qmm"] == blocks
    assert calls["gather_glu"] == calls["gather_qmv"] == 2 * blocks
    assert mlx_phase.unpatch(model).by_kind["QuantizedSwitchLinear"] == 3 * blocks
    assert {id(m): type(m) for _, m in model.named_modules()} == kinds
    tolerance.assert_bits(run(model), want)


def block(activation=None, seed: int = 0, **form) -> SwitchGLU:
    mx.random.seed(seed)
    options = {} if activation is None else {"activation": activation}
    m = SwitchGLU(128, 64, 4, **options)
    nn.quantize(m, **(form or {"group_size": 64, "bits": 4}))
    return m.eval()


def inputs(rows: int, k: int = 2) -> tuple[mx.array, mx.array]:
    x = mx.random.normal((1, rows, 128), key=mx.random.key(rows))
    scores = mx.random.normal((1, rows, 4), key=mx.random.key(rows + 1))
    # As models make them: a slice of a longer array.
    return x, mx.argpartition(scores, kth=-k, axis=-1)[..., -k:]


def test_rows_have_the_bits_of_single_rows():
    m, (x, indices) = block(), inputs(16)
    mlx_phase.patch(m)
    whole = m(x, indices)
    for i in range(0, 16, 3):
        tolerance.assert_bits(
            m(x[:, i : i + 1], indices[:, i : i + 1]), whole[:, i : i + 1]
        )


def test_new_weights_are_used():
    m, other, (x, indices) = block(), block(seed=1), inputs(3)
    want = other(x, indices)
    mlx_phase.patch(m)
    m(x, indices)
    m.update(other.parameters())
    close(m(x, indices), want)
    m["up_proj"] = block(seed=2)["up_proj"]
    # Another layer, which is stock: so is the block.
    assert type(m) is SwitchGLU
    close(m(x, indices), type(m).__call__(copy.deepcopy(m), x, indices))


def test_prompts_of_one_plan_are_looked_up_once(monkeypatch):
    m, stock, asked = block(), block(), []
    mlx_phase.patch(m)
    real = switch_layers.experts_call
    kept = lambda *a: asked.append(a[-1].shape) or real(*a)  # noqa: E731
    monkeypatch.setattr(switch_layers, "experts_call", kept)
    for rows, k in ((20, 2), (31, 2), (30, 1), (20, 2), (70, 2)):
        x, indices = inputs(rows, k)
        close(m(x, indices), stock(x, indices))
        flat = x.reshape(-1, 128), indices.reshape(-1, k)
        close(m(*flat), stock(*flat))
    assert asked == [(1, 20, 2), (1, 30, 1), (1, 70, 2)]
    m.update(block(seed=1).parameters())
    close(m(x, indices), block(seed=1)(x, indices))


def odd(up: mx.array, gate: mx.array) -> mx.array:
    return mx.tanh(gate) * up


class Odd(nn.Module):
    __call__ = staticmethod(odd)


@pytest.mark.parametrize("activation", [Odd(), odd], ids=["module", "function"])
def test_a_new_activation_is_used(activation):
    m, (x, indices) = block(), inputs(3)
    mlx_phase.patch(m)
    m(x, indices)
    m.activation = activation
    close(m(x, indices), SwitchGLU.__call__(copy.deepcopy(m), x, indices))
    assert type(m) is SwitchGLU


@pytest.mark.parametrize("shape", [(5,), (4, 1), (1, 4, 2), (2, 20)])
def test_one_expert_a_token_in_any_shape_of_tokens(shape, engaged):
    m = block()
    x = mx.random.normal((*shape, 128), key=mx.random.key(1))
    indices = mx.random.randint(0, 4, (*shape, 1), key=mx.random.key(2))
    want = m(x, indices)
    mlx_phase.patch(m)
    with engaged("gather_", 2):
        y = m(x, indices)
    close(y, want)
    if math.prod(shape) > 16:
        return
    rows = (a.reshape(1, -1, a.shape[-1])[:, -1:] for a in (x, indices))
    tolerance.assert_bits(m(*rows).reshape(-1), y.reshape(-1, 128)[-1])


def test_a_patch_that_fails_leaves_the_blocks_as_they_were(monkeypatch):
    def fail(*_):
        raise RuntimeError("no steps")

    m = block()
    monkeypatch.setattr(step_patch, "install", fail)
    with pytest.raises(RuntimeError, match="no steps"):
        mlx_phase.patch(m)
    assert type(m) is SwitchGLU and type(m["up_proj"]) is QuantizedSwitchLinear


def test_training_and_a_kernel_that_is_off_give_it_to_stock():
    m, (x, indices) = block(), inputs(3)
    want = m(x, indices)
    report = mlx_phase.patch(m)
    m.train()
    ops.reset_served()
    tolerance.assert_bits(m(x, indices), want)
    assert list(ops.served()) == [
        "layer in training mode: the kernels have no gradient"
    ]
    m.eval()
    close(m(x, indices), want)
    for checked in report.kernels:
        ops.disable(checked.kernel, "test")
    ops.reset_served()
    tolerance.assert_bits(m(x, indices), want)
    assert not ops.served().kernels
    # The block remembers that stock serves; its layers hear of kernels again.
    ops.enable_all()
    close(m(x, indices), want)
    assert ops.served().kernels


def test_copies_are_stock_outside_and_on_their_own():
    m, (x, indices) = block(), inputs(2)
    mlx_phase.patch(m)
    want = m(x, indices)
    for twin in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert type(twin) is SwitchGLU
        close(twin(x, indices), want)
        twin["gate_proj"]["scales"] = twin["gate_proj"]["scales"] * 0
    tolerance.assert_bits(m(x, indices), want)


def test_other_blocks_share_no_launch_but_use_the_layers(engaged):
    """An activation that no kernel has, and an MLP of experts without a gate."""
    mx.random.seed(0)
    mlp = SwitchMLP(128, 64, 4)
    nn.quantize(mlp, group_size=64, bits=4)
    odd = block(activation=lambda up, gate: mx.tanh(gate) * up)
    for m in (odd, mlp.eval()):
        # From 64 pairs on they are sorted.
        for rows in (2, 33):
            x, indices = inputs(rows)
            want = m(x, indices)
            assert not mlx_phase.patch(m).shared
            with engaged("gather_qm"):
                close(m(x, indices), want)
            mlx_phase.unpatch(m)


def test_defaults_of_a_mode_are_reported():
    # mlx-lm's layers keep None where `nn.quantize` was given nothing.
    for form in ({"mode": "mxfp4"}, {"bits": 4}):
        report = mlx_phase.patch(block(**form), check=False)
        (format,) = {layer.format for layer in report.replaced}
        assert format.startswith(f"{form.get('mode', 'affine')} 4-bit g")
        assert "None" not in format


def test_what_stays_stock_is_named():
    m = block()
    reasons = {layer.reason for layer in mlx_phase.patch(m, linear=False).left}
    assert reasons == {"linear=False"} and type(m) is SwitchGLU
    m["gate_proj"]["scales"] = m["gate_proj"]["scales"].astype(mx.float16)
    report = mlx_phase.patch(m)
    assert [(r.path, r.kind) for r in report.left] == [
        ("gate_proj", "QuantizedSwitchLinear")
    ]
    assert "mixed dtypes" in report.left[0].reason and not report.shared
    # One of another shape would be read beyond its end.
    m["down_proj"]["bias"] = mx.zeros((4, 8))
    with pytest.raises(ValueError, match="bias has shape"):
        m["down_proj"](mx.zeros((1, 1, 64)), mx.zeros((1, 2), mx.uint32))
    assert type(m["up_proj"]) is not QuantizedSwitchLinear


def test_activations_are_known_by_what_they_give():
    assert gate_of(block().activation) == Gate("silu")
    assert gate_of(GeGLU()) == Gate("gelu_approx")
    assert gate_of(family("gpt_oss").layers[0].mlp.experts.activation) == (
        Gate("clipped", 1.702, 7.0)
    )
    assert gate_of(lambda up, gate: nn.gelu(gate) * up) is None
    assert gate_of(ClampedSwiGLU(16.0)) is None
    assert gate_of(lambda up: up) is None


def test_a_block_that_differs_from_stock_shares_no_launch(monkeypatch):
    monkeypatch.setattr(patch_experts, "gate_of", lambda _: Gate("gelu_approx"))
    m, (x, indices) = block(), inputs(2)
    want = m(x, indices)
    assert not mlx_phase.patch(m).shared
    close(m(x, indices), want)
