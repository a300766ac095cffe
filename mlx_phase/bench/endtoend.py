"""Stock and patched generation, interleaved on the same loaded model."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import ops
from ..executor import executor_name
from ..roofline import gbs, mbu, step_bytes
from . import record
from .device import Environment
from .generate import (
    Comparison,
    Run,
    compare,
    decode_weight_bytes,
    generate,
    host_step,
    weight_format,
)
from .gpu_time import Recorder
from .kv_cache import KV
from .measure import COMPARABLE, Stats, abba, drift_free_ratio, stats, verdict
from .step_cost import step_cost

NOT_COMPARED = "not checked (stock was not run)"
Patch = Callable[[nn.Module], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Job:
    """What to run. ``tokens`` >= 2; ``host_steps`` 0 leaves host cost unmeasured.

    ``kv`` None: the cache as the model makes it.
    """

    name: str
    config: dict[str, Any]
    prompt: Sequence[int]
    tokens: int
    repeats: int
    stock: bool = True
    delay: float = 0.0
    host_steps: int = 0
    kv: KV | None = None

    @property
    def runs(self) -> int:
        """Generations in all, the warm-up of each side included."""
        return (self.repeats + 1) * (2 if self.stock else 1)


@dataclass
class Side:
    """All runs of one side (stock or patched)."""

    warm: Run | None = None
    runs: list[Run] = field(default_factory=list)
    build: list[float] = field(default_factory=list)
    evaluate: list[float] = field(default_factory=list)
    # Of a decode step; the GPU's time is known where there is a profiler.
    launches: int | None = None
    gpu_us: float | None = None

    def stats(self, value: Callable[[Run], float]) -> Stats:
        """Median and spread of a quantity over the timed runs."""
        return stats([value(run) for run in self.runs])


@dataclass
class Result:
    """Everything measured in one job."""

    job: Job
    patched: Side
    stock: Side | None
    equal: Comparison
    failures: list[str]
    weight_bytes: int
    served: dict[str, int]
    prompt_served: dict[str, int]
    format: dict[str, Any]
    report: Any
    # Why stock could not run this job, where it could not.
    refused: str | None = None

    @property
    def bytes_per_token(self) -> int:
        """Weights and mean KV cache read by one decode step."""
        return step_bytes(self.weight_bytes, self.patched.runs[0].kv_bytes)

    @property
    def comparable(self) -> str:
        """``yes`` or why these numbers must not be compared."""
        return verdict(self.job.repeats, self.failures)

    def ratio(self, value: Callable[[Run], float]) -> float | None:
        """Stock time over patched time, drift removed (None without stock)."""
        if self.stock is None:
            return None
        return drift_free_ratio(
            [value(run) for run in self.patched.runs],
            [value(run) for run in self.stock.runs],
        )


def settle(model: nn.Module, prompt: Sequence[int] = (), kv: KV | None = None) -> None:
    """Steps outside the clock: layers bind, and steps are traced, at their first call.

    prompt: of the run to come, which this begins; not on a CPU, where nothing is
    compiled into a trace and an emulated prompt takes long.
    """
    with ops.counted():
        if prompt and executor_name() != "cpu":
            generate(model, prompt, 2, kv=kv)
        else:
            mx.eval(model(mx.zeros((1, 1), dtype=mx.int32)))


def measure(
    model: nn.Module,
    job: Job,
    patch: Patch,
    *,
    on_token: Callable[[], object] = lambda: None,
    on_answer: Callable[[Sequence[int]], object] = lambda tokens: None,
    generate: Callable[..., Run] = generate,
    sleep: Callable[[float], None] = time.sleep,
    events: Recorder | None = None,
) -> Result:
    """Warm up both sides, then time them in A B B A order (A is patched).

    ``patch(model)`` is a context manager that yields the patch report. Patching and
    its checks happen outside the clock; the served counters are those of the timed
    runs, chunks of the prompt apart from steps (its last token is one). ``on_answer``
    gets the patched tokens as soon as they are known. ``events``: the profiler of
    kernels, where there is one.
    """
    weights, form = decode_weight_bytes(model, job.config), weight_format(model)
    sides = {"A": Side(), "B": Side()}
    report = refused = None
    failures: list[str] = []

    def run(name: str, delay: float = 0, **options: Any) -> Run:
        nonlocal report
        if job.kv is not None:
            options["kv"] = job.kv
        with patch(model) if name == "A" else nullcontext(report) as report:
            settle(model, job.prompt, job.kv)
            if delay:
                sleep(delay)
            return generate(model, job.prompt, job.tokens, on_token=on_token, **options)

    order = abba(job.repeats) if job.stock else "A" * job.repeats
    sides["A"].warm = run("A", keep_logprobs=True)
    on_answer(sides["A"].warm.tokens)
    if job.stock:
        try:
            sides["B"].warm = run("B", keep_logprobs=True)
        except RuntimeError as error:
            if job.kv is None:
                raise
            # CUDA has no quantised product for some cache shapes.
            refused = f"stock can't run this: {str(error).splitlines()[0]}"
            job, order = replace(job, stock=False), "A" * job.repeats
    ops.reset_served()
    for name in order:
        sides[name].runs.append(run(name, job.delay))
    served = Counter(ops.served())
    prompt = sum((Counter(r.prompt_served) for r in sides["A"].runs), Counter())
    for name in sorted(set(order)) if job.host_steps else ():
        side = sides[name]
        with patch(model) if name == "A" else nullcontext():
            settle(model, job.prompt, job.kv)
            times = host_step(model, job.prompt, job.host_steps, kv=job.kv)
            cost = step_cost(model, job.prompt, job.kv, events)
        side.build, side.evaluate = times
        side.launches, side.gpu_us = cost
    equal = Comparison(NOT_COMPARED)
    if job.stock:
        equal = compare(sides["B"].warm, sides["A"].warm)
        if equal.failure:
            failures.append(equal.failure)
    for name in sorted(set(order)):
        side = sides[name]
        if any(each.tokens != side.warm.tokens for each in side.runs):
            failures.append(f"{'patched' if name == 'A' else 'stock'} tokens changed "
                            "from run to run")  # fmt: skip
    failures += [f"kernel {name}: {why}" for name, why in ops.off().items()]
    return Result(
        job=job,
        patched=sides["A"],
        stock=sides["B"] if job.stock else None,
        equal=equal,
        failures=failures,
        weight_bytes=weights,
        served=dict(served - prompt),
        prompt_served=dict(prompt),
        format=form,
        report=report,
        refused=refused,
    )


def rows(result: Result, env: Environment, note: str = "") -> list[dict[str, Any]]:
    """The prefill row and the decode row of a result; note: to stand in both."""
    notes = [note] if note else []
    return [_row(result, env, phase, notes) for phase in ("prefill", "decode")]


def _row(
    result: Result, env: Environment, phase: str, notes: list[str]
) -> dict[str, Any]:
    job, decode = result.job, phase == "decode"

    def seconds(run: Run) -> float:
        return run.step if decode else run.ttft / run.prompt_tokens

    values: dict[str, Any] = {
        "suite": "e2e",
        "model": job.name,
        "phase": phase,
        "prompt_tokens": len(job.prompt),
        "tokens": job.tokens,
        "us_source": "wall",
        "ratio": result.ratio(seconds),
        "repeats": job.repeats,
        "delay_s": job.delay,
        "comparable": result.comparable,
        "tokens_equal": result.equal.text,
        "served": result.served if decode else result.prompt_served,
        "dtype": _dtype(result.patched.warm),
        **result.format,
        **env.fields(),
    }
    if job.kv is not None:
        values |= {"kv_bits": job.kv.bits, "kv_group": job.kv.group}
    for prefix, side in (("", result.patched), ("stock_", result.stock)):
        if side is None:
            continue
        time_ = side.stats(seconds)
        values |= {
            f"{prefix}us": time_.median * 1e6,
            f"{prefix}tok_s": 1 / time_.median,
            f"{prefix}spread": time_.spread,
            f"{prefix}peak_bytes": max(run.peak_bytes for run in side.runs),
        }
        if not prefix:
            values |= {"us_min": time_.low * 1e6, "us_max": time_.high * 1e6}
        if not decode:
            ttft = side.stats(lambda run: run.ttft).median
            values[f"{prefix}ttft_ms"] = ttft * 1e3
            continue
        for percent in (50, 99):
            itl = side.stats(lambda run, p=percent: run.latency(p)).median
            values[f"{prefix}itl_p{percent}_ms"] = itl * 1e3
        if side.build:
            values[f"{prefix}build_us"] = median(side.build) * 1e6
            values[f"{prefix}eval_us"] = median(side.evaluate) * 1e6
            values[f"{prefix}launches"] = side.launches
        if side.gpu_us is not None:
            # Kernels timed by the profiler, steps timed without it.
            values[f"{prefix}gpu_busy"] = side.gpu_us * 1e-6 / time_.median
    if decode:
        step = result.patched.stats(seconds).median
        moved = result.bytes_per_token
        values["bytes_per_token"] = moved
        values["gbps"] = gbs(moved, step)
        values["frac_peak"] = mbu(moved, step, env.chip)
    notes = [*notes, result.refused] if result.refused else [*notes]
    if decode and result.patched.launches and result.patched.gpu_us is None:
        notes.append("launches counted in MLX's graph")
    if env.executor == "cpu":
        notes.append("emulation on a CPU: says nothing about any GPU")
    values["note"] = "; ".join(notes) or None
    return record.row(**values)


def _dtype(run: Run) -> str | None:
    return str(run.logprobs[0].dtype).split(".")[-1] if run.logprobs else None


__all__ = ["COMPARABLE", "Job", "Result", "Side", "measure", "rows"]
