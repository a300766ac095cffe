"""Kernel name -> the text MLX compiles: ordered files, comments stripped."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Ordered, never globbed: a file may use only what stands before it. Same table
# in metal/README.md (tests/test_source.py compares them).
_FUSED = ("base.h", "dequant.h", "activate.h", "qmv.metal", "qmv_fused.metal")
_QKV = (*_FUSED, "qmv_qkv.metal")
_GATHER = (*_FUSED, "gather.h", "gather.metal")
_GATHER_FP = ("base.h", "dequant_fp.h", *_GATHER[2:])
_EXPERTS = ("mma.h", "columns.h", "operands.h", "qmm_tile.h", "gather_qmm.metal")
_EXPERTS_GLU = ("activate.h", *_EXPERTS[:-1], "gather.h", _EXPERTS[-1])
_CODES = ("base.h", "mma.h", "columns.h", "qmm_codes.h")
_TILE = ("mma.h", "columns.h", "operands.h", "qmm_tile.h", "qmm.metal")
_QMM = ("base.h", "dequant.h", *_TILE)
KERNELS: dict[str, tuple[str, ...]] = {
    "qmm": _QMM,
    "qmm_fp": ("base.h", "dequant_fp.h", *_TILE),
    "qmm_plain": _QMM,
    "qmm_add": _QMM,
    "qmm_glu": ("base.h", "dequant.h", "activate.h", *_TILE),
    "qmv": ("base.h", "dequant.h", "qmv.metal"),
    "qmv_fp": ("base.h", "dequant_fp.h", "qmv.metal"),
    "qmv_pair": ("base.h", "dequant.h", "qmv.metal"),
    "qmv_triple": ("base.h", "dequant.h", "qmv.metal"),
    "qmv_reduce": ("qmv_reduce.metal",),
    "gemv": ("base.h", "gemv.metal"),
    "qmm_small": (
        "base.h",
        "dequant.h",
        "mma.h",
        "columns.h",
        "operands.h",
        "qmm_small.metal",
    ),
    "qmm_small_fp": (
        *(
            "base.h",
            "dequant_fp.h",
            "mma.h",
            "columns.h",
            "operands.h",
            "qmm_small.metal",
        ),
    ),
    "qmm_codes": (*_CODES, "activate.h", "qmm_codes.metal"),
    "qmm_codes_add": (*_CODES, "activate.h", "qmm_codes.metal"),
    "qmm_codes_glu": (*_CODES, "activate.h", "qmm_codes.metal"),
    "qmm_codes_qkv": (*_CODES, "qmm_codes_qkv.metal"),
    "qmm_codes_qkv_bias": (*_CODES, "qmm_codes_qkv.metal"),
    "sdpa_split": (
        *("base.h", "sdpa_plain.h", "sdpa.h", "sdpa_place.h", "sdpa_split.metal"),
    ),
    "sdpa_split_codes": (
        *("base.h", "dequant.h", "sdpa.h", "sdpa_place.h", "sdpa_split.metal"),
    ),
    "sdpa_reduce": ("base.h", "sdpa.h", "sdpa_reduce.metal"),
    "sdpa_matrix": (
        "base.h",
        "sdpa_plain.h",
        "mma.h",
        "columns.h",
        "operands.h",
        "sdpa.h",
        "sdpa_place.h",
        "sdpa_codes.h",
        "sdpa_matrix.metal",
    ),
    "sdpa_matrix_codes": (
        "base.h",
        "dequant.h",
        "mma.h",
        "columns.h",
        "operands.h",
        "sdpa.h",
        "sdpa_place.h",
        "sdpa_codes.h",
        "sdpa_matrix.metal",
    ),
    "sdpa_prefill": (
        *("base.h", "sdpa_plain.h", "mma.h", "columns.h", "operands.h", "sdpa.h"),
        *("sdpa_place.h", "sdpa_prefill.metal"),
    ),
    "sdpa_prefill_codes": (
        *("base.h", "dequant.h", "mma.h", "columns.h", "operands.h", "sdpa.h"),
        *("sdpa_place.h", "sdpa_prefill.metal"),
    ),
    "qmv_add": _FUSED,
    "qmv_glu": _FUSED,
    "qmv_qkv": _QKV,
    "qmv_qkv_bias": _QKV,
    "qk_norm": ("qk_norm.metal",),
    "add_norm": ("base.h", "add_norm.metal"),
    "gather_qmv": _GATHER,
    "gather_qmv_fp": _GATHER_FP,
    "gather_glu": _GATHER,
    "gather_glu_fp": _GATHER_FP,
    "gather_tiles": ("gather_tiles.metal",),
    "gather_qmm": ("base.h", "dequant.h", *_EXPERTS),
    "gather_qmm_fp": ("base.h", "dequant_fp.h", *_EXPERTS),
    "gather_qmm_glu": ("base.h", "dequant.h", *_EXPERTS_GLU),
    "gather_qmm_glu_fp": ("base.h", "dequant_fp.h", *_EXPERTS_GLU),
}

_MARK = re.compile(r"^//! kernel (\w+) \(([\w, ]*)\) -> \(([\w, ]*)\)$", re.M)


@dataclass(frozen=True)
class KernelText:
    """The arguments of ``metal_kernel`` that do not change between calls."""

    name: str
    header: str
    body: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]


def metal_dir() -> Path:
    """The folder with the .metal files: inside a wheel, or beside the package."""
    here = Path(__file__).parent
    for folder in (here / "metal", here.parent / "metal"):
        if (folder / "base.h").exists():
            return folder
    raise FileNotFoundError(
        f"mlx_phase's metal/ folder is missing beside {here}: reinstall the package"
    )


def compact(text: str) -> str:
    """Drop comments and indentation: MLX copies and hashes the text on every call."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    lines = (re.sub(r"\s+", " ", line).strip() for line in text.split("\n"))
    tight = r" ?([=+\-*/<>{}(),;:?&|%^!]) ?"
    return "".join(
        (line if line[0] == "#" else re.sub(tight, r"\1", line)) + "\n"
        for line in lines
        if line
    )


@cache
def load(kernel: str, narrow: bool = False) -> KernelText:
    """The text of ``kernel``, a key of :data:`KERNELS`; narrow: no vector loads.

    In a ``.metal`` file everything above the first ``//! kernel`` line is helper code;
    each such line starts the body of the kernel it names, with its inputs and outputs.
    """
    header = ["#define ALIGNED(p, n) false\n"] if narrow else []
    found = None
    for file in KERNELS[kernel]:
        parts = _MARK.split((metal_dir() / file).read_text())
        header.append(parts[0])
        for name, inputs, outputs, body in zip(*[iter(parts[1:])] * 4, strict=True):
            if name == kernel:
                found = body, inputs, outputs
    if found is None:
        raise KeyError(f"no '//! kernel {kernel}' line in {KERNELS[kernel]}")
    body, inputs, outputs = found
    names = [tuple(n.strip() for n in text.split(",")) for text in (inputs, outputs)]
    return KernelText(f"mlxp_{kernel}", compact("".join(header)), compact(body), *names)
