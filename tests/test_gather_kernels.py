"""The experts' kernels are strict, compile for NVIDIA, and the sanitizer is content."""

import cases
import gather_case as case
import gather_rows
import mlx.core as mx
import numpy as np
import pytest

from mlx_phase.executor import cuda_check, nvrtc, strict

CHIPS = {"h200": "sm_90a", "a100-80gb": "sm_80"}
ROWS = gather_rows.rows(("m1", "m3-max"))
# A row of each kernel. Floats are multiplied in fp32, through hundreds of shuffles, and
# shared reads are two kernels in one: too slow to compile here.
NVIDIA = {
    gather_rows.arguments(*row)[0]: row
    for row in gather_rows.rows(tuple(CHIPS))
    if row[0].matmul.x_dtype != "float32" and row[0] != gather_rows.VECTORS[1]
}.values()
K = 192


def exact(row) -> bool:
    return row[0] in gather_rows.VECTORS


def compiled(arch: str, *kernel) -> str:
    try:
        return cuda_check.compile_check(*kernel, arch=arch)
    except nvrtc.NvrtcMissing as error:
        pytest.skip(str(error))


def test_rows_reach_every_kernel():
    for chips in (("m1", "m3-max"), tuple(CHIPS)):
        names = {gather_rows.arguments(*row)[0] for row in gather_rows.rows(chips)}
        assert {n.removeprefix("mlxp_") for n in names} | {"gather_tiles"} == (
            gather_rows.KERNELS
        )


@pytest.mark.parametrize("row", ROWS, ids=gather_rows.row_name)
def test_kernel_is_strict(row):
    strict.assert_clean(*gather_rows.arguments(*row), exact_rows=exact(row))


@pytest.mark.parametrize("row", ROWS[::5], ids=gather_rows.row_name)
def test_text_without_vector_loads_is_strict(row):
    made = gather_rows.arguments(*row, narrow=True)
    strict.assert_clean(*made, exact_rows=exact(row))


def test_list_of_tiles_is_strict_and_compiles():
    strict.assert_clean(*gather_rows.list_arguments("m1"))
    assert ".target sm_80" in compiled("sm_80", *gather_rows.list_arguments("h200"))


@pytest.mark.parametrize("row", NVIDIA, ids=gather_rows.row_name)
def test_kernel_compiles(row):
    arch = CHIPS[row[1]]
    ptx = compiled(arch, *gather_rows.arguments(*row))
    assert f".target {arch}" in ptx and ".local" not in ptx
    assert exact(row) or "mma.sync.aligned.m16n8k16" in ptx


@pytest.fixture
def checked(monkeypatch):
    monkeypatch.setenv("MLX_PHASE_EXECUTOR", "cpu")
    monkeypatch.setenv("MLX_PHASE_SANITIZE", "mem,race,init,sync")


@pytest.mark.parametrize("bias", [False, True])
def test_sanitizer_on_vectors(checked, bias):
    """Few pairs: a bias, rows named or in turn, shared reads, gate with up."""
    form = ("mxfp4", 4, 32) if bias else ("affine", 4, 64)
    q, up = (case.experts(3, 13, K, form, "float32", bias, s) for s in (0, 9))
    x, rhs = cases.activations(8, K), [2, 2, 2, 2, 2, 0, 0, 2]
    if bias:
        y = case.run(x, rhs, q, lhs=[0, 7, 7, 1, 2, 3, 4, 5])
    else:
        y = case.run(x, rhs, q, sorted=True)
    kind = case.CLIPPED if bias else {"activation": "silu"}
    z = case.run(x[:4], rhs, q, up, each=2, **kind)
    assert y.shape == z.shape == (8, 1, 13)


@pytest.mark.parametrize(
    "first, second, width, bias",
    [
        (("mxfp4", 4, 32), ("affine", 4, 64), 128, False),
        # The last step of K is short.
        (("affine", 4, 64), ("nvfp4", 4, 16), 80, True),
    ],
)
def test_sanitizer_on_tiles(checked, first, second, width, bias):
    """Gate with up and the way back, in each way that codes are read."""
    gate, up = (case.experts(3, 37, K, first, "float16", bias, s) for s in (0, 9))
    down = case.experts(3, 20, width, second, "float16", bias)
    rhs, rng = [0] * 5 + [2] * 35, np.random.default_rng(0)
    x, rows = cases.activations(6, K, "float16"), rng.integers(0, 6, 40)
    options = {"sorted": True, "exact": False}
    kind = case.CLIPPED if bias else {"activation": "silu"}
    hidden = case.run(x, rhs, gate, up, lhs=rows, **kind, **options)
    wide = mx.concatenate([hidden] * 4, axis=-1)[:, 0, :width]
    y = case.run(wide, rhs, down, to=rng.permutation(40), **options)
    assert mx.isfinite(y).all().item()
