"""A comparison as a terminal table, as Markdown, as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from ..predict import SHARE
from .compare_table import Interval, Line, Same, Speed, Table

JSON_SCHEMA = 1
# Columns of a terminal from which intervals have room.
WIDE = 120


def number(value: float | None) -> str:
    """One decimal below 100, none above; a dash for None."""
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}"


def _predicted(phase: str) -> Callable[[Line], str]:
    def cell(line: Line) -> str:
        p: Interval | None = line.predicted and getattr(line.predicted, phase)
        return f"{number(p.speed)} ({number(p.low)}–{number(p.high)})" if p else "–"

    return cell


def _bandwidth(line: Line) -> str:
    known = line.chip.bandwidth_gbs
    return f"{known:g}" if known else "–"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _of(side: str, field: str) -> Callable[[Line], str]:
    def cell(line: Line) -> str:
        speed: Speed | None = getattr(line, side)
        return number(getattr(speed, field)) if speed else "–"

    return cell


# header, cell; a column that is empty in every line is not shown.
_COLUMNS: tuple[tuple[str, Callable[[Line], str]], ...] = (
    ("decode, patched", _of("measured", "decode")),
    ("decode, stock", _of("measured", "stock_decode")),
    ("prefill, patched", _of("measured", "prefill")),
    ("prefill, stock", _of("measured", "stock_prefill")),
    ("published decode", _of("published", "decode")),
    ("published prefill", _of("published", "prefill")),
    ("predicted decode", _predicted("decode")),
    ("predicted prefill", _predicted("prefill")),
    ("MBU", lambda line: _percent(line.mbu)),
    ("tok/s per GB/s", lambda line: _ratio(line.per_gbs)),
)


def sources(table: Table) -> tuple[list[str], dict[Line, str]]:
    """(texts of the notes, in order of first use; the note numbers of each line)."""
    texts: list[str] = []
    marks: dict[Line, str] = {}
    for line in table.lines:
        found = []
        for kind, speed in (("measured", line.measured), ("published", line.published)):
            if speed is None:
                continue
            text = f"{kind}: {speed.source}"
            text += f" ({speed.note})" if speed.note else ""
            if text not in texts:
                texts.append(text)
            found.append(str(texts.index(text) + 1))
        marks[line] = ", ".join(found)
    return texts, marks


def cells(table: Table, short: bool = False) -> tuple[list[str], list[list[str]]]:
    """(headers, rows of text) without the columns that nobody fills.

    ``short`` leaves out the intervals of predictions and shortens headers.
    """
    _, marks = sources(table)
    columns = [
        ("chip", lambda line: line.chip.name),
        ("GPU cores", lambda line: str(line.chip.gpu_cores or "–")),
        ("GB/s", _bandwidth),
    ]
    columns += [
        (head, cell)
        for head, cell in _COLUMNS
        if any(cell(line) != "–" for line in table.lines)
    ]
    columns.append(("source", lambda line: marks[line]))
    rows = [[cell(line) for _, cell in columns] for line in table.lines]
    if short:
        rows = [[row[0], *(text.split(" (")[0] for text in row[1:])] for row in rows]
        names = {"published": "publ.", "predicted": "pred."}
        columns = [(_renamed(head, names), cell) for head, cell in columns]
    return [head for head, _ in columns], rows


def _renamed(head: str, names: Mapping[str, str]) -> str:
    return " ".join(names.get(word, word) for word in head.split(" "))


def explanations(table: Table, short: bool = False) -> list[str]:
    """Sentences that say what the columns are; ``short``: they hold no intervals."""
    said = []
    basis = "measured" if table.measured else "published"
    if table.measured and table.published:
        said.append(f"Published figures are of another build: {table.published.text}.")
    if any(line.mbu is not None for line in table.lines):
        text = f"MBU and tok/s per GB/s are those of the {basis} decode speed"
        if table.measured and table.published:
            text += " (of the published one where nothing was measured)"
        said.append(f"{text}, over the marketed bandwidth.")
    if any(line.predicted for line in table.lines):
        text = "Predicted figures were not measured"
        if short:
            text += " (their intervals: --json, --markdown or a wider terminal)."
        else:
            text += (
                f"; the interval in brackets held {100 * SHARE:.0f} % of the published "
                "rows."
            )
        if any(line.predicted and line.published for line in table.lines):
            text += " Beside a published speed, the fit had no row of that chip."
        said.append(text)
    return said


def caption(table: Table) -> str:
    """What the table holds, tok/s."""
    kind = "Measured" if table.measured else "Published, not measured here"
    return f"{kind}: {table.same.text}. Speeds in tok/s."


def terminal(console: Console, table: Table) -> None:
    """Print one comparison."""
    short = console.width < WIDE
    heads, rows = cells(table, short)
    grid = RichTable(
        title=escape(caption(table)),
        title_justify="left",
        box=None if short else box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0) if short else (0, 1),
    )
    for index, head in enumerate(heads):
        side = "left" if index == 0 else "right"
        grid.add_column(head, justify=side, overflow="fold")
    for row in rows:
        grid.add_row(*(escape(cell) for cell in row))
    console.print(grid)
    for text in explanations(table, short):
        console.print(text, markup=False, highlight=False)
    for index, text in enumerate(sources(table)[0], 1):
        console.print(f"[{index}] {text}", markup=False, highlight=False)
    for text in table.left_out:
        console.print(f"left out: {text}", markup=False, highlight=False)


def markdown(table: Table) -> str:
    """The comparison as Markdown, ending in a newline."""
    heads, rows = cells(table)
    lines = [caption(table), ""]
    lines.append(f"| {' | '.join(heads)} |")
    lines.append("| --- |" + " ---: |" * (len(heads) - 1))
    lines += [f"| {' | '.join(row)} |" for row in rows]
    lines += ["", *explanations(table), ""]
    lines += [f"{i}. {text}" for i, text in enumerate(sources(table)[0], 1)]
    return "\n".join(lines).rstrip() + "\n"


def as_json(table: Table) -> dict[str, Any]:
    """The comparison as a dict: figures by origin, null where there is none."""

    def same(value: Same | None) -> dict[str, Any] | None:
        return None if value is None else asdict(value)

    def speed(value: Speed | None) -> dict[str, Any] | None:
        if value is None:
            return None
        return {
            "decode_tok_s": value.decode,
            "prefill_tok_s": value.prefill,
            "stock_decode_tok_s": value.stock_decode,
            "stock_prefill_tok_s": value.stock_prefill,
            "bytes_per_token": value.bytes_per_token,
            "source": value.source,
            "note": value.note,
        }

    lines = []
    for line in table.lines:
        lines.append(
            {
                "chip": line.chip.name,
                "gpu_cores": line.chip.gpu_cores,
                "bandwidth_gbs": line.chip.bandwidth_gbs,
                "measured": speed(line.measured),
                "published": speed(line.published),
                "predicted": line.predicted and asdict(line.predicted),
                "mbu": line.mbu,
                "tok_s_per_gbs": line.per_gbs,
                "basis": "measured" if line.measured else "published",
            }
        )  # fmt: skip
    return {
        "schema": JSON_SCHEMA,
        "measured": same(table.measured),
        "published": same(table.published),
        "lines": lines,
        "left_out": list(table.left_out),
    }
