"""Kernel sweeps against stock MLX, in one process and interleaved.

    python bench/kernels.py --suite decode --json bench/results/h200.jsonl
    python bench/kernels.py --suite small_m --json bench/results/h200.jsonl
    python bench/kernels.py --suite prefill --json bench/results/h200.jsonl
    python bench/kernels.py --suite attention --json bench/results/h200.jsonl
    python bench/kernels.py --suite host
    python bench/kernels.py --suite e2e --models llama-8b,llama-1b --tokens 128

Rows and their meaning: bench/README.md.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from rich.console import Console
from rich.markup import escape
from rich.progress import track

from mlx_phase import command, patched
from mlx_phase.bench import (
    BenchError,
    attention_suite,
    endtoend,
    gpu_time,
    kernel_suite,
    moe_suite,
    prefill_suite,
    record,
    small_m_suite,
    table,
)
from mlx_phase.bench.device import EMULATION, Environment, environment
from mlx_phase.bench.kernel_timer import Effort
from mlx_phase.bench.measure import NoiseError
from mlx_phase.bench.prompts import random_ids
from mlx_phase.executor import ExecutorError
from mlx_phase.model_error import ModelError
from mlx_phase.models import load
from mlx_phase.problem import FP_MODES, Matmul

Row = dict[str, Any]
Rows = Iterator[list[Row]]  # of one case each, to be kept at once
HOST = Matmul(1, 512, 512)
ALL_ROWS = ",".join(map(str, small_m_suite.ROWS))
PREFILL_ROWS = ",".join(map(str, prefill_suite.ROWS))
SUITES = ("decode", "small_m", "prefill", "attention", "moe", "host", "e2e")


def parser() -> argparse.ArgumentParser:
    """Options of the sweeps."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--suite", required=True, help=f"{', '.join(SUITES)} or a list")
    p.add_argument("--json", type=Path, help="append rows to this JSON Lines file")
    p.add_argument("--quick", action="store_true", help="main cases, fewer repeats")
    p.add_argument("--shapes", help="K x N, e.g. 4096x14336,8192x28672")
    p.add_argument("--rows", help="values of M, e.g. 1,2,4")
    p.add_argument("--bits", help="e.g. 4,8; attention: of the cache, 16 is plain")
    p.add_argument("--heads", help="of attention: Hq/HkvxD, e.g. 32/8x128,64/1x576/512")
    p.add_argument("--q-lens", help="of attention, e.g. 1,4 or, of prompts, 512,2048")
    p.add_argument("--k-lens", help="of attention, e.g. 8192,32768")
    p.add_argument("--group", type=int, help="weights per scale of affine")
    p.add_argument("--modes", help="affine, mxfp4, mxfp8, nvfp4, none")
    p.add_argument("--dtypes", help="float16, bfloat16, float32")
    p.add_argument("--repeats", type=int, default=8, help="timed blocks of each side")
    p.add_argument("--launches", type=int, default=8, help="launches per GPU block")
    p.add_argument("--chain", default="8,40", help="chain lengths of the wall times")
    p.add_argument(
        "--budget", type=float, default=160, help="start no kernel case after SECONDS"
    )
    p.add_argument("--models", default="llama-8b,llama-1b", help="of --suite e2e")
    p.add_argument("--tokens", type=int, default=128, help="of --suite e2e")
    p.add_argument("--prompt-tokens", type=int, default=64, help="of --suite e2e")
    p.add_argument("--layers-alone", action="store_true", help="e2e: no fused steps")
    return p


def numbers(text: str, option: str) -> list[int]:
    """``1,2,4`` as numbers above 0; BenchError names the option."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise BenchError(f"{option} takes numbers like 1,2,4; got {text!r}")
    return values


def chosen_cases(args: argparse.Namespace, suite: Any, all_rows: str) -> list[Matmul]:
    """The default cases, or the product of the given options. BenchError if empty.

    all_rows: values of M where --rows is not given.
    """
    options = (args.shapes, args.rows, args.bits, args.modes, args.dtypes, args.group)
    if not any(options):
        return list(suite.default_cases(args.quick))
    names = args.shapes or ",".join(kernel_suite.MAIN)
    shapes = [kernel_suite.shape_of(text) for text in names.split(",")]
    rows = numbers(args.rows or all_rows, "--rows")
    dtypes = (args.dtypes or "float16,bfloat16").split(",")
    cases = []
    for mode in (args.modes or "affine").split(","):
        bits = numbers(args.bits or "4", "--bits") if mode == "affine" else [16]
        group = (args.group or 64) if mode == "affine" else 0
        forms = [FP_MODES[mode]] if mode in FP_MODES else [(b, group) for b in bits]
        cases += [
            Matmul(m, n, k, dtype, b, g, mode)
            for k, n in shapes
            for b, g in forms
            for dtype in dtypes
            for m in rows
        ]
    for case in cases:
        if reason := suite.supports(case):
            raise BenchError(f"{kernel_suite.describe(case)}: {reason}")
    return cases


def heads(text: str) -> tuple[int, ...]:
    """``32/8x128`` as (Hq, Hkv, D), ``64/1x576/512`` as (Hq, Hkv, D, Dv)."""
    match = re.fullmatch(r"(\d+)/(\d+)x(\d+)(?:/(\d+))?", text.lower())
    found = tuple(int(part) for part in match.groups() if part) if match else (0,)
    if 0 in found:
        raise BenchError(f"--heads takes Hq/HkvxD such as 32/8x128; got {text!r}")
    return found


def effort(args: argparse.Namespace) -> Effort:
    """Repeats and chain lengths of the options; BenchError if they make no sense."""
    chain = numbers(args.chain, "--chain")
    if len(chain) != 2 or chain[0] >= chain[1]:
        raise BenchError(f"--chain takes two rising lengths; got {args.chain!r}")
    if args.repeats < 1 or args.launches < 1:
        raise BenchError("--repeats and --launches must be at least 1")
    repeats = min(args.repeats, 4) if args.quick else args.repeats
    return Effort(repeats, args.launches, (chain[0], chain[1]))


def matmul_rows(
    name: str,
    suite: Any,
    all_rows: str,
    args: argparse.Namespace,
    env: Environment,
    err: Console,
) -> Rows:
    """Rows of a suite of products; cases beyond the time budget are named, not run."""
    if env.executor == "cpu" and not args.shapes:
        raise BenchError("the default shapes take hours in emulation: give small "
                         "ones, such as --shapes 512x512")  # fmt: skip
    return sweep(name, suite, chosen_cases(args, suite, all_rows), args, env, err)


def attention_rows(args: argparse.Namespace, env: Environment, err: Console) -> Rows:
    """Rows of the attention suite, as `matmul_rows`."""
    if env.executor == "cpu" and not args.k_lens:
        raise BenchError("the default lengths take hours in emulation: give short "
                         "ones, such as --k-lens 256")  # fmt: skip
    options = {"heads": [heads(text) for text in (args.heads or "").split(",") if text]}
    for name, option in (("bits", "bits"), ("q_lens", "q-lens"), ("k_lens", "k-lens")):
        text = getattr(args, name)
        options[name] = numbers(text, f"--{option}") if text else None
    options["dtypes"] = args.dtypes.split(",") if args.dtypes else None
    cases = attention_suite.chosen_cases(options, args.quick)
    return sweep("attention", attention_suite, cases, args, env, err)


def moe_rows(args: argparse.Namespace, env: Environment, err: Console) -> Rows:
    """Rows of the suite of experts, as `matmul_rows`; --rows are tokens."""
    rows = args.rows and numbers(args.rows, "--rows")
    cases = moe_suite.chosen(rows, args.quick, env)
    return sweep("moe", moe_suite, cases, args, env, err)


def sweep(
    name: str,
    suite: Any,
    cases: list[Any],
    args: argparse.Namespace,
    env: Environment,
    err: Console,
) -> Rows:
    """``suite.measure_case`` of every case until the time budget is spent."""
    events = gpu_time.cuda_events if env.executor == "cuda" else None
    start, done, plan_of = time.monotonic(), 0, effort(args)
    if events is not None:
        warm_profiler(events, err)
    for case in track(cases, name, console=err, transient=True):
        if time.monotonic() - start > args.budget:
            break
        done += 1
        try:
            found = suite.measure_case(case, env, plan_of, gpu_events=events)
            yield found if isinstance(found, list) else [found]
        except NoiseError as noise:
            err.print(f"no row: {noise}; try a longer --chain")
        except RuntimeError as error:
            # MLX reports a kernel that does not compile or launch so. The rest goes on.
            err.print(f"no row: {suite.describe(case)}: {error}", markup=False)
    for case in cases[done:]:
        err.print(f"not run, time budget: {suite.describe(case)}")


def warm_profiler(events: gpu_time.Recorder, err: Console) -> None:
    """Attach the profiler before MLX makes its graphs; say so if it can't be."""
    try:
        events(lambda: mx.eval(mx.arange(8) + 1))
    except gpu_time.ProfileError as missing:
        err.print(f"wall times instead of GPU times: {missing}", markup=False)


def host_rows(args: argparse.Namespace, env: Environment, err: Console) -> Rows:
    """The host cost of a launch, ours against stock."""
    yield [kernel_suite.host_case(HOST, env, effort(args))]


def e2e_rows(args: argparse.Namespace, env: Environment, err: Console) -> Rows:
    """Stock and patched generation of every model, interleaved."""
    if args.tokens < 2 or args.prompt_tokens < 1:
        raise BenchError("--tokens must be at least 2 and --prompt-tokens at least 1")
    alone = {"steps": False, "attention": False} if args.layers_alone else {}
    repeats, how = effort(args).repeats, partial(patched, **alone)
    for spec in args.models.split(","):
        with err.status(escape(f"loading {spec}")):
            loaded = load(spec)
        job = endtoend.Job(
            name=loaded.name,
            config=loaded.config,
            prompt=random_ids(loaded.config, args.prompt_tokens, seed=0),
            tokens=args.tokens,
            repeats=repeats,
            host_steps=0 if env.executor == "cpu" else 20,
        )
        with err.status(escape(f"{loaded.name}: stock and patched")):
            events = gpu_time.cuda_events if env.executor == "cuda" else None
            result = endtoend.measure(loaded.model, job, how, events=events)
        found = endtoend.rows(result, env, "linear layers alone" * bool(alone))
        table.show(Console(), result, found, env, loaded.source)
        yield found
        del loaded, result


RUN: dict[str, Callable[..., Rows]] = {
    "decode": partial(matmul_rows, "decode", kernel_suite, "1"),
    "small_m": partial(matmul_rows, "small_m", small_m_suite, ALL_ROWS),
    "prefill": partial(matmul_rows, "prefill", prefill_suite, PREFILL_ROWS),
    "attention": attention_rows,
    "moe": moe_rows,
    "host": host_rows,
    "e2e": e2e_rows,
}


def show(rows: list[Row]) -> None:
    """Print per-kernel rows of one suite."""
    own = {"attention": attention_suite, "small_m": small_m_suite, "moe": moe_suite}
    suite = (own | {"prefill": prefill_suite}).get(rows[0]["suite"], kernel_suite)
    Console(width=None if sys.stdout.isatty() else 200).print(suite.table(rows))
    for note in sorted({r["note"] for r in rows if r["note"]}):
        print(note)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suites; returns the exit status (2: bad input, said in one line)."""
    args = parser().parse_args(argv)
    err = Console(stderr=True, markup=False)
    try:
        suites = args.suite.split(",")
        for suite in suites:
            if suite not in RUN:
                raise BenchError(f"unknown suite {suite!r}: use {', '.join(SUITES)}")
        record.check(args.json)
        env = environment()
        if env.executor == "cpu":
            err.print(EMULATION)
        for suite in suites:
            rows = []
            for found in RUN[suite](args, env, err):
                rows += found
                if args.json is not None:
                    record.append(args.json, found)
            if rows and suite != "e2e":
                show(rows)
    except (BenchError, NoiseError, ModelError, ExecutorError, OSError) as error:
        print(f"bench/kernels.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(command.run(main, "bench/kernels.py"))
