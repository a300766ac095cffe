"""Attention against stock MLX: caches cold and strided, GPU time and wall."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models import base
from rich.table import Table

from .. import attention_ops
from ..arguments import DTYPES
from ..launch.matmul import device_chip
from ..plan_attention import MAX_Q_LEN
from ..plan_prefill_attention import plan_prefill, stays_stock, supports_prefill
from ..problem import Attention, Sdpa
from ..roofline import attention_bytes, kv_bytes
from . import BenchError, gpu_time, record
from .device import Environment
from .kernel_data import TOLERANCE
from .kernel_timer import MAX_COPIES, Buffers, Effort, Op, Timer
from .measure import Clock, copies
from .suite import Case, cell, measure, table_of, trust

# Hq, Hkv, head_dim: llama-8b, qwen3.5-like, gpt-oss.
HEADS = ((32, 8, 128), (16, 2, 256), (64, 8, 64))
K_LENS = (256, 1024, 8192, 32768, 131072)
Q_LENS = (1, 2, 4, 8, 16)
KV_BITS = (16, 8, 4)
GROUP = 64
# mlx-lm's caches grow by so many keys, so a cache is a view of a longer buffer.
STEP = 256
# First and last query rows that are checked.
OUTER = 24


def default_cases(quick: bool) -> Iterator[Attention]:
    """The cases of the suite, most important first."""
    seen: set[Attention] = set()
    main = [(32768, q, HEADS[0], bits) for bits in KV_BITS for q in (1, 4)]
    main += [(32768, 1, HEADS[1], 16), (8192, 1, HEADS[0], 16), (8192, 1, HEADS[0], 8)]
    rest = [
        (k, q, heads, bits)
        for heads in HEADS
        for bits in KV_BITS
        for q in Q_LENS
        for k in K_LENS
    ]
    for k, q, heads, bits in main if quick else main + rest:
        case = make_case(q, k, heads, bits)
        if case not in seen:
            seen.add(case)
            yield case


def make_case(
    q_len: int, k_len: int, heads: tuple[int, ...], bits: int, dtype="bfloat16"
) -> Attention:
    """The last ``q_len`` of ``k_len``; heads: Hq, Hkv, D, and Dv where it differs."""
    bits = 8 * getattr(mx, dtype).size if bits >= 16 else bits
    sizes = (*heads, heads[-1])[:4]
    return Attention(q_len, k_len, *sizes, 1, dtype, bits, GROUP)


def cache_of(p: Attention) -> Buffers:
    """Random keys and values of a case as views of longer buffers, as mlx-lm's are."""
    dtype = getattr(mx, p.dtype)
    room = -(-(p.k_len + 1) // STEP) * STEP

    def side(width: int) -> list[mx.array]:
        a = mx.random.normal((p.batch, p.kv_heads, room, width), dtype=dtype)
        if p.kv_bits >= 16:
            return [a]
        return list(mx.quantize(a, group_size=p.kv_group, bits=p.kv_bits))

    buffers = side(p.head_dim) + side(p.v_head_dim)
    mx.eval(buffers)
    return tuple(a[:, :, : p.k_len] for a in buffers)


def _sides(buffers: Buffers) -> tuple[Any, Any]:
    half = len(buffers) // 2
    k, v = buffers[:half], buffers[half:]
    return (k[0], v[0]) if half == 1 else (k, v)


def _mask(p: Attention) -> str | None:
    return "causal" if p.q_len > 1 else None


def prompt(p: Attention) -> Sdpa | None:
    """The problem of a prompt's kernel; None: so few queries take those of decoding."""
    if p.q_len <= MAX_Q_LEN:
        return None
    sizes = p.q_heads, p.kv_heads, p.head_dim, p.v_head_dim, p.q_len
    form = {"k_bits": p.kv_bits, "v_bits": p.kv_bits}
    form |= {"k_group": p.kv_group, "v_group": p.kv_group}
    return Sdpa(*sizes, dtype=p.dtype, causal=True, **form)


def ours(p: Attention) -> Op:
    """Our kernels as ``op(q, *cache)``, those of a prompt wherever they can.

    RuntimeError where stock would serve queries of decoding.
    """
    if problem := prompt(p):
        chosen = plan_prefill(problem, device_chip())
        call = attention_ops.prepare(problem, chosen)
        return lambda q, *buffers: call(q, *_sides(buffers), scale=p.head_dim**-0.5)

    def op(q: mx.array, *buffers: mx.array) -> mx.array:
        k, v = _sides(buffers)
        options = {"scale": p.head_dim**-0.5, "mask": _mask(p)} | _form(p)
        o = attention_ops.attend(q, k, v, **options)
        if o is None:
            raise RuntimeError(
                attention_ops.route(q, k, v, _mask(p), **_form(p)).reason
            )
        return o

    return op


def stock(p: Attention) -> Op:
    """Stock MLX, or mlx-lm on a quantised cache, as ``op(q, *cache)``.

    Prompts: stock MLX on the dequantised cache, which takes half the memory.
    """

    def op(q: mx.array, *buffers: mx.array) -> mx.array:
        k, v = _sides(buffers)
        scale = p.head_dim**-0.5
        options = {"scale": scale, "mask": _mask(p)}
        if p.kv_bits >= 16:
            return attention_ops.STOCK(q, k, v, **options)
        if p.q_len > MAX_Q_LEN:
            return attention_ops.by_blocks(q, k, v, **options, **_form(p))
        # It scales its queries in place: those of another array object, no copy.
        return base.quantized_scaled_dot_product_attention(
            mx.stop_gradient(q), k, v, scale, _mask(p), p.kv_group, p.kv_bits
        )

    return op


def error_of(op: Op, q: mx.array, buffers: Buffers, p: Attention) -> float:
    """Largest error over the largest right value: outer rows, outer kv heads."""
    at = mx.arange(p.q_len)
    if p.q_len > 2 * OUTER:
        at = mx.concatenate([at[:OUTER], at[-OUTER:]])
    o = op(q, *buffers)[:, :, at].astype(mx.float32)
    k, v = (_plain(a, p) for a in _sides(buffers))
    rows, worst, scale = p.q_heads // p.kv_heads, 0.0, 0.0
    seen = mx.arange(p.k_len) <= at[:, None] + p.k_len - p.q_len
    for head in {0, p.kv_heads - 1}:
        mine = slice(head * rows, (head + 1) * rows)
        scores = q[:, mine, at].astype(mx.float32) * p.head_dim**-0.5
        scores = scores @ k[:, head : head + 1].swapaxes(-1, -2)
        scores = mx.where(seen, scores, -mx.inf)
        right = mx.softmax(scores, axis=-1) @ v[:, head : head + 1]
        worst = max(worst, mx.abs(o[:, mine] - right).max().item())
        scale = max(scale, mx.abs(right).max().item())
    return worst / scale if scale and worst == worst else float("inf")


def _plain(a, p: Attention) -> mx.array:
    if isinstance(a, mx.array):
        return a.astype(mx.float32)
    words, scales, biases = a
    side = (scales.astype(mx.float32), biases.astype(mx.float32))
    return mx.dequantize(words, *side, group_size=p.kv_group, bits=p.kv_bits)


def measure_case(
    p: Attention,
    env: Environment,
    effort: Effort,
    *,
    gpu_events: gpu_time.Recorder | None = gpu_time.cuda_events,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:
    """One row of the suite. BenchError where no kernel of ours serves the case.

    Where stock can't compute it, its columns are null and the note has its error.
    ``gpu_events`` as `suite.measure`.
    """
    count = min(copies(kv_bytes(p), env.cache_bytes), MAX_COPIES)
    shape = (p.batch, p.q_len, p.q_heads, p.head_dim)
    q = mx.random.normal(shape, dtype=getattr(mx, p.dtype)).transpose(0, 2, 1, 3)
    buffers = [cache_of(p) for _ in range(count)]
    plan = planned(p, q, buffers[0])
    ops, notes = {"A": ours(p)}, []
    try:
        mx.eval(stock(p)(q, *buffers[0]))
        ops["B"] = stock(p)
    except (RuntimeError, ValueError) as error:
        # How MLX says that it has no kernel for a shape.
        notes.append(f"stock can't: {str(error).splitlines()[0]}")
    timer = Timer(ops, q, buffers, partial(_link, more=p.head_dim - p.v_head_dim))

    def error(op: Op) -> float:
        return error_of(op, q, buffers[0], p)

    sizes = kv_bytes(p), attention_bytes(p)
    case = Case(describe(p), *sizes, error, TOLERANCE[p.dtype], notes)
    return record.row(
        suite="attention",
        kernel=plan.split()[0],
        heads=_heads(p),
        q_len=p.q_len,
        k_len=p.k_len,
        dtype=p.dtype,
        bits=p.kv_bits,
        group=p.kv_group if p.kv_bits < 16 else 0,
        mode="affine" if p.kv_bits < 16 else "none",
        plan=plan,
        **measure(case, timer, env, effort, gpu_events, clock)["A"],
    )


def planned(p: Attention, q: mx.array, buffers: Buffers) -> str:
    """The plan that `ours` takes, in words; BenchError where there is none."""
    if (problem := prompt(p)) is None:
        found = attention_ops.route(q, *_sides(buffers), _mask(p), **_form(p))
        if found.launch is None:
            raise BenchError(f"{describe(p)}: {found.reason}")
        return found.name
    chip = device_chip()
    if why := supports_prefill(problem):
        raise BenchError(f"{describe(p)}: {why}")
    name = attention_ops.variant(problem, plan_prefill(problem, chip))
    why = stays_stock(problem, chip)
    return f"{name}, not planned here: {why}" if why else name


def _link(o: mx.array, more: int) -> mx.array:
    # The next q: where heads of K are longer, a copy on both sides.
    return mx.concatenate([o, o[..., :more]], axis=-1) if more > 0 else o


def _heads(p: Attention) -> str:
    text = f"{p.q_heads}/{p.kv_heads}x{p.head_dim}"
    return text if p.head_dim == p.v_head_dim else f"{text}/{p.v_head_dim}"


def _form(p: Attention) -> dict[str, int]:
    return {"group_size": p.kv_group, "bits": p.kv_bits} if p.kv_bits < 16 else {}


def describe(p: Attention) -> str:
    """A case in a few words, for messages."""
    cache = f"{p.kv_bits}-bit" if p.kv_bits < 16 else "plain"
    where = f"q_len={p.q_len} k_len={p.k_len}"
    return f"attention {_heads(p)} {p.dtype} {cache} {where}"


def table(rows: list[dict[str, Any]]) -> Table:
    """The rows as a table for the terminal."""
    heads = ("kernel", "heads", "q_len", "k_len", "cache", "us", "stock", "ratio")
    more = ("GB/s", "peak", "wall", "stock wall", "spread", "")
    out = table_of("µs per attention, median", (*heads, *more))
    for r in rows:
        out.add_row(
            *(str(r[name]) for name in ("kernel", "heads", "q_len", "k_len")),
            f"{r['bits']}-bit" if r["group"] else r["dtype"],
            *(cell(r[name]) for name in ("us", "stock_us")),
            cell(r["ratio"], "{:.2f}"),
            cell(r["gbps"], "{:.0f}"),
            cell(r["frac_peak"], "{:.0%}"),
            *(cell(r[n]) for n in ("wall_us", "stock_wall_us")),
            cell(r["spread"], "{:.1%}"),
            trust(r),
        )
    return out


def chosen_cases(options: dict[str, Any], quick: bool) -> list[Attention]:
    """The default cases, or the product of the options that are given."""
    if not any(options.values()):
        return list(default_cases(quick))
    dtypes = options["dtypes"] or ["bfloat16"]
    for dtype in dtypes:
        if dtype not in DTYPES.values():
            raise BenchError(f"--dtypes takes {', '.join(DTYPES.values())}: {dtype}")
    found = [
        make_case(q, k, heads, bits, dtype)
        for heads in options["heads"] or HEADS
        for dtype in dtypes
        for bits in options["bits"] or KV_BITS
        for q in options["q_lens"] or Q_LENS
        for k in options["k_lens"] or K_LENS
        if q <= k
    ]
    if not found:
        raise BenchError("--q-lens are the last of --k-lens: give a longer --k-lens")
    return found
