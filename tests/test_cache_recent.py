"""Keys of the last tokens beside a joint cache: where they go, what trimming takes."""

import mlx.core as mx
import pytest
import tolerance
from mlx_lm.models.cache import KVCache, trim_prompt_cache
from test_cache_joint import patched, started, steps  # noqa: F401
from test_traced import model

import mlx_phase
from mlx_phase import attention_ops, cache_joint
from mlx_phase.cache_joint import JOINT
from mlx_phase.step_cache import RECENT

# Lengths of steps, and below zero tokens to trim: over the end of recent keys, into
# those that the array holds, and both.
COURSES = {
    "ones": [1] * (RECENT + 5),
    "drafts": [5, -3, 5, -2, 16, -9, 16, -1, 16, -15, 3, 16, 1],
    "full": [16, 16, 16, 1],
    "far back": [16, 16, 2, -20, 1, -3, 4, 1],
    "before the first": [4, -10, 2, 1, 16],
}


@pytest.mark.parametrize("course", COURSES)
def test_keys_beside_the_array_have_the_bits_of_plain_caches(
    course,
    patched,  # noqa: F811
    monkeypatch,
):
    tokens = mx.random.randint(0, 64, (1, 128), key=mx.random.key(3))

    def went(caches) -> list[mx.array]:
        at, outs = 0, []
        for n in COURSES[course]:
            if n < 0:
                trim_prompt_cache(caches, -n)
                continue
            outs.append(patched(tokens[:, at : at + n], cache=caches))
            mx.eval(outs[-1])
            at += n
        return outs

    caches = started(patched)
    have = went(caches)
    assert [type(c) for c in caches] == [JOINT] * 2
    assert all(0 <= c.offset - c.held <= RECENT for c in caches)
    monkeypatch.setattr(cache_joint, "TIMES", 0)
    plain = started(patched)
    for x, y in zip(have, went(plain), strict=True):
        tolerance.assert_bits(x, y)
    assert [type(c) for c in plain] == [KVCache] * 2
    for a, b in zip(caches, plain, strict=True):
        assert a.offset == b.offset
        for x, y in zip(a.state[:2], b.state[:2], strict=True):
            tolerance.assert_bits(x[:, :, : a.offset], y[:, :, : a.offset])


def test_steps_without_a_kernel_have_all_keys(patched, monkeypatch):  # noqa: F811
    """A mask of arrays, or a kernel that is off: two arrays from the next step on."""
    want = steps(patched, started(patched), 22, [1, 1, 2])
    monkeypatch.setattr(attention_ops, "attend_joint", lambda *a, **more: None)
    m = model("llama", mx.bfloat16)
    mlx_phase.patch(m, check=False)
    caches = started(m, (1,))
    assert m._steps._apart == {0, 1} and type(caches[0]) is JOINT
    tolerance.assert_bits(steps(m, caches, 21, [1, 1, 1, 2])[:, 1:], want)
    assert [type(c) for c in caches] == [KVCache] * 2
