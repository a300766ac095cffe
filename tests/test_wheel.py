"""The installed wheel, not the checkout: built from the sdist, it runs kernels."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
INCLUDE = ROOT / "mlx_phase" / "executor" / "include"

# Runs in the fresh environment, in an empty folder: only the wheel can be found.
PROGRAM = """
import sys
from pathlib import Path
import mlx.core as mx
import mlx_phase

package = Path(mlx_phase.__file__).parent
assert Path(sys.prefix) in package.parents, f"loaded {package}, not the wheel's"

body = "uint i = thread_position_in_grid.x; out[i] = a[i] + T(i);"
add = mlx_phase.metal_kernel("wheel_add", ["a"], ["out"], body)
a = mx.arange(64, dtype=mx.float32)
shape = {"output_shapes": [(64,)], "output_dtypes": [mx.float32]}
size = {"grid": (64, 1, 1), "threadgroup": (32, 1, 1)}
(out,) = add(inputs=[a], template=[("T", mx.float32)], **shape, **size)
assert mx.array_equal(out, 2 * a), out

from mlx_phase.launch.matmul import quantized_matvec

mx.random.seed(0)
x, w = mx.random.normal((2, 256)), mx.random.normal((64, 256))
packed = mx.quantize(w, group_size=64, bits=4)
wide = mx.dequantize(*packed, group_size=64, bits=4)
got = quantized_matvec(x, *packed, group_size=64, bits=4, mode="affine")
assert got.shape == (2, 64) and mx.allclose(got, x @ wide.T, atol=1e-3, rtol=1e-3)
print("ran from", package)
"""


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    # The checkout must not leak in through PYTHONPATH, nor pip reach for the network.
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    clean |= {"PIP_NO_INDEX": "1", "PYTHONNOUSERSITE": "1", **env}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def build(kind: str, source: Path, into: Path) -> Path:
    """Build an `sdist` or a `wheel` from a source tree, without a network."""
    hatch = (sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", into)
    run(*hatch, cwd=source)
    (built,) = into.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return built


def fresh_environment(folder: Path) -> Path:
    """Make an environment that sees this one's dependencies but no mlx_phase."""
    venv.create(folder, with_pip=False)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(python, "-c", query, cwd=folder).strip())
    # A .pth inside a folder named by a .pth is not read: an editable install of the
    # checkout stays out of sight.
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "dependencies.pth").write_text("\n".join(sorted(paths)) + "\n")
    return python


def test_the_wheel_runs_kernels_without_the_checkout(tmp_path):
    if find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed: pip install -e '.[test]'")
    sdist = build("sdist", ROOT, tmp_path)
    shutil.unpack_archive(sdist, tmp_path / "src")
    (unpacked,) = (tmp_path / "src").iterdir()
    wheel = build("wheel", unpacked, tmp_path)

    def packed(folder: Path, into: str) -> set[str]:
        return {f"{into}/{file.name}" for file in folder.iterdir() if file.is_file()}

    expected = packed(ROOT / "metal", "mlx_phase/metal") | packed(
        INCLUDE, "mlx_phase/executor/include"
    )
    with zipfile.ZipFile(wheel) as archive:
        assert expected <= set(archive.namelist())

    python = fresh_environment(tmp_path / "venv")
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "-q", "--no-deps", "--no-compile", wheel, cwd=tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "ran from" in run(python, "-c", PROGRAM, cwd=empty)
