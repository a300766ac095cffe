"""Prompts with wide heads, MLA's too, against the oracle, launched directly."""

import pytest
import sdpa_case
import test_sdpa_prefill
import tolerance
from test_sdpa_matrix import form

from mlx_phase import attention_ops, ops
from mlx_phase.plan_prefill_attention import PrefillPlan


class Case(test_sdpa_prefill.Case):
    """A call of the wide kernels; narrow heads take few simdgroups."""

    def plan(self, rows: int = 16, keys: int = 16, threadgroups: int = 0):
        simdgroups = self.problem.v_head_dim // 64
        coded = min(self.problem.k_bits, self.problem.v_bits) < 16
        kernel = "sdpa_prefill_wide" + "_codes" * coded
        return PrefillPlan(kernel, rows, simdgroups, keys, threadgroups, "test")


def case(**options) -> Case:
    options = {"heads": (4, 1), "dims": (128, 128)} | options
    return Case(**vars(sdpa_case.case(**options)))


class TestWide(test_sdpa_prefill.Common):
    case = staticmethod(case)
    split = {"k_len": 300}


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
    made.check_form(rows, keys)


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
