"""Sections 4 and 5: batches of requests, and speculation."""

from __future__ import annotations

from typing import Any

from .. import step
from ..plan import MAX_M
from .analysis import TILE_ROWS, Analysis
from .blocks import Column, Lines, Section, Table
from .kernels import exact_rows
from .phases import ms, number, size

BATCHES = (1, 2, 4, 8, 16, 32, 64)
CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
# Prompt tokens that mlx-lm 0.32 takes at once (prefill_step_size).
MLX_LM_CHUNK = 2048
# Published times of M rows: what, source, M -> time in any one unit.
PUBLISHED_COSTS = (
    (
        "llama.cpp Q4_0, one 4096 x 14336 matrix, M4 Pro",
        "ggml-org/llama.cpp issue 25250, PR 25377",
        {1: 137.6, 2: 249.7, 4: 526.4, 5: 777.0, 8: 1023.2},
    ),
    (
        "MLX, 70B 4-bit g64, whole forward, M5 Max",
        "ml-explore/mlx PR 3791",
        {1: 75.9, 3: 84.8, 5: 112.7, 8: 170.8, 12: 241.5},
    ),
)


def up(rows: int) -> int:
    """The next multiple of the tiles' rows."""
    return -(-rows // TILE_ROWS) * TILE_ROWS


def stall(a: Analysis, chunk: int) -> float | None:
    """Bound of a mixed step: a decode of the batch, and a chunk of one prompt."""
    decode, more = a.decode.seconds, a.chunk_seconds(chunk)
    return None if decode is None or more is None else decode + more


def largest_chunk(a: Analysis) -> int:
    """The largest multiple of a tile whose mixed step keeps the latency; 0: none."""
    limit = -(-a.options.prompt // TILE_ROWS)
    allowed = a.options.itl_ms / 1e3
    over = step.first(lambda n: (stall(a, n * TILE_ROWS) or 0) > allowed, limit)
    return TILE_ROWS * ((over - 1) if over else limit)


def strategy(a: Analysis) -> tuple[str, list[str]]:
    """(chunked or separate, why), for the batch and the latency that are allowed."""
    o = a.options
    tiles = (
        f"A chunk is a multiple of {TILE_ROWS} rows, the largest tile of MLX's GEMM "
        "and attention, or the last tile of each chunk is partly empty"
    )
    whole = stall(a, o.prompt)
    if whole is None:
        return "separate", [
            "The chip's rates are not known: nothing to weigh a chunk with. Separate "
            "batches need no chunk size.",
            f"{tiles}.",
        ]
    knee = a.knee_rows
    lines = []
    if o.batch == 1:
        choice = "separate"
        lines.append(
            "Separate: with one request nothing decodes while a prompt is read, so a "
            f"chunk has no latency to protect. mlx-lm still cuts at {MLX_LM_CHUNK} "
            "tokens, which bounds memory."
        )
    elif whole * 1e3 <= o.itl_ms:
        choice = "separate"
        lines.append(
            f"Separate: a whole prompt of {o.prompt} tokens holds the other requests "
            f"up for {ms(whole)} at least, within the {o.itl_ms:g} ms allowed."
        )
    elif (chunk := largest_chunk(a)) == 0:
        choice = "separate"
        lines.append(
            f"Separate, on another queue or device: even {TILE_ROWS} tokens beside a "
            f"decode step take {ms(stall(a, TILE_ROWS))}, above {o.itl_ms:g} ms."
        )
    else:
        choice = "chunked"
        total, alone = a.chunked_seconds(chunk), a.prefill.seconds
        lines.append(
            f"Chunked, {chunk} tokens at most: a whole prompt would hold the other "
            f"requests up for {ms(whole)}, above the {o.itl_ms:g} ms allowed; with "
            f"{chunk} a mixed step takes {ms(stall(a, chunk))} at least, and the "
            f"prompt {ms(total)} in place of {ms(alone)} ({total / alone:.2f}x)."
        )
        if knee and chunk < knee:
            lines.append(
                f"That is below {knee} rows, where the products turn compute-bound: "
                "each chunk is bound by reading the weights again. Fewer bits help."
            )
    if knee:
        lines.append(
            f"From {knee} rows on, every product of the layers is bound by compute: "
            f"chunks of {up(knee)} and more read the weights at no cost of time."
        )
    lines.append(f"{tiles}.")
    lines.append(
        "These are bounds; leave room and set the size from a measured step "
        "(section 7). mlx-lm's batch generator puts one chunk between decode steps."
    )
    return choice, lines


def batching(a: Analysis) -> Section:
    """Output 4: chunked or separate, the chunk, and what a batch gains."""
    o = a.options
    choice, lines = strategy(a)
    blocks: list[Any] = [Lines(lines)]
    if a.decode.seconds is not None:
        sizes = {c for c in CHUNKS if c < o.prompt} | {o.prompt}
        if choice == "chunked":
            sizes.add(min(largest_chunk(a), o.prompt))
        blocks.append(_chunks(a, sorted(sizes)))
        blocks.append(_batches(a))
    return Section("4. Batching strategy", blocks)


def _chunks(a: Analysis, sizes: list[int]) -> Table:
    records = []
    alone = a.prefill.seconds
    for chunk in sizes:
        total = a.chunked_seconds(chunk)
        records.append(
            {
                "chunk": chunk,
                "chunks": -(-a.options.prompt // chunk),
                "mixed_ms": stall(a, chunk) * 1e3,
                "prompt_ms": total * 1e3,
                "over_whole": total / alone,
                "kept": stall(a, chunk) * 1e3 <= a.options.itl_ms,
            }
        )
    columns = [
        Column("chunk", "chunk"),
        Column("chunks", "chunks"),
        Column("mixed_ms", "mixed step, ms", number),
        Column("prompt_ms", "whole prompt, ms", number),
        Column("over_whole", "against one pass", "{:.2f}x"),
        Column(
            "kept", f"within {a.options.itl_ms:g} ms", lambda k: "yes" if k else "no"
        ),
    ]
    return Table("chunks", columns, records, "Chunks of the prompt (bounds)")


def _batches(a: Analysis) -> Table:
    records = []
    without = {b: _without_cache(a, b) for b in BATCHES}
    for b in BATCHES:
        s = a.step(1, batch=b)
        gain = b * a.step(1, batch=1).seconds / s.seconds
        records.append(
            {
                "batch": b,
                "step_ms": s.seconds * 1e3,
                "kv_bytes": s.kv_bytes,
                "gain": gain,
                "gain_without_cache": b * without[1] / without[b],
                "kernel": "decode kernels" if b <= MAX_M else "prefill or stock",
            }
        )
    columns = [
        Column("batch", "batch"),
        Column("step_ms", "step, ms", number),
        Column("kv_bytes", "cache read", size),
        Column("gain", "tok/s gain", "{:.1f}x"),
        Column("gain_without_cache", "gain without cache", "{:.1f}x"),
        Column("kernel", "dense products", left=True),
    ]
    title = f"Batch of decode steps at context {a.options.context} (bounds)"
    return Table("batches", columns, records, title)


def _without_cache(a: Analysis, batch: int) -> float:
    operations = a.step(1, batch=batch).operations
    return sum(o.bound.us for o in operations if o.name != step.ATTENTION)


def drafts(a: Analysis) -> list[dict[str, Any]]:
    """Records of speculation: rows, cost, break-even, for several draft lengths."""
    o = a.options
    found = []
    for k in sorted({1, 2, 3, 4, 5, 7, 15, 31} | {o.draft}):
        ratio, rows = a.cost_ratio(k + 1), o.batch * (k + 1)
        if k == 0 or ratio is None:
            continue
        tokens = step.expected_tokens(o.acceptance, k)
        found.append(
            {
                "drafted": k,
                "M": rows,
                "cost_ratio": ratio,
                "break_even": step.break_even(ratio, k, o.draft_cost),
                "expected_tokens": tokens,
                "speed_up": tokens / (ratio + k * o.draft_cost),
                "exact": exact_rows(a, rows),
            }
        )
    return found


def _curve(what: str, source: str, times: dict[int, float]) -> str:
    """A published cost curve, and its break-even with a draft that costs nothing."""
    parts = []
    for M, time in times.items():
        at = step.break_even(time / times[1], M - 1)
        shown = "never gains" if at is None else f"break-even {at:.0%}"
        if M > 1:
            parts.append(f"M = {M} costs {time / times[1]:.2f}x ({shown})")
    return f"Published, {what} ({source}), free draft: {'; '.join(parts)}."


def percent(value: float) -> str:
    """A share as whole percent."""
    return f"{value:.0%}"


def speculation(a: Analysis) -> Section:
    """Output 5: what changes when M jumps from 1 to k + 1, and the break-even."""
    o = a.options
    records = drafts(a)
    title = "5. Speculative decoding"
    if not records:
        return Section(
            title,
            [Lines(["The chip's rates are not known: no cost curve, no break-even."])],
        )
    columns = [
        Column("drafted", "drafted"),
        Column("M", "M"),
        Column("cost_ratio", "cost / cost of 1 row", "{:.2f}"),
        Column("break_even", "break-even acceptance", percent),
        Column("expected_tokens", f"tokens a step at {o.acceptance:.0%}", "{:.2f}"),
        Column("speed_up", "speed-up at most", "{:.2f}x"),
        Column("exact", "products exact", lambda e: "yes" if e else "no"),
    ]
    costs = [(r["drafted"], r["cost_ratio"]) for r in records]
    k, gain = step.best_draft(costs, o.acceptance, o.draft_cost)
    lines = [
        "k drafted tokens are verified in one step of k + 1 rows a request (mlx-lm). "
        "Weights are read once for all rows, so the bound stays flat until math takes "
        f"over: FMA up to M = {MAX_M}, where decode kernels serve, matrix units above.",
        f"Assumed, not measured: each draft accepted with {o.acceptance:.0%}, a "
        f"drafted token costs {o.draft_cost:.2f} of a decode step (--acceptance, "
        f"--draft-cost). Best of the table then: {k} drafted, {gain:.2f}x at most.",
        f"Kernels: up to M = {MAX_M} the same decode kernel with fewer rows a "
        "simdgroup and the same split of K, so a product's rows keep their bits; "
        "above, prefill kernels or stock MLX, whose rows do not.",
        "A dash is a break-even above 100 %: it never gains. Rejected drafts cost: "
        "measure acceptance on your own prompts before trusting a table.",
    ]
    if a.experts:
        lines.append(
            "Experts: more rows reach more experts, so verification reads more "
            "weights; the cost ratio counts it for even routing."
        )
    name = "Cost curve of this model (bounds)"
    return Section(
        title,
        [
            Lines(lines),
            Table("drafts", columns, records, name),
            Lines([_curve(*row) for row in PUBLISHED_COSTS]),
        ],
    )
