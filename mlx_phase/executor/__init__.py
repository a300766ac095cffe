"""Runs Metal kernel text: on an Apple GPU, on an NVIDIA GPU, or on the CPU.

``metal_kernel`` takes what ``mx.fast.metal_kernel`` takes and gives what it gives. The
Apple GPU is used where there is one, else CUDA, else the CPU; ``MLX_PHASE_EXECUTOR``
(apple, cuda or cpu) overrides. ``MLX_PHASE_SANITIZE=mem,race,init,sync`` runs kernels
on the CPU and checks each access: see ``sanitize.py``.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_phase.executor.error import ExecutorError, SanitizerError
from mlx_phase.executor.profile import profile_kernel

__all__ = [
    "ExecutorError",
    "SanitizerError",
    "executor_name",
    "metal_kernel",
    "profile_kernel",
]

NAMES = ("apple", "cuda", "cpu")
_OFF = ("", "0")  # values of MLX_PHASE_SANITIZE that check nothing


def executor_name() -> str:
    """Which executor runs kernels: "apple", "cuda" or "cpu".

    Raises ExecutorError if ``MLX_PHASE_EXECUTOR`` names an unknown one, or one that
    this machine cannot serve.
    """
    wanted = os.environ.get("MLX_PHASE_EXECUTOR", "")
    # Both probes are asked of MLX every time: they are cheap, and tests change them.
    has = {"apple": mx.metal.is_available, "cuda": mx.cuda.is_available}
    if not wanted and os.environ.get("MLX_PHASE_SANITIZE", "") not in _OFF:
        return "cpu"
    if not wanted:
        return next((name for name in ("apple", "cuda") if has[name]()), "cpu")
    if wanted not in NAMES:
        raise ExecutorError(
            f"MLX_PHASE_EXECUTOR={wanted!r}: use one of {', '.join(NAMES)}, or unset "
            "it to let the machine decide"
        )
    if wanted in has and not has[wanted]():
        needs = {"apple": "a Mac with an Apple GPU", "cuda": "mlx[cuda] and its GPU"}
        raise ExecutorError(
            f"MLX_PHASE_EXECUTOR={wanted} needs {needs[wanted]}, which MLX does not "
            "see here; unset it, or use cpu"
        )
    return wanted


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: dict[str, str] | None = None,
    *,
    sanitize: str | bool | None = None,
) -> Callable[..., list[mx.array]]:
    """Make a kernel from Metal text; same arguments as ``mx.fast.metal_kernel``.

    ``sanitize``: checks to run it under, on the CPU: "mem,race,init,sync", True for
    all, False for none, None for what ``MLX_PHASE_SANITIZE`` says. The result is called
    with keywords ``inputs, output_shapes, output_dtypes, grid, threadgroup, template,
    init_value, verbose, stream`` and returns a list of arrays. Raises ValueError for
    wrong arguments, ExecutorError if no executor can run it; calls raise
    SanitizerError for the first bug that a check finds.
    """
    found = executor_name()
    checks = os.environ.get("MLX_PHASE_SANITIZE") if sanitize is None else sanitize
    if checks not in (None, False, *_OFF):
        asked = os.environ.get("MLX_PHASE_EXECUTOR", "")
        if asked not in ("", "cpu"):
            raise ExecutorError(
                "the sanitizer runs kernels on the CPU: unset MLX_PHASE_EXECUTOR, "
                f"which is {asked!r}, or set it to cpu"
            )
        found = "cpu"
    only_cpu = {"sanitize": sanitize} if found == "cpu" else {}
    executor = importlib.import_module(f"mlx_phase.executor.{found}")
    return executor.metal_kernel(
        name,
        input_names,
        output_names,
        source,
        header=header,
        ensure_row_contiguous=ensure_row_contiguous,
        atomic_outputs=atomic_outputs,
        compile_options=compile_options,
        **only_cpu,
    )
