// Matrix multiplies fed from registers: 16 rows times 8 columns, 16 deep. A lane brings pairs of
// neighbours, so values can be loaded or dequantised straight into place.
#include <metal_simdgroup_matrix>

// A lane holds row TILE_ROW of an 8 x 8 tile, columns 2 * TILE_COL and the next one. Apple does not
// document its map; MLX relies on this one on every generation, and so does the CPU executor.
// TILE_BIT: lanes of one column differ in the bits TILE_BIT, 2 * TILE_BIT and 16; those of one row in
// the bits 1 and TILE_SIDE. TILE_LANE: the first lane of a row.
#ifdef MSL_TENSOR_CORES
#define TILE_ROW(lane) ((lane) / 4)
#define TILE_COL(lane) ((lane) % 4)
#define TILE_BIT 4
#define TILE_SIDE 2
#define TILE_LANE(row) ((row) * 4)
#else
#define TILE_ROW(lane) (((lane) / 4 & 4) + (lane) / 2 % 4)
#define TILE_COL(lane) (((lane) / 4 & 2) + (lane) % 2)
#define TILE_BIT 2
#define TILE_SIDE 8
#define TILE_LANE(row) (((row) & 4) * 4 + (row) % 4 * 2)
#endif

// 2^x, where tiny results may be 0.
#ifdef MSL_TENSOR_CORES
#define EXP2 msl_exp2
#else
#define EXP2 fast::exp2
#endif

// Over the rows of a tile, for each column.
METAL_FUNC float rows_max(float v) {
  v = max(v, simd_shuffle_xor(v, TILE_BIT));
  v = max(v, simd_shuffle_xor(v, 2 * TILE_BIT));
  return max(v, simd_shuffle_xor(v, 16));
}
METAL_FUNC float rows_sum(float v) {
  v += simd_shuffle_xor(v, TILE_BIT);
  v += simd_shuffle_xor(v, 2 * TILE_BIT);
  return v + simd_shuffle_xor(v, 16);
}

// PAIR(T): two neighbours of an operand. Before M5 Apple emulates arithmetic on bfloat, and float
// matrices are as fast as half ones, so there a bfloat is widened.
// pair_of: a and b as an operand holds them. pair_at: elements 2 i and 2 i + 1 of the words w of a
// row of T. pair_across: element i of two rows. to_b: from a row of (k, columns) to operand b.
template <typename T> struct Operand { typedef T element; };
template <> struct Operand<bfloat> { typedef float element; };
#ifdef MSL_TENSOR_CORES
#define PAIR(T) typename msl_mma<T>::pair
template <typename T, typename Value> METAL_FUNC PAIR(T) pair_of(const Value a, const Value b) {
  return msl_mma<T>::pack(float(a), float(b));
}
template <typename T> METAL_FUNC PAIR(T) pair_at(const thread uint* w, const int i) { return w[i]; }
template <typename T>
METAL_FUNC PAIR(T) pair_across(const thread uint* v, const thread uint* w, const int i) {
  return i % 2 ? msl_high_halves(v[i / 2], w[i / 2]) : msl_low_halves(v[i / 2], w[i / 2]);
}
template <typename T> METAL_FUNC uint to_b(const uint p) { return msl_transpose(p); }
#else
#define PAIR(T) vec<typename Operand<T>::element, 2>
template <typename T, typename Value> METAL_FUNC PAIR(T) pair_of(const Value a, const Value b) {
  typedef typename Operand<T>::element F;
  return vec<F, 2>(F(a), F(b));
}
template <typename T> METAL_FUNC PAIR(T) pair_at(const thread uint* w, const int i) {
  const vec<T, 2> v = as_type<vec<T, 2>>(w[i]);
  return pair_of<T>(v.x, v.y);
}
template <typename T>
METAL_FUNC PAIR(T) pair_across(const thread uint* v, const thread uint* w, const int i) {
  const vec<T, 2> a = as_type<vec<T, 2>>(v[i / 2]), b = as_type<vec<T, 2>>(w[i / 2]);
  return i % 2 ? pair_of<T>(a.y, b.y) : pair_of<T>(a.x, b.x);
}
#endif
template <> METAL_FUNC float2 pair_at<float>(const thread uint* w, const int i) {
  return as_type<float2>(uint2(w[2 * i], w[2 * i + 1]));
}
template <> METAL_FUNC float2 pair_across<float>(const thread uint* v, const thread uint* w, const int i) {
  return as_type<float2>(uint2(v[i], w[i]));
}
template <typename T>
METAL_FUNC vec<typename Operand<T>::element, 2> to_b(const vec<typename Operand<T>::element, 2> p) { return p; }

// c += a b. c: rows TILE_ROW and TILE_ROW + 8, two columns each. a00, a10: the same rows with the
// first 8 of k; a01, a11: with the last 8. b0, b1: by to_b, row TILE_ROW of the first and last 8.
template <typename F>
METAL_FUNC simdgroup_matrix<F, 8, 8> tile(const F x, const F y) {
  simdgroup_matrix<F, 8, 8> m;
  m.thread_elements()[0] = x;
  m.thread_elements()[1] = y;
  return m;
}
#define OPERAND const vec<typename Operand<T>::element, 2>
template <typename T>
METAL_FUNC void mma16(
    thread float* c, OPERAND a00, OPERAND a10, OPERAND a01, OPERAND a11, OPERAND b0, OPERAND b1) {
#ifdef MSL_MULTIPLY_16
  msl_multiply_16(c, a00, a01, a10, a11, b0, b1);
#else
  typedef typename Operand<T>::element F;
  simdgroup_matrix<F, 8, 8> m00 = tile<F>(a00.x, a00.y), m10 = tile<F>(a10.x, a10.y);
  simdgroup_matrix<F, 8, 8> m01 = tile<F>(a01.x, a01.y), m11 = tile<F>(a11.x, a11.y);
  simdgroup_matrix<F, 8, 8> n0 = tile<F>(b0.x, b0.y), n1 = tile<F>(b1.x, b1.y);
  simdgroup_matrix<float, 8, 8> top = tile<float>(c[0], c[1]), low = tile<float>(c[2], c[3]);
  simdgroup_multiply_accumulate(top, m00, n0, top);
  simdgroup_multiply_accumulate(low, m10, n0, low);
  simdgroup_multiply_accumulate(top, m01, n1, top);
  simdgroup_multiply_accumulate(low, m11, n1, low);
  c[0] = top.thread_elements()[0]; c[1] = top.thread_elements()[1];
  c[2] = low.thread_elements()[0]; c[3] = low.thread_elements()[1];
#endif
}
#ifdef MSL_TENSOR_CORES
template <typename T>
METAL_FUNC void mma16(
    thread float* c, const uint a00, const uint a10, const uint a01, const uint a11,
    const uint b0, const uint b1) {
  msl_mma<T>::k16(c, a00, a10, a01, a11, b0, b1);
}
#endif
