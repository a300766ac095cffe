"""Profiles of MLX's decode attention and ours, and what they predict for chips."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, reduce

import mlx.core as mx

from ..chip import Chip, lookup
from ..counters import LANES, Cost, Prediction, cost, predict
from ..executor import metal_kernel
from ..executor.profile import Profile, profile_kernel
from ..launch import attention
from ..plan_attention import SdpaPlan, plan_sdpa
from ..problem import Sdpa
from . import mlx_metal
from .counters_kernels import CHIPS, DTYPE, GROUP, PerWeight

#: The profiled attention: query heads, KV heads, head_dim, keys.
HEADS = (8, 2, 128, 1024)
#: KV heads and head_dim of the predicted times (4 query heads on each), and keys.
HEADS_TIMED, K_LEN = (8, 128), 8192
Q_LENS = (1, 4, 8)
_NAMES = ("has_mask", "query_transposed", "do_causal", "bool_mask", "float_mask")
_CONSTANTS = dict.fromkeys((*_NAMES, "has_sinks"), False) | {"blocks": 32}
_STRIDES = (
    "size_t(k_strides[1]), size_t(k_strides[2]), size_t(v_strides[1]), "
    "size_t(v_strides[2]), scale[0]"
)
_TWO_PASS = f"""sdpa_vector_2pass_1<T, D>(q, k, v, out, sums, maxs, N, {_STRIDES},
  nullptr, nullptr, 0, 0, 0, (const device T*)q, threads_per_threadgroup,
  thread_position_in_threadgroup, threadgroup_position_in_grid, threadgroups_per_grid,
  thread_index_in_simdgroup);"""

_ONE_PASS = f"""sdpa_vector<T, D>(q, k, v, out, gqa_factor, N, {_STRIDES},
  nullptr, nullptr, 0, 0, 0, (const device T*)q, 0, threadgroup_position_in_grid,
  threadgroups_per_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);"""


def _attention(q_len: int, heads: int = HEADS[0]) -> list[mx.array]:
    _, kv_heads, head_dim, k_len = HEADS
    shapes = (heads, q_len), (kv_heads, k_len), (kv_heads, k_len)
    key = mx.random.key(q_len)
    found = (mx.random.normal((1, *s, head_dim), key=key) for s in shapes)
    return [a.astype(DTYPE) for a in found]


def _per_element(profiles: list[Profile]) -> PerWeight:
    """Work per element of K and V; bytes are those of the caches."""
    _, kv_heads, head_dim, k_len = HEADS
    elements = 2 * kv_heads * head_dim * k_len
    names = ("k", "v", "ks", "kb", "vs", "vb")
    caches = [a for p in profiles for a in p.arrays if a.name in names]
    lines = 128 * sum(a.lines for a in caches)
    work = replace(reduce(Cost.plus, map(cost, profiles)), memory_bytes=lines)
    return PerWeight(work.times(1 / elements), lines / sum(a.nbytes for a in caches))


@cache
def mlx_one_pass(q_len: int) -> PerWeight:
    """MLX's kernel for few keys: a threadgroup for each query head and row."""
    heads, kv_heads, head_dim, k_len = HEADS
    q, k, v = _attention(q_len)
    kernel = metal_kernel(
        name="mlx_sdpa_vector",
        input_names=["q", "k", "v", "gqa_factor", "N", "scale"],
        output_names=["out"],
        source=_ONE_PASS,
        header=mlx_metal.header("sdpa_vector.h", **_CONSTANTS),
        ensure_row_contiguous=False,
    )
    profiles = profile_kernel(
        kernel,
        inputs=[q, k, v, heads // kv_heads, k_len, mx.array([head_dim**-0.5])],
        output_shapes=[(1, heads, q_len, head_dim)],
        output_dtypes=[DTYPE],
        grid=(heads * 1024, q_len, 1),
        threadgroup=(1024, 1, 1),
        template=[("T", DTYPE), ("D", head_dim)],
    )
    return _per_element(profiles)


@cache
def mlx_attention(q_len: int) -> PerWeight:
    """MLX's first pass over the keys (the second is small), 32 blocks of them."""
    heads, kv_heads, head_dim, k_len = HEADS
    q, k, v = _attention(q_len)
    kernel = metal_kernel(
        name="mlx_sdpa_vector_2pass_1",
        input_names=["q", "k", "v", "N", "scale"],
        output_names=["out", "sums", "maxs"],
        source=_TWO_PASS,
        header=mlx_metal.header("sdpa_vector.h", **_CONSTANTS),
        ensure_row_contiguous=False,
    )
    rows, group = (1, heads, q_len, 32), (32, heads // kv_heads, q_len)
    profiles = profile_kernel(
        kernel,
        inputs=[q, k, v, k_len, mx.array([head_dim**-0.5])],
        output_shapes=[(*rows, head_dim), rows, rows],
        output_dtypes=[DTYPE, mx.float32, mx.float32],
        grid=(kv_heads * 32, group[1], 32 * q_len),
        threadgroup=group,
        template=[("T", DTYPE), ("D", head_dim)],
    )
    return _per_element(profiles)


def our_attention(q_len: int, chip: Chip) -> PerWeight:
    """Our kernels under the chip's plan."""
    problem = problem_of(q_len)
    return profiled(problem, plan_sdpa(problem, chip))


def problem_of(q_len: int, heads: int = HEADS[0], bits: int = 16) -> Sdpa:
    """The profiled attention, over plain caches or codes of ``bits``."""
    _, kv_heads, head_dim, _ = HEADS
    dtype = str(DTYPE).rpartition(".")[2]
    form = dict(k_bits=bits, k_group=GROUP, v_bits=bits, v_group=GROUP)
    sizes = heads, kv_heads, head_dim, head_dim, q_len, 1, dtype
    return Sdpa(*sizes, causal=True, **form)


@cache
def profiled(problem: Sdpa, plan: SdpaPlan) -> PerWeight:
    """Our kernels under ``plan``, the merge of chunks included."""
    q, *caches = _attention(problem.q_len, problem.q_heads)
    if problem.k_bits < 16:
        form = dict(group_size=problem.k_group, bits=problem.k_bits)
        caches = [mx.quantize(a, **form) for a in caches]
    run = attention.prepare(problem, plan)
    return _per_element(profile_kernel(run, q, *caches, scale=HEADS[2] ** -0.5))


def kernel_of(q_len: int, chip: Chip) -> str:
    """Name of the kernel that the chip's plan has for the profiled attention."""
    return plan_sdpa(problem_of(q_len), chip).kernel


def table() -> str:
    """Our decode attention and MLX's, per element of K and V."""
    lines = [
        "| q_len | kernel | bytes ÷ ideal | slots per element | FMA units | "
        "slow unit |",
        "| ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    apple, cuda = lookup("M3 Max 40"), lookup("h200")
    for q_len in Q_LENS:
        rows = [(f"ours: {kernel_of(q_len, apple)}", our_attention(q_len, apple))]
        if kernel_of(q_len, cuda) == "sdpa_matrix":
            rows.append(
                ("ours: sdpa_matrix (planned on Hopper)", our_attention(q_len, cuda))
            )
        rows.append(("MLX: sdpa_vector_2pass_1", mlx_attention(q_len)))
        rows.append(("MLX: sdpa_vector", mlx_one_pass(q_len)))
        for name, found in rows:
            work = found.cost.times(LANES)
            lines.append(
                f"| {q_len} | {name} | {found.over_fetch:.3f} | {work.slots:.1f} | "
                f"{work.fma:.1f} | {work.slow:.1f} |"
            )
    return "\n".join(lines)


def time(found: PerWeight, chip: Chip) -> Prediction:
    """Of a layer's attention of HEADS_TIMED over K_LEN keys."""
    kv_heads, head_dim = HEADS_TIMED
    return predict(found.cost.times(2 * kv_heads * head_dim * K_LEN), chip)


def times() -> str:
    """Predicted time by chip: ours and MLX's first pass."""
    head = " | ".join(f"q_len = {q}" for q in Q_LENS)
    lines = [f"| chip | {head} |", "| --- |" + " ---: |" * len(Q_LENS)]
    for name in CHIPS:
        chip, cells = lookup(name), []
        for q_len in Q_LENS:
            mine = time(our_attention(q_len, chip), chip)
            theirs = time(mlx_attention(q_len), chip)
            cells.append(
                f"{mine.us:.0f} ({mine.bound[0].lower()}), MLX {theirs.us:.0f} "
                f"({theirs.bound[0].lower()})"
            )
        lines.append(f"| {chip.name} {chip.gpu_cores} | {' | '.join(cells)} |")
    return "\n".join(lines)
