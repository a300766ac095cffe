"""Kernel text and modules for CUDA, kept on disk under a hash of their text."""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

from mlx_phase.executor import cuda_text


@functools.cache
def library_hash() -> str:
    """Hash of the include files: what is kept depends on them."""
    digest = hashlib.sha256()
    for path in sorted(cuda_text.INCLUDE.glob("*.h")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def cache_folder() -> Path:
    """Where it is kept: MLX_PHASE_CACHE, or the user's cache folder."""
    root = os.environ.get("MLX_PHASE_CACHE")
    if not root:
        import platformdirs

        root = platformdirs.user_cache_dir("mlx_phase")
    return Path(root).absolute() / "cuda"


def stored(name: str, text: str) -> str:
    """Write ``text`` to the cache and return the #include that reads it."""
    digest = hashlib.sha256((library_hash() + text).encode()).hexdigest()[:16]
    path = cache_folder() / f"{name}-{digest}.h"
    kept(path.name, text.encode, lambda found: found == text.encode())
    return f'#include "{path.as_posix()}"\n' if path.is_file() else text


def kept_sealed(file_name: str, make: Callable[[], bytes]) -> bytes:
    """As `kept`, with a digest behind the content that tells whether it is whole."""

    def sealed() -> bytes:
        content = make()
        return content + hashlib.sha256(content).digest()

    def whole(found: bytes) -> bool:
        return hashlib.sha256(found[:-32]).digest() == found[-32:]

    return kept(file_name, sealed, whole)[:-32]


def kept(
    file_name: str, make: Callable[[], bytes], whole: Callable[[bytes], bool]
) -> bytes:
    """The content of a file of the cache, which is made if it is not there or not
    ``whole``, as after a crash."""
    path = cache_folder() / file_name
    try:
        if whole(content := path.read_bytes()):
            return content
    except OSError:
        pass
    content = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
    except OSError as error:
        warnings.warn(
            f"kernels cannot be stored in {path.parent} ({error}): they are compiled "
            "again and launches are slower; point MLX_PHASE_CACHE at a folder that can "
            "be written",
            stacklevel=3,
        )
    return content
