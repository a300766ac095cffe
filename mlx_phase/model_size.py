"""Bytes that a decode step reads, and bytes that a device has."""

from __future__ import annotations

import os
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

# How mlx-lm's model arguments name the experts a token uses.
_TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_top_k",
    "moe_topk",
    "top_k_experts",
)
# mx.device_info() keys for memory, in bytes: what the GPU may use, then all of it.
_MEMORY = ("max_recommended_working_set_size", "memory_size", "total_memory")


def device_memory(info: dict[str, Any]) -> int:
    """Bytes of device memory from `mx.device_info()`, else of the machine."""
    for key in _MEMORY:
        if info.get(key):
            return int(info[key])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _nbytes(module: nn.Module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


def _leaves(model: nn.Module) -> list[nn.Module]:
    leaves = tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)
    return [module for _, module in leaves if isinstance(module, nn.Module)]


def bytes_per_token(model: nn.Module) -> int | None:
    """Parameter bytes one decode step reads, without the KV cache.

    Counted from the arrays: all layers and the head; of an embedding one row, or
    the table once where it is the head as well; of experts the share that a token
    uses. None where the number of active experts is not known.
    """
    leaves = _leaves(model)
    embeddings = [
        m for m in leaves if isinstance(m, nn.Embedding | nn.QuantizedEmbedding)
    ]
    rows = max((m["weight"].shape[0] for m in embeddings), default=0)
    has_head = any(
        isinstance(m, nn.Linear | nn.QuantizedLinear) and m["weight"].shape[0] == rows
        for m in leaves
    )
    total = _nbytes(model)
    for module in embeddings:
        count = module["weight"].shape[0]
        if has_head or count < rows:
            total -= _nbytes(module) // count * (count - 1)
    for module in leaves:
        if isinstance(module, SwitchLinear | QuantizedSwitchLinear):
            top_k = _experts_per_token(model)
            if top_k is None:
                return None
            experts = module["weight"].shape[0]
            total -= _nbytes(module) // experts * max(experts - top_k, 0)
    return total


def _experts_per_token(model: nn.Module) -> int | None:
    args = getattr(model, "args", None)
    for name in _TOP_K:
        value = getattr(args, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
