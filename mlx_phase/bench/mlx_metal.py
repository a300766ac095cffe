"""MLX's own Metal headers as the ``header`` of a kernel, read from its macOS wheel.

Nothing of MLX is kept here: ``make headers`` fetches the wheel's headers, and this
reads them at run time. A ``[[kernel]]`` function becomes a plain one that a body calls.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

from . import BenchError

ROOT = Path(__file__).resolve().parents[2]
KERNELS = "mlx/backend/metal/kernels/"
#: What MLX puts in front of every custom kernel anyway.
PRELUDE = ("utils.h", "bf16.h", "bf16_math.h", "complex.h", "defines.h", "logging.h")

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"[^\n]*\n', re.M)
_CONSTANT = re.compile(
    r"constant\s+(bool|int)\s+(\w+)\s*\[\[function_constant\(\d+\)\]\]\s*;"
)


def include_folder() -> Path:
    """The wheel's include folder; BenchError where it was not fetched."""
    fetched = os.environ.get("MLX_PHASE_MLX_METAL", ROOT / ".cache" / "mlx-metal")
    folder = Path(fetched) / "mlx" / "include"
    if not (folder / KERNELS).is_dir():
        raise BenchError(
            f"no MLX Metal headers in {fetched}: run `make headers` (online)"
        )
    return folder


def header(*names: str, **constants: bool | int) -> str:
    """Text of these headers of MLX's kernels folder, with what they include.

    Every function constant must be given its value: a forgotten one is a KeyError.
    """
    text = _flatten(include_folder(), names)

    def define(match: re.Match[str]) -> str:
        kind, name = match.groups()
        if name not in constants:
            raise KeyError(f"give the function constant {name} a value")
        return f"constant constexpr {kind} {name} = {int(constants[name])};"

    return _CONSTANT.sub(define, text)


@cache
def _flatten(folder: Path, names: tuple[str, ...]) -> str:
    seen = {KERNELS + name for name in PRELUDE}

    def read(path: str) -> str:
        if path in seen:
            return ""
        seen.add(path)
        text = (folder / path).read_text(encoding="utf-8")
        return _INCLUDE.sub(lambda match: read(match[1]), text) + "\n"

    return "".join(read(KERNELS + name) for name in names)
