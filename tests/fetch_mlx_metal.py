"""Fetch the Metal headers that MLX ships, of the version that is installed.

    python tests/fetch_mlx_metal.py DIR

They come from the macOS wheel `mlx-metal`, on any system, and are never committed: the
tests run MLX's own kernels as code that nobody here wrote. A second run is free.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

KERNELS = "mlx/include/mlx/backend/metal/kernels"
HEADERS = "mlx/include/mlx/"
PLATFORM = "macosx_14_0_arm64"


def fetch(target: Path) -> Path:
    """Bring `target` to the installed MLX's headers; return the kernels' folder.

    Raises RuntimeError if pip cannot have the wheel (offline, or no such version).
    """
    wanted = version("mlx")
    stamp = target / "VERSION"
    if stamp.is_file() and stamp.read_text().strip() == wanted:
        return target / KERNELS
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        pip += ["--retries", "1", "download", "-q", "--no-deps", "-d", folder]
        pip += ["--platform", PLATFORM, "--only-binary=:all:", f"mlx-metal=={wanted}"]
        if subprocess.run(pip).returncode:
            raise RuntimeError(f"the wheel mlx-metal=={wanted} could not be fetched")
        (wheel,) = Path(folder).glob("*.whl")
        shutil.rmtree(target, ignore_errors=True)
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.startswith(HEADERS)]
            archive.extractall(target, names)
    # Written last: a run that was interrupted starts over.
    stamp.write_text(wanted + "\n")
    return target / KERNELS


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/fetch_mlx_metal.py DIR")
    try:
        fetch(Path(sys.argv[1]))
    except RuntimeError as error:
        sys.exit(str(error))
