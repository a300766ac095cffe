"""``python -m mlx_phase.bench counters``: what counters predict for chips."""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path

from ..chip import Chip, lookup
from ..counters import LANES, Cost, Prediction, predict
from ..executor import ExecutorError
from . import BenchError, counters_attention, counters_prefill
from .counters_kernels import CHIPS, PerWeight, mlx_qmv, on_cpu, ours, planned

PUBLISHED = Path(__file__).parents[1] / "data" / "small_m.csv"
MARKS = re.compile(
    r"(?P<begin><!-- bench counters (?P<name>\w+) -->\n)"
    r"(?P<text>.*?)"
    r"(?P<end><!-- bench counters end -->)",
    re.S,
)
#: K and N of the predicted times.
SHAPE = (4096, 14336)
ROWS = (1, 2, 4, 8)


def vectors(M: int) -> tuple[int, int]:
    """(tiles, rows of a tile) of MLX's qmv_wide: the fewest tiles of at most 5 rows."""
    tiles = -(-M // 5)
    return tiles, -(-M // tiles)


def mlx_route(M: int, chip: Chip) -> tuple[str, list[PerWeight]]:
    """MLX 0.32's kernel for a large matrix, and its passes over the weights."""
    if M == 1:
        return "qmv_fast", [mlx_qmv("fast", 1)]
    if chip.family in ("Apple7", "Apple8"):
        if M < 6:
            return "qmv_fast, a read per row", [mlx_qmv("fast", 1)] * M
        return "qmm, 32 rows", [mlx_qmv("qmm", M)]
    tiles, rows = vectors(M)
    return f"qmv_wide, {tiles} of {rows}", [mlx_qmv("wide", rows)] * tiles


def our_route(M: int, chip: Chip) -> tuple[str, list[PerWeight]]:
    """Our kernel with the plan's tile."""
    p = planned(M, chip)
    shared = f", x shared by {p.simdgroups}" if p.simdgroups > 2 else ""
    return f"qmv, {p.rows} rows{shared}", [ours(M, p)]


def time(
    passes: list[PerWeight], M: int, K: int, N: int, chip: Chip, cached: bool = False
) -> Prediction:
    """Of a launch whose passes read the same weights: memory moves them once."""
    work = whole(passes).times(N * K)
    memory = passes[0].cost.memory_bytes * N * K + 2 * M * (N + K)
    return predict(replace(work, memory_bytes=memory), chip, cached=cached)


def whole(passes: list[PerWeight]) -> Cost:
    """Work per weight of all passes."""
    return reduce(Cost.plus, (p.cost for p in passes))


def validation() -> str:
    """Reported against predicted, for MLX's kernels."""
    with PUBLISHED.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    lines = [
        "| source | chip | K → N | M | unit | reported | predicted | error | bound |",
        "| --- | --- | --- | ---: | --- | ---: | ---: | ---: | --- |",
    ]
    errors = []
    for row in rows:
        chip = lookup(f"{row['chip']} {row['cores']}")
        K, N, M = int(row["K"]), int(row["N"]), int(row["M"])

        def of(M: int, K=K, N=N, chip=chip, row=row) -> Prediction:
            passes = [mlx_qmv("qmm", M)] if row["kernel"] == "qmm" else None
            passes = passes or mlx_route(M, chip)[1]
            return time(passes, M, K, N, chip, row["cached"] == "yes")

        found = of(M)
        value = found.us
        if row["against"].startswith("M="):
            value /= of(int(row["against"][2:])).us
        elif row["against"] == "per row":
            value = time([mlx_qmv("fast", 1)] * M, M, K, N, chip).us / value
        reported = float(row["reported"])
        errors.append(value / reported - 1)
        source = row["source"].replace("ml-explore/", "")
        unit = {"us": "µs"}.get(row["against"], f"× {row['against']}")
        digits = 0 if unit == "µs" else 2
        lines.append(
            f"| {source} | {chip.name} {chip.gpu_cores} | {K} → {N} | {M} | {unit} | "
            f"{reported:.{digits}f} | {value:.{digits}f} | {errors[-1]:+.0%} | "
            f"{found.bound} |"
        )
    near = sum(abs(e) <= 0.15 for e in errors)
    size = sorted(map(abs, errors))[len(errors) // 2]
    lines.append(
        f"\n{near} of {len(errors)} points are within 15 %; the median error is "
        f"{size:.0%}. Notes on each source are in `mlx_phase/data/small_m.csv`."
    )
    return "\n".join(lines)


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
    "validation": validation,
    "kernels": kernels,
    "tiles": tiles,
    "times": times,
    "attention": counters_attention.table,
    "attention_times": counters_attention.times,
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
