"""One row schema for every suite: JSON Lines, append only, one file per chip."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from . import BenchError

SCHEMA = 1
NUMBER = (int, float)

# name -> (types, required, meaning). Other fields are null where they don't apply.
FIELDS: dict[str, tuple[tuple[type, ...], bool, str]] = {
    "schema": ((int,), True, "version of this table, 1"),
    "suite": ((str,), True, "decode, attention, host, e2e, ..."),
    "kernel": ((str,), False, "kernel that served ours (per-kernel suites)"),
    "model": ((str,), False, "model name (end to end)"),
    "phase": ((str,), False, "prefill or decode (end to end)"),
    "shape": ((str,), False, "K x N of a matmul, as 8192x28672"),
    "M": ((int,), False, "rows of x"),
    "experts": ((str,), False, "experts and those of a token, as 128/8 (moe)"),
    "heads": ((str,), False, "Hq/Hkv x head_dim of attention, as 32/8x128"),
    "q_len": ((int,), False, "query positions (attention)"),
    "k_len": ((int,), False, "key positions (attention)"),
    "prompt_tokens": ((int,), False, "prompt length (end to end)"),
    "tokens": ((int,), False, "generated tokens (end to end)"),
    "dtype": ((str,), False, "activations: float16, bfloat16 or float32"),
    "bits": ((int,), False, "bits of a weight, or of a cached key or value"),
    "group": ((int,), False, "weights or cached values that share a scale"),
    "mode": ((str,), False, "affine, mxfp4, mxfp8, nvfp4 or none"),
    "kv_bits": ((int,), False, "bits of a quantised KV cache (end to end)"),
    "kv_group": ((int,), False, "cached values that share a scale (end to end)"),
    "us": (NUMBER, False, "ours: GPU time of the kernel; per token end to end"),
    "stock_us": (NUMBER, False, "the same for stock MLX in the same run"),
    "ratio": (NUMBER, False, "stock time over our time, drift removed; > 1 is faster"),
    "us_source": ((str,), False, "how us was taken: gpu profiler, wall or host clock"),
    "gbps": (NUMBER, False, "bytes that must move / us, 10^9 per second"),
    "frac_peak": (NUMBER, False, "gbps over the marketed bandwidth of the chip"),
    "wall_us": (NUMBER, False, "per launch in an MLX graph, chain-length difference"),
    "stock_wall_us": (NUMBER, False, "the same for stock MLX"),
    "build_us": (NUMBER, False, "host: building the graph node(s) in Python"),
    "stock_build_us": (NUMBER, False, "the same for stock MLX"),
    "eval_us": (NUMBER, False, "host: evaluating (encoding) the node(s)"),
    "stock_eval_us": (NUMBER, False, "the same for stock MLX"),
    "launches": ((int,), False, "kernels and copies of a decode step, patched"),
    "stock_launches": ((int,), False, "the same, stock"),
    "gpu_busy": (NUMBER, False, "GPU time of a step's kernels over the step's time"),
    "stock_gpu_busy": (NUMBER, False, "the same, stock"),
    "tok_s": (NUMBER, False, "tokens per second of the phase, patched"),
    "stock_tok_s": (NUMBER, False, "the same, stock"),
    "ttft_ms": (NUMBER, False, "time to first token, patched"),
    "stock_ttft_ms": (NUMBER, False, "the same, stock"),
    "itl_p50_ms": (NUMBER, False, "inter-token latency, median, patched"),
    "itl_p99_ms": (NUMBER, False, "inter-token latency, 99th percentile, patched"),
    "stock_itl_p50_ms": (NUMBER, False, "the same, stock"),
    "stock_itl_p99_ms": (NUMBER, False, "the same, stock"),
    "bytes_per_token": ((int,), False, "weights and KV cache read per decode step"),
    "peak_bytes": ((int,), False, "peak memory of the patched run"),
    "stock_peak_bytes": ((int,), False, "the same, stock"),
    "tokens_equal": ((str,), False, "yes, or where and how far the tokens differ"),
    "served": ((dict,), False, "calls of the phase, per kernel and reason for stock"),
    "spread": (NUMBER, False, "interquartile range / median of our time"),
    "stock_spread": (NUMBER, False, "the same, stock"),
    "us_min": (NUMBER, False, "fastest repeat, ours"),
    "us_max": (NUMBER, False, "slowest repeat, ours"),
    "repeats": ((int,), True, "timed repeats of each side"),
    "delay_s": (NUMBER, True, "rest before each repeat, seconds"),
    "comparable": ((str,), True, "yes, or 'not comparable: why'"),
    "executor": ((str,), True, "apple, cuda or cpu (cpu = emulation)"),
    "chip": ((str,), True, "row of mlx_phase.chip, as h200-132"),
    "device": ((str,), True, "name the device gives itself"),
    "os": ((str,), True, "operating system with build"),
    "mlx": ((str,), True, "mlx version"),
    "mlx_lm": ((str,), False, "mlx-lm version"),
    "mlx_phase": ((str,), True, "mlx_phase version"),
    "date": ((str,), True, "UTC, ISO 8601"),
    "plan": ((str,), False, "the plan that our kernel ran with"),
    "draft": ((str,), False, "draft model, or lookup (speculate)"),
    "draft_tokens": ((int,), False, "drafts a verification, at most (speculate)"),
    "accepted": (NUMBER, False, "mean drafts accepted a verification (speculate)"),
    "acceptance": (NUMBER, False, "share of the drafts that were accepted, 0 to 1"),
    "cost_ratio": (NUMBER, False, "time of a step of M rows (drafts + 1) over M = 1"),
    "break_even": (NUMBER, False, "acceptance from which drafts gain; null: never"),
    "plain_us": (NUMBER, False, "per token, patched, without drafts in the same run"),
    "plain_tok_s": (NUMBER, False, "the same as tokens per second"),
    "plain_spread": (NUMBER, False, "interquartile range / median of it"),
    "speed_up": (NUMBER, False, "plain_us over us, drift removed; > 1: drafts gain"),
    "note": ((str,), False, "anything else a reader must know"),
}  # fmt: skip


class RecordError(BenchError):
    """A row that does not fit the schema; says which field and why."""


def row(**values: Any) -> dict[str, Any]:
    """A complete, validated row; fields that are not given are null."""
    full = {name: None for name in FIELDS} | {"schema": SCHEMA} | values
    validate(full)
    return full


def validate(values: Mapping[str, Any]) -> None:
    """Raise RecordError for an unknown, missing, mistyped or non-finite field."""
    for name in values:
        if name not in FIELDS:
            raise RecordError(f"unknown field {name!r}: add it to record.FIELDS")
    for name, (types, required, _) in FIELDS.items():
        value = values.get(name)
        if value is None:
            if required:
                raise RecordError(f"field {name!r} is missing")
            continue
        if not isinstance(value, types) or isinstance(value, bool):
            wanted = " or ".join(t.__name__ for t in types)
            raise RecordError(f"field {name!r} must be {wanted}, got {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise RecordError(f"field {name!r} is {value}: not a measurement")
    if values["schema"] != SCHEMA:
        raise RecordError(
            f"schema {values['schema']} is not {SCHEMA}: update mlx_phase"
        )
    _check_meaning(values)


def _check_meaning(values: Mapping[str, Any]) -> None:
    shape = values.get("shape")
    if shape is not None:
        parts = shape.split("x")
        if len(parts) != 2 or not all(p.isdigit() and int(p) for p in parts):
            raise RecordError(f"shape must be KxN such as 8192x28672, got {shape!r}")
    comparable = values["comparable"]
    if comparable != "yes" and not comparable.startswith("not comparable: "):
        raise RecordError(f"comparable must be 'yes' or 'not comparable: why', got "
                          f"{comparable!r}")  # fmt: skip
    if comparable == "yes" and values["repeats"] < 3:
        raise RecordError(f"{values['repeats']} repeats are not comparable: 3 needed")
    for name in ("us", "stock_us", "ratio", "tok_s", "stock_tok_s"):
        value = values.get(name)
        if value is not None and value <= 0:
            raise RecordError(f"field {name!r} must be above 0, got {value}")


def append(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Validate all rows, then append them to ``path``; returns how many."""
    lines = []
    for values in rows:
        validate(values)
        lines.append(json.dumps(dict(values), allow_nan=False) + "\n")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(lines))
    return len(lines)


def check(path: Path | None) -> None:
    """Raise BenchError unless rows could be appended to ``path``; writes nothing."""
    if path is None:
        return
    if path.exists():
        if not path.is_file():
            what = "a folder" if path.is_dir() else "a device"
            raise BenchError(f"--json {path} is {what}: name a file")
        read(path)
    # A file that is not there yet is made, and so are the folders above it.
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not (os.access(there, os.W_OK) and (there == path or there.is_dir())):
        raise BenchError(f"--json {path} cannot be written: {there} is in the way")


def read(path: str | Path) -> list[dict[str, Any]]:
    """All rows of a file; RecordError names the file, the line and the field."""
    rows = []
    for number, line in enumerate(Path(path).read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            if not isinstance(values, dict):
                raise RecordError("a row must be a JSON object")
            validate(values)
        except json.JSONDecodeError as error:
            raise RecordError(f"{path}:{number}: not JSON ({error.msg})") from error
        except RecordError as error:
            raise RecordError(f"{path}:{number}: {error}") from error
        rows.append(values)
    return rows


def schema_table() -> str:
    """The schema as a Markdown table; bench/README.md holds this text."""
    lines = ["| field | type | required | meaning |", "| --- | --- | --- | --- |"]
    for name, (types, required, meaning) in FIELDS.items():
        kind = "/".join(t.__name__ for t in types)
        lines.append(f"| {name} | {kind} | {'yes' if required else ''} | {meaning} |")
    return "\n".join(lines)
