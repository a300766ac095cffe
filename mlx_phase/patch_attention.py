"""The attention modules of a model: which use the kernels, which are left and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from .arguments import DTYPES
from .attention_check import check
from .attention_hooks import attends, attends_by_hand, stock_class
from .patch_report import Report
from .plan_attention import MAX_Q_LEN, supports_sdpa
from .problem import Sdpa

# Names under which model files keep the numbers of heads and their size.
HEADS = ("n_heads", "num_heads", "num_attention_heads", "n_head")
KV_HEADS = ("n_kv_heads", "num_kv_heads", "num_key_value_heads")


def attention_problem(module: nn.Module, dtype: str) -> Sdpa | None:
    """One decode step of an attention module; None where its fields do not say."""
    heads, kv = (_number(module, names) for names in (HEADS, KV_HEADS))
    size = _number(module, ("head_dim",))
    if heads is None or size is None:
        return None
    values = _number(module, ("v_head_dim",)) or size
    return Sdpa(
        q_heads=heads,
        kv_heads=kv or heads,
        head_dim=size,
        v_head_dim=values,
        q_len=1,
        dtype=dtype,
    )


def _number(module: nn.Module, names: tuple[str, ...]) -> int | None:
    found = (vars(module).get(name) for name in names)
    return next((n for n in found if isinstance(n, int) and n > 0), None)


def attention_kernels(
    report: Report, modules: list[nn.Module], dtype: mx.Dtype, rows
) -> list[nn.Module]:
    """The modules that may use the kernels; the report gets what was found.

    ``rows``: values of q_len whose kernels are checked now; others are on first use.
    """
    kinds: Counter[type] = Counter(stock_class(m) for m in modules)
    users = [m for m in modules if attends(stock_class(m))]
    problems = {attention_problem(m, DTYPES[dtype]) for m in users} - {None}
    reasons = {p: supports_sdpa(p) for p in problems}
    for problem in sorted((p for p in problems if not reasons[p]), key=repr):
        for q_len in rows:
            at = _with_rows(problem, q_len)
            if supports_sdpa(at):
                continue
            result = check(at)
            if result not in report.kernels:
                report.kernels.append(result)
    names = ", ".join(
        f"{n} modules ({kind.__name__})" for kind, n in kinds.items() if attends(kind)
    )
    report.attention = "stock: no module of the model uses mx.fast or mlx-lm's function"
    if users:
        longer = "longer prompts where stock is slower"
        report.attention = f"kernels in {names}: {MAX_Q_LEN} queries, {longer}"
    for reason in sorted({r for r in reasons.values() if r}):
        report.notes.append(f"attention that stays stock: {reason}")
    for kind, n in kinds.items():
        if attends_by_hand(kind):
            report.notes.append(
                f"{n} {kind.__name__} compute attention in their own code: stock"
            )
    return users


def _with_rows(problem: Sdpa, q_len: int) -> Sdpa:
    return replace(problem, q_len=q_len, causal=q_len > 1)
