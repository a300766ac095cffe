"""The experts of a model: which layers go to the gathered kernels, which are left."""

from __future__ import annotations

import copy
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU

from .arguments import DTYPES, defaults
from .gather_check import check as check_kernel
from .gather_ops import kernel_route
from .layers import EXPERTS, STOCK, PhaseQuantizedSwitchLinear, adopted, release
from .parents import adopt_parent
from .patch_report import Layer, Report
from .patch_scan import format_of
from .problem import Gather
from .routes import Route, counted
from .switch_layers import PROJECTIONS, Experts, Gate, experts_call, gate_of

# Largest relative difference of a block's experts from stock's (2-norm). Stock rounds
# to the dtype before the activation, the fused launch does not.
TOLERANCE = {mx.float32: 1e-3, mx.float16: 1e-2, mx.bfloat16: 4e-2}


def is_expert(m: nn.Module) -> bool:
    """Whether a module is a layer of experts that has a drop-in, or is one."""
    return STOCK.get(type(m), type(m)) in EXPERTS


def expert_layers(
    report: Report,
    modules: list[tuple[str, nn.Module]],
    activations: mx.Dtype,
    linear: bool | str,
    check: bool | str,
) -> list[nn.Module]:
    """The expert layers to replace; the report gets them, those left and the checks."""
    chosen, odd = [], 0
    for path, m in modules:
        if not is_expert(m):
            continue
        kind = STOCK.get(type(m), type(m)).__name__
        layer = Layer(path, kind, format_of(m), None, adopted(m))
        reason = None if linear or adopted(m) else "linear=False"
        reason = reason or _why_left(report, m, activations, check)
        if reason is None:
            report.replaced.append(layer)
            chosen.append(m)
            odd += m.mode == "affine" and m["scales"].dtype != activations
        else:
            report.left.append(replace(layer, reason=reason))
    if odd:
        report.notes.append(
            f"{odd} layers of experts have another dtype than the model's activations "
            f"({DTYPES[activations]}): with such x stock serves"
        )
    return chosen


def _problem(m: nn.Module, activations: mx.Dtype) -> Gather | Route:
    """What a layer computes for a row and two experts, or stock's route."""
    dtype = m["scales"].dtype if m.mode == "affine" else activations
    _, bits = defaults(m.mode, m.group_size, m.bits)
    x = mx.zeros((1, 1, 1, m["weight"].shape[-1] * 32 // bits), dtype)
    return PhaseQuantizedSwitchLinear.problem(m, x, mx.zeros((1, 2), mx.uint32))


def _why_left(report: Report, m: nn.Module, dtype: mx.Dtype, check) -> str | None:
    try:
        found = _problem(m, dtype)
    except (TypeError, ValueError) as e:
        return str(e)
    if not isinstance(found, Gather):
        return found.reason
    route = kernel_route(found)
    if route.launch is None:
        return route.reason
    if check:
        result = check_kernel(found)
        if result not in report.kernels:
            report.kernels.append(result)
        if not result.ok:
            return f"{result.kernel} failed its check: {result.error}"
    return None


def fuse_experts(
    report: Report, modules: list[nn.Module], activations: mx.Dtype, check: bool
) -> None:
    """Have gate, up and the activation of each SwitchGLU share a launch.

    Where all three layers are drop-ins and, with check, the block's experts give what
    stock gives. The report counts them.
    """
    verdicts: dict[tuple, bool] = {}
    for m in modules:
        layers = [m.get(name) for name in PROJECTIONS]
        if type(m) is not SwitchGLU or not all(
            type(p) is PhaseQuantizedSwitchLinear for p in layers
        ):
            continue
        gate = gate_of(m.activation)
        key = *(_problem(p, activations) for p in layers), gate
        if key not in verdicts:
            verdicts[key] = _shares(report, m, *key, check)
        if verdicts[key]:
            adopt_parent(m, layers, Experts)
            object.__setattr__(m, "_gate", gate)
            report.shared["gate_proj + up_proj + activation"] += 1


def _shares(report: Report, m: SwitchGLU, first, second, last, gate, check) -> bool:
    if gate is None or first != second or not isinstance(first, Gather):
        return False
    whole = replace(first, **vars(gate))
    if kernel_route(whole).launch is None:
        return False
    if not check:
        return True
    result = check_kernel(whole)
    if result not in report.kernels:
        report.kernels.append(result)
    return result.ok and _agrees(m, gate, first)


def _agrees(m: SwitchGLU, gate: Gate, problem: Gather) -> bool:
    """Whether the fused experts of a block give what its stock code gives."""
    dtype = getattr(mx, problem.matmul.x_dtype)
    x = mx.random.normal((1, 2, problem.matmul.K), dtype, key=mx.random.key(5))
    indices = mx.array([[[0, problem.experts - 1], [problem.experts // 2, 0]]])
    with counted():
        found = experts_call(*(m[name] for name in PROJECTIONS), gate, x, indices)
        if found is None:
            return False
        ours = found[0](x, indices).astype(mx.float32)
    twin = copy.copy(m)
    for name in PROJECTIONS:
        twin[name] = copy.copy(m[name])
        release(twin[name])
    stock = twin(x, indices).astype(mx.float32)
    off = (mx.linalg.norm(ours - stock) / mx.linalg.norm(stock)).item()
    return off <= TOLERANCE[dtype]
