"""Published speeds of other people as series; none of them was measured here.

The rows are those of ``mlx_phase/data/published.csv``, each with its source and grade.
A series is what may be compared across chips: one model, format, workload and build.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from functools import cache

from ..predict_data import Published, chip_of, published, shapes_of
from ..predict_fit import decode_bytes
from .compare_table import Same, Speed, together

# Shown when nothing else is asked for: a series with the most chips.
DEFAULT = {"model": "LLaMA-2 7B", "quant": "Q4_0", "build": "llama.cpp 8e672ef"}
GRADES = {
    "A": "a maintainer's own table",
    "B": "by the person who measured",
    "C": "a transcription that could not be checked",
}
# How MLX's formats are written in published tables; others keep their own name.
_BITS = re.compile(r"(?:q(\d)|(\d)-bit|affine (\d)-bit)(?: g(\d+))?")
_TOKENS = re.compile(r"\b(?:tg|g|max )(\d+)\b|\b(\d+)-token generation")
# Endings of a model's name that do not change its shapes.
_ENDINGS = re.compile(r"-(instruct|chat|it|qat|\d-?bit|mlx|bf16|2507|v0\.\d)$")
_SAME_SHAPES = {
    "llama-3.2-1b": "llama-1b",
    "llama-3.2-3b": "llama-3b",
    "llama-3-8b": "llama-8b",
    "llama-3.1-8b": "llama-8b",
    "llama-3-70b": "llama-70b",
    "llama-3.1-70b": "llama-70b",
    "llama-3.3-70b": "llama-70b",
}


def model_name(text: str) -> str:
    """A name that the same shapes share: ``org/Llama-3.1-8B-Instruct-4bit`` and the
    preset ``llama-8b:bits=4`` both give ``llama-8b``."""
    name = re.sub(r"[ _]", "-", text.split("/")[-1].split(":")[0].lower())
    name = name.removeprefix("meta-")
    while (short := _ENDINGS.sub("", name)) != name:
        name = short
    return _SAME_SHAPES.get(name, name)


def format_name(text: str) -> str:
    """A format as measured rows write it: ``q4`` and ``4-bit`` are affine 4-bit g64."""
    if text.lower() == "bf16":
        return "bfloat16"
    found = _BITS.fullmatch(text)
    if not found:
        return text
    return f"affine {found[1] or found[2] or found[3]}-bit g{found[4] or 64}"


def _tokens(row: Published) -> int | None:
    if "discussion #4167" in row.source:
        return 128  # the discussion asks everyone for pp512 and tg128
    found = _TOKENS.search(row.notes)
    return int(found[1] or found[2]) if found else None


def _source(row: Published) -> str:
    notes = [part.strip() for part in row.notes.split(";")]
    notes = [n for n in notes if n and not re.match(r"date = |run \d", n)]
    if row.build.endswith("(as stated)"):
        notes.append("build as that source states it")
    grade = f"grade {row.grade} ({GRADES[row.grade]})"
    return "; ".join([f"{row.source}, {grade}", *notes])


@cache
def series() -> tuple[dict[Same, list[Speed]], tuple[str, ...]]:
    """({series: its chips' speeds}, sentences about rows that are left out)."""
    groups: dict[Same, dict[str, list[Speed]]] = defaultdict(lambda: defaultdict(list))
    left_out: Counter[str] = Counter()
    for row in published():
        facts = {
            "GPU cores": row.gpu_cores,
            "prompt length": row.prompt_tokens,
            # A range such as 0.7.x-0.10.5 is not one build.
            "one build": row.build and ".x" not in row.build,
        }
        missing = [name for name, value in facts.items() if not value]
        if missing:
            left_out[missing[0]] += 1
            continue
        chip, build = chip_of(row), row.build.removesuffix(" (as stated)")
        key = Same(
            row.model,
            row.quant,
            row.prompt_tokens or 0,
            _tokens(row),
            f"{row.runtime} {build}",
        )
        speed = Speed(
            chip,
            row.decode_tok_s,
            row.prefill_tok_s,
            bytes_per_token=_bytes(row),
            source=_source(row),
            row=row,
        )
        groups[key][chip.key].append(speed)
    said = [f"{n} published rows do not state {what}" for what, n in left_out.items()]
    merged = {
        key: [together(speeds) for speeds in chips.values()]
        for key, chips in groups.items()
    }
    return merged, tuple(said)


def _bytes(row: Published) -> int | None:
    """Bytes a decode step read; None for rows whose format or shapes are not known."""
    if not row.group or row.context_tokens is None:
        return None
    return sum(decode_bytes(shapes_of(row.shape, row.quant), row.context_tokens))
