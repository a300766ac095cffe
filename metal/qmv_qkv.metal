// q, k and v of a decoder block in one launch, with the norm before and the rotary embedding after.

// One tile of q, k or v: R rows of N, from tile * R on; tile0 beyond the last one stores nothing.
template <typename T, int bits, int group, int M, int R, int SG, int KS, bool NORM, int EPS, int D, int ROT,
          bool TRAD, bool BIAS>
METAL_FUNC void qkv_tile(
    const device T* x, const device T* nw, const device uint* w, const device T* s, const device T* b,
    const device T* bias, const device float* cs, device T* y, threadgroup Shared* part, const int N,
    const int KW, const int L, const int tile0, const bool rotates, const uint sg, const uint lane) {
  const int K = KW * 32 / bits, HALF = R / 2;
  // Two runs of R / 2 rows: the two halves of pairs that rotate, or one after the other.
  const int row = min(tile0, N / R - 1) * R, u = row % D;
  const bool turns = rotates && u < ROT;
  const int first = turns && !TRAD ? row - u / 2 : row;
  const int second = first + (turns && !TRAD ? ROT / 2 : HALF);
  Rows<T, T> at;
  set_rows(at, w, s, b, KW, K / group, first, second);
  const int i = min(int(lane), R * M - 1), r = i / M, m = i % M;
  const int n = r < HALF ? first + r : second + r - HALF, d = n % D;
  float t = product<T, bits, group, M, R, SG, KS, NORM, true>(
      x, nw, at, part, K, as_type<float>(EPS), BIAS ? float(bias[n]) : 0.0f, sg, lane);
  const int mate = TRAD ? r ^ 1 : r < HALF ? r + HALF : r - HALF;
  const float other = simd_shuffle(t, ushort(mate * M + m));
  if (sg % KS != 0 || lane >= R * M || tile0 >= N / R) return;
  if (turns) {
    const bool low = TRAD ? r % 2 == 0 : r < HALF;
    const int e = TRAD ? d ^ 1 : low ? d + ROT / 2 : d - ROT / 2;
    const device float* a = cs + m % L * D;
    // low: t cos - other sin, high: t cos + other sin
    t = low ? fma(t, a[d], -(other * a[e])) : fma(t, a[e], other * a[d]);
  }
  y[((size_t)(m / L * (N / D) + n / D) * L + m % L) * D + d] = T(t);
}

//! kernel qmv_qkv (x, nw=x, w0, s0, b0, w1, s1, b1, w2, s2, b2, cs) -> (q, kv=q + M * w0_shape[0])
// q, k, v = norm(x) W^T, q and k rotated. D: head_dim, ROT: its first dims that rotate, in pairs
// (i, i + ROT / 2) or, TRAD, (2 i, 2 i + 1). cs fp32 [L, D]: a pair's cos and sin in its two places;
// row m of x is at position m % L. q is [M / L, heads, L, D], kv is k and then v, each like q.
threadgroup Shared part[shared_size<M, R, SG, KS, NORM>()];
const uint sg = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
const int N0 = w0_shape[0], N1 = w1_shape[0], N2 = w2_shape[0], TG = SG / KS, L = cs_shape[0];
const int t0 = (N0 / R + TG - 1) / TG, t1 = t0 + (N1 / R + TG - 1) / TG;
const int tg = threadgroup_position_in_grid.x, tile = sg / KS;
device T* v = kv + (size_t)M * N1;
if (bits == B1 && bits == B2) {
  const bool in0 = tg < t0, in1 = tg < t1;
  qkv_tile<T, bits, group, M, R, SG, KS, NORM, EPS, D, ROT, TRAD, false>(
      x, nw, in0 ? w0 : in1 ? w1 : w2, in0 ? s0 : in1 ? s1 : s2, in0 ? b0 : in1 ? b1 : b2,
      nw, cs, in0 ? q : in1 ? kv : v, part, in0 ? N0 : in1 ? N1 : N2, w0_shape[1], L,
      (tg - (in0 ? 0 : in1 ? t0 : t1)) * TG + tile, in1, sg, lane);
} else if (tg < t0) {
  qkv_tile<T, bits, group, M, R, SG, KS, NORM, EPS, D, ROT, TRAD, false>(
      x, nw, w0, s0, b0, nw, cs, q, part, N0, w0_shape[1], L, tg * TG + tile, true, sg, lane);
} else if (tg < t1) {
  qkv_tile<T, B1, group, M, R, SG, KS, NORM, EPS, D, ROT, TRAD, false>(
      x, nw, w1, s1, b1, nw, cs, kv, part, N1, w1_shape[1], L, (tg - t0) * TG + tile, true, sg, lane);
} else {
  qkv_tile<T, B2, group, M, R, SG, KS, NORM, EPS, D, ROT, TRAD, false>(
      x, nw, w2, s2, b2, nw, cs, v, part, N2, w2_shape[1], L, (tg - t1) * TG + tile, false, sg, lane);
}

//! kernel qmv_qkv_bias (x, nw=x, w0, s0, b0, w1, s1, b1, w2, s2, b2, c0, c1, c2, cs) -> (q, kv=q + M * w0_shape[0])
threadgroup Shared part[shared_size<M, R, SG, KS, NORM>()];
const uint sg = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
const int N0 = w0_shape[0], N1 = w1_shape[0], N2 = w2_shape[0], TG = SG / KS, L = cs_shape[0];
const int t0 = (N0 / R + TG - 1) / TG, t1 = t0 + (N1 / R + TG - 1) / TG;
const int tg = threadgroup_position_in_grid.x, tile = sg / KS;
device T* v = kv + (size_t)M * N1;
if (bits == B1 && bits == B2) {
  const bool in0 = tg < t0, in1 = tg < t1;
  qkv_tile<T, bits, group, M, R, SG, KS, NORM, EPS, D, ROT, TRAD, true>(
      x, nw, in0 ? w0 : in1 ? w1 : w2, in0 ? s0 : in1 ? s1 : s2, in0 ? b0 : in1 ? b1 : b2,
      in0 ? c0 : in1 ? c1 : c2, cs, in0 ? q : in1 ? kv : v, part, in0 ? N0 : in1 ? N1 : N2, w0_shape[1], L,
      (tg - (in0 ? 0 : in1 ? t0 : t1)) * TG + tile, in1, sg, lane);
} else if (tg < t0) {
  qkv_tile<T, bits, group, M, R, SG, KS, NORM, EPS, D, ROT, TRAD, true>(
      x, nw, w0, s0, b0, c0, cs, q, part, N0, w0_shape[1], L, tg * TG + tile, true, sg, lane);
} else if (tg < t1) {
  qkv_tile<T, B1, group, M, R, SG, KS, NORM, EPS, D, ROT, TRAD, true>(
      x, nw, w1, s1, b1, c1, cs, kv, part, N1, w1_shape[1], L, (tg - t0) * TG + tile, true, sg, lane);
} else {
  qkv_tile<T, B2, group, M, R, SG, KS, NORM, EPS, D, ROT, TRAD, true>(
      x, nw, w2, s2, b2, c2, cs, v, part, N2, w2_shape[1], L, (tg - t1) * TG + tile, false, sg, lane);
}
