"""``python -m mlx_phase.bench counters``: what counters predict for chips."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from ..chip import lookup
from ..counters import LANES, Prediction
from ..executor import ExecutorError
from . import (
    BenchError,
    counters_attention,
    counters_fill,
    counters_prefill,
    counters_published,
    counters_units,
)
from .counters_kernels import (
    CHIPS,
    mlx_route,
    on_cpu,
    our_route,
    ours,
    planned,
    time,
    whole,
)

MARKS = re.compile(
    r"(?P<begin><!-- bench counters (?P<name>\w+) -->\n)"
    r"(?P<text>.*?)"
    r"(?P<end><!-- bench counters end -->)",
    re.S,
)
#: K and N of the predicted times.
SHAPE = (4096, 14336)
ROWS = (1, 2, 4, 8)
#: K and N of decode steps.
DECODE = ((4096, 4096), (4096, 14336), (14336, 4096), (8192, 28672), (4096, 128256))


def kernels() -> str:
    """Our kernels and MLX's: bytes, cycles per weight."""
    lines = [
        "| M | kernel | bytes ÷ ideal | slots per weight | FMA units | slow unit | "
        "cycles per weight |",
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    old, new = lookup("M1 Max 32"), lookup("M3 Max 40")
    for M in ROWS:
        routes = [our_route(M, new), mlx_route(M, new)]
        if M > 1:
            routes.append(mlx_route(M, old))
        for i, (name, passes) in enumerate(routes):
            work = whole(passes).times(LANES)
            who = "ours" if i == 0 else "MLX"
            where = " (M1, M2)" if i == 2 else ""
            lines.append(
                f"| {M} | {who}: {name}{where} | {passes[0].over_fetch:.3f} | "
                f"{work.slots:.1f} | {work.fma:.1f} | {work.slow:.1f} | "
                f"{whole(passes).cycles:.1f} |"
            )
    return "\n".join(lines)


def goals() -> str:
    """Cycles per weight of our kernel as planned for decode shapes, and the aim."""
    rows = range(1, 9)
    cases = [(K, N, mx.bfloat16, "M3 Max 40") for K, N in DECODE]
    cases += [(4096, 14336, mx.float16, "M3 Max 40")]
    cases += [(K, 4096, mx.bfloat16, "M3 Ultra 80") for K in (4096, 14336)]
    cases += [(2048, 8192, mx.bfloat16, "M3 Max 40")]
    cases += [(4096, 1024, mx.bfloat16, name) for name in ("M3 Max 40", "M3 Ultra 80")]
    head = " | ".join(f"M = {M}" for M in rows)
    aims = " | ".join("3" if M == 1 else str(M + 3) for M in rows)
    lines = [
        f"| K → N | type | chip | {head} |",
        "| --- | --- | --- |" + " ---: |" * len(rows),
        f"| aim | | | {aims} |",
    ]
    for K, N, dtype, name in cases:
        plans = [planned(M, lookup(name), K, N) for M in rows]
        found = [ours(M, p, 4, K, dtype) for M, p in zip(rows, plans, strict=True)]
        cells = " | ".join(f"{f.cost.cycles:.2f}" for f in found)
        kind = str(dtype).rpartition(".")[2]
        lines.append(f"| {K} → {N} | {kind} | {name} | {cells} |")
    return "\n".join(lines)


def tiles() -> str:
    """Cycles per weight of our kernel by rows of W that a simdgroup has; rows x M is at
    most 32, as each lane stores one sum."""
    rows = (2, 4, 8)
    chip = lookup("M3 Max 40")
    head = " | ".join(f"{n} rows" for n in rows)
    lines = [f"| M | planned | {head} |", "| ---: | ---: |" + " ---: |" * len(rows)]
    for M in ROWS:
        p = planned(M, chip)
        tiles = [replace(p, rows=n) for n in rows]
        cells = " | ".join(
            f"{ours(M, t).cost.cycles:.1f}" if t.rows * M <= 32 else "-" for t in tiles
        )
        lines.append(f"| {M} | {p.rows} rows | {cells} |")
    return "\n".join(lines)


def times() -> str:
    """Predicted time by chip."""
    K, N = SHAPE
    head = " | ".join(f"M = {M}" for M in ROWS)
    lines = [f"| chip | {head} |", "| --- |" + " ---: |" * len(ROWS)]
    for name in CHIPS:
        chip = lookup(name)
        cells = []
        for M in ROWS:
            mine = time(our_route(M, chip)[1], M, K, N, chip)
            theirs = time(mlx_route(M, chip)[1], M, K, N, chip)
            cells.append(
                f"{mine.us:.0f} ({_letter(mine)}), MLX {theirs.us:.0f} "
                f"({_letter(theirs)})"
            )
        lines.append(f"| {chip.name} {chip.gpu_cores} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _letter(found: Prediction) -> str:
    return found.bound[0].lower()


TABLES = {
    "validation": counters_published.validation,
    "order": counters_published.order,
    "kernels": kernels,
    "goals": goals,
    "fill": counters_fill.fill,
    "tiles": tiles,
    "times": times,
    "attention": counters_attention.table,
    "attention_times": counters_attention.times,
    "attention_units": counters_units.units,
    "prefill": counters_prefill.table,
    "prefill_fill": counters_prefill.fill,
}


def update(path: Path) -> bool:
    """Rewrite the tables between marks in a file; whether anything changed."""
    text = path.read_text(encoding="utf-8")

    def table(found: re.Match[str]) -> str:
        if found["name"] not in TABLES:
            raise BenchError(f"{path}: no such table: {found['name']}")
        return f"{found['begin']}{TABLES[found['name']]()}\n{found['end']}"

    fresh, count = MARKS.subn(table, text)
    if not count:
        raise BenchError(f"{path} has no <!-- bench counters NAME --> marks")
    if fresh != text:
        path.write_text(fresh, encoding="utf-8")
    return fresh != text


def parser() -> argparse.ArgumentParser:
    """Options of the command."""
    p = argparse.ArgumentParser(
        prog="python -m mlx_phase.bench counters",
        description="Run MLX's quantised matmul kernels and ours on the CPU executor, "
        "count what they do, and predict their times on Apple chips. Needs MLX's "
        "Metal headers (`make headers`).",
    )
    p.add_argument("tables", nargs="*", help=f"of {', '.join(TABLES)}; all if none")
    p.add_argument(
        "--update", type=Path, metavar="FILE", help="rewrite the tables of this file"
    )
    return p


def main(argv: Sequence[str]) -> int:
    """Print tables or update a file; returns the exit status."""
    args = parser().parse_args(argv)
    try:
        unknown = set(args.tables) - TABLES.keys()
        if unknown:
            raise BenchError(
                f"no such table: {', '.join(sorted(unknown))}. Possible: "
                f"{', '.join(TABLES)}"
            )
        with on_cpu():
            if args.update:
                changed = update(args.update)
                print(f"{args.update}: {'updated' if changed else 'up to date'}")
            else:
                for name in args.tables or TABLES:
                    print(f"{TABLES[name]()}\n")
        return 0
    except (BenchError, ExecutorError, OSError) as error:
        print(f"mlx_phase.bench counters: error: {error}", file=sys.stderr)
        return 2
