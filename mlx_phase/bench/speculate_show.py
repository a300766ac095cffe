"""``--draft``: run the bench with drafts and say whether they pay."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .device import EMULATION, Environment
from .measure import COMPARABLE, MIN_REPEATS
from .speculate_result import LOOKUP, Candidate, Result


def show(console: Console, result: Result, env: Environment, source: str) -> None:
    """Print one job: speeds, what was accepted, cost of a step, who served."""
    job = result.job
    kv = "" if job.kv is None else f", {job.kv.bits}-bit KV cache g{job.kv.group}"
    table = Table(
        title=f"{escape(job.name)}, drafts by {escape(job.draft)}: prompt "
        f"{len(job.prompt)} tokens, {job.tokens} generated, {job.repeats} repeats{kv}",
        title_justify="left",
    )
    heads = ("drafts", "tok/s", "× plain", "kept a step", "share kept", "pays from")
    for head in (*heads, "step cost", "tokens equal"):
        table.add_column(head, justify="right")
    table.add_row("plain", _speed(result.plain), "1.00", "-", "-", "-", "1.00", "-")
    for c in result.drafted:
        at = result.break_even(c.drafts)
        table.add_row(
            str(c.drafts),
            _speed(c),
            f"{result.speed_up(c):.2f}",
            f"{c.accepted:.2f}",
            "-" if c.acceptance is None else f"{c.acceptance:.0%}",
            "never" if at is None else f"{at:.0%}",
            f"{result.cost_ratio(c.drafts + 1):.2f}",
            "yes" if result.equal[c.drafts] == "yes" else "NO",
        )
    console.print(table)
    text = Table(box=None, show_header=False, pad_edge=False)
    text.add_column(style="bold", no_wrap=True)
    text.add_column(overflow="fold")
    for name, value in _facts(result, env, source):
        text.add_row(name, escape(value))
    console.print(text)
    console.print(f"[bold]{escape(conclusion(result))}[/]")
    if result.comparable != COMPARABLE:
        console.print(f"[bold red]{escape(result.comparable)}[/]")
    if env.executor == "cpu":
        console.print(f"[bold yellow]{escape(EMULATION)}[/]")


def _speed(c: Candidate) -> str:
    return f"{1 / c.stats.median:.2f}"


def conclusion(result: Result) -> str:
    """One sentence: which number of drafts pays here, or that none does."""
    best = max(result.drafted, key=result.speed_up)
    if result.job.repeats < MIN_REPEATS:
        return f"Too few repeats to say whether speculation pays: {MIN_REPEATS} needed"
    gain, noise = result.speed_up(best), result.noise(best)
    what = f"{best.drafts} drafts by {result.job.draft}: {gain:.2f} times plain"
    if best.acceptance is None:
        return "Nothing was drafted: no n-gram of the text came twice"
    if gain > 1 + noise:
        return f"Speculation pays here: {what} (noise {noise:.0%})"
    if gain > 1 - noise:
        return f"Speculation makes no difference here: {what}, noise {noise:.0%}"
    at = result.break_even(best.drafts)
    need = "it never does" if at is None else f"it does from {at:.0%}"
    return (
        f"Speculation does not pay here: {what} with {best.acceptance:.0%} of the "
        f"drafts kept; {need}"
    )


def _facts(result: Result, env: Environment, source: str) -> list[tuple[str, str]]:
    steps = [f"M={m} {t.median * 1e3:.2f} ms" for m, t in result.cost.items()]
    facts = [("model from", source), ("a step", ", ".join(steps))]
    if result.job.draft != LOOKUP:
        facts.append(("a drafted token", f"{result.draft_cost * 1e3:.2f} ms"))
    if left := len(result.report.left):
        facts.append(("left stock", f"{left} layers, whose rows may not be exact"))
    for drafts, equal in result.equal.items():
        if equal != "yes":
            facts.append((f"{drafts} drafts", f"tokens {equal}"))
    served = Counter()
    for name, calls in result.served.items():
        # A kernel has a variant for each M; a reason for stock is a whole sentence.
        served[name.split()[0] if name in result.served.kernels else name] += calls
    versions = ", ".join(f"{name} {v}" for name, v in env.versions.items())
    return [
        *facts,
        ("served", "; ".join(f"{n} x {name}" for name, n in served.items())),
        ("executor", env.executor),
        ("device", f"{env.device} (chip row {env.chip.key})"),
        ("system", f"{env.os}; {versions}"),
    ]
