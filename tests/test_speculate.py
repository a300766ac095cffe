"""Lookup drafts, generation with them, caches that cannot roll back, tree drafts."""

import mlx.core as mx
import mlx.nn as nn
import pytest
import tolerance
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate, generate_step, speculative_generate_step
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from test_traced import model as tiny

import mlx_phase
from mlx_phase import ops
from mlx_phase.byte_tokenizer import byte_tokenizer
from mlx_phase.speculate import (
    Lookup,
    lookup_generate_step,
    roll_back,
    why_no_rollback,
)

PROMPT = mx.array([3, 17, 5, 9, 3, 17, 5, 11, 40, 41, 42, 40, 41, 42, 40, 41])

# --- lookup ---


def latest_match(tokens: list[int], most: int, ngram: int) -> list[int]:
    """The same by search: longest n-gram first, its latest earlier occurrence."""
    end = len(tokens)
    for n in range(min(ngram, end - 1), 0, -1):
        for at in range(end - 1, n - 1, -1):
            if tokens[at - n : at] == tokens[end - n :]:
                text = list(tokens)
                for i in range(most):
                    text.append(text[at + i])
                return text[end:]
    return []


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=30), st.integers(0, 6), st.integers(1, 4))
def test_drafts_are_what_followed_the_latest_match(tokens, most, ngram):
    text = Lookup(tokens[: len(tokens) // 2], ngram)
    for token in tokens[len(tokens) // 2 :]:
        text.add(token)
    assert text.tokens == tokens
    assert text.draft(most) == latest_match(tokens, most, ngram)


def test_drafts_of_a_period_go_on():
    assert Lookup([7, 1, 2, 3, 1, 2, 3]).draft(5) == [1, 2, 3, 1, 2]
    assert Lookup([1, 2, 3]).draft(4) == []
    with pytest.raises(ValueError, match="ngram must be at least 1, got 0"):
        Lookup(ngram=0)


# --- generation ---


@pytest.fixture(scope="module")
def model():
    m = tiny("llama", mx.bfloat16)
    mlx_phase.patch(m, check=False)
    yield m
    mlx_phase.unpatch(m)


def plain(model, prompt, n, **options) -> list[int]:
    return [int(t) for t, _ in generate_step(prompt, model, max_tokens=n, **options)]


KV8 = {"kv_bits": 8, "kv_group_size": 64, "quantized_kv_start": 0}


@pytest.mark.parametrize("options", [{}, KV8], ids=["plain cache", "8-bit cache"])
def test_lookup_gives_the_tokens_of_plain_decoding(model, options):
    want = plain(model, PROMPT, 24, **options)
    for drafts in (0, 1, 4):
        steps = []
        out = list(
            lookup_generate_step(
                PROMPT,
                model,
                num_draft_tokens=drafts,
                max_tokens=24,
                on_step=lambda *step, to=steps: to.append(step),
                **options,
            )
        )
        assert [t for t, _, _ in out] == want
        assert sum(a + 1 for _, a in steps) == 24
        assert sum(d for _, _, d in out) == sum(a for _, a in steps)
        assert all(a <= d <= drafts for d, a in steps)
        if drafts:
            # A tiny model repeats itself, so some drafts are right and some wrong.
            assert 0 < sum(a for _, a in steps) < sum(d for d, _ in steps)
            assert len(steps) < 24
    assert not [r for r in ops.served().stock if "> 16" not in r]


def test_log_probabilities_have_the_bits_of_plain_decoding(model):
    want = [p for _, p in generate_step(PROMPT, model, max_tokens=12)]
    have = [p for _, p, _ in lookup_generate_step(PROMPT, model, max_tokens=12)]
    tolerance.assert_bits(mx.stack(have), mx.stack(want))


@pytest.mark.parametrize("length", [1, 2])
def test_short_prompts(model, length):
    want = plain(model, PROMPT[:length], 10)
    found = lookup_generate_step(PROMPT[:length], model, max_tokens=10)
    assert [t for t, _, _ in found] == want


def test_one_token_and_none(model):
    (only,) = lookup_generate_step(PROMPT, model, max_tokens=1)
    assert [only[0]] == plain(model, PROMPT, 1)
    assert list(lookup_generate_step(PROMPT, model, max_tokens=0)) == []


@pytest.mark.parametrize("stop", range(1, 8))
def test_a_caller_that_stops_finds_the_cache_at_its_last_token(model, stop):
    want = plain(model, PROMPT, 12)
    cache = make_prompt_cache(model)
    steps = lookup_generate_step(PROMPT, model, prompt_cache=cache, max_tokens=12)
    out = [next(steps)[0] for _ in range(stop)]
    steps.close()
    assert all(c.offset == PROMPT.size + stop - 1 for c in cache)
    rest = plain(model, mx.array(out[-1:]), 12 - stop, prompt_cache=cache)
    assert out + rest == want


def test_a_sampler_draws_every_token(model):
    drawn = []

    def sampler(logprobs):
        drawn.append(logprobs.shape[0])
        return mx.random.categorical(logprobs)

    mx.random.seed(1)
    out = list(lookup_generate_step(PROMPT, model, max_tokens=9, sampler=sampler))
    assert len(out) == 9 and sum(drawn) >= 9


def close_to_the_model() -> nn.Module:
    """A draft model that is right now and then."""
    draft = tiny("llama", mx.bfloat16)
    norm = draft.model.norm
    noise = mx.random.normal(norm["weight"].shape, norm["weight"].dtype)
    norm["weight"] = norm["weight"] + 0.3 * noise
    return draft


@pytest.mark.parametrize("options", [{}, KV8], ids=["plain cache", "8-bit cache"])
def test_mlx_lm_with_a_draft_model_gives_the_tokens_of_plain_decoding(model, options):
    draft = close_to_the_model()
    with mlx_phase.patched(draft, check=False):
        want = plain(model, PROMPT, 20, **options)
        for drafts in (1, 4):
            more = options | {"num_draft_tokens": drafts, "max_tokens": 20}
            out = list(speculative_generate_step(PROMPT, model, draft, **more))
            assert [t for t, _, _ in out] == want
            assert 0 < sum(d for _, _, d in out) < 20


def test_mlx_lm_generate_takes_a_draft_model(model):
    tokenizer, prompt = byte_tokenizer(96), PROMPT.tolist()
    want = generate(model, tokenizer, prompt, max_tokens=12)
    draft = close_to_the_model()
    more = {"draft_model": draft, "num_draft_tokens": 3, "max_tokens": 12}
    with mlx_phase.patched(draft, check=False):
        assert generate(model, tokenizer, prompt, **more) == want


def test_wrong_arguments_are_said_before_anything_runs(model):
    for prompt, drafts in ((mx.array([[1]]), 1), (mx.array([1]), -1)):
        with pytest.raises(ValueError, match="need a prompt of ids"):
            lookup_generate_step(prompt, model, num_draft_tokens=drafts)
    rotating = [RotatingKVCache(24) for _ in model.layers]
    with pytest.raises(ValueError, match="roll back: RotatingKVCache of 24 tokens"):
        lookup_generate_step(PROMPT, model, prompt_cache=rotating)


# --- caches ---


def filled(cache, tokens: int):
    for _ in range(tokens):
        cache.update_and_fetch(*[mx.ones((1, 1, 1, 8))] * 2)
    return cache


def test_caches_that_cannot_roll_back_are_named():
    assert why_no_rollback([KVCache(), CacheList(KVCache(), KVCache())], 99) is None
    assert why_no_rollback([RotatingKVCache(100)], 99) is None
    found = why_no_rollback([KVCache(), RotatingKVCache(8)], 9)
    assert found == "RotatingKVCache of 8 tokens is full before the 9 of this run"
    assert "ArraysCache" in why_no_rollback([KVCache(), ArraysCache(2)], 1)
    nested = CacheList(KVCache(), RotatingKVCache(8))
    assert "RotatingKVCache" in why_no_rollback([nested], 9)


def test_a_cache_that_drops_nothing_is_an_error():
    full = filled(RotatingKVCache(8), 9)
    with pytest.raises(RuntimeError, match="did not drop 2 rejected tokens"):
        roll_back([full], 2)
    mixed = [filled(KVCache(), 9), full]
    with pytest.raises(RuntimeError, match="decode without drafts"):
        roll_back(mixed, 2)
    roll_back([full], 0)
    plain = filled(KVCache(), 9)
    roll_back([plain], 2)
    assert plain.offset == 7


@pytest.mark.parametrize("steps", [True, False])
def test_mlx_lm_is_stopped_where_it_would_go_on_behind_rejected_drafts(steps):
    model, draft = tiny("llama", mx.bfloat16), close_to_the_model()
    rotating = [RotatingKVCache(24) for _ in model.layers]
    with mlx_phase.patched(model, check=False, steps=steps):
        want = plain(model, PROMPT, 20, prompt_cache=rotating)
        rotating = [RotatingKVCache(24) for _ in model.layers]
        caches = [*rotating, *make_prompt_cache(draft)]
        more = {"num_draft_tokens": 3, "max_tokens": 20, "prompt_cache": caches}
        out = []
        with pytest.raises(ValueError, match="RotatingKVCache drops no tokens once"):
            for token, *_ in speculative_generate_step(PROMPT, model, draft, **more):
                out.append(token)
        assert 4 <= len(out) < 20 and out == want[: len(out)]
        with pytest.raises(ValueError, match="rejected drafts could not be taken out"):
            model(mx.array([[1]]), cache=rotating)
        model(mx.array([[1]]), cache=make_prompt_cache(model))
    # As before for those who are not patched.
    model(mx.array([[1]]), cache=rotating)


def test_a_draft_model_that_is_not_patched_may_forget(model):
    """Its cache decides which drafts are made, not which tokens come out."""
    draft = close_to_the_model()
    want = plain(model, PROMPT, 20)
    rotating = [RotatingKVCache(18) for _ in draft.layers]
    caches = [*make_prompt_cache(model), *rotating]
    more = {"num_draft_tokens": 3, "max_tokens": 20, "prompt_cache": caches}
    out = speculative_generate_step(PROMPT, model, draft, **more)
    assert [token for token, *_ in out] == want
