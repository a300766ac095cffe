"""Launchers of the fused decode block: qmv with what stands before and after it.

They run a kernel or raise, never stock. Weights are affine, read in place.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import mlx.core as mx

from ..plan import Plan
from ..plan_exact import CodesPlan, plan_block
from ..problem import Matmul
from . import matrix
from .matmul import Launch, device_chip, kernel, template, tiles

# 2 is taken by an activation of experts.
ACTIVATIONS = {"silu": 0, "gelu_approx": 1, "gelu": 3}


@dataclass(frozen=True)
class Rotary:
    """head_dim, how many of its first dims rotate, and in which pairs: neighbours
    (traditional) or halves."""

    head_dim: int
    dims: int
    traditional: bool


def planned(
    name: str,
    members: tuple[Matmul, ...],
    eps: float | None = None,
    rotary: Rotary | None = None,
) -> Plan:
    """The plan of launch ``name`` (``qmv_add``, ``qmv_glu``, ``qmv_qkv``) on this
    device; ValueError if no kernel takes its matrices."""
    dims = () if rotary is None else (rotary.head_dim, rotary.dims)
    return plan_block(name, members, device_chip(), eps is not None, dims)


def _tiled(problem: Matmul, p: Plan) -> list[tuple[str, object]]:
    if isinstance(p, CodesPlan):
        return matrix.template(problem, p)
    return template(problem, p)[:-1]


def _norm(eps: float | None) -> list[tuple[str, object]]:
    # Template arguments are whole numbers: the kernel gets the bits of eps.
    (bits,) = struct.unpack("<i", struct.pack("<f", eps or 0.0))
    return [("NORM", eps is not None), ("EPS", bits)]


def _no_norm(eps: float | None) -> tuple[str, ...]:
    return ("nw",) if eps is None else ()


def _rotary(r: Rotary) -> list[tuple[str, object]]:
    return [("D", r.head_dim), ("ROT", r.dims), ("TRAD", r.traditional)]


def glu_template(p: Plan, problem: Matmul, activation: str, eps: float | None) -> list:
    """Template arguments of ``qmv_glu``."""
    act = ("ACT", ACTIVATIONS[activation])
    return [*_tiled(problem, p), *_norm(eps), act]


def qkv_template(
    p: Plan, members: tuple[Matmul, ...], rotary: Rotary, eps: float | None
) -> list:
    """Template arguments of ``qmv_qkv`` and ``qmv_qkv_bias``."""
    bits = [("B1", members[1].bits), ("B2", members[2].bits)]
    return [*_tiled(members[0], p), *_norm(eps), *_rotary(rotary), *bits]


def qk_norm_template(
    dtype: str, rotary: Rotary, eps: float, heads: int = 1, packed: bool = False
) -> list:
    """Template arguments of ``qk_norm``; heads: of k."""
    args = [("T", getattr(mx, dtype)), *_norm(eps)[1:], *_rotary(rotary)]
    return [*args, ("KV", heads), ("PACKED", packed)]


def add_norm_template(dtype: str, K: int, eps: float) -> list:
    """Template arguments of ``add_norm``."""
    # Threads of a row hold 16 elements each, at most, or it takes all there may be.
    threads = next((t for t in (128, 256, 512) if K <= 16 * t), 1024)
    sizes = [("K", K), ("TG", threads), ("CLIP", dtype == "float16")]
    return [("T", getattr(mx, dtype)), *_norm(eps)[1:], *sizes]


def _tile(p: Plan, count: int, args: list[tuple[str, object]]) -> dict[str, object]:
    return {
        "template": args,
        "grid": (count * 32 * p.simdgroups, 1, 1),
        "threadgroup": (32 * p.simdgroups, 1, 1),
    }


def prepare_add(problem: Matmul, p: Plan | None = None) -> Launch:
    """A function ``(x, w, scales, biases, res) -> res + x @ W.T``, in one launch.

    x [..., K] with M rows, w [N, K * bits / 32], res and the result [..., N].
    """
    p = p or planned("qmv_add", (problem,))
    run, dtype = kernel(p.kernel, lean=p.lean), getattr(mx, problem.x_dtype)
    launch = _tile(p, tiles(p, problem.N), _tiled(problem, p))

    def call(x, w, scales, biases, res) -> mx.array:
        return run(
            inputs=[x, w, scales, biases, res],
            output_shapes=[res.shape],
            output_dtypes=[dtype],
            **launch,
        )[0]

    return call


def prepare_glu(
    problem: Matmul, activation: str, eps: float | None, p: Plan | None = None
) -> Launch:
    """A function ``(x, norm, *gate, *up) -> act(n(x) @ Wg.T) * (n(x) @ Wu.T)``.

    n is the RMS norm with weight ``norm`` [K] and ``eps``; eps None: x as it is, and
    norm is left out. gate and up are (w, scales, biases) of one shape.
    """
    p = p or planned("qmv_glu", (problem, problem), eps)
    run = kernel(p.kernel, lean=p.lean, without=_no_norm(eps))
    dtype = getattr(mx, problem.x_dtype)
    # A simdgroup's rows are half gate, half up.
    count = tiles(replace(p, rows=p.rows // 2), problem.N)
    launch = _tile(p, count, glu_template(p, problem, activation, eps))

    def call(*inputs) -> mx.array:
        return run(
            inputs=list(inputs),
            output_shapes=[(*inputs[0].shape[:-1], problem.N)],
            output_dtypes=[dtype],
            **launch,
        )[0]

    return call


def prepare_qkv(
    members: tuple[Matmul, Matmul, Matmul],
    rotary: Rotary,
    eps: float | None,
    bias: bool = False,
    p: Plan | None = None,
) -> Launch:
    """A function ``(x, norm, *q, *k, *v[, bq, bk, bv], angles) -> [q, kv]``.

    x [B, L, K] -> q [B, Hq, L, head_dim] and kv [2 B, Hkv, L, head_dim], k and then v;
    q and k rotated. ``norm`` and ``eps`` as in `prepare_glu`; members may differ in
    bits. With ``packed=True`` the function gives one array instead, as large as
    [B, Hq + 2 Hkv, L, head_dim], with all of kv behind all of q.
    angles fp32 [L, head_dim]: cos in the place of a pair's first dim, sin in that of
    its second.
    """
    if members[1].N != members[2].N:
        raise ValueError(f"k has {members[1].N} rows, v {members[2].N}: want as many")
    p = p or planned("qmv_qkv", members, eps, rotary)
    name = p.kernel + "_bias" * bias
    run, run_packed = (
        kernel(name, lean=p.lean, without=(*_no_norm(eps), *less))
        for less in ((), ("kv",))
    )
    dtype = getattr(mx, members[0].x_dtype)
    heads = [m.N // rotary.head_dim for m in members[:2]]
    count = sum(tiles(p, m.N) for m in members)
    launch = _tile(p, count, qkv_template(p, members, rotary, eps))

    def call(*inputs, packed: bool = False) -> list[mx.array] | mx.array:
        B, L, _ = inputs[0].shape
        D, (Hq, Hkv) = rotary.head_dim, heads
        shapes = [(B, Hq, L, D), (2 * B, Hkv, L, D)]
        if packed:
            shapes = [(B, Hq + 2 * Hkv, L, D)]
        outs = (run_packed if packed else run)(
            inputs=list(inputs),
            output_shapes=shapes,
            output_dtypes=[dtype] * len(shapes),
            **launch,
        )
        return outs[0] if packed else outs

    return call


def prepare_qk_norm(dtype: str, rotary: Rotary, eps: float) -> Launch:
    """A function ``(q, kv, q_norm, k_norm, angles) -> [q, kv]``: RMS norm of each head
    of q and k, then the rotation; v as it is.

    q [B, Hq, L, head_dim] and kv [2 B, Hkv, L, head_dim] as from `prepare_qkv`; norms
    [head_dim] and angles as there. kv may be a number: so many heads of k, and of v,
    lie behind q in one array, and one array is what the function gives.
    """
    run, run_packed = (kernel("qk_norm", without=less) for less in ((), ("kv", "kvo")))
    args = lru_cache(partial(qk_norm_template, dtype, rotary, eps))

    def call(q, kv, q_norm, k_norm, angles) -> list[mx.array] | mx.array:
        packed = isinstance(kv, int)
        given = [q] if packed else [q, kv]
        heads = kv if packed else kv.shape[1]
        rows = sum(a.size for a in given) // rotary.head_dim
        outs = (run_packed if packed else run)(
            inputs=[*given, q_norm, k_norm, angles],
            output_shapes=[a.shape for a in given],
            output_dtypes=[q.dtype] * len(given),
            template=args(heads, packed),
            grid=(32 * rows, 1, 1),
            threadgroup=(32, 1, 1),
        )
        return outs[0] if packed else outs

    return call


def prepare_add_norm(dtype: str, K: int, eps: float) -> Launch:
    """A function ``(x, norm, res) -> res + n(x)`` of rows of K, n the RMS norm.

    x and res [..., K] of ``dtype``, norm [K]. float16 is clipped to what it can hold.
    """
    run, args = kernel("add_norm"), add_norm_template(dtype, K, eps)
    threads = dict(args)["TG"]

    def call(x, norm, res) -> mx.array:
        return run(
            inputs=[x, norm, res],
            output_shapes=[x.shape],
            output_dtypes=[x.dtype],
            template=args,
            grid=(threads * (x.size // K), 1, 1),
            threadgroup=(threads, 1, 1),
        )[0]

    return call
