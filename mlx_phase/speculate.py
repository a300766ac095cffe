"""Speculative decoding with one model: drafts looked up in the text, and tree drafts.

With exact rows, a verification gives each token the bits that plain decoding gives it,
so greedy output is the same token for token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream, maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from .plan import MAX_M

# A verification has one row more than drafts, and rows are exact up to MAX_M.
MAX_DRAFT = MAX_M - 1


class Lookup:
    """Drafts from the text itself: what followed the latest equal n-gram.

    ngram: the longest run of last tokens that is looked for; shorter ones come after.
    """

    def __init__(self, tokens: Iterable[int] = (), ngram: int = 3):
        if ngram < 1:
            raise ValueError(f"ngram must be at least 1, got {ngram}")
        self.tokens: list[int] = []
        self.ngram = ngram
        # n-gram -> where the token after its latest occurrence is.
        self._next: dict[tuple[int, ...], int] = {}
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        """Append a token to the text."""
        at = len(self.tokens)
        # Only now: an n-gram that ends the text has nothing that followed it.
        for n in range(1, min(self.ngram, at) + 1):
            self._next[tuple(self.tokens[at - n :])] = at
        self.tokens.append(token)

    def draft(self, most: int) -> list[int]:
        """``most`` tokens that may come next; none if no n-gram occurred before."""
        end = len(self.tokens)
        for n in range(min(self.ngram, end), 0, -1):
            at = self._next.get(tuple(self.tokens[end - n :]))
            if at is not None:
                # A match that runs into the end of the text repeats with its period.
                return [self.tokens[at + i % (end - at)] for i in range(most)]
        return []


def why_no_rollback(caches: Sequence[Any], length: int) -> str | None:
    """Why rejected drafts cannot be taken out of ``caches``; None if they can.

    length: tokens that the caches will hold at most. A rotating cache rolls back only
    until it is full, and mlx-lm's trimming then removes nothing, silently.
    """
    for cache in caches:
        name = type(cache).__name__
        if hasattr(cache, "caches"):
            if reason := why_no_rollback(cache.caches, length):
                return reason
        size = getattr(cache, "max_size", None)
        if isinstance(size, int) and length >= size:
            return f"{name} of {size} tokens is full before the {length} of this run"
        if not cache.is_trimmable():
            return f"{name} cannot drop its last tokens"
    return None


def roll_back(caches: list[Any], tokens: int) -> None:
    """Drop the last ``tokens`` of each cache; RuntimeError if one did not."""
    if tokens and trim_prompt_cache(caches, tokens) != tokens:
        raise RuntimeError(
            f"the caches did not drop {tokens} rejected tokens, so what follows would "
            "be wrong: decode without drafts"
        )


def lookup_generate_step(
    prompt: mx.array,
    model: nn.Module,
    *,
    num_draft_tokens: int = 4,
    ngram: int = 3,
    max_tokens: int = 256,
    sampler: Callable[[mx.array], mx.array] | None = None,
    prompt_cache: list[Any] | None = None,
    prefill_step_size: int = 2048,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = 0,
    on_step: Callable[[int, int], object] = lambda drafted, accepted: None,
) -> Iterator[tuple[int, mx.array, bool]]:
    """Generate from prompt ids [L] with drafts from `Lookup`; one model is enough.

    Yields (token, log probabilities [vocab], drafted or not), as mlx-lm's
    ``speculative_generate_step`` does, whose options these are. on_step: called with
    the numbers of drafted and of accepted tokens after each verification. prompt_cache
    ends with all tokens given out but the last, also if the caller stops early.
    Raises ValueError for caches that cannot roll back and for no prompt.
    """
    if prompt.ndim != 1 or not prompt.size or num_draft_tokens < 0:
        raise ValueError(
            f"need a prompt of ids [L] and num_draft_tokens >= 0, got {prompt.shape} "
            f"and {num_draft_tokens}"
        )
    caches = make_prompt_cache(model) if prompt_cache is None else prompt_cache
    length = prompt.size + max_tokens + num_draft_tokens
    if reason := why_no_rollback(caches, length):
        raise ValueError(f"drafts need caches that can roll back: {reason}")
    return _generate(
        prompt,
        caches,
        Lookup(prompt.tolist(), ngram),
        _Verifier(model, caches, sampler, quantized_kv_start, kv_group_size, kv_bits),
        num_draft_tokens,
        max_tokens,
        prefill_step_size,
        on_step,
    )


class _Verifier:
    """Calls of the model; the cache is quantised after each, as mlx-lm does."""

    def __init__(self, model, caches, sampler, *quantise: Any):
        self.model, self.caches, self.quantise = model, caches, quantise
        self.sampler = sampler or (lambda logprobs: mx.argmax(logprobs, axis=-1))

    def fill(self, ids: mx.array) -> None:
        """Put ids [L] into the cache."""
        with mx.stream(generation_stream):
            self.model(ids[None], cache=self.caches)
            maybe_quantize_kv_cache(self.caches, *self.quantise)
            mx.eval([c.state for c in self.caches])

    def __call__(self, tokens: list[int]) -> tuple[list[int], mx.array]:
        """The token after each of ``tokens`` [M], log probabilities [M, vocab]."""
        with mx.stream(generation_stream):
            ids = mx.array([tokens], mx.uint32)
            logits = self.model(ids, cache=self.caches)[0]
            maybe_quantize_kv_cache(self.caches, *self.quantise)
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            out = self.sampler(logprobs)
            mx.eval(out)
        return out.tolist(), logprobs


def _generate(
    prompt, caches, text, verify, num_draft, max_tokens, prefill_step_size, on_step
) -> Iterator[tuple[int, mx.array, bool]]:
    for at in range(0, prompt.size - 1, prefill_step_size):
        verify.fill(prompt[at : min(at + prefill_step_size, prompt.size - 1)])
    # The first step of an empty cache is no decode step, so it comes without drafts.
    room = num_draft if prompt.size > 1 else 0
    last, done = text.tokens[-1], 0
    while done < max_tokens:
        drafts = text.draft(min(room, max_tokens - done - 1))
        out, logprobs = verify([last, *drafts])
        pairs = zip(drafts, out, strict=False)
        n = next((i for i, (a, b) in enumerate(pairs) if a != b), len(drafts))
        roll_back(caches, len(drafts) - n)
        on_step(len(drafts), n)
        given = 0
        try:
            for i, token in enumerate(out[: n + 1]):
                text.add(token)
                given += 1
                yield token, logprobs[i], i < n
        finally:
            roll_back(caches, n + 1 - given)
        last, room, done = out[n], num_draft, done + n + 1


def tree_of(paths: Sequence[Sequence[int]], last: int) -> tuple[list[int], list[int]]:
    """Tokens and parents of the tree that merges draft ``paths`` after token ``last``.

    Node 0 is ``last``, the newest token that is no draft, with parent -1; each other
    node comes after its parent. Equal beginnings of paths share their nodes.
    """
    tokens, parents, known = [int(last)], [-1], {}
    for path in paths:
        at = 0
        for token in map(int, path):
            if (at, token) not in known:
                known[at, token] = len(tokens)
                tokens.append(token)
                parents.append(at)
            at = known[at, token]
    return tokens, parents


def _check_tree(parents: Sequence[int]) -> None:
    bad = [i for i, p in enumerate(parents) if not -1 <= p < i or (p == -1) != (i == 0)]
    if bad or not parents:
        raise ValueError(
            "parents must be -1 for node 0 and an earlier node for each other, got "
            f"{list(parents)}"
        )


def tree_positions(parents: Sequence[int], past: int) -> mx.array:
    """int32 [T]: position of each node after ``past`` tokens, past + its depth.

    For `mx.fast.rope`, which takes one offset a sequence: make nodes its batch. Raises
    ValueError for parents that are no tree.
    """
    _check_tree(parents)
    depth: list[int] = []
    for parent in parents:
        depth.append(depth[parent] + 1 if depth else 0)
    return past + mx.array(depth, mx.int32)


def tree_mask(parents: Sequence[int], past: int) -> mx.array:
    """bool [T, past + T] for attention: True where node i attends to a key.

    Keys are the ``past`` tokens of the cache and the T nodes in their order; a node
    sees the past, its ancestors and itself. Raises ValueError as `tree_positions`.
    """
    _check_tree(parents)
    rows: list[list[bool]] = []
    for i, parent in enumerate(parents):
        row = list(rows[parent]) if i else [True] * past + [False] * len(parents)
        row[past + i] = True
        rows.append(row)
    return mx.array(rows)


def tree_accept(
    tokens: Sequence[int], parents: Sequence[int], chosen: Sequence[int]
) -> list[int]:
    """Nodes whose tokens the model confirms, from node 0 on.

    tokens, parents: as `tree_of` gives them. chosen [T]: the model's token after each
    node. The tokens gained are ``chosen[n]`` of the nodes given back.
    """
    _check_tree(parents)
    child = {(p, t): i for i, (p, t) in enumerate(zip(parents, tokens, strict=True))}
    path = [0]
    while (node := child.get((path[-1], chosen[path[-1]]))) is not None:
        path.append(node)
    return path
