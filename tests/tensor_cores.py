"""Compiles a launch for tensor cores, here, without a GPU."""

import pytest

from mlx_phase.executor import cuda_check, nvrtc


def compiled(row: tuple, arch: str, kind: str) -> str:
    """PTX of a row of ``*_rows.py``, which multiplies operands of ``kind`` there."""
    try:
        ptx = cuda_check.compile_check(*row, arch=arch)
    except nvrtc.NvrtcMissing as error:
        pytest.skip(str(error))
    assert f".target {arch}" in ptx
    assert f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32" in ptx
    # An array in local memory would be a spill that no compiler can undo.
    assert ".local" not in ptx
    return ptx
