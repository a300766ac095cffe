"""What tune prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .tune_plans import KERNEL, Entry, Problems, StoredPlans
from .tune_race import built_in, splits_of, tiles_of


def print_lines(out: Console, lines: Iterable[str]) -> None:
    """Text as it is: no markup, no wrapping."""
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def label(problems: Problems) -> str:
    """A launch in a few words: K x N of each matrix, and the format."""
    p = problems[0]
    form = "plain" if p.mode == "none" else f"{p.mode} {p.bits}-bit g{p.group_size}"
    return f"{' + '.join(f'{p.K}x{p.N}' for p in problems)} {form} {p.x_dtype}"


def table(plans: StoredPlans, entries: Iterable[Entry] | None = None) -> Table:
    """Races as a table: all of a plan, or some of them."""
    k = plans.key
    title = f"{k.arch}, {k.gpu_cores} cores, {k.os}, mlx {k.mlx}, kernels {k.kernels}"
    found = Table(title=title, title_justify="left")
    found.add_column("K x N", overflow="fold")
    found.add_column("M", justify="right")
    found.add_column("plan", overflow="fold")
    for name in ("us", "stock", "ratio", "noise"):
        found.add_column(name, justify="right", no_wrap=True)
    found.add_column("goes to", overflow="fold")
    for e in plans if entries is None else entries:
        to = "kernel" if e.winner == KERNEL else "stock"
        if e.winner != KERNEL and len(e.problems) > 1:
            to = "separate launches"
        tile = f"R={e.rows} SG={e.simdgroups} KS={e.k_simdgroups} SPLITS={e.splits}"
        times = (f"{e.us:.1f}", f"{e.stock_us:.1f}", f"{e.ratio:.2f}", f"{e.noise:.1%}")
        to = escape(f"{to} ({e.note})") if e.note else to
        found.add_row(label(e.problems), str(e.M), tile, *times, to)
    return found


def dry_table(todo: Iterable[Problems], rows: Sequence[int]) -> Table:
    """What a race on a GPU would try."""
    found = Table(title="launches of one decode step", title_justify="left")
    found.add_column("K x N", overflow="fold")
    for name in ("M", "table's plan", "candidates"):
        found.add_column(name)
    for problems in todo:
        for m in rows:
            at = tuple(replace(p, M=m) for p in problems)
            p = built_in(at)
            tries = set(tiles_of(at, (p.k_simdgroups, p.splits)))
            tries |= set(splits_of(at)) if m == rows[0] else set()
            tile = f"{p.kernel} rows={p.rows} simdgroups={p.simdgroups}"
            split = f"split={p.k_simdgroups}x{p.splits}"
            found.add_row(label(at), str(m), f"{tile} {split}", str(len(tries)))
    return found
