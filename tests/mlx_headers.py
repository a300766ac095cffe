"""MLX's own Metal headers (mlx_phase.bench.mlx_metal); skips where there are none."""

import pytest

from mlx_phase.bench import BenchError, mlx_metal


def header(*names: str, **constants: bool | int) -> str:
    """As `mlx_metal.header`; the test is skipped where they were not fetched."""
    try:
        mlx_metal.include_folder()
    except BenchError as missing:
        pytest.skip(str(missing))
    return mlx_metal.header(*names, **constants)
