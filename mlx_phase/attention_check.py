"""Canary of the attention kernels: each matches an oracle here before it may serve."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import mlx.core as mx
import numpy as np

from . import check as checks
from . import gather_check
from .attention_ops import planned, prepare, variant
from .check import FLOOR, Checked, rounded
from .launch.matmul import device_chip
from .plan_attention import MAX_Q_LEN, SdpaPlan
from .plan_prefill_attention import MIN_STEPS, PrefillPlan
from .problem import Gather, Sdpa

# Keys beyond whole chunks, so that tails are reached.
TAIL = 7
# Length of the buffer behind the keys, filled with NaN: nothing there may be read.
SPARE = 9


def small(problem: Sdpa, chosen: SdpaPlan | PrefillPlan) -> Sdpa:
    """The same kernel on two rows of two kv heads, a chunk of keys and a tail."""
    heads, q_len = problem.q_heads // problem.kv_heads, problem.q_len
    if isinstance(chosen, PrefillPlan):
        # Where keys are split into chunks at all, so many that there are two.
        steps = 2 * MIN_STEPS if chosen.threadgroups else 1
        k_len, q_len = steps * chosen.keys + TAIL, MAX_Q_LEN + 1
    else:
        k_len = chosen.chunk + TAIL
    form = {"q_heads": 2 * heads, "kv_heads": 2, "batch": 2}
    return replace(problem, **form, q_len=q_len, k_len=k_len)


def canary(p: Sdpa, seed: int = 0) -> dict[str, object]:
    """Inputs of a problem: arrays as the launcher takes them, and k, v as float32."""
    rng, dtype = np.random.default_rng(seed), getattr(mx, p.dtype)

    def random(*shape: int) -> mx.array:
        return mx.array(rng.normal(size=shape).astype(np.float32)).astype(dtype)

    def cache(width: int, bits: int, group: int):
        # A view of a longer buffer, as mlx-lm keeps its caches.
        kept = random(p.batch, p.kv_heads, p.k_len, width)
        if bits >= 16:
            parts, real = [kept], kept.astype(mx.float32)
        else:
            words, *side = parts = mx.quantize(kept, group_size=group, bits=bits)
            side = [a.astype(mx.float32) for a in side]
            real = mx.dequantize(words, *side, group_size=group, bits=bits)
        views = [_padded(a)[:, :, : p.k_len] for a in parts]
        return views[0] if bits >= 16 else tuple(views), np.array(real)

    # As a model transposes them.
    q = random(p.batch, p.q_len, p.q_heads, p.head_dim).transpose(0, 2, 1, 3)
    k, real_k = cache(p.head_dim, p.k_bits, p.k_group)
    v, real_v = cache(p.v_head_dim, p.v_bits, p.v_group)
    mask = None
    if p.mask == "bool":
        seen = rng.random((p.batch, 1, p.q_len, p.k_len)) < 0.7
        seen[..., -1] = True
        mask = mx.array(seen)
    elif p.mask == "additive":
        mask = random(p.batch, 1, p.q_len, p.k_len)
    lens = [p.k_len - i for i in range(p.batch)]
    return {
        "q": q,
        "k": k,
        "v": v,
        "mask": mask,
        "sinks": random(p.q_heads) if p.sinks else None,
        "lens": mx.array(lens, mx.int32) if p.lens else None,
        "real": (np.array(q.astype(mx.float32)), real_k, real_v),
    }


def caches(p: Sdpa, inputs: dict[str, object]) -> tuple:
    """k, v and lens of `canary` as the launcher takes them."""
    k, v, lens = inputs["k"], inputs["v"], inputs["lens"]
    return joint(p, k, v, lens) if p.joint else (k, v, lens)


def joint(p: Sdpa, k, v, lens: mx.array | list[int], recent: int = 5) -> tuple:
    """Arrays, None and lens of a joint problem with keys and values [B, Hkv, k_len, D],
    or (codes, scales, biases) of each.

    ``recent`` tokens before the step lie beside the cache, or as many as there are.
    Behind the keys of each array is NaN.
    """
    if isinstance(k, mx.array):
        k, v = [k], [v]
    ends = [int(n) for n in lens]
    nows = [max(0, end - p.q_len) for end in ends]
    held = [max(0, now - recent) for now in nows]
    columns = []
    for a in map(mx.concatenate, zip(k, v, strict=True)):
        parts = []
        for i, row in enumerate(a[:, None]):
            at, now = held[i % p.batch], nows[i % p.batch]
            kept = _padded(row[:, :, :at], a.shape[2] - at + SPARE)
            before = _padded(row[:, :, at:now], recent - (now - at) + p.q_len)
            parts.append((kept, before, row[:, :, now : now + p.q_len]))
        columns.append([mx.concatenate(c) for c in zip(*parts, strict=True)])
    arrays = [a for column in zip(*columns, strict=True) for a in column]
    return arrays, None, mx.array([ends, held, nows], mx.int32)


def packed(q: mx.array, kv: mx.array, recent: mx.array, fresh: mx.array) -> tuple:
    """What stands for q, kv and recent of a joint problem where fresh lies behind q."""
    B, Hq, L, D = q.shape
    both = mx.concatenate([mx.contiguous(a).reshape(-1) for a in (q, fresh)])
    return both.reshape(B, Hq + 2 * fresh.shape[1], L, D), kv, recent


def _padded(a: mx.array, spare: int = SPARE) -> mx.array:
    spare = (*a.shape[:2], spare, a.shape[3])
    bad = mx.full(spare, float("nan") if a.dtype != mx.uint32 else 0, a.dtype)
    return mx.concatenate([a, bad], axis=2)


def attention(
    p: Sdpa, inputs: dict[str, object], scale: float, dtype: str | None = None
) -> np.ndarray:
    """The oracle, float32 [B, Hq, q_len, Dv]; with `dtype` each step is rounded to it.

    softmax(scale q k^T + mask) v in float64. A row that sees no key is 0.
    """

    def step(a: np.ndarray) -> np.ndarray:
        a = a.astype(np.float32)
        return (a if dtype is None else rounded(a, dtype)).astype(np.float64)

    q, k, v = (step(a) for a in inputs["real"])
    k, v = (np.repeat(a, p.q_heads // p.kv_heads, axis=1) for a in (k, v))
    scores = step(scale * (q @ np.swapaxes(k, -1, -2)))
    if inputs["mask"] is not None:
        mask = np.array(inputs["mask"].astype(mx.float32))
        scores += np.log(mask, where=mask > 0, out=np.full_like(mask, -np.inf)) if (
            p.mask == "bool"
        ) else mask  # fmt: skip
    last = np.full(p.batch, p.k_len)
    if p.lens:
        last = np.array(inputs["lens"])
    key, row = np.arange(p.k_len), np.arange(p.q_len)[:, None]
    ends = last[:, None, None] - p.q_len + row if p.causal else last[:, None, None] - 1
    seen = key <= ends
    if p.window:
        seen &= key > last[:, None, None] - p.q_len + row - p.window
    scores = np.where(seen[:, None], scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    sink = np.full((p.q_heads, 1, 1), -np.inf)
    if p.sinks:
        sink = np.array(inputs["sinks"].astype(mx.float32))[:, None, None]
    top = np.maximum(top, sink)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(axis=-1, keepdims=True) + np.exp(sink - top)
    weights = step(weights / np.where(total == 0, 1, total))
    return step(weights @ v).astype(np.float32)


def _run(p: Sdpa, chosen: SdpaPlan | PrefillPlan) -> float:
    """Worst error over the allowed one, with several chunks and with one."""
    if isinstance(chosen, PrefillPlan) and chosen.threadgroups:
        # The canary's heads may fill a small chip, where fewer heads have chunks.
        chosen = replace(chosen, threadgroups=1 << 20)
    cases = [(p, chosen), (replace(p, k_len=p.q_len + TAIL), chosen)]
    if (fold := getattr(chosen, "fold", 1)) > 1:
        # Whole runs of chunks, which only long contexts have otherwise.
        many = replace(p, k_len=(fold + 1) * chosen.chunk + TAIL)
        cases.append((many, replace(chosen, threadgroups=1)))
    return max(_error(*case) for case in cases)


def _error(p: Sdpa, chosen: SdpaPlan | PrefillPlan) -> float:
    inputs, scale = canary(p), p.head_dim**-0.5
    k, v, lens = caches(p, inputs)
    more = {"scale": scale, "sinks": inputs["sinks"], "lens": lens}
    if p.joint:
        run = prepare(p, chosen)
        o, kept = run(inputs["q"], k, v, **more)
        if len(k) == 3:
            q, *arrays = packed(inputs["q"], *k)
            both, kept_too = run(q, arrays, v, **more)
            pairs = zip((o, *kept), (both, *kept_too), strict=True)
            if not all(mx.array_equal(*ab, equal_nan=True).item() for ab in pairs):
                return float("inf")
    else:
        o = prepare(p, chosen)(inputs["q"], k, v, mask=inputs["mask"], **more)
    o = np.array(o.astype(mx.float32))
    right = attention(p, inputs, scale)
    dense = attention(p, inputs, scale, p.dtype)
    allowed = 2 * np.abs(dense - right).max() + FLOOR[p.dtype] * np.abs(right).max()
    if o.shape != right.shape or not np.isfinite(o).all():
        return float("inf")
    return float(np.abs(o - right).max() / allowed)


def check(problem: Sdpa, chosen: SdpaPlan | PrefillPlan | None = None) -> Checked:
    """Compile and evaluate the kernel planned for a problem, once per process.

    A chunk of keys and a tail, a part of a chunk, and a run of chunks and a tail
    stand for any k_len. A kernel that does not compile, run or match is switched off
    for the process.
    """
    chosen = chosen or planned(problem, device_chip())
    run = partial(_run, small(problem, chosen), chosen)
    return checks.judged(variant(problem, chosen), problem, run)


def probe(problems: tuple, chosen, name: str) -> str | None:
    """The error of a kernel of any family, or None (hook of `routes.set_probe`)."""
    if isinstance(problems[0], Sdpa):
        return check(problems[0], chosen).error
    if isinstance(problems[0], Gather):
        return gather_check.check(problems[0], chosen).error
    return checks.probe(problems, chosen, name)
