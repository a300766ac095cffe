"""Attention looks at addresses before it reads in vectors, as it does on CUDA.

There a misaligned vector traps. Here the text is told to look too, and the sanitizer
sees every vector that is read.
"""

from dataclasses import replace

import mlx.core as mx
import pytest
import sdpa_case
import tolerance
from sdpa_case import form
from test_sdpa_joint import ends, joint_plan, joint_run, off_16_bytes

from mlx_phase.attention_check import joint
from mlx_phase.launch import matmul

LOOK = "#define ALIGNED(p, n) (((size_t)(p) & ((n) - 1)) == 0)\n"
KINDS = ["split", "matrix", "ahead"]
FORMS = [form(16, 16, 64), form(8, 8, 64), form(4, 4, 64)]


@pytest.fixture(autouse=True)
def looks(monkeypatch):
    load = matmul.load

    def looking(*how):
        text = load(*how)
        return replace(text, name=f"{text.name}_looks", header=LOOK + text.header)

    monkeypatch.setattr(matmul, "load", looking)
    monkeypatch.setenv("MLX_PHASE_SANITIZE", "mem")
    matmul.narrow_loads(False)  # forgets the kernels that were made
    yield
    monkeypatch.undo()
    matmul.narrow_loads(False)


def planned(case: sdpa_case.Case, kind: str):
    if kind == "split":
        return sdpa_case.small_plan(case.problem)
    plan = sdpa_case.matrix_plan(case, keys=32 if kind == "ahead" else 16)
    return replace(plan, ahead=kind == "ahead")


def wider_rows(a: mx.array) -> mx.array:
    """The same in rows of one more element, of which the first is aligned."""
    buffer = mx.pad(a, [(0, 0), (0, 0), (0, 0), (0, 1)])
    mx.eval(buffer)
    return buffer[..., :-1]


def wider_heads(a: mx.array) -> mx.array:
    """The same with heads one element further apart: every other is aligned."""
    B, H, *rest = a.shape
    flat = mx.pad(a.reshape(B, H, -1), [(0, 0), (0, 0), (0, 1)])
    mx.eval(flat)
    shape, step = (B, H, *rest), flat.shape[2]
    return mx.as_strided(flat, shape, (H * step, step, rest[1], 1))


@pytest.mark.parametrize("bits", FORMS, ids=["plain", "8", "4"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_array_may_be_off(kind, bits):
    more = dict(dims=(128, 128), heads=(4, 2), q_len=2, k_len=70, causal=True)
    case = sdpa_case.case(**more, **bits)
    plan = planned(case, kind)
    coded = bits["k_bits"] < 16
    arrays = [case.q, *(a for c in case.caches() for a in (c if coded else [c]))]
    want = case.check(plan)

    def run(some: list[mx.array]):
        q, *rest = some
        caches = [tuple(rest[:3]), tuple(rest[3:])] if coded else rest
        return replace(case, q=q).run(plan, caches)

    for change in (off_16_bytes, wider_rows, wider_heads):
        for which in range(len(arrays)):
            some = [change(a) if i == which else a for i, a in enumerate(arrays)]
            tolerance.assert_bits(run(some), want)
        tolerance.assert_bits(run([change(a) for a in arrays]), want)


@pytest.mark.parametrize("bits", FORMS, ids=["plain", "8", "4"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_array_of_a_joint_cache_may_be_off(kind, bits):
    """Recent keys in the midst of a step, and all of them in one."""
    more = dict(dims=(128, 128), heads=(4, 2), q_len=2, k_len=70, causal=True)
    case = sdpa_case.case(**more, **bits)
    plan = joint_plan(case, kind != "split", **{"keys": 32} if kind == "ahead" else {})
    plan = replace(plan, ahead=kind == "ahead")
    want = case.check(replace(plan, kernel=plan.kernel.removesuffix("_joint")))
    problem = replace(case.problem, joint=True, lens=True)
    for recent in (3, 30):
        arrays, *_ = joint(problem, *case.caches(), ends(case), recent)
        for which in range(len(arrays)):
            some = [off_16_bytes(a) if i == which else a for i, a in enumerate(arrays)]
            have, _ = joint_run(case, plan, recent, some)
            tolerance.assert_bits(have, want)
