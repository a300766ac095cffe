"""FLOPs, bytes and lower-bound times; plain arithmetic, no mlx."""

from __future__ import annotations

from dataclasses import dataclass

from .chip import Chip
from .problem import DTYPE_BYTES, Matmul

# Bytes of side data for one group: affine has a scale and a bias in the dtype of x,
# the floating-point modes have one 8-bit scale and no bias.
_FP_SCALE_BYTES = 1


def weight_bytes(problem: Matmul) -> int:
    """Bytes of the weights, scales and biases that one product has to read."""
    count = problem.N * problem.K * problem.batch
    if problem.mode == "none":
        return count * DTYPE_BYTES[problem.x_dtype]
    groups = count // problem.group_size
    side = _FP_SCALE_BYTES
    if problem.mode == "affine":
        side = 2 * DTYPE_BYTES[problem.x_dtype]
    return count * problem.bits // 8 + groups * side


def matmul_bytes(problem: Matmul) -> int:
    """Least bytes to move: weights once, x once, y once."""
    activations = problem.M * (problem.K + problem.N) * problem.batch
    return weight_bytes(problem) + activations * DTYPE_BYTES[problem.x_dtype]


def matmul_flops(problem: Matmul) -> int:
    """Floating-point operations of the product (a multiply-add counts 2)."""
    return 2 * problem.M * problem.N * problem.K * problem.batch


def machine_balance(chip: Chip) -> float | None:
    """FLOPs per byte at which memory and compute take the same time."""
    if not chip.bandwidth_gbs or not chip.matmul_tflops:
        return None
    return chip.matmul_tflops * 1e3 / chip.bandwidth_gbs


@dataclass(frozen=True)
class Bound:
    """Lower bound of a time: ``us`` (None: unknown chip) and the side that sets it."""

    us: float | None
    side: str
    intensity: float


def matmul_bound(problem: Matmul, chip: Chip) -> Bound:
    """No kernel can be faster than this on ``chip``."""
    flops, moved = matmul_flops(problem), matmul_bytes(problem)
    intensity = flops / moved if moved else 0.0
    if not chip.bandwidth_gbs:
        return Bound(None, "unknown", intensity)
    memory_us = moved / (chip.bandwidth_gbs * 1e3)
    compute_us = flops / (chip.matmul_tflops * 1e6) if chip.matmul_tflops else 0.0
    side = "compute" if compute_us > memory_us else "memory"
    return Bound(max(memory_us, compute_us), side, intensity)


def step_bytes(weights: int, kv_cache: int = 0) -> int:
    """Bytes of one decode step: all weights that serve a token, and the KV cache."""
    return weights + kv_cache


def gbs(moved: float, seconds: float) -> float:
    """Achieved 10**9 bytes per second."""
    if seconds <= 0:
        raise ValueError(f"seconds must be above 0, got {seconds}")
    return moved / seconds / 1e9


def mbu(moved: float, seconds: float, chip: Chip) -> float | None:
    """Model bandwidth utilisation, 0..1 of the marketed bandwidth (None: unknown)."""
    if not chip.bandwidth_gbs:
        return None
    return gbs(moved, seconds) / chip.bandwidth_gbs
