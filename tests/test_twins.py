"""Definitions that become redefinitions where address spaces mean nothing."""

import mlx.core as mx
from cpu_case import run

from mlx_phase.executor.twins import drop_twins

HEADER = """
namespace tools {
template <typename T> struct pointee {};
template <typename T> struct pointee<device T*> {
  typedef T type;
};
template <typename T> struct pointee<threadgroup T*> {
  typedef T type;
};
}
METAL_FUNC float first(const device float* p) { return p[0]; }
METAL_FUNC float first(const threadgroup float* p) { return p[0]; }
METAL_FUNC float first(const thread float* p) { return p[0] + 1; }
"""


def test_keeps_lines_and_the_first_of_twins() -> None:
    got = drop_twins(HEADER)
    assert got.count("\n") == HEADER.count("\n")
    assert got.count("pointee<") == 1 and "pointee<device T*>" in got
    # The third differs in more than its address space, and stays.
    assert got.count("float first(") == 2 and "const thread float* p" in got
    assert got.splitlines()[10] == HEADER.splitlines()[10]


def test_equal_texts_in_two_branches_stay() -> None:
    text = "#if A\nint f() { return 1; }\n#else\nint f() { return 1; }\n#endif\n"
    assert drop_twins(text) == text


def test_braces_in_directives_and_initialisers() -> None:
    text = (
        "#define OPEN { \\\n  {\nconstant int a[2] = {1, 2};\n"
        "int f(device int* p) { if (p) { return a[0]; } return 2; }\n"
        "int f(constant int* p) { if (p) { return a[0]; } return 2; }\nint g();\n"
    )
    lines = text.splitlines()
    lines[4] = ""
    assert drop_twins(text).splitlines() == lines


def test_overloads_by_address_space_run() -> None:
    header = HEADER.replace("p[0] + 1; }", "p[0]; }")
    body = """
      threadgroup float shared[32];
      uint l = thread_index_in_threadgroup;
      shared[l] = 3;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      tools::pointee<device float*>::type own = a[l];
      out[l] = first(a) + first(shared) + first(&own);
    """
    got = run(body, mx.ones(32), header=header)
    assert got.tolist() == [5.0] * 32
