// simdgroup_matrix<T, 8, 8>: a lane holds two neighbours of a row, by the map of Apple GPUs.
#pragma once

namespace metal {

template <typename T, int ROWS, int COLS>
struct simdgroup_matrix {
  static_assert(ROWS == 8 && COLS == 8, "simdgroup_matrix is 8 x 8");
  typedef vec<T, 2> storage_type;
  storage_type elements;

  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal);
  storage_type& thread_elements() { return elements; }
  const storage_type& thread_elements() const { return elements; }
};

}  // namespace metal

namespace emu {

struct Place { uint32_t row, col; };
inline Place place(uint32_t lane) {
  return {((lane / 4) & 4) + ((lane / 2) % 4), ((lane / 4) & 2) * 2 + (lane % 2) * 2};
}

// A lane's share of the three operands. Products and sums are taken in float, k ascending.
struct Operands { float a[2], b[2], c[2]; };

EMU_UNCHECKED_BEGIN
struct Multiply {
  void operator()(Operands* s, uint32_t count) const {
    float a[8][8], b[8][8];
    for (uint32_t l = 0; l < count; l++) {
      const Place p = place(l);
      for (int i = 0; i < 2; i++) a[p.row][p.col + i] = s[l].a[i], b[p.row][p.col + i] = s[l].b[i];
    }
    for (uint32_t l = 0; l < count; l++) {
      const Place p = place(l);
      for (int i = 0; i < 2; i++) {
        float sum = s[l].c[i];
        for (int k = 0; k < 8; k++) sum = __builtin_fmaf(a[p.row][k], b[k][p.col + i], sum);
        s[l].c[i] = sum;
      }
    }
  }
};

// Out of line: an unrolled kernel calls it hundreds of times, and would take ten times as long to compile.
__attribute__((noinline)) static Operands multiply(const Operands mine, EmuOp op, uint32_t at, const char* file) {
  EmuLane* self = emu_self();
  if (self->simd->whole.count != 32)
    self->worker->fail(self, EMU_MISUSE, op, at, file, "a simdgroup_matrix needs all 32 lanes of the simdgroup");
  return gather<Whole>(self, mine, op, at, file, Multiply())[self->lane];
}

template <typename D, typename A, typename B>
inline void multiply(D& d, const A& a, const B& b, float c0, float c1, EmuOp op, uint32_t at, const char* file) {
  const Operands mine = {{(float)a.elements[0], (float)a.elements[1]},
                         {(float)b.elements[0], (float)b.elements[1]},
                         {c0, c1}};
  const Operands r = multiply(mine, op, at, file);
  typedef typename D::storage_type::element_type T;
  d.elements[0] = (T)r.c[0];
  d.elements[1] = (T)r.c[1];
}

#ifndef EMU_SANITIZE
// A lane's share of a product of 16 x 16 by 16 x 8: the four tiles of a, row by row, the two of b, one above the
// other, and the two of c.
struct Sixteen { float a[4][2], b[2][2], c[2][2]; };
struct MultiplySixteen {
  void operator()(Sixteen* s, uint32_t count) const {
    float a[16][16], b[16][8], c[16][8];
    for (uint32_t l = 0; l < 32; l++) {
      const Place p = place(l);
      for (int i = 0; i < 2; i++) {
        for (int t = 0; t < 4; t++) a[t / 2 * 8 + p.row][t % 2 * 8 + p.col + i] = s[l].a[t][i];
        for (int t = 0; t < 2; t++) b[t * 8 + p.row][p.col + i] = s[l].b[t][i], c[t * 8 + p.row][p.col + i] = s[l].c[t][i];
      }
    }
    for (int row = 0; row < 16; row++)
      for (int k = 0; k < 16; k++)
        for (int col = 0; col < 8; col++) c[row][col] = __builtin_fmaf(a[row][k], b[k][col], c[row][col]);
    for (uint32_t l = 0; l < 32; l++) {
      const Place p = place(l);
      for (int t = 0; t < 2; t++)
        for (int i = 0; i < 2; i++) s[l].c[t][i] = c[t * 8 + p.row][p.col + i];
    }
  }
};
__attribute__((noinline)) static void multiply(Sixteen* mine, uint32_t at, const char* file) {
  EmuLane* self = emu_self();
  const EmuOp op = EMU_simdgroup_multiply_accumulate;
  if (self->simd->whole.count != 32)
    self->worker->fail(self, EMU_MISUSE, op, at, file, "a simdgroup_matrix needs all 32 lanes of the simdgroup");
  *mine = gather<Whole>(self, *mine, op, at, file, MultiplySixteen())[self->lane];
}
#endif
EMU_UNCHECKED_END

}  // namespace emu

namespace metal {

template <typename T, int R, int C>
inline simdgroup_matrix<T, R, C>::simdgroup_matrix(T diagonal) {
  const emu::Place p = emu::place(emu_self()->lane);
  for (uint32_t i = 0; i < 2; i++) elements[i] = p.row == p.col + i ? diagonal : (T)0;
}

template <typename T, int R, int C, typename U>
inline simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(U value) {
  simdgroup_matrix<T, R, C> m;
  m.elements[0] = m.elements[1] = (T)value;
  return m;
}

template <typename T, int R, int C, typename S>
inline void simdgroup_load(simdgroup_matrix<T, R, C>& d, const S* src, ulong elements_per_row = C,
                           vec<ulong, 2> origin = vec<ulong, 2>(0ul, 0ul), bool transpose = false) {
  const emu::Place p = emu::place(emu_self()->lane);
  for (uint32_t i = 0; i < 2; i++) {
    const ulong row = transpose ? p.col + i : p.row, col = transpose ? p.row : p.col + i;
    d.elements[i] = (T)src[(origin[1] + row) * elements_per_row + origin[0] + col];
  }
}

template <typename T, int R, int C, typename S>
inline void simdgroup_store(const simdgroup_matrix<T, R, C>& s, S* dst, ulong elements_per_row = C,
                            vec<ulong, 2> origin = vec<ulong, 2>(0ul, 0ul), bool transpose = false) {
  const emu::Place p = emu::place(emu_self()->lane);
  for (uint32_t i = 0; i < 2; i++) {
    const ulong row = transpose ? p.col + i : p.row, col = transpose ? p.row : p.col + i;
    dst[(origin[1] + row) * elements_per_row + origin[0] + col] = (S)s.elements[i];
  }
}

template <typename D, typename A, typename B>
inline void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                               const simdgroup_matrix<B, 8, 8>& b, EMU_AT) {
  emu::multiply(d, a, b, 0.0f, 0.0f, EMU_simdgroup_multiply, at, file);
}

template <typename D, typename A, typename B, typename C>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                          const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c,
                                          EMU_AT) {
  emu::multiply(d, a, b, (float)c.elements[0], (float)c.elements[1], EMU_simdgroup_multiply_accumulate, at, file);
}

// Four multiplies in one exchange between lanes, k ascending: c (rows r and r + 8) += a b. Checks and counters see
// each multiply, so their builds have none of it.
#ifndef EMU_SANITIZE
#define MSL_MULTIPLY_16 1
template <typename P>
inline void msl_multiply_16(float* c, const P a00, const P a01, const P a10, const P a11, const P b0, const P b1,
                            EMU_AT) {
  emu::Sixteen s = {{{(float)a00.x, (float)a00.y}, {(float)a01.x, (float)a01.y},
                     {(float)a10.x, (float)a10.y}, {(float)a11.x, (float)a11.y}},
                    {{(float)b0.x, (float)b0.y}, {(float)b1.x, (float)b1.y}},
                    {{c[0], c[1]}, {c[2], c[3]}}};
  emu::multiply(&s, at, file);
  for (int i = 0; i < 4; i++) c[i] = s.c[i / 2][i % 2];
}
#endif

typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

}  // namespace metal
