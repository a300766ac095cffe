"""Keys of the last tokens beside a joint cache: where they go, what trimming takes."""

import mlx.core as mx
import pytest
import tolerance
from block_models import family
from mlx_lm.models import llama
from mlx_lm.models.cache import (
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
    trim_prompt_cache,
)
from test_cache_joint import patched, started, steps  # noqa: F401
from test_traced import TOKENS, model

import mlx_phase
from mlx_phase import cache_joint, ops
from mlx_phase.attention_step import attend
from mlx_phase.cache_joint import JOINT, JOINT_CODES, JOINT_RING
from mlx_phase.joint_step import RECENT, JointStep
from mlx_phase.launch import attention
from mlx_phase.step_cache import Position, StepCache

# Lengths of steps, and below zero tokens to trim: over the end of recent keys, into
# those that the array holds, and both.
COURSES = {
    "ones": [1] * (RECENT + 5),
    "drafts": [5, -3, 5, -2, 16, -9, 16, -1, 16, -15, 3, 16, 1],
    "full": [16, 16, 16, 1],
    "far back": [16, 16, 2, -20, 1, -3, 4, 1],
    "before the first": [4, -10, 2, 1, 16],
}
# Rings that 22 tokens leave unfilled, and one that they fill.
RINGS = {
    "wraps": (40, 0, [1] * 100),
    "keeps some": (40, 4, [4, -2, 1, 3, *[1] * 80]),
    "as long as recent keys": (RECENT, 0, [5, -4, *[1] * 70]),
    "short": (8, 2, [1] * 30),
    "grows": (300, 0, [*[16] * 15, -40, *[16] * 3, -3, *[1] * 60]),
}


def went(m, caches, course: list[int], batch: int = 1) -> list[mx.array]:
    """Logits of the steps of a course."""
    total = sum(n for n in course if n > 0)
    tokens = mx.random.randint(0, 64, (batch, total), key=mx.random.key(3))
    at, outs = 0, []
    for n in course:
        if n < 0:
            assert trim_prompt_cache(caches, -n) == -n
            continue
        outs.append(m(tokens[:, at : at + n], cache=caches))
        mx.eval(outs[-1])
        at += n
    return outs


@pytest.mark.parametrize("course", COURSES)
def test_keys_beside_the_array_have_the_bits_of_plain_caches(
    course,
    patched,  # noqa: F811
    monkeypatch,
):
    caches = started(patched)
    have = went(patched, caches, COURSES[course])
    assert [type(c) for c in caches] == [JOINT] * 2
    assert all(0 <= c.offset - c.held <= RECENT for c in caches)
    monkeypatch.setattr(cache_joint, "TIMES", 0)
    plain = started(patched)
    for x, y in zip(have, went(patched, plain, COURSES[course]), strict=True):
        tolerance.assert_bits(x, y)
    assert [type(c) for c in plain] == [KVCache] * 2
    for a, b in zip(caches, plain, strict=True):
        assert a.offset == b.offset
        for x, y in zip(a.state[:2], b.state[:2], strict=True):
            tolerance.assert_bits(x[:, :, : a.offset], y[:, :, : a.offset])


def test_two_sequences_in_one_cache(patched, monkeypatch):  # noqa: F811
    tokens = mx.concatenate([TOKENS[:, :20], TOKENS[:, 50:70]])

    def run() -> tuple[list, list]:
        caches = make_prompt_cache(patched)
        patched(tokens, cache=caches)
        return went(patched, caches, [1, 1, 7, -3, *[8] * 5, -6, 1], batch=2), caches

    have, caches = run()
    assert [type(c) for c in caches] == [JOINT] * 2
    monkeypatch.setattr(cache_joint, "TIMES", 0)
    for x, y in zip(have, run()[0], strict=True):
        tolerance.assert_bits(x, y)


@pytest.mark.parametrize("bits, group", [(4, 32), (8, 64)])
@pytest.mark.parametrize("course", ["ones", "drafts", "far back"])
def test_codes_have_the_bits_of_plain_caches(
    course,
    bits,
    group,
    patched,  # noqa: F811
    monkeypatch,
):
    def run() -> tuple[list, list]:
        caches = [QuantizedKVCache(group, bits) for _ in range(2)]
        patched(TOKENS[:, :20], cache=caches)
        outs = [steps(patched, caches, 20, [1, 1])]
        return outs + went(patched, caches, COURSES[course]), caches

    have, caches = run()
    assert [type(c) for c in caches] == [JOINT_CODES] * 2
    served = ops.served().kernels
    assert any("_codes_joint" in name for name in served)
    monkeypatch.setattr(cache_joint, "TIMES", 0)
    want, plain = run()
    assert [type(c) for c in plain] == [QuantizedKVCache] * 2
    for x, y in zip(have, want, strict=True):
        tolerance.assert_bits(x, y)
    for a, b in zip(caches, plain, strict=True):
        # Looked at, it is what it was: keys and values of three arrays.
        assert a.offset == b.offset and (a.bits, a.group_size) == (bits, group)
        for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True):
            tolerance.assert_bits(x[:, :, : a.offset], y[:, :, : a.offset])
    assert [type(c) for c in caches] == [QuantizedKVCache] * 2


@pytest.mark.parametrize("ring", RINGS)
def test_rings_have_the_bits_of_plain_ones(ring, patched, monkeypatch):  # noqa: F811
    size, keep, course = RINGS[ring]

    def run() -> tuple[list, list]:
        caches = [RotatingKVCache(size, keep) for _ in range(2)]
        patched(TOKENS[:, :20], cache=caches)
        outs = [steps(patched, caches, 20, [1, 1]), *went(patched, caches, course)]
        return outs, caches

    have, caches = run()
    assert [type(c) for c in caches] == [JOINT_RING] * 2
    assert all(0 <= c._idx - c.held <= RECENT for c in caches)
    monkeypatch.setattr(cache_joint, "TIMES", 0)
    want, plain = run()
    for x, y in zip(have, want, strict=True):
        tolerance.assert_bits(x, y)
    assert [type(c) for c in plain] == [RotatingKVCache] * 2
    for a, b in zip(caches, plain, strict=True):
        # Keys, values and where the ring is; not what is behind an unfilled one.
        assert a.state[2:] == b.state[2:] and a.keys.shape == b.keys.shape
        n = min(a.offset, size)
        for x, y in zip(a.state[:2], b.state[:2], strict=True):
            tolerance.assert_bits(x[:, :, :n], y[:, :, :n])


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_mixed_caches_are_joined_alike(name, monkeypatch):
    """Rings of 12 and plain caches, each with its own places; sinks."""
    m = family(name, mx.bfloat16)
    mlx_phase.patch(m, check=False)

    def run() -> tuple[list, list]:
        caches = make_prompt_cache(m)
        m(TOKENS[:, :5], cache=caches)
        return [steps(m, caches, 5 + i, [1]) for i in range(RECENT + 12)], caches

    have, caches = run()
    assert {type(c) for c in caches} == {JOINT, JOINT_RING}
    monkeypatch.setattr(cache_joint, "TIMES", 0)
    want, plain = run()
    assert {type(c) for c in plain} == {KVCache, RotatingKVCache}
    for x, y in zip(have, want, strict=True):
        tolerance.assert_bits(x, y)


def test_steps_without_a_kernel_have_all_keys(patched):  # noqa: F811
    """A kernel that is off: plain caches after each step, for as long as it is."""
    want = steps(patched, started(patched), 22, [1, 1, 2])
    caches = started(patched)
    joint = [name for name in ops.served().kernels if "_joint " in name]
    try:
        for name in joint:
            ops.disable(name, "test")
        have = [steps(patched, caches, 22, [1])]
        assert [type(c) for c in caches] == [KVCache] * 2
        have.append(steps(patched, caches, 23, [1, 2]))
        tolerance.assert_bits(mx.concatenate(have, axis=1), want)
        assert [type(c) for c in caches] == [KVCache] * 2
    finally:
        ops.enable_all()
    assert joint and patched._steps._apart == set()
    assert [type(c) for c in started(patched)] == [JOINT] * 2


def test_a_mask_of_arrays_parts_for_its_step(patched):  # noqa: F811
    caches = started(patched)
    make, one = KVCache.make_mask, {"return_array": True}
    try:
        KVCache.make_mask = lambda c, N, **more: make(c, N, **more | one)
        StepCache.make_mask = array_mask
        have = steps(patched, caches, 22, [3])
    finally:
        KVCache.make_mask, StepCache.make_mask = make, MAKE_MASK
    assert [type(c) for c in caches] == [KVCache] * 2
    assert patched._steps._apart == set()
    want = steps(patched, started(patched), 22, [3, 1])
    have = mx.concatenate([have, steps(patched, caches, 25, [1])], axis=1)
    tolerance.assert_bits(have, want)
    assert [type(c) for c in caches] == [JOINT] * 2


MAKE_MASK = StepCache.make_mask


def array_mask(c, N, return_array=False, window_size=None):
    return MAKE_MASK(c, N, True, window_size)


@pytest.mark.parametrize("SOON", [0, 16])
def test_a_layer_that_is_asked_keeps_to_the_others(patched, SOON, monkeypatch):  # noqa: F811
    """One group, one trace: all hold as many keys when one is joined again."""
    monkeypatch.setattr(cache_joint, "SOON", SOON)
    caches, want = started(patched), steps(patched, started(patched), 22, [1] * 12)
    have = []
    for i in range(12):
        if i % 4 == 3:
            assert caches[1].keys.shape[0] == 1
        have.append(steps(patched, caches, 22 + i, [1]))
        if SOON == 0:
            assert [type(c) for c in caches] == [JOINT] * 2
            assert caches[0].held == caches[1].held
    tolerance.assert_bits(mx.concatenate(have, axis=1), want)
    if SOON == 0:
        assert len(patched._steps._traces) == 1


class Doubles(llama.LlamaModel):
    """Sets keys before its layers write theirs."""

    def __call__(self, inputs, cache=None, *args):
        for c in cache if cache[0].keys is not None else ():
            c.keys = c.keys * 2
        return super().__call__(inputs, cache, *args)


def test_keys_that_are_set_before_a_step_count(monkeypatch):
    m = model("llama", mx.bfloat16)
    m.model.__class__ = Doubles
    mlx_phase.patch(m, check=False)
    have = steps(m, started(m), 22, [1, 3, 1])
    assert m._steps._apart == {0, 1}
    monkeypatch.setattr(cache_joint, "TIMES", 0)
    tolerance.assert_bits(have, steps(m, started(m), 22, [1, 3, 1]))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_step_of_one_sequence_has_one_array_for_q_and_its_keys(name, monkeypatch):
    m = model(name, mx.bfloat16)
    mlx_phase.patch(m, check=False)
    lacks, kernel = [], attention.kernel
    monkeypatch.setattr(
        attention, "kernel", lambda *a: lacks.append(a[-1]) or kernel(*a)
    )
    two = mx.tile(TOKENS[:, :20], (2, 1))
    for tokens, behind in ((TOKENS[:, :20], True), (two, False)):
        caches = make_prompt_cache(m)
        m(tokens, cache=caches)
        for _ in range(3):
            lacks.clear()
            m(tokens[:, :1], cache=caches)
        assert [type(c) for c in caches] == [JOINT] * len(caches)
        assert {"fresh" in w for w in lacks} == {behind}


def test_keys_that_a_model_sets_are_those_attended_to():
    """Though q came in one array with others."""
    parts = mx.random.normal((1, 8, 1, 64), key=mx.random.key(0)).astype(mx.bfloat16)
    kv = mx.random.normal((2, 2, 40, 64), key=mx.random.key(1)).astype(mx.bfloat16)
    other = mx.random.normal((2, 2, 1, 64), key=mx.random.key(2)).astype(mx.bfloat16)
    lens = mx.array([[10], [9], [9]], mx.int32)

    def attended(behind: bool) -> mx.array:
        at = Position(mx.array([9], mx.int32), lens, mx.array(9, mx.int32))
        cache = JointStep([kv, mx.zeros((2, 2, RECENT, 64), kv.dtype)], at)
        q = cache.take_packed(parts)[0] if behind else parts[:, :4]
        k, v = cache.update_and_fetch(*mx.split(other, 2))
        return attend(q, k, v, cache=cache, scale=0.125)

    tolerance.assert_bits(attended(True), attended(False))
