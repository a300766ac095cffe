"""MLX arrays as memory: addresses and strides of inputs, poisoned outputs."""

from __future__ import annotations

import ctypes
import io
from collections.abc import Sequence

import mlx.core as mx

from mlx_phase.executor.error import ExecutorError

#: Outputs up to this many bytes are made by copying a poisoned array: 10 times faster
#: than evaluating `zeros`, which is what a decode step's small outputs would pay.
_KEPT_BYTES = 1 << 18
_KEPT_ARRAYS = 512
_POISONED: dict[tuple, _Exported] = {}


class _PyBuffer(ctypes.Structure):
    """Py_buffer, for strided arrays: ctypes' own from_buffer wants contiguous ones."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


_STRIDED = 0x18  # PyBUF_STRIDES
_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = [ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int]
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = [ctypes.POINTER(_PyBuffer)]


class _Exported:
    """Hands an array out through DLPack, from which ``mx.array`` makes a copy."""

    def __init__(self, array: mx.array) -> None:
        self.array = array

    def __dlpack__(self, **options: object) -> object:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


def evaluate(kernel: str, arrays: Sequence[mx.array]) -> None:
    """Evaluate inputs. Raises ExecutorError inside ``mx.compile`` and ``mx.vmap``."""
    try:
        mx.eval(arrays)
    except ValueError as error:
        if "during function transformations" not in str(error):
            raise
        raise ExecutorError(untraceable(kernel, "mx.compile or mx.vmap")) from error


def untraceable(kernel: str, transform: str) -> str:
    """What to say when a kernel is called where values do not exist yet."""
    return (
        f"kernel {kernel!r}: the CPU executor runs kernels at once and cannot be "
        f"traced by {transform}. Call it outside, give it a gradient with "
        "mx.custom_function, or run on a GPU executor"
    )


def is_traced(arrays: Sequence[mx.array]) -> bool:
    """Whether evaluated arrays still carry their graph: a gradient is being traced.

    MLX drops the graph of what it evaluates, except while it needs it for a gradient.
    """
    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays)
    return "->" in graph.getvalue()


def address(array: mx.array, view: memoryview) -> int:
    """Address of the first element of an evaluated array; 0 if it has none."""
    if view.nbytes == 0:
        return 0
    if view.c_contiguous:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    buffer = _PyBuffer()
    _get_buffer(array, ctypes.byref(buffer), _STRIDED)
    found = buffer.buf
    # The array itself keeps the memory; it outlives the launch.
    _release_buffer(ctypes.byref(buffer))
    return found


def poisoned(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """A new array of all-ones bytes (NaN in every float type).

    Metal leaves outputs uninitialised; NaN shows what a kernel did not write.
    """
    kept = _POISONED.get((shape, dtype))
    if kept is not None:
        return mx.array(kept)
    array = mx.zeros(shape, dtype, stream=mx.cpu)
    mx.eval(array)
    if array.nbytes:
        view = memoryview(array)
        ctypes.memset(address(array, view), 0xFF, array.nbytes)
    if array.nbytes > _KEPT_BYTES or array.nbytes == 0:
        return array
    if len(_POISONED) >= _KEPT_ARRAYS:
        _POISONED.clear()
    kept = _POISONED[shape, dtype] = _Exported(array)
    return mx.array(kept)


def filled(shape: tuple[int, ...], dtype: mx.Dtype, value: float) -> mx.array:
    """A new evaluated array of one value."""
    array = mx.full(shape, value, dtype, stream=mx.cpu)
    mx.eval(array)
    return array


def extent(address: int, view: memoryview) -> tuple[int, int]:
    """First byte and number of bytes that the elements of a strided view lie in."""
    if view.nbytes == 0:
        return address, 0
    steps = [(n - 1) * s for n, s in zip(view.shape, view.strides, strict=True)]
    low, high = sum(min(s, 0) for s in steps), sum(max(s, 0) for s in steps)
    return address + low, high - low + view.itemsize


def reset(array: mx.array, value: float | None) -> None:
    """Make an output what it was before the kernel wrote to it."""
    view = memoryview(array)
    if view.nbytes == 0:
        return
    if value is None:
        ctypes.memset(address(array, view), 0xFF, view.nbytes)
        return
    fresh = filled(array.shape, array.dtype, value)
    ctypes.memmove(address(array, view), address(fresh, memoryview(fresh)), view.nbytes)
