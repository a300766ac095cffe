"""The matrices and the attention of a model, read from its config dict alone.

Needs no weights and no mlx. What a config does not tell (another structure, an
unknown quantisation) raises ModelError rather than give wrong numbers. Norms and
biases are left out: below 0.1 % of the bytes of a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .model_error import ModelError
from .problem import Attention, Matmul
from .shapes_config import (
    KINDS,
    Format,
    Kind,
    dtype_of,
    formats,
    is_tied,
    read,
    whole,
)

# Matrices of an operation that a table shows as one row, in the order of a layer.
GROUPS = {
    "QKV": ("q_proj", "k_proj", "v_proj", "qkv_proj"),
    "output": ("o_proj",),
    "router": ("router", "shared_gate"),
    "gate/up": ("gate_proj", "up_proj", "gate_up_proj"),
    "down": ("down_proj",),
    "expert gate/up": ("expert gate_proj", "expert up_proj"),
    "expert down": ("expert down_proj",),
    "head": ("lm_head",),
}


@dataclass(frozen=True)
class Weight:
    """``count`` equal matrices [N, K] (one a layer) of one operation.

    ``experts`` of 0 is a dense matrix; otherwise each of the ``count`` layers has
    that many, of which a token uses ``active``.
    """

    operation: str
    N: int
    K: int
    format: Format
    count: int
    experts: int = 0
    active: int = 0

    @property
    def parameters(self) -> int:
        """Weights of all layers and experts (scales and biases not counted)."""
        return self.N * self.K * self.count * max(self.experts, 1)


@dataclass(frozen=True)
class ModelShapes:
    """Shapes of a decoder. ``windows`` is (window or None, layers) pairs;
    ``embedding`` is read one row a token, or as the head where ``tied``."""

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    dtype: str
    weights: tuple[Weight, ...]
    embedding: Weight
    windows: tuple[tuple[int | None, int], ...]
    experts: int = 0
    active_experts: int = 0
    max_context: int | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def parameters(self) -> int:
        """All weights, the embedding table counted once."""
        total = sum(weight.parameters for weight in self.weights)
        return total + (0 if self.tied else self.embedding.parameters)

    @property
    def layer_parameters(self) -> int:
        """Weights that each token multiplies in the layers: no embedding, no head;
        of experts the active ones."""
        return sum(
            w.N * w.K * w.count * (w.active if w.experts else 1)
            for w in self.weights
            if w.operation != "lm_head"
        )


def model_shapes(config: Mapping[str, Any]) -> ModelShapes:
    """Shapes of an mlx-lm or Hugging Face ``config.json`` (as a dict).

    Raises ModelError if the structure can't be told from the config.
    """
    c, kind, notes = read(config)
    layers, hidden = whole(c, "num_hidden_layers"), whole(c, "hidden_size")
    heads = whole(c, "num_attention_heads")
    kv_heads = whole(c, "num_key_value_heads", default=heads)
    if c.get("head_dim") is None and kind.head_dim is None and hidden % heads:
        raise ModelError(
            f"hidden_size = {hidden} is not a multiple of {heads} heads, and the "
            "config has no head_dim"
        )
    head_dim = whole(c, "head_dim", default=kind.head_dim or hidden // heads)
    vocab = whole(c, "vocab_size")
    tied, dtype, of = is_tied(c, kind), dtype_of(config, c, notes), formats(config)
    q, kv = heads * head_dim, kv_heads * head_dim
    rows = [("q_proj", q, hidden), ("k_proj", kv, hidden), ("v_proj", kv, hidden)]
    if kind.fused_qkv:
        rows = [("qkv_proj", q + 2 * kv, hidden)]
    rows.append(("o_proj", hidden, q))
    found: list[Weight] = []
    for name, N, K in rows:
        found += _grouped(name, N, K, f"self_attn.{name}", range(layers), of)
    experts = active = 0
    intermediate = whole(c, "intermediate_size", default=0)
    sparse: list[int] = []
    if kind.experts:
        experts, active = whole(c, kind.experts), whole(c, kind.active)
        sparse = _sparse_layers(c, kind, layers)
        found += _experts(c, kind, hidden, sparse, experts, active, of)
    dense = [i for i in range(layers) if i not in set(sparse)]
    if dense:
        if not intermediate:
            raise ModelError("config has no intermediate_size: is it a language model?")
        found += _mlp(kind, hidden, intermediate, "", "mlp", dense, of)
    table_format = of("model.embed_tokens", hidden)
    embedding = Weight("embedding", vocab, hidden, table_format, 1)
    head = table_format if tied else of("lm_head", hidden)
    found.append(Weight("lm_head", vocab, hidden, head, 1))
    return ModelShapes(
        model_type=str(c["model_type"]),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocab=vocab,
        tied=tied,
        dtype=dtype,
        weights=tuple(found),
        embedding=embedding,
        windows=_windows(c, kind, layers),
        experts=experts,
        active_experts=active,
        max_context=whole(c, "max_position_embeddings", default=0) or None,
        notes=tuple(notes),
    )


def _grouped(name, N, K, path, layers, of, experts=0, active=0) -> list[Weight]:
    """One Weight per format: layers of a model may be quantised differently."""
    kinds = Counter(of(f"model.layers.{i}.{path}", K) for i in layers)
    return [Weight(name, N, K, f, n, experts, active) for f, n in kinds.items()]


def _mlp(kind, hidden, inner, label, path, layers, of, experts=0, active=0):
    """Matrices of an MLP: gate and up (in one where fused), down."""
    rows = {
        "gated": [("gate_proj", inner, hidden), ("up_proj", inner, hidden)],
        "fused": [("gate_up_proj", 2 * inner, hidden)],
        "plain": [("up_proj", inner, hidden)],
    }[kind.mlp]
    rows.append(("down_proj", hidden, inner))
    found: list[Weight] = []
    for name, N, K in rows:
        where = f"{path}.{kind.names.get(name, name)}"
        found += _grouped(label + name, N, K, where, layers, of, experts, active)
    return found


def _sparse_layers(c: Mapping[str, Any], kind: Kind, layers: int) -> list[int]:
    """Layers with experts."""
    if not kind.some_dense:
        return list(range(layers))
    step = whole(c, "decoder_sparse_step", default=1)
    plain = c.get("mlp_only_layers") or []
    return [i for i in range(layers) if i not in plain and (i + 1) % step == 0]


def _experts(c, kind: Kind, hidden, layers, experts, active, of) -> list[Weight]:
    if not 0 < active <= experts:
        raise ModelError(f"{active} of {experts} experts for a token: bad config")
    inner = whole(c, "moe_intermediate_size", default=0) or whole(
        c, "intermediate_size"
    )
    block = kind.block
    found = _grouped("router", experts, hidden, f"{block}.{kind.router}", layers, of)
    path = f"{block}.{kind.expert_path}"
    found += _mlp(kind, hidden, inner, "expert ", path, layers, of, experts, active)
    if kind.shared:
        shared = whole(c, "shared_expert_intermediate_size")
        where = f"{block}.shared_expert"
        found += _mlp(kind, hidden, shared, "", where, layers, of)
        found += _grouped("shared_gate", 1, hidden, f"{where}_gate", layers, of)
    return found


def _windows(
    c: Mapping[str, Any], kind: Kind, layers: int
) -> tuple[tuple[int | None, int], ...]:
    """Sliding windows as mlx-lm applies them: by layer_types or by a pattern."""
    window = whole(c, "sliding_window", default=kind.window or 0)
    if not window or not kind.slides:
        return ((None, layers),)
    types = c.get("layer_types")
    if types is None and kind.pattern:
        step = whole(c, "sliding_window_pattern", default=kind.pattern)
        full = sum((i + 1) % step == 0 for i in range(layers))
    else:
        types = types or ["full_attention"] * layers
        full = sum(kind_ == "full_attention" for kind_ in types[:layers])
    pairs = ((None, full), (window, layers - full))
    return tuple(pair for pair in pairs if pair[1])


def matmuls(
    shapes: ModelShapes, M: int, head_rows: int | None = None
) -> list[tuple[str, Matmul, int]]:
    """(operation, product, how many of it) for ``M`` rows through the model.

    ``head_rows`` is the rows of the head (default M; prefill needs one a request).
    Experts: ``batch`` is the number of different experts that M rows reach if routing
    is even and independent, E(1 - (1 - k/E)^M), and M their mean rows, rounded up.
    """
    if M < 1:
        raise ValueError(f"M must be 1 or more, got {M}")
    rows = []
    for w in shapes.weights:
        m, batch = M, 1
        if w.operation == "lm_head":
            m = M if head_rows is None else head_rows
        elif w.experts:
            reached = w.experts * (1 - (1 - w.active / w.experts) ** M)
            batch = min(w.experts, max(w.active, round(reached)))
            m = -(-M * w.active // batch)
        f = w.format
        product = Matmul(m, w.N, w.K, shapes.dtype, f.bits, f.group_size, f.mode, batch)
        rows.append((w.operation, product, w.count))
    return rows


def attention(
    shapes: ModelShapes,
    q_len: int,
    k_len: int,
    batch: int = 1,
    *,
    kv_bits: int = 16,
    kv_group: int = 64,
) -> list[tuple[Attention, int]]:
    """(attention of a layer, layers like it) for ``q_len`` new of ``k_len`` positions,
    ``batch`` requests. Raises ValueError if q_len is not in 1..k_len."""
    if not 1 <= q_len <= k_len:
        raise ValueError(f"q_len must be in 1..k_len = {k_len}, got {q_len}")
    if batch < 1:
        raise ValueError(f"batch must be 1 or more, got {batch}")
    return [
        (
            Attention(
                q_len, k_len, shapes.heads, shapes.kv_heads, shapes.head_dim,
                shapes.head_dim, batch, shapes.dtype, kv_bits, kv_group, window,
            ),
            count,
        )
        for window, count in shapes.windows
    ]  # fmt: skip


__all__ = ["GROUPS", "KINDS", "ModelShapes", "Weight", "attention", "matmuls"]
__all__ += ["model_shapes"]
