// Products for what stands before and after them in a decoder block.

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
