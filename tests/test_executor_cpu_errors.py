"""CPU executor: a broken kernel is an error that names the place; never a hang."""

import faulthandler
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from cpu_case import run

from mlx_phase.executor import ExecutorError

L = "uint l = thread_index_in_threadgroup; "

# Body, shape of the output, what the message must say.
BROKEN = {
    "branches_part": (
        L + "float v = l;\nif (l < 16) v = simd_sum(v);\nelse v = simd_max(v);\n"
        "out[l] = v;",
        (32,),
        "lane 16 of simdgroup 0 reached simd_max at source line 3 while lanes 0-15 "
        r"wait at simd_sum \(source line 2\)",
    ),
    "one_call_two_places": (
        L + "if (l < 16) out[l] = simd_sum(1.0f); else out[l] = simd_sum(1.0f);",
        (32,),
        "divergent simdgroup operation: lane 16",
    ),
    "lane_returned": (
        L + "\nif (l == 35) return;\nout[l] = simd_sum(1.0f);",
        (64,),
        "simd_sum at source line 3: lanes 0-2, 4-31 of simdgroup 1 wait for lanes 3, "
        "which never arrive; threads 0-31, 35 have returned",
    ),
    "quad_parts": (
        L + "float v = 1; if (l & 1) v = quad_sum(v); out[l] = v;",
        (32,),
        "quad_sum at source line 1: lanes 1, 3 of simdgroup 0 wait for lanes 0, 2",
    ),
    "return_before_barrier": (
        L + "if (l > 40) return;\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "out[l] = 1;",
        (64,),
        "threadgroup_barrier at source line 2 is not reached by all threads: threads "
        "0-40 of 64 wait; threads 41-63 have returned",
    ),
    "two_barriers": (
        L + "if (l < 32)\nthreadgroup_barrier(mem_flags::mem_threadgroup);\nelse\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\nout[l] = 1;",
        (64,),
        "thread 32 reached the one at source line 4 while 32 threads wait at the one "
        "at source line 2",
    ),
    "barrier_and_collective": (
        L + "if (l < 32) threadgroup_barrier(mem_flags::mem_none);\n"
        "else if (l < 40) simd_sum(1.0f);\nout[l] = 1;",
        (64,),
        "simd_sum at source line 2: lanes 0-7 of simdgroup 1 wait for lanes 8-31.*"
        r"threads 0-31 wait at threadgroup_barrier \(source line 1\)",
    ),
    "partial_matrix": (
        "simdgroup_float8x8 m(1.0f), d; simdgroup_multiply(d, m, m);\n"
        "out[thread_position_in_grid.x] = d.thread_elements()[0];",
        (31,),
        "simdgroup_multiply at source line 1: a simdgroup_matrix needs all 32 lanes",
    ),
    "too_many_threads": (
        "out[thread_position_in_grid.x] = 1;",
        (1025,),
        r"threadgroup of \(1025, 1, 1\) has 1025 threads; Metal takes 1 to 1024",
    ),
    "too_much_threadgroup_memory": (
        L + "threadgroup float x[8193]; x[l] = 1; out[l] = x[l];",
        (32,),
        "take 32772 bytes; Metal has 32768",
    ),
    "null": (
        "((device int*)16)[thread_position_in_grid.x] = 1;",
        (32,),
        "thread 0 accessed address 0x10, which is not mapped",
    ),
    "wild_write": (
        L + "out[(size_t)(l + 1) << 44] = 1;",
        (32,),
        "thread 0 accessed address|thread 0 used a misaligned vector pointer or a wild",
    ),
    "stack": (
        L + "volatile float big[200000]; for (int i = 0; i < 200000; i++) big[i] = i;"
        "out[l] = big[l];",
        (32,),
        "stack overflow in thread 0",
    ),
    "past_threadgroup_memory": (
        L + "threadgroup float x[16]; x[l + 4000 * l] = 1; out[l] = x[0];",
        (32,),
        "thread 1 went past the end of threadgroup memory",
    ),
    "zero_division": (
        L + "out[l] = 7 / ((int)l / 40);",
        (32,),
        "integer division by zero in thread 0",
    ),
    "undeclared": (
        "\nout[0] = thread_position_in_grid.x + nonsense;",
        (32,),
        "source:2:.*error: use of undeclared identifier 'nonsense'",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_kernels_name_the_place(name: str) -> None:
    body, shape, message = BROKEN[name]
    with pytest.raises(ExecutorError, match=message) as caught:
        run(body, shape=shape, name=name)
    assert f"kernel '{name}'" in str(caught.value)
    # The executor is whole afterwards.
    sums = run(L + "out[l] = simd_sum(1.0f);", shape=(64,))
    assert sums.tolist() == [32.0] * 64


def test_error_names_the_threadgroup_and_the_header_line() -> None:
    header = (
        "\nMETAL_FUNC float part(uint l, uint g) {\n  return g == 3 && l < 4 ? 0.0f"
    )
    header += "\n    : simd_sum(1.0f);\n}"
    body = "out[thread_position_in_grid.x] = part(thread_index_in_threadgroup, "
    with pytest.raises(ExecutorError, match=r"header line 4.*threadgroup \(3, 0, 0\)"):
        run(
            body + "threadgroup_position_in_grid.x);",
            shape=(160,),
            group=(32, 1, 1),
            header=header,
        )


def test_signal_handlers_are_restored() -> None:
    # Python's own handlers are back, so a fault elsewhere still prints a traceback.
    numbers = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
    before = [signal.getsignal(n) for n in numbers]
    enabled = faulthandler.is_enabled()
    with pytest.raises(ExecutorError):
        run(BROKEN["null"][0])
    assert [signal.getsignal(n) for n in numbers] == before
    assert faulthandler.is_enabled() == enabled


def test_a_fault_outside_a_kernel_still_ends_the_process() -> None:
    code = (
        "import ctypes\nfrom cpu_case import run\n"
        "run('out[thread_position_in_grid.x] = 1;')\nctypes.string_at(8)\n"
    )
    here = Path(__file__).parent
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path[:0] = {[str(here), str(here.parent)]}\n{code}",
        ],
        capture_output=True,
    )
    assert done.returncode == -signal.SIGSEGV


def test_kernels_run_from_several_python_threads() -> None:
    results: dict[int, Any] = {}

    def work(i: int) -> None:
        body = L + "out[thread_position_in_grid.x] = simd_sum(a[0] + 0 * l);"
        x = mx.array([float(i)] * 8)
        results[i] = run(body, x, shape=(256,), group=(64, 1, 1)).tolist()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: [32.0 * i] * 256 for i in range(6)}


def copy_kernel(x: mx.array) -> mx.array:
    body = "uint i = thread_position_in_grid.x; out[i] = 2 * a[i];"
    return run(body, x, shape=(4,))


@pytest.mark.parametrize(
    ("transform", "argument"),
    [(mx.compile, mx.ones(4)), (mx.vmap, mx.ones((3, 4))), (mx.grad, mx.ones(4))],
)
def test_transforms_are_refused(transform: Any, argument: mx.array) -> None:
    name = transform.__name__
    with pytest.raises(ExecutorError, match=f"cannot be traced by .*mx.{name}"):
        mx.eval(transform(lambda x: copy_kernel(x * 3).sum())(argument))


def test_forward_mode_is_refused() -> None:
    with pytest.raises(ExecutorError, match="cannot be traced by .*mx.jvp"):
        mx.eval(mx.jvp(copy_kernel, [mx.ones(4)], [mx.ones(4)]))


def test_gradients_that_do_not_need_the_kernel_work() -> None:
    def loss(x: mx.array) -> mx.array:
        return (x * mx.stop_gradient(copy_kernel(x))).sum() + copy_kernel(mx.ones(4))[0]

    assert mx.grad(loss)(mx.array([1.0, 2, 3, 4])).tolist() == [2, 4, 6, 8]
