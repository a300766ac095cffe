"""CPU executor: Metal threads as fibers, threadgroups spread over the cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_phase.executor import profile, profile_build
from mlx_phase.executor import sanitize as sanitizer
from mlx_phase.executor.arguments import check_call, check_kernel, three
from mlx_phase.executor.cpu_arrays import (
    evaluate,
    filled,
    is_traced,
    poisoned,
    untraceable,
)
from mlx_phase.executor.cpu_launch import Call
from mlx_phase.executor.cpu_tiers import Tiers
from mlx_phase.executor.error import ExecutorError
from mlx_phase.executor.signature import (
    CONSTANT_BELOW,
    METAL_TYPES,
    Arg,
    MetalSource,
    metal_source,
)

MAX_THREADS = 1024
MAX_ARENA = 32768
PROFILE = frozenset({"profile"})


@dataclass(frozen=True)
class _Variant:
    """A kernel for one combination of types, sizes and template arguments."""

    metal: MetalSource
    library: Tiers | sanitizer.Sanitized | profile_build.Profiled


class CpuKernel:
    """A kernel that runs on the CPU. Made by ``metal_kernel``."""

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str,
        ensure_row_contiguous: bool,
        atomic_outputs: bool,
        sanitize: str | bool | None,
    ) -> None:
        self.name = name
        self.sanitize = sanitize
        self.input_names = tuple(input_names)
        self.output_names = tuple(output_names)
        self.source = source
        self.header = header
        self.ensure_row_contiguous = ensure_row_contiguous
        self.atomic_outputs = atomic_outputs
        self._variants: dict[tuple, _Variant] = {}

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        """Run the kernel; arguments as for a kernel of ``mx.fast.metal_kernel``.

        ``grid`` and ``threadgroup`` count threads. Inputs are evaluated; ``stream`` is
        ignored. Raises ExecutorError for what goes wrong in the kernel.
        """
        check_call(
            self.input_names, self.output_names, inputs, output_shapes, output_dtypes
        )
        grid, threadgroup = three("grid", grid), three("threadgroup", threadgroup)
        arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
        evaluate(self.name, arrays)

        def run(*arrays: mx.array) -> list[mx.array]:
            return self._run(
                list(arrays),
                [tuple(shape) for shape in output_shapes],
                output_dtypes,
                grid,
                threadgroup,
                template,
                init_value,
                verbose,
            )

        return (
            self._without_gradient(run)(*arrays) if is_traced(arrays) else run(*arrays)
        )

    def _without_gradient(self, run: Callable) -> Callable:
        """Wrap a run in a function whose derivative is an error instead of zero."""

        def refuse(*_: Any) -> None:
            raise ExecutorError(untraceable(self.name, "mx.grad, mx.vjp or mx.jvp"))

        function = mx.custom_function(run)
        function.vjp(refuse)
        function.jvp(refuse)
        return function

    def _run(
        self,
        arrays: list[mx.array],
        shapes: list[tuple[int, ...]],
        dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] | None,
        init_value: float | None,
        verbose: bool,
    ) -> list[mx.array]:
        views = [memoryview(a) for a in arrays]
        if self.ensure_row_contiguous:
            for i, view in enumerate(views):
                if not view.c_contiguous:
                    arrays[i] = mx.contiguous(arrays[i], stream=mx.cpu)
                    mx.eval(arrays[i])
                    views[i] = memoryview(arrays[i])
        checks = PROFILE if profile.recording() else sanitizer.chosen(self.sanitize)
        variant = self._variant(arrays, dtypes, template, checks)
        if verbose:
            print(f"Generated source code for `{self.name}`:\n```")
            print(f"{variant.metal.text}\n```")
        if init_value is None:
            outputs = [poisoned(s, d) for s, d in zip(shapes, dtypes, strict=True)]
        else:
            outputs = [
                filled(s, d, init_value) for s, d in zip(shapes, dtypes, strict=True)
            ]
        if 0 in grid or not any(out.size for out in outputs):
            return outputs
        group = tuple(map(min, threadgroup, grid))  # as MLX clips it
        threads = group[0] * group[1] * group[2]
        if not 0 < threads <= MAX_THREADS:
            raise ExecutorError(
                f"kernel {self.name!r}: a threadgroup of {group} has {threads} "
                f"threads; Metal takes 1 to {MAX_THREADS}"
            )
        names = self.input_names, self.output_names
        rest = arrays, views, outputs, init_value, grid, group
        call = Call(self.name, names, variant.metal, *rest)
        if checks == PROFILE:
            profile.launch(call, variant.library)
        elif checks:
            sanitizer.launch(call, variant.library, checks)
        else:
            variant.library.launch(call)
        return outputs

    def _variant(
        self,
        arrays: Sequence[mx.array],
        dtypes: Sequence[mx.Dtype],
        template: Sequence[tuple[str, Any]] | None,
        checks: frozenset[str],
    ) -> _Variant:
        key = (
            checks,
            tuple((a.dtype, a.ndim == 0, a.size < CONSTANT_BELOW) for a in arrays),
            tuple(dtypes),
            tuple((n, type(v), v) for n, v in template) if template else None,
        )
        variant = self._variants.get(key)
        if variant is not None:
            return variant
        metal = metal_source(
            self.name,
            [
                _arg(n, a.dtype, a)
                for n, a in zip(self.input_names, arrays, strict=True)
            ],
            [_arg(n, d) for n, d in zip(self.output_names, dtypes, strict=True)],
            self.source,
            self.header,
            template,
            self.atomic_outputs,
        )
        if not metal.is_valid:
            raise ExecutorError(
                f"kernel {self.name!r}: MLX generates broken Metal for several outputs "
                "with _shape, _strides or _ndim and no attribute; name one, such as "
                "thread_position_in_grid, in the source"
            )
        if checks == PROFILE:
            library = profile_build.load(metal)
        elif checks:
            library = sanitizer.load(self.name, metal)
        else:
            library = Tiers(self.name, metal, sum(a.nbytes for a in arrays))
        if library.arena_bytes > MAX_ARENA:
            raise ExecutorError(
                f"kernel {self.name!r}: its threadgroup variables take "
                f"{library.arena_bytes} bytes; Metal has {MAX_ARENA} for a threadgroup"
            )
        variant = self._variants[key] = _Variant(metal, library)
        return variant


def _arg(name: str, dtype: mx.Dtype, array: mx.array | None = None) -> Arg:
    metal = METAL_TYPES.get(str(dtype).rpartition(".")[2])
    if metal is None:
        raise ValueError(
            f"[metal_kernel] {name}: {dtype} is not supported on the GPU; cast it, "
            "for example to float32."
        )
    if array is None:
        return Arg(name, metal, 1, CONSTANT_BELOW)
    return Arg(name, metal, array.ndim, array.size)


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: dict[str, str] | None = None,
    sanitize: str | bool | None = None,
) -> CpuKernel:
    """Make a kernel for the CPU; arguments as for ``mx.fast.metal_kernel``.

    ``compile_options`` are checked and otherwise ignored: math is always "safe" here.
    ``sanitize``: checks to run it under; None leaves them to ``MLX_PHASE_SANITIZE``.
    """
    check_kernel(name, input_names, output_names, source, header, compile_options)
    sanitizer.parse(sanitize)
    return CpuKernel(
        name,
        input_names,
        output_names,
        source,
        header,
        ensure_row_contiguous,
        atomic_outputs,
        sanitize,
    )
