"""Kernels with one planted bug each, and what the sanitizer must say of it.

The kinds are those of public bug reports on GPU kernels: a lost tail, a stray index, a
missing barrier, an accumulator without a start, a return before a collective.
"""

from dataclasses import dataclass, field

import mlx.core as mx

L = "uint l = thread_index_in_threadgroup, g = thread_position_in_grid.x;\n"
GROUP = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"


def ramp(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """0, 1, 2, ..."""
    size = 1
    for n in shape:
        size *= n
    return mx.arange(size).reshape(shape).astype(dtype)


@dataclass(frozen=True)
class Bug:
    """A kernel on input ``a`` with output ``out``; 64 threads unless said otherwise.

    ``line``: of ``body``, where the bug is. ``buffer`` and ``index``: the element.
    """

    check: str
    body: str
    line: int | None = None
    buffer: str | None = None
    index: int | None = None
    says: str = ""
    a: mx.array = field(default_factory=lambda: ramp(64))
    shape: tuple[int, ...] = (64,)
    dtype: mx.Dtype = mx.float32
    threads: int = 64
    group: int = 64
    options: dict = field(default_factory=dict)


MEM = {
    # the last columns when K is no multiple of the block: mlx#917, mlx#1577
    "k_tail": Bug(
        "mem", L + "float s = 0;\nfor (uint k = l; k < 96; k += 64)\n  s += a[k];\n"
        "out[l] = s;", 4, "a", 95, "read of 4 bytes", ramp(95),
    ),
    # the grid is rounded up and rows are not checked: mlx#4250
    "rows_past_the_end": Bug(
        "mem", L + "out[g] = a[g % 64];", 2, "out", 72, "write of 4 bytes",
        shape=(72,), threads=80, group=40,
    ),
    # 16 bits are too few for an index: mlx#3631
    "short_index": Bug(
        "mem", L + "short i = short(g + 32767);\nout[l] = a[i];", 3, "a", -32768,
        a=ramp(40000),
    ),
    # the cache goes on after the keys that are in use: mlx#2563
    "past_a_view": Bug(
        "mem", L + "int s = a_strides[0];\nout[l] = a[l % 2 * s + l / 2];", 3, "a", 24,
        "between the elements of the strided", ramp(2, 64)[:, :24],
        options={"ensure_row_contiguous": False},
    ),
    "odd_vector": Bug(
        "mem", L + "out[l] = (*(const device half4*)(a + 1 + l % 8)).x;", 2, "a", 1,
        "misaligned access to const half4.*no multiple of 8 bytes",
        ramp(64, dtype=mx.float16),
    ),
    "write_to_an_input": Bug(
        "mem", L + "device float* p = (device float*)a;\np[l] = 0;\nout[l] = p[l];", 3,
        "a", 0, "changes an input",
    ),
    "below_the_start": Bug(
        "mem", L + "out[l] = a[int(l) - 1];", 2, "a", -1, "thread 0 of threadgroup",
    ),
    "threadgroup_array": Bug(
        "mem", L + "threadgroup float t[64];\nt[l + 1] = a[l];\n" + GROUP
        + "out[l] = t[l];", 3, "t", 64, "threadgroup `float t.64.`",
    ),
    "row_of_a_tile": Bug(
        "mem", L + "threadgroup float t[8][9];\nt[l / 8][l % 8 + 2] = a[l];\n" + GROUP
        + "out[l] = t[l / 8][2 + l % 6];", 3, None, 9, "index 9 is outside of .*9",
    ),
    "accumulators": Bug(
        "mem", L + "float acc[4] = {0, 0, 0, 0};\nacc[l / 12] += a[l];\n"
        "out[l] = acc[0] + acc[1] + acc[2] + acc[3];", 3, None, 4, "index 4 is outside",
    ),
    "vector_component": Bug(
        "mem", L + "float4 v = a[l];\nout[l] = v[l / 13];", 3, None, 4, "index 4",
    ),
    "struct_copy": Bug(
        "mem", "struct Row { float x[12]; };\n" + L
        + "Row r = ((const device Row*)a)[l / 10];\nout[l] = r.x[l % 12];", 3, "a",
        64, "read of",
    ),
    "matrix_tile": Bug(
        "mem", L + "simdgroup_float8x8 m;\n"
        "simdgroup_load(m, a + 1, 8);\nsimdgroup_store(m, out, 8);", 3, "a", 64,
        threads=32, group=32,
    ),
    "small_constant_input": Bug(
        "mem", L + "out[l] = a[l / 10];", 2, "a", 5, a=ramp(5),
    ),
    "wild_pointer": Bug(
        "mem", L + "out[l] = a[size_t(l + 1) << 33];", 2, "a", None, "is in no buffer",
    ),
    "atomic_past_the_end": Bug(
        "mem", L + "atomic_fetch_add_explicit(&out[l / 4], 1, memory_order_relaxed);",
        2, "out", 15, "atomic access of 4 bytes", shape=(15,), dtype=mx.int32,
        options={"atomic_outputs": True, "init_value": 0},
    ),
}  # fmt: skip

RACE = {
    "no_barrier_after_write": Bug(
        "race", L + "threadgroup float t[64];\nt[l] = a[l];\nfloat s = simd_sum(t[l]);"
        "\nif (l < 32) t[l] = s;\nout[l] = t[l] + s + t[0];", None, "t", None,
        "no barrier stands between them",
    ),
    "no_barrier_before_reuse": Bug(
        "race", L + "threadgroup float t[64];\nfloat s = 0;\n"
        "for (uint k = 0; k < 2; k++) {\nt[l] = a[l] + k;\n" + GROUP
        + "s += t[63 - l];\n}\nout[l] = s;", None, "t", None,
        "write at source line 5.*read at source line 7|read.*line 7.*write.*line 5"
        "|write of .* line 5.* and read at source line 7",
    ),
    "barrier_for_other_memory": Bug(
        "race", L + "threadgroup float t[64];\nt[l] = a[l];\n"
        "threadgroup_barrier(mem_flags::mem_device);\nout[l] = t[63 - l];", 5, "t", 0,
        "needs mem_flags::mem_threadgroup",
    ),
    "simdgroup_barrier_is_too_weak": Bug(
        "race", L + "threadgroup float t[64];\nt[63 - l] = a[l];\n"
        "simdgroup_barrier(mem_flags::mem_threadgroup);\nfloat s = simd_sum(1.0f);\n"
        "if (l >= 32) s += t[l];\nout[l] = s;", 6, "t", 62, "no barrier stands between",
    ),
    "simd_sum_is_no_barrier": Bug(
        "race", L + "threadgroup float t[32];\nt[l] = a[l];\nfloat s = simd_sum(a[l]);"
        "\nout[l] = t[31 - l] + s;", 5, "t", 0, "simdgroup_barrier.* is enough",
        threads=32, group=32, shape=(32,),
    ),
    # K is split over threadgroups and all add to one sum
    "split_without_partials": Bug(
        "race", L + "float s = simd_sum(a[g]);\nif (l == 0) out[0] += s;", 3, "out", 0,
        "no barrier stands between threadgroups", group=32, shape=(1,),
        options={"init_value": 0.0},
    ),
    "overlapping_tiles": Bug(
        "race", L + "uint start = threadgroup_position_in_grid.x * 24;\n"
        "out[start + l] = 2 * a[l] + start;", 3, "out", 24, "between threadgroups",
        group=32, shape=(56,),
    ),
    "reads_what_others_write": Bug(
        "race", L + "out[g] = a[g];\nfloat other = out[(g + 32) % 64];\n"
        "if (other > 1e9f) out[g] = 0;", 2, "out", 32, "between threadgroups", group=32,
        options={"init_value": 0.0},
    ),
    "atomic_and_plain": Bug(
        "race", L + "atomic_fetch_add_explicit(&out[0], 1, memory_order_relaxed);\n"
        "if (l == 63) ((device int*)out)[0] = 0;", 3, "out", 0, "atomic access",
        shape=(1,), dtype=mx.int32,
        options={"atomic_outputs": True, "init_value": 0},
    ),
    "stores_of_one_tile": Bug(
        "race", L + "threadgroup float t[64];\nsimdgroup_float8x8 m(float(l / 32 + 1));"
        "\nsimdgroup_store(m, t, 8);\n" + GROUP + "out[l] = t[l];", 4, "t", 0, "write",
    ),
    "neighbour_bytes_of_a_word": Bug(
        "race", L + "threadgroup uint t[16];\nfor (uint i = l; i < 16; i += 64) t[i] ="
        " 0;\n" + GROUP + "((threadgroup uchar*)t)[l] = uchar(l);\n" + GROUP
        + "if (l % 4 == 0) t[l / 4] |= 1;\nif (l % 4 == 1) out[l] = t[l / 4];\n"
        "else out[l] = 0;", 8, "t", 0,
    ),
}  # fmt: skip

INIT = {
    # a tile that the last threads do not fill
    "tile_tail": Bug(
        "init", L + "threadgroup float t[64];\nif (l < 60) t[l] = a[l];\n" + GROUP
        + "out[l] = t[63 - l];", 5, "t", 63, "takes what nobody wrote",
    ),
    "sums_of_absent_simdgroups": Bug(
        "init", L + "threadgroup float t[32];\nfloat s = simd_sum(a[l]);\n"
        "if (l % 32 == 0) t[l / 32] = s;\n" + GROUP
        + "out[l] = simd_sum(t[l % 32]);", 6, "t", 30,
    ),
    "output_as_accumulator": Bug(
        "init", L + "for (uint k = 0; k < 4; k++)\n  out[l] += a[l] * k;", 3, "out", 0,
        "read of 4 bytes",
    ),
    "scalar_accumulator": Bug(
        "init", L + "float s;\nfor (uint k = 0; k < 4; k++) s += a[(l + k) % 64];\n"
        "out[l] = s;", None, "out", 0, "uninitialised.*source line 3: variable 's'",
    ),
    "array_accumulators": Bug(
        "init", L + "float acc[4];\nfor (uint r = 0; r < 3; r++) acc[r] = 0;\n"
        "for (uint r = 0; r < 4; r++) acc[r] += a[l];\n"
        "out[l] = acc[l % 4];", None, "out", 3, "uninitialised local variables",
    ),
    "matrix_accumulator": Bug(
        "init", L + "simdgroup_float8x8 x, sum;\nsimdgroup_load(x, a, 8);\n"
        "simdgroup_multiply_accumulate(sum, x, x, sum);\nsimdgroup_store(sum, out, 8);",
        None, "out", 0, "uninitialised local variables", threads=32, group=32,
    ),
    "branch_without_a_value": Bug(
        "init", L + "float v;\nif (a[l] > 7) v = 1;\nif (a[l] < 3) v = 2;\nout[l] = v;",
        None, "out", 3, "variable 'v' may be uninitialized",
    ),
    # the grid is rounded down: mlx#4251
    "grid_too_small": Bug(
        "init", L + "out[g] = a[g];", None, "out", 64, "8 of 72 elements .* unwritten",
        shape=(72,),
    ),
    "atomic_without_a_start": Bug(
        "init", L + "atomic_fetch_add_explicit(&out[l % 8], 1, memory_order_relaxed);",
        2, "out", 0, "takes what nobody wrote", shape=(8,), dtype=mx.int32,
        options={"atomic_outputs": True},
    ),
    "row_skipped": Bug(
        "init", L + "if (l % 16 == 5 && a[l] > 30) return;\nout[l] = a[l];", None,
        "out", 37, "2 of 64 elements",
    ),
}  # fmt: skip

SYNC = {
    "return_before_simd_sum": Bug(
        "sync", L + "if (l == 50) return;\nout[l] = simd_sum(a[l]);", None, None, None,
        "simd_sum at source line 3.*lanes 18, which never arrive",
    ),
    "barrier_in_a_branch": Bug(
        "sync", L + "threadgroup float t[64];\nt[l] = a[l];\nif (l < 40) " + GROUP
        + "out[l] = t[l];", None, None, None, "is not reached by all threads",
    ),
    "loop_of_uneven_length": Bug(
        "sync", L + "float s = 0;\nfor (uint k = 0; k < l % 3 + 1; k++)\n"
        "  s += simd_shuffle_xor(s + 1, 1);\nout[l] = s;", None, None, None,
        "simd_shuffle_xor at source line 4",
    ),
    "collectives_of_two_branches": Bug(
        "sync", L + "if (l & 1) out[l] = simd_max(a[l]);\nelse out[l] = simd_min(a[l]);"
        , None, None, None, "simdgroup operation: lane 1|lane 0",
    ),
    "matrix_in_half_a_simdgroup": Bug(
        "sync", L + "simdgroup_float8x8 m(1.0f), d;\n"
        "if (l < 16) simdgroup_multiply(d, m, m);\nout[l] = d.thread_elements()[0];",
        None, None, None, "simdgroup_multiply at source line 3",
    ),
    # a sum of floats in the order in which threads come
    "float_atomics": Bug(
        "sync", L + "atomic_fetch_add_explicit(&out[0], 1.0f / (a[g] + 1.0f),"
        " memory_order_relaxed);", None, "out", 0, "depends on the order of threads",
        shape=(1,), options={"atomic_outputs": True, "init_value": 0.0},
    ),
    "slot_from_a_counter": Bug(
        "sync", "threadgroup atomic_int next;\n" + L
        + "if (l == 0) atomic_store_explicit(&next, 0, memory_order_relaxed);\n"
        + GROUP + "int i = atomic_fetch_add_explicit(&next, 1, memory_order_relaxed);\n"
        "out[i] = a[l];", None, "out", 0, "forward and reverse",
    ),
    "last_threadgroup_wins": Bug(
        "sync", L + "atomic_store_explicit(&out[l], int(g / 32), memory_order_relaxed);"
        , None, "out", 0, "depends on the order of threads and threadgroups",
        shape=(32,), dtype=mx.int32, group=32, options={"atomic_outputs": True},
    ),
}  # fmt: skip

BUGS = MEM | RACE | INIT | SYNC
