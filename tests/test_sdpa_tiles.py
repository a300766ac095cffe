"""Decode attention on matrices: two tiles of 16 keys a step, and the planned tiles."""

from dataclasses import replace

import mlx.core as mx
import pytest
import sdpa_case
import tolerance
from sdpa_case import NAN, form, matrix_plan, poisoned

from mlx_phase.chip import lookup
from mlx_phase.launch import attention
from mlx_phase.launch.matmul import narrow_loads
from mlx_phase.plan_attention import plan_sdpa
from mlx_phase.problem import Sdpa

MIXED = form(8, 4, 32)  # in the ring: two groups of each head


def plan(case: sdpa_case.Case, rows: int = 8, chunk: int = 64, simdgroups: int = 2):
    """Two tiles a step: 64 keys of two simdgroups."""
    return matrix_plan(case, rows, chunk, simdgroups, keys=32)


FORMS = [
    ("bfloat16", (64, 64), form(16, 16, 64)),
    ("bfloat16", (128, 128), form(8, 8, 64)),
    ("bfloat16", (128, 128), form(4, 4, 64)),
    ("float16", (64, 64), form(4, 8, 32)),
    ("bfloat16", (192, 128), form(16, 4, 64)),
    ("float32", (64, 64), form(8, 16, 32)),
]


@pytest.mark.parametrize("dtype,dims,bits", FORMS, ids=str)
def test_every_form(dtype, dims, bits):
    case = sdpa_case.case(
        dims=dims, q_len=3, k_len=109, dtype=dtype, causal=True, **bits
    )
    out = case.check(plan(case), tuple(map(poisoned, case.caches())))
    assert mx.isfinite(out).all().item()


@pytest.mark.parametrize("k_len", [1, 16, 17, 31, 33, 63, 64, 65, 127, 129])
def test_every_tail(k_len):
    case = sdpa_case.case(k_len=k_len, **MIXED)
    case.check(plan(case), tuple(map(poisoned, case.caches())))


@pytest.mark.parametrize("kind", ["bool", "bfloat16"])
def test_masks_and_sinks(kind):
    mask = sdpa_case.random_mask((2, 1, 3, 150), kind)
    case = sdpa_case.case(
        q_len=3, k_len=150, batch=2, mask=mask, sinks=True, causal=True, **MIXED
    )
    case.check(plan(case))


@pytest.mark.parametrize("window", [1, 20, 100])
def test_window(window):
    """What no row sees is not looked at, whole steps of 64 keys at a time."""
    case = sdpa_case.case(q_len=4, k_len=200, causal=True, window=window, **MIXED)
    hidden = mx.arange(200)[:, None] < (200 - 4 - window + 1) // 64 * 64
    caches = [
        (codes, mx.where(hidden, NAN, scales), mx.where(hidden, NAN, biases))
        for codes, scales, biases in case.caches()
    ]
    out = case.run(plan(case), caches)
    tolerance.assert_close(out, *case.oracle(), "bfloat16")


def test_lens_end_the_keys_of_each_batch_row():
    lens = [0, 33, 64, 150]
    case = sdpa_case.case(q_len=2, k_len=150, batch=4, causal=True, lens=lens, **MIXED)
    out = case.check(plan(case))
    assert (out[0] == 0).all().item()
    caches = case.caches()
    for b, n in enumerate(lens[1:], 1):
        problem = replace(case.problem, batch=1, lens=False)
        alone = replace(case, problem=problem, extras={}, q=case.q[b : b + 1])
        cut = [tuple(x[b : b + 1, :, :n] for x in cache) for cache in caches]
        tolerance.assert_bits(out[b : b + 1], alone.run(plan(case), cut))


@pytest.mark.parametrize("last", [4, 33, 64, 66, 98, 130])
def test_rows_have_the_bits_of_single_rows(last):
    case = sdpa_case.case(q_len=4, k_len=last, causal=True, **MIXED)
    caches = case.caches()
    out = case.check(plan(case, rows=16), caches)
    for i in range(4):
        one = replace(
            case, problem=replace(case.problem, q_len=1), q=case.q[:, :, i : i + 1]
        )
        cut = [tuple(x[:, :, : last - 3 + i] for x in cache) for cache in caches]
        tolerance.assert_bits(out[:, :, i : i + 1], one.run(plan(case), cut))


def test_narrow_loads_change_no_bit():
    """Codes that are copied word by word, scales one by one."""
    case = sdpa_case.case(q_len=2, k_len=77, causal=True, **MIXED)
    caches = tuple(map(poisoned, case.caches()))
    want, before = case.check(plan(case), caches), narrow_loads(True)
    try:
        tolerance.assert_bits(case.run(plan(case), caches), want)
    finally:
        narrow_loads(before)


@pytest.mark.parametrize("more", [dict(window=70), dict(batch=2, lens=(33, 330))])
def test_chunks_in_turns_change_no_bit(more):
    """The keys of the next chunk are asked for before this one is merged."""
    case = sdpa_case.case(
        heads=(8, 2), q_len=2, k_len=330, causal=True, **more, **MIXED
    )
    caches = tuple(map(poisoned, case.caches()))
    want = case.check(plan(case), caches)
    for threadgroups in (1, 8):
        turns = replace(plan(case), threadgroups=threadgroups)
        tolerance.assert_bits(case.run(turns, caches), want)


@pytest.mark.parametrize(
    "dim,rows,bits",
    [
        (64, 16, form(16, 16, 64)),
        (256, 8, form(16, 16, 64)),
        (128, 16, form(4, 8, 32)),  # behind the ring: one element of runs of two
        (192, 8, form(4, 4, 32)),  # six of runs of four
    ],
)
def test_parts_are_added_in_passes(dim, rows, bits):
    """Two blocks of 16 rows, or long heads: threadgroup memory holds a part of o."""
    case = sdpa_case.case(
        heads=(8, 1), dims=(dim, dim), q_len=4, k_len=140, causal=True, **bits
    )
    case.check(matrix_plan(case, rows, 64, 4))


@pytest.mark.parametrize("dim,bits", [(128, 16), (64, 16), (128, 8), (128, 4)])
def test_threadgroup_memory_changes_no_bit(dim, bits):
    """All that simdgroups found is added up at once, or in passes."""
    case = sdpa_case.case(
        heads=(8, 2), dims=(dim, dim), q_len=2, k_len=330, causal=True,
        **form(bits, bits, 64),
    )  # fmt: skip
    caches = tuple(map(poisoned, case.caches()))
    room = replace(plan(case), threadgroups=8)
    want = case.check(room, caches)
    # Less than the ring takes leaves one element of a lane at a time.
    for taken in (16384, 8192) if bits == 16 else (30000, 28000):
        less = replace(room, threadgroup_bytes=taken)
        tolerance.assert_bits(case.run(less, caches), want)


LONG = [
    ("bfloat16", dict(causal=True)),
    ("float16", dict(causal=True, window=70)),
    ("bfloat16", dict(mask=sdpa_case.random_mask((2, 8, 3, 140)))),
    ("bfloat16", dict(causal=True, lens=(33, 140), sinks=True)),
]


@pytest.mark.parametrize("dtype,more", LONG, ids=str)
@pytest.mark.parametrize("threadgroups", [0, 4])
def test_many_long_rows_have_their_queries_in_threadgroup_memory(
    dtype, more, threadgroups, monkeypatch
):
    """Blocks of 16 rows of 256, one with half its rows; few rows keep registers."""
    monkeypatch.setenv("MLX_PHASE_SANITIZE", "all,partial" if threadgroups else "")
    case = sdpa_case.case(
        heads=(8, 1), dims=(256, 256), q_len=3, k_len=140, batch=2, dtype=dtype, **more
    )
    caches = [poisoned(c) for c in case.caches()]
    few = matrix_plan(case, 8, 64, 4)
    many = replace(few, rows=16, ahead=False, threadgroups=threadgroups)
    assert attention.row_blocks(case.problem, many) == 1
    tolerance.assert_bits(case.check(many, caches), case.run(few, caches))


@pytest.mark.parametrize("q_len", [1, 2, 3, 5])
def test_few_rows_are_added_in_fewer_passes(q_len):
    case = sdpa_case.case(
        heads=(1, 1), dims=(192, 192), q_len=q_len, k_len=140, causal=True,
        **form(4, 4, 32),
    )  # fmt: skip
    case.check(matrix_plan(case, 8, 64, 4))


# Bits of K and V, head_dim, group -> chunk, keys, chunks of a run and threadgroups of a
# kv head at 8k, 32k and 128k keys (bench/results/h200-attention-sweep.txt), if there.
PLANNED = [
    (16, 16, 128, 64, 256, 16, ((1, 32), (4, 32), (4, 43))),
    (16, 16, 64, 64, 256, 16, ((1, 32), (1, 64), (4, 64))),
    (16, 16, 256, 64, 256, 16, ((1, 32), (1, 128), (1, 128))),
    (8, 8, 128, 64, 256, 32, ((1, 32), (1, 64), (4, 64))),
    (4, 4, 128, 64, 512, 32, ((1, 16), (1, 32), (1, 43))),
    (8, 4, 128, 64, 256, 32, None),
    (16, 4, 128, 64, 256, 16, None),
    (4, 4, 256, 64, 256, 16, None),
    (8, 8, 128, 32, 256, 16, None),
]


@pytest.mark.parametrize("row", PLANNED, ids=str)
def test_planned_tiles(row):
    k_bits, v_bits, dim, group, chunk, keys, wanted = row
    heads = (16, 2) if dim == 256 else (32, 8)
    problem = Sdpa(*heads, dim, dim, **form(k_bits, v_bits, group))
    chosen = plan_sdpa(problem, lookup("h200"))
    assert chosen.kernel.startswith("sdpa_matrix")
    assert (chosen.chunk, chosen.keys) == (chunk, keys)
    for k_len, want in zip((8192, 32768, 131072), wanted or (), strict=False):
        fold = attention.fold_of(problem, chosen, k_len // chunk)
        turns = attention.turns(problem, chosen, k_len // chunk // fold)
        assert (fold, turns) == want


def test_a_joint_cache_takes_no_more_turns():
    """Copies of recent keys are a threadgroup more, and soon done."""
    plain = Sdpa(32, 8, 128, 128, 4, causal=True, lens=True)
    joint = replace(plain, joint=True)
    chosen = [plan_sdpa(p, lookup("h200")) for p in (plain, joint)]
    assert len({(p.threadgroups, p.registers) for p in chosen}) == 1
    assert [attention.turns(joint, p, 33) for p in chosen] == [33, 33]


def test_many_long_rows_have_blocks_of_16():
    """A row's bits are those of blocks of 8: what else a plan chooses is the same."""
    few, many = (
        plan_sdpa(Sdpa(16, 2, 256, 256, q_len=q), lookup("h200")) for q in (1, 2)
    )
    assert (few.rows, few.ahead, many.rows, many.ahead) == (8, True, 16, False)
    assert replace(many, rows=8, ahead=True) == replace(few, reason=many.reason)
    assert attention.spread(many, direct=True).rows == 8
    coded = Sdpa(16, 2, 256, 256, q_len=2, **form(8, 8, 64))
    assert plan_sdpa(coded, lookup("h200")).rows == 8
