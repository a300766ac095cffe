"""``python -m mlx_phase.doctor``: a report of this machine to paste into an issue.

Checks every kernel of every plan row here: it compiles, is right, and rows of x have
the bits they have alone. Exit status 0: all passed, 1: something failed, 2: bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from mlx.utils import tree_flatten
from rich.console import Console
from rich.progress import track

from . import command, ops, tune_store
from .bench.device import EMULATION, Environment, environment
from .bench.kernel_suite import host_case
from .bench.kernel_timer import Effort
from .bench.measure import NoiseError
from .doctor_attention import examine as examine_attention
from .doctor_attention import rows as attention_rows
from .doctor_experts import examine as examine_experts
from .doctor_experts import rows as expert_rows
from .doctor_fused import FusedRow
from .doctor_fused import examine as examine_fused
from .doctor_fused import rows as fused_rows
from .doctor_kernels import (
    Examined,
    Row,
    codes_rows,
    examine,
    matrix_rows,
    prefill_rows,
    rows,
)
from .doctor_machine import facts
from .executor import ExecutorError
from .launch.matmul import narrow_loads
from .model_error import ModelError
from .models import load
from .patch import patch
from .plan import Plan
from .problem import Gather, Matmul, Sdpa
from .tune_plans import Problems, StoredPlans

SCHEMA = 1
# So small a product that its launch is all there is to time.
HOST = Matmul(1, 512, 512)
HOST_EFFORT = Effort(4, 8, (8, 40))
MODEL_ROWS = 4  # M that a model's own launches are compared with M = 1 at

AnyRow = Row | Sdpa | FusedRow | Gather
_LOOKS = {Sdpa: examine_attention, FusedRow: examine_fused, Gather: examine_experts}


@dataclass
class Diagnosis:
    """What the doctor found; ``problems`` make the exit status 1, warnings do not."""

    machine: dict[str, Any]
    quick: bool
    plans: str
    kernels: list[Examined] = field(default_factory=list)
    host: dict[str, float] | None = None
    model: dict[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """One sentence for each kernel that failed."""
        return [f"{k.kernel}: {k.error}" for k in self.kernels if not k.ok]

    def to_dict(self) -> dict[str, Any]:
        """The whole diagnosis as JSON-able data."""
        # A worst of infinity is no JSON number.
        kernels = [
            asdict(k) | {"worst": k.worst if k.worst < 1e30 else None}
            for k in self.kernels
        ]
        own = vars(self) | {"kernels": kernels, "problems": self.problems}
        return {"schema": SCHEMA, "ok": not self.problems, **own}


def parser() -> argparse.ArgumentParser:
    """Options of the doctor."""
    p = argparse.ArgumentParser(
        prog="python -m mlx_phase.doctor",
        description="Report this machine and check every kernel on it.",
    )
    p.add_argument("--model", help="also a model: its size and its own launches")
    much = p.add_mutually_exclusive_group()
    much.add_argument(
        "--quick",
        action="store_true",
        help="formats, dtypes and tiles in turn (the default but on Apple GPUs)",
    )
    much.add_argument(
        "--full",
        action="store_true",
        help="all of them (the default on Apple GPUs); CUDA takes 3 s a kernel",
    )
    p.add_argument("--json", action="store_true", help="JSON instead of text")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the doctor; returns the exit status."""
    args = parser().parse_args(argv)
    try:
        env = environment()
        quick = args.quick or (env.executor != "apple" and not args.full)
        found = diagnose(env, quick, args.model)
    except (ModelError, ExecutorError) as error:
        print(f"mlx_phase.doctor: error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(found.to_dict(), indent=1, allow_nan=False))
    else:
        print(block(found))
    return 1 if found.problems else 0


def everything(quick: bool) -> list[AnyRow]:
    """What is examined: kernels of matmuls, experts, fused blocks and attention."""
    own = [*rows(quick), *codes_rows(quick), *matrix_rows(quick)]
    own += [*prefill_rows(quick), *expert_rows(quick)]
    return [*own, *fused_rows(quick), *attention_rows(quick)]


def diagnose(
    env: Environment,
    quick: bool,
    model: str | None = None,
    *,
    todo: Callable[[bool], list[AnyRow]] = everything,
) -> Diagnosis:
    """Read the machine and run the checks. ModelError for an unknown model."""
    stored = tune_store.lookup()
    found = Diagnosis(facts(env), quick, stored.status)
    if stored.note:
        found.warnings.append(stored.note)
    own = [] if stored.plans is None else _stored_rows(stored.plans)
    if model is not None:
        own += _model(found, env, model)
    distinct = {_key(row): row for row in [*todo(quick), *own]}
    progress = Console(stderr=True)
    quiet = not progress.is_terminal
    every = list(distinct.values())
    for row in track(
        every, "checking", console=progress, transient=True, disable=quiet
    ):
        found.kernels.append(_LOOKS.get(type(row), examine)(row))
    # The check switches them off; asking means setting.
    narrow_loads(narrow := narrow_loads(True))
    found.machine["vector_loads"] = (
        "off: an x between two vectors gave other bits" if narrow else "on"
    )
    if env.executor == "cpu":
        found.warnings.append(EMULATION)
    else:
        _host(found, env)
    return found


def _key(row: AnyRow) -> object:
    if not isinstance(row, Row):
        return row
    return ops.variant(row.one[0], row.plan_one), ops.variant(
        row.many[0], row.plan_many
    )


def _host(found: Diagnosis, env: Environment) -> None:
    try:
        row = host_case(HOST, env, HOST_EFFORT)
    except (NoiseError, ExecutorError, RuntimeError) as error:
        found.warnings.append(f"no host times: {error}")
        return
    names = ("build_us", "eval_us", "stock_build_us", "stock_eval_us")
    found.host = {name: row[name] for name in names}


def _model(found: Diagnosis, env: Environment, spec: str) -> list[Row]:
    """Note the model's size; its own launches as rows to check."""
    loaded = load(spec)
    size = sum(a.nbytes for _, a in tree_flatten(loaded.model.parameters())) / 1e9
    report = patch(loaded.model, check=False)
    found.model = {
        "name": loaded.name,
        "source": loaded.source,
        "gb": round(size, 3),
        "layers_replaced": report.n_replaced,
        "layers_left": report.n_left,
        "tune": report.tune,
    }
    room = found.machine["wired_limit_gb"] or found.machine["memory_gb"]
    if size > room:
        found.warnings.append(
            f"{loaded.name} has {size:.1f} GB of weights, the limit is {room:.1f} GB: "
            "they are paged on every token"
        )
    own = (_row(one, MODEL_ROWS, ops.choose) for one in report.launches)
    return [row for row in own if row is not None]


def _stored_rows(plans: StoredPlans) -> list[Row]:
    """What a stored plan chose, as rows to check."""
    decide = partial(plans.decide, exact=True)
    own = (_row(e.problems, e.M, decide) for e in plans)
    return [row for row in own if row is not None]


def _row(
    problems: Problems, m: int, choose: Callable[[Problems], Plan | str | None]
) -> Row | None:
    one = tuple(replace(p, M=1) for p in problems)
    many = tuple(replace(p, M=m) for p in problems)
    plans = choose(one), choose(many)
    # Where a stored plan says stock there is nothing to check.
    return Row(one, many, *plans) if all(isinstance(p, Plan) for p in plans) else None


def block(found: Diagnosis) -> str:
    """The text to paste: facts, kernels, what is wrong."""
    lines = ["```text", "mlx_phase doctor" + (" (quick)" if found.quick else "")]
    shown = found.machine | {"stored plan": found.plans}
    if found.model:
        m = found.model
        shown["model"] = (
            f"{m['name']} ({m['source']}), {m['gb']} GB; {m['layers_replaced']} layers "
            f"on kernels, {m['layers_left']} left"
        )
    shown["host"] = _host_text(found)
    for name, value in shown.items():
        text = "not readable here" if value is None else value
        lines.append(f"{name.replace('_', ' '):<15} {text}")
    lines += ["", f"{'error/allowed':>13} {'first ms':>9} {'run ms':>7}  exact  kernel"]
    for k in found.kernels:
        exact = {True: "yes", False: "NO", None: "-"}[k.exact]
        run = "-" if k.run_ms is None else f"{k.run_ms:.2f}"
        state = "" if k.ok else "  FAILED"
        lines.append(
            f"{k.worst:13.2f} {k.first_ms:9.0f} {run:>7}  {exact:<5}  {k.kernel}{state}"
        )
    lines += ["", "first ms: compile and check, with its M = 1; run ms: one launch"]
    lines += [f"warning: {text}" for text in found.warnings]
    lines += [f"FAILED: {text}" for text in found.problems]
    passed = sum(k.ok for k in found.kernels)
    lines.append(f"{passed} of {len(found.kernels)} rows of the plan passed")
    return "\n".join([*lines, "```"])


def _host_text(found: Diagnosis) -> str:
    if found.host is None:
        return "not measured"
    h = {name: f"{us:.1f}" for name, us in found.host.items()}
    return (
        f"{h['build_us']} us to build a launch, {h['eval_us']} us to evaluate it "
        f"(stock {h['stock_build_us']}, {h['stock_eval_us']}; untraced)"
    )


if __name__ == "__main__":
    sys.exit(command.run(main, "mlx_phase.doctor"))
