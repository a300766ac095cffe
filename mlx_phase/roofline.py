"""FLOPs, bytes and lower-bound times; plain arithmetic, no mlx."""

from __future__ import annotations

from dataclasses import dataclass

from .chip import Chip
from .problem import DTYPE_BYTES, Attention, Matmul

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


def attended(problem: Attention) -> int:
    """Query-key pairs of one head and request that the causal mask and window keep."""
    p = problem
    first = p.k_len - p.q_len + 1
    if p.window is None or p.window >= p.k_len:
        return p.q_len * (first + p.k_len) // 2
    growing = max(0, min(p.q_len, p.window - first + 1))
    return growing * (2 * first + growing - 1) // 2 + (p.q_len - growing) * p.window


def attention_flops(problem: Attention) -> int:
    """Operations of q k^T and of the product with v (softmax not counted).

    For a whole prompt of N: 2 d N^2 with d = q_heads * head_dim (causal: half the
    matrix; "Profile Prefill vs Decode", fanout.sh, part 3), plus the diagonal.
    """
    p = problem
    heads = p.batch * p.q_heads
    return 2 * heads * (p.head_dim + p.v_head_dim) * attended(p)


def kv_row_bytes(problem: Attention) -> int:
    """Bytes of the keys and values of one position of one request and layer."""
    p = problem
    elements = p.kv_heads * (p.head_dim + p.v_head_dim)
    if p.kv_bits >= 16:
        return elements * DTYPE_BYTES[p.dtype]
    groups = elements // p.kv_group
    return elements * p.kv_bits // 8 + groups * 2 * DTYPE_BYTES[p.dtype]


def kv_bytes(problem: Attention) -> int:
    """Bytes of the cache that the queries of one layer read, each element once."""
    p = problem
    positions = p.k_len
    if p.window is not None:
        positions = min(p.k_len, p.window + p.q_len - 1)
    return p.batch * positions * kv_row_bytes(p)


def attention_bytes(problem: Attention) -> int:
    """Least bytes to move: the cache once, the queries and the output once."""
    p = problem
    rows = p.batch * p.q_len * p.q_heads
    return kv_bytes(p) + rows * (p.head_dim + p.v_head_dim) * DTYPE_BYTES[p.dtype]


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
    return bound(matmul_flops(problem), matmul_bytes(problem), chip)


def attention_bound(problem: Attention, chip: Chip) -> Bound:
    """No attention kernel can be faster than this on ``chip``."""
    return bound(attention_flops(problem), attention_bytes(problem), chip)


def bound(flops: float, moved: float, chip: Chip) -> Bound:
    """Lower bound of work of so many operations and bytes on ``chip``."""
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
