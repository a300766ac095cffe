"""Rewrites of Metal text: what changes, what must not, and that lines stay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_phase.executor import text


def emit(elem: str, name: str, dims: str, align: str) -> str:
    return f"<{elem}|{name}|{dims}|{align}>"


@pytest.mark.parametrize(
    ("metal", "expected"),
    [
        ("threadgroup float a[N][M], b[K];", "<float|a|[N][M]|> <float|b|[K]|>"),
        ("if (c) { threadgroup T x; }", "if (c) { <T|x||> }"),
        (
            "threadgroup metal::vec<T, 4> v[(N > 2 ? 3 : 4)];",
            "<metal::vec<T, 4>|v|[(N > 2 ? 3 : 4)]|>",
        ),
        ("threadgroup alignas(16) unsigned int a[4];", "<unsigned int|a|[4]|16>"),
        ("threadgroup uint a[b[2]];", "<uint|a|[b[2]]|>"),
        ("threadgroup atomic<int> c[4];", "<atomic<int>|c|[4]|>"),
        ("threadgroup MMA<T, 4>::frag f[2];", "<MMA<T, 4>::frag|f|[2]|>"),
        ("for (;;) threadgroup int k;", "for (;;) <int|k||>"),
        (
            "threadgroup float\n  a[4],\n  b[2];\nx",
            "<float|a|[4]|> <float|b|[2]|>\n\n\nx",
        ),
        ("#define N 4\nthreadgroup T a[N];", "#define N 4\n<T|a|[N]|>"),
    ],
)
def test_threadgroup_variables_are_rewritten(metal, expected):
    assert text.rewrite_threadgroup(metal, emit) == expected


@pytest.mark.parametrize(
    "metal",
    [
        "void f(threadgroup T* p, threadgroup T (&a)[N], const threadgroup U& u) {",
        "threadgroup_barrier(mem_flags::mem_threadgroup);",
        "threadgroup T* q = a;",
        "threadgroup const T* q = a + 1;",
        "f((threadgroup float*)p);",
        "template <typename T> T f(T v, threadgroup float x[4]);",
        "using P = threadgroup float*;",
    ],
)
def test_pointers_and_parameters_stay(metal):
    assert text.rewrite_threadgroup(metal, emit) == metal


@pytest.mark.parametrize(
    ("metal", "expected"),
    [
        ("a // b\nc", "a  \nc"),
        ("a /* b\n\n */ c", "a \n\n c"),
        ('f("// no", \'"\') // yes', 'f("// no", \'"\')  '),
        ("x /* // */ y", "x   y"),
        ("a / b", "a / b"),
    ],
)
def test_comments_go_and_strings_stay(metal, expected):
    assert text.strip_comments(metal) == expected


@pytest.mark.parametrize(
    ("metal", "expected"),
    [
        ("uint i [[thread_position_in_grid]];", "uint i ;"),
        ("T* p [[buffer(0)]], T* q[[ buffer(\n1) ]]", "T* p , T* q\n"),
        ("a[b[i]] + c[d[0][1]]", "a[b[i]] + c[d[0][1]]"),
    ],
)
def test_attributes_go_and_indices_stay(metal, expected):
    assert text.remove_attributes(metal) == expected


def test_metal_includes_go():
    metal = "#include <metal_stdlib>\n # include <metal_atomic> // x\n#include <a.h>"
    assert text.remove_metal_includes(metal) == "\n\n#include <a.h>"


def test_swizzles_of_the_text_and_no_others():
    lines = text.swizzle_macros("v.wzyx; p->xy.yx; c.rgb; v.x; f.max; 1.0f").split("\n")
    assert lines == [
        "#define MSL_SWIZZLES_2 MSL_SWIZZLE(xy, 2, 4) MSL_SWIZZLE(yx, 2, 1)",
        "#define MSL_SWIZZLES_3 MSL_SWIZZLE(rgb, 3, 36) MSL_SWIZZLE(xy, 2, 4)"
        " MSL_SWIZZLE(yx, 2, 1)",
        "#define MSL_SWIZZLES_4 MSL_SWIZZLE(rgb, 3, 36) MSL_SWIZZLE(wzyx, 4, 27)"
        " MSL_SWIZZLE(xy, 2, 4) MSL_SWIZZLE(yx, 2, 1)",
        "",
    ]


PIECES = (
    'threadgroup | float |a|[4]|[[x]]|[[|]]|;|,|//|/*|*/|"|(|)|<|>|{|}|#define |::|T|'
    "alignas(8) |\\|*|&|'|\n"
).split("|")


@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join))
def test_line_count_never_changes(metal):
    assert text.strip_comments(metal).count("\n") == metal.count("\n")
    assert text.remove_metal_includes(metal).count("\n") == metal.count("\n")
    assert text.remove_attributes(metal).count("\n") == metal.count("\n")
    rewritten = text.rewrite_threadgroup(metal, emit)
    assert rewritten.count("\n") == metal.count("\n")
