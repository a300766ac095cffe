"""Checks of a kernel's and a call's arguments, with MLX's messages."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

MATH_MODES = ("safe", "relaxed", "fast")


def check_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str,
    compile_options: dict[str, str] | None,
) -> None:
    """Raise TypeError or ValueError for what ``mx.fast.metal_kernel`` refuses."""
    for what, value in (("name", name), ("source", source), ("header", header)):
        if not isinstance(value, str):
            raise TypeError(f"[metal_kernel] `{what}` must be a string, got {value!r}.")
    for what, names in (("input_names", input_names), ("output_names", output_names)):
        if isinstance(names, str) or not all(isinstance(n, str) for n in names):
            raise TypeError(f"[metal_kernel] `{what}` must be a list of strings.")
    if not output_names:
        raise ValueError("[metal_kernel] Must specify at least one output.")
    for option, value in (compile_options or {}).items():
        if option != "math_mode":
            raise ValueError(f"[metal_kernel] Unknown compile option `{option}`.")
        if value not in MATH_MODES:
            raise ValueError(
                "[metal_kernel] Expected math_mode to be 'safe', 'relaxed', or 'fast'."
            )


def three(what: str, value: Any) -> tuple[int, int, int]:
    """Return ``grid`` or ``threadgroup`` as three ints that are not negative."""
    try:
        x, y, z = map(operator.index, value)
    except (TypeError, ValueError):
        raise TypeError(
            f"[metal_kernel] `{what}` must be three ints, got {value!r}."
        ) from None
    if x < 0 or y < 0 or z < 0 or max(x, y, z) >= 2**32:
        raise ValueError(
            f"[metal_kernel] `{what}` must have sizes from 0 to 2^32 - 1, got {value}."
        )
    return x, y, z


def check_call(
    input_names: Sequence[str],
    output_names: Sequence[str],
    inputs: Sequence[Any],
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[mx.Dtype],
) -> None:
    """Raise ValueError for wrong numbers of arrays or unsupported types."""
    for what, got, names in (
        ("inputs", inputs, input_names),
        ("output_shapes", output_shapes, output_names),
        ("output_dtypes", output_dtypes, output_names),
    ):
        if len(got) != len(names):
            raise ValueError(
                f"[metal_kernel] Expected `{what}` to have size {len(names)} but got "
                f"size {len(got)}."
            )
    for dtype in output_dtypes:
        if not isinstance(dtype, mx.Dtype):
            raise TypeError(
                f"[metal_kernel] `output_dtypes` must be mlx dtypes, got {dtype!r}."
            )
        if dtype == mx.float64:
            raise ValueError("[metal_kernel] float64 is not supported on the GPU.")
    for shape in output_shapes:
        if not isinstance(shape, (tuple, list)) or any(n < 0 for n in shape):
            raise ValueError(
                "[metal_kernel] `output_shapes` must hold shapes of sizes >= 0, got "
                f"{shape!r}."
            )
