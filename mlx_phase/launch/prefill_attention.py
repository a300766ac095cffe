"""Launchers of attention with many query rows. They run kernels or raise."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import mlx.core as mx

from ..plan_prefill_attention import PrefillPlan, chunks_of, plan_prefill
from ..problem import Sdpa
from .attention import MASKS, Cache, arguments, form
from .attention_reduce import reduce_launch, reduced
from .matmul import device_chip, kernel

MERGE = 128  # threads that merge the few chunks of a row


def template(problem: Sdpa, p: PrefillPlan, direct: bool) -> list[tuple[str, object]]:
    """Template arguments of the kernel that ``p`` names; direct: there is one chunk."""
    args = form(problem, p.kernel.endswith("_codes"))
    args += [("R", p.rows), ("SG", p.simdgroups), ("BK", p.keys)]
    args += [("MASK", MASKS[problem.mask]), ("SINKS", problem.sinks and direct)]
    return args + [("LENS", problem.lens), ("DIRECT", direct)]


@lru_cache(maxsize=4096)
def _numbers(scale: float, window: int, causal: bool, chunk: int) -> mx.array:
    return mx.array([scale, window, causal, chunk], mx.float32)


def prepare(problem: Sdpa, p: PrefillPlan | None = None) -> Callable[..., mx.array]:
    """``f(q, k, v, *, scale, mask=None, sinks=None, lens=None) -> o``.

    Arguments as those of `attention.prepare`, for any q_len and k_len, whatever the
    problem says; o [B, Hq, q_len, Dv] of q's dtype. ValueError if no kernel supports
    the problem.
    """
    p = p or plan_prefill(problem, device_chip())
    dtype = getattr(mx, problem.dtype)
    B, H, DV = problem.batch, problem.q_heads, problem.v_head_dim
    threads, coded = 32 * p.simdgroups, p.kernel.endswith("_codes")

    @lru_cache(maxsize=256)
    def launch(q_len: int, chunks: int) -> tuple[dict, dict]:
        """Arguments of the kernel and, for several chunks, of the one that merges."""
        direct, rows = chunks == 1, H // problem.kv_heads * q_len
        tiles = -(-rows // p.tile_rows)
        many = [(B, H, q_len, chunks, n) for n in (DV, 2)]
        # [B, q_len, Hq, Dv] in memory is what a model reshapes next, without a copy.
        whole = [(B, q_len, H, DV)]
        first = {
            "template": template(problem, p, direct),
            "grid": (threads * B * problem.kv_heads, tiles, chunks),
            "threadgroup": (threads, 1, 1),
            "output_shapes": [*whole, (1,)] if direct else many,
            "output_dtypes": [dtype if direct else mx.float32, mx.float32],
        }
        return first, {
            **reduce_launch(problem, B * H * q_len, chunks, MERGE, 128),
            "output_shapes": whole,
            "output_dtypes": [dtype],
        }

    def call(
        q: mx.array,
        k: Cache,
        v: Cache,
        *,
        scale: float,
        mask: mx.array | None = None,
        sinks: mx.array | None = None,
        lens: mx.array | None = None,
    ) -> mx.array:
        q_len = q.shape[2]
        k_len = (k if isinstance(k, mx.array) else k[0]).shape[2]
        if not q_len or not k_len:
            return mx.zeros((B, H, q_len, DV), dtype)
        chunks = chunks_of(problem, p, q_len, k_len)
        chunk = -(-k_len // (chunks * p.keys)) * p.keys
        numbers = _numbers(scale, problem.window, problem.causal, chunk)
        inputs = arguments(q, k, v, mask, sinks, lens, numbers, coded)
        first, merge = launch(q_len, chunks)
        out, ml = kernel(p.kernel, False)(inputs=inputs, **first)
        if chunks > 1:
            out = reduced(out, ml, sinks, **merge)
        return out.transpose(0, 2, 1, 3)

    return call
