"""The strict check: planted violations that only a compiler sees, and clean kernels."""

import mlx.core as mx
import pytest

from mlx_phase.executor import ExecutorError, strict
from mlx_phase.executor.signature import Arg

INPUTS = [Arg("x", "float16_t", 2, 4096), Arg("s", "float", 0, 1)]
OUTPUTS = [Arg("y", "float16_t", 2, 4096)]
TEMPLATE = [("T", mx.float16), ("N", 4)]
UNROLL = '_Pragma("unroll")'
LANE = "uint lane = thread_index_in_simdgroup;\n"


def check(source, header="", *, inputs=INPUTS, outputs=OUTPUTS, **options):
    options.setdefault("template", TEMPLATE)
    return strict.check("k", inputs, outputs, LANE + source, header, **options)


def found(source, header="", **options):
    return {f.rule for f in check(source, header, **options)}


# (rule, header, source) that breaks it, then the same as Metal takes it
PAIRS = [
    (
        "1",
        "void f(device float& a) {}\n",
        "float a = s; f(a); y[lane] = T(a);",
        "void f(thread float& a) {}\n",
        "float a = s; f(a); y[lane] = T(a);",
    ),
    (
        "1",
        "template <typename T> T f(const threadgroup T* p) { return p[0]; }\n",
        "y[lane] = f(x + lane);",
        "template <typename T> T f(const device T* p) { return p[0]; }\n",
        "y[lane] = f(x + lane);",
    ),
    (
        "3",
        "inline float f(uint i) { threadgroup float a[4]; a[i] = 1; return 1; }",
        "y[lane] = T(f(lane));",
        "inline float f(float v, threadgroup float* a) { a[0] = v; return v; }",
        "threadgroup float a[N]; y[lane] = T(f(s, a));",
    ),
    ("4", "int n = 3;\n", "y[n] = T(s);", "constant int n = 3;\n", "y[n] = T(lane);"),
    (
        "5",
        "struct S { virtual float f() const { return 1; } };\n",
        "S a; y[lane] = T(a.f());",
        "struct S { float f() const { return 1; } };\n",
        "S a; y[lane] = T(a.f());",
    ),
    ("5", "", "double a = s; y[lane] = T(a);", "", "float a = s; y[lane] = T(a);"),
    (
        "6",
        "template <typename T> void f(T) { static_assert(sizeof(T) == 4); }\n",
        "f(s); y[lane] = T(s);",
        'template <typename T> void f(T) { static_assert(sizeof(T) == 4, "4"); }\n',
        "f(s); y[lane] = T(s);",
    ),
    (
        "6",
        "",
        "if (float a = s; a > 0) y[lane] = T(a);",
        "",
        "float a = s; if (a > 0) y[lane] = T(a);",
    ),
    (
        "7",
        "",
        "half4 h = half4(T(1)); float4 f = h; y[lane] = T(f.x);",
        "",
        "half4 h = half4(T(1)); float4 f = float4(h); y[lane] = T(f.x);",
    ),
    (
        "7",
        "",
        "float4 f = float4(1, 2, 3); y[lane] = T(f.x);",
        "",
        "float4 f = float4(float2(1, 2), 3, 4); y[lane] = T(f.x);",
    ),
    (
        "7",
        "",
        "y[lane] = T(vec<float, 4>(s, s).x);",
        "",
        "y[lane] = T(vec<float, 2>(s, s).x);",
    ),
    ("7", "", "y[min(lane, 3)] = T(s);", "", "y[min(lane, 3u)] = T(s);"),
    ("7", "", "y[lane] = T(simd_add(s));", "", "y[lane] = T(simd_sum(s));"),
    ("7", "", "x[lane] = T(s);", "", "y[lane] = x[lane];"),
    ("7", "", "y[lane] = as_type<T>(s);", "", "y[lane] = as_type<T>(ushort(lane));"),
    ("7", "", "float a; y[lane] = T(s)", "", "y[lane] = T(s);"),
    (
        "12",
        "",
        "simdgroup_matrix<float, 8, 8> a(s); y[lane] = T(a.thread_elements()[0]);",
        "#include <metal_simdgroup_matrix>\n",
        "simdgroup_matrix<float, 8, 8> a(s); y[lane] = T(a.thread_elements()[0]);",
    ),
    (
        "12",
        "#include <metal_simdgroup_matrix>\n",
        "simdgroup_matrix<float, 16, 8> a(s); y[lane] = T(a.thread_elements()[0]);",
        "#include <metal_simdgroup_matrix>\n",
        "simdgroup_matrix<T, 8, 8> a; simdgroup_load(a, x + lane / 32, 8);\n"
        "simdgroup_store(a, y, 8);",
    ),
    (
        "13",
        "",
        "float a[8]; for (int i = 0; i < 8; i++) a[i] = x[i];\n"
        "float t = 0; for (uint i = 0; i < lane % 8; i++) t += a[i]; y[lane] = T(t);",
        "",
        f"float a[8]; {UNROLL} for (int i = 0; i < 8; i++) a[i] = x[i];\n"
        f"float t = 0; {UNROLL} for (int i = 0; i < 8; i++) t += a[i]; y[lane] = T(t);",
    ),
    (
        "limits",
        "",
        "threadgroup float a[N * 1024], b[N * 1024 + 1]; a[lane] = b[lane] = s;"
        " threadgroup_barrier(mem_flags::mem_threadgroup); y[lane] = T(a[1] + b[2]);",
        "",
        "threadgroup float a[N * 1024], b[N * 1024]; a[lane] = b[lane] = s;"
        " threadgroup_barrier(mem_flags::mem_threadgroup); y[lane] = T(a[1] + b[2]);",
    ),
]


@pytest.mark.parametrize("rule, bad_header, bad, good_header, good", PAIRS)
def test_rule(rule, bad_header, bad, good_header, good):
    assert rule in found(bad, bad_header)
    assert [str(f) for f in check(good, good_header)] == []


# An address space left out means thread up to MSL 4.0 and generic from 4.1 on.
VERSIONS = [
    (
        "up to MSL 4.0",
        "float f(const float* p) { return *p; }\n",
        "float t = 0; t += f(y_in + lane); y[lane] = T(t);",
    ),
    (
        "from MSL 4.1",
        "void g(thread float& a) { a = 1; }\nvoid f(float& a) { g(a); }\n",
        "float a = s; f(a); y[lane] = T(a);",
    ),
    (
        "from MSL 4.1",
        "float g(thread float* p) { return *p; }\n"
        "struct S { float a; float f() const { return g((thread float*)&a) + h(&a); }\n"
        "  float h(const thread float* p) const { return *p; } };\n",
        "S a; a.a = s; y[lane] = T(a.f());",
    ),
    (
        "up to MSL 4.0",
        "struct S { float a; float f() const { return a; } };\n",
        "const device S* p = (const device S*)y_in; y[lane] = T(p->f());",
    ),
]


@pytest.mark.parametrize("version, header, source", VERSIONS)
def test_rules_of_both_versions(version, header, source):
    inputs = [*INPUTS, Arg("y_in", "float", 1, 4096)]
    messages = [f.message for f in check(source, header, inputs=inputs)]
    tagged = [m for m in messages if "MSL" in m]
    assert tagged and all(f"[{version}]" in m for m in tagged)


def test_lines_are_the_users():
    header = "// one\n#include <metal_simdgroup>\ninline float f() { return nope; }\n"
    source = "/* a\n b */ threadgroup float a[4],\n  b[4];\ny[lane] = T(wrong);"
    places = {(f.where, f.line) for f in check(source, header)}
    assert places == {("header", 3), ("source", 5)}  # LANE is line 1


HELPER = "template <typename T> T first(const device T* p) { return p[0]; }\n"
ANY = "template <typename P> float first(P p) { return p[0]; }\n"


def test_both_spaces():
    """An input of under 8 elements is constant: helpers must take that too."""
    source = "y[lane] = T(first(x) * s);"
    assert check(source, HELPER) == []
    findings = check(source, HELPER, both_spaces=["x"])
    assert [f.message for f in findings if "'x' in constant" in f.message]
    assert check(source, ANY, both_spaces=["x"]) == []
    with pytest.raises(ValueError, match="no inputs of k"):
        check(source, ANY, both_spaces=["z"])


def test_too_many_buffers():
    many = [Arg(f"a{i}", "float", 1, 64) for i in range(30)]
    body = "y[lane] = T(" + " + ".join(f"{a.name}[lane]" for a in many) + ");"
    assert check(body, inputs=many) == []
    assert found(body + "\nint n = a3_shape[0]; y[n] = 0;", inputs=many) == {"limits"}


def test_kernel_that_mlx_itself_breaks():
    """MLX closes the parameter list early: shapes, two outputs and no attribute."""
    outputs = [*OUTPUTS, Arg("z", "float", 1, 64)]
    findings = strict.check("k", INPUTS, outputs, "z[x_shape[0]] = s; y[0] = 0;")
    assert "limits" in {f.rule for f in findings}


def test_divergence_and_lint_are_part_of_it():
    header = "float total(float v) { return simd_sum(v); }\n"
    assert found("if (lane < 3) y[lane] = T(total(s));", header) == {"11"}


LIBRARY = """
threadgroup alignas(16) float a[N * 16];
threadgroup uint flag;
float4 v = float4(*(const device vec<T, 4>*)(x + 4 * lane));
half2 h = as_type<half2>(uint(lane) & 0x000f000fu | 0x64006400u);
const float2 w = float2(h);
float t = fma(v.x, w.x, max(v.y, w.y)) + fast::exp2(v.z) + metal::precise::exp(v.w);
t += dot(v.xy, w) + select(t, s, isinf(t)) + clamp(t, -1.0f, 1.0f) + rsqrt(abs(t));
t = simd_shuffle_xor(t, 4) + simd_broadcast(t, 0) + quad_sum(t) + simd_max(t);
size_t i = size_t(popcount(lane)) + ulong(ctz(lane)) + min(int(lane), 3);
if (lane == 0) flag = 0;
a[lane] = t + Limits<float>::finite_min + metal::numeric_limits<float>::max();
threadgroup_barrier(mem_flags::mem_threadgroup);
using V = vec<float, 4>;
V u = V(t, t, 0, 1) + metal::vec<float, 4>(v) * 2;
u.xy = u.zw;
MLX_MTL_PRAGMA_UNROLL
for (int k = 0; k < N; k++) u[k] += a[k];
simdgroup_matrix<float, 8, 8> m(0.0f), b;
simdgroup_load(b, a, 8);
simdgroup_multiply_accumulate(m, b, b, m);
simdgroup_store(m, a, 8);
simdgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
y[elem_to_loc(uint(lane), x_shape, x_strides, x_ndim)] = T(u.x + flag);
y[i + ceildiv(N, 3)] = T(any(u > v) ? 1.0 : a[lane]);
"""


def test_library_is_declared():
    """What kernels use of Metal and of MLX's prelude, for each dtype."""
    header = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\n"
    for dtype, name in ((mx.float16, "float16_t"), (mx.bfloat16, "bfloat16_t")):
        findings = check(
            LIBRARY,
            header,
            inputs=[Arg("x", name, 2, 4096), INPUTS[1]],
            outputs=[Arg("y", name, 2, 4096)],
            template=[("T", dtype), ("N", 4)],
        )
        assert [str(f) for f in findings] == []


def test_atomic_outputs_and_plain_structs():
    """Metal copies plain structs between address spaces."""
    header = "struct Pair { float a; uint b; };\n"
    source = (
        "Pair p = ((const device Pair*)x)[lane]; threadgroup Pair q[2]; q[0] = p;\n"
        "atomic_fetch_add_explicit(&y[lane], q[0].a + p.b, memory_order_relaxed);"
    )
    outputs = [Arg("y", "float", 1, 64)]
    assert check(source, header, outputs=outputs, atomic_outputs=True) == []


def test_assert_clean():
    strict.assert_clean("k", INPUTS, OUTPUTS, LANE + "y[lane] = T(s);", "", TEMPLATE)
    with pytest.raises(ExecutorError, match=r"(?s)2 finding.*source:1: .*source:2: "):
        strict.assert_clean(
            "k", INPUTS, OUTPUTS, "float* p;\ny[thread_position_in_grid.x] = 1 +;"
        )


def test_missing_compiler_says_what_to_install(monkeypatch):
    monkeypatch.setattr(strict, "find_spec", lambda name: None)
    strict._compiler.cache_clear()
    with pytest.raises(ExecutorError, match="pip install ziglang"):
        check("y[lane] = T(s);")
    strict._compiler.cache_clear()
