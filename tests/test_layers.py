"""Drop-in layers: reports P2 and P3, sharded, training, new weights, the report."""

import copy
import json
from pickle import dumps, loads

import cases
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import ref
from mlx.nn.layers.distributed import (
    QuantizedAllToShardedLinear,
    QuantizedShardedToAllLinear,
)
from mlx_lm.models.switch_layers import QuantizedSwitchLinear
from mlx_lm.tuner.lora import LoRALinear
from tolerance import assert_bits, assert_close

import mlx_phase
from mlx_phase import layers, ops, patch_report
from mlx_phase.check import Checked


def close(a, b, limit=1e-4):
    a, b = ref.to_numpy(a), ref.to_numpy(b)
    return a.shape == b.shape and np.abs(a - b).max() <= limit * np.abs(b).max()


class Chain(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = list(parts)

    def __call__(self, x):
        for part in self.parts:
            x = part(x)
        return x


def quantised(n, k, bias=False, **kwargs):
    return nn.QuantizedLinear.from_linear(nn.Linear(k, n, bias=bias), **kwargs)


def mixed_model():
    mx.random.seed(3)
    return Chain(
        quantised(96, 128, True, group_size=64, bits=4),
        quantised(64, 96, group_size=32, bits=8),
        quantised(48, 64, True, group_size=32, bits=4, mode="mxfp4"),
        nn.Linear(48, 40),
    ).eval()


def test_p2_each_layer_has_its_own_format():
    model, x = mixed_model(), cases.activations(1, 128)
    report = mlx_phase.patch(model)
    assert [layer.format.split(" float32")[0] for layer in report.replaced] == [
        "affine 4-bit g64",
        "affine 8-bit g32",
        "mxfp4 4-bit g32 uint8 scales",
    ]
    (plain,) = report.left
    assert (plain.path, plain.kind) == ("parts.3", "Linear")
    assert "plain weights" in plain.reason
    y = x
    for m in model.parts[:3]:
        q = (m.weight, m.scales, m.get("biases"), m.group_size, m.bits, m.mode)
        weight = ref.dequantize(*q)
        right, dense = (f(y, weight, *a) for f, a in MATMULS)
        bias = ref.to_numpy(m["bias"]) if "bias" in m else 0
        y = m(y)
        assert_close(y, right + bias, dense + bias, "float32")
    assert len(ops.served().kernels) == 3 and not ops.served().stock


MATMULS = ((ref.matmul, ()), (ref.dense, ("float32",)))


def test_p2_linear_all_takes_plain_weights_too():
    model, x = mixed_model(), cases.activations(1, 128)
    stock = model(x)
    report = mlx_phase.patch(model, linear="all")
    assert report.by_kind == {"QuantizedLinear": 3, "Linear": 1} and not report.left
    assert close(model(x), stock)
    assert sum(ops.served().kernels.values()) == 4 and not ops.served().stock
    tied, index = nn.Embedding(40, 128), mx.array([[3]])
    report = mlx_phase.patch(tied, linear="all")
    assert report.by_kind == {"Embedding": 1}
    assert close(tied.as_linear(x), x @ tied.weight.T)
    assert_bits(tied(index), tied.weight[index])


def test_a_shared_layer_is_one_layer():
    layer = quantised(128, 128, group_size=64, bits=4)
    report = mlx_phase.patch(Chain(layer, layer))
    assert report.n_replaced == 1 and layers.adopted(layer)
    model = Chain(layer, layer)
    assert mlx_phase.unpatch(model).n_restored == 1


class Scaled(nn.QuantizedLinear):
    def __call__(self, x):
        return 2 * super().__call__(x)


def test_p3_subclasses_are_left_and_named():
    scaled = Scaled(128, 96)
    experts = QuantizedSwitchLinear(128, 96, 4).eval()
    lora = LoRALinear.from_base(quantised(96, 128, group_size=64, bits=4))
    model, x = Chain(scaled, experts, lora), cases.activations(1, 128)
    index = mx.array([[1, 3]])
    stock = scaled(x), experts(x[:, None, None], index), lora(x)
    report = mlx_phase.patch(model)
    left = {layer.path: (layer.kind, layer.reason) for layer in report.left}
    assert left["parts.0"][0] == "Scaled" and "subclass" in left["parts.0"][1]
    # The stock layer inside LoRA is served; LoRA itself is untouched.
    assert [r.path for r in report.replaced] == ["parts.2.linear", "parts.1"]
    assert type(scaled) is Scaled and type(lora) is LoRALinear
    assert_bits(scaled(x), stock[0])
    assert close(experts(x[:, None, None], index), stock[1])
    assert close(lora(x), stock[2])


@pytest.mark.parametrize(
    "kind", [QuantizedAllToShardedLinear, QuantizedShardedToAllLinear]
)
def test_sharded_linears(kind, engaged):
    mx.random.seed(4)
    model, x = kind(128, 96), cases.activations(2, 128)
    model.bias = mx.arange(96).astype(mx.float32)
    stock, before = model(x), {k: id(v) for k, v in model.items()}
    assert mlx_phase.patch(model).by_kind == {kind.__name__: 1}
    with engaged("qmv", 1):
        assert close(model(x), stock)
    mlx_phase.unpatch(model)
    assert type(model) is kind and {k: id(v) for k, v in model.items()} == before


def test_training_goes_through_stock():
    model = Chain(quantised(96, 128, group_size=64, bits=4)).eval()
    x = cases.activations(1, 128)
    mlx_phase.patch(model)
    model(x)
    model.train()
    ops.reset_served()
    grad = mx.grad(lambda x: model(x).sum())(x)
    assert grad.shape == x.shape and mx.isfinite(grad).all().item()
    assert list(ops.served()) == [layers.TRAINING]
    model.eval()
    ops.reset_served()
    model(x)
    assert ops.served().kernels and not ops.served().stock


def test_each_dtype_of_x_has_its_own_kernel():
    layer = quantised(96, 128, group_size=32, bits=4, mode="mxfp4")
    x = cases.activations(1, 128)
    mlx_phase.patch(layer)
    for dtype in (mx.float16, mx.float32, mx.bfloat16, mx.float16):
        assert layer(x.astype(dtype)).dtype == dtype
    assert len(ops.served().kernels) == 3 and not ops.served().stock


def test_new_weights_get_new_routes():
    layer, x = quantised(96, 128, group_size=64, bits=4), cases.activations(1, 128)
    mlx_phase.patch(layer)
    layer(x)
    layer.set_dtype(mx.float16)
    half = layer(x.astype(mx.float16))
    assert half.dtype == mx.float16
    other = quantised(40, 128, group_size=64, bits=4)
    layer.update(other.parameters())
    assert close(layer(x), other(x))


def test_prompts_of_one_plan_are_looked_up_once(monkeypatch):
    layer, asked = quantised(96, 128, group_size=64, bits=4), []
    mlx_phase.patch(layer)
    choose = layers.PhaseQuantizedLinear._choose
    kept = lambda self, x: asked.append(x.shape) or choose(self, x)  # noqa: E731
    monkeypatch.setattr(layers.PhaseQuantizedLinear, "_choose", kept)
    ops.reset_served()
    for shape in [(20, 128), (1, 31, 128), (2, 10, 128), (40, 128), (25, 128)]:
        x = mx.random.normal(shape)
        assert close(layer(x), nn.QuantizedLinear.__call__(layer, x))
    assert asked == [(20, 128), (40, 128)]
    assert sum(ops.served().kernels.values()) == 5
    layer.update(quantised(96, 128, group_size=64, bits=4).parameters())
    assert close(layer(x), nn.QuantizedLinear.__call__(layer, x))
    assert len(asked) == 3
    with pytest.raises(ValueError, match="quantized_matmul"):
        layer(mx.zeros((20, 64)))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: loads(dumps(m))])
def test_patched_layers_can_be_copied_and_pickled(copied):
    layer, x = quantised(96, 128, group_size=64, bits=4), cases.activations(1, 128)
    mlx_phase.patch(layer)
    y = layer(x)
    twin = copied(layer)
    assert_bits(twin(x), y)
    mlx_phase.unpatch(twin)
    assert type(twin) is nn.QuantizedLinear and layers.adopted(layer)


def test_prefill_has_a_kernel_and_bad_x_is_one_error():
    layer = quantised(96, 128, group_size=64, bits=4)
    x = cases.activations(17, 128)
    stock = ref.to_numpy(layer(x))
    mlx_phase.patch(layer)
    assert np.abs(ref.to_numpy(layer(x)) - stock).max() < 1e-5
    (name,) = ops.served()
    assert name.startswith("qmm affine 4-bit g64 float32 BM=")
    assert layer(mx.zeros((1, 0, 128))).shape == (1, 0, 96)
    with pytest.raises(ValueError, match="K = 128"):
        layer(x[:, :64])


def test_a_report_prints_the_brackets_of_errors():
    error = "[k] see [/x.h]"  # rich would take both for markup
    report = patch_report.Report("M", "cpu", "CPU", notes=[error])
    report.kernels.append(Checked("qmv", None, False, float("inf"), 0.0, error))
    report.left.append(patch_report.Layer("a", "QuantizedLinear", "f", error))
    assert str(report).count(error) == 3


def test_report_is_a_table_and_json():
    model = mixed_model()
    report = mlx_phase.patch(model)
    text = str(report)
    for part in ("3 layers replaced, 1 left", "mxfp4", "plain weights", "parts.3"):
        assert part in text
    data = json.loads(json.dumps(report.to_dict()))
    assert (data["n_replaced"], data["n_left"]) == (3, 1)
    assert data["left"][0]["reason"] and all(k["ok"] for k in data["kernels"])
    off = mlx_phase.patch(mixed_model(), linear=False, check=False, attention=False)
    assert off.n_replaced == 0 and off.n_left == 4 and not off.kernels
    assert "check=False" in str(off) and "attention=False" in off.attention
