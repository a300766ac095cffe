"""Plain and speculative decoding of the patched model, interleaved, and what it costs.

The baseline is the patched model's own pipelined decode, since that is what drafts
replace. Both sides read the prompt in the same chunks, so greedy tokens have to be
equal: the kernels give a row the same bits alone and in a verification.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream, speculative_generate_step, wired_limit

from .. import ops
from ..models import Loaded
from ..speculate import (
    MAX_DRAFT,
    lookup_generate_step,
    roll_back,
    why_no_rollback,
)
from . import BenchError
from .endtoend import Patch, settle
from .generate import Run, compare, generate, weight_format
from .kv_cache import KV, PromptCache, prefill
from .measure import Clock, Stats, stats
from .speculate_result import Candidate, Job, Result

# The chunk that mlx-lm's plain loop takes by default. With drafts it takes another,
# and rows of a prompt of more than 16 tokens depend on their chunk.
CHUNK = 2048
# Models whose ids differ hardly agree on all of these.
TEXTS = ("The capital of France is", "def f(x):\n    return 17 * x", "Größe, 東京 🙂")


def check_counts(draft_tokens: Sequence[int]) -> None:
    """BenchError unless all are numbers of drafts whose verification has exact rows."""
    if not draft_tokens or not all(1 <= k <= MAX_DRAFT for k in draft_tokens):
        raise BenchError(
            f"--draft-tokens: numbers of 1 to {MAX_DRAFT}: a verification has one row "
            f"more, and rows are exact up to {MAX_DRAFT + 1}"
        )


def check(job: Job, model: nn.Module, draft: nn.Module | None) -> None:
    """Raise BenchError, before anything runs, for what cannot be measured."""
    check_counts(job.draft_tokens)
    if job.tokens < max(job.draft_tokens) + 2:
        raise BenchError(
            f"--tokens {job.tokens}: one verification of {max(job.draft_tokens)} "
            "drafts may give them all at once, so there is no speed: give more"
        )
    length = len(job.prompt) + job.tokens + max(job.rows)
    for name, m in (("model", model), ("draft model", draft)):
        caches = [] if m is None else PromptCache(m, job.kv).layers
        if reason := why_no_rollback(caches, length):
            raise BenchError(
                f"--draft: rejected drafts have to leave the cache of the {name}, and "
                f"its {reason}; run the bench without --draft"
            )


def check_draft(target: Loaded, draft: Loaded) -> None:
    """BenchError where the draft model's token ids are not the target's."""
    ours, theirs = (m.config.get("vocab_size") for m in (target, draft))
    if ours and theirs and theirs > ours:
        raise BenchError(
            f"--draft {draft.name}: its {theirs} tokens are more than the {ours} of "
            f"{target.name}: use a draft model of the same family"
        )
    one, two = target.tokenizer, draft.tokenizer
    if one is None or two is None:
        return
    for text in TEXTS:
        if list(one.encode(text)) != list(two.encode(text)):
            raise BenchError(
                f"--draft {draft.name}: it has other tokens than {target.name} for "
                f"{text!r}: use a draft model of the same family"
            )


def measure(
    model: nn.Module,
    job: Job,
    patch: Patch,
    *,
    draft: nn.Module | None = None,
    on_token: Callable[[], object] = lambda: None,
    on_answer: Callable[[Sequence[int]], object] = lambda tokens: None,
    generate: Callable[..., Run] = generate,
    clock: Clock = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Result:
    """Warm up, then time plain and each number of drafts, every round in turned order.

    draft: the draft model, None for lookup; both are patched. BenchError as `check`.
    """
    check(job, model, draft)
    form = weight_format(model)
    sides = [Candidate(k) for k in (0, *job.draft_tokens)]

    def run(side: Candidate, **options: Any) -> Run:
        if side.drafts:
            side.steps = []
            options["steps"] = partial(_steps, draft, side.drafts, side.steps)
        if job.kv is not None:
            options["kv"] = job.kv
        return generate(model, job.prompt, job.tokens, on_token=on_token, **options)

    with ExitStack() as stack:
        report = stack.enter_context(patch(model))
        settle(model)
        if draft is not None:
            stack.enter_context(patch(draft))
            settle(draft)
        for side in sides:
            side.warm = run(side, keep_logprobs=True)
            if not side.drafts:
                on_answer(side.warm.tokens)
        ops.reset_served()
        for i in range(job.repeats):
            for side in sides if i % 2 == 0 else sides[::-1]:
                if job.delay:
                    sleep(job.delay)
                side.runs.append(run(side))
        served = ops.served()
        stack.enter_context(mx.stream(generation_stream))
        stack.enter_context(wired_limit(model, [generation_stream]))
        cost = step_costs(model, job, clock)
        drafting = draft_cost(draft, job, clock) if draft is not None else 0.0
    plain, drafted = sides[0], sides[1:]
    equal, failures = {}, []
    for side in drafted:
        found = compare(plain.warm, side.warm, ("plain", f"{side.drafts} drafts"))
        equal[side.drafts] = found.text
        # Also a near tie: rows that are exact leave no room for one.
        if found.text != "yes":
            failures.append(f"tokens {found.text}")
    for side in sides:
        if any(each.tokens != side.warm.tokens for each in side.runs):
            failures.append(f"tokens with {side.drafts} drafts changed between runs")
    failures += [f"kernel {name}: {why}" for name, why in ops.off().items()]
    return Result(
        job=job,
        plain=plain,
        drafted=drafted,
        equal=equal,
        failures=failures,
        cost=cost,
        draft_cost=drafting,
        served=served,
        format=form,
        report=report,
    )


def _steps(
    draft: nn.Module | None,
    drafts: int,
    steps: list[tuple[int, int]],
    ids: mx.array,
    model: nn.Module,
    *,
    max_tokens: int,
    prompt_cache: list[Any],
    **options: Any,
) -> Iterator[tuple[int, mx.array]]:
    """Tokens as mlx-lm's plain loop yields them; ``steps`` gets the verifications."""
    options |= {"num_draft_tokens": drafts, "max_tokens": max_tokens}
    options["prefill_step_size"] = CHUNK
    if draft is None:
        for token, logprobs, _ in lookup_generate_step(
            ids,
            model,
            prompt_cache=prompt_cache,
            on_step=lambda *step: steps.append(step),
            **options,
        ):
            yield token, logprobs
        return
    bits = options.get("kv_bits")
    own = None if bits is None else KV(bits, options["kv_group_size"])
    caches = prompt_cache + PromptCache(draft, own).layers
    done = accepted = 0
    for token, logprobs, drafted in speculative_generate_step(
        ids, model, draft, prompt_cache=caches, **options
    ):
        accepted += drafted
        if not drafted or done + accepted == max_tokens:
            steps.append((min(drafts, max_tokens - done), accepted))
            done, accepted = done + accepted + 1, 0
        yield token, logprobs


def step_costs(model: nn.Module, job: Job, clock: Clock) -> dict[int, Stats]:
    """Seconds of a greedy step of each number of rows after the prompt, waited for."""
    cache = PromptCache(model, job.kv)
    prefill(model, mx.array([list(job.prompt)]), cache)
    samples: dict[int, list[float]] = {rows: [] for rows in job.rows}
    for i in range(job.repeats + 1):
        for rows in job.rows if i % 2 == 0 else job.rows[::-1]:
            ids = mx.array([[job.prompt[j % len(job.prompt)] for j in range(rows)]])
            mx.eval(ids)
            start = clock()
            logits = model(ids, cache=cache.layers)
            mx.eval(mx.argmax(logits, axis=-1))
            if i:  # the first of each is a warm-up
                samples[rows].append(clock() - start)
            roll_back(cache.layers, rows)
    return {rows: stats(times) for rows, times in samples.items()}


def draft_cost(draft: nn.Module, job: Job, clock: Clock) -> float:
    """Seconds of one drafted token, of as many in a row as are drafted at most."""
    cache = PromptCache(draft, job.kv)
    prefill(draft, mx.array([list(job.prompt)]), cache)
    count, samples = max(job.draft_tokens), []
    for _ in range(job.repeats + 1):
        y = mx.array([[job.prompt[-1]]])
        mx.eval(y)
        start = clock()
        for _ in range(count):
            y = mx.argmax(draft(y, cache=cache.layers)[:, -1:], axis=-1)
            mx.async_eval(y)
        mx.eval(y)
        samples.append((clock() - start) / count)
        roll_back(cache.layers, count)
    return median(samples[1:])
