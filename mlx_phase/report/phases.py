"""Sections 1 to 3: the phases, where they lie on the roofline, which kernels."""

from __future__ import annotations

from typing import Any

from .. import step
from ..step import ATTENTION, Operation, Pass
from . import kernels
from .analysis import Analysis, grouped, side
from .blocks import Column, Lines, Section, Table


def size(count: float) -> str:
    """Bytes with a decimal unit."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def number(value: float) -> str:
    """Three digits at least, never an exponent."""
    return f"{value:,.0f}" if abs(value) >= 99.5 else f"{value:.3g}"


def ms(seconds: float | None) -> str:
    """Seconds as s or ms, three digits."""
    if seconds is None:
        return "-"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{number(seconds * 1e3)} ms"


def phases(a: Analysis) -> Section:
    """Output 1: effective M, K, N, the cache, and which phase owns the time."""
    o, shapes = a.options, a.shapes
    records = []
    for group, members in grouped(a.decode.operations).items():
        if group == ATTENTION:
            continue
        first = members[0].problem
        records.append(
            {
                "operation": group,
                "matrices": " + ".join(dict.fromkeys(m.name for m in members)),
                "K": first.K,
                "N": [m.problem.N for m in members],
                "count": sum(m.count for m in members),
                "format": ", ".join(
                    sorted({str(w.format) for w in shapes.weights if w.operation in
                            {m.name for m in members}})
                ),
                **{f"M_{name}": _rows(p, members[0].name) for name, p in a.phases},
            }
        )  # fmt: skip
    columns = [
        Column("operation", "operation", left=True),
        Column("K", "K"),
        Column("N", "N", lambda n: " + ".join(map(str, n))),
        Column("count", "matrices"),
        *(Column(f"M_{name}", f"M {name}") for name, _ in a.phases),
        Column("format", "weights", left=True),
    ]
    per_token = step.kv_bytes_per_token(shapes, o.kv_bits)
    decode = a.decode
    share = decode.kv_bytes / (decode.kv_bytes + decode.weight_bytes)
    lines = [
        f"{a.name} ({a.source}): {shapes.model_type}, {shapes.layers} layers, hidden "
        f"{shapes.hidden}, {shapes.heads} heads on {shapes.kv_heads} kv heads of "
        f"{shapes.head_dim}, {shapes.parameters / 1e9:.2f} G parameters"
        + (
            f", {shapes.active_experts} of {shapes.experts} experts a token"
            if a.experts
            else ""
        )
        + f", {shapes.dtype} activations.",
        f"Prefill: {o.prompt} prompt tokens of one request, so M = {o.prompt}. Decode: "
        f"batch {o.batch}, so M = {o.batch}."
        + (
            f" Verify: {o.draft} drafted tokens, so M = {o.batch} x {o.draft + 1} = "
            f"{o.batch * (o.draft + 1)}."
            if o.draft
            else ""
        ),
        *(f"Note: {note}." for note in shapes.notes),
    ]
    traffic = [
        f"KV cache: {size(per_token)} a token and request ({o.kv_bits}-bit); at "
        f"context {o.context} a step reads {size(decode.kv_bytes / o.batch)} each, "
        f"{size(decode.kv_bytes)} in all, beside {size(decode.weight_bytes)} of "
        f"weights: the cache is {share:.1%} of the two.",
        _crossings(a),
        *_owner(a),
    ]
    table = Table("matrices", columns, records, "Products of one pass")
    return Section(
        "1. Phase identification", [Lines(lines, False), table, Lines(traffic)]
    )


def _rows(forward: Pass, name: str) -> int:
    return next(o.problem.M for o in forward.operations if o.name == name)


def _crossings(a: Analysis) -> str:
    share = step.attention_share(a.shapes, a.options.prompt)
    crossover = step.attention_crossover(a.shapes)
    half = f"half of it from {crossover} tokens" if crossover else "never half of it"
    return (
        f"Attention is {share:.1%} of the math of this prompt, and {half} "
        "(2 L d N^2 against 2 P N)."
    )


def _owner(a: Analysis) -> list[str]:
    o, one = a.options, a.step(1, batch=1).seconds
    first = a.prefill.seconds
    if first is None or one is None:
        return ["The chip's bandwidth is not known, so no time is given."]
    share = step.request_split(first, o.tokens, one)
    thumb = step.napkin_prefill(a.shapes.parameters, o.prompt, a.chip)
    owner = "decode" if share >= 0.5 else "prefill"
    return [
        f"Who owns the time of a request of {o.prompt} + {o.tokens} tokens: {owner} "
        f"(decode {share:.0%}). Bounds: prefill {ms(first)}, {o.tokens} steps of "
        f"{ms(one)} = {ms(o.tokens * one)}.",
        f"Rule of thumb: prefill 2 P N / peak = {ms(thumb)} with all "
        f"{a.shapes.parameters / 1e9:.2f} G parameters. The bound above leaves out the "
        "embedding, takes one row of the head and active experts, and adds attention.",
    ]


def roofline(a: Analysis) -> Section:
    """Output 2: intensity of each operation against the balance of the chip."""
    chip, records = a.chip, []
    for phase, forward in a.phases:
        total = forward.seconds
        for group, members in grouped(forward.operations).items():
            records.append(_placed(a, phase, group, members, total))
        records.append(
            {
                "phase": phase,
                "operation": "all",
                "flops": forward.flops,
                "bytes": forward.bytes,
                "intensity": forward.flops / forward.bytes,
                "side": side(forward.flops, forward.bytes, a.balance),
                "us": None if total is None else total * 1e6,
                "share": None if total is None else 1.0,
            }
        )
    columns = [
        Column("phase", "phase", left=True),
        Column("operation", "operation", left=True),
        Column("flops", "GFLOP", lambda f: number(f / 1e9)),
        Column("bytes", "MB", lambda b: number(b / 1e6)),
        Column("intensity", "FLOP/B", number),
        Column("side", "bound", left=True),
        Column("us", "at least", lambda us: ms(us / 1e6)),
        Column("share", "share", "{:.0%}"),
    ]
    if a.balance is None:
        head = [
            f"{chip.name}: bandwidth or compute rate is not known ({chip.source}); "
            "intensities hold, times and sides are left out. Name a chip with --chip."
        ]
    else:
        head = [
            f"{chip.name}, {chip.gpu_cores} cores: {chip.bandwidth_gbs:g} GB/s, "
            f"{chip.matmul_tflops:g} TFLOPS half-precision matmul, so the balance is "
            f"{a.balance:.1f} FLOP/byte. Source: {chip.source}.",
            "Times are lower bounds at these full rates, not predictions: no kernel "
            "can be faster, and all are slower.",
        ]
    blocks = [Lines(head, False), Table("roofline", columns, records)]
    one = a.decode.seconds
    if one:
        o = a.options
        blocks.append(
            Lines(
                [
                    f"Upper bounds: {o.batch / one:.1f} tok/s of decode in all at "
                    f"batch {o.batch}, {o.prompt / a.prefill.seconds:.0f} tok/s of "
                    "prefill."
                ]
            )
        )
    return Section("2. Roofline placement", blocks)


def _placed(
    a: Analysis, phase: str, group: str, members: list[Operation], total: float | None
) -> dict[str, Any]:
    flops, moved = sum(m.flops for m in members), sum(m.bytes for m in members)
    us = None if total is None else sum(m.bound.us for m in members)
    return {
        "phase": phase,
        "operation": group,
        "flops": flops,
        "bytes": moved,
        "intensity": flops / moved,
        "side": side(flops, moved, a.balance),
        "us": us,
        "share": None if total is None else us / (total * 1e6),
    }


def selection(a: Analysis) -> Section:
    """Output 3: kernel, tile, split and expected bottleneck of each operation."""
    records = kernels.table(a)
    columns = [
        Column("phase", "phase", left=True),
        Column("operation", "operation", left=True),
        Column("M", "M"),
        Column("kernel", "kernel", left=True),
        Column("tile", "tile", left=True),
        Column("split", "split", left=True),
        Column("launches", "calls"),
        Column("bottleneck", "bound by", left=True),
    ]
    reasons: dict[str, list[str]] = {}
    for r in records:
        reasons.setdefault(r["reason"], []).append(f"{r['phase']} {r['operation']}")
    lines = [f"{', '.join(who)}: {why}." for why, who in reasons.items()]
    lines.append(
        "Stock MLX chooses its own tile and split, shown as a dash. Tile: simdgroups "
        "of a threadgroup x rows of each; of prefill products, rows of x and of W. "
        "Split: simdgroups (x threadgroups) that share the K of a row, in attention "
        "the keys. The plan is what the tables of mlx_phase say; a kernel serves only "
        "after it passed its check on the machine."
    )
    if any(r["kernel"] in ("qmv_pair", "qmv_triple") for r in records):
        lines.append(
            "Blocks that patch can fuse take qmv_qkv for QKV, qmv_add for output and "
            "down and qmv_glu for gate/up, from the same tables."
        )
    formats = {(w.operation, w.format) for w in a.shapes.weights}
    if len(formats) > len({name for name, _ in formats}):
        lines.append(
            "Layers are quantised differently: a shared launch is shown only where all "
            "layers are alike, and patch may join siblings in more of them."
        )
    return Section(
        "3. Kernel selection",
        [
            Table(
                "kernels", columns, records, "Kernels, and their expected bottleneck"
            ),
            Lines(lines),
        ],
    )
