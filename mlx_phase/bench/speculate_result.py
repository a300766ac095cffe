"""What a bench with drafts is asked for and what it found; its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..routes import Served
from ..step import break_even
from . import record
from .device import Environment
from .generate import Run
from .kv_cache import KV
from .measure import Stats, drift_free_ratio, stats, verdict

LOOKUP = "lookup"


@dataclass(frozen=True)
class Job:
    """What to run. ``draft_tokens``: numbers of drafts, each 1..15; repeats >= 1."""

    name: str
    prompt: Sequence[int]
    tokens: int
    repeats: int
    draft: str
    draft_tokens: tuple[int, ...]
    delay: float = 0.0
    kv: KV | None = None

    @property
    def runs(self) -> int:
        """Generations in all, the warm-up of each candidate included."""
        return (self.repeats + 1) * (1 + len(self.draft_tokens))

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of the steps that are timed: 1, and drafts + 1."""
        return tuple(sorted({1, *(k + 1 for k in self.draft_tokens)}))


@dataclass
class Candidate:
    """All runs with ``drafts`` drafted tokens a verification; 0 is plain decoding."""

    drafts: int
    warm: Run | None = None
    runs: list[Run] = field(default_factory=list)
    # (drafted, accepted) of each verification, the same in each run.
    steps: list[tuple[int, int]] = field(default_factory=list)

    def seconds(self, run: Run) -> float:
        """Seconds a token. Tokens of the first verification arrive with the prompt."""
        first = self.steps[0][1] if self.steps else 0
        spent = run.arrivals[-1] - run.arrivals[first]
        return spent / (len(run.arrivals) - 1 - first)

    @property
    def stats(self) -> Stats:
        """Seconds a token over the timed runs."""
        return stats([self.seconds(run) for run in self.runs])

    @property
    def accepted(self) -> float:
        """Drafts accepted a verification."""
        return sum(a for _, a in self.steps) / len(self.steps)

    @property
    def acceptance(self) -> float | None:
        """Share 0..1 of the drafts that were accepted; None if nothing was drafted."""
        drafted = sum(d for d, _ in self.steps)
        return sum(a for _, a in self.steps) / drafted if drafted else None


@dataclass
class Result:
    """Everything measured in one job.

    ``cost``: {rows: seconds of a step, waited for}; ``draft_cost``: seconds of one
    drafted token (0 for lookup, whose time is in that of the tokens).
    """

    job: Job
    plain: Candidate
    drafted: list[Candidate]
    equal: dict[int, str]
    failures: list[str]
    cost: dict[int, Stats]
    draft_cost: float
    served: Served
    format: dict[str, Any]
    report: Any

    @property
    def comparable(self) -> str:
        """``yes`` or why these numbers must not be compared."""
        return verdict(self.job.repeats, self.failures)

    def speed_up(self, c: Candidate) -> float:
        """Plain time over time with drafts, drift removed."""
        ours = [c.seconds(run) for run in c.runs]
        return drift_free_ratio(ours, [self.plain.seconds(r) for r in self.plain.runs])

    def noise(self, c: Candidate) -> float:
        """Relative difference to plain that means nothing, 1 % at least."""
        return max(0.01, c.stats.spread, self.plain.stats.spread)

    def cost_ratio(self, rows: int) -> float:
        """Time of a step of ``rows`` rows over that of one row."""
        return self.cost[rows].median / self.cost[1].median

    def break_even(self, drafts: int) -> float | None:
        """Acceptance from which ``drafts`` gain; None: never.

        Against plain decoding, which does not wait for its tokens, as verification has
        to: so not the quotient of two steps that were both waited for.
        """
        plain = self.plain.stats.median
        ratio = self.cost[drafts + 1].median / plain
        return break_even(ratio, drafts, self.draft_cost / plain)


def rows(result: Result, env: Environment) -> list[dict[str, Any]]:
    """A row for each number of rows of a step, and one for each number of drafts."""
    job = result.job
    note = "emulation on a CPU: says nothing about any GPU"
    common: dict[str, Any] = {
        "suite": "speculate",
        "model": job.name,
        "draft": job.draft,
        "prompt_tokens": len(job.prompt),
        "us_source": "wall",
        "repeats": job.repeats,
        "delay_s": job.delay,
        "comparable": result.comparable,
        "note": note if env.executor == "cpu" else None,
        "dtype": str(result.plain.warm.logprobs[0].dtype).split(".")[-1],
        **result.format,
        **env.fields(),
    }
    if job.kv is not None:
        common |= {"kv_bits": job.kv.bits, "kv_group": job.kv.group}
    found = []
    for count, time_ in result.cost.items():
        values = {"phase": "verify", "M": count, "cost_ratio": result.cost_ratio(count)}
        found.append(record.row(**common, **values, **_times(time_)))
    plain = result.plain.stats
    for c in result.drafted:
        time_ = c.stats
        values = {
            "phase": "decode",
            "M": c.drafts + 1,
            "tokens": job.tokens,
            "draft_tokens": c.drafts,
            "accepted": c.accepted,
            "acceptance": c.acceptance,
            "cost_ratio": result.cost_ratio(c.drafts + 1),
            "break_even": result.break_even(c.drafts),
            "tok_s": 1 / time_.median,
            "plain_us": plain.median * 1e6,
            "plain_tok_s": 1 / plain.median,
            "plain_spread": plain.spread,
            "speed_up": result.speed_up(c),
            "tokens_equal": result.equal[c.drafts],
            "served": result.served,
        }
        found.append(record.row(**common, **values, **_times(time_)))
    return found


def _times(time_: Stats) -> dict[str, float]:
    return {
        "us": time_.median * 1e6,
        "us_min": time_.low * 1e6,
        "us_max": time_.high * 1e6,
        "spread": time_.spread,
    }
