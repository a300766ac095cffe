"""Prompt texts and token lists, and the text of generated tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from . import BenchError

# Short, so that the default run ends within a minute on the CPU executor.
DEFAULT_PROMPT = "The capital of France is"
# Prompt of a model without a tokenizer (synthetic weights).
DEFAULT_LENGTH = 8


def encode(tokenizer: Any, prompt: str, raw: bool = False) -> list[int]:
    """Token ids of ``prompt``, as a user turn of the chat template where there is one.

    ``raw`` skips the template. BenchError without a tokenizer or for no tokens.
    """
    if tokenizer is None:
        raise BenchError(
            "this model has synthetic weights and no tokenizer: use --prompt-tokens "
            "instead of --prompt"
        )
    if not raw and getattr(tokenizer, "chat_template", None):
        turn = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(
            turn, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    else:
        ids = tokenizer.encode(prompt)
    if not ids:
        raise BenchError(f"--prompt {prompt!r} has no tokens: give some text")
    return [int(token) for token in ids]


def random_ids(config: dict[str, Any], length: int, seed: int) -> list[int]:
    """``length`` token ids below the vocabulary size; the same for the same seed."""
    vocab = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not vocab:
        raise BenchError("the model's config has no vocab_size: use --prompt")
    generator = random.Random(seed)
    return [generator.randrange(vocab) for _ in range(length)]


def end_ids(tokenizer: Any) -> set[int]:
    """Ids that end a text."""
    ids = getattr(tokenizer, "eos_token_ids", None)
    if ids is None:
        ids = [tokenizer.eos_token_id]
    return {int(token) for token in ids if token is not None}


def text_of(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Text of the tokens before the first end-of-text token."""
    ends = end_ids(tokenizer)
    stop = next((i for i, t in enumerate(tokens) if t in ends), len(tokens))
    return tokenizer.decode(list(tokens[:stop]))
