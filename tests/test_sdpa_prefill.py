"""Attention of many query rows against the oracle, launched directly: no fallback."""

from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import pytest
import sdpa_case
import tolerance
from test_sdpa_matrix import form, poisoned

from mlx_phase.launch import prefill_attention
from mlx_phase.plan_prefill_attention import PrefillPlan, chunks_of
from mlx_phase.problem import Sdpa

NAN = float("nan")


class Case(sdpa_case.Case):
    """A call of the prefill kernels."""

    def run(self, plan: PrefillPlan | None = None, caches: list | None = None):
        call = prefill_attention.prepare(self.problem, plan or self.plan())
        k, v = caches or self.caches()
        return call(self.q, k, v, scale=self.scale, **self.extras)

    def plan(self, rows: int = 8, keys: int = 32, threadgroups: int = 0):
        coded = min(self.problem.k_bits, self.problem.v_bits) < 16
        kernel = "sdpa_prefill" + "_codes" * coded
        return PrefillPlan(kernel, rows, 2, keys, threadgroups, "test")

    def check_form(self, rows: int, keys: int) -> None:
        """Nothing behind the last key is read, and no row is left out."""
        caches = [poisoned(c) for c in self.caches()]
        assert mx.isfinite(self.check(self.plan(rows, keys), caches)).all().item()


def case(**options) -> Case:
    return Case(**vars(sdpa_case.case(**options)))


SIZES = [(1, 1), (17, 17), (17, 3), (1, 40), (16, 64), (33, 65), (40, 96)]

MASKS = {
    "bool": sdpa_case.random_mask((2, 1, 20, 70)),
    "heads": sdpa_case.random_mask((4, 1, 70)),
    "nothing": mx.zeros((20, 70), mx.bool_),
    "additive": sdpa_case.random_mask((1, 4, 20, 70), "bfloat16"),
}

PROBES = {
    "huge scores": lambda q, k, v: (q * 300, k, v),
    "equal scores": lambda q, k, v: (q * 0, k, v),
    "one key": lambda q, k, v: (q, k * (1 + 30 * (mx.arange(40) == 7)[:, None]), v),
    "tiny values": lambda q, k, v: (q, k, v * 1e-30),
}  # fmt: skip


class Common:
    """What both kernels of prompts have to do; ``case`` makes a call of one."""

    case: Callable[..., "Case"]
    split: dict  # k_len that is two chunks where threadgroups are few, and heads

    @pytest.mark.parametrize("q_len,k_len", SIZES)
    @pytest.mark.parametrize("causal", [True, False])
    def test_every_tail(self, q_len, k_len, causal):
        made = self.case(heads=(3, 1), q_len=q_len, k_len=k_len, causal=causal)
        out = made.check(caches=[poisoned(c) for c in made.caches()])
        if causal and q_len > k_len:
            assert (out[:, :, : q_len - k_len] == 0).all().item()

    @pytest.mark.parametrize("window", [1, 20, 64])
    def test_window(self, window):
        made = self.case(q_len=20, k_len=150, causal=True, window=window)
        hidden = mx.arange(150)[:, None] < 150 - 20 - window + 1
        caches = [mx.where(hidden, NAN, a) for a in made.caches()]
        made.check(caches=caches)

    @pytest.mark.parametrize("name", MASKS)
    def test_masks_and_sinks(self, name):
        made = self.case(
            q_len=20, k_len=70, batch=2, mask=MASKS[name], sinks=True, causal=True
        )
        out = made.check()
        if name == "nothing":
            assert (out == 0).all().item()

    def test_a_mask_may_be_a_view(self):
        mask = sdpa_case.random_mask((2, 1, 70, 40)).transpose(0, 1, 3, 2)[:, :, ::2]
        self.case(
            q_len=20, k_len=70, batch=2, mask=mask, sinks=True, causal=True
        ).check()

    def test_lens_end_the_keys_of_each_batch_row(self):
        lens = [0, 1, 33, 70]
        made = self.case(q_len=20, k_len=70, batch=4, causal=True, lens=lens)
        there = mx.arange(70)[:, None] < mx.array(lens)[:, None, None, None]
        out = made.check(caches=[mx.where(there, a, NAN) for a in (made.k, made.v)])
        assert (out[0] == 0).all().item()

    def test_rows_do_not_see_each_other(self):
        """Query rows are columns of one multiply: NaN and inf stay in theirs."""
        made = self.case(heads=(3, 1), q_len=17, k_len=40, causal=False)
        out = made.run()
        for bad in (NAN, float("inf")):
            mine = mx.arange(17)[:, None] == 2
            other = replace(made, q=mx.where(mine, made.q, bad).astype(mx.bfloat16))
            tolerance.assert_bits(other.run()[:, :, 2], out[:, :, 2])

    @pytest.mark.parametrize("name", PROBES)
    def test_probes(self, name):
        made = self.case(heads=(3, 1), q_len=17, k_len=40, causal=False)
        q, k, v = (a.astype(mx.bfloat16) for a in PROBES[name](made.q, made.k, made.v))
        made = replace(made, q=q, k=k, v=v)
        tolerance.assert_close(made.run(), *made.oracle(), "bfloat16")

    @pytest.mark.parametrize("window", [0, 40])
    def test_keys_are_split_where_threadgroups_are_few(self, window):
        """Several chunks, of which rows see none of some, are merged with the sinks."""
        made = self.case(q_len=18, causal=True, sinks=True, window=window, **self.split)
        plans = made.plan(), made.plan(threadgroups=100)
        chunks = [chunks_of(made.problem, p, 18, self.split["k_len"]) for p in plans]
        assert chunks == [1, 2]
        for plan in plans:
            made.check(plan, [poisoned(c) for c in made.caches()])

    def test_views_are_read_in_place(self):
        """Strides of a cache and of q, and places that are no multiple of 16 bytes."""
        made = self.case(heads=(3, 1), q_len=17, k_len=40, causal=False, batch=2)
        out = made.run()

        def moved(a: mx.array, shift: int) -> mx.array:
            flat = mx.concatenate([mx.zeros(shift, a.dtype), a.flatten()])
            mx.eval(flat)
            return flat[shift:].reshape(a.shape)

        def by_row(a: mx.array) -> mx.array:
            return mx.contiguous(a.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)

        for shift in (1, 8):
            tolerance.assert_bits(
                made.run(caches=[moved(a, shift) for a in (made.k, made.v)]), out
            )
        other = replace(made, q=by_row(made.q))
        tolerance.assert_bits(
            other.run(caches=[by_row(a) for a in (made.k, made.v)]), out
        )

    def test_views_may_run_backwards(self):
        mask = sdpa_case.random_mask((1, 4, 17, 40))
        made = self.case(q_len=17, k_len=40, mask=mask)
        arrays = (
            mask[:, ::-1, ::-1, ::-1],
            *(a[:, :, ::-1] for a in (made.q, made.k, made.v)),
        )

        def run(mask, q, *caches) -> mx.array:
            return replace(made, q=q, extras={"mask": mask}).run(caches=[*caches])

        tolerance.assert_bits(run(*arrays), run(*map(mx.contiguous, arrays)))


class TestPrefill(Common):
    case = staticmethod(case)
    split = {"heads": (2, 1), "k_len": 600}


FORMS = [
    ("bfloat16", (64, 64), form(16, 16, 64), 8, 32),
    ("float16", (72, 72), form(16, 16, 64), 16, 16),
    ("float32", (112, 112), form(16, 16, 64), 8, 32),
    ("bfloat16", (192, 128), form(16, 16, 64), 8, 16),
    ("bfloat16", (64, 64), form(8, 8, 64), 16, 32),
    ("float16", (128, 64), form(4, 4, 32), 8, 32),
    ("bfloat16", (64, 64), form(16, 4, 32), 8, 64),
    ("float32", (64, 64), form(8, 16, 32), 8, 32),
]


@pytest.mark.parametrize("dtype,dims,bits,rows,keys", FORMS, ids=str)
def test_every_form(dtype, dims, bits, rows, keys):
    """Rows that end inside a tile, keys inside a step; NaN behind the last key."""
    made = case(dims=dims, q_len=19, k_len=45, dtype=dtype, causal=True, **bits)
    made.check_form(rows, keys)


@pytest.mark.parametrize("q_len, k_len", [(20, 0), (0, 20), (0, 0)])
def test_no_keys_or_no_queries(q_len, k_len):
    run = prefill_attention.prepare(Sdpa(4, 2, 192, 128, q_len=20))
    k, v = (mx.zeros((1, 2, k_len, d), mx.bfloat16) for d in (192, 128))
    out = run(mx.ones((1, 4, q_len, 192), mx.bfloat16), k, v, scale=1.0)
    assert out.shape == (1, 4, q_len, 128) and out.dtype == mx.bfloat16
    assert not out.any().item()


@pytest.mark.cuda
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("threadgroups", [0, 10**6])
def test_on_tensor_cores(bits, dim, threadgroups):
    made = case(
        heads=(8, 2), dims=(dim, dim), q_len=300, k_len=1001, causal=True,
        **form(bits, bits, 64),
    )  # fmt: skip
    rows = 16 if dim <= 128 else 8
    made.check(made.plan(rows, 32, threadgroups))
