"""Prompts with wide heads, MLA's too, against the oracle, launched directly."""

from dataclasses import replace

import mlx.core as mx
import pytest
import sdpa_case
import test_sdpa_prefill
import tolerance
from test_sdpa_matrix import form, poisoned

from mlx_phase import attention_ops, ops
from mlx_phase.plan_prefill_attention import PrefillPlan, chunks_of

NAN = float("nan")


class Case(test_sdpa_prefill.Case):
    """A call of the wide kernels; narrow heads take few simdgroups."""

    def plan(self, rows: int = 16, keys: int = 16, threadgroups: int = 0):
        simdgroups = self.problem.v_head_dim // 64
        coded = min(self.problem.k_bits, self.problem.v_bits) < 16
        kernel = "sdpa_prefill_wide" + "_codes" * coded
        return PrefillPlan(kernel, rows, simdgroups, keys, threadgroups, "test")


def case(**options) -> Case:
    options = {"heads": (3, 1), "dims": (128, 128)} | options
    return Case(**vars(sdpa_case.case(**options)))


FORMS = [
    ("bfloat16", (576, 512), form(16, 16, 64), 16, 16),
    ("float16", (512, 512), form(8, 8, 64), 16, 16),
    ("float32", (576, 512), form(16, 16, 64), 8, 16),
    ("float16", (96, 64), form(16, 16, 64), 8, 32),
    ("bfloat16", (192, 128), form(8, 8, 32), 16, 32),
    ("float16", (128, 128), form(4, 4, 64), 16, 16),
    ("bfloat16", (128, 128), form(16, 4, 32), 16, 16),
    ("float32", (128, 128), form(4, 16, 32), 8, 16),
]


@pytest.mark.parametrize("dtype,dims,bits,rows,keys", FORMS, ids=str)
def test_every_form(dtype, dims, bits, rows, keys):
    """Rows that end inside a tile, keys inside a step; NaN behind the last key."""
    heads = (2, 1) if dims[1] == 512 else (4, 2)
    made = case(
        heads=heads, dims=dims, q_len=11, k_len=45, dtype=dtype, causal=True, **bits
    )
    plan = made.plan(rows, keys)
    out = made.check(plan, [poisoned(c) for c in made.caches()])
    assert mx.isfinite(out).all().item()


@pytest.mark.parametrize("q_len,k_len", [(1, 1), (17, 3), (1, 40), (16, 64), (33, 65)])
@pytest.mark.parametrize("causal", [True, False])
def test_every_tail(q_len, k_len, causal):
    made = case(q_len=q_len, k_len=k_len, causal=causal)
    out = made.check(caches=[poisoned(c) for c in made.caches()])
    if causal and q_len > k_len:
        assert (out[:, :, : q_len - k_len] == 0).all().item()


@pytest.mark.parametrize("window", [1, 20, 64])
def test_window(window):
    made = case(q_len=20, k_len=150, causal=True, window=window)
    hidden = mx.arange(150)[:, None] < 150 - 20 - window + 1
    made.check(caches=[mx.where(hidden, NAN, a) for a in made.caches()])


MASKS = {
    "bool": sdpa_case.random_mask((2, 1, 20, 70)),
    "heads": sdpa_case.random_mask((3, 1, 70)),
    "nothing": mx.zeros((20, 70), mx.bool_),
    "additive": sdpa_case.random_mask((1, 3, 20, 70), "bfloat16"),
    "view": sdpa_case.random_mask((2, 1, 70, 40)).transpose(0, 1, 3, 2)[:, :, ::2],
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_and_sinks(name):
    made = case(q_len=20, k_len=70, batch=2, mask=MASKS[name], sinks=True, causal=True)
    out = made.check()
    if name == "nothing":
        assert (out == 0).all().item()


def test_lens_end_the_keys_of_each_batch_row():
    lens = [0, 1, 33, 70]
    made = case(q_len=20, k_len=70, batch=4, causal=True, lens=lens)
    there = mx.arange(70)[:, None] < mx.array(lens)[:, None, None, None]
    out = made.check(caches=[mx.where(there, a, NAN) for a in (made.k, made.v)])
    assert (out[0] == 0).all().item()


@pytest.mark.parametrize("window", [0, 40])
def test_keys_are_split_where_threadgroups_are_few(window):
    """Several chunks, of which rows see none of some, are merged with the sinks."""
    made = case(q_len=18, k_len=300, causal=True, sinks=True, window=window)
    plans = made.plan(), made.plan(threadgroups=100)
    chunks = [chunks_of(made.problem, p, 18, 300) for p in plans]
    assert chunks == [1, 2]
    for plan in plans:
        made.check(plan, [poisoned(c) for c in made.caches()])


def test_rows_do_not_see_each_other():
    """Query rows are columns of one multiply: NaN and inf stay in theirs."""
    made = case(q_len=17, k_len=40, causal=False)
    out = made.run()
    for bad in (NAN, float("inf")):
        mine = mx.arange(17)[:, None] == 2
        other = replace(made, q=mx.where(mine, made.q, bad).astype(mx.bfloat16))
        tolerance.assert_bits(other.run()[:, :, 2], out[:, :, 2])


def test_views_are_read_in_place():
    """Strides of a cache and of q, backwards too, and odd places in memory."""
    made = case(q_len=17, k_len=40, causal=False, batch=2)
    out = made.run()

    def moved(a: mx.array) -> mx.array:
        flat = mx.concatenate([mx.zeros(1, a.dtype), a.flatten()])
        mx.eval(flat)
        return flat[1:].reshape(a.shape)

    def by_row(a: mx.array) -> mx.array:
        return mx.contiguous(a.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)

    tolerance.assert_bits(made.run(caches=[moved(a) for a in (made.k, made.v)]), out)
    other = replace(made, q=by_row(made.q))
    tolerance.assert_bits(other.run(caches=[by_row(a) for a in (made.k, made.v)]), out)
    back = [mx.contiguous(a[:, :, ::-1])[:, :, ::-1] for a in (made.k, made.v)]
    tolerance.assert_bits(made.run(caches=back), out)


@pytest.mark.parametrize("name", test_sdpa_prefill.PROBES)
def test_probes(name):
    made = case(q_len=17, k_len=40, causal=False)
    probe = test_sdpa_prefill.PROBES[name]
    q, k, v = (a.astype(mx.bfloat16) for a in probe(made.q, made.k, made.v))
    made = replace(made, q=q, k=k, v=v)
    tolerance.assert_close(made.run(), *made.oracle(), "bfloat16")


def test_the_drop_in_function_takes_them():
    """MLA absorbed: one kv head of 576, values of 512."""
    made = case(heads=(2, 1), dims=(576, 512), q_len=17, k_len=30, causal=True)
    before = ops.served()
    out = attention_ops.sdpa(made.q, made.k, made.v, scale=made.scale, mask="causal")
    ran = [name for name in ops.served() if ops.served()[name] > before.get(name, 0)]
    assert len(ran) == 1 and ran[0].startswith("sdpa_prefill_wide bfloat16 D=576")
    tolerance.assert_close(out, *made.oracle(), "bfloat16")


@pytest.mark.cuda
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("dims", [(512, 512), (576, 512)])
@pytest.mark.parametrize("threadgroups", [0, 10**6])
def test_on_tensor_cores(bits, dims, threadgroups):
    made = case(
        heads=(32, 2), dims=dims, q_len=100, k_len=1001, causal=True,
        **form(bits, bits, 64),
    )  # fmt: skip
    made.check(made.plan(32, 16, threadgroups))
