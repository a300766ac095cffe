// q, k and v of a decoder block in one launch on matrix units, with the norm before and the rotary
// embedding after. R is 2: a lane holds both elements of each pair that rotates.

// Rows row .. row + 31 of q, k or v.
template <typename T, int bits, int group, int NB, int KS, int U, int ST, bool NORM, int EPS, int D, int ROT,
          bool TRAD, bool BIAS>
METAL_FUNC void qkv_tiles(
    const device T* x, const device T* nw, const device uint* w, const device T* s, const device T* b,
    const device T* bias, const device float* cs, device T* y, threadgroup uint4* shared, const int M, const int N,
    const int K, const int L, const int row, const bool rotates, const uint ks, const uint lane) {
  const int A = 8 * NB, ALL = NORM ? A + 2 * NB : A, u = row % D;
  const bool turns = rotates && u < ROT, fold = turns && TRAD;
  const int first = turns && !TRAD ? row - u / 2 : row, second = first + (turns && !TRAD ? ROT / 2 : 16);
  const Tiles<T> at = tiles_at(w, s, b, w, s, b, first, second, fold);
  code_product<T, bits, group, NB, 2, KS, U, ST, NORM>(x, nw, at, shared, M, K, ks, lane);
  const threadgroup float* part = (const threadgroup float*)shared;
  for (int i = ks; i < A / 2; i += KS) {
    // The sums of two rows: a tile's row and that 8 below it, or the same row of both tiles.
    const int i0 = fold ? i / 2 * 4 + i % 2 : i, i1 = i0 + (fold ? 2 : A / 2), m = sum_column<NB>(i0, lane);
    const int n0 = tile_row<2>(at, sum_row<NB>(i0, lane)), n1 = tile_row<2>(at, sum_row<NB>(i1, lane));
    const float f = NORM ? tile_scale<A, KS, NB>(part, i0, K, as_type<float>(EPS), lane) : 1;
    float t0 = fma(tile_sum<ALL, KS>(part, i0, lane), f, BIAS ? float(bias[n0]) : 0.0f);
    float t1 = fma(tile_sum<ALL, KS>(part, i1, lane), f, BIAS ? float(bias[n1]) : 0.0f);
    if (m >= M) continue;
    if (turns) {
      const device float* a = cs + m % L * D;
      const float c = a[n0 % D], si = a[n1 % D], other = t1;
      t1 = fma(t1, c, t0 * si);
      t0 = fma(t0, c, -(other * si));
    }
    device T* to = y + ((size_t)(m / L) * (N / D) * L + m % L) * D;
    to[(size_t)(n0 / D) * L * D + n0 % D] = T(t0);
    to[(size_t)(n1 / D) * L * D + n1 % D] = T(t1);
  }
}

//! kernel qmm_codes_qkv (x, nw, w0, s0, b0, w1, s1, b1, w2, s2, b2, cs) -> (q, kv)
// As qmv_qkv. N of each matrix is a multiple of 32.
threadgroup uint4 shared[shared_chunks<T, bits, group, NB, 2, KS, U, ST, NORM>()];
const int N0 = w0_shape[0], N1 = w1_shape[0], N2 = w2_shape[0], K = w0_shape[1] * 32 / bits;
const int row = threadgroup_position_in_grid.x * 32, M = ONE ? 1 : x_shape[0] * x_shape[1];
const bool in0 = row < N0, in1 = row < N0 + N1;
device T* v = kv + (size_t)M * N1;
qkv_tiles<T, bits, group, NB, KS, U, ST, NORM, EPS, D, ROT, TRAD, false>(
    x, nw, in0 ? w0 : in1 ? w1 : w2, in0 ? s0 : in1 ? s1 : s2, in0 ? b0 : in1 ? b1 : b2, nw, cs,
    in0 ? q : in1 ? kv : v, shared, M, in0 ? N0 : in1 ? N1 : N2, K, cs_shape[0], row - (in0 ? 0 : in1 ? N0 : N0 + N1),
    in1, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);

//! kernel qmm_codes_qkv_bias (x, nw, w0, s0, b0, w1, s1, b1, w2, s2, b2, c0, c1, c2, cs) -> (q, kv)
threadgroup uint4 shared[shared_chunks<T, bits, group, NB, 2, KS, U, ST, NORM>()];
const int N0 = w0_shape[0], N1 = w1_shape[0], N2 = w2_shape[0], K = w0_shape[1] * 32 / bits;
const int row = threadgroup_position_in_grid.x * 32, M = ONE ? 1 : x_shape[0] * x_shape[1];
const bool in0 = row < N0, in1 = row < N0 + N1;
device T* v = kv + (size_t)M * N1;
qkv_tiles<T, bits, group, NB, KS, U, ST, NORM, EPS, D, ROT, TRAD, true>(
    x, nw, in0 ? w0 : in1 ? w1 : w2, in0 ? s0 : in1 ? s1 : s2, in0 ? b0 : in1 ? b1 : b2, in0 ? c0 : in1 ? c1 : c2,
    cs, in0 ? q : in1 ? kv : v, shared, M, in0 ? N0 : in1 ? N1 : N2, K, cs_shape[0],
    row - (in0 ? 0 : in1 ? N0 : N0 + N1), in1, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
