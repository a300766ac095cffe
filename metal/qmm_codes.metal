// y[m, n] = sum_k x[m, k] * W[n, k] for up to 16 rows of x, by qmm_codes.h, and the launches of a decoder
// block with what stands before it (RMS norm) and after it (activation, residual). KS simdgroups share
// 16 R rows of W and split K, SG are in a threadgroup; the order of additions does not depend on M, R, SG, XS
// or the grid.

//! kernel qmm_codes (x, w, scales, biases) -> (y)
const int A = R * NB * 4, N = w_shape[0], K = w_shape[1] * 32 / bits;
threadgroup uint4 shared[shared_chunks<T, bits, group, NB, R, SG, KS, U, ST, false, XS>()];
int M = 1;
if (!ONE) for (int i = 0; i + 1 < x_ndim; i++) M *= x_shape[i];
const uint sg = simdgroup_index_in_threadgroup, ks = sg % KS, lane = thread_index_in_simdgroup;
// The last tiles move back to stay inside; rows they share with those before are not stored.
const int row0 = (threadgroup_position_in_grid.x * (SG / KS) + sg / KS) * R * 16, row = min(row0, N - R * 16);
const threadgroup float* part = code_product<T, bits, group, NB, R, SG, KS, U, ST, false, XS>(
    x, x, tiles_at(w, scales, biases, row), shared, even(w, scales, biases), M, K, sg, lane);
for (int i = ks; i < A; i += KS) {
  const int n = row + sum_row<NB>(i, lane), m = sum_column<NB>(i, lane);
  const float t = tile_sum<A, KS>(part, i, lane);
  if (n >= row0 && m < M) y[(size_t)m * N + n] = T(t);
}

//! kernel qmm_codes_add (x, w, s, b, res) -> (y)
// y = res + x W^T: o_proj and down_proj with their residual
const int A = R * NB * 4, N = w_shape[0], K = w_shape[1] * 32 / bits;
threadgroup uint4 shared[shared_chunks<T, bits, group, NB, R, SG, KS, U, ST, false, XS>()];
int M = 1;
if (!ONE) for (int i = 0; i + 1 < x_ndim; i++) M *= x_shape[i];
const uint sg = simdgroup_index_in_threadgroup, ks = sg % KS, lane = thread_index_in_simdgroup;
const int row0 = (threadgroup_position_in_grid.x * (SG / KS) + sg / KS) * R * 16, row = min(row0, N - R * 16);
const threadgroup float* part = code_product<T, bits, group, NB, R, SG, KS, U, ST, false, XS>(
    x, x, tiles_at(w, s, b, row), shared, even(w, s, b), M, K, sg, lane);
for (int i = ks; i < A; i += KS) {
  const int n = row + sum_row<NB>(i, lane), m = sum_column<NB>(i, lane);
  const float t = tile_sum<A, KS>(part, i, lane);
  if (n >= row0 && m < M) y[(size_t)m * N + n] = T(t + float(res[(size_t)m * N + n]));
}

//! kernel qmm_codes_glu (x, nw=x, w0, s0, b0, w1, s1, b1) -> (y)
// y = act(norm(x) W0^T) * (norm(x) W1^T); EPS: the bits of the norm's epsilon
const int A = R * NB * 4, N = w0_shape[0], K = w0_shape[1] * 32 / bits;
threadgroup uint4 shared[shared_chunks<T, bits, group, NB, R, SG, KS, U, ST, NORM, XS>()];
int M = 1;
if (!ONE) for (int i = 0; i + 1 < x_ndim; i++) M *= x_shape[i];
const uint sg = simdgroup_index_in_threadgroup, ks = sg % KS, lane = thread_index_in_simdgroup;
const int row0 = (threadgroup_position_in_grid.x * (SG / KS) + sg / KS) * R * 8, row = min(row0, N - R * 8);
const Tiles<T> at = tiles_at(w0, s0, b0, w1, s1, b1, row, row, 8, 1);
const threadgroup float* part = code_product<T, bits, group, NB, R, SG, KS, U, ST, NORM, XS>(
    x, nw, at, shared, even(w0, s0, b0) && even(w1, s1, b1), M, K, sg, lane);
for (int p = ks; p < A / 2; p += KS) {
  const int i = pair_sum(p), n = tile_row(at, sum_row<NB>(i, lane)), m = sum_column<NB>(i, lane);
  const int ALL = NORM ? A + 2 * NB : A;
  const float f = NORM ? tile_scale<A, KS, NB>(part, i, K, as_type<float>(EPS), lane) : 1;
  const float gate = tile_sum<ALL, KS>(part, i, lane) * f, up = tile_sum<ALL, KS>(part, i + 2, lane) * f;
  if (n >= row0 && m < M) y[(size_t)m * N + n] = T(activate<ACT>(gate) * up);
}
