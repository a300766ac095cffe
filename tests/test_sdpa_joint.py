"""Decode attention over keys and values of one array, and the step that has them."""

from dataclasses import replace

import mlx.core as mx
import pytest
import sdpa_case
import tolerance
from sdpa_case import form

from mlx_phase import attention_ops, ops
from mlx_phase.attention_check import joint, packed
from mlx_phase.launch import attention
from mlx_phase.plan_attention import supports_sdpa
from mlx_phase.problem import Sdpa


def joint_plan(case: sdpa_case.Case, matrix: bool, **changes):
    if matrix:
        plan = sdpa_case.matrix_plan(case, **changes)
    else:
        plan = sdpa_case.small_plan(case.problem, **changes)
    return replace(plan, kernel=f"{plan.kernel}_joint")


def joint_run(case: sdpa_case.Case, plan, recent: int, arrays=None, behind=False):
    """What the kernel of one array gives: (o, the next recent keys, or three). behind:
    the step's keys lie behind q."""
    problem = replace(case.problem, joint=True, lens=True)
    made, _, lens = joint(problem, *case.caches(), ends(case), recent)
    run = attention.prepare(problem, plan)
    sinks, q, arrays = case.extras.get("sinks"), case.q, arrays or made
    if behind:
        q, *arrays = packed(q, *arrays)
    return run(q, arrays, None, scale=case.scale, lens=lens, sinks=sinks)


def ends(case: sdpa_case.Case) -> list[int]:
    lens = case.extras.get("lens")
    n = [case.k.shape[2]] * case.problem.batch
    return n if lens is None else lens.tolist()


def both(case: sdpa_case.Case, matrix: bool, recent: int = 5, **changes):
    """What the kernels of one array and of two give, and the next recent keys."""
    plan = joint_plan(case, matrix, **changes)
    o, kept = joint_run(case, plan, recent)
    if isinstance(case.caches()[0], mx.array):
        again = joint_run(case, plan, recent, behind=True)
        tolerance.assert_bits(again[0], o)
        assert_kept(again[1], case, recent)
    apart = replace(plan, kernel=plan.kernel.removesuffix("_joint"))
    return o, case.run(apart), kept


def assert_kept(kept: list[mx.array], case: sdpa_case.Case, recent: int):
    """Keys and values of the tokens before the step and of the step, in this order."""
    B, q_len = case.problem.batch, case.problem.q_len
    k, v = ([a] if isinstance(a, mx.array) else a for a in case.caches())
    assert len(kept) == len(k)
    for have, *pair in zip(kept, k, v, strict=True):
        for i, row in enumerate(mx.concatenate(pair)):
            end = ends(case)[i % B]
            want = row[:, max(0, end - q_len - recent) : end]
            tolerance.assert_bits(have[i, :, : want.shape[1]], want)


SHAPES = {
    "one": dict(q_len=1, k_len=1),
    "tail": dict(q_len=1, k_len=117),
    "chunks": dict(q_len=3, k_len=141, causal=True, heads=(6, 2)),
    "batch": dict(q_len=2, k_len=95, batch=3, causal=True, lens=(95, 47, 2)),
    "window": dict(q_len=4, k_len=130, causal=True, window=50, lens=(129,)),
    "sinks": dict(q_len=1, k_len=70, sinks=True, dtype="float16"),
    "sinks direct": dict(q_len=2, k_len=40, sinks=True, causal=True, dims=(128, 128)),
    "8 bits": dict(q_len=3, k_len=141, causal=True, heads=(6, 2), **form(8, 8, 32)),
    "4 bits": dict(q_len=1, k_len=117, batch=2, lens=(117, 50), **form(4, 4, 64))
    | dict(dims=(128, 128)),
    "8 bits direct": dict(q_len=2, k_len=40, causal=True, dtype="float16")
    | dict(heads=(4, 4), **form(8, 8, 64)),
    "one scale": dict(q_len=1, k_len=70, heads=(2, 1), **form(8, 8, 64)),
    "4 bits wide": dict(q_len=1, k_len=70, dtype="float32", **form(4, 4, 32)),
}


@pytest.mark.parametrize("matrix", [False, True], ids=["split", "matrix"])
@pytest.mark.parametrize("recent", [0, 31])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_of_two_arrays(shape, recent, matrix):
    """Wherever the keys lie; behind those of each array is NaN."""
    case = sdpa_case.case(**SHAPES[shape])
    have, want, kept = both(case, matrix, recent)
    tolerance.assert_bits(have, want)
    tolerance.assert_close(have, *case.oracle(), case.problem.dtype)
    assert_kept(kept, case, recent)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("dim", [72, 192, 256, 512])
def test_every_head(dim, dtype):
    case = sdpa_case.case(dims=(dim, dim), heads=(2, 1), k_len=53, dtype=dtype)
    have, want, kept = both(case, False, lanes=32 if dim > 128 else 16)
    tolerance.assert_bits(have, want)
    tolerance.assert_close(have, *case.oracle(), dtype)
    assert_kept(kept, case, 5)


def off_16_bytes(a: mx.array) -> mx.array:
    """The same values one element behind where vectors may begin."""
    odd = mx.concatenate([mx.zeros((1,), a.dtype), a.reshape(-1)])
    mx.eval(odd)
    return odd[1:].reshape(a.shape)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("matrix", [False, True], ids=["split", "matrix"])
def test_codes_lie_anywhere(bits, matrix):
    """In vectors and one by one: steps without recent keys, with some, with all."""
    more = dict(dims=(128, 128), heads=(4, 2), q_len=2, k_len=150, causal=True)
    case = sdpa_case.case(**more, **form(bits, bits, 64))
    _, want, _ = both(case, matrix)
    plan = joint_plan(case, matrix)
    problem = replace(case.problem, joint=True, lens=True)
    for recent in range(0, 36, 5):
        have, kept = joint_run(case, plan, recent)
        tolerance.assert_bits(have, want)
        assert_kept(kept, case, recent)
        made, *_ = joint(problem, *case.caches(), ends(case), recent)
        for which in range(9):
            arrays = [off_16_bytes(a) if i == which else a for i, a in enumerate(made)]
            if recent in (0, 15):
                have, kept = joint_run(case, plan, recent, arrays)
                tolerance.assert_bits(have, want)
                assert_kept(kept, case, recent)


@pytest.mark.parametrize("matrix", [False, True], ids=["split", "matrix"])
@pytest.mark.parametrize("keys", [16, 32])
def test_keys_lie_anywhere_in_steps_and_chunks(keys, matrix):
    """The cache ends, and the step begins, at each place of a step of the softmax."""
    more = dict(keys=keys) if matrix else dict(keys=keys // 16)
    case = sdpa_case.case(q_len=2, k_len=150, causal=True)
    _, want, _ = both(case, matrix, **more)
    for recent in range(36):
        have, kept = joint_run(case, joint_plan(case, matrix, **more), recent)
        tolerance.assert_bits(have, want)
        assert_kept(kept, case, recent)


@pytest.mark.parametrize("matrix", [False, True], ids=["split", "matrix"])
@pytest.mark.parametrize("now, recent", [(0, 0), (7, 7), (60, 31), (129, 20)])
def test_recent_keys_in_the_midst_of_a_ring(now, recent, matrix):
    """What the places of recent keys had before is NaN; those behind them count."""
    case = sdpa_case.case(k_len=130, heads=(8, 2))
    whole, room, held = mx.concatenate([case.k, case.v]), 32, now - recent
    kv, before = mx.array(whole), mx.full((2, 2, room, 64), float("nan"), whole.dtype)
    kv[:, :, held : now + 1] = float("nan")
    before[:, :, :recent] = whole[:, :, held:now]
    arrays, fresh = [kv, before], whole[:, :, now : now + 1]
    mx.eval(kv, before)
    problem, plan = (
        replace(case.problem, joint=True, lens=True),
        joint_plan(case, matrix),
    )
    lens = mx.array([[130], [held], [now]], mx.int32)
    run = attention.prepare(problem, plan)
    o, kept = run(case.q, [*arrays, fresh], None, scale=case.scale, lens=lens)
    apart = replace(plan, kernel=plan.kernel.removesuffix("_joint"))
    tolerance.assert_bits(o, case.run(apart))
    tolerance.assert_bits(kept[0][:, :, : recent + 1], whole[:, :, held : now + 1])


@pytest.mark.parametrize("matrix", [False, True], ids=["split", "matrix"])
def test_the_sanitizer_has_nothing_to_say(matrix, monkeypatch):
    # The states of chunks behind the keys, and room behind recent ones, stay unwritten.
    monkeypatch.setenv("MLX_PHASE_SANITIZE", "all,partial")
    given = dict(k_len=141, q_len=2, causal=True, batch=2, lens=(141, 30))
    both(sdpa_case.case(**given), matrix)
    both(sdpa_case.case(**given, **form(8, 8, 32)), matrix)


@pytest.mark.parametrize("matrix", [False, True], ids=["split", "matrix"])
def test_arrays_off_16_bytes_and_views(matrix):
    case = sdpa_case.case(k_len=37, q_len=2, causal=True)
    problem, plan = (
        replace(case.problem, joint=True, lens=True),
        joint_plan(case, matrix),
    )
    arrays, _, _ = joint(problem, case.k, case.v, ends(case))
    want, kept = joint_run(case, plan, 5)
    for i in range(3):
        some = [off_16_bytes(a) if j == i else a for j, a in enumerate(arrays)]
        o, again = joint_run(case, plan, 5, some)
        tolerance.assert_bits(o, want)
        tolerance.assert_bits(again[0][:, :, :7], kept[0][:, :, :7])
    turned = [
        mx.contiguous(a.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for a in arrays
    ]
    q = mx.contiguous(case.q.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    tolerance.assert_bits(joint_run(replace(case, q=q), plan, 5, turned)[0], want)


def test_rows_are_exact():
    case = sdpa_case.case(k_len=100, q_len=4, causal=True, lens=(100,))
    whole, *_ = both(case, False)
    for i in range(4):
        end = 97 + i
        alone = sdpa_case.case(k_len=100, q_len=4, lens=(end,)).first(100, 1, at=i)
        have, *_ = both(alone, False, recent=3 + i)
        tolerance.assert_bits(have, whole[:, :, i : i + 1])


@pytest.mark.parametrize(
    "change",
    [
        *(dict(mask="bool"), dict(v_head_dim=32), dict(k_bits=8), dict(v_bits=4)),
        dict(lens=False),
    ],
)
def test_what_no_such_kernel_takes(change):
    problem = replace(Sdpa(4, 2, 64, 64, joint=True, lens=True), **change)
    assert supports_sdpa(problem)


def test_a_mask_or_a_kernel_that_is_off_leaves_it_to_whole_arrays():
    case = sdpa_case.case(q_len=2, k_len=40, seed=2, heads=(8, 2), causal=True)
    problem = replace(case.problem, joint=True, lens=True)
    arrays, _, lens = joint(problem, case.k, case.v, ends(case))
    given = (case.q, case.k, case.v, [case.q, *arrays])
    more = dict(scale=case.scale, lens=lens)
    before = ops.served().kernels
    o, kept = attention_ops.attend_joint(*given, mask="causal", **more)
    after = ops.served().kernels
    ran = [name for name in after if after[name] > before.get(name, 0)]
    assert [name.split()[0] for name in ran] == ["sdpa_split_joint"]
    tolerance.assert_close(o, *case.oracle(), "bfloat16")
    assert_kept(kept, case, 5)
    mask = mx.ones((2, 40), mx.bool_)
    assert attention_ops.attend_joint(*given, mask=mask, **more) is None
    ops.disable(ran[0], "test")
    try:
        assert attention_ops.attend_joint(*given, mask="causal", **more) is None
    finally:
        ops.enable_all()


@pytest.mark.cuda
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("q_len, k_len", [(1, 9001), (4, 1001), (16, 200)])
@pytest.mark.parametrize("recent", [0, 17, 31])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_on_tensor_cores(dim, q_len, k_len, recent, bits):
    """As planned, over a buffer that is longer than its keys."""
    case = sdpa_case.case(
        heads=(32, 8), dims=(dim, dim), q_len=q_len, k_len=k_len, causal=True,
        lens=(k_len,), **form(bits, bits, 64),
    )  # fmt: skip
    out, kept = joint_run(case, None, recent)
    tolerance.assert_close(out, *case.oracle(), "bfloat16")
    tolerance.assert_bits(out, case.run(None))
    assert_kept(kept, case, recent)


def test_a_scale_may_be_an_array_and_differ_between_calls():
    case = sdpa_case.case(q_len=1, k_len=40)
    problem = replace(case.problem, joint=True, lens=True)
    arrays, _, lens = joint(problem, *case.caches(), ends(case))
    run = attention.prepare(problem, joint_plan(case, False))
    call = dict(lens=lens, sinks=None)
    want = run(case.q, arrays, None, scale=0.25, **call)[0]
    tolerance.assert_bits(
        run(case.q, arrays, None, scale=mx.array(0.25), **call)[0], want
    )
    other = run(case.q, arrays, None, scale=0.5, **call)[0]
    assert not mx.array_equal(other, want).item()
