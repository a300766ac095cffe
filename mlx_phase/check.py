"""Canary at patch time: a kernel serves only after it matched the oracle here.

Each planned kernel is compiled and *evaluated* on a small input that reaches its
tails; errors of a lazy graph surface at evaluation only. The oracle is numpy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx
import numpy as np

from .executor import ExecutorError
from .launch.decode import prepare
from .launch.matmul import device_chip, narrow_loads, prepare_shared
from .layers import forget_routes
from .ops import Problems, disable, prepare_again, variant
from .plan import Plan
from .plan_exact import CodesPlan, plan_launch
from .plan_qmm import TilePlan
from .problem import Matmul

# Times the largest magnitude of the right answer, beside 2 x the dense error.
FLOOR = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])
# No multiple of any step of the kernels (256 .. 1024 weights), so tails are reached.
K_CANARY = 1088
# Two of the widest tiles (4 rows x 8 simdgroups) and a tail.
N_CANARY = 67


@dataclass(frozen=True)
class Checked:
    """Result for one compiled kernel; `worst` is the error over what is allowed."""

    kernel: str
    problem: object
    ok: bool
    worst: float
    ms: float
    error: str | None = None


_RESULTS: dict[str, Checked] = {}


def forget() -> None:
    """Drop the results of this process; kernels are checked again."""
    _RESULTS.clear()


def results() -> list[Checked]:
    """What was checked in this process so far."""
    return list(_RESULTS.values())


def _codes(words: np.ndarray, bits: int) -> np.ndarray:
    # A packed row is one little-endian bit stream.
    stream = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    stream = stream.reshape(len(words), -1, bits).astype(np.uint32)
    return (stream << np.arange(bits, dtype=np.uint32)).sum(axis=-1, dtype=np.uint32)


def _e4m3(codes: np.ndarray) -> np.ndarray:
    exponent, mantissa = (codes >> 3 & 15).astype(np.int32), codes & 7
    low = np.ldexp(mantissa.astype(np.float32), -9)
    high = np.ldexp(1 + mantissa.astype(np.float32) / 8, exponent - 7)
    value = np.where(exponent == 0, low, high)
    return np.where(codes & 128, -value, value).astype(np.float32)


def rounded(a: np.ndarray, dtype: str) -> np.ndarray:
    """The float32 values that an array has in a dtype."""
    return np.array(mx.array(a).astype(getattr(mx, dtype)).astype(mx.float32))


def small(problems: Problems, chosen: Plan | None = None) -> Problems:
    """The same kernels at canary size: N and K small, tails reached; M of a tile."""
    group = max(problems[0].group_size, 1)
    k = K_CANARY if K_CANARY % group == 0 else K_CANARY + 64
    if isinstance(chosen, TilePlan):
        problems = tuple(replace(p, M=chosen.tile.BM + 5) for p in problems)
    n = N_CANARY
    if isinstance(chosen, CodesPlan):
        # Five steps, after those of an x that lies ready: it does so in turns then.
        n, k = n + chosen.rows, (5 * chosen.groups + max(chosen.ready, 0)) * group
    return tuple(replace(p, N=n + i, K=k) for i, p in enumerate(problems))


def canary(problem: Matmul, seed: int = 0) -> tuple[list[mx.array], np.ndarray]:
    """Small inputs of this problem: ([x, w, scales?, biases?], f32 weights [N, K])."""
    p, rng = problem, np.random.default_rng(seed)
    x = rng.normal(size=(p.M, p.K)).astype(np.float32)
    arrays = [mx.array(x).astype(getattr(mx, p.x_dtype))]
    if p.mode == "none":
        weight = rng.normal(size=(p.N, p.K)).astype(np.float32) / p.K**0.5
        weight = rounded(weight, p.x_dtype)
        return [*arrays, mx.array(weight).astype(arrays[0].dtype)], weight
    words = rng.integers(0, 2**32, (p.N, p.K * p.bits // 32), dtype=np.uint32)
    groups = (p.N, p.K // p.group_size)
    if p.mode == "mxfp8":
        words &= np.uint32(0xBFBFBFBF)  # without NaN codes
    codes = _codes(words, p.bits)
    arrays.append(mx.array(words))
    if p.mode == "affine":
        s, b = rng.normal(size=(2, *groups)).astype(np.float32)
        # Centred weights, as real ones are: bias near -scale x the middle code.
        s = rounded(s, p.x_dtype)
        b = rounded(b - s * 2 ** (p.bits - 1), p.x_dtype)
        arrays += [mx.array(a).astype(arrays[0].dtype) for a in (s, b)]
        value, offset = codes.astype(np.float32), np.repeat(b, p.group_size, axis=-1)
    else:
        top = (0x28, 0x48) if p.mode == "nvfp4" else (122, 132)
        raw = rng.integers(*top, groups, dtype=np.uint8)
        arrays.append(mx.array(raw))
        s = _e4m3(raw) if p.mode == "nvfp4" else np.ldexp(1.0, raw.astype(int) - 127)
        value, offset = _e4m3(codes) if p.bits == 8 else E2M1[codes], 0.0
    scale = np.repeat(s, p.group_size, axis=-1).astype(np.float32)
    return arrays, scale * value + offset


def compare(out: np.ndarray, x: np.ndarray, weight: np.ndarray, dtype: str) -> float:
    """Worst error over the allowed one; infinity where out is not finite.

    Allowed: 2 x the error of a dense product in `dtype`, plus the floor.
    """
    right = (x.astype(np.float64) @ weight.T.astype(np.float64)).astype(np.float32)
    dense = rounded(x @ rounded(weight, dtype).T, dtype)
    allowed = 2 * np.abs(dense - right).max() + FLOOR[dtype] * np.abs(right).max()
    if out.shape != right.shape or not np.isfinite(out).all():
        return float("inf")
    return float(np.abs(out - right).max() / allowed)


def _run(problems: Problems, chosen: Plan) -> float:
    """Evaluate the kernel on a canary of each problem; worst error over allowed.

    An x that starts between two vectors must give the same bits. Where it does not,
    vector loads are off for the process.
    """
    inputs, weights = zip(*(canary(p, i) for i, p in enumerate(problems)), strict=True)
    x = inputs[0][0]
    arrays = [a for member in inputs for a in member[1:]]
    outs = evaluate(problems, chosen, x, arrays)
    moved = mx.concatenate([mx.zeros((1,), x.dtype), x.flatten()])
    mx.eval(moved)
    moved = moved[1:].reshape(x.shape)
    if not _same(evaluate(problems, chosen, moved, arrays), outs):
        narrow_loads(True)
        prepare_again()
        # Traced calls hold the old launch.
        forget_routes()
        outs = evaluate(problems, chosen, x, arrays)
        if not _same(evaluate(problems, chosen, moved, arrays), outs):
            return float("inf")
    dtype, x = problems[0].x_dtype, np.array(x.astype(mx.float32))
    return max(compare(o, x, w, dtype) for o, w in zip(outs, weights, strict=True))


def _same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.array_equal(p, q, equal_nan=True) for p, q in zip(a, b, strict=True))


def evaluate(
    problems: Problems, chosen: Plan, x: mx.array, arrays: list[mx.array]
) -> list[np.ndarray]:
    """Run one launch for x [M, K] and its matrices; float32 [M, N] for each."""
    if len(problems) == 1:
        ys = [prepare(problems[0], chosen)(x, *arrays)]
    else:
        ys = prepare_shared(problems, chosen)(x, *arrays)
    return [np.array(y.astype(mx.float32)) for y in ys]


def check(*problems: Matmul, chosen: Plan | None = None) -> Checked:
    """Compile and evaluate the kernel planned for a problem, once per process.

    Several problems: the kernel that computes them in one launch. The tile is the
    real problem's, N and K are small. A kernel that fails to compile, to run or to
    match is switched off for the process (`ops.disable`).
    """
    problem = problems[0]
    chosen = chosen or plan_launch(problems, device_chip())
    run = partial(_run, small(problems, chosen), chosen)
    return judged(variant(problem, chosen), problem, run)


def judged(name: str, problem: object, run: Callable[[], float]) -> Checked:
    """The result for kernel ``name``, from ``run`` if it is the first time.

    ``run`` gives the worst error over the allowed one. A kernel that fails is switched
    off for the process.
    """
    if name in _RESULTS:
        return _RESULTS[name]
    start, worst, error = time.perf_counter(), float("inf"), None
    try:
        worst = run()
        if worst > 1:
            error = f"wrong result: {worst:.3g} times the allowed error"
    except (ExecutorError, RuntimeError, ValueError) as e:
        # MLX reports compile and launch errors of a kernel as these two.
        error = f"{type(e).__name__}: {e}"
    ms = 1e3 * (time.perf_counter() - start)
    result = Checked(name, problem, error is None, worst, ms, error)
    _RESULTS[name] = result
    if error is not None:
        disable(name, error)
    return result


def check_all(problems: Iterable[Matmul]) -> list[Checked]:
    """Check every distinct kernel that these problems are planned for."""
    return list({(r := check(p)).kernel: r for p in problems}.values())


def probe(problems: Problems, chosen: Plan, name: str) -> str | None:
    """The error of a kernel, or None if it may serve (hook of `ops.set_probe`)."""
    return check(*problems, chosen=chosen).error
