"""Changes of modules are counted while traces need it, and then no more."""

import gc
import importlib

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from test_traced import TOKENS, model

import mlx_phase
from mlx_phase.module_watch import CHANGING, changes, watch

traced_module = importlib.import_module("mlx_phase.traced")


class Owner:
    pass


@pytest.fixture
def owner():
    owner = Owner()
    watch(owner)
    return owner


CHANGES = {
    "item": lambda m: m.__setitem__("weight", mx.ones(2)),
    "attribute": lambda m: setattr(m, "weight", mx.ones(2)),
    "update": lambda m: m.update({"weight": mx.ones((2, 2))}),
    "load": lambda m: m.load_weights([("weight", mx.ones((2, 2)))]),
    "modules": lambda m: m.update_modules({"child": nn.Identity()}),
    "del": lambda m: m.__delitem__("weight"),
    "delattr": lambda m: delattr(m, "weight"),
    "pop": lambda m: m.pop("weight"),
    "popitem": lambda m: m.popitem(),
    "clear": lambda m: m.clear(),
    "setdefault": lambda m: m.setdefault("other", mx.ones(2)),
    "or": lambda m: m.__ior__({"weight": mx.ones(2)}),
}


@pytest.mark.parametrize("how", CHANGES)
def test_changes_are_counted(how, owner):
    m = nn.Linear(2, 2, bias=False)
    m.child = nn.Identity()
    plain, before = {**m}, changes()
    CHANGES[how](m)
    assert changes() != before
    assert m.keys() != plain.keys() or any(m[k] is not plain[k] for k in m)


def test_modules_have_their_methods_back(owner):
    assert {*CHANGING} <= vars(nn.Module).keys()
    second = Owner()
    watch(second)
    del second
    gc.collect()
    assert {*CHANGING} <= vars(nn.Module).keys()


def test_unpatch_leaves_no_method_behind():
    gc.collect()
    before = {**vars(nn.Module)}
    m = model()
    with mlx_phase.patched(m, check=False):
        assert vars(nn.Module).keys() - before.keys() <= {*CHANGING}
        assert "__setitem__" in vars(nn.Module)
    assert {**vars(nn.Module)} == before


def test_methods_of_a_later_mlx_stay(monkeypatch):
    gc.collect()
    calls = []

    def own(self, key, value):
        calls.append(key)
        dict.__setitem__(self, key, value)

    monkeypatch.setattr(nn.Module, "__setitem__", own, raising=False)
    owner = Owner()
    watch(owner)
    m = nn.Identity()
    m["x"] = mx.ones(1)
    assert calls[-1] == "x" and vars(nn.Module)["__setitem__"] is not own
    del owner
    assert vars(nn.Module)["__setitem__"] is own


def test_a_change_is_counted_when_it_is_there(monkeypatch):
    """Another thread may look while a module changes."""
    gc.collect()
    between = []

    def slow(self, key, value):
        between.append(changes())
        dict.__setitem__(self, key, value)

    monkeypatch.setattr(nn.Module, "__setitem__", slow, raising=False)
    owner = Owner()
    watch(owner)
    nn.Identity()["x"] = mx.ones(1)
    assert changes() != between[-1]
    del owner


def test_methods_that_others_put_over_stay(monkeypatch):
    gc.collect()
    owner = Owner()
    watch(owner)
    ours = nn.Module.__setitem__

    def other(self, key, value):
        ours(self, key, value)

    monkeypatch.setattr(nn.Module, "__setitem__", other)
    del owner
    assert vars(nn.Module)["__setitem__"] is other
    monkeypatch.undo()
    # What they put back counts and does no harm.
    del nn.Module.__setitem__


def test_changes_are_seen_where_others_took_the_methods_away(owner, monkeypatch):
    monkeypatch.delattr(nn.Module, "__setitem__")
    m, before = nn.Identity(), changes()
    m["x"] = mx.ones(1)
    assert changes() != before


def test_weights_are_looked_at_after_a_change_only(monkeypatch):
    m = model()
    mlx_phase.patch(m, check=False)
    caches = make_prompt_cache(m)
    m(TOKENS[:, :5], cache=caches)
    looks, look = [], traced_module.Steps._all_unchanged
    monkeypatch.setattr(
        traced_module.Steps,
        "_all_unchanged",
        lambda self: looks.append(look(self)) or looks[-1],
    )
    want = [np.array(m(TOKENS[:, i : i + 1], cache=caches)) for i in (5, 6)][1]
    assert looks == []
    nn.Linear(2, 2)  # another module
    m(TOKENS[:, 7:8], cache=caches)
    assert looks == [True]
    [c.trim(2) for c in caches]
    np.testing.assert_array_equal(m(TOKENS[:, 6:7], cache=caches), want)
    assert looks == [True]
    m.model.norm.weight = 2 * m.model.norm.weight
    [c.trim(1) for c in caches]
    np.testing.assert_allclose(m(TOKENS[:, 6:7], cache=caches), 2 * want, rtol=1e-5)
    assert looks == [True, False]
