"""Measured rows as groups that may be compared, and the rows that may not."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..chip import UNKNOWN, Chip, lookup
from . import BenchError, record
from .compare_table import Same, Speed
from .measure import COMPARABLE

Row = dict[str, Any]
Groups = Mapping[Same, list[Speed]]


def same(row: Row) -> Same:
    """What a measured row must share with others in its table."""
    if row["mode"] in (None, "none"):
        quant = row["dtype"] or "format not stated"
    else:
        group = row["group"]
        quant = f"{row['mode']} {row['bits']}-bit g{group}, {row['dtype']} activations"
    if row.get("kv_bits"):
        quant += f", {row['kv_bits']}-bit KV cache g{row['kv_group']}"
    versions = [("mlx", "mlx"), ("mlx-lm", "mlx_lm"), ("mlx_phase", "mlx_phase")]
    build = ", ".join(f"{name} {row[field]}" for name, field in versions if row[field])
    return Same(row["model"], quant, row["prompt_tokens"], row["tokens"], build)


def why_not(row: Row) -> str | None:
    """None for a row that may be compared, else the reason why not."""
    if row["suite"] == "speculate":
        return "with drafts (not plain decoding)"
    if row["suite"] != "e2e":
        return "of single kernels (not end to end)"
    if row["executor"] == "cpu":
        return "of the CPU executor: times of an emulation"
    if row["comparable"] != COMPARABLE:
        return row["comparable"]
    missing = [n for n in ("model", "phase", "prompt_tokens", "tokens", "tok_s")
               if row[n] is None]  # fmt: skip
    return f"without {', '.join(missing)}" if missing else None


def read(paths: Iterable[str | Path]) -> tuple[Groups, tuple[str, ...]]:
    """({what is shared: speeds of its chips}, sentences about rows left out).

    Of several runs of one chip the newest counts. RecordError for a file that does
    not fit the schema, OSError for one that can't be read.
    """
    newest: dict[tuple[Same, str, str], Row] = {}
    runs: Counter[tuple[Same, str, str]] = Counter()
    reasons: Counter[str] = Counter()
    paths = list(paths)
    for path in paths:
        for row in record.read(path):
            reason = why_not(row)
            if reason is not None:
                reasons[reason] += 1
                continue
            key = same(row), row["chip"], row["phase"]
            runs[key] += 1
            if key not in newest or row["date"] >= newest[key]["date"]:
                newest[key] = row
    left_out = tuple(f"{n} rows {why}" for why, n in reasons.items())
    if paths and not newest:
        names = ", ".join(str(path) for path in paths)
        why = "; ".join(left_out) or "the files are empty"
        raise BenchError(
            f"no end-to-end row to compare in {names} ({why}): write some with "
            "python -m mlx_phase.bench --json FILE"
        )
    groups: dict[Same, dict[str, dict[str, Row]]] = defaultdict(dict)
    for (group, chip, phase), row in newest.items():
        groups[group].setdefault(chip, {})[phase] = row
    return {
        group: [
            _speed(phases, max(runs[group, chip, phase] for phase in phases))
            for chip, phases in chips.items()
        ]
        for group, chips in groups.items()
    }, left_out


def _speed(phases: Mapping[str, Row], runs: int) -> Speed:
    decode, prefill = phases.get("decode", {}), phases.get("prefill", {})
    row = decode or prefill
    return Speed(
        _chip(row),
        decode.get("tok_s"),
        prefill.get("tok_s"),
        decode.get("stock_tok_s"),
        prefill.get("stock_tok_s"),
        decode.get("bytes_per_token"),
        source=f"{row['device']}, {row['os']}, {row['date'][:10]}, {row['repeats']} "
        f"repeats{'' if runs == 1 else f', newest of {runs} runs'}",
        note=row["note"] or "",
    )


def _chip(row: Row) -> Chip:
    try:
        chip = lookup(row["chip"])
    except ValueError:
        return replace(UNKNOWN, name=row["device"])
    if row["gbps"] is not None and row["frac_peak"] is None:
        # The bench could not tell which part of this name it ran on.
        return replace(chip, bandwidth_gbs=None)
    return chip
