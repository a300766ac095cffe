"""Predicted speeds of a model on an Apple chip: `python -m mlx_phase.predict`.

No figure here was measured on the chip in question: a prediction comes from shapes, a
row of the chip table and a few numbers fitted on other people's published speeds
(predict_fit.py), and is marked as one wherever it is printed.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import command, predict_data, predict_fit, predict_table
from .chip import CHIPS, Chip, lookup
from .model_error import ModelError
from .predict_fit import SHARE, Case
from .shapes import ModelShapes, model_shapes

# Names for callers -> groups of the fit.
RUNTIMES = {
    "mlx": "MLX",
    "llama.cpp": "llama.cpp 2024+",
    "llama.cpp-2023": "llama.cpp 2023",
}


@dataclass(frozen=True)
class Prediction:
    """Predicted tokens/s of one request; ``low`` and ``high`` are edges of intervals.

    Of the published rows of this runtime, the share ``SHARE`` lay that near to what
    was predicted without their chip. ``decode_ms`` and ``prefill_ms`` split the time
    of a token and of the prompt by term; ``rows_of_chip`` counts the rows of this chip
    and runtime in the fit, often none.
    """

    chip: str
    runtime: str
    prompt_tokens: int
    context: int
    decode_tok_s: float
    low: float
    high: float
    prefill_tok_s: float
    prefill_low: float
    prefill_high: float
    decode_ms: Mapping[str, float]
    prefill_ms: Mapping[str, float]
    rows_of_chip: int
    notes: tuple[str, ...] = ()

    @property
    def first_token_ms(self) -> float:
        """Predicted time of the prompt, in ms."""
        return 1e3 * self.prompt_tokens / self.prefill_tok_s

    def __str__(self) -> str:
        return (
            f"{self.chip} (predicted, {self.runtime}): "
            f"decode {self.decode_tok_s:.1f} tok/s ({self.low:.1f} to {self.high:.1f})"
            f", prefill {self.prefill_tok_s:.0f} tok/s "
            f"({self.prefill_low:.0f} to {self.prefill_high:.0f})"
        )


def predictable(chip: Chip) -> str | None:
    """Why nothing can be predicted for ``chip``, in words, or None."""
    if predict_fit.family_number(chip) is None:
        return f"{chip.name}: the fit knows Apple's chips alone"
    if not (chip.bandwidth_gbs and chip.fp32_tflops and chip.matmul_tflops):
        return f"{chip.name}: its bandwidth or compute rate is not known"
    return None


def predict(
    shapes: ModelShapes,
    chip: Chip,
    *,
    runtime: str = "mlx",
    prompt_tokens: int = 512,
    context: int | None = None,
) -> Prediction:
    """Decode and prefill tokens/s of one request, each with an interval.

    ``context`` is the mean number of cached tokens while it generates (default: the
    prompt's). Raises ValueError for a chip, runtime or length it can't be told for.
    """
    why = predictable(chip)
    if why:
        raise ValueError(f"no prediction for {why}")
    if runtime not in RUNTIMES:
        raise ValueError(f"runtime {runtime!r} is not one of {', '.join(RUNTIMES)}")
    context = prompt_tokens if context is None else context
    if prompt_tokens < 1 or context < 0:
        raise ValueError(
            f"prompt_tokens must be above 0 and context not below, "
            f"got {prompt_tokens} and {context}"
        )
    group = RUNTIMES[runtime]
    speeds, parts = [], []
    for phase, tokens in (("decode", context), ("prefill", prompt_tokens)):
        case = Case(shapes, chip, group, tokens)
        terms = predict_fit.fitted(phase).parts(case, phase)
        count = 1 if phase == "decode" else tokens
        speed = 1e3 * count / sum(terms.values())
        low, high = predict_fit.spread(phase, group)
        speeds += [speed, speed * min(low, 1.0), speed * max(high, 1.0)]
        parts.append(terms)
    rows = [r for r in predict_data.published() if r.group == group]
    notes = _notes(case, parts[1], rows, context)
    return Prediction(
        f"{chip.name} ({chip.gpu_cores} cores, {chip.bandwidth_gbs:g} GB/s)",
        runtime, prompt_tokens, context, *speeds, *parts,
        sum(r.chip == chip.name for r in rows), (*notes, *shapes.notes),
    )  # fmt: skip


def _notes(
    prefill: Case,
    terms: Mapping[str, float],
    rows: Sequence[predict_data.Published],
    context: int,
) -> list[str]:
    """What makes this prediction less sure than the table of errors says."""
    notes = []
    if predict_fit.uses_matrix_units(prefill.chip, prefill.group):
        notes.append("prefill: Neural Accelerators in use (macOS 26.2 or later)")
    used = [r for r in predict_fit.left_out("prefill") if r.row in rows]
    for name in terms:
        count = predict_fit.rows_with(name, "prefill")
        if name.startswith("compute") and count < 10:
            notes.append(f"prefill: {count} published rows for this term ({name})")
    most = max(r.context_tokens or 0 for r in rows)
    if context > most:
        notes.append(f"context beyond {most} tokens: no published row, extrapolated")
    prompts = [r.row.prompt_tokens or 0 for r in used]
    if not min(prompts) <= prefill.tokens <= max(prompts):
        notes.append(f"prompts were {min(prompts)} to {max(prompts)}: extrapolated")
    return notes


def load_config(spec: str, quant: str | None) -> dict[str, Any]:
    """Config of a folder, of a config.json, or of a name in ``published_models()``.

    ``quant`` (one of ``predict_data.QUANTS``) replaces a config's own quantisation; a
    name without it is taken in 4 bits. Raises ModelError with the nearest names.
    """
    path = Path(spec)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ModelError(f"{path} is not a JSON file: {error}") from error
        if not isinstance(config, dict):
            raise ModelError(f"{path} is not a model's config: no JSON object")
        return predict_data.quantized(config, quant) if quant else config
    names = {name.lower(): name for name in predict_data.published_models()}
    if spec.lower() not in names:
        near = difflib.get_close_matches(spec.lower(), names, n=3, cutoff=0.4)
        listed = [names[n] for n in near] or list(names.values())
        raise ModelError(
            f"{spec!r} is no folder, no config.json and no known name; "
            f"names are such as {', '.join(listed)}"
        )
    config = predict_data.published_models()[names[spec.lower()]]
    return predict_data.quantized(config, quant or "4-bit")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mlx_phase.predict",
        description="Predicted decode and prefill speed of a model on Apple chips.",
    )
    parser.add_argument("--model", help="folder, config.json or a name (Llama-3.1-8B)")
    parser.add_argument(
        "--quant", choices=predict_data.QUANTS, help="default: the config's"
    )
    parser.add_argument(
        "--chip", action="append", help="e.g. m4-max-40; again for more; default: all"
    )
    parser.add_argument("--runtime", choices=RUNTIMES, default="mlx")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument(
        "--context", type=int, help="mean cached tokens; default: prompt"
    )
    parser.add_argument("--json", action="store_true", help="one object a chip")
    parser.add_argument(
        "--table", action="store_true", help="print docs/prediction.md and nothing else"
    )
    return parser


def _show(predictions: Sequence[Prediction], model: str) -> None:
    first = predictions[0]
    print(
        f"PREDICTED, not measured: {model}, {first.runtime}, prompt "
        f"{first.prompt_tokens} tokens, context {first.context}, one request."
    )
    print(f"In brackets: {SHARE:.0%} of the published rows lay this near.\n")
    print(f"{'chip':34}{'decode tok/s':>26}{'prefill tok/s':>28}")
    for p in predictions:
        star = "" if p.rows_of_chip else " *"
        decode = f"{p.decode_tok_s:.1f} ({p.low:.1f}-{p.high:.1f})"
        prefill = f"{p.prefill_tok_s:.0f} ({p.prefill_low:.0f}-{p.prefill_high:.0f})"
        print(f"{p.chip + star:34}{decode:>26}{prefill:>28}")
    if not all(p.rows_of_chip for p in predictions):
        print(f"* no published row of this chip and {first.runtime} is in the fit")
    for note in dict.fromkeys(n for p in predictions for n in p.notes):
        count = sum(note in p.notes for p in predictions)
        where = "" if count == len(predictions) else f" ({count} of the chips)"
        print(f"- {note}{where}")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    args = _parser().parse_args(argv)
    if args.table:
        print(predict_table.page(), end="")
        return 0
    try:
        if not args.model:
            raise ValueError("--model is missing (or --table for the error table)")
        shapes = model_shapes(load_config(args.model, args.quant))
        chips = [lookup(name) for name in args.chip or ()]
        chips = chips or [c for c in CHIPS if not predictable(c)]
        predictions = [
            predict(
                shapes,
                chip,
                runtime=args.runtime,
                prompt_tokens=args.prompt_tokens,
                context=args.context,
            )
            for chip in chips
        ]
    except (ValueError, ModelError) as error:
        print(f"predict: {error}", file=sys.stderr)
        return 2
    if args.json:
        for p in predictions:
            print(json.dumps({"kind": "prediction", **asdict(p)}))
    else:
        _show(predictions, args.model)
    return 0


if __name__ == "__main__":
    sys.exit(command.run(main, "predict"))
