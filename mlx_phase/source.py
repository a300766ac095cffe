"""Kernel name -> the text MLX compiles: ordered files, comments stripped."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Ordered, never globbed: a file may use only what stands before it. Same table
# in metal/README.md (tests/test_source.py compares them).
# What weights are: affine codes, floats of 4 or 8 bits, or a cache's plain elements.
_AFFINE = ("base.h", "dequant.h")
_FLOATS = ("base.h", "dequant_fp.h")
_PLAIN = ("base.h", "sdpa_plain.h")
_MMA = ("mma.h", "columns.h", "operands.h")
_SUMS = ("finish.h", "packs.h", "rows.h")
_PRODUCT = ("activate.h", *_SUMS, "set_rows.h", "product.h")
_FUSED = (*_AFFINE, *_PRODUCT, "qmv_fused.metal")
_QKV = (*_FUSED, "qmv_qkv.metal")
_CODES = (
    *("base.h", "mma.h", "columns.h", "codes_weights.h"),
    *("codes_x.h", "qmm_codes.h"),
)
_CODES_FUSED = (*_CODES, "activate.h", "qmm_codes.metal")
_TILE = (*_MMA, "qmm_tile.h", "qmm.metal")
_GATHER = (*_PRODUCT, "gather.h", "gather.metal")
_EXPERTS = (*_MMA, "qmm_tile.h", "gather_qmm.metal")
_EXPERTS_GLU = ("activate.h", *_EXPERTS[:-1], "gather.h", _EXPERTS[-1])
_SPLIT = ("sdpa.h", "sdpa_place.h", "sdpa_recent.h", "sdpa_split.metal")
_CACHES = (*_MMA, "sdpa.h", "sdpa_place.h", "sdpa_recent.h", "sdpa_codes.h")
_MATRIX = ("sdpa_parts.h", "sdpa_matrix.metal")
_PLAIN_MATRIX = (*_PLAIN, *_CACHES, "sdpa_no_ring.h", *_MATRIX)
_PROMPT = (*_MMA, "sdpa.h", "sdpa_place.h", "sdpa_prompt.h")
_PREFILL = (*_PROMPT, "sdpa_prefill.metal")
_WIDE = (*_PROMPT, "sdpa_prefill_wide.metal")
KERNELS: dict[str, tuple[str, ...]] = {
    "qmv": (*_AFFINE, *_SUMS, "qmv.metal"),
    "qmv_fp": (*_FLOATS, *_SUMS, "qmv.metal"),
    "qmv_pair": (*_AFFINE, *_SUMS, "qmv.metal"),
    "qmv_triple": (*_AFFINE, *_SUMS, "qmv.metal"),
    "qmv_reduce": ("qmv_reduce.metal",),
    "gemv": ("base.h", "finish.h", "gemv.metal"),
    "qmv_add": _FUSED,
    "qmv_glu": _FUSED,
    "qmv_qkv": _QKV,
    "qmv_qkv_bias": _QKV,
    "qk_norm": ("qk_norm.metal",),
    "add_norm": ("base.h", "add_norm.metal"),
    "qmm_small": (*_AFFINE, *_MMA, "qmm_small.metal"),
    "qmm_small_fp": (*_FLOATS, *_MMA, "qmm_small.metal"),
    "qmm_codes": _CODES_FUSED,
    "qmm_codes_add": _CODES_FUSED,
    "qmm_codes_glu": _CODES_FUSED,
    "qmm_codes_qkv": (*_CODES, "qmm_codes_qkv.metal"),
    "qmm_codes_qkv_bias": (*_CODES, "qmm_codes_qkv.metal"),
    "qmm": (*_AFFINE, *_TILE),
    "qmm_fp": (*_FLOATS, *_TILE),
    "qmm_plain": (*_AFFINE, *_TILE),
    "qmm_add": (*_AFFINE, *_TILE),
    "qmm_glu": (*_AFFINE, "activate.h", *_TILE),
    "sdpa_split": (*_PLAIN, *_SPLIT),
    "sdpa_split_codes": (*_AFFINE, *_SPLIT),
    "sdpa_reduce": ("base.h", "sdpa.h", "sdpa_reduce.metal"),
    "sdpa_matrix": _PLAIN_MATRIX,
    "sdpa_matrix_codes": (*_AFFINE, *_CACHES, "sdpa_ring.h", *_MATRIX),
    "sdpa_split_joint": (*_PLAIN, *_SPLIT, "sdpa_joint.metal"),
    "sdpa_matrix_joint": (*_PLAIN_MATRIX, "sdpa_joint.metal"),
    "sdpa_split_codes_joint": (*_AFFINE, *_SPLIT, "sdpa_joint.metal"),
    "sdpa_matrix_codes_joint": (
        *(*_AFFINE, *_CACHES, "sdpa_ring.h"),
        *(*_MATRIX, "sdpa_joint.metal"),
    ),
    "sdpa_prefill": (*_PLAIN, *_PREFILL),
    "sdpa_prefill_codes": (*_AFFINE, *_PREFILL),
    "sdpa_prefill_wide": (*_PLAIN, *_WIDE),
    "sdpa_prefill_wide_codes": (*_AFFINE, *_WIDE),
    "gather_qmv": (*_AFFINE, *_GATHER),
    "gather_qmv_fp": (*_FLOATS, *_GATHER),
    "gather_glu": (*_AFFINE, *_GATHER),
    "gather_glu_fp": (*_FLOATS, *_GATHER),
    "gather_tiles": ("gather_tiles.metal",),
    "gather_qmm": (*_AFFINE, *_EXPERTS),
    "gather_qmm_fp": (*_FLOATS, *_EXPERTS),
    "gather_qmm_glu": (*_AFFINE, *_EXPERTS_GLU),
    "gather_qmm_glu_fp": (*_FLOATS, *_EXPERTS_GLU),
}

#: Kernels with a second text: the sums of lean.h in the place of those of rows.h.
LEAN = tuple(
    k for k, files in KERNELS.items() if "rows.h" in files and "gather.h" not in files
)

_MARK = re.compile(r"^//! kernel (\w+) \((.*)\) -> \((.*)\)$", re.M)


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


def lean_files(kernel: str) -> tuple[str, ...]:
    """The files of ``kernel`` with the sums of lean.h; ValueError if it has none."""
    if kernel not in LEAN:
        raise ValueError(f"{kernel} has no text with the sums of lean.h")
    files = KERNELS[kernel]
    first = files.index("finish.h")
    rest = (f for f in files[first:] if f not in (*_SUMS, "set_rows.h", "product.h"))
    return (*files[:first], "packs.h", "set_rows.h", "lean.h", *rest)


@cache
def load(
    kernel: str, narrow: bool = False, lean: bool = False, without: tuple[str, ...] = ()
) -> KernelText:
    """The text of ``kernel``, a key of :data:`KERNELS`; narrow: no vector loads; lean:
    with the sums of ``lean.h``; without: inputs and outputs that a call does not have.

    In a ``.metal`` file everything above the first ``//! kernel`` line is helper code;
    each such line starts the body of the kernel it names, with its inputs and outputs.
    What a call may lack is followed by = and what then stands in its place.
    """
    header = ["#define ALIGNED(p, n) false\n"] if narrow else []
    found = None
    for file in lean_files(kernel) if lean else KERNELS[kernel]:
        parts = _MARK.split((metal_dir() / file).read_text())
        header.append(parts[0])
        for name, inputs, outputs, body in zip(*[iter(parts[1:])] * 4, strict=True):
            if name == kernel:
                found = body, inputs, outputs
    if found is None:
        raise KeyError(f"no '//! kernel {kernel}' line in {KERNELS[kernel]}")
    body, *lists = found
    pairs = [[n.strip().partition("=") for n in text.split(",")] for text in lists]
    others = {name: other for some in pairs for name, _, other in some}
    for name in without:
        if not others.get(name):
            raise ValueError(f"{kernel} cannot do without {name}")
        body = f"const auto {name} = {others[name]};\n" + body
    names = [tuple(n for n, *_ in some if n not in without) for some in pairs]
    name = "_".join([f"mlxp_{kernel}", *["lean"] * lean, *[f"no_{n}" for n in without]])
    return KernelText(name, compact("".join(header)), compact(body), *names)
