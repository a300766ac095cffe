"""Oracles for attention and row softmax, float64 NumPy; no mlx_phase, no MLX maths."""

import numpy as np
import ref


def attention(
    q, k, v, scale, mask=None, causal=False, sinks=None, window=0, lens=None
) -> np.ndarray:
    """softmax(scale q k^T + mask) v: float32 [B, Hq, L, Dv] from q [B, Hq, L, D].

    k and v have Hkv heads, each serving Hq / Hkv neighbours. `mask` is bool (True: look
    at the key) or added to the scores. `causal` is aligned to the last key, `window`
    hides all but that many keys up to a row's own. `sinks` [Hq] join the denominator
    alone. `lens` [B]: keys after them are not there. A row that sees no key is 0.
    """
    hidden = causal, window, lens
    return _attention(q, k, v, scale, mask, hidden, sinks, lambda a: a)


def dense(
    q, k, v, scale, mask, causal, sinks, dtype: str, window=0, lens=None
) -> np.ndarray:
    """The same with scores, weights and result rounded to `dtype`, as unfused code."""
    hidden = causal, window, lens
    return _attention(
        q, k, v, scale, mask, hidden, sinks, lambda a: ref.round_to(a, dtype)
    )


def _seen(batch: int, q_len: int, k_len: int, causal, window, lens) -> np.ndarray:
    """Bool [B, 1, L, k_len]: the keys that position and length leave to each row."""
    lens = np.full(batch, k_len) if lens is None else ref.to_numpy(lens)
    key = np.arange(k_len)
    end = lens[:, None, None, None]
    own = end - q_len + np.arange(q_len)[:, None]
    seen = np.broadcast_to(key < end, (batch, 1, q_len, k_len))
    if causal:
        seen = seen & (key <= own)
    return seen & (key > own - window) if window else seen


def _attention(q, k, v, scale, mask, hidden, sinks, rounded) -> np.ndarray:
    q, k, v = (ref.to_numpy(a).astype(np.float64) for a in (q, k, v))
    if hidden[2] is not None:  # what lies behind may be NaN
        there = _seen(len(k), 1, k.shape[2], False, 0, hidden[2])[:, :, 0, :, None]
        k, v = np.where(there, k, 0), np.where(there, v, 0)
    repeat = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, repeat, axis=1), np.repeat(v, repeat, axis=1)
    scores = rounded(scale * (q @ np.swapaxes(k, -1, -2))).astype(np.float64)
    seen = _seen(len(k), *scores.shape[-2:], *hidden)
    scores = np.where(seen, scores, -np.inf)
    if mask is not None:
        mask = ref.to_numpy(mask)
        scores = scores + (np.where(mask, 0, -np.inf) if mask.dtype == bool else mask)
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        sinks = ref.to_numpy(sinks).astype(np.float64)[:, None, None]
        top = np.maximum(top, sinks)
    top = np.where(np.isfinite(top), top, 0)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks - top)
    weights = rounded(weights / np.where(total == 0, 1, total))
    return rounded(weights.astype(np.float64) @ v).astype(np.float32)


def softmax(x) -> np.ndarray:
    """Softmax over the last axis, float32."""
    x = ref.to_numpy(x).astype(np.float64)
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return (e / e.sum(axis=-1, keepdims=True)).astype(np.float32)


def logsumexp(x) -> np.ndarray:
    """log(sum(exp(x))) over the last axis, float32."""
    x = ref.to_numpy(x).astype(np.float64)
    top = x.max(axis=-1, keepdims=True)
    return (top[..., 0] + np.log(np.exp(x - top).sum(axis=-1))).astype(np.float32)
