"""Bytes and FLOPs against the arrays that MLX really reads."""

import mlx.core as mx
import pytest

from mlx_phase import roofline
from mlx_phase.chip import CPU, lookup
from mlx_phase.problem import Matmul

FORMATS = [(bits, g, "affine") for bits in (2, 3, 4, 5, 6, 8) for g in (32, 64, 128)]
FORMATS += [(4, 32, "mxfp4"), (8, 32, "mxfp8"), (4, 16, "nvfp4")]


@pytest.mark.parametrize("bits, group, mode", FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weight_bytes_are_those_of_the_arrays(bits, group, mode, dtype):
    w = mx.random.normal((64, 256)).astype(getattr(mx, dtype))
    arrays = mx.quantize(w, group_size=group, bits=bits, mode=mode)
    problem = Matmul(1, 64, 256, dtype, bits, group, mode)
    assert roofline.weight_bytes(problem) == sum(a.nbytes for a in arrays)


def test_plain_weights_have_the_size_of_their_dtype():
    assert roofline.weight_bytes(Matmul(1, 10, 20, "bfloat16", 16, 0, "none")) == 400
    assert roofline.weight_bytes(Matmul(1, 10, 20, "float32", 32, 0, "none")) == 800
    assert roofline.weight_bytes(Matmul(1, 10, 20, "float16", 16, 0, "none", 3)) == 1200


def test_flops_and_bytes_of_a_product():
    problem = Matmul(2, 28672, 8192)
    assert roofline.matmul_flops(problem) == 2 * 2 * 28672 * 8192
    weights = 28672 * 8192 // 2 + 28672 * 8192 // 64 * 4
    assert roofline.matmul_bytes(problem) == weights + 2 * (28672 + 8192) * 2


def test_decode_is_memory_bound_and_prefill_compute_bound():
    h200 = lookup("h200")
    decode = roofline.matmul_bound(Matmul(1, 28672, 8192), h200)
    assert decode.side == "memory"
    assert decode.us == pytest.approx(132.2e6 / 4800e3, rel=1e-2)
    prefill = roofline.matmul_bound(Matmul(4096, 28672, 8192), h200)
    assert prefill.side == "compute"
    assert prefill.us == pytest.approx(2 * 4096 * 28672 * 8192 / 989e6)
    balance = roofline.machine_balance(h200)
    assert decode.intensity < balance < prefill.intensity


def test_unknown_bandwidth_gives_no_bound():
    bound = roofline.matmul_bound(Matmul(1, 64, 64), CPU)
    assert (bound.us, bound.side) == (None, "unknown")
    assert roofline.mbu(1e9, 1.0, CPU) is None
    assert roofline.machine_balance(CPU) is None


def test_mbu_is_the_share_of_the_marketed_bandwidth():
    assert roofline.gbs(2.4e9, 1e-3) == pytest.approx(2400)
    assert roofline.mbu(2.4e9, 1e-3, lookup("h200")) == pytest.approx(0.5)
    assert roofline.step_bytes(100, 20) == 120
    with pytest.raises(ValueError, match="above 0"):
        roofline.gbs(1, 0)
