"""The fused launches of a decoder block on this device: compiled, right, rows exact."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from itertools import product

import mlx.core as mx
import numpy as np

from .check import FLOOR, canary, rounded
from .doctor_kernels import Examined
from .executor import ExecutorError
from .launch.fused import (
    ACTIVATIONS,
    Rotary,
    planned,
    prepare_add,
    prepare_add_norm,
    prepare_glu,
    prepare_qk_norm,
    prepare_qkv,
)
from .plan import Plan
from .plan_exact import CodesPlan
from .problem import AFFINE_BITS, DTYPE_BYTES, Matmul

KERNELS = ("qmv_add", "qmv_glu", "qmv_qkv", "qmv_qkv_bias", "qk_norm", "add_norm")
K, HEAD, EPS = 320, 64, 1e-5
# A block's matrices where matrix units take large ones at every M, and a K of more
# groups than lie ready at once.
LARGE, K_CODES = 4096, 2304
# Rows of q, k and v; the activations' tolerance is that of one product.
SIZES = (2 * HEAD, HEAD, HEAD)


@dataclass(frozen=True)
class FusedRow:
    """A launch with ``M`` rows of x; ``choice``: activation or traditional pairs."""

    kernel: str
    M: int
    dtype: str
    bits: int
    choice: str | bool


def rows(quick: bool) -> list[FusedRow]:
    """All dtypes, bits and choices; ``quick``: each kernel once."""
    one = (False,)
    choices = {"qmv_add": one, "add_norm": one, "qmv_glu": tuple(ACTIVATIONS)}
    both = (False, True)
    if quick:
        turns = zip(
            (1, 4, 8, 16, 2, 3), [*DTYPE_BYTES, *DTYPE_BYTES], KERNELS, strict=True
        )
        return [FusedRow(k, m, d, 4, choices.get(k, both)[-1]) for m, d, k in turns]
    return [
        FusedRow(k, 4, dtype, bits, choice)
        for k, dtype in product(KERNELS, DTYPE_BYTES)
        for choice in choices.get(k, both)
        for bits in (AFFINE_BITS if k.startswith("qmv") else (4,))
    ]


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def _activate(g: np.ndarray, name: str) -> np.ndarray:
    if name == "gelu":
        return 0.5 * g * (1 + np.vectorize(math.erf)(g / math.sqrt(2)))
    z = g if name == "silu" else 1.5957691216057308 * (g + 0.044715 * g**3)
    return g / (1 + np.exp(np.minimum(-z, 700)))  # float64 ends at 709


def _large_plan(row: FusedRow, M: int) -> Plan | None:
    """The plan of a model's launch if matrix units compute it, which small matrices
    would not reach."""
    name = row.kernel.removesuffix("_bias")
    if not name.startswith("qmv") or row.bits not in (4, 8):
        return None
    one = Matmul(M, LARGE, LARGE, row.dtype, row.bits, 64)
    members = (one,) * {"qmv_add": 1, "qmv_glu": 2, "qmv_qkv": 3}[name]
    rotary = Rotary(HEAD, HEAD, bool(row.choice)) if name == "qmv_qkv" else None
    p = planned(name, members, None if name == "qmv_add" else EPS, rotary)
    return p if isinstance(p, CodesPlan) else None


class _Case:
    """Inputs of a row's launch, its function, and what it gives in float64."""

    def __init__(self, row: FusedRow):
        self.row, self.dtype = row, getattr(mx, row.dtype)
        self.K = K_CODES if _large_plan(row, 1) else K
        rng = np.random.default_rng(row.M)
        self.weights, self.right = [], []
        for i, n in enumerate(SIZES):
            problem = Matmul(row.M, n, self.K, row.dtype, row.bits, 64)
            arrays, weight = canary(problem, i)
            self.x = arrays[0][None]
            self.weights.append(arrays[1:])
            self.right.append(weight.astype(np.float64))
        self.wide = np.array(self.x[0].astype(mx.float32)).astype(np.float64)
        self.norm, wide_norm = self._vector(rng, self.K)
        self.normed = _norm(self.wide, wide_norm)
        self.biases = [self._vector(rng, n) for n in SIZES]
        self.angle = np.arange(row.M)[:, None] / 1.5 ** np.arange(HEAD // 2)

    def _vector(self, rng, n: int) -> tuple[mx.array, np.ndarray]:
        values = rounded(rng.uniform(0.5, 1.5, n).astype(np.float32), self.row.dtype)
        return mx.array(values).astype(self.dtype), values.astype(np.float64)

    def launch(self, at: slice) -> list[mx.array]:
        """The kernel's outputs for rows ``at`` of x, [rows, N] or [heads, rows, D]."""
        row, x = self.row, self.x[:, at]
        problem = Matmul(x.shape[1], SIZES[0], self.K, row.dtype, row.bits, 64)
        p = _large_plan(row, x.shape[1])
        if row.kernel == "qmv_add":
            res = mx.zeros((1, x.shape[1], SIZES[0]), self.dtype) + 1
            return [prepare_add(problem, p)(x, *self.weights[0], res)[0]]
        if row.kernel == "add_norm":
            return [prepare_add_norm(row.dtype, self.K, EPS)(x, self.norm, x)[0]]
        if row.kernel == "qmv_glu":
            w0, s0, b0 = self.weights[0]
            up = (w0[::-1] + 0, s0[::-1] + 0, b0[::-1] + 0)
            run = prepare_glu(problem, row.choice, EPS, p)
            return [run(x, self.norm, w0, s0, b0, *up)[0]]
        rotary, angles = Rotary(HEAD, HEAD, bool(row.choice)), self._angles(at)
        if row.kernel == "qk_norm":
            heads = x[..., : 4 * HEAD].reshape(1, -1, 4, HEAD).transpose(0, 2, 1, 3)
            q, kv = mx.contiguous(heads[:, :3]), mx.repeat(heads[:, 3:], 2, axis=0)
            norms = [self.norm[:HEAD], self.norm[HEAD : 2 * HEAD]]
            if behind := x.shape[1] == 1:
                q, kv = mx.concatenate([q, kv[:1], kv[1:]], axis=1), 1
            run = prepare_qk_norm(row.dtype, rotary, EPS)
            return _apart(run(q, kv, *norms, angles), 1, behind)
        bias = row.kernel == "qmv_qkv_bias"
        members = tuple(replace(problem, N=n) for n in SIZES)
        extra = [b for b, _ in self.biases] if bias else []
        arrays = [a for w in self.weights for a in w]
        # One row has keys and values behind q: other texts, with the same bits.
        behind = x.shape[1] == 1
        run = prepare_qkv(members, rotary, EPS, bias, p)
        out = run(x, self.norm, *arrays, *extra, angles, packed=behind)
        return _apart(out, SIZES[1] // HEAD, behind)

    def _angles(self, at: slice) -> mx.array:
        first, second = self._pairs()
        out = np.zeros((len(self.angle), HEAD), np.float32)
        out[:, first], out[:, second] = np.cos(self.angle), np.sin(self.angle)
        return mx.array(out[at])

    def _pairs(self) -> tuple[slice, slice]:
        if self.row.choice:
            return slice(0, None, 2), slice(1, None, 2)
        return slice(HEAD // 2), slice(HEAD // 2, None)

    def _turn(self, y: np.ndarray) -> np.ndarray:
        first, second = self._pairs()
        c, s, out = np.cos(self.angle), np.sin(self.angle), y.copy()
        out[..., first] = y[..., first] * c - y[..., second] * s
        out[..., second] = y[..., second] * c + y[..., first] * s
        return out

    def expected(self) -> list[np.ndarray]:
        """What `launch` gives for all rows, float64."""
        kernel, first = self.row.kernel, self.right[0]
        if kernel == "qmv_add":
            return [1 + self.wide @ first.T]
        if kernel == "add_norm":
            return [self.wide + self.normed]
        if kernel == "qmv_glu":
            gate, up = self.normed @ first.T, self.normed @ first[::-1].T
            return [_activate(gate, self.row.choice) * up]
        if kernel == "qk_norm":
            y = self.wide[:, : 4 * HEAD].reshape(-1, 4, HEAD).transpose(1, 0, 2)
            weight = np.array(self.norm.astype(mx.float32)).astype(np.float64)
            q = _norm(y[:3], weight[:HEAD])
            k = _norm(y[3:], weight[HEAD : 2 * HEAD])
            return [self._turn(q), self._turn(k), y[3:]]
        ys = [self.normed @ w.T for w in self.right]
        if kernel == "qmv_qkv_bias":
            ys = [y + b for y, (_, b) in zip(ys, self.biases, strict=True)]
        ys = [y.reshape(len(y), -1, HEAD).transpose(1, 0, 2) for y in ys]
        return [self._turn(ys[0]), self._turn(ys[1]), ys[2]]


def _apart(out, heads: int, behind: bool) -> list[mx.array]:
    """q, k and v of a launch, [heads, rows, D]; heads: of k."""
    if behind:
        first = out.shape[1] - 2 * heads
        return mx.split(out[0], [first, first + heads])
    q, kv = out
    return [q[0], kv[0], kv[1]]


def _words(row: FusedRow) -> str:
    if isinstance(row.choice, str):
        return f" {row.choice}"
    if row.kernel in ("qmv_add", "add_norm"):
        return ""
    return " rotates neighbours" if row.choice else " rotates halves"


def examine(row: FusedRow, clock=time.perf_counter) -> Examined:
    """Run a row's kernel, compare it with float64, and its last row with it alone."""
    p = _large_plan(row, row.M)
    kernel = row.kernel if p is None else row.kernel.replace("qmv", "qmm_codes")
    name = f"{kernel} affine {row.bits}-bit g64 {row.dtype}{_words(row)}"
    worst, exact, error, run_ms, start = float("inf"), None, None, None, clock()
    try:
        case = _Case(row)
        outs = case.launch(slice(None))
        mx.eval(outs)
        first_ms = 1e3 * (clock() - start)
        worst = max(map(_worst, outs, case.expected(), [row.dtype] * len(outs)))
        start = clock()
        mx.eval(case.launch(slice(None)))
        run_ms = 1e3 * (clock() - start)
        alone = case.launch(slice(row.M - 1, row.M))
        exact = all(
            mx.array_equal(a[..., -1:, :], b).item()
            for a, b in zip(outs, alone, strict=True)
        )
    except (ExecutorError, RuntimeError) as e:
        # MLX reports compile and launch errors of a kernel as these two.
        error, first_ms = str(e), 1e3 * (clock() - start)
    if error is None and not worst <= 1:
        error = f"off by {worst:.2f} of what is allowed"
    if error is None and not exact:
        error = f"rows of M = {row.M} have other bits than alone"
    return Examined(name, row.M, error is None, exact, worst, first_ms, run_ms, error)


def _worst(out: mx.array, right: np.ndarray, dtype: str) -> float:
    have = np.array(out.astype(mx.float32)).astype(np.float64)
    if have.shape != right.shape or not np.isfinite(have).all():
        return float("inf")
    once = rounded(right.astype(np.float32), dtype)
    allowed = 2 * np.abs(once - right).max() + FLOOR[dtype] * np.abs(right).max()
    return float(np.abs(have - right).max() / allowed)
