"""patch, unpatch, patched: public report P1, reversibility, bad input."""

import importlib
import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import ref
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from tolerance import assert_bits

import mlx_phase
from mlx_phase import layers, ops

# The package exports the function under the module's name.
patching = importlib.import_module("mlx_phase.patch")
TOKENS = mx.array([[3]])


def tiny_llama(dtype="float32", seed=0):
    mx.random.seed(seed)
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=128,
        num_hidden_layers=2,
        intermediate_size=192,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=99,
        tie_word_embeddings=True,
    )
    model = llama.Model(args)
    model.set_dtype(getattr(mx, dtype))
    nn.quantize(model, group_size=64, bits=4)
    mx.eval(model.parameters())
    return model.eval()


def snapshot(model):
    """Identity of every module and array, and every class and attribute."""
    return [
        (path, id(m), type(m), sorted(vars(m)), {k: id(v) for k, v in m.items()})
        for path, m in model.named_modules()
    ]


def phase_layers(model):
    return [m for _, m in model.named_modules() if layers.adopted(m)]


def close(a, b, limit=1e-4):
    a, b = ref.to_numpy(a), ref.to_numpy(b)
    return a.shape == b.shape and np.abs(a - b).max() <= limit * np.abs(b).max()


def test_llama_on_the_kernels_is_the_stock_model(engaged):
    model = tiny_llama()
    stock = model(TOKENS)
    report = mlx_phase.patch(model, attention=False)
    # Four launches a layer (q, k, v share one, gate and up too) and the tied head.
    with engaged("qmv", 9):
        ours = model(TOKENS)
    assert close(ours, stock) and ours.dtype == stock.dtype
    assert report.by_kind == {"QuantizedLinear": 14, "QuantizedEmbedding": 1}
    assert not report.left and not report.failed and report.kernels


def test_the_report_is_json_with_fused_blocks_too():
    report = mlx_phase.patch(tiny_llama())
    steps = json.loads(json.dumps(report.to_dict()))["steps"]
    assert steps["blocks"] == {"TransformerBlock": 2} and steps["unfused"] == {}
    assert steps["decoder"] == "Model" and steps["reason"] is None


def test_p1_only_this_model_and_no_function_of_a_model_file_changes():
    attention = llama.scaled_dot_product_attention
    matmul = mx.quantized_matmul
    before, model = tiny_llama(seed=1), tiny_llama()
    report = mlx_phase.patch(model)
    after = tiny_llama(seed=2)
    assert report.n_replaced == len(phase_layers(model)) == 15
    assert not phase_layers(before) and not phase_layers(after)
    assert llama.scaled_dot_product_attention is attention
    assert mx.quantized_matmul is matmul


def test_unpatch_restores_the_identical_objects():
    model = tiny_llama()
    before, stock = snapshot(model), model(TOKENS)
    mlx_phase.patch(model)
    assert snapshot(model) != before
    assert isinstance(model.layers[0].mlp.up_proj, nn.QuantizedLinear)
    model(TOKENS)
    result = mlx_phase.unpatch(model)
    assert snapshot(model) == before
    assert result.n_restored == 15 and "restored 15 layers" in str(result)
    assert_bits(model(TOKENS), stock)


def test_unpatch_without_patch_says_so():
    model = tiny_llama()
    before = snapshot(model)
    result = mlx_phase.unpatch(model)
    assert result.n_restored == 0 and "was not patched" in str(result)
    assert snapshot(model) == before


def test_patch_twice_is_once():
    model = tiny_llama()
    before = snapshot(model)
    mlx_phase.patch(model)
    first = snapshot(model)
    report = mlx_phase.patch(model)
    assert snapshot(model) == first
    assert report.n_replaced == 15 and all(r.already for r in report.replaced)
    mlx_phase.unpatch(model)
    assert snapshot(model) == before


def test_parameters_and_saving_do_not_change(tmp_path):
    model = tiny_llama()
    before = tree_flatten(model.parameters())
    modules = [path for path, _ in model.named_modules()]
    mlx_phase.patch(model)
    model(TOKENS)
    after = tree_flatten(model.parameters())
    assert [(k, id(v)) for k, v in after] == [(k, id(v)) for k, v in before]
    assert [path for path, _ in model.named_modules()] == modules
    model.save_weights(str(tmp_path / "w.safetensors"))
    saved = mx.load(str(tmp_path / "w.safetensors"))
    assert saved.keys() == dict(before).keys()


def test_training_mode_outlives_another_patch():
    model = tiny_llama()
    mlx_phase.patch(model, steps=False, attention=False, check=False)
    model.train()
    mlx_phase.patch(model, check=False)
    cache = make_prompt_cache(model)
    model(mx.array([[1, 2, 3]]), cache=cache)
    ops.reset_served()
    model(TOKENS, cache=cache)
    # Its attention too: in eval mode the reason would be the size of the heads.
    assert ops.served().keys() == {layers.TRAINING}
    model.eval()
    ops.reset_served()
    model(TOKENS, cache=cache)
    assert ops.served().kernels and layers.TRAINING not in ops.served()


def test_patched_restores_on_exceptions():
    model = tiny_llama()
    before = snapshot(model)
    with pytest.raises(KeyError), mlx_phase.patched(model) as report:
        assert report.n_replaced == len(phase_layers(model)) == 15
        raise KeyError("in the block")
    assert snapshot(model) == before


def test_patched_leaves_an_earlier_patch_alone():
    model = tiny_llama()
    mlx_phase.patch(model.layers[0])
    inside = snapshot(model)
    with mlx_phase.patched(model):
        assert len(phase_layers(model)) == 15
    assert len(phase_layers(model)) == 7 and snapshot(model) == inside


@pytest.mark.parametrize("option", ["steps", "attention", "linear"])
def test_patched_gives_the_steps_of_an_earlier_patch_back(option):
    model = tiny_llama()
    mlx_phase.patch(model.model, check=False)  # the model around it has no trace
    inside = kinds(model)
    assert inside != kinds(tiny_llama())
    with mlx_phase.patched(model, check=False, **{option: False}):
        assert kinds(model) != inside
    assert kinds(model) == inside
    with mlx_phase.patched(model, check=False, **{option: False}):
        mlx_phase.unpatch(model)
    assert kinds(model) == kinds(tiny_llama())


def kinds(model):
    return [type(m) for _, m in model.named_modules()]


def test_failure_in_the_middle_leaves_nothing_patched(monkeypatch):
    model = tiny_llama()
    before, done = snapshot(model), []

    def adopt(layer):
        if len(done) == 3:
            raise MemoryError("planted")
        done.append(layer)
        layers.adopt(layer)

    monkeypatch.setattr(patching, "adopt", adopt)
    with pytest.raises(MemoryError):
        mlx_phase.patch(model)
    assert len(done) == 3 and snapshot(model) == before


@pytest.mark.parametrize("model", [(nn.Linear(2, 2), "tokenizer"), None, "name"])
def test_not_a_model_is_a_type_error(model):
    for call in (mlx_phase.patch, mlx_phase.unpatch):
        with pytest.raises(TypeError, match="not an mlx.nn.Module"):
            call(model)
    with pytest.raises(TypeError), mlx_phase.patched(model):
        pass


@pytest.mark.parametrize(
    "option",
    [
        {"linear": "some"},
        {"check": "twice"},
        {"tune": "always"},
        {"attention": "off"},
        {"exact": None},
        {"steps": 3},
    ],
)
def test_unknown_option_is_a_value_error(option):
    model = tiny_llama()
    with pytest.raises(ValueError, match=next(iter(option))):
        mlx_phase.patch(model, **option)
    assert not phase_layers(model)


def test_mixed_dtypes_are_reported_and_served_by_stock():
    model = tiny_llama("bfloat16")
    odd = model.layers[1].mlp.down_proj
    odd.scales, odd.biases = (a.astype(mx.float16) for a in (odd.scales, odd.biases))
    layer = model.layers[0].mlp.down_proj
    layer.biases = layer.biases.astype(mx.float32)
    stock = model(TOKENS)
    report = mlx_phase.patch(model)
    assert "layers.1.mlp.down_proj" in report.notes[0] and "bfloat16" in report.notes[0]
    (left,) = report.left
    assert left.path.endswith("layers.0.mlp.down_proj") and "float32" in left.reason
    assert model(TOKENS).dtype == stock.dtype
    assert any("mixed dtypes" in reason for reason in ops.served().stock)


def test_an_interrupt_while_shared_kernels_are_checked_leaves_nothing(monkeypatch):
    model = tiny_llama()
    before = snapshot(model)

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(
        importlib.import_module("mlx_phase.fuse"), "_passes", interrupted
    )
    with pytest.raises(KeyboardInterrupt):
        mlx_phase.patch(model, check=False)
    assert snapshot(model) == before
