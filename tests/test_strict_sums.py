"""Rules that need the compiled code: bfloat arithmetic, and sums that may be fused."""

import mlx.core as mx
import pytest
from test_strict import UNROLL, check, found

from mlx_phase.executor.signature import Arg

BFLOAT = [("T", mx.bfloat16), ("N", 4)]


def test_bfloat_sums_are_reported():
    """Rule 8, and only for the type where it matters."""
    inputs = [Arg("x", "bfloat16_t", 1, 64)]
    outputs = [Arg("y", "bfloat16_t", 1, 64)]
    options = {"inputs": inputs, "outputs": outputs, "template": BFLOAT}
    (finding,) = check("\ny[lane] = x[lane] + x[0];", **options)
    assert (finding.rule, finding.line) == ("8", 3)
    assert check("y[lane] = T(float(x[lane]) + float(x[0]));", **options) == []
    assert check("y[lane] = x[lane] + x[0];") == []


FUSED = [
    "float t = float(x[lane]) * s + s; y[lane] = T(t);",
    "float t = float(x[lane]) * s;\nt -= s; y[lane] = T(t);",
    f"float a[N]; {UNROLL} for (int i = 0; i < N; i++) a[i] = float(x[i]) * s;\n"
    f"float t = 0; {UNROLL} for (int i = 0; i < N; i++) t += a[i]; y[lane] = T(t);",
    "float4 v = float4(s, s, s, s) * float4(x[0], x[1], x[2], x[3]);\n"
    "y[lane] = T(v.x + v.y);",
]
KEPT = [
    "float t = fma(float(x[lane]), s, s); y[lane] = T(t);",
    "float t = float(x[lane]) * 0.0625f + s; y[lane] = T(t);  // exact product",
    "uint i = lane * N + lane; y[i] = T(s * s);",
]


@pytest.mark.parametrize("source", FUSED)
def test_products_that_may_be_fused(source):
    assert "14" in found(source, exact_rows=True)
    assert "14" not in found(source)


@pytest.mark.parametrize("source", KEPT)
def test_sums_that_cannot_change(source):
    assert check(source, exact_rows=True) == []


def test_fused_product_of_a_header_is_placed_there():
    header = "\ninline float f(float a, float b) {\n  return a * b - a;\n}\n"
    (finding,) = check("y[lane] = T(f(s, float(x[lane])));", header, exact_rows=True)
    assert (finding.rule, finding.where, finding.line) == ("14", "header", 3)
