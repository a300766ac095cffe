"""Put a model's matmul layers and attention on the kernels, and back.

No weight changes. Layers and attention modules of this one model change their class;
for attention, two functions of mlx and mlx_lm are hooked while a model is patched
(`attention_hooks`). What is not replaced keeps running stock and is reported.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from . import check as checks
from . import ops, step_patch, tune_store
from .arguments import DTYPES
from .attention_check import probe
from .attention_hooks import mark, marked, unmark
from .class_swap import train_along
from .executor import executor_name
from .fuse import fuse, fuse_gates, gate_again, gates, launches, unfuse
from .launch.matmul import device_chip
from .layers import (
    PLAIN,
    QUANTIZED,
    STOCK,
    adopt,
    adopted,
    forget_routes,
    release,
    set_exact,
)
from .parents import adopted_parent
from .patch_attention import attention_kernels
from .patch_experts import expert_layers, fuse_experts, is_expert
from .patch_report import Layer, Report, Unpatched
from .patch_scan import activations_of, format_of, named, problem_of, why_left
from .plan import MAX_M
from .plan_attention import MAX_Q_LEN
from .plan_matrix import first_rows
from .problem import Matmul

# Row counts checked at patch time: decode, and the first that shares weights. The
# others are checked on first use (check="all": now).
CHECK_ROWS = (1, 2)
TUNE = ("cached", "off")


def validate(model, linear=True, check=True, tune="off", **flags) -> None:
    """TypeError unless model is a module, ValueError for an unknown option."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}, not an mlx.nn.Module; pass the model "
            "itself (mlx_lm.load returns a pair: model, tokenizer)"
        )
    if linear not in (True, False, "all"):
        raise ValueError(f'linear={linear!r}; use True, False or "all"')
    if check not in (True, False, "all"):
        raise ValueError(f'check={check!r}; use True, False or "all"')
    if tune not in TUNE:
        raise ValueError(f"tune={tune!r}; use one of {TUNE}")
    for name, value in flags.items():
        if value not in (True, False):
            raise ValueError(f"{name}={value!r}; use True or False")


def patch(
    model: nn.Module,
    *,
    linear: bool | str = True,
    attention: bool = True,
    exact: bool = True,
    steps: bool = True,
    check: bool | str = True,
    tune: str = "cached",
) -> Report:
    """Put the matmul layers of `model` on the kernels; `unpatch` reverts it.

    linear: True replaces quantised layers, experts, tied quantised heads; "all" plain
    nn.Linear and tied nn.Embedding heads too. attention: up to 16 queries on the
    kernels, over plain and quantised caches; False leaves it stock. Prompts of more
    rows go to prefill kernels where the plan has one for this chip, and are never
    exact. exact: a row of x gets the same bits for every M <= 16, so a stored plan
    moves a shape to stock for all M or for none; False takes matrix units from some M
    on, where the plan says that they are faster (attention stays exact). Each model
    keeps its own. steps: replay one trace of the whole decode step, with fused blocks,
    where the model and its caches allow (`step_patch`); needs linear and attention.
    check: run each kernel once against a reference before it may serve (M = 1 and 2 and
    one query now, others on first use; "all": every M and number of queries now).
    Fused blocks are compared with stock in any case, and if checked whole steps. tune:
    "cached" takes the plan that `python -m mlx_phase.tune` stored for this device, for
    all of the process; "off".
    The kernels have no gradient: after model.train() stock serves until model.eval().
    Layers keep what they made of their weights: give new ones by assignment (update,
    load_weights), not by changing an array in place or mx.compile(inputs=model.state).
    Numbers beside them (the scale of attention, a rotary embedding's) are read now.

    Idempotent. Raises TypeError if model is no mlx.nn.Module and ValueError for an
    unknown option; whatever is raised, the model is left as it was, but that steps
    which an earlier patch traced may run layer by layer until the next one.
    """
    flags = {"attention": attention, "exact": exact, "steps": steps}
    validate(model, linear, check, tune, **flags)
    modules = named(model)
    report = Report(type(model).__name__, executor_name(), device_chip().name)
    report.exact, report.checked = exact, bool(check)
    stored = tune_store.activate(tune)
    report.tune = stored.status
    report.notes += tune_store.notes(stored, exact)
    wanted = {**(QUANTIZED if linear else {}), **(PLAIN if linear == "all" else {})}
    activations = activations_of(modules)
    todo: list[tuple[Layer, nn.Module, Matmul]] = []
    for path, m in modules:
        if is_expert(m):
            continue
        kind = STOCK.get(type(m), type(m))
        layer = Layer(path, kind.__name__, "", None, adopted(m))
        if kind in wanted or adopted(m):
            layer = replace(layer, format=format_of(m))
            found = problem_of(m, activations)
            if isinstance(found, str):
                report.left.append(replace(layer, reason=found))
            else:
                todo.append((layer, m, found))
        elif reason := why_left(m, linear):
            layer = replace(layer, format=format_of(m), reason=reason)
            report.left.append(layer)
    _note_mixed(report, todo, activations)
    bad: dict[Matmul, str] = {}
    if check:
        rows = range(1, MAX_M + 1) if check == "all" else CHECK_ROWS
        bad = _check(report, {p for *_, p in todo}, rows)
    # Stays on: another model that is patched without checks must not end it.
    if check and ops.set_probe(probe):
        forget_routes()
    q_lens = (range(1, MAX_Q_LEN + 1) if check == "all" else (1,)) if check else ()
    users = []
    if attention:
        users = attention_kernels(report, [m for _, m in modules], activations, q_lens)
    else:
        report.attention = "stock (attention=False)"
    chosen = []
    for layer, m, problem in todo:
        if problem in bad:
            report.left.append(replace(layer, reason=bad[problem]))
        else:
            report.replaced.append(layer)
            chosen.append(m)
    chosen += expert_layers(report, modules, activations, linear, check)
    swapped = _swap(chosen)
    before = {id(m) for _, m in modules if marked(m)}
    stepping = {id(m) for _, m in modules if step_patch.installed(m)}
    was = [(m, m._exact) for _, m in modules if adopted(m)]
    parents = {id(m) for _, m in modules if adopted_parent(m)}
    launching = gates(m for _, m in modules)
    try:
        for m, _ in was:
            set_exact(m, exact)
        if not exact:
            _note_matrix(report, [p for _, m, p in todo if adopted(m)])
        attend(modules, users)
        problems = {id(m): p for _, m, p in todo if adopted(m)}
        fuse(report, [m for _, m in modules], problems, bool(check))
        fuse_experts(report, [m for _, m in modules], activations, bool(check))
        report.launches = launches([m for _, m in modules], problems)
        report.steps = step_patch.Steps(reason="steps, linear or attention is False")
        step_patch.remove([m for _, m in modules])
        if steps and linear and attention:
            report.steps = step_patch.install(model, bool(check))
        fuse_gates(report, [m for _, m in modules], bool(check))
    except BaseException:
        step_patch.remove(m for _, m in modules if id(m) not in stepping)
        attend(modules, [m for _, m in modules if id(m) in before])
        for m, old in was:
            set_exact(m, old)
        unfuse(m for _, m in modules if adopted_parent(m) and id(m) not in parents)
        release_all(swapped)
        gate_again(launching)
        raise
    return report


def attend(modules: list[tuple[str, nn.Module]], users: list[nn.Module]) -> None:
    """Mark the modules that may use the attention kernels, and no others."""
    wanted = {id(m) for m in users}
    for _, m in modules:
        (mark if id(m) in wanted else unmark)(m)
    for m in users:
        train_along(m)


def _check(report: Report, problems: set[Matmul], rows) -> dict[Matmul, str]:
    """Check the kernels; gives the M = 1 problems whose kernel failed, with why."""
    bad = {}
    for problem in sorted(problems, key=repr):
        for m in rows:
            at = replace(problem, M=m)
            chosen = ops.choose((at,), report.exact)
            if isinstance(chosen, str):
                continue  # a stored plan says stock
            result = checks.check(at, chosen=chosen)
            if result not in report.kernels:
                report.kernels.append(result)
            if m == 1 and not result.ok:
                bad[problem] = f"{result.kernel} failed its check: {result.error}"
    return bad


def _note_matrix(report: Report, problems: list[Matmul]) -> None:
    counts = Counter(first_rows(p, device_chip()) for p in problems)
    report.notes += [
        f"{n} layers go to matrix units from M = {first} on: there a row's bits "
        "depend on M"
        for first, n in sorted(counts.items())
        if first <= MAX_M
    ]


def _note_mixed(report: Report, todo, activations: mx.Dtype) -> None:
    name = DTYPES[activations]
    odd = [layer for layer, _, p in todo if p.x_dtype != name]
    if odd:
        report.notes.append(
            f"{len(odd)} layers (first {odd[0].path}) have another dtype than the "
            f"model's activations ({name}): with such x stock casts on every call "
            "and serves; convert the scales to run them on the kernels"
        )


def _swap(layers: list[nn.Module]) -> list[nn.Module]:
    """Adopt all layers or, if one cannot be, none; gives those that were stock."""
    done: list[nn.Module] = []
    try:
        for m in layers:
            if not adopted(m):
                adopt(m)
                done.append(m)
    except BaseException:
        # Also on KeyboardInterrupt: never leave a model half patched.
        release_all(done)
        raise
    return done


def release_all(layers: list[nn.Module]) -> None:
    """Give drop-ins their stock classes back."""
    for m in layers:
        release(m)


def unpatch(model: nn.Module) -> Unpatched:
    """Give every drop-in of `model` its stock class back; arrays are untouched.

    On an unpatched model it changes nothing and the result says so. Raises TypeError
    if model is no mlx.nn.Module.
    """
    validate(model)
    layers = [m for _, m in named(model) if adopted(m)]
    kinds = Counter(STOCK[type(m)].__name__ for m in layers)
    modules = [m for _, m in named(model)]
    attention = sum(map(marked, modules))
    step_patch.remove(modules)
    for m in modules:
        unmark(m)
    unfuse(modules)
    release_all(layers)
    return Unpatched(type(model).__name__, dict(kinds), attention)
