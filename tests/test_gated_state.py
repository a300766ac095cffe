"""What ends the launch that gate, up and activation share, and what does not."""

import copy
import importlib
import pickle

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama
from test_fuse import TOKENS, doubled, model
from test_gated import ALONE, glu, kernels, launch_module, mlp_of  # noqa: F401
from test_parents import traceable  # noqa: F401

import mlx_phase
from mlx_phase import gated, ops, step_patch

fuse_module = importlib.import_module("mlx_phase.fuse")
pytestmark = pytest.mark.usefixtures("glu")


def test_one_that_goes_off_is_off_for_every_number_of_rows():
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


def test_weights_activations_and_copies():
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


def test_rows_that_need_not_be_exact_are_traced_once(monkeypatch):
    """Several rows go to matrix units, which no fused launch has."""
    made = []
    compiled = mx.compile
    mlp = mlp_of("silu")
    mlx_phase.patch(mlp, exact=False, **ALONE)
    monkeypatch.setattr(launch_module, "apart", lambda ps, exact: ps[0].M > 1)
    monkeypatch.setattr(mx, "compile", lambda f: made.append(f) or compiled(f))
    xs = [mx.ones((1, n, 128)) for n in (1, 4)]
    for x in xs:
        mlp(x)
    count = len(made)
    for x in xs * 3:
        mlp(x)
    assert len(made) == count and isinstance(mlp, gated.Gated)
    assert kernels(lambda: mlp(xs[0])) == {"qmv_glu": 1, "qmv": 1}
    assert "qmv_glu" not in kernels(lambda: mlp(xs[1]))


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_a_layer_in_training_is_stock(name):
    mlp, x = mlp_of("silu"), mx.ones((1, 1, 128))
    mlx_phase.patch(mlp, **ALONE)
    y = mlp(x)
    mlp[name].train()
    assert mx.abs(mlp(x) - y).max().item() < 1e-5
    assert "qmv_glu" not in kernels(lambda: mlp(x))
    mlp[name].eval()
    assert "qmv_glu" in kernels(lambda: mlp(x))


def test_patched_leaves_gates_as_they_were():
    m = model()
    mlx_phase.patch(m, **ALONE)
    with mlx_phase.patched(m, check=False) as report:
        assert report.steps.blocks
    assert all(isinstance(block.mlp, gated.Gated) for block in m.layers)
    with mlx_phase.patched(m, linear=False, check=False):
        pass
    assert all(isinstance(block.mlp, gated.Gated) for block in m.layers)
    mlx_phase.unpatch(m)
    with mlx_phase.patched(m, **ALONE):
        assert isinstance(m.layers[0].mlp, gated.Gated)
    assert type(m.layers[0].mlp) is llama.MLP


def test_a_patch_that_is_cut_off_leaves_no_steps(monkeypatch):
    def cut(*_):
        raise KeyboardInterrupt

    m = model()
    m.layers[1].mlp = mlp_of("one matrix")  # of another structure than its block's
    m.layers[1].extra = nn.Linear(2, 2)
    right = m(TOKENS)
    monkeypatch.setattr(fuse_module, "judge", cut)
    with pytest.raises(KeyboardInterrupt):
        mlx_phase.patch(m, check=False)
    assert not any(step_patch.installed(x) for _, x in m.named_modules())
    assert mx.abs(m(TOKENS) - right).max().item() < 1e-6


def test_a_patch_that_is_cut_off_leaves_launches(monkeypatch):
    m = model()
    mlx_phase.patch(m, **ALONE)
    real, seen = fuse_module.judge, []

    def cut(*args):
        seen.append(args)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(fuse_module, "judge", cut)
    with pytest.raises(KeyboardInterrupt):
        mlx_phase.patch(m, **ALONE)
    assert all(isinstance(block.mlp, gated.Gated) for block in m.layers)


def test_old_weights_are_let_go():
    mlp, x = mlp_of("one matrix"), mx.ones((1, 1, 128))
    mlx_phase.patch(mlp, **ALONE)
    mlp(x)
    name = next(n for n in [*ops.served().kernels] if n.startswith("qmv_glu"))
    ops.disable(name, "for this test")
    try:
        mlp(x)
        assert not mlp._memo
    finally:
        ops.enable_all()
