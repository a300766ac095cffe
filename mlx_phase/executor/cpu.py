"""CPU executor: Metal threads as fibers, threadgroups spread over the cores."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_phase.executor import cpu_build
from mlx_phase.executor.arguments import check_call, check_kernel, three
from mlx_phase.executor.cpu_arrays import (
    address,
    evaluate,
    filled,
    is_traced,
    poisoned,
    untraceable,
)
from mlx_phase.executor.cpu_source import cpu_source
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
#: struct EmuLaunch of include/cpu_runtime.h: entry, args, spans, grid, group, groups,
#: arena_bytes, threads, span_count; its EmuError: code, line, thread, group, file, text.
_LAUNCH = struct.Struct("=QQQ3I3I3IIII")
_ERROR = struct.Struct("=iii3I64s2048s")
_ARGS_AT = (_LAUNCH.size + _ERROR.size + 7) // 8 * 8
_LIBRARIES: dict[str, _Library] = {}


@dataclass(frozen=True)
class _Library:
    """A loaded kernel: its entry's address and its threadgroup memory in bytes."""

    handle: ctypes.CDLL
    entry: int
    arena_bytes: int


@dataclass(frozen=True)
class _Variant:
    """A kernel for one combination of types, sizes and template arguments."""

    metal: MetalSource
    library: _Library


def _load(name: str, metal: MetalSource) -> _Library:
    code = cpu_source(metal)
    library = _LIBRARIES.get(code)
    if library is None:
        try:
            handle = cpu_build.load(code, cpu_build.KERNEL_FLAGS)
        except ExecutorError as error:
            raise ExecutorError(f"kernel {name!r}: {error}") from None
        entry = ctypes.cast(handle.emu_entry, ctypes.c_void_p).value
        arena = ctypes.c_uint64.in_dll(handle, "emu_arena_bytes").value
        library = _LIBRARIES[code] = _Library(handle, entry, arena)
    return library


def _threads() -> int:
    """OS threads to use: ``MLX_PHASE_CPU_THREADS``, else the usable cores."""
    chosen = os.environ.get("MLX_PHASE_CPU_THREADS")
    if chosen is None:
        has_affinity = hasattr(os, "sched_getaffinity")
        return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    if not chosen.isdecimal() or int(chosen) < 1:
        raise ExecutorError(
            f"MLX_PHASE_CPU_THREADS={chosen!r} is not a number of threads"
        )
    return int(chosen)


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
    ) -> None:
        self.name = name
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
        variant = self._variant(arrays, dtypes, template)
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
        self._launch(variant, arrays, views, outputs, grid, group)
        return outputs

    def _variant(
        self,
        arrays: Sequence[mx.array],
        dtypes: Sequence[mx.Dtype],
        template: Sequence[tuple[str, Any]] | None,
    ) -> _Variant:
        key = (
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
        library = _load(self.name, metal)
        if library.arena_bytes > MAX_ARENA:
            raise ExecutorError(
                f"kernel {self.name!r}: its threadgroup variables take "
                f"{library.arena_bytes} bytes; Metal has {MAX_ARENA} for a threadgroup"
            )
        variant = self._variants[key] = _Variant(metal, library)
        return variant

    def _launch(
        self,
        variant: _Variant,
        arrays: list[mx.array],
        views: list[memoryview],
        outputs: list[mx.array],
        grid: tuple[int, int, int],
        group: tuple[int, ...],
    ) -> None:
        params, library = variant.metal.params, variant.library
        spans_at = _ARGS_AT + 8 * len(params)
        at = spans_at + 16 * len(params)
        room = at + sum(8 + 8 * views[p.index].ndim for p in params if p.kind[0] in "sn")
        block = ctypes.create_string_buffer(room)
        base = ctypes.addressof(block)
        pointers, spans = [], []
        for param in params:
            i = param.index
            if param.kind in ("input", "output"):
                ins = param.kind == "input"
                array = arrays[i] if ins else outputs[i]
                view = views[i] if ins else memoryview(array)
                pointers.append(address(array, view))
                spans += [pointers[-1], pointers[-1] + max(view.nbytes, 1) - 1]
                continue
            view = views[i]
            pointers.append(base + at)
            if param.kind == "ndim":
                struct.pack_into("=i", block, at, view.ndim)
            elif param.kind == "shape":
                struct.pack_into(f"={view.ndim}i", block, at, *view.shape)
            else:
                steps = (s // view.itemsize for s in view.strides)
                struct.pack_into(f"={view.ndim}q", block, at, *steps)
            at += 8 + 8 * view.ndim
        struct.pack_into(f"={len(pointers)}Q", block, _ARGS_AT, *pointers)
        struct.pack_into(f"={len(spans)}Q", block, spans_at, *spans)
        _LAUNCH.pack_into(
            block, 0, library.entry, base + _ARGS_AT, base + spans_at, *grid, *group,
            0, 0, 0, library.arena_bytes, _threads(), len(spans) // 2,
        )  # fmt: skip
        if cpu_build.runtime().emu_launch(block):
            fields = _ERROR.unpack_from(block, _LAUNCH.size)
            message = fields[-1].split(b"\0", 1)[0].decode(errors="replace")
            where = tuple(fields[3:6])
            raise ExecutorError(
                f"kernel {self.name!r}: {message} [threadgroup {where} of a grid of "
                f"{grid} threads]"
            )


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
) -> CpuKernel:
    """Make a kernel for the CPU; arguments as for ``mx.fast.metal_kernel``.

    ``compile_options`` are checked and otherwise ignored: math is always "safe" here.
    """
    check_kernel(name, input_names, output_names, source, header, compile_options)
    return CpuKernel(
        name,
        input_names,
        output_names,
        source,
        header,
        ensure_row_contiguous,
        atomic_outputs,
    )
