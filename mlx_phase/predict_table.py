"""The page docs/prediction.md: numbers of the fit and its errors, from the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from .predict_data import Published, published, shapes_of
from .predict_fit import (
    GROUPS,
    REFERENCE_GHZ,
    SHARE,
    Residual,
    fitted,
    fitted_without,
    left_out,
    rows_with,
    select,
    spread,
    summary,
)

PHASES = ("decode", "prefill")
GOAL_MEDIAN, GOAL_P90 = 0.10, 0.20
_LARGE = 3e9

_HEAD = """# Predicted speeds

`python -m mlx_phase.predict --model Llama-3.1-8B --chip m4-max` prints decode and
prefill speed as this page's model gives them. They are predictions: nothing was run on
the chip. The rows behind them are other people's, each with its source and grade, in
`mlx_phase/data/published.csv`.

This page is generated: `python -m mlx_phase.predict --table > docs/prediction.md`.

## The model

One request, sums of terms, each a known quantity times a fitted number:

- decode, ms a token = *memory* × (weight bytes + KV bytes) / marketed bandwidth +
  *fixed* × layers × ({ghz:g} GHz / clock)^{exponent} (+ *experts* × layers, in a model
  with experts);
- prefill, ms a prompt = *compute* × FLOPs / peak rate + *fixed* × layers (+ *experts* ×
  FLOPs / peak rate, in a model with experts).

FLOPs are those of the layers and of causal attention; the head runs once a prompt. The
peak is the FP32 rate, or the matrix rate where the Neural Accelerators serve (Apple10
and later, not on the 2023 build). The clock is the one that the chip table's FP32 rate
implies. The power of the clock is chosen by each fit from its own rows, 0 to 4
({exponents} here): on older chips the fixed time is longer than clock alone explains.
It stands for all that does not scale with bytes (launches, host, small kernels).
Least squares of relative errors, large ones weighed down (Huber at 10 %).

Groups: llama.cpp 2023 is build 8e672ef, llama.cpp 2024+ are later builds, MLX is mlx-lm
and what serves with it. {count} rows take part. Model shapes (`published_models.json`)
were written down from common knowledge and not read from the configs; a test holds most
of them to the published number of weights. Those of K2-V2 70B, one row, are assumed.
"""

_METHOD = """## Errors, leaving one chip out

Each row is predicted by a fit that saw no row of its chip, whatever the core count (M1
Max and M1 Pro are two chips). Error = predicted / published - 1. The fitted numbers are
thus judged on chips they have not seen; which terms there are was chosen with all rows
in view, so a new chip may do worse than the table.
"""

_READ = """## What the large errors are

Single rows are named where their source or a second row says why.

- Published rows disagree, at contexts that do not explain it. {twice}
- `mac-llm-bench` on the M2 Max (30 cores) is slow under llama.cpp too: 37.5 tok/s for
  Llama-3.1-8B Q4_K_M, where an M1 Max of the same bandwidth does 46.2 in normiebench.
  So it is the machine or its power mode.
- The M5 of the same source is a fanless Air: Qwen3-0.6B reads a prompt 1.8 times as
  fast as Llama-3.2-3B there, with 6 times fewer weights in the layers. Short prompts of
  small models measure what a harness does around the GPU. Without models below 3
  billion weights, prefill under MLX is the row "MLX, 3 billion weights and more".
- gemma3 is predicted too fast in decode. Its layers have more norms than a llama's,
  which one fixed time a layer does not know; that this is the reason is a guess.
- Most MLX rows are M4 Max or M3 Ultra. Without the one, the fit stands on the other.
- MLX on M1 and M2 has {old} prefill rows, of three machines, and the Neural
  Accelerators have {matrix}: predictions there are weak, whatever the median says.

## What it does not know

Batches, quantised KV caches, speculation, memory pressure, thermal limits, low power
mode, contexts beyond the rows' (about 2,000 tokens). M5 Ultra and M6 have no row at
all. The intervals come from the errors above, so they hold for rows like these.

## Rows left out
"""


def _of_4167(row: Published) -> bool:
    return "#4167" in row.source


def _in_goal(row: Published) -> bool:
    return _of_4167(row) or row.group == "MLX"


def _large(row: Published) -> bool:
    shapes = shapes_of(row.shape, row.quant)
    return row.group == "MLX" and shapes.parameters >= _LARGE


_GOAL, _MLX = "goal: #4167 and MLX", "MLX"
_SUBSETS: dict[str, Callable[[Published], bool]] = {
    _GOAL: _in_goal,
    "goal, without grade C": lambda r: _in_goal(r) and r.grade != "C",
    "#4167, M1 to M5, all builds": _of_4167,
    **{group: lambda r, group=group: r.group == group for group in GROUPS},
    "MLX, 3 billion weights and more": _large,
}


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = list(head)
    lines = ["| " + " | ".join(head) + " |"]
    lines.append("| --- |" + " ---: |" * (len(head) - 1))
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _meaning(term: str, factor: float) -> tuple[str, str]:
    """(value, what it says) of a fitted factor."""
    if term.startswith("memory"):
        return f"{factor:.3f}", f"{100 / factor:.0f} % of the marketed bandwidth"
    if term.startswith("compute"):
        peak = "matrix" if "matrix" in term else "FP32"
        return f"{factor:.3f}", f"{100 / factor:.0f} % of the {peak} peak"
    return f"{factor:.4f}", f"{1e3 * factor:.0f} µs a layer"


def _parameters() -> str:
    rows = []
    for phase in PHASES:
        for term, factor in sorted(fitted(phase).factors.items()):
            value, says = _meaning(term, factor)
            if (phase, term) == ("prefill", "experts"):
                value, says = f"{factor:.3f}", "added to compute"
            rows.append((f"{phase}: {term}", value, says, rows_with(term, phase)))
    return _table(("term", "fitted", "that is", "rows"), rows)


def _errors(phase: str) -> str:
    rows = []
    for label, want in _SUBSETS.items():
        chosen = select(left_out(phase), want)
        rows.append((label, len(chosen), *map(_percent, summary(chosen))))
    head = (f"{phase}: rows", "number", "median", "90th percentile", "largest")
    return _table(head, rows)


def _verdict() -> str:
    lines = [
        f"Goal: median absolute error at most {100 * GOAL_MEDIAN:.0f} %, 90th "
        f"percentile at most {100 * GOAL_P90:.0f} %,\nover the M1 to M5 rows of "
        "llama.cpp #4167 and the MLX rows.\n"
    ]
    for phase in PHASES:
        found = []
        for label, name in ((_GOAL, "all these rows"), (_MLX, "the MLX rows alone")):
            median, p90, _ = summary(select(left_out(phase), _SUBSETS[label]))
            met = median <= GOAL_MEDIAN and p90 <= GOAL_P90
            found.append(f"{'met' if met else 'missed'} by {name}")
        lines.append(f"- {phase}: {', '.join(found)}")
    return "\n".join(lines) + "\n"


def _chips() -> str:
    names = dict.fromkeys(r.row.chip for r in left_out("decode"))
    rows = []
    for name in sorted(names):
        cells: list[object] = [name]
        for phase in PHASES:
            chosen = select(left_out(phase), lambda r, name=name: r.chip == name)
            if chosen:
                median, _, largest = summary(chosen)
                cells += [len(chosen), _percent(median), _percent(largest)]
            else:
                cells += [0, "", ""]
        rows.append(cells)
    head = ["left-out chip"]
    for phase in PHASES:
        head += [f"{phase}: rows", "median", "largest"]
    return _table(head, rows)


def _worst(phase: str, count: int = 10) -> str:
    def row(r: Residual) -> tuple[object, ...]:
        cores = f" ({r.row.gpu_cores})" if r.row.gpu_cores else ""
        source = r.row.source.split(" (public")[0]
        return (
            f"{r.row.chip}{cores}, {r.row.model} {r.row.quant}, {r.row.group}",
            f"{r.published_tok_s:.1f}",
            f"{r.predicted_tok_s:.1f}",
            f"{100 * r.error:+.0f} %",
            f"{source}, grade {r.row.grade}",
        )

    ordered = sorted(left_out(phase), key=lambda r: -abs(r.error))[:count]
    head = (f"{phase}: largest errors", "published", "predicted", "error", "source")
    return _table(head, map(row, ordered))


def _intervals() -> str:
    rows = []
    for group in GROUPS:
        cells = [group]
        for phase in PHASES:
            low, high = spread(phase, group, SHARE)
            cells.append(f"{100 * (low - 1):+.0f} % to {100 * (high - 1):+.0f} %")
        rows.append(cells)
    return _table(("runtime", "decode", "prefill"), rows)


def _left_out() -> str:
    reasons = Counter(row.left_out for row in published() if row.left_out)
    return _table(("left out because", "rows"), reasons.most_common())


def _disagreements() -> str:
    """Same chip, model, format and runtime, two sources: the widest decode gaps."""
    speeds: dict[tuple[object, ...], list[Published]] = {}
    for row in published():
        if row.group == "MLX" and row.decode_tok_s and row.gpu_cores:
            bits = "4-bit" if row.quant == "q4" else row.quant
            key = (row.shape, row.chip, row.gpu_cores, bits)
            speeds.setdefault(key, []).append(row)
    found = []
    for (model, chip, cores, bits), rows in speeds.items():
        values = sorted(row.decode_tok_s or 0 for row in rows)
        if len({row.source for row in rows}) > 1:
            text = f"{model} {bits} on the {chip} ({cores}): "
            text += " and ".join(f"{v:.1f}" for v in values)
            found.append((values[-1] / values[0], text))
    found.sort(reverse=True)
    return "MLX decode of " + "; ".join(text for _, text in found[:3]) + " tok/s."


def page() -> str:
    """The whole page as Markdown, ending in a newline."""
    folds = {row.chip for row in published() if row.group}
    exponents = {fitted_without("decode", chip).exponent for chip in folds}
    head = _HEAD.format(
        ghz=REFERENCE_GHZ,
        exponent=fitted("decode").exponent,
        exponents=" or ".join(map(str, sorted(exponents))),
        count=sum(bool(row.group) for row in published()),
    )
    interval = (
        f"## Intervals\n\nOf the rows, {100 * SHARE:.0f} % lay within these distances "
        "of what was predicted\nwithout their chip; `predict` gives them as low and "
        "high.\n"
    )
    read = _READ.format(
        twice=_disagreements(),
        old=rows_with("compute, MLX, quantised on Apple7-8", "prefill"),
        matrix=rows_with("compute, matrix units", "prefill"),
    )
    parts = [head, _parameters(), _METHOD, *map(_errors, PHASES), _verdict(), _chips()]
    parts += [*map(_worst, PHASES), interval, _intervals(), read, _left_out()]
    return "\n".join(parts)
