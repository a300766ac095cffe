// The launches of a decoder block: qmv with what stands before it (RMS norm) and after it (rotary
// embedding, activation, residual). Rows of x stay exact: the sums are those of qmv.metal.

//! kernel qmv_add (x, w, s, b, res) -> (y)
// y = res + x W^T: o_proj and down_proj with their residual
const int A = R * M, N = w_shape[0], KW = w_shape[1], K = KW * 32 / bits;
threadgroup Shared part[shared_size<M, R, SG, KS, false>()];
const uint sg = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
const int row0 = (threadgroup_position_in_grid.x * (SG / KS) + sg / KS) * R, row = min(row0, N - R);
Rows<T, T> at;
set_rows(at, w, s, b, KW, K / group, row, row);
const float t = product<T, bits, group, M, R, SG, KS, false, false>(
    x, x, at, part, K, 0.0f, 0.0f, sg, lane);
const int n = row + lane / M;
if (sg % KS == 0 && lane < A && n >= row0) {
  const size_t i = (size_t)(lane % M) * N + n;
  y[i] = T(t + float(res[i]));
}

//! kernel qmv_glu (x, nw=x, w0, s0, b0, w1, s1, b1) -> (y)
// y = act(norm(x) W0^T) * (norm(x) W1^T); EPS: the bits of the norm's epsilon
const int H = R / 2, N = w0_shape[0], KW = w0_shape[1], K = KW * 32 / bits;
threadgroup Shared part[shared_size<M, R, SG, KS, NORM>()];
const uint sg = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
const int row0 = (threadgroup_position_in_grid.x * (SG / KS) + sg / KS) * H, row = min(row0, N - H);
Rows<T, T> at;
set_rows(at, w0, s0, b0, KW, K / group, row, row);
at.w2 = w1 + (size_t)row * KW;
at.s2 = s1 + (size_t)row * (K / group);
at.b2 = b1 + (size_t)row * (K / group);
const float t = product<T, bits, group, M, R, SG, KS, NORM, true>(
    x, nw, at, part, K, as_type<float>(EPS), 0.0f, sg, lane);
const float up = simd_shuffle(t, ushort((lane + H * M) % 32));
const int n = row + lane / M;
if (sg % KS == 0 && lane < H * M && n >= row0)
  y[(size_t)(lane % M) * N + n] = T(activate<ACT>(t) * up);

