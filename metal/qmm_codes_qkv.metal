// q, k and v of a decoder block in one launch on matrix units, with the norm before and the rotary
// embedding after. A lane holds both elements of each pair that rotates.

// Rows row .. row + 16 R - 1 of q, k or v.
template <typename T, int bits, int group, int NB, int R, int SG, int KS, int U, int ST, bool NORM, int XS,
          int EPS, int D, int ROT, bool TRAD, bool BIAS>
METAL_FUNC void qkv_tiles(
    const device T* x, const device T* nw, const device uint* w, const device T* s, const device T* b,
    const device T* bias, const device float* cs, device T* y, threadgroup uint4* shared,
    const int M, const int N, const int K, const int L, const int row, const bool rotates,
    const bool wide, const uint sg, const uint lane) {
  const int A = R * NB * 4, ALL = NORM ? A + 2 * NB : A, u = row % D;
  const bool turns = rotates && u < ROT, halves = turns && !TRAD, beside = turns && TRAD;
  const int first = halves ? row - u / 2 : row, second = first + (halves ? ROT / 2 : beside ? 1 : 8);
  const Tiles<T> at = tiles_at(w, s, b, w, s, b, first, second, halves ? 8 : 16, beside ? 2 : 1);
  const threadgroup float* part = code_product<T, bits, group, NB, R, SG, KS, U, ST, NORM, XS>(
      x, nw, at, shared, wide, M, K, sg, lane);
  for (int p = sg % KS; p < A / 2; p += KS) {
    const int i = pair_sum(p), m = sum_column<NB>(i, lane);
    const int n0 = tile_row(at, sum_row<NB>(i, lane)), n1 = tile_row(at, sum_row<NB>(i + 2, lane));
    const float f = NORM ? tile_scale<A, KS, NB>(part, i, K, as_type<float>(EPS), lane) : 1;
    float t0 = fma(tile_sum<ALL, KS>(part, i, lane), f, BIAS ? float(bias[n0]) : 0.0f);
    float t1 = fma(tile_sum<ALL, KS>(part, i + 2, lane), f, BIAS ? float(bias[n1]) : 0.0f);
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

//! kernel qmm_codes_qkv (x, nw=x, w0, s0, b0, w1, s1, b1, w2, s2, b2, cs) -> (q, kv=q + w0_shape[0] * (ONE ? 1 : x_shape[0] * x_shape[1]))
// As qmv_qkv. N of each matrix is a multiple of 16 R.
threadgroup uint4 shared[shared_chunks<T, bits, group, NB, R, SG, KS, U, ST, NORM, XS>()];
const int N0 = w0_shape[0], N1 = w1_shape[0], N2 = w2_shape[0], K = w0_shape[1] * 32 / bits;
const uint sg = simdgroup_index_in_threadgroup;
const int row = (threadgroup_position_in_grid.x * (SG / KS) + sg / KS) * R * 16, M = ONE ? 1 : x_shape[0] * x_shape[1];
const bool in0 = row < N0, in1 = row < N0 + N1, wide = even(w0, s0, b0) && even(w1, s1, b1) && even(w2, s2, b2);
device T* v = kv + (size_t)M * N1;
qkv_tiles<T, bits, group, NB, R, SG, KS, U, ST, NORM, XS, EPS, D, ROT, TRAD, false>(
    x, nw, in0 ? w0 : in1 ? w1 : w2, in0 ? s0 : in1 ? s1 : s2, in0 ? b0 : in1 ? b1 : b2, nw, cs,
    in0 ? q : in1 ? kv : v, shared, M, in0 ? N0 : in1 ? N1 : N2, K, cs_shape[0], row - (in0 ? 0 : in1 ? N0 : N0 + N1),
    in1, wide, sg, thread_index_in_simdgroup);

//! kernel qmm_codes_qkv_bias (x, nw=x, w0, s0, b0, w1, s1, b1, w2, s2, b2, c0, c1, c2, cs) -> (q, kv=q + w0_shape[0] * (ONE ? 1 : x_shape[0] * x_shape[1]))
threadgroup uint4 shared[shared_chunks<T, bits, group, NB, R, SG, KS, U, ST, NORM, XS>()];
const int N0 = w0_shape[0], N1 = w1_shape[0], N2 = w2_shape[0], K = w0_shape[1] * 32 / bits;
const uint sg = simdgroup_index_in_threadgroup;
const int row = (threadgroup_position_in_grid.x * (SG / KS) + sg / KS) * R * 16, M = ONE ? 1 : x_shape[0] * x_shape[1];
const bool in0 = row < N0, in1 = row < N0 + N1, wide = even(w0, s0, b0) && even(w1, s1, b1) && even(w2, s2, b2);
device T* v = kv + (size_t)M * N1;
qkv_tiles<T, bits, group, NB, R, SG, KS, U, ST, NORM, XS, EPS, D, ROT, TRAD, true>(
    x, nw, in0 ? w0 : in1 ? w1 : w2, in0 ? s0 : in1 ? s1 : s2, in0 ? b0 : in1 ? b1 : b2, in0 ? c0 : in1 ? c1 : c2,
    cs, in0 ? q : in1 ? kv : v, shared, M, in0 ? N0 : in1 ? N1 : N2, K, cs_shape[0],
    row - (in0 ? 0 : in1 ? N0 : N0 + N1), in1, wide, sg, thread_index_in_simdgroup);
