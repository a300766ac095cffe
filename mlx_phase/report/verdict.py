"""Sections 6 to 8: trade-offs, what to measure, and what would flip a choice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .. import step
from ..chip import lookup
from ..plan import MAX_M, split_k, supports
from ..problem import Matmul
from .analysis import Analysis
from .blocks import Column, Lines, Section, Table
from .phases import ms, number, size
from .serving import up

# Chips that show how the choices move with bandwidth and with matrix hardware.
OTHERS = ("m1", "m1-max", "m2-ultra", "m4-pro", "m4-max", "m5", "m5-max", "h100-sxm")


def trade_offs(a: Analysis) -> Section:
    """Output 6: what is given up for what."""
    o, one = a.options, a.step(1, batch=1)
    lines = []
    active = sum(
        w.N * w.K * w.count * (w.active or 1) for w in a.shapes.weights
    )  # fmt: skip
    sizes = {bits: active * (bits / 8 + 4 / 64) for bits in (4, 8)}
    sizes[16] = active * 2
    listed = ", ".join(f"{size(n)} at {bits} bits" for bits, n in sizes.items())
    lines.append(
        f"Bits against accuracy: a token reads {size(one.weight_bytes)} of weights "
        f"now; affine g64 would be {listed}. Prefill gains nothing from fewer bits "
        "once it is compute-bound: a prefill benchmark alone would call them useless."
    )
    eight = a.step(1, batch=8)
    if one.seconds and eight.seconds:
        gain = 8 * one.seconds / eight.seconds
        lines.append(
            f"Throughput against latency: 8 requests give up to {gain:.1f}x the "
            f"tokens of one, and each waits {eight.seconds / one.seconds:.2f}x as long "
            "for its own; a prompt that is read in between adds its whole chunk."
        )
    lines.append(
        f"Exact rows against freedom: up to M = {MAX_M} a product's row does not "
        "depend on M, so verifying gives it the bits of plain decoding; the price is "
        "that K is split alike for every M, where some M would like another split."
    )
    if o.draft:
        lines.append(
            f"Speculation against waste: {o.draft} drafts cost "
            f"{1 + o.draft} rows of math and one more model's reads; below the "
            "break-even of section 5 it is slower than plain decoding."
        )
    return Section("6. Trade-offs", [Lines(lines)])


def measures(a: Analysis) -> Section:
    """Output 7: what would show whether the choices hold."""
    o = a.options
    # The bench needs weights: a config alone names no model it could load.
    model = "MODEL" if a.name.endswith(".json") else a.name
    bench = f"python -m mlx_phase.bench --model {model}"
    lengths = sorted({512, o.prompt, 4 * o.prompt})
    lines = [
        "Time to first token and inter-token latency apart, p50 and p99, never one "
        f"blended tokens/s: {bench} --prompt-tokens {','.join(map(str, lengths))} "
        f"--tokens {o.tokens} --repeats 5",
        "Decode: achieved bandwidth as a share of peak (MBU). 60 % and more is the aim "
        "where weights dominate; below 40 % look for an idle grid or scattered loads.",
        "Prefill: achieved TFLOPS as a share of peak (MFU), 50 % and more on large "
        "products; below 30 % look at tiles and small K.",
        f"Batches: tokens/s at a fixed p99 latency of {o.itl_ms:g} ms, not unbounded.",
    ]
    if a.decode.seconds:
        lines.append(
            f"A decode step cannot be below {ms(a.decode.seconds)} here, nor this "
            f"prompt below {ms(a.prefill.seconds)}: a smaller figure is an error of "
            "measurement (a cached weight, a lazy graph not evaluated)."
        )
    if o.draft:
        lines.append(
            "Speculation: tokens/s on the wall clock, and accepted tokens a "
            "verification, on your own prompts."
        )
    lines.append(
        f"Workloads: prompt {o.prompt} + {o.tokens} tokens, a short prompt with a long "
        "answer, and the longest context you serve."
    )
    return Section("7. What to measure", [Lines(lines)])


def flips(a: Analysis) -> list[str]:
    """Conditions under which a choice of this report changes, with their numbers."""
    o, shapes = a.options, a.shapes
    found = []
    group = shapes.heads // shapes.kv_heads
    if a.balance is not None:
        context = step.kv_crossover(shapes, a.chip, o.batch, kv_bits=o.kv_bits)
        found.append(
            "Longer context: "
            + (
                f"from {context} cached tokens a request (batch {o.batch}) a step "
                "reads more cache than weights; tune attention and quantise the cache "
                "then, not the products."
                if context
                else "sliding windows keep the cache below the weights at any length."
            )
        )
    if a.knee_rows:
        found.append(
            f"Rows: from M = {a.knee_rows} every product of the layers is "
            "compute-bound. A prompt (or chunk) below that is bound by reading "
            "weights, and a batch or draft above it has no free rows left; chunks of "
            f"{up(a.knee_rows)} are safe."
        )
        if a.experts:
            found[-1] += (
                f" Each of {shapes.experts} experts sees only "
                f"{shapes.active_experts / shapes.experts:.1%} of the rows."
            )
    fma = step.compute_bound_rows(shapes, a.fma_chip(0))
    if fma and fma <= MAX_M and (a.knee_rows or 0) > MAX_M:
        found.append(
            f"Matrix units: decode kernels use none, so from M = {fma} of {MAX_M} they "
            f"are bound by FMA; a kernel on the matrix units is not below M = "
            f"{a.knee_rows}. Let the tuner race stock there."
        )
    rows = MAX_M // o.batch
    found.append(
        f"Larger batch or draft: batch x (drafted + 1) above {MAX_M} leaves the decode "
        f"kernels and loses exact rows; at batch {o.batch} that is "
        + (f"from {rows} drafted tokens on." if rows else "the case already.")
    )
    crossover = step.attention_crossover(shapes)
    if crossover:
        found.append(
            f"Longer prompt: from {crossover} tokens attention is half of prefill's "
            "math; then a faster attention matters more than a faster GEMM."
        )
    if a.chip.arch.startswith("applegpu") and group <= 32:
        found.append(
            f"Stock attention: MLX's vector kernel takes at most 32 query rows a kv "
            f"head, so with {group} heads a kv head up to {32 // group} rows of one "
            "request; a longer draft falls to an unfused one. It splits keys over "
            + (
                "threadgroups from 1024 keys on this class."
                if a.chip.device_class in ("s", "d")
                else "threadgroups from 4096 keys on this class (with grouped heads)."
            )
        )
    found += _split_flip(a)
    found.append(
        "Other hardware: more bandwidth moves decode in proportion and prefill not at "
        "all; matrix units (M5 and later) move prefill only, and raise the rows needed "
        "to be compute-bound. See the table."
    )
    return found


def _split_flip(a: Analysis) -> list[str]:
    """From which N the plan stops splitting K, for the narrowest dense product."""
    dense = [
        o.problem
        for o in a.decode.operations
        if isinstance(o.problem, Matmul)
        and not o.name.startswith("expert")
        and supports(replace(o.problem, M=1)) is None
    ]
    if not dense:
        return []
    p = min(dense, key=lambda q: (q.N, q.K))
    least = split_k(replace(p, N=1 << 20), a.chip)
    wide = step.first(lambda n: split_k(replace(p, N=n), a.chip) == least, 1 << 20)
    if wide is None or wide <= 1:
        return []
    now = "would be split" if p.N < wide else "would not be"
    return [
        f"Narrower matrices: on {a.chip.gpu_cores} cores a product of K = {p.K} splits "
        f"K among simdgroups below N = {wide}; the narrowest here, N = {p.N}, {now} on "
        "its own. Siblings in one launch count together."
    ]


def others(a: Analysis) -> list[dict[str, Any]]:
    """The same request on other chips (bounds)."""
    chips = {c.key: c for c in (a.chip, *map(lookup, OTHERS))}
    records = []
    for chip in chips.values():
        if not chip.bandwidth_gbs:
            continue
        b = replace(a, chip=chip)
        records.append(
            {
                "chip": chip.key,
                "bandwidth_gbs": chip.bandwidth_gbs,
                "balance": b.balance,
                "prefill_ms": b.prefill.seconds * 1e3,
                "step_ms": b.decode.seconds * 1e3,
                "knee_rows": b.knee_rows,
            }
        )
    return records


def flip_section(a: Analysis) -> Section:
    """Output 8: when to run this report again."""
    columns = [
        Column("chip", "chip", left=True),
        Column("bandwidth_gbs", "GB/s", "{:g}"),
        Column("balance", "FLOP/byte", "{:.0f}"),
        Column("prefill_ms", "prefill, ms", number),
        Column("step_ms", "decode step, ms", number),
        Column("knee_rows", "compute-bound from M"),
    ]
    table = Table("chips", columns, others(a), "The same request elsewhere (bounds)")
    return Section("8. What would flip a choice", [Lines(flips(a)), table])
