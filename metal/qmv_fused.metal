// The launches of a decoder block: qmv with what stands before it (RMS norm) and after it (rotary
// embedding, activation, residual). Rows of x stay exact: the sums are those of qmv.metal.

// Sum i of the A sums a simdgroup has, over the KS simdgroups that share rows, in index order.
template <int A, int KS>
METAL_FUNC float total(const thread float* acc, const threadgroup float* part, const uint sg, const int i) {
  float t = 0;
  if (KS == 1) {
    UNROLL for (int k = 0; k < A; k++) t = k == i ? acc[k] : t;
  } else {
    t = part[sg * A + i];
    UNROLL for (int k = 1; k < KS; k++) t += part[(sg + k) * A + i];
  }
  return t;
}

// What load_words wants: a pack is 4, 8 or 16 bytes, or read word by word.
template <int bits, int group>
METAL_FUNC constexpr int pack_bytes() {
  return pack_size<bits, group>() * bits == 128 ? 16 : pack_size<bits, group>() * bits == 64 ? 8 : 4;
}

// The product of row r = lane / M of the simdgroup with row m = lane % M of x, normed if NORM: lanes
// from R * M on repeat the last. The lane's add is added. Simdgroups with sg % KS != 0 get 0.
template <typename T, int bits, int group, int M, int R, int SG, int KS, bool NORM, bool PAIR, typename S>
METAL_FUNC float product(
    const device T* x, const device T* nw, const Rows<S, S> at, threadgroup float* part, const int K,
    const float eps, const float add, const uint sg, const uint lane) {
  const int A = NORM ? R * M + M : R * M;
  const int c = sg % KS * 32 + lane, end = K / pack_size<bits, group>();
  const bool wide = ALIGNED(x, 16) && (!NORM || ALIGNED(nw, 16)) && ALIGNED(at.w, (pack_bytes<bits, group>())) &&
                    (!PAIR || ALIGNED(at.w2, (pack_bytes<bits, group>())));
  float acc[A];
  if (wide)
    qmv_rows<T, bits, group, M, R, KS, true, NORM, PAIR>(x, nw, at, acc, K, c, end);
  else
    qmv_rows<T, bits, group, M, R, KS, false, NORM, PAIR>(x, nw, at, acc, K, c, end);
  UNROLL for (int i = 0; i < A; i++) acc[i] = simd_sum(acc[i]);
  if (KS > 1) {
    if (lane == 0) {
      UNROLL for (int i = 0; i < A; i++) part[sg * A + i] = acc[i];
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (sg % KS != 0) return 0;
  }
  const int i = min(int(lane), R * M - 1);
  float t = total<A, KS>(acc, part, sg, i);
  if (!NORM) return t + add;
  return fma(t, rsqrt(total<A, KS>(acc, part, sg, R * M + i % M) / float(K) + eps), add);
}

template <typename S>
METAL_FUNC void set_rows(
    thread Rows<S, S>& at, const device uint* w, const device S* s, const device S* b, const int KW,
    const int G, const int first, const int second) {
  at.w = w + (size_t)first * KW;
  at.s = s + (size_t)first * G;
  at.b = b + (size_t)first * G;
  at.w2 = w + (size_t)second * KW;
  at.s2 = s + (size_t)second * G;
  at.b2 = b + (size_t)second * G;
}

//! kernel qmv_add (x, w, s, b, res) -> (y)
// y = res + x W^T: o_proj and down_proj with their residual
const int A = R * M, N = w_shape[0], KW = w_shape[1], K = KW * 32 / bits;
threadgroup float part[KS > 1 ? SG * A : 1];
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

//! kernel qmv_glu (x, nw, w0, s0, b0, w1, s1, b1) -> (y)
// y = act(norm(x) W0^T) * (norm(x) W1^T); EPS: the bits of the norm's epsilon
const int A = NORM ? R * M + M : R * M, H = R / 2, N = w0_shape[0], KW = w0_shape[1], K = KW * 32 / bits;
threadgroup float part[KS > 1 ? SG * A : 1];
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

