"""Weights, operations and the check for per-kernel timing."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx

from ..launch.decode import prepare
from ..ops import Bound, kernel_route, variant
from ..plan import Plan
from ..problem import Matmul
from ..routes import Route

Op = Callable[..., mx.array]
Buffers = tuple[mx.array, ...]

# Largest error of a kernel that is timed, as a share of the largest right value. Only
# a guard against timing garbage: the test suite holds the kernels to tighter bounds.
TOLERANCE = {"float16": 5e-3, "bfloat16": 3e-2, "float32": 1e-3}
CHECKED_ROWS = 64
_E2M1_RMS = 2.93


def weights(problem: Matmul) -> Buffers:
    """Random weights whose product keeps the size of x (chains stay finite)."""
    p, dtype = problem, getattr(mx, problem.x_dtype)
    if p.mode == "none":
        return (mx.random.normal((p.N, p.K), dtype=dtype) * (p.K**-0.5),)
    words = _random_words((p.N, p.K * p.bits // 32))
    groups = (p.N, p.K // p.group_size)
    if p.mode == "affine":
        size = math.sqrt(12 / p.K) * 2.0**-p.bits
        scales = (size * (0.5 + mx.random.uniform(shape=groups))).astype(dtype)
        return words, scales, -(scales * (2 ** (p.bits - 1)))
    if p.mode == "nvfp4":
        return words, mx.full(groups, 3, mx.uint8)  # 3 / 512 as e4m3
    if p.mode == "mxfp8":
        words = words & 0xBFBFBFBF  # no NaN codes
    exponent = 127 - round(math.log2(_E2M1_RMS * math.sqrt(p.K)))
    return words, mx.full(groups, exponent, mx.uint8)


def _random_words(shape: tuple[int, int]) -> mx.array:
    # randint goes through float32, so 32 bits at once would leave the low ones 0.
    halves = mx.random.randint(0, 2**16, (2, *shape), dtype=mx.uint32)
    return halves[0] | (halves[1] << 16)


def ours(problem: Matmul) -> Op:
    """The kernel of this package as ``op(x, *weights)``, bound as in a layer.

    RuntimeError if the kernel was switched off in this process.
    """
    route = kernel_route(problem)
    if route.launch is None:
        raise RuntimeError(route.reason)
    return _bound(route)


def planned(problem: Matmul, chosen: Plan) -> Op:
    """The kernel that ``chosen`` names as ``op(x, *weights)``, bound as in a layer."""
    make = partial(prepare, problem, chosen)
    return _bound(Route(variant(problem, chosen), make))


def _bound(route: Route) -> Op:
    bound: dict[int, Bound] = {}

    def op(x: mx.array, *buffers: mx.array) -> mx.array:
        # A Bound holds its arrays, so their ids stay theirs.
        key = id(buffers[0])
        if key not in bound:
            bound[key] = Bound(route, list(buffers))
        return bound[key].call(x)

    return op


def stock(problem: Matmul) -> Op:
    """Stock MLX as ``op(x, *weights)``."""
    if problem.mode == "none":
        return lambda x, w: x @ w.T
    return partial(mx.quantized_matmul, transpose=True, **_format(problem))


def _format(p: Matmul) -> dict[str, Any]:
    return {"group_size": p.group_size, "bits": p.bits, "mode": p.mode}


def link(y: mx.array, problem: Matmul) -> mx.array:
    """The x of the next product in a chain, from y [M, N]: its first M * K values.

    A view where N >= K. Otherwise y is repeated, which costs one copy per launch on
    both sides.
    """
    if problem.N == problem.K:
        return y
    if problem.M == 1 and problem.N > problem.K:
        return y[:, : problem.K]
    need, flat = problem.M * problem.K, y.reshape(-1)
    if flat.size < need:
        flat = mx.concatenate([flat] * -(-need // flat.size))
    return flat[:need].reshape(problem.M, problem.K)


def error_of(op: Op, x: mx.array, buffers: Buffers, problem: Matmul) -> float:
    """Largest error of ``op`` over the largest right value, on the outer rows of W."""
    y = op(x, *buffers).astype(mx.float32)
    rows = min(CHECKED_ROWS, problem.N)
    worst, scale = 0.0, 0.0
    for part in (slice(0, rows), slice(problem.N - rows, problem.N)):
        w = _dequantized(tuple(b[part] for b in buffers), problem)
        # Not a matmul: on CUDA that may run in tf32.
        right = (x.astype(mx.float32)[:, None] * w[None]).sum(axis=-1)
        worst = max(worst, mx.abs(y[:, part] - right).max().item())
        scale = max(scale, mx.abs(right).max().item())
    return worst / scale if math.isfinite(worst) and scale else math.inf


def _dequantized(buffers: Buffers, p: Matmul) -> mx.array:
    if p.mode == "none":
        return buffers[0].astype(mx.float32)
    words, *side = buffers
    if p.mode == "affine":
        side = [each.astype(mx.float32) for each in side]
        return mx.dequantize(words, *side, **_format(p))
    return mx.dequantize(words, *side, **_format(p), dtype=mx.float32)
