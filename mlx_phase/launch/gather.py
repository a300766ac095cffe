"""Launchers of MoE experts. They run a kernel or raise, never stock."""

from __future__ import annotations

import struct

import mlx.core as mx

from ..plan_gather import ACTIVATIONS, GatherPlan, plan_gather
from ..problem import Gather
from .matmul import Launch, device_chip, kernel

# Threads of the one threadgroup that makes the list of tiles.
LIST_THREADS = 256


def _bits(value: float) -> int:
    # Template arguments are whole numbers: the kernel gets the bits.
    return struct.unpack("<i", struct.pack("<f", value))[0]


def template(problem: Gather, p: GatherPlan) -> list[tuple[str, object]]:
    """Template arguments of the kernel that ``p`` names, in the order of its text."""
    g, m = problem, problem.matmul
    args = [("T", getattr(mx, m.x_dtype)), ("bits", m.bits), ("group", m.group_size)]
    if p.tile:
        args += [*p.tile._asdict().items(), ("BIAS", g.bias)]
        args += [("ROWS", g.each == 0), ("TO", g.scattered)]
    else:
        args += [("R", p.rows), ("SG", p.simdgroups), ("KS", p.k_simdgroups)]
        args += [("BIAS", g.bias)]
        if not g.activation:
            args += [("LHS", g.each == 0), ("SHARE", p.share)]
    if g.activation:
        args += [("ACT", ACTIVATIONS[g.activation])]
        args += [("ALPHA", _bits(g.alpha)), ("LIMIT", _bits(g.limit))]
    return args


def list_template(problem: Gather, p: GatherPlan) -> list[tuple[str, object]]:
    """Template arguments of ``gather_tiles`` before a kernel that ``p`` names."""
    return [("E", problem.experts), ("BM", p.tile.BM), ("TH", LIST_THREADS)]


def prepare_list(problem: Gather, p: GatherPlan) -> Launch:
    """A function ``rhs -> tiles`` for sorted rhs: see gather_tiles.metal."""
    values, E = list_template(problem, p), problem.experts

    def call(rhs: mx.array) -> mx.array:
        return kernel("gather_tiles")(
            inputs=[rhs.flatten()],
            template=values,
            grid=(LIST_THREADS, 1, 1),
            threadgroup=(LIST_THREADS, 1, 1),
            output_shapes=[(rhs.size // p.tile.BM + min(E, rhs.size), 4)],
            output_dtypes=[mx.int32],
        )[0]

    return call


def prepare(problem: Gather, p: GatherPlan | None = None) -> Launch:
    """A function ``(x, rhs, *weights, lhs=None, to=None, tiles=None) -> y``.

    x [..., K] and y [*rhs.shape, 1, N] of one dtype; rhs: the expert of each pair, any
    integers, of any number that the plan's kernel takes; lhs: the row of x of each
    pair, where ``each`` is 0; to: the row of y, where ``scattered``; tiles: a list that
    `prepare_list` made, if several launches share it. weights: words, scales, biases
    (affine) and bias (where the problem has one), then the same of up if there is an
    activation. ValueError if no kernel takes the problem.
    """
    p = p or plan_gather(problem, device_chip())
    return (_tiled if p.tile else _vectors)(problem, p)


def _arrays(g: Gather, weights: tuple[mx.array, ...]) -> list[mx.array]:
    if g.bias:
        return list(weights)
    # Without a bias, another array stands for it and is not read.
    count = 3 if g.matmul.mode == "affine" else 2
    sides = (weights[i : i + count] for i in range(0, len(weights), count))
    return [a for side in sides for a in (*side, side[1])]


def _vectors(g: Gather, p: GatherPlan) -> Launch:
    owned = p.rows // 2 if g.activation else p.rows
    tiles = -(-g.matmul.N // (owned * (p.simdgroups // p.k_simdgroups)))
    threads = 32 * p.simdgroups
    run, N = kernel(p.kernel), g.matmul.N
    launch = {
        "template": template(g, p),
        "threadgroup": (threads, 1, 1),
        "output_dtypes": [getattr(mx, g.matmul.x_dtype)],
    }

    def call(x, rhs, *weights, lhs=None) -> mx.array:
        each = g.each or rhs.size
        rows = [] if g.activation else [rhs if lhs is None else lhs]
        return run(
            inputs=[x, *_arrays(g, weights), *rows, rhs],
            output_shapes=[(*rhs.shape, 1, N)],
            grid=(each * threads, rhs.size // each, tiles),
            **launch,
        )[0]

    return call


def _tiled(g: Gather, p: GatherPlan) -> Launch:
    threads = 32 * p.simdgroups
    columns = p.tile.BN // 2 if g.activation else p.tile.BN
    run, make, N = kernel(p.kernel), prepare_list(g, p), g.matmul.N
    launch = {
        "template": template(g, p),
        "threadgroup": (threads, 1, 1),
        "output_dtypes": [getattr(mx, g.matmul.x_dtype)],
    }

    def call(x, rhs, *weights, lhs=None, to=None, tiles=None) -> mx.array:
        tiles = make(rhs) if tiles is None else tiles
        maps = [tiles if a is None else a for a in (lhs, to)]
        return run(
            inputs=[x, *_arrays(g, weights), tiles, *maps],
            output_shapes=[(*rhs.shape, 1, N)],
            grid=(tiles.shape[0] * threads, -(-N // columns), 1),
            **launch,
        )[0]

    return call
