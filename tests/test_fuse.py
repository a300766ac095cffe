"""Layers that read the same x share a launch."""

import copy
import gc
import importlib
import pickle
import weakref

import cases
import mlx.core as mx
import mlx.nn as nn
import pytest
import tolerance
from mlx_lm.models import llama

import mlx_phase
from mlx_phase import chip, layers, ops
from mlx_phase.launch import matmul
from mlx_phase.plan import plan_shared, supports_shared
from mlx_phase.problem import Matmul
from mlx_phase.siblings import MAX_UNUSED, shares_x

NS = {2: (24, 5), 3: (33, 4, 9)}


def model(dtype=mx.float32, **options) -> llama.Model:
    """A llama of two blocks with 4-bit weights."""
    mx.random.seed(0)
    args = {"model_type": "llama", "hidden_size": 128, "num_hidden_layers": 2}
    args |= {"intermediate_size": 192, "num_attention_heads": 4, "vocab_size": 96}
    args |= {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e4}
    m = llama.Model(llama.ModelArgs.from_dict(args | options))
    m.set_dtype(dtype)
    nn.quantize(m, group_size=64, bits=4)
    mx.eval(m.parameters())
    return m


TOKENS = mx.array([[3, 1, 4]])


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("M", [1, 5])
def test_one_launch_has_the_bits_of_single_launches(count, dtype, M):
    K = 320
    qs = [cases.random_weights(n, K, dtype=dtype, seed=n) for n in NS[count]]
    members = tuple(Matmul(M, n, K, dtype) for n in NS[count])
    x = cases.activations(M, K, dtype)
    ys = matmul.prepare_shared(members)(x, *(a for q in qs for a in q.args))
    for member, q, y in zip(members, qs, ys, strict=True):
        tolerance.assert_bits(y, matmul.prepare(member)(x, *q.args))


def test_only_what_fits_shares_a_launch():
    a, b = Matmul(1, 64, 128), Matmul(1, 8, 128)
    assert supports_shared((a, b)) is None
    for bad, why in [
        ((a,), "matrices"),
        ((a, b, a, b), "matrices"),
        ((a, Matmul(1, 8, 64)), "more than N"),
        ((a, Matmul(1, 8, 128, bits=8)), "more than N"),
        ((a, Matmul(1, 2, 128)), "too small"),
        ((Matmul(1, 8, 64, bits=4, group_size=32, mode="mxfp4"),) * 2, "affine"),
        ((Matmul(17, 64, 128),) * 2, "M = 17"),
    ]:
        assert why in supports_shared(bad)
        with pytest.raises(ValueError, match=why):
            plan_shared(bad, chip.lookup("h200"))
    plans = [
        plan_shared((Matmul(m, 64, 4096), Matmul(m, 8, 4096)), chip.lookup("h200"))
        for m in range(1, 17)
    ]
    assert {(p.kernel, p.splits) for p in plans} == {("qmv_pair", 1)}
    assert len({p.k_simdgroups for p in plans}) == 1


def test_a_llama_shares_launches_and_gives_the_same():
    m = model()
    right = m(TOKENS)
    report = mlx_phase.patch(m, attention=False)
    assert report.shared == {
        "q_proj + k_proj + v_proj": 2,
        "gate_proj + up_proj": 2,
    }
    assert "one launch for gate_proj + up_proj: 2 times" in str(report)
    ops.reset_served()
    out = m(TOKENS)
    served = ops.served()
    assert not served.stock
    calls = {name.split()[0]: n for name, n in served.kernels.items()}
    # o_proj, down_proj of two blocks, and the head.
    assert calls == {"qmv_triple": 2, "qmv_pair": 2, "qmv": 5}
    assert mx.abs(out - right).max().item() < 1e-4 * mx.abs(right).max().item()
    mlx_phase.unpatch(m)
    tolerance.assert_bits(m(TOKENS), right)


def test_siblings_only_answer_for_the_same_array():
    m = model()
    mlx_phase.patch(m)
    mlp = m.layers[0].mlp
    x, other = cases.activations(1, 128), cases.activations(1, 128, seed=9)
    alone = mlp.up_proj(other)
    mlp.gate_proj(x)
    tolerance.assert_bits(mlp.up_proj(other), alone)
    # The same layer twice with the same x, and equal arrays that are not the same.
    y = mlp.gate_proj(x)
    tolerance.assert_bits(mlp.gate_proj(x), y)
    tolerance.assert_bits(mlp.gate_proj(mx.array(x)), y)


def test_siblings_that_are_called_apart_go_separate_ways():
    m = model()
    mlx_phase.patch(m)
    mlp = m.layers[0].mlp
    for i in range(MAX_UNUSED + 1):
        mlp.gate_proj(cases.activations(1, 128, seed=i))
    assert mlp.gate_proj._siblings is None and mlp.up_proj._siblings is None
    assert m.layers[1].mlp.gate_proj._siblings is not None
    ops.reset_served()
    mlp.gate_proj(cases.activations(1, 128))
    assert [n.split()[0] for n in ops.served().kernels] == ["qmv"]


def test_new_weights_and_training_reach_siblings():
    m = model()
    mlx_phase.patch(m)
    mlp, x = m.layers[0].mlp, cases.activations(1, 128)
    before = mlp.gate_proj(x)
    mlp.up_proj(x)
    mlp.gate_proj.scales = 2 * mlp.gate_proj.scales
    mlp.gate_proj.biases = 2 * mlp.gate_proj.biases
    tolerance.assert_close(
        mlp.gate_proj(mx.array(x)), 2 * before, 2 * before, "float32"
    )
    m.train()
    ops.reset_served()
    mlp.gate_proj(x)
    assert not ops.served().kernels
    m.eval()
    ops.reset_served()
    mlp.gate_proj(x)
    assert [n.split()[0] for n in ops.served().kernels] == ["qmv_pair"]


def test_copies_are_on_their_own():
    m = model()
    mlx_phase.patch(m)
    right = m(TOKENS)
    for twin in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert twin.layers[0].mlp.gate_proj._siblings is None
        out = twin(TOKENS)
        assert mx.abs(out - right).max().item() < 1e-4 * mx.abs(right).max().item()


def test_a_failing_shared_kernel_leaves_single_launches(monkeypatch):
    check = importlib.import_module("mlx_phase.check")
    monkeypatch.setattr(check, "_RESULTS", {})

    def broken(*args):
        raise RuntimeError("does not compile")

    monkeypatch.setattr(check, "prepare_shared", broken)
    m = model()
    report = mlx_phase.patch(m)
    assert not report.shared and len(report.failed) == 2
    assert "does not compile" in str(report)
    ops.reset_served()
    m(TOKENS)
    assert {n.split()[0] for n in ops.served().kernels} == {"qmv"}


class InPlace(nn.Module):
    def __call__(self, x):
        a = self.q_proj(x)
        x += 1
        return a + self.k_proj(x)


class Twice(nn.Module):
    def __call__(self, x):
        return self.q_proj(x) + self.q_proj(x) + self.k_proj(x)


class Other(nn.Module):
    def __call__(self, x, y):
        return self.q_proj(x) + self.k_proj(y)


class Stored(nn.Module):
    def __call__(self, x):
        x[0] = 0
        return self.q_proj(x) + self.k_proj(x)


class Unpacked(nn.Module):
    def __call__(self, x):
        x[0], y = 0, 1
        return self.q_proj(x) + self.k_proj(x) + y


class Same(nn.Module):
    def __call__(self, x):
        x = x + 1
        return self.q_proj(x) + self.k_proj(x)


def test_who_shares_x_is_read_from_the_source():
    names = ("q_proj", "k_proj")
    for kind in (InPlace, Twice, Other, Stored, Unpacked):
        assert not shares_x(kind, names), kind
    assert shares_x(Same, names)
    assert shares_x(llama.Attention, ("q_proj", "k_proj", "v_proj"))
    assert shares_x(llama.MLP, ("gate_proj", "up_proj"))


def test_a_shared_kernel_that_fails_for_one_M_ends_sharing_for_all(monkeypatch):
    m = model()
    mlx_phase.patch(m)
    mlp, x = m.layers[0].mlp, cases.activations(1, 128)
    mlp.gate_proj(x)
    two = mx.concatenate([x, x])
    mlp.gate_proj(two)
    name = next(n for n in ops.served().kernels if "qmv_pair" in n and "M=2" in n)
    ops.disable(name, "for this test")
    rows = mlp.gate_proj(mx.array(two))
    assert mlp.gate_proj._siblings is None and mlp.up_proj._siblings is None
    tolerance.assert_bits(rows[:1], mlp.gate_proj(x))


def doubled(layer):
    """Twice the weights of an affine layer, by assignment."""
    layer.scales, layer.biases = 2 * layer.scales, 2 * layer.biases


def test_a_result_that_waits_does_not_outlive_its_weights():
    m = model()
    mlx_phase.patch(m, check=False)
    mlp, x = m.layers[0].mlp, cases.activations(1, 128)
    before = mlp.up_proj(mx.array(x))
    mlp.gate_proj(x)
    doubled(mlp.up_proj)
    assert mx.allclose(mlp.up_proj(x), 2 * before, rtol=1e-5).item()


@pytest.mark.parametrize("name", ["o_proj", "q_proj"])
def test_a_shallow_copy_binds_its_own_weights(name):
    m = model()
    mlx_phase.patch(m, check=False)
    layer, x = m.layers[0].self_attn[name], cases.activations(1, 128)
    before = layer(mx.array(x))
    twin = copy.copy(layer)
    doubled(twin)
    assert mx.allclose(twin(mx.array(x)), 2 * before, rtol=1e-5).item()
    assert mx.allclose(layer(mx.array(x)), before, rtol=1e-5).item()


def test_siblings_check_new_arrays_as_a_layer_alone_does():
    m = model()
    stock = m.layers[0].mlp.up_proj
    mlx_phase.patch(m, check=False)
    mlp, x = m.layers[0].mlp, cases.activations(1, 128)
    stock.biases = stock.biases.astype(mx.float16)
    assert mlp.gate_proj(x).shape == (1, 192)
    mlp.up_proj(x)
    assert any("mixed dtypes" in reason for reason in ops.served().stock)
    mlp.gate_proj.scales = mlp.gate_proj.scales[:, :1]
    with pytest.raises(ValueError, match="scales"):
        mlp.gate_proj(x)


def test_a_model_that_is_dropped_frees_its_layers_at_once():
    m = model()
    mlx_phase.patch(m, check=False)
    mx.eval(m(TOKENS))
    refs = [weakref.ref(layer) for layer in m.layers[0].self_attn.children().values()]
    gc.collect()
    gc.disable()
    try:
        del m
        assert [ref() for ref in refs if ref() is not None] == []
    finally:
        gc.enable()


def test_new_plans_reach_a_copy_that_only_shares_launches():
    m = model()
    mlx_phase.patch(m, check=False)
    twin = copy.deepcopy(m)
    mlx_phase.patch(twin, check=False)
    twin.layers[0].mlp(cases.activations(1, 128))
    siblings = twin.layers[0].mlp.gate_proj._siblings
    assert siblings.bound
    layers.forget_routes()
    assert not siblings.bound
