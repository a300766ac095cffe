"""Sorted pairs in tiles on matrix units: the kernel or an error, against the oracle."""

from dataclasses import replace

import cases
import gather_case as case
import mlx.core as mx
import numpy as np
import pytest
from test_gather import GLU, K, check, glu_close, poisoned

from mlx_phase.launch import gather
from mlx_phase.launch.matmul import device_chip
from mlx_phase.plan_gather import _TILES, plan_gather

# Experts of a tile and a bit, of a whole tile, of nothing, of one pair.
RHS = [0] * 41 + [1] * 32 + [4]
MANY = {"sorted": True, "exact": False}
GPU_TILES = sorted({tile for family, _, tile in _TILES if family != "CPU"})


@pytest.mark.parametrize("E", [5, 300])
@pytest.mark.parametrize("rhs", [RHS, [4] * 70, list(range(5)) * 2, [0] * 8, [2] * 33])
def test_list_of_tiles(E, rhs):
    rhs = sorted(rhs)
    g = case.problem(mx.zeros((1, K)), 128, case.experts(E, 8, K // 3), **MANY)
    p = plan_gather(g, device_chip())
    tiles = np.array(gather.prepare_list(g, p)(mx.array(rhs, mx.uint32)))
    want = []
    for e in range(E):
        first, end = np.searchsorted(rhs, [e, e + 1])
        starts = range(first, end, p.tile.BM)
        want += [[e, i, min(end, i + p.tile.BM), 0] for i in starts]
    assert tiles[: len(want)].tolist() == want
    assert (tiles[len(want) :, 1:3] == 0).all()


@pytest.mark.parametrize(
    "dtype, form",
    [
        ("float32", ("affine", 4, 64)),
        ("float16", ("affine", 3, 32)),
        ("bfloat16", ("nvfp4", 4, 16)),
    ],
)
@pytest.mark.parametrize("N", [37, 64])
def test_products(dtype, form, N):
    # No multiple of a step, where groups allow it.
    wide = K + form[2] * (form[2] < 32)
    q = case.experts(5, N, wide, form, dtype)
    x = cases.activations(len(RHS), wide, dtype)
    y = case.run(x, RHS, q, **MANY)
    assert y.shape == (len(RHS), 1, N)
    check(y, x, range(len(RHS)), RHS, q)


def test_rows_and_places_that_arrays_name():
    q = case.experts(5, 37, K, bias=True)
    x = cases.poisoned(cases.activations(20, K))
    rng = np.random.default_rng(0)
    rows, places = rng.integers(0, 20, len(RHS)), rng.permutation(len(RHS))
    y = case.run(x, RHS, poisoned(q, {0, 1, 4}), lhs=rows, to=places, **MANY)
    check(y[mx.array(places)], x, rows, RHS, q)


@pytest.mark.parametrize("dtype, form, kind, bias", GLU[::2])
def test_glu(dtype, form, kind, bias):
    gate, up = (case.experts(5, 37, K, form, dtype, bias, s) for s in (0, 9))
    x = cases.activations(20, K, dtype) * 20
    rows = np.random.default_rng(0).integers(0, 20, len(RHS))
    y = case.run(x, RHS, gate, up, lhs=rows, **MANY, **kind)
    glu_close(y, x, rows, RHS, gate, up, kind["activation"])


@pytest.mark.parametrize("tile", GPU_TILES, ids=str)
def test_tiles_of_gpus(tile):
    """Several simdgroups, whose tiles have gate and up in turns."""
    wide = K + 16
    gate, up = (case.experts(5, 77, wide, ("nvfp4", 4, 16), "float16", True, s)
                for s in (0, 9))  # fmt: skip
    x = cases.activations(20, wide, "float16")
    rows = np.random.default_rng(0).integers(0, 20, len(RHS))
    kind = {**MANY, "activation": "silu"}
    p = plan_gather(case.problem(x, 128, gate, each=0, **kind), device_chip())
    p = replace(p, tile=tile, simdgroups=tile.SM * tile.SN)
    y = case.run(x, RHS, gate, up, lhs=rows, p=p, **kind)
    glu_close(y, x, rows, RHS, gate, up, "silu")


def test_nan_stays_in_its_row():
    q = case.experts(5, 37, K)
    x = cases.activations(len(RHS), K)
    x[40] = float("nan")
    y = case.run(x, RHS, q, **MANY)
    bad = np.isnan(np.array(y)).all(axis=(1, 2))
    assert np.flatnonzero(bad).tolist() == [40]
