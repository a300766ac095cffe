"""``python -m mlx_phase.report``: the phase analysis of a model on a chip."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console

from .. import command, predict
from ..chip import CHIPS, Chip, lookup
from ..executor import ExecutorError
from ..launch.matmul import device_chip
from ..model_config import config_of
from ..model_error import ModelError
from ..models import SMOLLM2, smollm2_path
from ..shapes import model_shapes
from . import analyse, blocks, checklist, phases, serving, verdict
from .analysis import Analysis, Options

FALLBACK_CHIP = "m4-max"
FALLBACK_MODEL = "llama-8b"
SCHEMA = 1


def parser() -> argparse.ArgumentParser:
    """Options of the report."""
    d = Options()
    p = argparse.ArgumentParser(
        prog="python -m mlx_phase.report",
        description="Which phase owns the time, what binds it, which kernels were "
        "chosen and what would flip the choice. Works from a model's config alone.",
    )
    p.add_argument(
        "--model", help="hub id, folder, config.json, .gguf file, smollm2 or preset"
    )
    p.add_argument("--chip", help="e.g. m4-max, m3-ultra-60, h200 (default: this one)")
    p.add_argument("--list-chips", action="store_true", help="print the known chips")
    number = _at_least(1)
    p.add_argument("--prompt-tokens", type=number, default=d.prompt, metavar="N")
    p.add_argument(
        "--context",
        type=number,
        metavar="N",
        help="cached tokens at the decode step (default: the prompt's)",
    )
    p.add_argument("--batch", type=number, default=d.batch, metavar="N")
    p.add_argument("--tokens", type=number, default=d.tokens, help="generated")
    p.add_argument(
        "--draft-tokens",
        type=_at_least(0),
        default=d.draft,
        metavar="K",
        help=f"drafted tokens a verification; 0: none (default {d.draft})",
    )
    p.add_argument("--kv-bits", type=int, choices=(4, 8, 16), default=d.kv_bits)
    p.add_argument(
        "--itl-ms",
        type=_between(0.01, 1e6),
        default=d.itl_ms,
        help=f"longest inter-token latency allowed (default {d.itl_ms:g})",
    )
    p.add_argument(
        "--acceptance",
        type=_between(0, 1),
        default=d.acceptance,
        help=f"assumed acceptance of a drafted token (default {d.acceptance})",
    )
    p.add_argument(
        "--draft-cost",
        type=_between(0, 10),
        default=d.draft_cost,
        help=f"assumed time of a drafted token, in steps (default {d.draft_cost})",
    )
    p.add_argument(
        "--section",
        type=int,
        action="append",
        choices=range(1, 9),
        metavar="1..8",
        help="this section only; may be repeated",
    )
    p.add_argument("--checklist", action="store_true", help="the review checklist only")
    form = p.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="print Markdown")
    form.add_argument("--json", action="store_true", help="print JSON")
    return p


def _at_least(low: int):
    def number(text: str) -> int:
        value = int(text) if text.isascii() and text.isdigit() else low - 1
        if value < low:
            raise argparse.ArgumentTypeError(
                f"must be a whole number of at least {low}, got {text!r}"
            )
        return value

    return number


def _between(low: float, high: float):
    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"must be a number from {low:g} to {high:g}, got {text!r}"
            )
        return value

    return number


def chosen_chip(name: str | None) -> tuple[Chip, str | None]:
    """(the chip, a note where it is a stand-in for this machine's)."""
    if name:
        return lookup(name), None
    chip = device_chip()
    if chip.bandwidth_gbs:
        return chip, None
    stand_in = lookup(FALLBACK_CHIP)
    return stand_in, (
        f"This machine ({chip.name}) has no known bandwidth: shown for {stand_in.key}; "
        "choose a chip with --chip."
    )


def default_model() -> str:
    """smollm2 where its wheel is installed, else a preset that needs no file."""
    try:
        smollm2_path()
    except ModelError:
        return FALLBACK_MODEL
    return SMOLLM2


def sections(a: Analysis) -> list[blocks.Section]:
    """All outputs, in order."""
    placed = phases.roofline(a)
    placed = blocks.Section(placed.title, [*placed.blocks, prediction(a)])
    return [
        phases.phases(a),
        placed,
        phases.selection(a),
        serving.batching(a),
        serving.speculation(a),
        verdict.trade_offs(a),
        verdict.measures(a),
        verdict.flip_section(a),
    ]


def prediction(a: Analysis) -> blocks.Lines:
    """What mlx_phase.predict says of one request, marked as a prediction."""
    if (why := predict.predictable(a.chip)) is not None:
        return blocks.Lines([f"No prediction: {why}."])
    o = a.options
    p = predict.predict(a.shapes, a.chip, prompt_tokens=o.prompt, context=o.context)
    return blocks.Lines(
        [
            "Predicted, not measured, for stock MLX and one request: decode "
            f"{p.decode_tok_s:.1f} tok/s ({p.low:.1f} to {p.high:.1f}), prefill "
            f"{p.prefill_tok_s:.0f} tok/s ({p.prefill_low:.0f} to "
            f"{p.prefill_high:.0f}). More: python -m mlx_phase.predict.",
            *(f"Of this prediction: {note}." for note in p.notes),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; the exit status is 2 for bad input, said in one line."""
    args = parser().parse_args(argv)
    if args.list_chips:
        blocks.show(_console(), [chip_list()])
        return 0
    try:
        a, note = _analysis(args)
    except (ModelError, ExecutorError, ValueError) as error:
        hint = "; --list-chips shows all" if "unknown chip" in str(error) else ""
        print(f"mlx_phase.report: error: {error}{hint}", file=sys.stderr)
        return 2
    found = [checklist.section(a)] if args.checklist else sections(a)
    if args.section and not args.checklist:
        found = [found[n - 1] for n in sorted(set(args.section))]
    title = f"{a.name} on {a.chip.name} ({a.chip.gpu_cores} cores)"
    if args.json:
        print(json.dumps(_json(a, note, found), indent=2))
    elif args.markdown:
        head = f"# {title}\n\n" + (f"{note}\n\n" if note else "")
        print(head + blocks.markdown(found), end="")
    else:
        console = _console()
        console.print(title, style="bold", markup=False, highlight=False)
        if note:
            console.print(note, markup=False, highlight=False, soft_wrap=True)
        blocks.show(console, found)
    return 0


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=110)


def chip_list() -> blocks.Section:
    """Every chip that has a bandwidth, by the name that --chip takes."""
    columns = [
        blocks.Column("key", "chip", left=True),
        blocks.Column("bandwidth_gbs", "GB/s", "{:g}"),
        blocks.Column("fp32_tflops", "FP32 TFLOPS", "{:g}"),
        blocks.Column("matmul_tflops", "matmul TFLOPS", "{:g}"),
        blocks.Column("family", "family", left=True),
    ]
    known = [c for c in CHIPS if c.bandwidth_gbs]
    # Two parts share name and cores: the bandwidth tells them apart.
    keys = [c.key for c in known]
    records = [
        {**asdict(c), "key": c.key + f"-{c.bandwidth_gbs:g}" * (keys.count(c.key) > 1)}
        for c in known
    ]
    return blocks.Section("Chips", [blocks.Table("chips", columns, records)])


def _analysis(args: argparse.Namespace) -> tuple[Analysis, str | None]:
    chip, note = chosen_chip(args.chip)
    found = config_of(args.model or default_model())
    options = Options(
        prompt=args.prompt_tokens,
        context=args.context or args.prompt_tokens,
        batch=args.batch,
        draft=args.draft_tokens,
        tokens=args.tokens,
        kv_bits=args.kv_bits,
        itl_ms=args.itl_ms,
        acceptance=args.acceptance,
        draft_cost=args.draft_cost,
    )
    shapes = model_shapes(found.config)
    return analyse(found.name, found.source, shapes, chip, options), note


def _json(a: Analysis, note: str | None, found: list[blocks.Section]) -> dict:
    return {
        "schema": SCHEMA,
        "kind": "mlx_phase report: lower bounds and predictions, nothing measured",
        "model": {
            "name": a.name,
            "source": a.source,
            "parameters": a.shapes.parameters,
        },
        "chip": {**asdict(a.chip), "key": a.chip.key, "note": note},
        "options": asdict(a.options),
        "sections": blocks.plain(found),
    }


if __name__ == "__main__":
    sys.exit(command.run(main, "mlx_phase.report"))
