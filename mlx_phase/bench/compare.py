"""``python -m mlx_phase.bench compare``: chips side by side, like with like."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from . import BenchError, compare_plot, compare_predict, compare_rows, compare_show
from .compare_rows import Groups
from .compare_table import Line, Same, Speed, Table, difference, largest, order
from .published import DEFAULT, format_name, model_name, series

# Text between these marks is the table that the options in the first one give.
MARKS = re.compile(
    r"(?P<begin><!-- bench compare (?P<options>.*?) -->\n)"
    r"(?P<text>.*?)"
    r"(?P<end><!-- bench compare end -->)",
    re.S,
)


def parser() -> argparse.ArgumentParser:
    """Options of the comparison."""
    p = argparse.ArgumentParser(
        prog="python -m mlx_phase.bench compare",
        description="Decode and prefill speed by chip: measured rows, published ones "
        "and predictions, in columns of their own. Rows of another model, format, "
        "prompt, token count or build are not mixed.",
    )
    p.add_argument("files", nargs="*", type=Path, help="bench/results/*.jsonl")
    p.add_argument("--published", action="store_true", help="published rows as well")
    p.add_argument("--model", help="only rows of this model")
    p.add_argument("--quant", help="only rows of this format, as Q4_0 or 4-bit")
    p.add_argument("--build", help="only rows whose build contains this text")
    p.add_argument("--prompt-tokens", type=int, help="only rows of this prompt length")
    p.add_argument("--tokens", type=int, help="only rows with so many generated")
    p.add_argument("--each", action="store_true", help="a table for each kind of row")
    p.add_argument("--largest", action="store_true", help="most cores of a name only")
    p.add_argument("--list", action="store_true", help="list what could be compared")
    how = p.add_mutually_exclusive_group()
    how.add_argument("--markdown", action="store_true", help="print Markdown")
    how.add_argument("--json", action="store_true", help="print JSON")
    p.add_argument("--plot", type=Path, metavar="FILE", help="also write this picture")
    p.add_argument(
        "--update",
        type=Path,
        metavar="FILE",
        help="renew the tables between the marks of a Markdown file; no other option",
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; returns the exit status (2: bad input, said in one line)."""
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parser().parse_args(argv)
    try:
        if args.update is not None:
            if len(argv) > (1 if argv[0].startswith("--update=") else 2):
                raise BenchError("--update takes no other option: the file has them")
            update(args.update)
        elif args.list:
            _list(args)
        else:
            _show(args)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        sys.stdout = None
    except (BenchError, OSError) as error:
        print(f"mlx_phase.bench compare: error: {error}", file=sys.stderr)
        return 2
    return 0


def _show(args: argparse.Namespace) -> None:
    found = tables(args)
    if args.plot is not None:
        if len(found) > 1:
            raise BenchError(f"--plot holds one table, not {len(found)}: leave --each")
        compare_plot.save(found[0], args.plot)
    if args.json:
        print(json.dumps([compare_show.as_json(table) for table in found], indent=1))
    elif args.markdown:
        print("\n".join(compare_show.markdown(table) for table in found), end="")
    else:
        # Wide enough for every column where the output is not a terminal.
        console = Console(width=None if sys.stdout.isatty() else 150)
        for table in found:
            compare_show.terminal(console, table)


def _list(args: argparse.Namespace) -> None:
    groups = dict(compare_rows.read(args.files)[0]) if args.files else {}
    kinds = [("measured", group, speeds) for group, speeds in groups.items()]
    if args.published or not args.files:
        kinds += [("published", g, speeds) for g, speeds in series()[0].items()]
    for kind, group, speeds in sorted(kinds, key=lambda k: (k[0], -len(k[2]))):
        count = f"{len(speeds)} chip{'' if len(speeds) == 1 else 's'}"
        print(f"{kind}: {count}: {group.text}")
    if args.published or not args.files:
        for text in series()[1]:
            print(f"in no series: {text}")


def _wanted(group: Same, args: argparse.Namespace) -> bool:
    quant = group.quant.split(", ")[0]
    return (
        (not args.model or model_name(args.model) == model_name(group.model))
        and (not args.quant or format_name(args.quant) == format_name(quant))
        and (not args.build or args.build in group.build)
        and args.prompt_tokens in (None, group.prompt_tokens)
        and args.tokens in (None, group.tokens)
    )


def _choose(groups: Groups, args: argparse.Namespace, kind: str) -> list[Same]:
    """The groups to show: one, or each with --each; else BenchError says why not."""
    found = [group for group in groups if _wanted(group, args)]
    if not found:
        raise BenchError(
            f"no {kind} row fits these options: --list shows what there is"
        )
    if len(found) > 1 and not args.each:
        raise BenchError(
            f"{kind} rows that are not comparable with one another are not mixed: they "
            f"differ in {difference(found)}. Choose with --model, --quant, "
            "--prompt-tokens, --tokens or --build, or take --each for one table each"
        )
    return found


def tables(args: argparse.Namespace) -> list[Table]:
    """Tables of the rows that the options name; BenchError if they can't share one."""
    if not args.files and not args.published:
        raise BenchError("give result files, or --published, or both")
    if args.files:
        groups, left_out = compare_rows.read(args.files)
        chosen = _choose(groups, args, "measured")
        return [_measured(g, groups[g], left_out, args) for g in chosen]
    groups, _ = series()
    if not args.each and model_name(args.model or DEFAULT["model"]) == model_name(
        DEFAULT["model"]
    ):
        args = argparse.Namespace(
            **vars(args) | {k: getattr(args, k) or v for k, v in DEFAULT.items()}
        )
    return [
        _table(None, (), group, groups[group], (), args)
        for group in _choose(groups, args, "published")
    ]


def _measured(
    group: Same,
    speeds: list[Speed],
    left_out: tuple[str, ...],
    args: argparse.Namespace,
) -> Table:
    """A measured table, joined by published rows of the same model and workload."""
    if not args.published:
        return _table(group, speeds, None, (), left_out, args)
    known, _ = series()
    quant = group.quant.split(", ")[0]
    same_model = [s for s in known if model_name(s.model) == model_name(group.model)]
    fitting = [
        s
        for s in same_model
        if format_name(s.quant) == quant
        and s.prompt_tokens == group.prompt_tokens
        and s.tokens == group.tokens
    ]
    if not fitting:
        why = f"published: no row of {group.model}"
        if same_model:
            why = (
                f"{len(same_model)} published series of {group.model}: another format, "
                "prompt or number of tokens"
            )
        return _table(group, speeds, None, (), (*left_out, why), args)
    best = max(fitting, key=lambda s: len(known[s]))
    more = [f"published series {s.text}" for s in fitting if s != best]
    return _table(group, speeds, best, known[best], (*left_out, *more), args)


def _table(
    measured: Same | None,
    speeds: Sequence[Speed],
    published: Same | None,
    others: Sequence[Speed],
    left_out: tuple[str, ...],
    args: argparse.Namespace,
) -> Table:
    chips = {speed.chip.key: speed.chip for speed in (*speeds, *others)}
    ours = {speed.chip.key: speed for speed in speeds}
    theirs = {speed.chip.key: speed for speed in others}
    lines = []
    for key, chip in chips.items():
        predicted = None
        if key in theirs and theirs[key].row is not None:
            predicted = compare_predict.for_published(theirs[key].row)
        elif measured is not None:
            predicted = compare_predict.for_measured(measured, chip)
        lines.append(Line(chip, ours.get(key), theirs.get(key), predicted))
    lines.sort(key=order)
    if args.largest:
        lines = largest(lines)
    return Table(tuple(lines), measured, published, left_out)


def renewed(text: str, folder: Path) -> str:
    """``text`` with the tables between its marks made anew.

    Result files in the options of a mark are relative to ``folder``. BenchError if
    there is no mark.
    """
    if not MARKS.search(text):
        raise BenchError(
            "no table to renew: put <!-- bench compare --published --> and "
            "<!-- bench compare end --> around one"
        )

    def table(found: re.Match[str]) -> str:
        args = parser().parse_args(shlex.split(found["options"]))
        args.files = [folder / file for file in args.files]
        made = "\n".join(compare_show.markdown(t) for t in tables(args))
        return f"{found['begin']}{made}{found['end']}"

    return MARKS.sub(table, text)


def update(path: Path) -> None:
    """Renew the tables of a Markdown file in place."""
    path.write_text(renewed(path.read_text("utf-8"), path.parent), "utf-8")
