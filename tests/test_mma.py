"""metal/mma.h on every executor: operands from registers, sums and maxima over rows."""

import cpu_case
import mlx.core as mx
import numpy as np
import pytest

from mlx_phase.executor import cuda_check, metal_kernel, nvrtc, strict
from mlx_phase.executor.signature import METAL_TYPES, Arg
from mlx_phase.source import compact, metal_dir

HEADER = compact("".join((metal_dir() / f).read_text() for f in ("base.h", "mma.h")))
DTYPES = [mx.float16, mx.bfloat16, mx.float32]
EXECUTORS = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]

# a [16, 16] is taken along its rows and, transposed as at [k, row], across two rows of
# k. There a lane has two rows of `a` that are neighbours, so the rows come permuted.
BODY = """
const uint lane = thread_index_in_simdgroup, row = TILE_ROW(lane), col = 2 * TILE_COL(lane);
PAIR(T) along[4], across[4], bs[2];
UNROLL for (int k = 0; k < 2; k++) {
  UNROLL for (int h = 0; h < 2; h++) {
    uint w[2], v[2], u[2];
    const device uint* p = (const device uint*)(a + (row + 8 * h) * 16 + 8 * k + col);
    const device uint* q = (const device uint*)(at + (8 * k + col) * 16 + 2 * row);
    UNROLL for (uint i = 0; i < sizeof(T) / 2; i++) {
      w[i] = p[i]; v[i] = q[i]; u[i] = q[i + 8 * sizeof(T) / 2];
    }
    along[2 * k + h] = pair_at<T>(w, 0);
    across[2 * k + h] = h == 0 ? pair_across<T>(v, u, 0) : pair_across<T>(v, u, 1);
  }
  const device T* r = b + (8 * k + row) * 8 + col;
  bs[k] = to_b<T>(pair_of<T>(float(r[0]), float(r[1])));
}
UNROLL for (int part = 0; part < 2; part++) {
  float acc[4];
  int at_c[4];
  UNROLL for (int i = 0; i < 4; i++) {
    at_c[i] = (part == 0 ? row + i / 2 * 8 : 2 * row + i / 2) * 8 + col + i % 2;
    acc[i] = c[at_c[i]];
  }
  if (part == 0) mma16<T>(acc, along[0], along[1], along[2], along[3], bs[0], bs[1]);
  else mma16<T>(acc, across[0], across[1], across[2], across[3], bs[0], bs[1]);
  UNROLL for (int i = 0; i < 4; i++) y[part * 128 + at_c[i]] = acc[i];
}
for (uint i = 0; i < 2; i++) {
  const float v = c[row * 8 + col + i], top = rows_max(v), sum = rows_sum(v);
  if (row == 0) stat[col + i] = top;
  stat[8 + row * 8 + col + i] = sum;
}
"""  # noqa: E501


def operands(dtype: mx.Dtype) -> list[mx.array]:
    """a, its transpose, b and c: whole numbers, so every sum is exact."""
    rng = np.random.default_rng(3)
    a, b = rng.integers(-9, 10, (16, 16)), rng.integers(-9, 10, (16, 8))
    c = rng.integers(-99, 100, (16, 8)).astype(np.float32)
    return [*(mx.array(x).astype(dtype) for x in (a, a.T, b)), mx.array(c)]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_and_columns(dtype, executor, monkeypatch):
    monkeypatch.setenv("MLX_PHASE_EXECUTOR", executor)
    args = operands(dtype)
    run = metal_kernel("mma", ["a", "at", "b", "c"], ["y", "stat"], BODY, HEADER)
    y, stat = run(
        inputs=args,
        output_shapes=[(2, 16, 8), (9, 8)],
        output_dtypes=[mx.float32] * 2,
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        template=[("T", dtype)],
    )
    a, _, b, c = map(cpu_case.to_numpy, args)
    np.testing.assert_array_equal(np.array(y), np.stack([a @ b + c] * 2))
    np.testing.assert_array_equal(np.array(stat)[0], c[:8].max(0))
    np.testing.assert_array_equal(np.array(stat)[1:], np.tile(c[:8].sum(0), (8, 1)))


def described(dtype: mx.Dtype) -> tuple:
    metal = METAL_TYPES[str(dtype).rpartition(".")[2]]
    kinds = {"a": metal, "at": metal, "b": metal, "c": "float"}
    inputs = [Arg(name, kind, 2, 128) for name, kind in kinds.items()]
    outputs = [Arg("y", "float", 3, 256), Arg("stat", "float", 2, 72)]
    return "mma", inputs, outputs, BODY, HEADER, [("T", dtype)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_text_is_strict(dtype):
    strict.assert_clean(*described(dtype))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_cores_multiply_short_floats_only(dtype, arch):
    try:
        ptx = cuda_check.compile_check(*described(dtype), arch=arch)
    except nvrtc.NvrtcMissing as error:
        pytest.skip(str(error))
    kind = {mx.float16: ".f16.f16.f32", mx.bfloat16: ".bf16.bf16.f32"}.get(dtype)
    if kind is None:
        assert "mma.sync" not in ptx and "fma.rn.f32" in ptx
    else:
        assert f"mma.sync.aligned.m16n8k16.row.col.f32{kind}" in ptx
    assert "tf32" not in ptx
