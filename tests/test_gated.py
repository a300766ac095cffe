"""Gate, up and activation of an MLP in one launch, where its block is not fused."""

import copy
import importlib
import pickle

import cases
import fused_case
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import tolerance
from mlx_lm.models import gemma3_text, llama, phi3
from test_fuse import TOKENS, doubled, model
from test_parents import traceable  # noqa: F401

import mlx_phase
from mlx_phase import gated, layers, ops
from mlx_phase.block_match import FUNCTIONS, glu_names
from mlx_phase.parents import adopt_parent

launch_module = importlib.import_module("mlx_phase.block_launch")
ALONE = {"attention": False, "steps": False, "check": False}
FUSED = "gate, up and activation"


@pytest.fixture
def glu(traceable, monkeypatch):  # noqa: F811
    """A launch that mx.compile can trace: stock's products; how often it was built."""
    calls = []

    def prepare_glu(p, activation, eps):
        def launch(x, *w):
            calls.append(activation)
            if eps is not None:
                norm, *w = w
                x = mx.fast.rms_norm(x, norm, eps)
            gate, up = (
                mx.quantized_matmul(x, *w[i : i + 3], True, p.group_size, p.bits)
                for i in (0, 3)
            )
            return FUNCTIONS[activation](gate) * up * launch.scale

        launch.scale = scale[0]
        return launch

    scale = [1.0]
    monkeypatch.setattr(launch_module, "prepare_glu", prepare_glu)
    prepare_glu.scale, prepare_glu.calls = scale, calls
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


class Clipped(llama.MLP):
    def __call__(self, x):
        gate = mx.minimum(self.gate_proj(x), 1.0)
        return self.down_proj(nn.silu(gate) * self.up_proj(x))


class Scaled(llama.MLP):
    def __call__(self, x):
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x) * 1.1)


@pytest.mark.parametrize("kind", [Clipped, Scaled])
def test_other_activations_keep_their_code(glu, kind):
    mlp = kind(llama_args())
    nn.quantize(mlp, group_size=64, bits=4)
    right = mlp(4 * mx.ones((1, 1, 128)))
    report = mlx_phase.patch(mlp, **ALONE)
    assert report.traced and FUSED not in report.shared
    assert mx.allclose(mlp(4 * mx.ones((1, 1, 128))), right, rtol=1e-4).item()


def test_a_launch_that_is_wrong_does_not_serve(glu):
    glu.scale[0] = 1.05
    report = mlx_phase.patch(model(), **ALONE)
    assert report.traced and FUSED not in report.shared and glu.calls


def test_one_that_goes_off_is_off_for_every_number_of_rows(glu):
    m = model()
    right = m(TOKENS)
    mlx_phase.patch(m, **ALONE)
    one = m(TOKENS[:, :1])
    name = next(n for n in [*ops.served().kernels] if n.startswith("qmv_glu"))
    ops.disable(name, "for this test")
    try:
        for call, want in (
            (lambda: m(TOKENS[:, :1]), one),
            (lambda: m(TOKENS), right),
        ):
            assert mx.abs(call() - want).max().item() < 1e-5
            assert "qmv_glu" not in kernels(call)
    finally:
        ops.enable_all()


def test_weights_activations_and_copies(glu):
    x, mlp = mx.ones((1, 1, 128)), mlp_of("gelu_approx")
    mlx_phase.patch(mlp, **ALONE)
    y = mlp(x)
    doubled(mlp.down_proj)
    assert mx.allclose(mlp(x), 2 * y, rtol=1e-4).item()
    doubled(mlp.up_proj)
    assert mx.allclose(mlp(x), 4 * y, rtol=1e-4).item()
    for twin in (pickle.loads(pickle.dumps(mlp)), copy.deepcopy(mlp), copy.copy(mlp)):
        assert not isinstance(twin, gated.Gated)
        assert mx.allclose(twin(x), 4 * y, rtol=1e-4).item()
    mlp.eval()
    assert isinstance(mlp, gated.Gated)
    mlp.activation = nn.relu  # its own code knows what it is for
    assert not isinstance(mlp, gated.Gated)
    # Of x in another dtype the layers decide.
    mlx_phase.patch(mlp, **ALONE)
    assert mx.allclose(mlp(x.astype(mx.float16)), 4 * y, rtol=1e-2).item()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["silu", "one matrix"])
def test_on_the_kernels(dtype, kind):
    """The launch itself, whose rows have the bits of single rows."""
    mlp = mlp_of(kind)
    mlp.set_dtype(getattr(mx, dtype))
    for layer in mlp.children().values():
        layers.adopt(layer)
    adopt_parent(mlp, list(mlp.children().values()))
    assert gated._agrees(mlp, glu_names(mlp), "silu", 3, 128, getattr(mx, dtype))
    assert not gated._agrees(mlp, glu_names(mlp), "gelu", 3, 128, getattr(mx, dtype))
    gated.gate_parent(mlp, "silu")
    x = cases.activations(5, 128, dtype)
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
