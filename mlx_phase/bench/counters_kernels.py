"""Profiles of MLX's kernels and ours for 4-bit weights, as costs per weight."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, reduce

import mlx.core as mx

from ..chip import Chip
from ..counters import Cost, Prediction, cost, predict
from ..executor import metal_kernel
from ..executor.profile import Profile, profile_kernel
from ..launch import matmul
from ..plan import Plan, plan
from ..problem import Matmul
from . import mlx_metal

HEADERS = ("utils.h", "steel/gemm/gemm.h", "quantized_utils.h", "quantized.h")
CONSTANTS = {"align_M": False, "align_N": False, "align_K": False}
#: Rows and columns of the profiled matrices: a few threadgroups, and K long enough that
#: what comes before and after the loop weighs as little as in a model.
N, K = 32, 4096
DTYPE, GROUP = mx.bfloat16, 64
#: Chips of the predicted times.
CHIPS = (
    "M1 8", "M1 Max 32", "M2 Max 38", "M3 Max 40", "M4 Pro 20", "M4 Max 40",
    "M5 Max 40", "M3 Ultra 80",
)  # fmt: skip


@dataclass(frozen=True)
class PerWeight:
    """Work per weight, apart from the bytes of x and y; and bytes over ideal ones."""

    cost: Cost
    over_fetch: float


@contextmanager
def on_cpu() -> Iterator[None]:
    """Kernels made inside run on the CPU executor, whatever the machine has."""
    before = os.environ.get("MLX_PHASE_EXECUTOR")
    os.environ["MLX_PHASE_EXECUTOR"] = "cpu"
    matmul.kernel.cache_clear()
    try:
        yield
    finally:
        matmul.kernel.cache_clear()
        if before is None:
            del os.environ["MLX_PHASE_EXECUTOR"]
        else:
            os.environ["MLX_PHASE_EXECUTOR"] = before


def _arrays(
    M: int, rows: int, bits: int, group: int, K: int = K, dtype: mx.Dtype = DTYPE
) -> tuple[mx.array, ...]:
    key = mx.random.key(bits)
    w = mx.random.normal((rows, K), key=key).astype(dtype)
    x = mx.random.normal((M, K), key=key).astype(dtype)
    return (*mx.quantize(w, group_size=group, bits=bits), x)


def _per_weight(profile: Profile, weights: int) -> PerWeight:
    """Bytes are those of the arrays of weights: x and y are added by who knows M."""
    arrays = [a for a in profile.arrays if a.name in ("w", "scales", "biases")]
    lines = 128 * sum(a.lines for a in arrays)
    work = replace(cost(profile), memory_bytes=lines)
    return PerWeight(work.times(1 / weights), lines / sum(a.nbytes for a in arrays))


@cache
def mlx_qmv(name: str, M: int, bits: int = 4, group_size: int = GROUP) -> PerWeight:
    """MLX's kernel: ``fast`` (M rows, one read each), ``wide`` (M rows share a read)
    or ``qmm`` (tiles of 32 rows, M of them used)."""
    rows = M if name != "qmm" else 32
    w, scales, biases, x = _arrays(rows, N, bits, group_size)
    lanes = "simdgroup_index_in_threadgroup, thread_index_in_simdgroup"
    group, tiles = (32, 2, 1), (rows, N // 8)
    if name == "fast":
        call, extra = f"affine_qmv_fast<T, {group_size}, {bits}, false>", ""
    elif name == "wide":
        call, extra = f"affine_qmv_wide<T, {group_size}, {bits}, {M}, 8, false>", ", M"
        tiles = (1, N // 8)
    else:
        call, extra = f"affine_qmm_t<T, {group_size}, {bits}, true, false>", ", M"
        lanes = f"thread_index_in_threadgroup, {lanes}"
        group, tiles = (32, 2, 2), (N // 32, 1)
    body = (
        f"{call}(w, scales, biases, x, y, K, N{extra}, x_ndim - 2, x_shape, x_strides, "
        "w_ndim - 2, w_shape, w_strides, scales_strides, biases_strides, "
        f"threadgroup_position_in_grid, {lanes});"
    )
    grid = (tiles[0] * group[0], tiles[1] * group[1], group[2])
    inputs = [w, scales, biases, x, K, N, rows]
    return _per_weight(mlx_profile(name, body, inputs, grid, group), N * K)


def mlx_profile(
    name: str, body: str, inputs: list, grid: tuple, threadgroup: tuple
) -> Profile:
    """One launch of MLX's product of inputs w, scales, biases, x, K, N and M."""
    kernel = metal_kernel(
        name=f"mlx_{name}",
        input_names=["w", "scales", "biases", "x", "K", "N", "M"],
        output_names=["y"],
        source=body,
        header=mlx_metal.header(*HEADERS, **CONSTANTS),
    )
    (profile,) = profile_kernel(
        kernel,
        inputs=inputs,
        output_shapes=[(inputs[-1], inputs[-2])],
        output_dtypes=[DTYPE],
        grid=grid,
        threadgroup=threadgroup,
        template=[("T", DTYPE)],
    )
    return profile


@cache
def ours(
    M: int, p: Plan, bits: int = 4, K: int = K, dtype: mx.Dtype = DTYPE
) -> PerWeight:
    """Our qmv with the tile of ``p``."""
    rows = max(N, p.rows * p.simdgroups)
    problem = Matmul(M, rows, K, str(dtype).rpartition(".")[2], bits, GROUP)
    w, scales, biases, x = _arrays(M, rows, bits, GROUP, K, dtype)
    (profile,) = profile_kernel(matmul.prepare(problem, p), x, w, scales, biases)
    return _per_weight(profile, rows * K)


def planned(M: int, chip: Chip, K: int = 8192, N: int = 8192) -> Plan:
    """The plan of a matrix, by default a large one."""
    p = plan(Matmul(M, N, K, "bfloat16", 4, GROUP), chip)
    return replace(p, reason="profiled")


def vectors(M: int) -> tuple[int, int]:
    """(tiles, rows of a tile) of MLX's qmv_wide: the fewest tiles of at most 5 rows."""
    tiles = -(-M // 5)
    return tiles, -(-M // tiles)


def mlx_route(
    M: int, chip: Chip, kernel: str = "", group: int = GROUP
) -> tuple[str, list[PerWeight]]:
    """MLX 0.32's kernel for a large matrix, and its passes over the weights.

    ``kernel``: another one than it would take: rows (before 0.32), wide or qmm.
    """
    if not kernel:
        old = chip.family in ("Apple7", "Apple8")
        kernel = "wide" if not old else "rows" if M < 6 else "qmm"
    if kernel == "qmm":
        return "qmm, 32 rows", [mlx_qmv("qmm", 32, 4, group)]
    if M == 1:
        return "qmv_fast", [mlx_qmv("fast", 1, 4, group)]
    if kernel == "rows":
        return "qmv_fast, a read per row", [mlx_qmv("fast", 1, 4, group)] * M
    tiles, rows = vectors(M)
    return f"qmv_wide, {tiles} of {rows}", [mlx_qmv("wide", rows, 4, group)] * tiles


def our_route(M: int, chip: Chip) -> tuple[str, list[PerWeight]]:
    """Our kernel with the plan's tile."""
    p = planned(M, chip)
    shared = f", x shared by {p.simdgroups}" if p.simdgroups > 2 else ""
    return f"qmv, {p.rows} rows{shared}", [ours(M, p)]


def time(
    passes: list[PerWeight], M: int, K: int, N: int, chip: Chip, misses: float = 1.0
) -> Prediction:
    """Of a launch whose passes read the same weights: memory moves ``misses`` of them
    once."""
    work = whole(passes).times(N * K)
    memory = passes[0].cost.memory_bytes * N * K + 2 * M * (N + K)
    return predict(replace(work, memory_bytes=memory), chip, misses=misses)


def whole(passes: list[PerWeight]) -> Cost:
    """Work per weight of all passes."""
    return reduce(Cost.plus, (p.cost for p in passes))
