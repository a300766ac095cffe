"""Modules that only chain drop-ins: when their calls are traced, and when not."""

import importlib
import pickle

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama
from test_fuse import TOKENS, model
from tune_world import entry, store

import mlx_phase
from mlx_phase import ops, tune_store
from mlx_phase.parents import is_pure
from mlx_phase.problem import Matmul

ops_module = importlib.import_module("mlx_phase.ops")
fuse_module = importlib.import_module("mlx_phase.fuse")
parents_module = importlib.import_module("mlx_phase.parents")


class Counts(nn.Module):
    def __call__(self, x):
        self.calls = 1
        return self.a(x)


class Branches(nn.Module):
    def __call__(self, x):
        if self.flag:
            return self.a(x)
        return self.b(x)


class Random(nn.Module):
    def __call__(self, x):
        return self.a(x) * mx.random.uniform()


class TwoInputs(nn.Module):
    def __call__(self, x, cache=None):
        return self.a(x)


def test_purity_is_read_from_the_source():
    for kind in (Counts, Branches, Random, TwoInputs, llama.Attention):
        assert not is_pure(kind), kind
    assert is_pure(llama.MLP)


@pytest.fixture
def traceable(monkeypatch):
    """An executor that mx.compile can trace, as on a GPU; stock computes."""

    def prepare(p, chosen=None):
        return lambda x, w, s, b: mx.quantized_matmul(
            x, w, s, b, True, p.group_size, p.bits
        )

    def prepare_shared(ps, chosen=None):
        one = prepare(ps[0])
        return lambda x, *a: [one(x, *a[3 * i : 3 * i + 3]) for i in range(len(ps))]

    monkeypatch.setattr(ops_module, "_ROUTES", {})
    monkeypatch.setattr(ops_module, "prepare", prepare)
    monkeypatch.setattr(ops_module, "prepare_shared", prepare_shared)
    for module in (ops_module, fuse_module):
        monkeypatch.setattr(module, "executor_name", lambda: "apple")


def test_traced_mlps_count_follow_weights_and_go_back(traceable):
    m = model()
    right = m(TOKENS)
    report = mlx_phase.patch(m, check=False)
    assert report.traced == {"MLP": 2} and report.to_dict()["traced"] == {"MLP": 2}
    for _ in range(2):
        ops.reset_served()
        assert mx.abs(m(TOKENS) - right).max().item() < 1e-5
        calls = {name.split()[0]: n for name, n in ops.served().kernels.items()}
        assert calls == {"qmv_triple": 2, "qmv_pair": 2, "qmv": 5}
    mlp = m.layers[0].mlp
    assert isinstance(mlp, llama.MLP) and mlp._traces
    # Prefill is not traced; its layers count themselves.
    ops.reset_served()
    m(mx.zeros((1, 20), mx.int32))
    assert ops.served().stock and not ops.served().kernels
    x = mx.ones((1, 1, 128))
    y = mlp(x)
    mlp.down_proj.scales = 2 * mlp.down_proj.scales
    mlp.down_proj.biases = 2 * mlp.down_proj.biases
    assert mx.allclose(mlp(x), 2 * y, rtol=1e-4).item()
    twin = pickle.loads(pickle.dumps(mlp))
    assert type(twin) is llama.MLP and mx.allclose(twin(x), 2 * y, rtol=1e-4).item()
    mlp.up_proj = mlp.up_proj  # another child: the trace's ground is gone
    assert type(mlp) is llama.MLP
    mlx_phase.unpatch(m)
    assert {type(block.mlp) for block in m.layers} == {llama.MLP}
    with mlx_phase.patched(m, check=False):
        assert type(m.layers[1].mlp) is not llama.MLP
    assert type(m.layers[1].mlp) is llama.MLP


def test_a_kernel_that_goes_off_ends_its_traces(traceable):
    m = model()
    mlx_phase.patch(m, check=False)
    right = m(TOKENS)
    for name in list(ops.served().kernels):
        ops.disable(name, "for this test")
    ops.reset_served()
    assert mx.abs(m(TOKENS) - right).max().item() < 1e-5
    assert ops.served().stock and not ops.served().kernels


def test_training_goes_round_the_traces(traceable):
    m = model()
    mlx_phase.patch(m, check=False)
    m(TOKENS)
    m.train()
    ops.reset_served()
    m(TOKENS)
    assert not ops.served().kernels
    m.eval()
    m(TOKENS)
    assert ops.served().kernels


def test_a_module_with_a_layer_on_stock_is_not_counted_again(
    traceable, monkeypatch, tmp_path
):
    m = model()
    right = m(TOKENS)
    down = (Matmul(3, 128, 192, "float32"),)
    monkeypatch.setenv("MLX_PHASE_PLANS", str(tmp_path))
    store(tmp_path / tune_store.device_key().file, entry(down, winner="stock"))
    assert "1 to stock" in mlx_phase.patch(m, check=False).tune
    m(TOKENS)

    def counted():
        raise AssertionError("counting walks all routes: once is enough")

    monkeypatch.setattr(parents_module, "counted", counted)
    ops.reset_served()
    assert mx.abs(m(TOKENS) - right).max().item() < 1e-5
    (reason,) = ops.served().stock
    assert "stock wins" in reason and ops.served()[reason] == 2
