"""Decode attention on matrices against the oracle, launched directly: no fallback."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
import sdpa_case
import tolerance
from sdpa_case import NAN, form, poisoned
from sdpa_case import matrix_plan as plan


def scaled(cache, by: mx.array | float):
    """The same codes, of values times ``by``, exact for powers of two."""
    codes, scales, biases = cache
    return codes, (scales * by).astype(scales.dtype), (biases * by).astype(biases.dtype)


class Scaled(sdpa_case.Case):
    """Quantised caches of k and v times `times`."""

    times = 1.0, 1.0

    def caches(self) -> list:
        made = zip(super().caches(), self.times, strict=True)
        return [scaled(cache, by) for cache, by in made]


FORMS = [
    ("bfloat16", (64, 64), form(16, 16, 64)),
    ("float16", (80, 80), form(16, 16, 64)),
    ("bfloat16", (192, 128), form(16, 16, 64)),
    ("float32", (112, 112), form(16, 16, 64)),
    ("bfloat16", (256, 256), form(16, 16, 64)),
    ("bfloat16", (128, 128), form(8, 8, 64)),
    ("bfloat16", (128, 128), form(8, 8, 32)),
    ("bfloat16", (128, 128), form(4, 4, 64)),
    ("bfloat16", (192, 128), form(4, 4, 32)),
    ("float16", (192, 64), form(8, 4, 64)),
    ("float16", (64, 64), form(4, 4, 32)),
    ("bfloat16", (256, 256), form(4, 8, 64)),
    ("float32", (64, 64), form(8, 4, 32)),
    ("float16", (128, 128), form(16, 8, 32)),
]


@pytest.mark.parametrize("dtype,dims,bits", FORMS, ids=str)
def test_every_form(dtype, dims, bits):
    case = sdpa_case.case(
        dims=dims, q_len=3, k_len=77, dtype=dtype, causal=True, **bits
    )
    out = case.check(plan(case), [poisoned(c) for c in case.caches()])
    assert mx.isfinite(out).all().item()


def powers(low: int, high: int) -> mx.array:
    """A power of two for each of 90 keys, the first the smallest."""
    exponents = np.random.default_rng(3).integers(low, high, (90, 1))
    exponents[0] = low
    return mx.array(2.0**exponents, mx.float32)


# Of q, K and V. Keys whose V is small, as the first often is, still count in the sum.
SIZES = {
    "tiny v": (1, 1, 2.0**-50),
    "huge v": (1, 1, 2.0**90),
    "tiny k, huge q": (2.0**70, 2.0**-70, 1),
    "huge k, tiny q": (2.0**-60, 2.0**60, 1),
    "largest q": (2.0**125, 2.0**-125, 1),
    "each v": (1, 1, powers(-20, 4)),
    "each v, far apart": (1, 1, powers(-30, 60)),
    "nothing": (0, 1, 0),
}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", SIZES)
def test_codes_of_any_size(name, bits):
    of_q, *times = SIZES[name]
    made = sdpa_case.case(q_len=3, k_len=90, causal=True, **form(bits, bits, 32))
    case = Scaled(**vars(made))
    case.q, case.times = (case.q * of_q).astype(mx.bfloat16), times
    out = case.check(plan(case, chunk=128))
    tolerance.assert_close(case.run(plan(case)), *case.oracle(), "bfloat16")
    assert mx.isfinite(out).all().item()


@pytest.mark.parametrize("k_len", [1, 2, 15, 16, 17, 31, 33, 64, 65, 129])
def test_every_tail(k_len):
    case = sdpa_case.case(q_len=1, k_len=k_len)
    case.check(plan(case), [poisoned(c) for c in case.caches()])


def random_mask(*shape: int) -> mx.array:
    return mx.array(np.random.default_rng(shape).random(shape) < 0.4)


MASKS = {
    "bool": random_mask(2, 1, 3, 150),
    "heads": random_mask(4, 1, 150),
    "additive": sdpa_case.normal((1, 4, 3, 150), "bfloat16", 5),
    "float32": sdpa_case.normal((3, 150), "float32", 6),
    "nothing": mx.zeros((3, 150), mx.bool_),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_and_sinks(name):
    case = sdpa_case.case(q_len=3, k_len=150, batch=2, mask=MASKS[name], sinks=True)
    out = case.check(plan(case))
    if name == "nothing":
        assert (out == 0).all().item()


@pytest.mark.parametrize("window", [1, 20, 64])
def test_window(window):
    case = sdpa_case.case(q_len=4, k_len=200, causal=True, window=window)
    # What no row sees is not looked at, not even where its step holds keys that count.
    first = (200 - 4 - window + 1) // 64 * 64
    k, v = case.caches()
    hidden = mx.arange(200)[:, None] < first
    out = case.run(plan(case), [mx.where(hidden, NAN, a) for a in (k, v)])
    tolerance.assert_close(out, *case.oracle(), "bfloat16")


def test_lens_end_the_keys_of_each_batch_row():
    lens = [0, 1, 64, 70, 150]
    case = sdpa_case.case(
        q_len=2, k_len=150, batch=5, causal=True, lens=lens, sinks=True
    )
    there = mx.arange(150)[:, None] < mx.array(lens)[:, None, None, None]
    caches = [mx.where(there, a, NAN) for a in (case.k, case.v)]
    out = case.check(plan(case), caches)
    assert (out[0] == 0).all().item()
    for b, n in enumerate(lens[1:], 1):
        problem = replace(case.problem, batch=1, lens=False)
        extras = {"sinks": case.extras["sinks"]}
        alone = replace(case, problem=problem, extras=extras, q=case.q[b : b + 1])
        cut = [a[b : b + 1, :, :n] for a in caches]
        tolerance.assert_bits(out[b : b + 1], alone.run(plan(case), cut))


BORDERS = (4, 17, 63, 64, 65, 66, 67, 80, 128, 130)


@pytest.mark.parametrize(
    "bits,last", [(b, n) for b in (16, 8) for n in BORDERS] + [(4, 66), (4, 130)]
)
def test_rows_have_the_bits_of_single_rows(last, bits):
    """q_len 4 gives the bits of four calls on growing k_len, across chunk borders."""
    case = sdpa_case.case(q_len=4, k_len=last, causal=True, **form(bits, bits, 32))
    if bits < 16:  # the last keys are the largest: rows that see them scale otherwise
        case = Scaled(**vars(case))
        growing = 2.0 ** ((np.arange(last) - last) // 4)
        case.times = 1, mx.array(growing[:, None], mx.float32)
    caches = case.caches()
    out = case.check(plan(case, rows=16), caches)
    for i in range(4):
        n = last - 3 + i
        one = replace(
            case, problem=replace(case.problem, q_len=1), q=case.q[:, :, i : i + 1]
        )
        cut = [
            a[:, :, :n] if bits == 16 else tuple(x[:, :, :n] for x in a) for a in caches
        ]
        tolerance.assert_bits(out[:, :, i : i + 1], one.run(plan(case), cut))


def test_rows_do_not_see_each_other():
    """Query rows are columns of one multiply: NaN and inf stay in theirs."""
    case = sdpa_case.case(q_len=4, k_len=90)
    out = case.run(plan(case))
    for bad in (NAN, float("inf"), 3e38):
        mine = mx.arange(4)[:, None] == 2
        other = replace(case, q=mx.where(mine, case.q, bad).astype(mx.bfloat16))
        tolerance.assert_bits(other.run(plan(case))[:, :, 2], out[:, :, 2])


def test_blocks_of_rows_change_no_bit():
    """40 query rows of a kv head: blocks of 8 or 16, in one threadgroup and in more."""
    case = sdpa_case.case(heads=(8, 2), q_len=10, k_len=100, causal=True)
    out = case.check(plan(case))
    for rows, simdgroups in ((16, 2), (24, 2)):
        tolerance.assert_bits(case.run(plan(case, rows, 64, simdgroups)), out)


TURNS = {
    "all keys": dict(causal=True),
    "a window leaves the first chunks empty": dict(causal=True, window=70),
    "lens leave the last chunks empty": dict(batch=2, lens=(33, 330)),
    "codes": dict(causal=True, **form(8, 4, 32)),
}


@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("threadgroups", [1, 5, 8])
def test_chunks_in_turns_change_no_bit(name, threadgroups):
    """A threadgroup that takes several chunks leaves what one each would."""
    case = sdpa_case.case(heads=(8, 2), q_len=2, k_len=330, **TURNS[name])
    one_each = plan(case)
    caches = tuple(map(poisoned, case.caches()))
    want = case.check(one_each, caches)
    turns = replace(one_each, threadgroups=threadgroups)
    tolerance.assert_bits(case.run(turns, caches), want)


@pytest.mark.parametrize("chunk,simdgroups", [(16, 1), (32, 2), (48, 1), (128, 8)])
def test_any_chunk_is_right(chunk, simdgroups):
    case = sdpa_case.case(q_len=2, k_len=145, causal=True)
    case.check(plan(case, 8, chunk, simdgroups))


def test_views_are_read_in_place():
    """Strides of a cache, and a place that is not a multiple of 16 bytes."""
    case = sdpa_case.case(q_len=2, k_len=70)
    out = case.run(plan(case))
    for shift in (1, 2, 8):
        flat = [
            mx.concatenate([mx.zeros(shift, a.dtype), a.flatten()])
            for a in (case.k, case.v)
        ]
        mx.eval(flat)
        moved = [f[shift:].reshape(case.k.shape) for f in flat]
        tolerance.assert_bits(case.run(plan(case), moved), out)
    by_key = [
        mx.contiguous(a.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
        for a in (case.k, case.v)
    ]
    tolerance.assert_bits(case.run(plan(case), by_key), out)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_rows_have_the_bits_of_single_rows_on_tensor_cores(dtype, bits):
    case = sdpa_case.case(
        heads=(32, 8), dims=(128, 128), q_len=4, k_len=3001, batch=2, dtype=dtype,
        causal=True, **form(bits, bits, 64),
    )  # fmt: skip
    tile = dict(
        chunk=256, simdgroups=2 if bits == 8 else 4, keys=16 if bits == 16 else 32
    )
    chosen = plan(case, 16, **tile)
    caches = case.caches()
    out = case.check(chosen, caches)
    for i in range(4):
        n = 2998 + i
        one = replace(
            case, problem=replace(case.problem, q_len=1), q=case.q[:, :, i : i + 1]
        )
        cut = [
            a[:, :, :n] if bits == 16 else tuple(x[:, :, :n] for x in a) for a in caches
        ]
        alone = one.run(plan(case, 8, **tile), cut)
        tolerance.assert_bits(out[:, :, i : i + 1], alone)
