"""The few fitted numbers of the prediction, judged on chips that the fit did not see.

Both times are sums of terms, each a quantity that shapes and chip give times one
fitted number. So a fit is linear least squares of relative errors, with large errors
weighed down (Huber), for a row of a slow machine must not bend the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from .chip import Chip
from .predict_data import Published, chip_of, published, shapes_of
from .roofline import attention_flops, kv_bytes, weight_bytes
from .shapes import ModelShapes, attention, matmuls

GROUPS = ("llama.cpp 2023", "llama.cpp 2024+", "MLX")
REFERENCE_GHZ = 1.5
# Powers of the clock that a fit may choose from, by its own training rows.
EXPONENTS = (0, 1, 2, 3, 4)
# Share of the published rows that an interval holds.
SHARE = 0.8
_HUBER = 0.1
_STEPS = 15


def family_number(chip: Chip) -> int | None:
    """7 for Apple7; None for a chip that is not Apple's."""
    text = chip.family.removeprefix("Apple")
    return int(text) if text != chip.family and text.isdigit() else None


def clock_ghz(chip: Chip) -> float:
    """GPU clock that the chip's FLOP rates imply (256 FLOP a core and cycle).

    From Apple10 on also by the matrix rate (1024), which is nearer to the peak where
    only a measured FP32 rate is known.
    """
    rates = [(chip.fp32_tflops or 0) / 256]
    if (family_number(chip) or 0) >= 10:
        rates.append((chip.matmul_tflops or 0) / 1024)
    return max(rates) * 1e3 / chip.gpu_cores


def decode_bytes(shapes: ModelShapes, context: int) -> tuple[int, int]:
    """(weight bytes, bytes of the KV cache) that one token reads."""
    weights = sum(weight_bytes(p) * count for _, p, count in matmuls(shapes, 1))
    pairs = attention(shapes, 1, context) if context else []
    return weights, sum(kv_bytes(a) * count for a, count in pairs)


def prefill_flops(shapes: ModelShapes, prompt: int) -> int:
    """FLOPs of a prompt: the layers and causal attention, no head (one row only)."""
    pairs = attention(shapes, prompt, prompt)
    seen = sum(attention_flops(a) * count for a, count in pairs)
    return 2 * shapes.layer_parameters * prompt + seen


def uses_matrix_units(chip: Chip, group: str) -> bool:
    """Whether prefill runs on the Neural Accelerators of Apple10 and later."""
    return (family_number(chip) or 0) >= 10 and group != "llama.cpp 2023"


@dataclass(frozen=True)
class Case:
    """What a speed depends on: a model, a chip, a runtime group, tokens."""

    shapes: ModelShapes
    chip: Chip
    group: str
    tokens: int

    def decode_terms(self, exponent: int) -> dict[str, float]:
        """ms of a token by term, before the fitted factors; tokens = context."""
        weights, cached = decode_bytes(self.shapes, self.tokens)
        ultra = self.chip.device_class == "d"
        stream = (weights + cached) / (self.chip.bandwidth_gbs * 1e6)
        slower = (REFERENCE_GHZ / clock_ghz(self.chip)) ** exponent
        terms = {
            "memory, Ultra" if ultra else "memory": stream,
            f"fixed, {self.group}": self.shapes.layers * slower,
        }
        if self.shapes.experts:
            terms["experts"] = self.shapes.layers
        return terms

    def prefill_terms(self, exponent: int = 0) -> dict[str, float]:
        """ms of a prompt by term, before the fitted factors; tokens = the prompt."""
        matrix = uses_matrix_units(self.chip, self.group)
        peak = self.chip.matmul_tflops if matrix else self.chip.fp32_tflops
        compute = prefill_flops(self.shapes, self.tokens) / (peak * 1e9)
        plain = all(w.format.mode == "none" for w in self.shapes.weights)
        if matrix:
            name = "matrix units"
        else:
            name = "MLX" if self.group == "MLX" else "llama.cpp"
            if (family_number(self.chip) or 0) <= 8 and not plain:
                name += ", quantised on Apple7-8"
        terms = {f"compute, {name}": compute, "fixed": self.shapes.layers}
        if self.shapes.experts:
            terms["experts"] = compute
        return terms


@dataclass(frozen=True)
class Fit:
    """Fitted factor of each term, and the exponent of the clock."""

    factors: dict[str, float]
    exponent: int
    loss: float

    def parts(self, case: Case, phase: str) -> dict[str, float]:
        """ms by term. Raises KeyError for a term that no training row had."""
        terms = _terms(case, phase, self.exponent)
        return {name: self.factors[name] * value for name, value in terms.items()}


@dataclass(frozen=True)
class Residual:
    """A published speed and what was predicted for it without its chip."""

    row: Published
    phase: str
    published_tok_s: float
    predicted_tok_s: float

    @property
    def error(self) -> float:
        """Relative error of the predicted speed; above 0: predicted too fast."""
        return self.predicted_tok_s / self.published_tok_s - 1


def _terms(case: Case, phase: str, exponent: int) -> dict[str, float]:
    if phase == "decode":
        return case.decode_terms(exponent)
    return case.prefill_terms()


def fit_terms(
    rows: Sequence[dict[str, float]], times: Sequence[float]
) -> tuple[dict[str, float], float]:
    """(factors, loss) that minimise the relative errors of ``times`` (ms), robustly."""
    names = sorted({name for row in rows for name in row})
    wanted = np.array(times)
    scaled = np.array([[row.get(name, 0.0) for name in names] for row in rows])
    scaled /= wanted[:, None]
    weight = np.ones(len(wanted))
    for _ in range(_STEPS):
        left = scaled * weight[:, None]
        factors = np.linalg.lstsq(left, weight, rcond=None)[0]
        off = np.abs(scaled @ factors - 1)
        weight = np.sqrt(np.minimum(1, _HUBER / np.maximum(off, 1e-12)))
    small = np.minimum(off, _HUBER)
    loss = float(np.sum(small * (off - small / 2)))
    return dict(zip(names, factors.tolist(), strict=True)), loss


@dataclass(frozen=True)
class _Point:
    row: Published
    phase: str
    tokens: int
    ms: float
    terms: dict[int, dict[str, float]]


@cache
def _points(phase: str) -> tuple[_Point, ...]:
    points = []
    for row in published():
        speed = row.decode_tok_s if phase == "decode" else row.prefill_tok_s
        tokens = row.context_tokens if phase == "decode" else row.prompt_tokens
        # Without the core count there is no compute peak to predict a prefill from.
        known = phase == "decode" or row.gpu_cores
        if not (row.group and speed and tokens and known):
            continue
        case = Case(shapes_of(row.shape, row.quant), chip_of(row), row.group, tokens)
        of = EXPONENTS if phase == "decode" else (0,)
        ms = 1e3 * (1 if phase == "decode" else tokens) / speed
        terms = {e: _terms(case, phase, e) for e in of}
        points.append(_Point(row, phase, tokens, ms, terms))
    return tuple(points)


def _fit(points: Sequence[_Point]) -> Fit:
    fits = []
    for exponent in points[0].terms:
        factors, loss = fit_terms(
            [p.terms[exponent] for p in points], [p.ms for p in points]
        )
        fits.append(Fit(factors, exponent, loss))
    return min(fits, key=lambda f: f.loss)


@cache
def fitted(phase: str) -> Fit:
    """The fit on all rows of ``phase`` ("decode" or "prefill")."""
    return _fit(_points(phase))


@cache
def fitted_without(phase: str, chip: str) -> Fit:
    """The fit that saw no row of ``chip`` (a name), whatever its cores."""
    return _fit([p for p in _points(phase) if p.row.chip != chip])


@cache
def rows_with(term: str, phase: str) -> int:
    """How many published rows the factor of a term rests on."""
    return sum(term in next(iter(point.terms.values())) for point in _points(phase))


@cache
def left_out(phase: str) -> tuple[Residual, ...]:
    """Each row of the fit, predicted by ``fitted_without`` its chip.

    A row with a term that no other chip has (it can't be predicted so) is left out.
    """
    found = []
    for p in _points(phase):
        fit = fitted_without(phase, p.row.chip)
        terms = p.terms[fit.exponent]
        if terms.keys() <= fit.factors.keys():
            ms = sum(fit.factors[name] * value for name, value in terms.items())
            speed = 1e3 * (1 if phase == "decode" else p.tokens)
            found.append(Residual(p.row, phase, speed / p.ms, speed / ms))
    return tuple(found)


def select(
    residuals: Sequence[Residual], want: Callable[[Published], bool]
) -> list[Residual]:
    """The residuals of the rows that ``want`` accepts."""
    return [r for r in residuals if want(r.row)]


def summary(residuals: Sequence[Residual]) -> tuple[float, float, float]:
    """(median, 90th percentile, largest) absolute relative error."""
    errors = np.abs([r.error for r in residuals])
    return (
        float(np.median(errors)),
        float(np.percentile(errors, 90)),
        float(errors.max()),
    )


@cache
def spread(phase: str, group: str, share: float = SHARE) -> tuple[float, float]:
    """Published speed over predicted: quantiles that hold ``share`` of the rows."""
    ratios = [1 / (1 + r.error) for r in left_out(phase) if r.row.group == group]
    edge = (1 - share) / 2
    low, high = np.quantile(ratios, (edge, 1 - edge))
    return float(low), float(high)
