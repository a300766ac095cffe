"""Drop-in attention: arguments checked, empty shapes, then a kernel or stock."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx

from .arguments import DTYPES, check_attention, mask_fits
from .chip import Chip
from .launch import attention, prefill_attention
from .launch.matmul import device_chip
from .plan_attention import MAX_Q_LEN, SdpaPlan, plan_sdpa, supports_sdpa
from .plan_prefill_attention import (
    PrefillPlan,
    bucket,
    plan_prefill,
    stays_stock,
    supports_prefill,
)
from .problem import Sdpa
from .routes import ROUTES, Route, empty_route, new_route, stock_route

# Most bytes of float32 scores that one block of a prefill may take if stock keeps them.
SCORE_BYTES = 2**28
# Bound at import, so a hook on the attribute does not call itself.
STOCK = mx.fast.scaled_dot_product_attention

# Routes of calls that stay stock, by what `route` knows a call by.
_LEFT: dict[tuple, Route] = {}
MAX_LEFT = 1024

_MASKS = {None: "none", "causal": "none", mx.bool_: "bool"}

Packed = tuple[mx.array, mx.array, mx.array]


def _launcher(chosen: SdpaPlan | PrefillPlan):
    return prefill_attention if isinstance(chosen, PrefillPlan) else attention


def prepare(problem: Sdpa, chosen: SdpaPlan | PrefillPlan) -> Callable[..., Any]:
    """The launcher of a plan's kernel, see `launch.attention.prepare`."""
    return _launcher(chosen).prepare(problem, chosen)


def planned(problem: Sdpa, chip: Chip) -> SdpaPlan | PrefillPlan:
    """The plan of a problem; ValueError where no kernel computes it."""
    many = problem.q_len > MAX_Q_LEN
    return plan_prefill(problem, chip) if many else plan_sdpa(problem, chip)


# How many chunks there are and a model's scale change these.
_VARIES = ("DIRECT", "FOLD", "SCALE")


def variant(problem: Sdpa, chosen: SdpaPlan | PrefillPlan) -> str:
    """Name of one kernel: equal names are the same text, but for a model's scale, how
    many chunks there are and whether keys lie behind q."""
    given = _launcher(chosen).template(problem, chosen, True)[1:]
    # Zeros are what a kernel does without.
    tile = [f"{k}={int(v)}" for k, v in given if k not in _VARIES and v]
    return " ".join([chosen.kernel, problem.dtype, *tile])


def _kind(mask, q_len: int):
    # What a kernel has to know of a mask. The last query sees every key anyway.
    if mask is None or (q_len == 1 and isinstance(mask, str) and mask == "causal"):
        return None
    return mask if isinstance(mask, str) else mask.dtype


def _key(
    q, k, v, mask, sinks, group_size, bits, lens, joint
) -> tuple[tuple, int, bool]:
    """What a call is known by, k_len apart; k_len; whether it is that of all parts.

    On the path of each decode step: no loops where there is nothing to loop over.
    """
    shape = q.shape
    if shape[2] > MAX_Q_LEN:  # prompts have any length: few routes for all of them
        shape = *shape[:2], bucket(shape[2]), shape[3]
    more = (
        _kind(mask, shape[2]),
        None if sinks is None else (sinks.shape, sinks.dtype),
        lens is None,
        joint,
    )
    if type(k) is mx.array:
        ks, vs = k.shape, v.shape
        dtypes = q.dtype, k.dtype, v.dtype
        return (shape, ks[:2], ks[3:], vs[3:], dtypes, more), ks[2], ks[:3] == vs[:3]
    parts = (*k, *v)
    shapes = [a.shape for a in parts]
    first = shapes[0][:3]
    dtypes = (q.dtype, *[a.dtype for a in parts])
    widths = tuple([s[3:] for s in shapes])
    key = shape, first[:2], widths, dtypes, more, group_size, bits
    return key, first[2], [s[:3] for s in shapes] == [first] * 6


def route(
    q, k, v, mask=None, sinks=None, group_size=64, bits=8, lens=None, joint=False
) -> Route:
    """Check the arguments of an attention and choose who computes it. joint: k and v
    stand for a joint cache.

    Raises one ValueError (TypeError: not an array), before anything is launched, for
    arguments that do not belong together (`check_attention`).
    """
    found = key = None
    try:
        key, k_len, alike = _key(q, k, v, mask, sinks, group_size, bits, lens, joint)
        found = ROUTES.get(key) or _LEFT.get(key)
    except (AttributeError, IndexError, TypeError):
        pass  # the check below says what is wrong
    if found is not None and alike and k_len:
        if type(mask) is not mx.array or mask_fits(mask.shape, (*q.shape[:3], k_len)):
            return found
    check_attention(q, k, v, mask, sinks, group_size, bits)
    found = _choose(key, q, k, v, mask, sinks, group_size, bits, lens, joint)
    if found.name == "stock" and len(_LEFT) < MAX_LEFT:
        _LEFT[key] = found
    return found


def _choose(key, q, k, v, mask, sinks, group_size, bits, lens, joint) -> Route:
    plain = isinstance(k, mx.array)
    B, Hq, q_len, D = q.shape
    first, last = (k, v) if plain else (k[0], v[0])
    Dv = last.shape[3] if plain else last.shape[3] * 32 // bits
    shape = (B, Hq, q_len, Dv)
    if 0 in shape or D == 0 or first.shape[2] == 0:
        return empty_route(shape, q.dtype)
    dtypes = {a.dtype for a in ((q, k, v) if plain else (q, *k[1:], *v[1:]))}
    if sinks is not None:
        dtypes.add(sinks.dtype)
    if len(dtypes) > 1:
        names = sorted(str(d).removeprefix("mlx.core.") for d in dtypes)
        return stock_route(f"mixed dtypes of attention: {', '.join(names)}")
    if q.dtype not in DTYPES:
        return stock_route(f"the kernels take float16, bfloat16, float32: {q.dtype}")
    kind = _kind(mask, q_len)
    if isinstance(kind, mx.Dtype) and kind not in (mx.bool_, q.dtype, mx.float32):
        return stock_route(f"mask of {kind} for queries of {q.dtype}")
    width, group = (8 * q.itemsize, 64) if plain else (bits, group_size)
    problem = Sdpa(
        q_heads=Hq,
        kv_heads=first.shape[1],
        head_dim=D,
        v_head_dim=Dv,
        q_len=q_len if q_len <= MAX_Q_LEN else bucket(q_len),
        batch=B,
        dtype=DTYPES[q.dtype],
        k_bits=width,
        k_group=group,
        v_bits=width,
        v_group=group,
        causal=isinstance(kind, str),
        mask=_MASKS.get(kind, "additive"),
        sinks=sinks is not None,
        lens=lens is not None,
        joint=joint,
    )
    return kernel_route(problem, key)


def kernel_route(problem: Sdpa, key: tuple | None = None) -> Route:
    """The kernel of a problem, whatever its k_len; or stock, with the reason."""
    chip = device_chip()
    if problem.q_len > MAX_Q_LEN:
        reason = supports_prefill(problem) or stays_stock(problem, chip)
    else:
        reason = supports_sdpa(problem)
    if reason:
        return stock_route(reason)
    chosen = planned(problem, chip)
    name = variant(problem, chosen)
    make = partial(prepare, problem, chosen)
    return new_route(key or (problem,), (problem,), chosen, name, make)


def attend(
    q, k, v, *, scale, mask=None, sinks=None, group_size=64, bits=8, lens=None
) -> mx.array | None:
    """The kernels' result, or None where stock has to serve; counted either way.

    Arguments as `sdpa`; lens int32 [B]: keys there are, of the k_len that k holds.
    """
    found = route(q, k, v, mask, sinks, group_size, bits, lens)
    found.calls += 1
    if found.launch is None:
        return None
    array = None if isinstance(mask, str) else mask
    return found.launch(q, k, v, scale=scale, mask=array, sinks=sinks, lens=lens)


def attend_joint(
    q, k, v, arrays, *, scale, mask=None, sinks=None, group_size=64, bits=8, lens
) -> tuple[mx.array, list[mx.array]] | None:
    """The result over a joint cache and its next recent keys; None: no kernel.

    q, k and v: all queries, keys and values, as `sdpa` takes them, of which only the
    form is looked at; arrays, lens: of a joint problem (`launch.attention.prepare`),
    the first what stands in the place of q.
    """
    if isinstance(mask, mx.array):
        return None
    found = route(q, k, v, mask, sinks, group_size, bits, lens, joint=True)
    if found.launch is None:
        return None
    found.calls += 1
    q, *arrays = arrays
    return found.launch(q, arrays, None, scale=scale, sinks=sinks, lens=lens)


def sdpa(
    q: mx.array,
    k: mx.array | Packed,
    v: mx.array | Packed,
    *,
    scale: float,
    mask: str | mx.array | None = None,
    sinks: mx.array | None = None,
    group_size: int = 64,
    bits: int = 8,
) -> mx.array:
    """softmax(scale q k^T + mask) v -> [B, Hq, q_len, Dv] of q's dtype.

    q [B, Hq, q_len, D]; k [B, Hkv, k_len, D] and v [B, Hkv, k_len, Dv] plain, or as
    mlx-lm's quantised cache keeps them: (words, scales, biases), affine. mask: None,
    "causal" (aligned to the last key), bool (True: attend) or added to the scores,
    broadcastable to [B, Hq, q_len, k_len]. sinks [Hq]. A row that sees no key is 0
    where a kernel serves.

    Up to 16 queries have exact rows; more go to a prefill kernel, whose rows are not
    exact, where the plan has one for this chip. What the kernels do not take goes to
    stock, counted with the reason in `ops.served()`. Raises ValueError for arguments
    that do not belong together and for sinks on a quantised cache that no kernel takes.
    """
    options = {"scale": scale, "mask": mask, "sinks": sinks}
    o = attend(q, k, v, **options, group_size=group_size, bits=bits)
    if o is not None:
        return o
    if isinstance(k, mx.array):
        return STOCK(q, k, v, **options)
    return by_blocks(q, k, v, **options, group_size=group_size, bits=bits)


def by_blocks(
    q, k, v, *, scale, mask=None, sinks=None, group_size=64, bits=8, stock=None
) -> mx.array:
    """Stock attention on a quantised cache, dequantised, by blocks of query rows.

    Arguments as `sdpa`. Takes the memory of this layer's plain cache, and scores of
    one block at most where stock keeps them.
    """
    stock: Callable = stock or STOCK
    affine = {"group_size": group_size, "bits": bits}
    k, v = (mx.dequantize(*a, **affine).astype(q.dtype) for a in (k, v))
    (B, Hq, q_len, _), k_len = q.shape, k.shape[2]
    causal = isinstance(mask, str)
    # Queries before the first key see nothing.
    start = max(0, q_len - k_len) if causal else 0
    outs = [mx.zeros((B, Hq, start, v.shape[3]), q.dtype)] if start else []
    step = max(16, SCORE_BYTES // (4 * B * Hq * k_len) // 16 * 16)
    for at in range(start, q_len, step):
        end = min(at + step, q_len)
        rows, keys = slice(at, end), k_len
        block = mask
        if causal:
            keys = k_len - q_len + end
        elif mask is not None and mask.ndim > 1 and mask.shape[-2] > 1:
            block = mask[..., rows, :]
        outs.append(
            stock(
                q[:, :, rows],
                k[:, :, :keys],
                v[:, :, :keys],
                scale=scale,
                mask=block,
                sinks=sinks,
            )
        )
    return outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=2)
