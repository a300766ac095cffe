"""The checklist of "Optimize Prefill Vs Decode Kernels", from the same numbers."""

from __future__ import annotations

from typing import Any

from ..plan import MAX_M
from ..step import ATTENTION
from . import kernels
from .analysis import Analysis, grouped, side
from .blocks import Column, Section, Table
from .phases import number, size
from .serving import drafts, largest_chunk, strategy
from .verdict import flips

DONE, PART, OPEN = "yes", "in part", "no"


def answers(a: Analysis) -> list[dict[str, Any]]:
    """One record a question: question, answer (yes, in part, no), why."""
    rows = [
        _shapes, _intensity, _split, _attention, _block_m, _cache, _batching, _draft,
        _bottleneck, _metrics, _dequant, _flips,
    ]  # fmt: skip
    keys = ("number", "question", "answer", "why")
    return [dict(zip(keys, (i, *row(a)), strict=True)) for i, row in enumerate(rows, 1)]


def section(a: Analysis) -> Section:
    """The checklist as a section."""
    columns = [
        Column("number", "#"),
        Column("question", "question", left=True),
        Column("answer", "answer", left=True),
        Column("why", "because", left=True),
    ]
    return Section("Review checklist", [Table("checklist", columns, answers(a))])


def _shapes(a: Analysis):
    parts = [f"{name} M = {p.rows}" for name, p in a.phases]
    return (
        "Prefill and decode apart, with M, K, N each?",
        DONE,
        f"{', '.join(parts)}; K and N in section 1",
    )


def _intensity(a: Analysis):
    question = "Intensity against the machine balance, per product?"
    if a.balance is None:
        return question, PART, "intensities yes; the chip's balance is not known"
    decode = a.decode.flops / a.decode.bytes
    prefill = a.prefill.flops / a.prefill.bytes
    return (
        question,
        DONE,
        f"balance {a.balance:.0f}; decode {number(decode)}, prefill "
        f"{number(prefill)} FLOP/byte",
    )


def _split(a: Analysis):
    question = "Decode products split K to fill the cores?"
    records = [
        r
        for r in kernels.table(a)
        if r["phase"] == "decode" and not r["operation"].startswith(ATTENTION)
    ]
    ours = [r for r in records if not r["kernel"].startswith("stock")]
    if not ours:
        return question, OPEN, f"all run stock: {records[0]['reason']}"
    split = [r["operation"] for r in ours if r["split"] != "none"]
    why = (
        f"plan splits {', '.join(split)}"
        if split
        else f"no product is narrow enough for {a.chip.gpu_cores} cores to need it"
    )
    stock = [r["operation"] for r in records if r["kernel"].startswith("stock")]
    if stock:
        return question, PART, f"{why}; stock decides for {', '.join(stock)}"
    return question, DONE, why


def _attention(a: Analysis):
    record = next(
        r
        for r in kernels.table(a)
        if r["phase"] == "decode" and r["operation"].startswith(ATTENTION)
    )
    ours = record["kernel"].startswith("sdpa")
    if ours or "2-pass" in record["kernel"]:
        return (
            "Decode attention splits the cache and merges with LSE?",
            DONE,
            f"{record['kernel']}: {record['reason']}",
        )
    return (
        "Decode attention splits the cache and merges with LSE?",
        OPEN,
        record["reason"],
    )


def _block_m(a: Analysis):
    return (
        "Tile rows for decode aligned to the matrix units?",
        DONE if a.decode.rows <= MAX_M else PART,
        f"no matrix units are used up to M = {MAX_M}: each row is a dot product, so "
        "there is no tile to pad; above, tiles of 32 or 64 rows",
    )


def _cache(a: Analysis):
    d = a.decode
    return (
        "Cache bytes per step and request, against the weights?",
        DONE,
        f"{size(d.kv_bytes / a.options.batch)} a request at context "
        f"{a.options.context}; {size(d.kv_bytes)} in all beside "
        f"{size(d.weight_bytes)} of weights",
    )


def _batching(a: Analysis):
    question = "Chunked or separate, justified by the latency target?"
    choice, lines = strategy(a)
    if a.decode.seconds is None:
        return question, PART, lines[0]
    size_ = f" of {largest_chunk(a)}" if choice == "chunked" else ""
    return question, DONE, f"{choice}{size_}, for {a.options.itl_ms:g} ms; section 4"


def _draft(a: Analysis):
    question = "Kernel adjusted for M = k + 1, break-even stated?"
    if not a.options.draft:
        return question, DONE, "no speculation (--draft-tokens 0)"
    record = next(
        (r for r in drafts(a) if r["drafted"] == a.options.draft), None
    )  # fmt: skip
    if record is None:
        return question, PART, "the chip's rates are not known, so no break-even"
    at = record["break_even"]
    shown = "never gains" if at is None else f"break-even at {at:.0%} accepted"
    served = "decode kernels" if record["M"] <= MAX_M else "prefill or stock"
    return question, DONE, f"M = {record['M']} runs {served}; {shown} (bound)"


def _bottleneck(a: Analysis):
    question = "Dominant bottleneck of each kernel?"
    if a.balance is None:
        return question, OPEN, "the chip's rates are not known"
    found = {
        group: side(
            sum(m.flops for m in members), sum(m.bytes for m in members), a.balance
        )
        for group, members in grouped(a.decode.operations).items()
    }
    kinds = sorted(set(found.values()))
    return question, DONE, f"decode: {', '.join(kinds)}; all in section 3"


def _metrics(a: Analysis):
    return (
        "TTFT, latency p50/p99 and throughput apart?",
        DONE,
        "python -m mlx_phase.bench reports them apart; this report measures nothing",
    )


def _dequant(a: Analysis):
    question = "Dequantisation fused into the product?"
    formats = {w.format.mode for w in a.shapes.weights}
    if formats == {"none"}:
        return question, DONE, "weights are plain: nothing to dequantise"
    why = "in registers, inside the K loop; no buffer of plain weights is written"
    if a.decode.rows > MAX_M:
        why = f"M = {a.decode.rows}: once in each tile, ours or stock MLX's"
    return question, DONE, why


def _flips(a: Analysis):
    return (
        "Conditions that flip a choice?",
        DONE,
        f"{len(flips(a))} conditions in section 8",
    )
