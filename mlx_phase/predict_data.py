"""Published speeds as rows, and the shapes of the models they were measured with.

``data/published.csv`` keeps every row that was found, each with its source and grade
(A: a maintainer's own table; B: by the person who measured; C: a transcription that
could not be checked); ``left_out`` says why a row takes no part in the fit.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .chip import CHIPS, Chip
from .shapes import ModelShapes, model_shapes

_FOLDER = Path(__file__).with_name("data")
# Bits and group of MLX formats. Q8_0 and Q4_0 have as many bytes a weight as affine
# 8 and 4 bits in groups of 64 (8.5 and 4.5 bits); F16 as many as bfloat16.
_AFFINE = {
    "8-bit": (8, 64),
    "q8": (8, 64),
    "Q8_0": (8, 64),
    "q6": (6, 64),
    "q5": (5, 64),
    "q5 g32": (5, 32),
    "q4 g32": (4, 32),
    "4-bit": (4, 64),
    "q4": (4, 64),
    "affine 4-bit g64": (4, 64),
    "Q4_0": (4, 64),
}
_PLAIN = ("F16", "bf16")
_MXFP4 = ("MXFP4", "mxfp4-q8")
QUANTS = (*_PLAIN, *_AFFINE, *_MXFP4)


@dataclass(frozen=True)
class Published:
    """One row. Speeds in tokens/s, None where the source has none.

    ``group`` is the runtime and build group of the fit ("" for a row left out),
    ``context_tokens`` the mean number of cached tokens while it generated, and
    ``gpu_cores`` None where the source does not say.
    """

    source: str
    chip: str
    gpu_cores: int | None
    bandwidth_gbs: float
    model: str
    shape: str
    quant: str
    prompt_tokens: int | None
    context_tokens: int | None
    prefill_tok_s: float | None
    decode_tok_s: float | None
    date: str
    runtime: str
    build: str
    grade: str
    group: str
    left_out: str
    notes: str


def _cell(name: str, text: str) -> Any:
    if name in ("gpu_cores", "prompt_tokens", "context_tokens"):
        return int(text) if text else None
    if name in ("bandwidth_gbs", "prefill_tok_s", "decode_tok_s"):
        return float(text) if text else None
    return text


@cache
def published() -> tuple[Published, ...]:
    """Every row of the table, those left out of the fit included."""
    path = _FOLDER / "published.csv"
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        return tuple(Published(**{k: _cell(k, v) for k, v in r.items()}) for r in rows)


@cache
def published_models() -> dict[str, dict[str, Any]]:
    """Name -> what a config.json says of the model's shapes, without quantisation."""
    path = _FOLDER / "published_models.json"
    return json.loads(path.read_text(encoding="utf-8"))


def quantized(config: dict[str, Any], quant: str) -> dict[str, Any]:
    """The config with the ``quantization`` that a published format stands for.

    Raises ValueError for a format that is not in ``QUANTS``.
    """
    if quant in _PLAIN:
        return dict(config)
    affine8 = {"group_size": 64, "bits": 8, "mode": "affine"}
    if quant in _AFFINE:
        bits, group = _AFFINE[quant]
        quantization: dict[str, Any] = {"group_size": group, "bits": bits}
        if quant == "Q4_0":
            # llama.cpp keeps the head (or the table that serves as one) in Q6_K.
            six = {"group_size": 64, "bits": 6}
            quantization |= {"lm_head": six, "model.embed_tokens": six}
    elif quant in _MXFP4:
        # gpt-oss packs the experts alone; conversions keep the rest in 8 bits.
        quantization = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
        paths = ["lm_head", "model.embed_tokens"]
        for layer in range(config["num_hidden_layers"]):
            at = f"model.layers.{layer}"
            paths += [f"{at}.self_attn.{p}_proj" for p in "qkvo"]
            paths.append(f"{at}.mlp.router")
        quantization |= dict.fromkeys(paths, affine8)
    else:
        raise ValueError(f"quant {quant!r} is not one of {', '.join(QUANTS)}")
    return {**config, "quantization": quantization}


@cache
def shapes_of(model: str, quant: str) -> ModelShapes:
    """Shapes of a model of ``published_models()`` in a format of ``QUANTS``."""
    return model_shapes(quantized(published_models()[model], quant))


def chip_of(row: Published) -> Chip:
    """The chip of a row; where cores are not stated, the largest part of that name."""
    parts = [c for c in CHIPS if c.name == row.chip]
    if row.gpu_cores:
        parts = [c for c in parts if c.gpu_cores == row.gpu_cores]
    if not parts:
        raise ValueError(f"no chip {row.chip!r} with {row.gpu_cores} cores in chip.py")
    return max(parts, key=lambda c: c.gpu_cores)
