"""What the products on matrix units have to hold, whatever their tile."""

from collections.abc import Callable

import cases
import mlx.core as mx
import tolerance

from mlx_phase.launch import matmul

Run = Callable[[mx.array, cases.Weights], mx.array]


def assert_rows_are_alone(run: Run, x: mx.array, q: cases.Weights) -> None:
    """NaN in the other rows, or behind the last, changes no bit of a row."""
    out = run(x, q)
    bad = mx.where(mx.arange(len(x))[:, None] == 3, x, float("nan")).astype(x.dtype)
    tolerance.assert_bits(run(bad, q)[3], out[3])
    tolerance.assert_bits(run(cases.poisoned(x), q), out)


def assert_any_place(run: Run, x: mx.array, q: cases.Weights) -> None:
    """x and w may start between two vectors, and loads may be narrow."""
    buffer = mx.concatenate([mx.zeros((3,), x.dtype), x.flatten()])
    flat = mx.concatenate([mx.zeros((1,), mx.uint32), q.w.flatten()])
    mx.eval(buffer, flat)
    form = q.group_size, q.bits, q.mode
    moved = cases.Weights(flat[1:].reshape(q.w.shape), *q.args[1:], *form)
    out = run(x, q)
    tolerance.assert_bits(run(buffer[3:].reshape(x.shape), moved), out)
    assert not matmul.narrow_loads(True)
    try:
        tolerance.assert_bits(run(x, q), out)
    finally:
        matmul.narrow_loads(False)
