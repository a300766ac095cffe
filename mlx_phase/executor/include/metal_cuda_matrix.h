// simdgroup_matrix<T, 8, 8> on tensor cores; part of metal_cuda.h. Lane L holds row L / 4, columns (L % 4) * 2 and
// the next one: the accumulator layout of mma.sync, not Apple's.
#pragma once
#define MSL_TENSOR_CORES 1

namespace metal {

template <typename T, int R, int C>
struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "only 8x8 simdgroup matrices exist");
  typedef vec<T, 2> storage_type;
  storage_type t;
  simdgroup_matrix() = default;
  MSL_FN explicit simdgroup_matrix(T diagonal) {
    const uint row = msl_lane() / 4, column = msl_lane() % 4 * 2;
    t = storage_type(row == column ? diagonal : T(0), row == column + 1 ? diagonal : T(0));
  }
  MSL_FN storage_type& thread_elements() { return t; }
  MSL_FN const storage_type& thread_elements() const { return t; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <typename T, int R, int C> MSL_FN simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T v) {
  simdgroup_matrix<T, R, C> m;
  m.t = vec<T, 2>(v);
  return m;
}
template <typename T, int R = 8, int C = 8> MSL_FN simdgroup_matrix<T, R, C> make_diagonal_simdgroup_matrix(T v) {
  return simdgroup_matrix<T, R, C>(v);
}
// origin is (column, row)
template <typename T, typename P>
MSL_FN void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const P* p, ulong row_elements = 8,
                           ulong2 origin = ulong2(0), bool transpose = false) {
  const ulong row = msl_lane() / 4, column = msl_lane() % 4 * 2;
  const P* q = p + origin.y * row_elements + origin.x;
  if (transpose) m.t = vec<T, 2>((T)q[column * row_elements + row], (T)q[(column + 1) * row_elements + row]);
  else m.t = vec<T, 2>((T)q[row * row_elements + column], (T)q[row * row_elements + column + 1]);
}
template <typename T, typename P>
MSL_FN void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, P* p, ulong row_elements = 8,
                            ulong2 origin = ulong2(0), bool transpose = false) {
  const ulong row = msl_lane() / 4, column = msl_lane() % 4 * 2;
  P* q = p + origin.y * row_elements + origin.x;
  q[transpose ? column * row_elements + row : row * row_elements + column] = (P)m.t.x;
  q[transpose ? (column + 1) * row_elements + row : row * row_elements + column + 1] = (P)m.t.y;
}

// ---- tensor cores. c is rows L / 4 and L / 4 + 8, columns (L % 4) * 2 and the next; an operand is two
// neighbours of a row (of a column for b) in one register.
template <typename T> struct msl_mma {
  static constexpr bool native = false;
  typedef vec<T, 2> pair;
  MSL_FN static pair pack(float low, float high) { return pair(T(low), T(high)); }
  MSL_FN static pair codes4(uint, uint, pair scale, pair) { return scale; }  // never called, as the next
  MSL_FN static void k8(float*, pair, pair, pair) {}
  MSL_FN static pair times(pair a, pair b) { return a * b; }
  MSL_FN static void ones(pair* a) { a[0] = a[1] = a[2] = a[3] = pack(1, 1); }
};
// ONE and MAGIC, twice in a register: 1, and the number whose mantissa counts ones in its lowest bits.
#define MSL_MMA(T, type, ONE, MAGIC)                                                                         \
  template <> struct msl_mma<T> {                                                                            \
    static constexpr bool native = true;                                                                     \
    typedef uint pair;                                                                                       \
    MSL_FN static uint pack(float low, float high) {                                                         \
      uint r;                                                                                                \
      asm("cvt.rn." type "x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));                              \
      return r;                                                                                              \
    }                                                                                                        \
    /* The code in the low 4 bits of each half, times scale plus bias. one: 0x64006400, in a way that */     \
    /* the compiler can't know, or it would load a constant for each use. */                                 \
    MSL_FN static uint codes4(uint u, uint one, uint scale, uint bias) {                                     \
      uint c, r;                                                                                             \
      asm("fma.rn." type "x2 %0, %1, %2, %3;"                                                                \
          : "=r"(c) : "r"((u & 0x000f000f) | (one - (0x64006400 - MAGIC))), "r"(ONE), "r"(MAGIC ^ 0x80008000)); \
      asm("fma.rn." type "x2 %0, %1, %2, %3;" : "=r"(r) : "r"(c), "r"(scale), "r"(bias));                    \
      return r;                                                                                              \
    }                                                                                                        \
    MSL_FN static uint times(uint a, uint b) {                                                               \
      uint r;                                                                                                \
      asm("fma.rn." type "x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));                 \
      return r;                                                                                              \
    }                                                                                                        \
    MSL_FN static void k8(float* c, uint a0, uint a1, uint b) {                                              \
      asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." type "." type ".f32 "                             \
                   "{%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"                                            \
                   : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b));             \
    }                                                                                                        \
    MSL_FN static void k16(float* c, uint a0, uint a1, uint a2, uint a3, uint b0, uint b1) {                 \
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 "                            \
                   "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                   \
                   : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                          \
                   : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                                  \
    }                                                                                                        \
    /* Ones as operand a, in registers that stay neighbours. */                                              \
    MSL_FN static void ones(uint* a) {                                                                       \
      for (int i = 0; i < 4; i++) asm volatile("mov.b32 %0, " #ONE ";" : "=r"(a[i]));                        \
    }                                                                                                        \
  };
MSL_MMA(half, "f16", 0x3c003c00, 0x64006400)
MSL_MMA(bfloat, "bf16", 0x3f803f80, 0x43004300)
#undef MSL_MMA
// Transposes an 8x8 matrix of 16-bit elements, a pair of neighbours in each lane.
MSL_FN uint msl_transpose(uint pair) {
  uint r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
  return r;
}

// Four 8x8 matrices of 16-bit elements from threadgroup memory, a pair of neighbours of each in w. p: row L % 8
// of matrix L / 8, 16 aligned bytes.
MSL_FN void msl_load_tiles(const void* p, uint* w) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"((uint)::__cvta_generic_to_shared(p)));
}
// The same transposed: of two rows, 2 (L % 4) and the next, element L / 4.
MSL_FN void msl_load_tiles_across(const void* p, uint* w) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "r"((uint)::__cvta_generic_to_shared(p)));
}

// The low (high) halves of a and b in one register.
MSL_FN uint msl_low_halves(uint a, uint b) { return ::__byte_perm(a, b, 0x5410); }
MSL_FN uint msl_high_halves(uint a, uint b) { return ::__byte_perm(a, b, 0x7632); }
// Four of their eight bytes, the lowest digit of `which` first.
MSL_FN uint msl_bytes(uint a, uint b, uint which) { return ::__byte_perm(a, b, which); }

// Threadgroup memory by its address in a register: of a pointer the compiler finds it anew for each store, from the rank
// of the threadgroup on.
MSL_FN uint msl_place(const void* p) {
  uint r;
  asm volatile("mov.u32 %0, %1;" : "=r"(r) : "r"((uint)::__cvta_generic_to_shared(p)));
  return r;
}
MSL_FN float msl_get(uint place) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(place) : "memory");
  return v;
}
MSL_FN void msl_put(uint place, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(place), "f"(v) : "memory"); }

// Copies to threadgroup memory that go on in the background, 4, 8 or 16 aligned bytes: commit ends a batch of
// them, wait<n> waits for all but the last n batches of this thread.
template <int BYTES> MSL_FN void msl_copy(void* to, const void* from) {
  const unsigned at = (unsigned)__cvta_generic_to_shared(to);
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at), "l"(from), "n"(BYTES) : "memory");
}
MSL_FN void msl_copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int BATCHES> MSL_FN void msl_copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(BATCHES) : "memory");
}

// One instruction, exp2f looks after denormal numbers with three more.
MSL_FN float msl_exp2(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// Any types: 16-bit operands of one type go to a tensor core with eight idle rows, all others are fp32
// multiply-adds, k ascending (no tf32, which would drop bits of a float).
template <typename D, typename A, typename B, typename C>
MSL_FN void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                          const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c) {
  float d0 = (float)c.t.x, d1 = (float)c.t.y;
  if constexpr (msl_mma<A>::native && is_same<A, B>::value) {
    float t[4] = {d0, d1, 0, 0};
    msl_mma<A>::k8(t, as_type<uint>(a.t), 0, msl_transpose(as_type<uint>(b.t)));
    d0 = t[0];
    d1 = t[1];
  } else {
    const uint lane = msl_lane();
    const float a0 = (float)a.t.x, a1 = (float)a.t.y, b0 = (float)b.t.x, b1 = (float)b.t.y;
#pragma unroll
    for (uint k = 0; k < 8; k++) {
      const float ak = msl_from(k % 2 ? a1 : a0, (lane & ~3u) + k / 2);
      d0 = ::fmaf(ak, msl_from(b0, k * 4 + lane % 4), d0);
      d1 = ::fmaf(ak, msl_from(b1, k * 4 + lane % 4), d1);
    }
  }
  d.t = vec<D, 2>((D)d0, (D)d1);
}
template <typename D, typename A, typename B>
MSL_FN void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                               const simdgroup_matrix<B, 8, 8>& b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<float, 8, 8>(0.0f));
}
template <typename A, typename B>
MSL_FN simdgroup_matrix<A, 8, 8> operator*(const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b) {
  simdgroup_matrix<A, 8, 8> d;
  simdgroup_multiply(d, a, b);
  return d;
}

}  // namespace metal
