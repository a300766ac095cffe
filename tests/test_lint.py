"""Every lint rule catches a planted violation and passes its clean counterpart."""

import pytest

from mlx_phase.executor.lint import lint

# (rule, header that breaks it, the same thing as Metal allows it)
HEADERS = [
    ("1", "void f(float* p) {}", "void f(device float* p) {}"),
    ("1", "void f(const float& p) {}", "void f(const constant float& p) {}"),
    (
        "1",
        "template <typename T> T* f(uint i);",
        "template <typename T> thread T* f();",
    ),
    ("1", "void f(device float** p) {}", "void f(device float* thread* p) {}"),
    ("1", "void f(vec<float, 4>* p) {}", "void f(threadgroup vec<float, 4>* p) {}"),
    ("1", "void f(float (&a)[4]) {}", "void f(thread float (&a)[4]) {}"),
    ("1", "struct S {}; void f(S& s) {}", "struct S {}; void f(thread S& s) {}"),
    (
        "1",
        "template <class T> void f(typename A<T>::type* p) {}",
        "template <class T> void f(device typename A<T>::type* p) {}",
    ),
    (
        "2",
        "struct S { float a; thread float& at(int i) thread { return a; } };",
        "struct S { float a; float at(int i) const { return a; } };",
    ),
    (
        "2",
        "struct S { float a; void set(float v) { a = v; } };",
        "struct S { int a; S(int v) : a(v) {} void set(int v) thread { a = v; } };",
    ),
    (
        "2",
        "struct S { void f() thread { g(this); } };",
        "struct S { int a; void f() thread { g(this->a); } };",
    ),
    ("2", "void f() { int a; decltype(a) b; }", "void f() { int a; int b; }"),
    (
        "2",
        "struct S { int a; int f() noexcept { return a; } };",
        "struct S { PAIR(float) x[4], y; int f() const noexcept { return y.x; } };",
    ),
    ("3", "threadgroup float shared[32];", "void f(threadgroup float* shared) {}"),
    (
        "3",
        "void f(uint i) { threadgroup float a[4]; a[i] = 0; }",
        "void f(threadgroup float (&a)[4], uint i) { a[i] = 0; }",
    ),
    ("4", "int counter = 0;", "constant constexpr int counter = 0;"),
    ("4", "constexpr float table[2] = {1, 2};", "constant float table[2] = {1, 2};"),
    ("4", "void f() { static int n; }", "struct S { static constant int n = 1; };"),
    ("5", "void f() { goto end; end: return; }", "void f() { return; }"),
    ("5", "void f() { try { g(); } catch (int) {} }", "void f() { g(); }"),
    ("5", "void f() { throw 1; }", "void f() { g(1); }"),
    (
        "5",
        "struct S { virtual void f() const; };",
        "struct S { void f() const; };",
    ),
    ("5", "void f() { g(new int); }", "void f() { int a; g(a); }"),
    ("5", "void f(uint i) { delete i; }", "struct S { S() = delete; };"),
    ("5", "thread_local int x;", "constant int x = 1;"),
    ("5", "double f(float x) { return x; }", "float f(float x) { return x; }"),
    ("5", "long double f();", "long f();"),
    ("5", "#define REAL double", "#define REAL float"),
    ("5", "void f() { std::min(1, 2); }", "void f() { metal::min(1, 2); }"),
    (
        "5",
        "void f(uint x) { auto g = [&](uint a) { return a + x; }; }",
        "void f(uint x) { uint g[2] = {x, x}; uint h = g[x]; }",
    ),
    (
        "5",
        "void f(int n, ...) {}",
        "template <typename... A> void f(int n, A... a) {}",
    ),
    ("5", "void f(int (*g)(int)) {}", "template <typename F> void f(F g) {}"),
    (
        "5",
        "int f(int n) { return n ? f(n - 1) : 0; }",
        "int f(int n) { return n; } int f(float x) { return f(1); }",
    ),
    (
        "5",
        "int g(int n); int f(int n) { return g(n); } int g(int n) { return f(n); }",
        "int g(int n) { return n; } int f(int n) { return g(n); }",
    ),
    (
        "6",
        "template <int N> void f() { if constexpr (N > 1) g(); }",
        "template <int N> void f() { if (N > 1) g(); }",
    ),
    ("6", "void f() { auto [a, b] = g(); }", "void f() { auto a = g(); }"),
    (
        "6",
        "template <int... N> int f() { return (N + ...); }",
        "template <typename... A> void f(A... a) { g(a...); }",
    ),
    ("6", "inline constant int x = 1;", "inline int f() { return 1; }"),
    ("6", "namespace a::b { void f(); }", "namespace a { using namespace b::c; }"),
    ("text", "// caf\u00e9\n", "// cafe\n"),
    ("text", '#include "mlx/utils.h"\n', "#include <metal_stdlib>\n"),
    ("text", "#include <vector>\n", "#include <metal_simdgroup_matrix>\n"),
]

LANE = "uint lane = thread_index_in_simdgroup;\n"
BODIES = [
    ("1", "float* p = &a;", "thread float* p = &a;"),
    ("1", "const auto& v = x[0];", "const auto v = x[0];"),
    ("1", "y[0] = *(float*)x;", "y[0] = *(const device float*)x;"),
    ("3", "threadgroup float a = 0;", "threadgroup float a; a = 0;"),
    ("4", "static float a[4];", "float a[4];"),
    (
        "11",
        LANE + "if (lane >= n) return;\nfloat s = simd_sum(v);",
        LANE + "float s = simd_sum(lane >= n ? 0 : v);\nif (lane >= n) return;",
    ),
    (
        "11",
        LANE + "if (lane < 16) s = simd_shuffle(v, 3);",
        LANE + "float t = simd_shuffle(v, 3);\nif (lane < 16) s = t;",
    ),
    (
        "11",
        "for (uint i = thread_index_in_simdgroup; i < n; i += 32) s += simd_max(x[i]);",
        "for (uint i = thread_index_in_simdgroup; i < n; i += 32) s += x[i];\n"
        "s = simd_max(s);",
    ),
    (
        "11",
        LANE + "for (int i = 0; i < n; i++) { if (lane > 3) break; simd_sum(v); }",
        LANE + "for (int i = 0; i < n; i++) { if (n > 3) break; simd_sum(v); }",
    ),
    (
        "11",
        "uint sg = simdgroup_index_in_threadgroup;\n"
        "if (sg == 0) threadgroup_barrier(mem_flags::mem_threadgroup);",
        "uint sg = simdgroup_index_in_threadgroup;\nif (sg == 0) s = simd_sum(s);\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);",
    ),
    (
        "11",
        "uint i = thread_position_in_grid.x;\nif (i >= n) return;\n"
        "threadgroup_barrier(mem_flags::mem_none);",
        "uint row = threadgroup_position_in_grid.x;\nif (row >= n) return;\n"
        "threadgroup_barrier(mem_flags::mem_none);",
    ),
    (
        "11",
        "uint i = thread_index_in_threadgroup;\nif (i == 0) { s = simd_sum(s); }",
        "uint i = thread_index_in_threadgroup / 32;\nif (i == 0) { s = simd_sum(s); }",
    ),
    (
        "11",
        LANE + "UNROLL for (int i = 0; i < 4; i++) { if (lane < 9) simd_sum(v); }",
        LANE + "UNROLL for (int i = 0; i < 4; i++) { if (v < 9) simd_sum(v); }",
    ),
    (
        "11",
        LANE + '_Pragma("unroll")\nfor (uint i = 0; i < lane; i++) simd_sum(v);',
        LANE + '_Pragma("unroll")\nfor (uint i = 0; i < n; i++) simd_sum(v);',
    ),
    (
        "11",
        LANE + "switch (lane) { case 0: if (n) simd_sum(v); break; default: n = 0; }",
        LANE + "switch (n) { case 0: if (n) simd_sum(v); break; default: n = 0; }",
    ),
    (
        "11",
        LANE + "float t = x[lane];\nif (t > 0) t = simd_max(t);",
        LANE + "float t = x[lane];\nt = simd_max(t);\nif (t > 0) t = simd_sum(t);",
    ),
    (
        "11",
        LANE + "for (int i = lane; i < 8; i++) { n += i; }\nif (n > 3) simd_sum(v);",
        LANE + "for (int i = lane; i < 8; i++) { s += i; }\n"
        "for (int i = 0; i < 8; i++) simd_sum(v);",
    ),
    (
        "11",
        LANE + "if (lane == 0) total(s);",
        LANE + "total(s); if (lane == 0) other(s);",
    ),
]


def rules(text, **options):
    return {f.rule for f in lint(text, **options)}


@pytest.mark.parametrize("rule, bad, good", HEADERS)
def test_header_rule(rule, bad, good):
    assert rule in rules(bad, where="header")
    assert rules(good, where="header") == set()


@pytest.mark.parametrize("rule, bad, good", BODIES)
def test_body_rule(rule, bad, good):
    options = {"body": True, "collectives": ["total"]}
    assert rule in rules(bad, **options)
    assert rules(good, **options) == set()


ARITHMETIC = """
template <typename T, int N>
METAL_FUNC T mix_up(const device T* x, const int K, thread float* acc, const uint q) {
  const int row = K * N + N * K, bits = q & N;
  acc[row % N] = float(x[row * K]) * float(*x) + float(q & 15u);
  const device vec<T, 4>* p = (const device vec<T, 4>*)(x + (size_t)K * N);
  return T(acc[0] * N) && N > bits || K < row ? T(float(p->x) * K) : T(-1);
}
"""


def test_arithmetic_is_not_taken_for_declarations():
    """Products and masks of values beside real pointers."""
    assert lint(ARITHMETIC) == []


def test_template_values_are_no_types():
    head = "template <int R, bool W> void f(thread float* a) "
    text = head + "{ float b[R * 4]; int c = R & 3; }"
    assert lint(text) == []


def test_types_from_elsewhere():
    assert rules("Pair* p = q;", body=True, types=["Pair"]) == {"1"}
    assert rules("y = Pair * p;", body=True) == set()


def test_lines_count_from_one_and_skip_comments():
    text = (
        "/* goto\n * double */ // throw\n#define A \\\n  1\nvoid f() {\n  goto x;\n}\n"
    )
    assert [(f.line, f.rule) for f in lint(text)] == [(6, "5")]


def test_helper_that_reaches_a_collective_counts_as_one():
    header = (
        "float inner(float v) { return simd_sum(v); }\n"
        "float outer(float v, uint lane) {\n  if (lane > 2) v = inner(v);\n"
        "  return v;\n}"
    )
    assert [(f.line, f.rule) for f in lint(header)] == [(3, "11")]


def test_finding_names_its_place():
    (finding,) = lint("void f() { goto x; }", where="header")
    assert str(finding) == "header:1: rule 5: goto is not in Metal"
