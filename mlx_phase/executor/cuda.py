"""NVIDIA executor: Metal kernels as modules that are compiled here (`cuda_binary.py`).

A kernel that asks for strides, which only MLX knows, runs through mx.fast.cuda_kernel.
That rebuilds, copies and hashes the whole source on every call, so the text is kept in
a file (named by its hash) and MLX sees one #include and one function call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlx_phase.executor import (
    arguments,
    cuda_binary,
    cuda_module,
    cuda_store,
    cuda_text,
    signature,
)
from mlx_phase.executor.cuda_text import Kernel, Variant

#: MLX's launch, the threadgroup size, and the grid's size if threads must look at it.
Launch = tuple[Any, tuple[int, int, int], "mx.array | None"]

#: Kinds of calls remembered for each kernel; grids of changing shapes may be many.
_MAX_READY = 4096


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: dict[str, str] | None = None,
) -> Callable[..., list[mx.array]]:
    """Make a CUDA kernel from Metal text; arguments as ``mx.fast.metal_kernel``.

    ``compile_options`` is checked but has no effect: NVRTC's options are MLX's.
    Compile errors are ExecutorError with the compiler's log, or come at evaluation as
    RuntimeError where MLX compiles.
    """
    arguments.check_kernel(
        name, input_names, output_names, source, header, compile_options
    )
    kernel = Kernel(
        name,
        tuple(input_names),
        tuple(output_names),
        source,
        header,
        atomic_outputs,
    )
    maybe_scalar = [i for i in range(len(input_names)) if kernel.may_be_scalar(i)]
    binary, shaped = cuda_binary.supported(kernel), kernel.shaped()
    built: dict[tuple, Any] = {}
    ready: dict[Any, Launch] = {}

    def prepare(
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] | None,
        verbose: bool,
    ) -> Launch:
        """Check the call, and find or build the MLX kernel that it needs."""
        names = kernel.input_names, kernel.output_names
        arguments.check_call(*names, inputs, output_shapes, output_dtypes)
        blocks, ragged, extent = _grid_shape(grid, threadgroup)
        variant = _variant(kernel, inputs, template, ragged, extent is not None)
        if verbose:
            print(cuda_text.definition(kernel, variant))
        types = None
        if binary:
            arrays = [a if isinstance(a, mx.array) else mx.array(a) for a in inputs]
            ndims = tuple(a.ndim * (i in shaped) for i, a in enumerate(arrays))
            types = tuple(a.dtype for a in arrays), ndims, tuple(output_dtypes)
        if (key := (variant, types)) not in built:
            how = kernel, variant, ensure_row_contiguous
            built[key] = (binary and cuda_binary.build(*how, types)) or _build(*how)
        return built[key], blocks, extent

    def call(
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
        # This runs hundreds of times per token: one look-up, nothing built. Lists and
        # Python numbers cannot be keys and take the longer way.
        key = None
        try:
            key = (
                grid,
                threadgroup,
                tuple([inputs[i].ndim for i in maybe_scalar]),
                tuple(template) if template else None,
                # MLX's text follows the arrays' types by itself.
                binary
                and tuple(
                    [
                        *[a.dtype for a in inputs],
                        *output_dtypes,
                        *[inputs[i].ndim for i in shaped],
                    ]
                ),
            )
            mlx_kernel, blocks, extent = ready[key]
        except (LookupError, TypeError, AttributeError) as miss:
            mlx_kernel, blocks, extent = prepare(
                inputs,
                output_shapes,
                output_dtypes,
                grid,
                threadgroup,
                template,
                verbose,
            )
            if isinstance(miss, KeyError):
                if len(ready) >= _MAX_READY:
                    ready.clear()
                ready[key] = mlx_kernel, blocks, extent
        if extent is not None:
            inputs = [*inputs, extent]
        more = {}
        if binary:
            sizes = [n for i in shaped for n in getattr(inputs[i], "shape", ())]
            more["scalars"] = [1, *sizes]
        return mlx_kernel(
            inputs=inputs,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            grid=grid,
            threadgroup=blocks,
            init_value=init_value,
            stream=stream,
            **more,
        )

    return call


def _grid_shape(
    grid: tuple[int, int, int], threadgroup: tuple[int, int, int]
) -> tuple[tuple[int, int, int], bool, mx.array | None]:
    """The threadgroup size, whether warps may lack lanes, and the grid's size.

    Threadgroups are no larger than the grid, as on Metal. The grid's size is an array
    if threadgroups overhang it, else None: then no thread needs to look.
    """
    sizes = arguments.three("grid", grid)
    wanted = arguments.three("threadgroup", threadgroup)
    x, y, z = (max(1, min(s, t)) for s, t in zip(sizes, wanted, strict=True))
    partial = sizes[0] % x or sizes[1] % y or sizes[2] % z
    ragged = bool(partial or x * y * z % 32)
    return (x, y, z), ragged, mx.array(sizes, dtype=mx.uint32) if partial else None


def _variant(
    kernel: Kernel,
    inputs: Sequence[Any],
    template: Sequence[tuple[str, Any]] | None,
    ragged: bool,
    partial: bool,
) -> Variant:
    """Describe the text that these arguments need."""
    scalars = tuple(
        kernel.may_be_scalar(i) and getattr(value, "ndim", 0) == 0
        for i, value in enumerate(inputs)
    )
    return Variant(scalars, signature.template_arguments(template), ragged, partial)


def _build(kernel: Kernel, variant: Variant, ensure_row_contiguous: bool) -> Any:
    body = cuda_text.call(kernel, variant)
    text = cuda_text.definition(kernel, variant) + cuda_module.limit(variant)
    # One name for one text: not every MLX tells kernels of one name apart.
    digest = hashlib.sha256(text.encode() + body.encode()).hexdigest()[:12]
    made = mx.fast.cuda_kernel(
        name=f"{kernel.name}_{digest}",
        input_names=kernel.mlx_inputs(variant),
        output_names=kernel.mlx_outputs(),
        source=body,
        header=cuda_store.stored(kernel.name, text),
        ensure_row_contiguous=ensure_row_contiguous,
    )
    return lambda scalars=None, **arguments: made(**arguments)
