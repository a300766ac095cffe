"""Launchers of prefill products. They run a kernel or raise, never stock."""

from __future__ import annotations

import mlx.core as mx

from ..plan_qmm import TilePlan, plan_qmm
from ..problem import Matmul
from .matmul import Launch, device_chip, kernel

ACTIVATIONS = {"silu": 0, "gelu_approx": 1}


def template(problem: Matmul, p: TilePlan) -> list[tuple[str, object]]:
    """Template arguments of the kernel that ``p`` names, in the order of its text."""
    return [*_tile(problem, p), ("SPLITS", p.splits)]


def _tile(problem: Matmul, p: TilePlan) -> list[tuple[str, object]]:
    plain = problem.mode == "none"
    args = [("T", getattr(mx, problem.x_dtype))]
    args += [("bits", 0 if plain else problem.bits)]
    args += [("group", 0 if plain else problem.group_size)]
    return args + list(p.tile._asdict().items())


def _launch(M: int, N: int, p: TilePlan, BN: int, splits: int = 1) -> dict:
    threads = 32 * p.simdgroups
    return {
        "grid": (-(-M // p.tile.BM) * threads, -(-N // BN), splits),
        "threadgroup": (threads, 1, 1),
    }


def prepare(problem: Matmul, p: TilePlan | None = None) -> Launch:
    """A function ``(x, w, scales, biases) -> y``; rows of y are not exact.

    x: [..., K] with any number of rows, whatever ``problem.M`` says; w: packed uint32
    [N, K * bits / 32] (or [N, K] of x's dtype for mode ``none``, then without scales);
    y: [..., N] of x's dtype. ValueError if no kernel supports the problem.
    """
    p = p or plan_qmm(problem, device_chip())
    run, dtype = kernel(p.kernel), getattr(mx, problem.x_dtype)
    N, K, splits = problem.N, problem.K, p.splits
    values = template(problem, p)
    reduce = {"template": [("T", dtype), ("SPLITS", splits)]}

    def call(x: mx.array, *weights: mx.array) -> mx.array:
        M = x.size // K
        y = run(
            inputs=[x.reshape(M, K), *weights],
            template=values,
            output_shapes=[(M, N) if splits == 1 else (splits, M * N)],
            output_dtypes=[dtype if splits == 1 else mx.float32],
            **_launch(M, N, p, p.tile.BN, splits),
        )[0]
        if splits > 1:
            y = kernel("qmv_reduce")(
                inputs=[y],
                grid=(-(-M * N // 256) * 256, 1, 1),
                threadgroup=(256, 1, 1),
                output_shapes=[(M, N)],
                output_dtypes=[dtype],
                **reduce,
            )[0]
        return y.reshape(*x.shape[:-1], N)

    return call


def prepare_add(problem: Matmul, bias: bool, p: TilePlan | None = None) -> Launch:
    """A function ``(x, w, scales, biases, res) -> x W^T + res``, added in fp32.

    res: [N] for ``bias`` (8 or more), else the shape of y. Affine weights, else as
    `prepare`.
    """
    if bias and problem.N < 8:
        # Inputs under 8 elements are `constant` in MSL.
        raise ValueError(f"a bias of {problem.N} is too short for the kernel: add it")
    return _fused("qmm_add", problem, ("RES", 1 if bias else 2), p)


def prepare_glu(problem: Matmul, activation: str, p: TilePlan | None = None) -> Launch:
    """A function ``(x, w0, s0, b0, w1, s1, b1) -> act(x W0^T) * (x W1^T)``.

    activation: ``silu`` or ``gelu_approx``. ``problem`` is that of one of the two
    matrices, which are affine and of one shape; else as `prepare`.
    """
    if activation not in ACTIVATIONS:
        has = ", ".join(ACTIVATIONS)
        raise ValueError(f"activation {activation!r}: the kernel has {has}")
    return _fused("qmm_glu", problem, ("ACT", ACTIVATIONS[activation]), p, 2)


def _fused(
    name: str, problem: Matmul, more: tuple, p: TilePlan | None, matrices: int = 1
) -> Launch:
    """Launches of a kernel whose rows of W are those of so many matrices in turns."""
    if problem.mode != "affine":
        raise ValueError(f"mode {problem.mode!r}: this kernel takes affine weights")
    p = p or plan_qmm(problem, device_chip())
    N, K = problem.N, problem.K
    values = [*_tile(problem, p), more]

    def call(x: mx.array, *arrays: mx.array) -> mx.array:
        M = x.size // K
        return kernel(name)(
            inputs=[x.reshape(M, K), *arrays],
            template=values,
            output_shapes=[(*x.shape[:-1], N)],
            output_dtypes=[x.dtype],
            **_launch(M, N, p, p.tile.BN // matrices),
        )[0]

    return call
