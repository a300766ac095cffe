"""The pytest fixture ``metal_executor``: custom Metal kernels tested without a GPU.

Kernels run on the CPU under the sanitizer. Installed with the package; nothing to
configure. ``metal_sanitize = mem,race`` in the ini file chooses other checks.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from mlx_phase.executor import metal_kernel


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the ini option ``metal_sanitize``."""
    parser.addini("metal_sanitize", "checks of metal_executor's kernels", default="all")


class MetalExecutor:
    """Makes kernels that run on the CPU, and counts their launches.

    ``sanitize``: checks of kernels made from now on, as ``metal_kernel`` takes them.
    ``launches``: kernel name -> calls, to assert that a test reached its kernel.
    """

    def __init__(self, sanitize: str | bool) -> None:
        self.sanitize = sanitize
        self.launches: Counter[str] = Counter()

    def metal_kernel(self, name: str, *args: Any, **options: Any) -> Callable:
        """Arguments as for ``mx.fast.metal_kernel``, and ``sanitize``."""
        kernel = metal_kernel(name, *args, **{"sanitize": self.sanitize} | options)

        def call(**arguments: Any) -> list[mx.array]:
            self.launches[name] += 1
            return kernel(**arguments)

        return call

    def load(self, module: str) -> ModuleType:
        """A fresh copy of a module, so that kernels it makes on import run here.

        ``import`` goes on giving the usual one. Raises ModuleNotFoundError.
        """
        spec = importlib.util.find_spec(module)
        if spec is None or spec.loader is None:
            raise ModuleNotFoundError(f"No module named {module!r}")
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        return made


@pytest.fixture
def metal_executor(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> Iterator[MetalExecutor]:
    """Run the test's Metal kernels on the CPU, checked.

    ``mx.fast.metal_kernel`` makes such kernels too, and MLX says that there is Metal,
    for code that asks before it makes one.
    """
    executor = MetalExecutor(pytestconfig.getini("metal_sanitize"))
    monkeypatch.setenv("MLX_PHASE_EXECUTOR", "cpu")
    monkeypatch.setattr(mx.fast, "metal_kernel", executor.metal_kernel)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    yield executor
