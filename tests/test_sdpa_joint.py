"""Decode attention over keys and values of one array, and the step that has them."""

from dataclasses import replace

import mlx.core as mx
import pytest
import sdpa_case
import tolerance

from mlx_phase import attention_ops, ops
from mlx_phase.plan_attention import supports_sdpa
from mlx_phase.problem import Sdpa

NAN = float("nan")


def joint_plan(case: sdpa_case.Case, matrix: bool, **changes):
    if matrix:
        plan = sdpa_case.matrix_plan(case, **changes)
    else:
        plan = sdpa_case.small_plan(case.problem, **changes)
    return replace(plan, kernel=f"{plan.kernel}_joint")


def both(case: sdpa_case.Case, matrix: bool, **changes) -> tuple[mx.array, mx.array]:
    """What the kernels of one array and of two give."""
    plan = joint_plan(case, matrix, **changes)
    one = replace(case, problem=replace(case.problem, joint=True))
    kv = mx.concatenate([case.k, case.v])
    apart = replace(plan, kernel=plan.kernel.removesuffix("_joint"))
    return one.run(plan, [kv, None]), case.run(apart)


SHAPES = {
    "one": dict(q_len=1, k_len=1),
    "tail": dict(q_len=1, k_len=117),
    "chunks": dict(q_len=3, k_len=141, causal=True, heads=(6, 2)),
    "batch": dict(q_len=2, k_len=95, batch=3, causal=True, lens=(95, 47, 2)),
    "window": dict(q_len=4, k_len=130, causal=True, window=50, lens=(129,)),
    "sinks": dict(q_len=1, k_len=70, sinks=True, dtype="float16"),
    "sinks direct": dict(q_len=2, k_len=40, sinks=True, causal=True, dims=(128, 128)),
}


@pytest.mark.parametrize("matrix", [False, True], ids=["split", "matrix"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_of_two_arrays(shape, matrix):
    case = sdpa_case.case(**SHAPES[shape])
    have, want = both(case, matrix)
    tolerance.assert_bits(have, want)
    tolerance.assert_close(have, *case.oracle(), case.problem.dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("dim", [72, 192, 256, 512])
def test_every_head(dim, dtype):
    case = sdpa_case.case(dims=(dim, dim), heads=(2, 1), k_len=53, dtype=dtype)
    have, want = both(case, False, lanes=32 if dim > 128 else 16)
    tolerance.assert_bits(have, want)
    tolerance.assert_close(have, *case.oracle(), dtype)


@pytest.mark.parametrize("matrix", [False, True], ids=["split", "matrix"])
def test_nothing_behind_the_keys_is_read(matrix):
    """What is not there yet is NaN, among the keys and among the values."""
    case = sdpa_case.case(k_len=61, q_len=2, causal=True, batch=2, lens=(61, 30))
    kv = sdpa_case.longer(mx.concatenate([case.k, case.v]), NAN)
    kv = mx.pad(kv, [(0, 0), (0, 0), (0, 26), (0, 0)], constant_values=NAN)
    kv[1, :, 30:] = NAN
    kv[3, :, 30:] = NAN
    mx.eval(kv)
    one = replace(case, problem=replace(case.problem, joint=True))
    out = one.run(joint_plan(case, matrix), [kv, None])
    tolerance.assert_close(out, *case.oracle(), "bfloat16")


@pytest.mark.parametrize("matrix", [False, True], ids=["split", "matrix"])
def test_the_sanitizer_has_nothing_to_say(matrix, monkeypatch):
    # The states of chunks behind the keys stay unwritten.
    monkeypatch.setenv("MLX_PHASE_SANITIZE", "all,partial")
    case = sdpa_case.case(k_len=141, q_len=2, causal=True, batch=2, lens=(141, 30))
    both(case, matrix)


@pytest.mark.parametrize("matrix", [False, True], ids=["split", "matrix"])
def test_arrays_off_16_bytes_and_views(matrix):
    case = sdpa_case.case(k_len=37, q_len=2, causal=True)
    one = replace(case, problem=replace(case.problem, joint=True))
    kv, plan = mx.concatenate([case.k, case.v]), joint_plan(case, matrix)
    want = one.run(plan, [kv, None])
    odd = mx.concatenate([mx.zeros((1,), kv.dtype), kv.reshape(-1)])
    mx.eval(odd)
    tolerance.assert_bits(one.run(plan, [odd[1:].reshape(kv.shape), None]), want)
    turned = mx.contiguous(kv.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    q = mx.contiguous(case.q.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    tolerance.assert_bits(replace(one, q=q).run(plan, [turned, None]), want)


def test_rows_are_exact():
    case = sdpa_case.case(k_len=100, q_len=4, causal=True, lens=(100,))
    whole, _ = both(case, False)
    for i in range(4):
        end = 97 + i
        alone = sdpa_case.case(k_len=100, q_len=4, lens=(end,)).first(100, 1, at=i)
        have, _ = both(alone, False)
        tolerance.assert_bits(have, whole[:, :, i : i + 1])


@pytest.mark.parametrize(
    "change", [dict(mask="bool"), dict(v_head_dim=32), dict(k_bits=8), dict(v_bits=4)]
)
def test_what_no_such_kernel_takes(change):
    problem = replace(Sdpa(4, 2, 64, 64, joint=True, lens=True), **change)
    assert supports_sdpa(problem)


def test_attend_takes_the_array_or_its_halves():
    """A mask needs strides: then the halves serve."""
    case = sdpa_case.case(q_len=2, k_len=40)
    kv, lens = mx.concatenate([case.k, case.v]), mx.array([40])
    for mask, kernel in (("causal", "_joint"), (mx.ones((2, 40), mx.bool_), "")):
        before = ops.served().kernels
        out = attention_ops.attend(
            case.q, case.k, case.v, scale=case.scale, mask=mask, lens=lens, kv=kv
        )
        after = ops.served().kernels
        ran = [name for name in after if after[name] > before.get(name, 0)]
        assert [name.split()[0] for name in ran] == [f"sdpa_split{kernel}"]
        given = dict(causal=True) if mask == "causal" else dict(mask=mask)
        right = sdpa_case.case(q_len=2, k_len=40, **given).oracle()
        tolerance.assert_close(out, *right, "bfloat16")


def test_a_kernel_that_is_off_leaves_it_to_the_halves():
    case = sdpa_case.case(q_len=2, k_len=40, seed=2, heads=(8, 2))
    kv, lens = mx.concatenate([case.k, case.v]), mx.array([40])
    given = dict(scale=case.scale, mask="causal", lens=lens, kv=kv)
    want = attention_ops.attend(case.q, case.k, case.v, **given)
    ops.disable(attention_ops.route(
        case.q, case.k, case.v, "causal", lens=lens, joint=True
    ).name, "test")  # fmt: skip
    try:
        have = attention_ops.attend(case.q, case.k, case.v, **given)
    finally:
        ops.enable_all()
    tolerance.assert_bits(have, want)


@pytest.mark.cuda
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("q_len, k_len", [(1, 9001), (4, 1001), (16, 200)])
def test_on_tensor_cores(dim, q_len, k_len):
    """As planned, over a buffer that is longer than its keys."""
    case = sdpa_case.case(
        heads=(32, 8), dims=(dim, dim), q_len=q_len, k_len=k_len, causal=True,
        lens=(k_len,),
    )  # fmt: skip
    kv = sdpa_case.longer(mx.concatenate([case.k, case.v]), NAN)
    one = replace(case, problem=replace(case.problem, joint=True))
    out = one.run(None, [kv, None])
    tolerance.assert_close(out, *case.oracle(), "bfloat16")
    halves = case.run(None, mx.split(kv, 2))
    tolerance.assert_bits(out, halves)
