"""The predicted column: the fit of ``mlx_phase.predict`` for a line of a table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from .. import predict_fit
from ..chip import Chip
from ..model_error import ModelError
from ..predict import SHARE, predict, predictable
from ..predict_data import Published, published_models
from ..presets import PRESETS
from ..shapes import ModelShapes, model_shapes
from .compare_table import Interval, Predicted, Same
from .published import model_name

_AFFINE = re.compile(r"(\w+) (\d)-bit g(\d+)")


def for_published(row: Published) -> Predicted | None:
    """What a fit without any row of this chip gives for the row (None: no such)."""
    decode, prefill = (_left_out(phase).get(row) for phase in ("decode", "prefill"))
    return None if decode is None else Predicted(decode, prefill)


@cache
def _left_out(phase: str) -> Mapping[Published, Interval]:
    found = {}
    for residual in predict_fit.left_out(phase):
        low, high = predict_fit.spread(phase, residual.row.group, SHARE)
        speed = residual.predicted_tok_s
        found[residual.row] = Interval(
            speed, speed * min(low, 1.0), speed * max(high, 1.0)
        )
    return found


def for_measured(same: Same, chip: Chip) -> Predicted | None:
    """What the fit on all published MLX rows gives for a measured line (None: none)."""
    shapes = _shapes(same)
    if shapes is None or predictable(chip) is not None:
        return None
    found = predict(
        shapes,
        chip,
        prompt_tokens=same.prompt_tokens,
        context=same.prompt_tokens + (same.tokens or 0) // 2,
    )
    return Predicted(
        Interval(found.decode_tok_s, found.low, found.high),
        Interval(found.prefill_tok_s, found.prefill_low, found.prefill_high),
    )


@cache
def _shapes(same: Same) -> ModelShapes | None:
    known: dict[str, Any] = {model_name(n): c for n, c in published_models().items()}
    known |= PRESETS
    config = known.get(model_name(same.model))
    if config is None:
        return None
    config = {**config, "torch_dtype": same.quant.split(", ")[-1].split(" ")[0]}
    form = _AFFINE.match(same.quant)
    if form:
        config["quantization"] = {
            "mode": form[1],
            "bits": int(form[2]),
            "group_size": int(form[3]),
        }
    try:
        return model_shapes(config)
    except ModelError:
        return None
