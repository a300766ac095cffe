"""Keys and values in one array between traced steps; mlx-lm sees plain caches."""

import copy
import importlib
import pickle

import mlx.core as mx
import numpy as np
import pytest
import tolerance
from mlx_lm.models.cache import (
    KVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from test_traced import TOKENS, model

import mlx_phase
from mlx_phase import cache_joint
from mlx_phase.cache_groups import grouped
from mlx_phase.cache_joint import JOINT
from mlx_phase.executor import executor_name
from mlx_phase.joint_step import RECENT

traced_module = importlib.import_module("mlx_phase.traced")


def steps(m, caches, at: int, lengths: list[int]) -> mx.array:
    """Logits of steps from token ``at``; caches are not looked at."""
    outs = []
    for length in lengths:
        outs.append(m(TOKENS[:, at : at + length], cache=caches))
        mx.eval(outs[-1])
        at += length
    return mx.concatenate(outs, axis=1)


def started(m, lengths=(1, 1)) -> list:
    """Caches after a prompt of 20 tokens and steps."""
    caches = make_prompt_cache(m)
    m(TOKENS[:, :20], cache=caches)
    steps(m, caches, 20, [*lengths])
    return caches


@pytest.fixture
def patched():
    m = model("llama", mx.bfloat16)
    mlx_phase.patch(m, check=False)
    return m


@pytest.fixture
def writes(monkeypatch):
    """One entry for each write of a cache: the number of its arrays."""
    found, put = [], mx.put_along_axis

    def counted(a, *args, **options):
        found.append(a.shape)
        return put(a, *args, **options)

    monkeypatch.setattr(mx, "put_along_axis", counted)
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_joint_cache_has_the_bits_of_two_arrays(family, writes, monkeypatch):
    m = model(family, mx.bfloat16)
    mlx_phase.patch(m, check=False)
    caches = started(m)
    writes.clear()
    have = steps(m, caches, 22, [1, 3])
    assert [type(c) for c in caches] == [JOINT] * 2
    # To the recent keys alone, and not even that where the kernel serves. Traces of a
    # GPU are made once.
    assert {(shape[0], shape[2]) for shape in writes} == {(2, RECENT)}
    traced = executor_name() != "cpu"
    assert len(writes) == (2 if traced else 4)
    assert {type(c).__name__ for c in caches} == {"KVCache"}
    monkeypatch.setattr(cache_joint, "TIMES", 0)
    plain = started(m)
    writes.clear()
    tolerance.assert_bits(have, steps(m, plain, 22, [1, 3]))
    assert [type(c) for c in plain] == [KVCache] * 2
    assert len(writes) == (4 if traced else 8)
    for a, b in zip(caches, plain, strict=True):
        assert a.state[2] == b.state[2] == a.offset
        for x, y in zip(a.state[:2], b.state[:2], strict=True):
            tolerance.assert_bits(x, y)


def saved(caches, path):
    save_prompt_cache(str(path / "cache.safetensors"), caches)
    return load_prompt_cache(str(path / "cache.safetensors"))


def stock_update(caches, _):
    new = mx.zeros((1, 2, 1, 64), mx.bfloat16)
    for c in caches:
        c.update_and_fetch(new, new)
        c.trim(1)
    return caches


def set_state(caches, _):
    for c in caches:
        c.state = c.state
    return caches


def in_place(caches, _):
    for c in caches:
        c.keys[..., c.offset :, :] = float("nan")
        c.values[..., c.offset :, :] = float("nan")
    return caches


def touched(name: str):
    def touch(caches, _):
        for c in caches:
            value = getattr(c, name)
            value() if callable(value) else None
        return caches

    return touch


# What others do with caches; gives those that go on, as if nothing had happened.
USES = {name: touched(name) for name in ("keys", "state")}
USES |= {"stock update": stock_update, "set state": set_state, "in place": in_place}
USES |= {
    "deepcopy": lambda c, _: copy.deepcopy(c),
    "copy": lambda c, _: [copy.copy(one) for one in c],
    "pickle": lambda c, _: pickle.loads(pickle.dumps(c)),
    "saved": saved,
}


@pytest.mark.parametrize("use", USES)
def test_who_asks_sees_a_plain_cache(use, patched, tmp_path):
    caches = started(patched)
    assert [type(c) for c in caches] == [JOINT] * 2
    want = steps(patched, started(patched), 22, [1, 2])
    after = USES[use](caches, tmp_path)
    for c in (*caches, *after):
        assert type(c) is KVCache and {*vars(c)} == {"keys", "values", "offset"}
        assert c.keys.shape == c.values.shape == (1, 2, 256, 64) and c.offset == 22
    tolerance.assert_bits(steps(patched, after, 22, [1, 2]), want)
    assert [type(c) for c in after] == [JOINT] * 2
    # The originals of copies are as they were.
    if after is not caches:
        tolerance.assert_bits(steps(patched, caches, 22, [1, 2]), want)


def test_trimming_and_counting_do_not_part(patched):
    caches = started(patched)
    want = steps(patched, caches, 22, [1])
    steps(patched, caches, 40, [3])
    assert trim_prompt_cache(caches, 4) == 4 and caches[0].size() == 22
    assert caches[0].make_mask(1, return_array=False, window_size=None) is None
    assert not caches[0].empty() and caches[0].nbytes == 2 * 2 * 2 * 256 * 64
    tolerance.assert_bits(steps(patched, caches, 22, [1]), want)
    assert [type(c) for c in caches] == [JOINT] * 2


def test_buffers_grow_joint(patched):
    caches = make_prompt_cache(patched)
    patched(TOKENS[:, :255], cache=caches)
    steps(patched, caches, 255, [1, 1])
    assert type(caches[0]) is JOINT and caches[0].kv[0].shape == (2, 2, 512, 64)
    assert caches[0].keys.shape == (1, 2, 512, 64)


def test_a_cache_that_is_asked_often_stays_plain(patched, monkeypatch):
    caches, joins, concatenate = started(patched), [], mx.concatenate

    def counted(arrays, axis=0):
        joins.extend([1] * (axis == 0))
        return concatenate(arrays, axis=axis)

    monkeypatch.setattr(mx, "concatenate", counted)
    for at in range(22, 30):
        steps(patched, caches, at, [1])
        mx.eval([c.state for c in caches])
    assert len(joins) == 2 * (cache_joint.TIMES - 1)
    assert [type(c) for c in caches] == [KVCache] * 2
    # Seldom is no reason.
    monkeypatch.setattr(cache_joint, "SOON", 0)
    caches = started(patched)
    for at in range(22, 27):
        mx.eval([c.state for c in caches])
        steps(patched, caches, at, [1])
    assert [type(c) for c in caches] == [JOINT] * 2


def test_unpatched_models_go_on_with_such_caches(patched):
    caches = started(patched)
    mlx_phase.unpatch(patched)
    fresh = model("llama", mx.bfloat16)
    want = make_prompt_cache(fresh)
    fresh(TOKENS[:, :22], cache=want)
    have = steps(patched, caches, 22, [1])
    assert [type(c) for c in caches] == [KVCache] * 2
    off = mx.abs(have - steps(fresh, want, 22, [1])).max().item()
    assert off < 0.1 * mx.abs(have).max().item()


def test_layers_that_give_two_arrays_are_not_joined_again(writes):
    m = model("qwen2")
    mlx_phase.patch(m, check=False)
    # A layer that no launch takes runs by itself inside its block.
    odd = m.layers[1].self_attn
    odd.k_proj.bias = odd.k_proj.bias.astype(mx.float16)
    caches = started(m)
    assert m._steps._apart == {1}
    assert [type(c) for c in caches] == [JOINT, KVCache]
    writes.clear()
    steps(m, caches, 22, [1])
    assert sorted(shape[0] for shape in writes) == [1, 1, 2]


def test_layers_that_are_not_fused_are_not_joined():
    m = model()
    traced_module.trace_steps(m.model)
    assert [type(c) for c in started(m)] == [KVCache] * 2


def test_compiled_steps_write_in_place():
    """One buffer, from step to step, also where recent keys are written to it."""
    c, traces = KVCache(), {}
    c.update_and_fetch(*mx.random.normal((2, 1, 2, 5, 16), key=mx.random.key(0)))
    want = copy.deepcopy(c)
    cache_joint.join_plain([c], set())
    where = []
    for i in range(RECENT + 4):
        new = mx.random.normal((2, 2, 1, 16), key=mx.random.key(i))
        (group,), _ = grouped([c], 1)
        args, form = group.inputs(1, 1), group.form()

        def step(new, args, form=form):
            (view,) = form.views(args)
            k, v = view.write(new)
            q = mx.ones((1, 4, 1, 16))
            seen = view.position.seen(view.length, None)
            o = mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=seen)
            return [o, *form.results([view], 1)]

        call = traces.setdefault(form, mx.compile(step))
        o, *outs = call(new, args)
        del args
        group.note(1, outs)
        del outs
        mx.eval(o, c.kv)
        where.append(np.array(c.kv[0], copy=False).__array_interface__["data"][0])
        k, v = want.update_and_fetch(*mx.split(new, 2))
        q = mx.ones((1, 4, 1, 16))
        right = mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0)
        np.testing.assert_allclose(o, right, atol=1e-6)
    assert len({*where}) == 1 and len(traces) == 1
    for have, right in zip(c.state[:2], want.state[:2], strict=True):
        n = 9 + RECENT
        np.testing.assert_array_equal(have[:, :, :n], right[:, :, :n])


def test_uneven_caches_are_left_alone():
    caches = [KVCache(), KVCache(), KVCache()]
    caches[0].update_and_fetch(mx.ones((1, 1, 1, 8)), mx.ones((1, 1, 1, 16)))
    caches[1].update_and_fetch(
        mx.ones((1, 1, 1, 8)), mx.ones((1, 1, 1, 8), mx.bfloat16)
    )
    cache_joint.join_plain(caches, set())
    assert [type(c) for c in caches] == [KVCache] * 3
