"""What the bench prints: one table per job, and who served."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .device import EMULATION, Environment
from .endtoend import Job, Result
from .measure import COMPARABLE

Row = dict[str, Any]

# label, field, factor, format, whether a smaller value is better (None: no ratio)
_PREFILL = (
    ("time to first token", "ttft_ms", 1, "{:.1f} ms", True),
    ("prefill", "tok_s", 1, "{:.1f} tok/s", False),
)
_DECODE = (
    ("inter-token latency p50", "itl_p50_ms", 1, "{:.2f} ms", True),
    ("inter-token latency p99", "itl_p99_ms", 1, "{:.2f} ms", True),
    ("decode", "tok_s", 1, "{:.2f} tok/s", False),
    ("decode spread (IQR / median)", "spread", 100, "{:.1f} %", None),
    ("host: build a step", "build_us", 1, "{:.0f} µs", True),
    ("host: evaluate a step", "eval_us", 1, "{:.0f} µs", True),
    ("launches a step", "launches", 1, "{:.0f}", None),
    ("GPU busy", "gpu_busy", 100, "{:.0f} %", None),
    ("peak memory", "peak_bytes", 1e-6, "{:.1f} MB", None),
)


def show(
    console: Console, result: Result, rows: list[Row], env: Environment, source: str
) -> None:
    """Print one job: times, memory traffic, equality, kernels, machine."""
    job = result.job
    prefill, decode = rows
    table = Table(
        title=f"{escape(job.name)}: prompt {len(job.prompt)} tokens, {job.tokens} "
        f"generated, {job.repeats} repeats{_cache(job)}",
        title_justify="left",
    )
    table.add_column("")
    for head in ("stock", "patched", "patched is"):
        table.add_column(head, justify="right")
    for lines, row in ((_PREFILL, prefill), (_DECODE, decode)):
        for line in lines:
            _add(table, row, *line)
        table.add_section()
    _add_traffic(table, decode, env)
    console.print(table)
    text = Table(box=None, show_header=False, pad_edge=False)
    text.add_column(style="bold", no_wrap=True)
    text.add_column(overflow="fold")
    for name, value in _facts(result, decode, env, source):
        text.add_row(name, escape(value))
    console.print(text)
    if decode["comparable"] != COMPARABLE:
        console.print(f"[bold red]{escape(decode['comparable'])}[/]")
    if env.executor == "cpu":
        console.print(f"[bold yellow]{escape(EMULATION)}[/]")


def _cache(job: Job) -> str:
    return "" if job.kv is None else f", {job.kv.bits}-bit KV cache g{job.kv.group}"


def _add(
    table: Table,
    row: Row,
    label: str,
    field: str,
    factor: float,
    form: str,
    smaller: bool | None,
) -> None:
    def cell(name: str) -> str:
        value = row.get(name)
        return "-" if value is None else form.format(value * factor)

    ours, stock = row.get(field), row.get(f"stock_{field}")
    if ours is None and stock is None:
        return
    times = "-"
    if smaller is not None and ours and stock:
        # These two have a drift-free ratio; the others are plain quotients.
        ratio = row["ratio"] if field in ("tok_s", "ttft_ms") else stock / ours
        times = f"{ratio:.2f}x as fast"
    table.add_row(label, cell(f"stock_{field}"), cell(field), times)


def _add_traffic(table: Table, decode: Row, env: Environment) -> None:
    moved = decode["bytes_per_token"]
    size = f"{moved / 1e6:.1f} MB"
    table.add_row("read per token", size, size, "-")
    if not env.chip.bandwidth_gbs:
        return
    peak = env.chip.bandwidth_gbs * 1e9

    def share(tok_s: float | None) -> str:
        return "-" if tok_s is None else f"{100 * moved * tok_s / peak:.1f} %"

    cells = share(decode.get("stock_tok_s")), share(decode["tok_s"])
    table.add_row(f"MBU of {env.chip.bandwidth_gbs:g} GB/s", *cells, "-")


def _calls(served: dict[str, int]) -> str:
    listed = [f"{calls} x {name}" for name, calls in served.items()]
    return "; ".join(listed) or "no call reached mlx_phase"


def _facts(
    result: Result, decode: Row, env: Environment, source: str
) -> list[tuple[str, str]]:
    versions = ", ".join(f"{name} {v}" for name, v in env.versions.items())
    refused = [("stock", result.refused)] if result.refused else []
    return [
        *refused,
        ("model from", source),
        ("tokens equal", result.equal.text),
        ("served, prompt", _calls(result.prompt_served)),
        ("served, steps", _calls(result.served)),
        ("executor", env.executor),
        ("device", f"{env.device} (chip row {env.chip.key})"),
        ("system", f"{env.os}; {versions}"),
    ]
