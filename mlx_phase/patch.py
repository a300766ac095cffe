"""Swap a model's matmul layers for drop-ins on the kernels, and back.

No weight changes, no function of mlx or mlx_lm is rebound: only the class of the
layers of this one model. What is not replaced keeps running stock and is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn

from . import check as checks
from . import ops, tune_store
from .arguments import DTYPES, check_quantized, defaults
from .executor import executor_name
from .fuse import fuse, launches, unfuse
from .launch.matmul import device_chip
from .layers import PLAIN, QUANTIZED, STOCK, adopt, adopted, forget_routes, release
from .parents import adopted_parent
from .patch_report import Layer, Report, Unpatched
from .plan import MAX_M, supports
from .problem import Matmul

# Row counts checked at patch time: decode, and the first that shares weights. The
# others are checked on first use (check="all": now).
CHECK_ROWS = (1, 2)
TUNE = ("cached", "off")


def _named(model: nn.Module) -> list[tuple[str, nn.Module]]:
    # A module shared by two parents is one layer.
    seen: dict[int, tuple[str, nn.Module]] = {}
    for path, module in model.named_modules():
        seen.setdefault(id(module), (path or "(the model)", module))
    return sorted(seen.values(), key=lambda item: _natural(item[0]))


def _natural(path: str) -> list[tuple[bool, int, str]]:
    # layers.2 before layers.10
    parts = path.split(".")
    return [(not p.isdigit(), int(p) if p.isdigit() else 0, p) for p in parts]


def _activations(modules: list[tuple[str, nn.Module]]) -> mx.Dtype:
    """The dtype a model likely computes in: its embedding's, else the commonest."""
    found = Counter()
    for _, m in modules:
        for key in ("scales", "weight", "bias"):
            a = m.get(key)
            if isinstance(a, mx.array) and a.dtype in DTYPES:
                if isinstance(m, (nn.Embedding, nn.QuantizedEmbedding)):
                    return a.dtype
                found[a.dtype] += 1
    return found.most_common(1)[0][0] if found else mx.float32


def _format(m: nn.Module) -> str:
    weight, scales = m.get("weight"), m.get("scales")
    dtype = getattr(scales if scales is not None else weight, "dtype", None)
    shape = "x".join(map(str, getattr(weight, "shape", ())))
    text = str(dtype).removeprefix("mlx.core.")
    if scales is None:
        return f"{text} {shape}"
    mode, bits = getattr(m, "mode", "affine"), getattr(m, "bits", "?")
    return f"{mode} {bits}-bit g{getattr(m, 'group_size', '?')} {text} scales"


def _problem(m: nn.Module, activations: mx.Dtype) -> Matmul | str:
    """The M = 1 problem of a layer, or a sentence why the kernels do not take it."""
    weight = m["weight"]
    if weight.ndim != 2:
        return f"{weight.ndim}-D weights: the kernels take one matrix"
    if m.get("scales") is None:
        if weight.dtype not in DTYPES:
            return f"weights are {weight.dtype}"
        n, k = weight.shape
        dtype = DTYPES[weight.dtype]
        problem = Matmul(1, n, k, dtype, 8 * weight.itemsize, 0, "none")
        return supports(problem) or problem
    scales, biases = m["scales"], m.get("biases")
    dtype = scales.dtype if m.mode == "affine" else activations
    k = weight.shape[-1] * 32 // m.bits
    try:
        group_size, bits = defaults(m.mode, m.group_size, m.bits)
        x = mx.zeros((1, k), dtype)
        check_quantized(x, weight, scales, biases, True, group_size, bits, m.mode)
    except (TypeError, ValueError) as e:
        return str(e)
    if biases is not None and biases.dtype != scales.dtype:
        return f"scales are {scales.dtype} but biases {biases.dtype}"
    dtype = DTYPES.get(dtype, str(dtype))
    problem = Matmul(1, weight.shape[0], k, dtype, bits, group_size, m.mode)
    return supports(problem) or problem


def _why_left(m: nn.Module, linear: bool | str) -> str | None:
    """Why a matmul layer stays stock by its class; None if it is no such layer."""
    name = type(m).__name__
    if not isinstance(m.get("weight"), mx.array):
        return None
    for stock in (*QUANTIZED, *PLAIN):
        if isinstance(m, stock) and type(m) is not stock:
            return f"{name} is a subclass of {stock.__name__}: only exact types"
    if type(m) in QUANTIZED:
        return "linear=False"
    if type(m) in PLAIN:
        return 'plain weights: pass linear="all"' if linear else "linear=False"
    if m.get("scales") is not None or "Linear" in name:
        return f"{name}: no kernel for this class"
    return None


def _validate(model, linear, check, tune) -> None:
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


def patch(
    model: nn.Module,
    *,
    linear: bool | str = True,
    attention: bool = True,
    exact: bool = True,
    check: bool | str = True,
    tune: str = "cached",
) -> Report:
    """Put the matmul layers of `model` on the decode kernels; `unpatch` reverts it.

    linear: True replaces quantised layers and tied quantised heads, "all" plain
    nn.Linear and tied nn.Embedding heads too. attention: stock until a kernel exists.
    exact: all decode kernels give a row the same bits for every M <= 16, so a stored
    plan moves a shape to stock for all M or for none. check: run
    each kernel once against a reference before it may serve (M = 1 and 2 now, other
    M on first use; "all": every M now). tune: "cached" takes the plan that
    `python -m mlx_phase.tune` stored for this device, for all of the process; "off".
    The kernels have no gradient: after model.train() stock serves until model.eval().
    Layers keep what they made of their weights: give new ones by assignment (update,
    load_weights), not by changing an array in place or mx.compile(inputs=model.state).

    Idempotent. Raises TypeError if model is no mlx.nn.Module and ValueError for an
    unknown option; whatever is raised, the model is left as it was.
    """
    _validate(model, linear, check, tune)
    modules = _named(model)
    report = Report(type(model).__name__, executor_name(), device_chip().name)
    report.exact, report.checked = exact, bool(check)
    stored = tune_store.activate(tune, exact)
    report.tune = stored.status
    report.notes += tune_store.notes(stored, exact)
    if not attention:
        report.attention = "stock (attention=False)"
    wanted = {**(QUANTIZED if linear else {}), **(PLAIN if linear == "all" else {})}
    activations = _activations(modules)
    todo: list[tuple[Layer, nn.Module, Matmul]] = []
    for path, m in modules:
        kind = STOCK.get(type(m), type(m))
        layer = Layer(path, kind.__name__, "", None, adopted(m))
        if kind in wanted or adopted(m):
            layer = replace(layer, format=_format(m))
            found = _problem(m, activations)
            if isinstance(found, str):
                report.left.append(replace(layer, reason=found))
            else:
                todo.append((layer, m, found))
        elif reason := _why_left(m, linear):
            layer = replace(layer, format=_format(m), reason=reason)
            report.left.append(layer)
    _note_mixed(report, todo, activations)
    bad: dict[Matmul, str] = {}
    if check:
        rows = range(1, MAX_M + 1) if check == "all" else CHECK_ROWS
        bad = _check(report, {p for *_, p in todo}, rows)
    # Stays on: another model that is patched without checks must not end it.
    if check and ops.set_probe(checks.probe):
        forget_routes()
    chosen = []
    for layer, m, problem in todo:
        if problem in bad:
            report.left.append(replace(layer, reason=bad[problem]))
        else:
            report.replaced.append(layer)
            chosen.append(m)
    swapped = _swap(chosen)
    try:
        problems = {id(m): p for _, m, p in todo if adopted(m)}
        fuse(report, [m for _, m in modules], problems, bool(check))
        report.launches = launches([m for _, m in modules], problems)
    except BaseException:
        _release(swapped)
        raise
    return report


def _check(report: Report, problems: set[Matmul], rows) -> dict[Matmul, str]:
    """Check the kernels; gives the M = 1 problems whose kernel failed, with why."""
    bad = {}
    for problem in sorted(problems, key=repr):
        for m in rows:
            at = replace(problem, M=m)
            chosen = ops.choose((at,))
            if isinstance(chosen, str):
                continue  # a stored plan says stock
            result = checks.check(at, chosen=chosen)
            if result not in report.kernels:
                report.kernels.append(result)
            if m == 1 and not result.ok:
                bad[problem] = f"{result.kernel} failed its check: {result.error}"
    return bad


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
        _release(done)
        raise
    return done


def _release(layers: list[nn.Module]) -> None:
    for m in layers:
        release(m)


def unpatch(model: nn.Module) -> Unpatched:
    """Give every drop-in of `model` its stock class back; arrays are untouched.

    On an unpatched model it changes nothing and the result says so. Raises TypeError
    if model is no mlx.nn.Module.
    """
    _validate(model, True, True, "off")
    layers = [m for _, m in _named(model) if adopted(m)]
    kinds = Counter(STOCK[type(m)].__name__ for m in layers)
    unfuse([m for _, m in _named(model)])
    _release(layers)
    return Unpatched(type(model).__name__, dict(kinds))


@contextmanager
def patched(model: nn.Module, **options) -> Iterator[Report]:
    """`with patched(model) as report:` patches inside, also when the block raises.

    Takes the options of `patch`. Layers that were patched before stay patched.
    """
    _validate(model, True, True, "off")
    modules = [m for _, m in _named(model)]
    before = {id(m) for m in modules if adopted(m) or adopted_parent(m)}
    report = patch(model, **options)
    try:
        yield report
    finally:
        new = [m for _, m in _named(model) if id(m) not in before]
        unfuse(new)
        _release([m for m in new if adopted(m)])
