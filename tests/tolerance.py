"""One tolerance rule: 2 x the error of the same-dtype dense product, plus a floor."""

import mlx.core as mx
import numpy as np
import ref

# Times the largest magnitude of the reference.
FLOOR = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}


def limit(reference: np.ndarray, dense: np.ndarray, dtype: str) -> float:
    """Largest absolute error allowed against `reference` (float32)."""
    finite = np.isfinite(reference) & np.isfinite(dense)
    if not finite.any():
        return 0.0
    error = np.abs(dense[finite] - reference[finite]).max()
    return float(2 * error + FLOOR[dtype] * np.abs(reference[finite]).max())


def assert_close(out, reference, dense, dtype: str) -> None:
    """Compare shape, then NaN and inf positions, then values; names the worst one."""
    out = ref.to_numpy(out).astype(np.float32)
    reference = np.asarray(reference, np.float32)
    assert out.shape == reference.shape, f"{out.shape} is not {reference.shape}"
    for name, test in (("NaN", np.isnan), ("inf", np.isinf)):
        wrong = np.argwhere(test(out) != test(reference))
        assert not len(wrong), f"{name} at wrong places, first {tuple(wrong[0])}"
    finite = np.isfinite(reference)
    infinite = np.isinf(reference)
    assert (out[infinite] == reference[infinite]).all(), "an infinity has a wrong sign"
    if not finite.any():
        return
    error = np.where(finite, np.abs(out - np.where(finite, reference, 0)), 0)
    allowed = limit(reference, np.asarray(dense, np.float32), dtype)
    at = np.unravel_index(np.nanargmax(error), error.shape)
    assert error[at] <= allowed, (
        f"off by {error[at]:.3g} at {tuple(map(int, at))}: got {out[at]:.6g}, "
        f"right is {reference[at]:.6g}, allowed {allowed:.3g} ({dtype})"
    )


def assert_bits(a: mx.array, b: mx.array) -> None:
    """Same shape, dtype and bits; NaN equals NaN."""
    assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, a.dtype, b.shape)
    same = mx.array_equal(a, b, equal_nan=True).item()
    if not same:
        where = np.argwhere(ref.to_numpy(a) != ref.to_numpy(b))
        raise AssertionError(f"{len(where)} values differ, first at {where[0]}")
