// Plain fp16 / bf16 / fp32 weights: y[m, n] = sum_k x[m, k] * w[n, k]. Same promises as qmv; a
// pack is 8 weights. K need not be a multiple of 8: rows are then not aligned and load one by one.

template <typename T, bool WIDE>
METAL_FUNC void load_tail(const device T* p, const int n, thread float* v) {
  if (WIDE) load8<T, true>(p, v);
  else UNROLL for (int i = 0; i < 8; i++) v[i] = i < n ? float(p[i]) : 0;
}

template <typename T, int M, int R, int KS, bool WIDE>
METAL_FUNC void gemv_rows(
    const device T* x, const device T* w, thread float* acc, const int K, int c,
    const int end) {
  UNROLL for (int i = 0; i < R * M; i++) acc[i] = 0;
  for (; c < end; c += 32 * KS) {
    const int n = min(8, K - 8 * c);
    float h[R][8];
    UNROLL for (int r = 0; r < R; r++) {
      const device T* p = w + (size_t)r * K + 8 * (size_t)c;
      load_tail<T, WIDE>(p, n, h[r]);
    }
    UNROLL for (int m = 0; m < M; m++) {
      const device T* p = x + (size_t)m * K + 8 * (size_t)c;
      float v[8];
      load_tail<T, WIDE>(p, n, v);
      UNROLL for (int i = 0; i < 8; i++) {
        UNROLL for (int r = 0; r < R; r++) acc[r * M + m] = fma(v[i], h[r][i], acc[r * M + m]);
      }
    }
  }
}

template <typename T, int M, int R, int SG, int KS, int SPLITS, typename O>
METAL_FUNC void gemv(
    const device T* x, const device T* w, device O* y, threadgroup float* part, const int N,
    const int K, const uint3 tg, const uint sg, const uint lane) {
  const int packs = (K + 7) / 8, share = (packs + SPLITS - 1) / SPLITS;
  const int row0 = (tg.x * (SG / KS) + sg / KS) * R, row = min(row0, N - R);
  const int c = tg.y * share + sg % KS * 32 + lane, end = min(packs, int(tg.y + 1) * share);
  const bool wide = K % 8 == 0 && ALIGNED(x, 16) && ALIGNED(w, 16);
  w += (size_t)row * K;
  float acc[R * M];
  if (wide)
    gemv_rows<T, M, R, KS, true>(x, w, acc, K, c, end);
  else
    gemv_rows<T, M, R, KS, false>(x, w, acc, K, c, end);
  finish<O, M, R, SG, KS>(acc, y + (size_t)tg.y * M * N, part, N, row0, row, sg, lane);
}

//! kernel gemv (x, w) -> (y)
threadgroup float part[KS > 1 ? SG * R * M : 1];
gemv<T, M, R, SG, KS, SPLITS>(
    x, w, y, part, w_shape[0], w_shape[1], threadgroup_position_in_grid,
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
