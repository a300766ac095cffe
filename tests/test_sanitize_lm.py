"""mlx-lm's own Metal kernels under the sanitizer, by the fixture `metal_executor`.

Expected values are those of mlx-lm's slower code for the same thing.
"""

import mlx.core as mx
import pytest
from mlx import nn

from mlx_phase.executor import SanitizerError

pytest_plugins = ["pytester"]


def normal(*shape, seed=0, dtype=mx.float32):
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def load(metal_executor, name):
    try:
        return metal_executor.load(name)
    except ModuleNotFoundError as missing:
        pytest.skip(f"this mlx-lm has no such module: {missing}")


def ssm_arguments(state_dim):
    B, H, head_dim, groups = 2, 4, 12, 2
    return (
        normal(B, 1, H, head_dim),
        normal(H, seed=1),
        normal(B, 1, groups, state_dim, seed=2),
        normal(B, 1, groups, state_dim, seed=3),
        normal(H, seed=4),
        normal(B, 1, H, seed=5),
        normal(H, seed=6),
        normal(B, H, head_dim, state_dim, seed=7),
        (0.001, 100.0),
    )


def test_ssm(metal_executor):
    ssm = load(metal_executor, "mlx_lm.models.ssm")
    arguments = ssm_arguments(64)
    made = ssm.ssm_update_kernel(*arguments)
    for a, b in zip(made, ssm.ssm_attn(*arguments), strict=True):
        assert mx.allclose(a, b, rtol=1e-4, atol=1e-4)
    assert metal_executor.launches == {"ssm_kernel": 1}


def test_ssm_with_a_state_shorter_than_a_simdgroup_writes_nothing(metal_executor):
    """A finding: Ds / 32 elements a lane are 0 below 32, and nothing refuses it."""
    ssm = load(metal_executor, "mlx_lm.models.ssm")
    with pytest.raises(SanitizerError, match="1536 of 1536 elements .*unwritten") as e:
        ssm.ssm_update_kernel(*ssm_arguments(16))
    assert (e.value.check, e.value.buffer) == ("init", "state_out")


@pytest.mark.parametrize("Dk, masked", [(64, False), (64, True), (128, False)])
def test_gated_delta(metal_executor, Dk, masked):
    gated = load(metal_executor, "mlx_lm.models.gated_delta")
    B, T, Hk, Hv, Dv = 2, 3, 1, 2, 16
    q, k, v = normal(B, T, Hk, Dk), normal(B, T, Hk, Dk, seed=1), normal(B, T, Hv, Dv)
    g, beta = mx.sigmoid(normal(B, T, Hv)), mx.sigmoid(normal(B, T, Hv, seed=2))
    mask = mx.array([[True] * T, [True, True, False]]) if masked else None
    arguments = q / 8, k / 8, v, g, beta, normal(B, Hv, Dv, Dk, seed=3), mask
    y, state = gated.gated_delta_kernel(*arguments)
    right_y, right_state = gated.gated_delta_ops(*arguments)
    assert mx.allclose(state, right_state, atol=1e-4)
    seen = T - masked  # what a masked token gives is nobody's
    assert mx.allclose(y[:, :seen], right_y[:, :seen], atol=1e-4)
    (name,) = metal_executor.launches
    assert name.startswith("gated_delta_step") and masked == name.endswith("mask")


def test_norm_add_norm(metal_executor):
    """Sums over a row by two simdgroups, through threadgroup memory."""
    kernels = load(metal_executor, "mlx_lm.kernels.norm_add_norm")
    D = 520
    branch, stream = normal(3, D), normal(3, D, seed=1)
    alpha, beta, weight = (normal(D, seed=s) for s in (2, 3, 4))
    norm = nn.RMSNorm(D, eps=1e-5)
    norm.weight = normal(D, seed=5)
    made, normed = kernels.norm_add_norm(
        branch, stream, alpha=alpha, beta=beta, post_weight=weight, post_eps=1e-6,
        next_norm=norm,
    )  # fmt: skip
    scaled = weight * branch
    want = alpha * stream + beta * mx.fast.rms_norm(scaled, None, 1e-6)
    assert mx.allclose(made, want, atol=1e-4)
    assert mx.allclose(normed, norm(want), atol=1e-4)


def test_expert_routing(metal_executor):
    kernels = load(metal_executor, "mlx_lm.kernels.expert_routing")
    logits, bias = normal(3, 40), normal(40, seed=1)
    experts, weights = kernels.expert_routing(
        logits, bias, top_k=4, multiplier=1.0, score_eps=1e-6, route_scale=2.0
    )
    score = mx.sigmoid(logits)
    want = mx.argsort(-(score + bias), axis=-1)[:, :4]
    assert mx.array_equal(experts, want.astype(mx.uint32))
    top = mx.take_along_axis(score, want, axis=-1)
    share = 2 * top / (top.sum(-1, keepdims=True) + 1e-6)
    assert mx.allclose(weights, share, atol=1e-5)


SUITE = """
import mlx.core as mx

BODY = "uint i = thread_position_in_grid.x; out[i] = a[i + {}];"

def run(kernel):
    return kernel(
        inputs=[mx.arange(32)], output_shapes=[(32,)], output_dtypes=[mx.int32],
        grid=(32, 1, 1), threadgroup=(32, 1, 1),
    )

def test_right(metal_executor):
    assert mx.metal.is_available()
    kernel = metal_executor.metal_kernel("right", ["a"], ["out"], BODY.format(0))
    assert mx.array_equal(run(kernel)[0], mx.arange(32))
    assert metal_executor.launches == {"right": 1}

def test_stray(metal_executor):
    run(mx.fast.metal_kernel("stray", ["a"], ["out"], BODY.format(1)))

def test_other_checks(metal_executor):
    metal_executor.sanitize = "race"
    run(mx.fast.metal_kernel("other", ["a"], ["out"], BODY.format(1)))
"""


def test_the_fixture_in_another_suite(pytester):
    pytester.makepyfile(SUITE)
    plugin = ("-p", "mlx_phase.pytest_plugin")
    result = pytester.runpytest_inprocess(*plugin)
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(["*SanitizerError: kernel 'stray': mem: read of 4*"])
    pytester.makeini("[pytest]\nmetal_sanitize = sync")
    pytester.runpytest_inprocess(*plugin).assert_outcomes(passed=3)
