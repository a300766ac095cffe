"""Traced steps on every kind of cache, against the caches' own code."""

import copy
import importlib

import mlx.core as mx
import numpy as np
import pytest
from block_models import family
from mlx_lm.models.cache import (
    BatchKVCache,
    BatchRotatingKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)
from test_traced import model
from test_traced_compiled import calls, compiled  # noqa: F401

import mlx_phase
from mlx_phase import ops

traced_module = importlib.import_module("mlx_phase.traced")
ROWS = mx.random.randint(0, 96, (2, 80), key=mx.random.key(4))
PADDING = [0, 1]
# Kind -> a cache of a layer, sequences, prompt, steps, how many of these are traced.
CASES = {
    "plain": (KVCache, 1, 5, [1, 3, 1], 3),
    "rotating": (lambda: RotatingKVCache(12), 1, 5, [1, 3, *[1] * 12], 14),
    "rotating, keep 4": (lambda: RotatingKVCache(12, 4), 1, 5, [1] * 18, 18),
    "rotating, several wrap": (lambda: RotatingKVCache(12), 1, 9, [1, 3, 1, 4, 1], 3),
    "rotating, long prompt": (lambda: RotatingKVCache(12, 4), 1, 25, [1] * 4, 4),
    "8 bits": (lambda: QuantizedKVCache(64, 8), 1, 5, [1, 3, 1], 3),
    "4 bits": (lambda: QuantizedKVCache(32, 4), 1, 5, [1, 1], 2),
    "batch": (lambda: BatchKVCache(PADDING), 2, 3, [1, 2, 1], 3),
    "batch, rotating": (lambda: BatchRotatingKVCache(8, PADDING), 2, 3, [1] * 9, 9),
    "batch, long prompt": (
        lambda: BatchRotatingKVCache(8, PADDING), 2, 14, [1, 1, 2, 1], 3,
    ),
}  # fmt: skip


def steps(m, make, B: int, prompt: int, lengths: list[int]) -> tuple[mx.array, list]:
    """Logits of the steps after a prompt, and the caches."""
    caches, outs, at = [make() for _ in m.layers], [], prompt
    m(ROWS[:B, :prompt], cache=caches)
    mx.eval([c.state for c in caches])
    for length in lengths:
        outs.append(m(ROWS[:B, at : at + length], cache=caches))
        mx.eval(outs[-1], [c.state for c in caches])
        at += length
    return mx.concatenate(outs, axis=1), caches


@pytest.fixture
def traces(monkeypatch):
    """One entry for each step that ran in a trace."""
    found, run = [], traced_module.Steps.run

    def counted(self, *args):
        out = run(self, *args)
        found.append(out is not None)
        return out

    monkeypatch.setattr(traced_module.Steps, "run", counted)
    return found


def assert_same_state(have: list, want: list, atol: float) -> None:
    """Keys where both have them, and every number of the caches."""
    if hasattr(have[0], "extract"):  # what padding holds is never read
        have, want = ([c.extract(i) for c in cs for i in (0, 1)] for cs in (have, want))
    for a, b in zip(have, want, strict=True):
        assert a.size() == b.size() and type(a) is type(b)
        for x, y in zip(a.state, b.state, strict=True):
            parts = zip(x, y, strict=True) if isinstance(x, tuple) else [(x, y)]
            for u, v in parts:
                if not isinstance(u, mx.array):
                    assert u == v
                    continue
                if u.ndim == 4:
                    # Room at the end may be more or less.
                    n = min(u.shape[2], v.shape[2])
                    u, v = u[:, :, :n], v[:, :, :n]
                if u.dtype != mx.uint32:  # codes may round the other way
                    np.testing.assert_allclose(u, v, atol=atol)


@pytest.mark.parametrize("case", CASES)
def test_steps_on_each_kind_of_cache(case, traces):
    *how, n = CASES[case]
    m = model()
    want, before = steps(m, *how)
    mlx_phase.patch(m, check=False)
    ops.reset_served()
    have, after = steps(m, *how)
    np.testing.assert_allclose(have, want, atol=2e-4, rtol=2e-4)
    assert_same_state(after, before, 1e-4)
    served = {name.split()[0] for name in ops.served().kernels}
    assert {"qmv_qkv", "qmv_add", "qmv_glu"} < served
    assert any(name.startswith("sdpa") for name in served)
    # A short prompt is a step too.
    prompts = how[2] <= 16 // how[1] and case not in ("batch, rotating",)
    assert sum(traces) == n + prompts


# MLX compiles what it joins in each of them.
COMPILED = ("rotating, keep 4", "rotating, several wrap", "8 bits", "batch, rotating")


@pytest.mark.parametrize("case", COMPILED)
def test_compiled_steps_give_the_same_bits(case, compiled, calls):  # noqa: F811
    """Stock stands in for the kernels: outputs and caches are those of stock."""
    *how, n = CASES[case]
    m = model()
    want, before = steps(m, *how)
    traced_module.trace_steps(m.model)
    calls.clear()
    have, after = steps(m, *how)
    np.testing.assert_array_equal(have, want)
    assert_same_state(after, before, 0)
    # The code of the model runs for the prompt, for steps that wrap, once a trace.
    assert len(calls) < 2 + len(how[-1])
    assert not m.model._steps.reasons


def batch(m, prompts: list[list[int]], n: int) -> dict[int, list[int]]:
    """Greedy tokens of mlx-lm's batch generation; one sequence ends early."""
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(m, stop_tokens=[])
    uids = generator.insert(prompts, [n, n // 2])
    tokens = {uid: [] for uid in uids}
    while found := generator.next_generated():
        for r in found:
            tokens[r.uid].append(int(r.token))
    generator.close()
    return tokens


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_batch_generation(name, traces):
    """Sequences of other lengths, one that leaves; windows wrap."""
    m = model() if name == "llama" else family(name)
    prompts = [ROWS[i, : 4 + 9 * i].tolist() for i in range(2)]
    want = batch(m, prompts, 12)
    mlx_phase.patch(m, check=False)
    ops.reset_served()
    assert batch(m, prompts, 12) == want
    assert sum(traces) >= 11
    assert any("qmv_qkv" in k for k in ops.served().kernels)


@pytest.mark.parametrize("kind", ["rotating", "quantised"])
def test_saved_caches_go_on_in_either_model(kind, tmp_path):
    make = {"rotating": lambda: RotatingKVCache(12, 4), "quantised": QuantizedKVCache}
    m = model()
    want, before = steps(m, make[kind], 1, 5, [1] * 10)
    last = m(ROWS[:1, 40:41], cache=before)
    mlx_phase.patch(m, check=False)
    _, mine = steps(m, make[kind], 1, 5, [1] * 10)
    file = str(tmp_path / "cache.safetensors")
    save_prompt_cache(file, mine)
    for patched in (True, False):
        if not patched:
            mlx_phase.unpatch(m)
        loaded = load_prompt_cache(file)
        assert [type(c) for c in loaded] == [type(c) for c in before]
        again = m(ROWS[:1, 40:41], cache=loaded)
        np.testing.assert_allclose(again, last, atol=2e-3)


def test_trimmed_and_copied_rings_go_on_where_they_were():
    m = model()
    mlx_phase.patch(m, check=False)
    _, caches = steps(m, lambda: RotatingKVCache(20), 1, 5, [1, 1])
    want = m(ROWS[:1, 30:31], cache=copy.deepcopy(caches))
    m(ROWS[:1, 50:54], cache=caches)
    for c in caches:
        assert c.trim(4) == 4
    np.testing.assert_allclose(m(ROWS[:1, 30:31], cache=caches), want, atol=1e-5)


def test_layers_of_a_batch_that_disagree_are_left_to_stock(traces):
    m = model()
    caches = [BatchKVCache([0, 1]), BatchKVCache([0, 2])]
    m(ROWS[:2, :3], cache=caches)
    mx.eval([c.state for c in caches])
    fork = copy.deepcopy(caches)
    want = m(ROWS[:2, 5:6], cache=fork)
    mlx_phase.patch(m, check=False)
    np.testing.assert_allclose(m(ROWS[:2, 5:6], cache=caches), want, atol=1e-4)
    assert not any(traces)
    # Arrays of the caches stay their own: mlx-lm adds to them in place.
    for a, b in zip(caches, fork, strict=True):
        assert mx.array_equal(a.offset, b.offset).item()


def test_offsets_of_a_batch_are_read_once_not_in_each_step(monkeypatch):
    m = model()
    mlx_phase.patch(m, check=False)
    _, caches = steps(m, lambda: BatchKVCache(PADDING), 2, 3, [1])
    monkeypatch.setattr(mx, "stack", lambda *a: pytest.fail("read again"))
    m(ROWS[:, 4:5], cache=caches)
    assert len({id(c.offset) for c in caches}) == len(caches)


def test_caches_without_traces_are_named():
    from mlx_lm.models.cache import ChunkedKVCache

    m = model()
    m.make_cache = lambda: [ChunkedKVCache(64), KVCache()]
    report = mlx_phase.patch(m)
    assert "the model keeps ChunkedKVCache, traces take KVCache" in str(report.steps)
    assert sum(report.steps.blocks.values()) == 2
    assert make_prompt_cache(m)
