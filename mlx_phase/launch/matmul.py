"""Launchers of the decode matmul family. They run a kernel or raise, never stock."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache

import mlx.core as mx

from ..chip import Chip, detect
from ..executor import executor_name, metal_kernel
from ..plan import Plan, plan, plan_shared
from ..problem import Matmul
from ..source import load

Launch = Callable[..., mx.array]


@lru_cache(maxsize=1)
def device_chip() -> Chip:
    """The chip that kernels of this process run on."""
    return detect(None if executor_name() == "cpu" else mx.device_info(mx.gpu))


@cache
def kernel(
    name: str,
    ensure_row_contiguous: bool = True,
    lean: bool = False,
    without: tuple[str, ...] = (),
):
    """The callable of ``metal_kernel`` for one entry of ``source.KERNELS``."""
    text = load(name, _narrow, lean, without)
    return metal_kernel(
        name=text.name,
        input_names=list(text.input_names),
        output_names=list(text.output_names),
        header=text.header,
        source=text.body,
        ensure_row_contiguous=ensure_row_contiguous,
    )


_narrow = False


def narrow_loads(on: bool) -> bool:
    """Have kernels prepared from now on avoid vector loads; returns the old setting."""
    global _narrow
    before, _narrow = _narrow, on
    kernel.cache_clear()
    prepare_cached.cache_clear()
    return before


def template(problem: Matmul, p: Plan) -> list[tuple[str, object]]:
    """Template arguments of the kernel that ``p`` names, in the order of its text."""
    args = [("T", getattr(mx, problem.x_dtype))]
    if problem.mode != "none":
        args += [("bits", problem.bits), ("group", problem.group_size)]
    args += [("M", problem.M), ("R", p.rows), ("SG", p.simdgroups)]
    return args + [("KS", p.k_simdgroups), ("SPLITS", p.splits)]


def _pad_rows(a: mx.array, rows: int) -> mx.array:
    return mx.pad(a, [(0, rows - a.shape[0]), (0, 0)])


def tiles(p: Plan, N: int) -> int:
    """Threadgroups that compute N rows of a matrix."""
    return -(-N // (p.rows * p.simdgroups // p.k_simdgroups))


def _launch(problem: Matmul, p: Plan, tiles: int) -> dict[str, object]:
    return {
        "template": template(problem, p),
        "grid": (tiles * 32 * p.simdgroups, p.splits, 1),
        "threadgroup": (32 * p.simdgroups, 1, 1),
    }


def prepare(problem: Matmul, p: Plan | None = None) -> Launch:
    """A function ``(x, w, scales, biases) -> y`` for every x of this problem's M.

    x: [..., K] with M rows in all; w: packed uint32 [N, K * bits / 32] (or [N, K] of
    x's dtype for mode ``none``, then without scales); y: [..., N] of x's dtype.
    ValueError if no kernel supports the problem.
    """
    p = p or plan(problem, device_chip())
    M, N = problem.M, problem.N
    # Inputs under 8 elements are `constant` in MSL, so tiny matrices get rows of zeros.
    width = problem.K // (1 if problem.mode == "none" else problem.group_size)
    # A tile needs as many rows as it owns.
    rows = max(N, -(-8 // width), p.rows)
    run, dtype = kernel(p.kernel, lean=p.lean), getattr(mx, problem.x_dtype)
    launch = _launch(problem, p, tiles(p, rows))
    launch["output_dtypes"] = [dtype if p.splits == 1 else mx.float32]
    partial = [(p.splits, M * rows)]
    reduce = {
        "template": [("T", dtype), ("SPLITS", p.splits)],
        "grid": (-(-M * rows // 256) * 256, 1, 1),
        "threadgroup": (256, 1, 1),
        "output_dtypes": [dtype],
    }

    def call(x: mx.array, *weights: mx.array) -> mx.array:
        shape = [(*x.shape[:-1], rows)]
        if rows != N:
            weights = tuple(_pad_rows(a, rows) for a in weights)
        if p.splits == 1:
            y = run(inputs=[x, *weights], output_shapes=shape, **launch)[0]
        else:
            y = run(inputs=[x, *weights], output_shapes=partial, **launch)[0]
            y = kernel("qmv_reduce")(inputs=[y], output_shapes=shape, **reduce)[0]
        return y if rows == N else y[..., :N]

    return call


def prepare_shared(members: tuple[Matmul, ...], p: Plan | None = None) -> Launch:
    """A function ``(x, w0, scales0, biases0, w1, ...) -> [y0, y1, ...]``: one launch.

    The members differ in N only. ValueError if no kernel takes them together.
    """
    p = p or plan_shared(members, device_chip())
    first = members[0]
    run = kernel(p.kernel, lean=p.lean)
    launch = _launch(first, p, sum(tiles(p, m.N) for m in members))
    launch["output_dtypes"] = [getattr(mx, first.x_dtype)] * len(members)

    def call(x: mx.array, *weights: mx.array) -> list[mx.array]:
        shapes = [(*x.shape[:-1], m.N) for m in members]
        return run(inputs=[x, *weights], output_shapes=shapes, **launch)

    return call


def quantized_matvec(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    *,
    group_size: int = 64,
    bits: int = 4,
    mode: str = "affine",
) -> mx.array:
    """``x @ dequantize(w).T`` by the decode kernel; x [..., K], 1..16 rows, w [N, ...].

    y[..., N] has x's dtype. ValueError if :func:`plan.supports` says no.
    """
    K = x.shape[-1]
    problem = Matmul(
        x.size // K, w.shape[0], K, str(x.dtype).split(".")[-1], bits, group_size, mode
    )
    return prepare_cached(problem)(x, w, scales, *(() if biases is None else (biases,)))


def matvec(x: mx.array, w: mx.array) -> mx.array:
    """``x @ w.T`` for plain weights by the decode kernel; x [..., K], w [N, K]."""
    K = x.shape[-1]
    problem = Matmul(
        x.size // K, w.shape[0], K, str(x.dtype).split(".")[-1], mode="none"
    )
    return prepare_cached(problem)(x, w)


prepare_cached = lru_cache(maxsize=4096)(prepare)
