"""Gate, up and activation of an MLP in one launch, where its block is not fused."""

import importlib

import cases
import fused_case
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tolerance
from mlx_lm.models import gemma3_text, llama, phi3
from test_fuse import TOKENS, model
from test_parents import traceable  # noqa: F401

import mlx_phase
from mlx_phase import gated, layers, ops
from mlx_phase.block_match import glu_names
from mlx_phase.parents import adopt_parent

launch_module = importlib.import_module("mlx_phase.block_launch")
ALONE = {"attention": False, "steps": False, "check": False}
FUSED = "gate, up and activation"


@pytest.fixture
def glu(traceable, monkeypatch):  # noqa: F811
    """The launch of an executor that can be traced, times ``scale[0]``; ``calls``:
    what it was built for."""
    real = launch_module.prepare_glu

    def prepare_glu(p, activation, eps):
        launch, factor = real(p, activation, eps), prepare_glu.scale[0]

        def call(x, *w):
            prepare_glu.calls.append(activation)
            return launch(x, *w) * factor

        return call

    prepare_glu.scale, prepare_glu.calls = [1.0], []
    monkeypatch.setattr(launch_module, "prepare_glu", prepare_glu)
    return prepare_glu


def kernels(call) -> dict[str, int]:
    """Launches by kernel that a second call counts."""
    call()
    ops.reset_served()
    call()
    return {name.split()[0]: n for name, n in ops.served().kernels.items()}


def mlp_of(kind: str) -> nn.Module:
    mx.random.seed(3)
    mlp = {
        "silu": lambda: llama.MLP(llama_args()),
        "gelu_approx": lambda: gemma3_text.MLP(128, 192),
        "one matrix": lambda: phi3.MLP(128, 192),
    }[kind]()
    nn.quantize(mlp, group_size=64, bits=4)
    return mlp


def llama_args():
    return model().args


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("kind", ["silu", "gelu_approx", "one matrix"])
def test_mlps_share_a_launch(glu, kind, check):
    mlp = mlp_of(kind)
    xs = [mx.random.normal((1, n, 128)) for n in (1, 4)]
    right = [mlp(x) for x in xs]
    report = mlx_phase.patch(mlp, **{**ALONE, "check": check})
    assert report.shared[FUSED] == 1 and isinstance(mlp, gated.Gated)
    for x, want in zip(xs, right, strict=True):
        assert mx.abs(mlp(x) - want).max().item() < 1e-5
        assert kernels(lambda x=x: mlp(x)) == {"qmv_glu": 1, "qmv": 1}
    # Prompts go to the layers.
    assert set(kernels(lambda: mlp(mx.ones((1, 20, 128))))) == {"qmm"}
    mlx_phase.unpatch(mlp)
    assert type(mlp).__mro__[1] is nn.Module


def test_models_with_layers_alone_do_so_and_fused_blocks_do_not(glu):
    m = model()
    right = m(TOKENS)
    report = mlx_phase.patch(m, **ALONE)
    assert report.shared[FUSED] == 2 and FUSED in str(report)
    assert mx.abs(m(TOKENS) - right).max().item() < 1e-5
    assert kernels(lambda: m(TOKENS)) == {"qmv_triple": 2, "qmv": 5, "qmv_glu": 2}
    report = mlx_phase.patch(m, check=False)
    assert report.steps.blocks and FUSED not in report.shared
    assert not any(isinstance(block.mlp, gated.Gated) for block in m.layers)
    report = mlx_phase.patch(m, **ALONE)
    assert report.shared[FUSED] == 2
    mlx_phase.unpatch(m)
    assert {type(block.mlp) for block in m.layers} == {llama.MLP}


class Other(llama.MLP):
    def __call__(self, x):
        return self.down_proj(self._act(self.gate_proj(x), self.up_proj(x)))


class Clipped(llama.MLP):
    def __call__(self, x):
        gate = mx.minimum(self.gate_proj(x), 7.0)
        return self.down_proj(nn.silu(gate) * mx.clip(self.up_proj(x), -7, 7))


class Scaled(llama.MLP):
    def __call__(self, x):
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x) * 1.02)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [Clipped, Scaled])
def test_other_activations_keep_their_code(glu, kind, dtype):
    """Clips that only large values reach, and factors close to 1."""
    mlp = kind(llama_args())
    mlp.set_dtype(getattr(mx, dtype))
    nn.quantize(mlp, group_size=64, bits=4)
    x = 20 * mx.random.normal((1, 1, 128), getattr(mx, dtype))
    right = mlp(x)
    report = mlx_phase.patch(mlp, **ALONE)
    assert report.traced and FUSED not in report.shared
    assert mx.allclose(mlp(x), right, rtol=1e-2, atol=1e-2).item()


def test_blocks_whose_mlp_clips_keep_it():
    """Their norms keep x small when they are compared, and so their gates."""
    m = model()
    for block in m.layers:
        for layer in (block.mlp.gate_proj, block.mlp.up_proj):
            layer.scales, layer.biases = layer.scales / 8, layer.biases / 8
        block.mlp.__class__ = Clipped
    report = mlx_phase.patch(m, check=False)
    assert not report.steps.blocks
    assert all("its activation is none of" in why for why in report.steps.unfused)


def silu(gate, up):
    return nn.silu(gate) * up


def relu(gate, up):
    return nn.relu(gate) * up


class Listed(llama.MLP):
    def __call__(self, x):
        up = self.up_proj(x) * self.factors[0]
        return self.down_proj(nn.silu(self.gate_proj(x)) * up)


def test_each_mlp_is_judged_by_itself(glu):
    """Of one class, with functions under private names and numbers in tuples."""
    mlps = [Other(llama_args()), Other(llama_args()), Listed(llama_args())]
    mlps.append(Listed(llama_args()))
    mlps[0]._act, mlps[1]._act = silu, relu
    mlps[2].factors, mlps[3].factors = (1.0, 1.0), (3.0, 1.0)
    root = nn.Module()
    root.mlps = mlps
    nn.quantize(root, group_size=64, bits=4)
    x = mx.random.normal((1, 1, 128))
    right = [m(x) for m in mlps]
    mlx_phase.patch(root, **ALONE)
    assert [isinstance(m, gated.Gated) for m in mlps] == [True, False, True, False]
    for m, want in zip(mlps, right, strict=True):
        assert mx.abs(m(x) - want).max().item() < 1e-5
    mlps[0]._act, mlps[2].factors = relu, (2.0, 1.0)
    assert not any(isinstance(m, gated.Gated) for m in mlps)
    assert mx.allclose(mlps[2](x), 2 * right[2], rtol=1e-4).item()
    assert not mx.allclose(mlps[0](x), right[0], rtol=1e-2).item()


def test_a_launch_that_is_wrong_does_not_serve(glu):
    glu.scale[0] = 1.05
    report = mlx_phase.patch(model(), **ALONE)
    assert report.traced and FUSED not in report.shared and glu.calls


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["silu", "one matrix"])
def test_on_the_kernels(dtype, kind):
    """The launch itself, whose rows have the bits of single rows."""
    mlp = mlp_of(kind)
    mlp.set_dtype(getattr(mx, dtype))
    for layer in mlp.children().values():
        layers.adopt(layer)
    adopt_parent(mlp, list(mlp.children().values()))
    x = cases.activations(5, 128, dtype)
    assert gated._agrees(mlp, glu_names(mlp), "silu", x)
    assert not gated._agrees(mlp, glu_names(mlp), "gelu", x)
    gated.gate_parent(mlp, "silu")
    ops.reset_served()
    y = mlp._compute(x)
    assert any(name.startswith("qmv_glu") for name in ops.served().kernels)
    for i in range(5):
        tolerance.assert_bits(y[i : i + 1], mlp._compute(x[i : i + 1]))

    def matrix(name: str) -> np.ndarray:
        m = mlp[name]
        return fused_case.matrix(cases.Weights(m.weight, m.scales, m.biases, 64, 4))

    n = fused_case.wide(x)
    both = np.concatenate([n @ matrix(name).T for name in glu_names(mlp)], -1)
    g, u = np.split(both, 2, -1)
    # Between the launches there is one rounding.
    hidden = fused_case.rounded(fused_case.silu(g) * u, dtype).astype(np.float64)
    want = hidden @ matrix("down_proj").T
    tolerance.assert_close(y, want, fused_case.rounded(want, dtype), dtype)
