"""What a report is made of, and its three forms: terminal, Markdown, JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """A key of the records, its heading and how a value is shown."""

    key: str
    head: str
    form: str | Callable[[Any], str] = "{}"
    left: bool = False

    def show(self, record: Record) -> str:
        """Text of a record's value; None and a missing one are a dash."""
        value = record.get(self.key)
        if value is None:
            return "-"
        return (
            self.form.format(value) if isinstance(self.form, str) else self.form(value)
        )


@dataclass(frozen=True)
class Table:
    """Records under columns; JSON gets the records with all their keys."""

    name: str
    columns: Sequence[Column]
    records: Sequence[Record]
    title: str = ""


@dataclass(frozen=True)
class Lines:
    """Sentences; ``bullets`` makes each a list item."""

    items: Sequence[str]
    bullets: bool = True


@dataclass(frozen=True)
class Section:
    """One numbered output of the report."""

    title: str
    blocks: Sequence[Table | Lines] = field(default=())


def show(console: Console, sections: Sequence[Section]) -> None:
    """Print sections to a terminal."""
    for section in sections:
        console.print(f"\n[bold underline]{escape(section.title)}[/]")
        for block in section.blocks:
            if isinstance(block, Table):
                console.print(_rich(block, console.width))
                continue
            for line in block.items:
                _line(console, line, block.bullets)


def _line(console: Console, line: str, bullet: bool) -> None:
    # Wrapped here: rich would pad each line with blanks to the full width.
    text = textwrap.fill(
        line,
        console.width,
        initial_indent="• " if bullet else "",
        subsequent_indent="  " if bullet else "",
        break_on_hyphens=False,
        break_long_words=False,
    )
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _rich(table: Table, width: int) -> RichTable:
    shown = RichTable(title=escape(table.title) or None, title_justify="left")
    for column, cells in zip(table.columns, _widths(table, width), strict=True):
        shown.add_column(
            escape(column.head),
            justify="left" if column.left else "right",
            overflow="fold",
            width=cells,
        )
    for record in table.records:
        shown.add_row(*(escape(column.show(record)) for column in table.columns))
    return shown


def _widths(table: Table, width: int) -> list[int | None]:
    """Widths of the columns that break lines between words alone; None: no way."""
    texts = [[c.head, *(c.show(r) for r in table.records)] for c in table.columns]
    whole = [max(map(len, column)) for column in texts]
    words = [max(len(w) for t in column for w in t.split() or [""]) for column in texts]
    # Each column has a border and two blanks, and the table a last border.
    spare = width - sum(words) - 3 * len(words) - 1
    if spare < 0:
        return [None] * len(words)
    found = list(words)
    for i in sorted(range(len(words)), key=lambda i: whole[i] - words[i]):
        found[i] += min(whole[i] - words[i], spare)
        spare -= found[i] - words[i]
    return found


def markdown(sections: Sequence[Section]) -> str:
    """The sections as GitHub Markdown."""
    parts = []
    for section in sections:
        parts.append(f"## {section.title}")
        for block in section.blocks:
            if isinstance(block, Table):
                parts.append(_markdown(block))
            else:
                start = "- " if block.bullets else ""
                joint = "\n" if block.bullets else "\n\n"
                parts.append(joint.join(start + _safe(line) for line in block.items))
    return "\n\n".join(part for part in parts if part) + "\n"


def _safe(text: str) -> str:
    # A bar would end the cell, an asterisk pair would become emphasis.
    return text.replace("|", "\\|").replace("*", "\\*")


def _markdown(table: Table) -> str:
    rows = [[column.head for column in table.columns]]
    rows.append(["---" if column.left else "---:" for column in table.columns])
    rows += [[_safe(c.show(record)) for c in table.columns] for record in table.records]
    text = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"**{_safe(table.title)}**\n\n{text}" if table.title else text


def plain(sections: Sequence[Section]) -> list[dict[str, Any]]:
    """The sections as JSON values: records keep all their numbers."""
    return [
        {
            "title": section.title,
            "tables": {
                block.name: [dict(record) for record in block.records]
                for block in section.blocks
                if isinstance(block, Table)
            },
            "text": [
                line
                for block in section.blocks
                if isinstance(block, Lines)
                for line in block.items
            ],
        }
        for section in sections
    ]
