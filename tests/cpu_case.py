"""Runs a kernel body on the CPU executor, in as few words as a test needs."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_phase.executor.cpu import metal_kernel


def run(
    source: str,
    *inputs: Any,
    shape: Sequence[int] = (32,),
    dtype: mx.Dtype = mx.float32,
    grid: tuple[int, int, int] | None = None,
    group: tuple[int, int, int] | None = None,
    name: str = "case",
    header: str = "",
    template: list | None = None,
    **options: Any,
) -> mx.array:
    """Run ``source`` with inputs a, b, c, ... and one output ``out``; return it.

    ``grid`` defaults to the output's size, ``group`` to the grid. Options of the kernel
    (ensure_row_contiguous, atomic_outputs) and of the call (init_value, verbose).
    """
    of_kernel = {
        key: options.pop(key)
        for key in ("ensure_row_contiguous", "atomic_outputs")
        if key in options
    }
    kernel = metal_kernel(
        name, list("abcdefgh"[: len(inputs)]), ["out"], source, header, **of_kernel
    )
    grid = grid or (int(np.prod(shape)), 1, 1)
    (out,) = kernel(
        inputs=list(inputs),
        output_shapes=[shape],
        output_dtypes=[dtype],
        grid=grid,
        threadgroup=group or grid,
        template=template,
        **options,
    )
    return out


def small_values(n: int, dtype: mx.Dtype, low: int = 1, high: int = 9) -> mx.array:
    """Whole numbers from low to high - 1: sums of some are exact in every type."""
    rng = np.random.default_rng([n, low, high])
    return mx.array(rng.integers(low, high, n)).astype(dtype)


def to_numpy(array: mx.array) -> np.ndarray:
    """NumPy has no bfloat16: widen it."""
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)
