"""Apple GPU executor: MLX's own ``metal_kernel``, passed through."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx


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
    """Return ``mx.fast.metal_kernel`` of the same arguments."""
    # MLX before 0.32 does not know compile_options: name it only where it is used.
    options = {} if compile_options is None else {"compile_options": compile_options}
    return mx.fast.metal_kernel(
        name=name,
        input_names=list(input_names),
        output_names=list(output_names),
        source=source,
        header=header,
        ensure_row_contiguous=ensure_row_contiguous,
        atomic_outputs=atomic_outputs,
        **options,
    )
