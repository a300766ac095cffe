"""Profiles of MLX's prefill product and ours: how much of the time is multiplying."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from ..chip import Chip, lookup
from ..counters import MATRIX, Cost, cost, predict
from ..executor.profile import Profile, profile_kernel
from ..launch import qmm
from ..plan_qmm import Tile, TilePlan, plan_qmm
from ..problem import Matmul
from .counters_kernels import CHIPS, DTYPE, GROUP, mlx_profile

#: K of the profiled threadgroup: long against what comes before and after the loop.
K = 512
#: K and N of the predicted times, and values of M.
SHAPE = (4096, 14336)
ROWS = (64, 512, 2048)
MLX_TILE = (32, 32)


@dataclass(frozen=True)
class PerFma:
    """Work per multiply-add of one threadgroup's tile (BM rows of x, BN of W).

    ``matrix_share``: cycles of matrix multiplies over those and the slots of all other
    instructions, as if nothing overlapped. Bytes are those that threads ask for.
    """

    tile: tuple[int, int]
    cost: Cost  # without the bytes that memory moves
    matrix_share: float
    threadgroup_bytes: float
    device_bytes: float

    def threadgroups(self, M: int, N: int) -> int:
        """Threadgroups of a launch, unless K is split."""
        return -(-M // self.tile[0]) * -(-N // self.tile[1])


def _per_fma(profile: Profile, tile: tuple[int, int]) -> PerFma:
    macs = tile[0] * tile[1] * K
    products = sum(n for name, n in profile.collectives.items() if "multiply" in name)
    work = cost(profile)
    busy = MATRIX * products
    shared = profile.threadgroup_read + profile.threadgroup_written
    return PerFma(
        tile,
        Cost(work.slots / macs, work.fma / macs, work.slow / macs, 0.0),
        busy / (busy + work.slots - products),
        shared / macs,
        (profile.device_read + profile.device_written) / macs,
    )


def _arrays(M: int, N: int) -> tuple[mx.array, ...]:
    key = mx.random.key(4)
    w = mx.random.normal((N, K), key=key).astype(DTYPE)
    x = mx.random.normal((M, K), key=key).astype(DTYPE)
    return (*mx.quantize(w, group_size=GROUP, bits=4), x)


@cache
def mlx_qmm() -> PerFma:
    """MLX's affine_qmm_t, 4 bits: one threadgroup's tile of 32 x 32."""
    M, N = MLX_TILE
    w, scales, biases, x = _arrays(M, N)
    body = (
        f"affine_qmm_t<T, {GROUP}, 4, true, false>(w, scales, biases, x, y, K, N, M, "
        "x_ndim - 2, x_shape, x_strides, w_ndim - 2, w_shape, w_strides, "
        "scales_strides, biases_strides, threadgroup_position_in_grid, "
        "thread_index_in_threadgroup, simdgroup_index_in_threadgroup, "
        "thread_index_in_simdgroup);"
    )
    inputs, group = [w, scales, biases, x, K, N, M], (32, 2, 2)
    return _per_fma(mlx_profile("qmm_t", body, inputs, group, group), MLX_TILE)


@cache
def our_qmm(tile: Tile) -> PerFma:
    """Our qmm, 4 bits: one threadgroup's tile."""
    problem = Matmul(tile.BM, tile.BN, K, str(DTYPE).rpartition(".")[2], 4, GROUP)
    groups = tile.SM * tile.SN
    plan = TilePlan("qmm", tile.BN, groups, 1, 1, False, "profiled", tile)
    w, scales, biases, x = _arrays(tile.BM, tile.BN)
    (profile,) = profile_kernel(qmm.prepare(problem, plan), x, w, scales, biases)
    return _per_fma(profile, (tile.BM, tile.BN))


def planned(M: int, chip: Chip) -> TilePlan:
    """Our plan of the product of the predicted times."""
    return plan_qmm(Matmul(M, SHAPE[1], SHAPE[0], "bfloat16", 4, GROUP), chip)


def time(found: PerFma, M: int, chip: Chip) -> float:
    """Predicted microseconds of a launch; memory moves each array once."""
    inner, N = SHAPE
    work = found.cost.times(M * N * inner)
    weights = N * inner * (0.5 + 4 / GROUP)
    memory = weights + 2 * M * (N + inner)
    return predict(Cost(work.slots, work.fma, work.slow, memory), chip).us


def _tiles() -> list[tuple[str, PerFma]]:
    tiles = {planned(M, lookup(name)).tile for name in CHIPS for M in ROWS}
    mine = [
        (f"ours: qmm, {t.BM} x {t.BN} of {t.SM * t.SN} simdgroups", our_qmm(t))
        for t in sorted(tiles)
    ]
    return [*mine, ("MLX: affine_qmm_t, 32 x 32 of 4 simdgroups", mlx_qmm())]


def table() -> str:
    """Where the cycles and the bytes of a multiply-add go."""
    lines = [
        "| kernel | share of matrix multiplies | threadgroup bytes per FMA | "
        "device bytes per FMA | slots per 1000 FMA | FMA units |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, found in _tiles():
        lines.append(
            f"| {name} | {found.matrix_share:.0%} | {found.threadgroup_bytes:.3f} | "
            f"{found.device_bytes:.3f} | {1000 * found.cost.slots:.1f} | "
            f"{1000 * found.cost.fma:.1f} |"
        )
    return "\n".join(lines)


def fill() -> str:
    """By chip and M: threadgroups for each core, and the predicted time."""
    head = " | ".join(f"M = {M}" for M in ROWS)
    lines = [f"| chip | {head} |", "| --- |" + " ---: |" * len(ROWS)]
    for name in CHIPS:
        chip, cells = lookup(name), []
        if chip.family == "Apple10":
            continue  # MLX multiplies on neural accelerators there
        for M in ROWS:
            plan = planned(M, chip)
            sides = (our_qmm(plan.tile), plan.splits), (mlx_qmm(), 1)
            texts = [
                f"{side.threadgroups(M, SHAPE[1]) * splits / chip.gpu_cores:.1f}: "
                f"{time(side, M, chip) / 1000:.2f} ms"
                for side, splits in sides
            ]
            cells.append(f"{texts[0]}, MLX {texts[1]}")
        lines.append(f"| {chip.name} {chip.gpu_cores} | {' | '.join(cells)} |")
    return "\n".join(lines)
