"""``python -m mlx_phase.tune``: race candidate plans against stock on this device.

The winners are stored for this chip, OS, mlx and kernel text; `patch` reads them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from . import command, tune_store
from .bench import BenchError
from .bench.device import environment
from .bench.kernel_timer import Effort
from .bench.measure import MIN_REPEATS
from .executor import ExecutorError, executor_name
from .launch.matmul import device_chip
from .model_error import ModelError
from .models import default_model, load
from .patch import patch
from .plan import MAX_M
from .plan_exact import on_codes
from .roofline import weight_bytes
from .tune_course import Course
from .tune_plans import Problems, StoredPlans
from .tune_race import Referee
from .tune_store import PlanFileError
from .tune_table import dry_table, print_lines, table

ROWS = (1, 2, 4, 8, 16)
CHAIN = (8, 40)
DRY_RUN = (
    "dry run: the CPU executor emulates the kernels, so nothing is raced and nothing "
    "is stored"
)


def parser() -> argparse.ArgumentParser:
    """Options of tune."""
    p = argparse.ArgumentParser(
        prog="python -m mlx_phase.tune", description=__doc__.split("\n\n")[1]
    )
    p.add_argument("--model", help="hub id, folder, .gguf file, smollm2 or preset")
    p.add_argument(
        "--rows",
        default=",".join(map(str, ROWS)),
        metavar="M[,M...]",
        help=f"rows of x to race, 1 to {MAX_M} (default %(default)s)",
    )
    p.add_argument(
        "--budget",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="start no case after this time",
    )
    p.add_argument(
        "--resume", action="store_true", help="skip what is raced and stored already"
    )
    p.add_argument(
        "--repeats", type=int, default=6, help="timed blocks of each side (default 6)"
    )
    files = p.add_mutually_exclusive_group()
    files.add_argument("--show", action="store_true", help="print the stored plan")
    files.add_argument("--export", type=Path, metavar="FILE", help="copy it to FILE")
    files.add_argument(
        "--import",
        dest="import_",
        type=Path,
        metavar="FILE",
        help="take over a plan made on a device like this one",
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run tune; returns the exit status (2: bad input, 130: interrupted)."""
    args = parser().parse_args(argv)
    out = Console()
    try:
        if args.show:
            return show(out)
        if args.export is not None:
            return export(out, args.export)
        if args.import_ is not None:
            return import_(out, args.import_)
        return run(out, args)
    except (BenchError, ModelError, ExecutorError, PlanFileError, OSError) as error:
        print(f"mlx_phase.tune: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("mlx_phase.tune: stopped; --resume goes on from here", file=sys.stderr)
        return 130


def show(out: Console) -> int:
    """Print what is stored for this device and whether it holds."""
    found = tune_store.lookup()
    print_lines(out, [found.status, *([found.note] if found.note else [])])
    if found.plans is not None:
        out.print(table(found.plans))
    return 0


def export(out: Console, path: Path) -> int:
    """Copy the plan of this device; PlanFileError if there is none that holds."""
    found = tune_store.lookup()
    if found.plans is None:
        raise PlanFileError(found.note or f"nothing to export: {found.status}")
    tune_store.save(found.plans, path)
    print_lines(out, [f"exported {len(list(found.plans))} races to {path}"])
    return 0


def import_(out: Console, path: Path) -> int:
    """Take over the races of a file; PlanFileError if they don't hold here."""
    theirs, key = tune_store.read(path), tune_store.device_key()
    if different := theirs.key.differences(key):
        raise PlanFileError(f"{path} was made elsewhere: {'; '.join(different)}")
    mine = _stored(out)
    for entry in theirs:
        mine.add(entry)
    where = tune_store.folder() / key.file
    tune_store.save(mine, where)
    print_lines(out, [f"imported {len(list(theirs))} races into {where}"])
    return 0


def _stored(out: Console) -> StoredPlans:
    """What is stored and holds here, else nothing (and why)."""
    found = tune_store.lookup()
    if found.plans is not None:
        return found.plans
    if found.note or found.status != tune_store.NONE_STORED:
        print_lines(out, [found.note or found.status, "starting anew"])
    return StoredPlans(tune_store.device_key())


def numbers(text: str) -> tuple[int, ...]:
    """``1,2,4`` as ascending values of M; BenchError says what is wrong."""
    parts = [part.strip() for part in text.split(",")]
    rows = {int(p) for p in parts if p.isdecimal()} if all(parts) else set()
    if len(rows) != len(set(parts)) or not all(1 <= m <= MAX_M for m in rows):
        raise BenchError(f"--rows takes values of M from 1 to {MAX_M}, got {text!r}")
    return tuple(sorted(rows))


def launches(spec: str) -> tuple[str, list[Problems]]:
    """(name, launches for M = 1) of a model once patched, most bytes a step first."""
    loaded = load(spec)
    found = patch(loaded.model, check=False, tune="off").launches
    if not found:
        raise BenchError(f"{spec}: no layer that the kernels take, so nothing to tune")

    def step_bytes(problems: Problems) -> int:
        return found[problems] * sum(weight_bytes(p) for p in problems)

    return loaded.name, sorted(found, key=step_bytes, reverse=True)


def run(out: Console, args: argparse.Namespace) -> int:
    """Race the model's launches, storing each result; prints the table."""
    rows = numbers(args.rows)
    if args.repeats < MIN_REPEATS:
        raise BenchError(f"--repeats must be {MIN_REPEATS} or more")
    if not args.budget > 0:
        raise BenchError(f"--budget must be seconds above 0, got {args.budget}")
    spec = args.model or default_model()
    err = Console(stderr=True)
    with err.status(escape(f"loading {spec}")):
        name, todo = launches(spec)
    mx.clear_cache()
    if executor_name() == "cpu":
        print_lines(out, [f"{name} on {device_chip().name}: {DRY_RUN}"])
        out.print(dry_table(todo, rows))
        return 0
    fixed = [p for p in todo if len(p) == 1 and on_codes(p[0], device_chip())]
    if fixed:
        told = f"{len(fixed)} shapes are computed on matrix units for every M here"
        print_lines(out, [f"{told}: nothing to race"])
        todo = [p for p in todo if p not in fixed]
    env = environment()
    plans = _stored(out)
    where = tune_store.folder() / plans.key.file
    # Only chains are timed, so the number of launches of a GPU block says nothing.
    referee = Referee(Effort(args.repeats, 1, CHAIN))
    with _progress(err) as bar:
        task = bar.add_task(name, total=len(todo) * len(rows))
        course = Course(
            plans,
            referee,
            save=lambda: tune_store.save(plans, where),
            budget=args.budget,
            resume=args.resume,
            cache_bytes=env.cache_bytes,
            advance=lambda more: bar.update(
                task, advance=1, total=bar.tasks[0].total + more
            ),
        )
        course.run(todo, rows)
    out.print(table(plans, course.raced))
    lines = [
        f"{len(course.raced)} raced, {course.skipped} were stored already: {where}"
    ]
    lines += course.void
    if course.left:
        lines.append(f"{course.left} cases left by --budget; --resume goes on")
    print_lines(out, lines)
    return 0


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("cases"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


if __name__ == "__main__":
    sys.exit(command.run(main, "mlx_phase.tune"))
