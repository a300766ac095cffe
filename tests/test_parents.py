"""Modules that only chain drop-ins: when their calls are traced, and when not."""

import gc
import importlib
import pickle
import weakref

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import llama
from test_fuse import TOKENS, doubled, model
from tune_world import entry, store

import mlx_phase
from mlx_phase import ops, routes, tune_store
from mlx_phase.block_match import FUNCTIONS
from mlx_phase.parents import is_pure
from mlx_phase.problem import Matmul
from mlx_phase.siblings import MAX_UNUSED

ops_module = importlib.import_module("mlx_phase.ops")
fuse_module = importlib.import_module("mlx_phase.fuse")
launch_module = importlib.import_module("mlx_phase.block_launch")
parents_module = importlib.import_module("mlx_phase.parents")


class Counts(nn.Module):
    def __call__(self, x):
        self.calls = 1
        return self.a(x)


class Unpacks(nn.Module):
    def __call__(self, x):
        self.calls, x = 1, x
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
    for kind in (Counts, Unpacks, Branches, Random, TwoInputs, llama.Attention):
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

    def prepare_glu(p, activation, eps):
        halves = prepare_shared((p, p))

        def launch(x, *w):
            if eps is not None:
                norm, *w = w
                x = mx.fast.rms_norm(x, norm, eps)
            gate, up = halves(x, *w)
            return FUNCTIONS[activation](gate) * up

        return launch

    before = dict(routes.ROUTES)
    routes.ROUTES.clear()
    monkeypatch.setattr(launch_module, "prepare_glu", prepare_glu)
    monkeypatch.setattr(ops_module, "prepare", prepare)
    monkeypatch.setattr(ops_module, "prepare_shared", prepare_shared)
    for module in (ops_module, fuse_module):
        monkeypatch.setattr(module, "executor_name", lambda: "apple")
    yield
    routes.ROUTES.clear()
    routes.ROUTES.update(before)


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
    assert {name.split()[0] for name in ops.served().kernels} == {"qmm"}
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
    report = mlx_phase.patch(m, check=False, attention=False)
    assert "1 to stock" in report.tune
    m(TOKENS)

    def counted():
        raise AssertionError("counting walks all routes: once is enough")

    monkeypatch.setattr(parents_module, "counted", counted)
    ops.reset_served()
    assert mx.abs(m(TOKENS) - right).max().item() < 1e-5
    (reason,) = ops.served().stock
    assert "stock wins" in reason and ops.served()[reason] == 2


X = mx.ones((1, 1, 128))


class Chain(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.a, self.b, self.scale = a, b, 1.0

    def __call__(self, x):
        return self.b(self.a(x)) * self.scale


def linear():
    layer = nn.Linear(128, 128, bias=False)
    return nn.QuantizedLinear.from_linear(layer, group_size=64, bits=4)


def follows(parent, layer, x=X):
    """Whether new weights of a layer reach its parent's output."""
    before = parent(x)
    doubled(layer)
    return mx.allclose(parent(x), 2 * before, rtol=1e-4).item()


def test_a_layer_that_went_back_to_stock_ends_the_trace(traceable):
    m = model()
    mlx_phase.patch(m, check=False)
    mlp = m.layers[0].mlp
    mlp(X)
    mlx_phase.unpatch(mlp.down_proj)
    assert follows(mlp, mlp.down_proj)
    mlx_phase.patch(m, check=False)
    assert follows(mlp, mlp.down_proj) and mlp._traces


def test_patched_releases_the_parents_it_traced(traceable):
    m = model()
    mlp = m.layers[0].mlp
    mlx_phase.patch(mlp.gate_proj, check=False)
    with mlx_phase.patched(m, check=False):
        mlp(X)
    assert type(mlp) is llama.MLP and follows(mlp, mlp.down_proj)
    mlx_phase.patch(mlp, check=False)
    with mlx_phase.patched(m, check=False):
        mlp(X)
    assert type(mlp) is not llama.MLP and follows(mlp, mlp.down_proj)


def test_a_layer_of_two_parents_and_plain_attributes_are_followed(traceable):
    shared = linear()
    root = nn.Module()
    root.parts = [Chain(linear(), shared), Chain(linear(), shared)]
    report = mlx_phase.patch(root, check=False)
    assert report.traced == {"Chain": 2}
    for parent in root.parts:
        parent(X)
    assert all(follows(parent, shared) for parent in root.parts)
    # Also of a parent that is patched later, when the first has its traces.
    first = Chain(linear(), linear())
    mlx_phase.patch(first, check=False)
    first(X)
    mlx_phase.patch(Chain(linear(), first.b), check=False)
    assert follows(first, first.b)
    parent = Chain(linear(), linear())
    parent.b.bias = mx.ones(128)
    mlx_phase.patch(parent, check=False)
    y = parent(X)
    parent.scale = 2.0
    assert mx.allclose(parent(X), 2 * y, rtol=1e-5).item()
    del parent.b.bias
    assert mx.allclose(parent(X), 2 * y - 2, atol=1e-5).item()


def test_siblings_that_separate_end_the_traces(traceable):
    m = model()
    mlx_phase.patch(m, check=False)
    mlp = m.layers[0].mlp
    mlp(X)
    for _ in range(MAX_UNUSED + 1):
        mlp.gate_proj(mx.array(X))
    ops.reset_served()
    mlp(X)
    assert {name.split()[0] for name in ops.served().kernels} == {"qmv"}


def test_another_stream_counts_each_call_once(traceable):
    m = model()
    mlx_phase.patch(m, check=False)
    m(TOKENS)
    with mx.stream(mx.new_stream(mx.cpu)):
        ops.reset_served()
        m(TOKENS)
    assert sum(ops.served().kernels.values()) == 9


def test_a_traced_model_that_is_dropped_is_freed_at_once(traceable):
    m = model()
    mlx_phase.patch(m, check=False)
    mx.eval(m(TOKENS))
    refs = [weakref.ref(m.layers[0].mlp), weakref.ref(m.layers[0].mlp.up_proj)]
    gc.collect()
    gc.disable()
    try:
        del m
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()
