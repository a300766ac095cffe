"""A whole model pass: which phase owns the time, what binds it, what would help.

All times are lower bounds of the roofline: each operation takes at least the longer
of its memory and its compute time, and operations follow each other. None is a
prediction of what a chip reaches.

PROFILE in the docstrings is the text "Profile Prefill vs Decode" (fanout.sh,
inference-eng, 12-05); its worked numbers are tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .chip import Chip
from .problem import Attention, Matmul
from .roofline import (
    Bound,
    attention_bytes,
    attention_flops,
    bound,
    kv_bytes,
    matmul_bytes,
    matmul_flops,
    weight_bytes,
)
from .shapes import GROUPS, ModelShapes, attention, matmuls

ATTENTION = "attention"


@dataclass(frozen=True)
class Operation:
    """``count`` equal products or attentions of a pass; figures are of all of them."""

    name: str
    problem: Matmul | Attention
    count: int
    flops: int
    bytes: int
    bound: Bound


@dataclass(frozen=True)
class Pass:
    """All operations of one forward pass of ``rows`` rows."""

    rows: int
    operations: tuple[Operation, ...]

    def _sum(self, field: str, attention_too: bool = True) -> int:
        chosen = (o for o in self.operations if attention_too or o.name != ATTENTION)
        return sum(getattr(o, field) for o in chosen)

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return self._sum("flops")

    @property
    def bytes(self) -> int:
        """Bytes moved: weights, cache and activations."""
        return self._sum("bytes")

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights alone."""
        return sum(
            weight_bytes(o.problem) * o.count
            for o in self.operations
            if isinstance(o.problem, Matmul)
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache alone."""
        return sum(
            kv_bytes(o.problem) * o.count
            for o in self.operations
            if isinstance(o.problem, Attention)
        )

    @property
    def attention_flops(self) -> int:
        """Floating-point operations of attention alone."""
        return self.flops - self._sum("flops", attention_too=False)

    @property
    def seconds(self) -> float | None:
        """Sum of the operations' lower bounds; None on an unknown chip."""
        times = [o.bound.us for o in self.operations]
        return None if None in times else sum(times) / 1e6


def forward(
    shapes: ModelShapes,
    chip: Chip,
    q_len: int,
    k_len: int,
    batch: int = 1,
    *,
    head_rows: int | None = None,
    kv_bits: int = 16,
) -> Pass:
    """One pass of ``batch`` requests with ``q_len`` new of ``k_len`` positions each.

    ``head_rows`` is the rows of the head, by default all: prefill needs only one a
    request, and mlx-lm evaluates none in the chunks before the last.
    """
    rows = q_len * batch
    found = []
    for name, product, count in matmuls(shapes, rows, head_rows):
        if product.M:
            f, b = matmul_flops(product) * count, matmul_bytes(product) * count
            found.append(Operation(name, product, count, f, b, bound(f, b, chip)))
    for a, count in attention(shapes, q_len, k_len, batch, kv_bits=kv_bits):
        f, b = attention_flops(a) * count, attention_bytes(a) * count
        found.append(Operation(ATTENTION, a, count, f, b, bound(f, b, chip)))
    return Pass(rows, tuple(found))


def prefill(
    shapes: ModelShapes, chip: Chip, prompt: int, chunk: int | None = None, **options
) -> list[Pass]:
    """Passes that read a prompt: one, or one for each ``chunk`` tokens."""
    step, passes = chunk or prompt, []
    for start in range(0, prompt, step):
        end = min(prompt, start + step)
        head = int(end == prompt)
        passes.append(
            forward(shapes, chip, end - start, end, head_rows=head, **options)
        )
    return passes


def decode(
    shapes: ModelShapes, chip: Chip, context: int, batch: int = 1, rows: int = 1, **more
) -> Pass:
    """A step after ``context`` positions; ``rows`` is 1, or drafted tokens + 1."""
    return forward(shapes, chip, rows, context + rows, batch, **more)


def kv_bytes_per_token(shapes: ModelShapes, kv_bits: int = 16) -> int:
    """Bytes that one more position adds: 2 * layers * kv_heads * head_dim * bytes.

    Layers with a sliding window count until the window is full.
    """
    pairs = attention(shapes, 1, 1, kv_bits=kv_bits)
    return sum(kv_bytes(a) * count for a, count in pairs)


def napkin_prefill(parameters: float, tokens: int, chip: Chip) -> float | None:
    """Seconds of 2 * parameters * tokens / peak, as PROFILE does in part 2.

    Counts the embedding as if it were multiplied, and no attention.
    """
    if not chip.matmul_tflops:
        return None
    return 2 * parameters * tokens / (chip.matmul_tflops * 1e12)


def napkin_decode(weights: float, cache: float, chip: Chip) -> float | None:
    """Seconds of (weight bytes + KV bytes) / bandwidth, as PROFILE in 2 and 6."""
    if not chip.bandwidth_gbs:
        return None
    return (weights + cache) / (chip.bandwidth_gbs * 1e9)


def attention_share(shapes: ModelShapes, tokens: int) -> float:
    """Share 0..1 of attention in the math of a prompt, the head left out.

    attention / (attention + 2 P N), P the parameters of the layers: PROFILE, 3.
    """
    pairs = attention(shapes, tokens, tokens)
    quadratic = sum(attention_flops(a) * count for a, count in pairs)
    return quadratic / (quadratic + 2 * shapes.layer_parameters * tokens)


def first(test: Callable[[int], bool], limit: int = 1 << 24) -> int | None:
    """Smallest n in 1..limit that passes a monotone ``test``; None if none does."""
    if not test(limit):
        return None
    low, high = 0, limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if test(middle) else (middle, high)
    return high


def attention_crossover(shapes: ModelShapes) -> int | None:
    """Prompt length from which attention is half the math or more: N = P / (L d)."""
    return first(lambda n: attention_share(shapes, n) >= 0.5)


def kv_crossover(shapes: ModelShapes, chip: Chip, batch: int = 1, **more) -> int | None:
    """Context from which a decode step reads more cache than weights."""

    def more_cache(context: int) -> bool:
        step = decode(shapes, chip, context, batch, **more)
        return step.kv_bytes >= step.weight_bytes

    return first(more_cache)


def compute_bound_rows(shapes: ModelShapes, chip: Chip) -> int | None:
    """Rows M from which each product of the layers is bound by compute on ``chip``.

    The router of experts is left out: it is too small to matter.
    """

    def computes(M: int) -> bool:
        return all(
            bound(matmul_flops(p), matmul_bytes(p), chip).side == "compute"
            for name, p, _ in matmuls(shapes, M)
            if name not in (*GROUPS["router"], "lm_head")
        )

    return first(computes, 1 << 17)


def request_split(prefill_s: float, tokens: int, step_s: float) -> float:
    """Share 0..1 of decode in a request: PROFILE, 5, where the wall time goes."""
    total = prefill_s + tokens * step_s
    return tokens * step_s / total if total else 0.0


def expected_tokens(acceptance: float, drafted: int) -> float:
    """Mean tokens a verification yields if each draft is accepted independently.

    1 + a + ... + a^k: the accepted prefix and the target's own next token.
    """
    return sum(acceptance**i for i in range(drafted + 1))


def break_even(
    cost_ratio: float, drafted: int, draft_cost: float = 0.0
) -> float | None:
    """Acceptance 0..1 from which speculation gains; None if it never does.

    ``cost_ratio`` is the time of a step of drafted + 1 rows over that of one row,
    ``draft_cost`` the time of one drafted token over that of a one-row step.
    """
    need = cost_ratio + drafted * draft_cost
    if need >= drafted + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        enough = expected_tokens(middle, drafted) >= need
        low, high = (low, middle) if enough else (middle, high)
    return high


def best_draft(
    costs: Sequence[tuple[int, float]], acceptance: float, draft_cost: float
) -> tuple[int, float]:
    """(drafted tokens, speed-up) that is best for (drafted, cost ratio) pairs."""
    gains = [
        (expected_tokens(acceptance, k) / (ratio + k * draft_cost), k)
        for k, ratio in costs
    ]
    gain, k = max(gains)
    return k, gain
