"""Prefill attention under every check of the sanitizer: it has nothing to say."""

import mlx.core as mx
import pytest
import sdpa_case
import tolerance
from test_sdpa_prefill import case
from test_sdpa_prefill_wide import case as wide_case

CASES = {
    "masks_and_window": dict(
        q_len=19, k_len=70, causal=True, window=40, sinks=True, dtype="float32",
        mask=sdpa_case.random_mask((1, 4, 19, 70)),
    ),
    "codes_lens_and_chunks": dict(
        k_bits=8, v_bits=4, v_group=32, heads=(2, 1), q_len=3, k_len=520, lens=(510,),
        causal=True,
    ),
    "uneven_head": dict(dims=(72, 72), q_len=9, k_len=49, batch=2, dtype="float16"),
}  # fmt: skip
WIDE_CASES = {
    "wide_masks_and_window": dict(
        q_len=7, k_len=40, causal=True, window=20, sinks=True,
        mask=sdpa_case.random_mask((1, 4, 7, 40)),
    ),
    "wide_codes_lens_and_chunks": dict(
        k_bits=4, v_bits=8, v_group=32, heads=(2, 1), q_len=3, k_len=270, lens=(260,),
        causal=True,
    ),
    "mla": dict(dims=(576, 512), heads=(2, 1), q_len=5, k_len=20, dtype="float16"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*CASES, *WIDE_CASES])
def test_prefill_attention(name, monkeypatch):
    """Caches are slices of longer ones: what lies between must not be read."""
    monkeypatch.setenv("MLX_PHASE_EXECUTOR", "cpu")
    # The states of a single chunk stay unwritten, and the output of empty ones.
    monkeypatch.setenv("MLX_PHASE_SANITIZE", "all,partial")
    wide = name in WIDE_CASES
    call = wide_case(**WIDE_CASES[name]) if wide else case(**CASES[name])
    caches = call.caches()
    if isinstance(caches[0], mx.array):
        room = [(0, 0), (0, 0), (0, 20), (0, 0)]
        caches = [mx.pad(a, room)[:, :, : a.shape[2]] for a in caches]
    plan = call.plan(threadgroups=1000 * name.endswith("chunks"))
    out = call.run(plan, caches)
    tolerance.assert_close(out, *call.oracle(), call.problem.dtype)
