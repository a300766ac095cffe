// Experts of MoE layers, many tokens: a threadgroup takes a tile of BM pairs of one expert (see
// gather_tiles.metal) times BN rows of its W, so weights are read once for the tile.

// The row of x or of y that is a pair's.
template <bool MAPPED, typename I>
METAL_FUNC size_t pair_row(const I map, const int pair) { return MAPPED ? size_t(map[pair]) : size_t(pair); }

// Runs a tile. GLU: blocks of 8 rows of gate and up take turns. x: rows of this thread's units.
template <typename T, int bits, int group, int BM, int BN, int BK, int SM, int SN, bool GLU, typename S, typename B>
METAL_FUNC void expert_tile(
    const thread Row<T>* x, const bool wide, const Matrix<S, B> w0, const Matrix<S, B> w1, thread float* acc,
    threadgroup uint4* tile, const int N, const int K, const uint tn, const uint sg, const uint lane) {
  const int TH = SM * SN * 32, id = sg * 32 + lane;
  Matrix<S, B> from[W_UNITS];
  uint rows[2 * W_UNITS];
  UNROLL for (int i = 0; i < W_UNITS; i++) {
    const int r = w_row<T, BN>(i, TH, id);
    from[i] = w0;
    if (GLU && r / 8 % 2) from[i] = w1;
    UNROLL for (int j = 0; j < 2; j++) {
      const int at = r + j * w_pair<T, BN>();
      rows[2 * i + j] = min(GLU ? int(tn) * (BN / 2) + at / 16 * 8 + at % 8 : int(tn) * BN + at, N - 1);
    }
  }
  // All threads of the grid take the same branch.
  if (wide)
    qmm_tile<T, bits, group, BM, BN, BK, SM, SN, true>(x, from, rows, acc, tile, K, 0, K, sg, lane);
  else
    qmm_tile<T, bits, group, BM, BN, BK, SM, SN, false>(x, from, rows, acc, tile, K, 0, K, sg, lane);
}

template <typename S, typename B>
METAL_FUNC Matrix<S, B> matrix_of(
    const device uint* w, const device S* s, const device B* b, const size_t e, const int N, const int KW, const int G) {
  const Matrix<S, B> m = {w + e * N * KW, s + e * N * G, b + e * N * G};
  return m;
}

//! kernel gather_qmm (x, w, s, b, c, tiles, rows, to) -> (y)
threadgroup uint4 tile[2 * (BM + BN) * BK * sizeof(T) / 16];
const uint sg = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
const uint3 tg = threadgroup_position_in_grid;
const int N = w_shape[1], KW = w_shape[2], K = KW * 32 / bits, G = K / group;
const int e = tiles[4 * tg.x], first = tiles[4 * tg.x + 1], end = tiles[4 * tg.x + 2];
if (first >= end) return;
Row<T> from[X_UNITS];
UNROLL for (int i = 0; i < X_UNITS; i++) {
  const int pair = min(first + x_row<BM>(i, SM * SN * 32, sg * 32 + lane), end - 1);
  from[i].p = x + pair_row<ROWS>(rows, pair) * K;
}
float acc[BM * BN / (SM * SN * 32)];
expert_tile<T, bits, group, BM, BN, BK, SM, SN, false>(
    from, ALIGNED(x, 16), matrix_of(w, s, b, e, N, KW, G), matrix_of(w, s, b, e, N, KW, G), acc, tile, N, K, tg.y, sg, lane);
const int NI = BN / SN / 8;
UNROLL for (int i = 0; i < BM / SM / 16 * NI * 4; i++) {
  const int pair = first + y_row<BM, SM, SN, NI>(i, sg, lane), col = y_col<BN, SN, NI>(i, sg, lane);
  const int n = tg.y * BN + col;
  if (pair < end && n < N)
    y[pair_row<TO>(to, pair) * N + n] = T(BIAS ? acc[i] + float(c[(size_t)e * N + n]) : acc[i]);
}

//! kernel gather_qmm_fp (x, w, s, c, tiles, rows, to) -> (y)
threadgroup uint4 tile[2 * (BM + BN) * BK * sizeof(T) / 16];
const uint sg = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
const uint3 tg = threadgroup_position_in_grid;
const int N = w_shape[1], KW = w_shape[2], K = KW * 32 / bits, G = K / group;
const int e = tiles[4 * tg.x], first = tiles[4 * tg.x + 1], end = tiles[4 * tg.x + 2];
if (first >= end) return;
Row<T> from[X_UNITS];
UNROLL for (int i = 0; i < X_UNITS; i++) {
  const int pair = min(first + x_row<BM>(i, SM * SN * 32, sg * 32 + lane), end - 1);
  from[i].p = x + pair_row<ROWS>(rows, pair) * K;
}
float acc[BM * BN / (SM * SN * 32)];
expert_tile<T, bits, group, BM, BN, BK, SM, SN, false>(
    from, ALIGNED(x, 16), matrix_of(w, s, s, e, N, KW, G), matrix_of(w, s, s, e, N, KW, G), acc, tile, N, K, tg.y, sg, lane);
const int NI = BN / SN / 8;
UNROLL for (int i = 0; i < BM / SM / 16 * NI * 4; i++) {
  const int pair = first + y_row<BM, SM, SN, NI>(i, sg, lane), col = y_col<BN, SN, NI>(i, sg, lane);
  const int n = tg.y * BN + col;
  if (pair < end && n < N)
    y[pair_row<TO>(to, pair) * N + n] = T(BIAS ? acc[i] + float(c[(size_t)e * N + n]) : acc[i]);
}

//! kernel gather_qmm_glu (x, w0, s0, b0, c0, w1, s1, b1, c1, tiles, rows, to) -> (y)
threadgroup uint4 tile[2 * (BM + BN) * BK * sizeof(T) / 16];
const uint sg = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
const uint3 tg = threadgroup_position_in_grid;
const int N = w0_shape[1], KW = w0_shape[2], K = KW * 32 / bits, G = K / group;
const int e = tiles[4 * tg.x], first = tiles[4 * tg.x + 1], end = tiles[4 * tg.x + 2];
if (first >= end) return;
Row<T> from[X_UNITS];
UNROLL for (int i = 0; i < X_UNITS; i++) {
  const int pair = min(first + x_row<BM>(i, SM * SN * 32, sg * 32 + lane), end - 1);
  from[i].p = x + pair_row<ROWS>(rows, pair) * K;
}
float acc[BM * BN / (SM * SN * 32)];
expert_tile<T, bits, group, BM, BN, BK, SM, SN, true>(
    from, ALIGNED(x, 16), matrix_of(w0, s0, b0, e, N, KW, G), matrix_of(w1, s1, b1, e, N, KW, G), acc, tile, N, K, tg.y, sg, lane);
const int NI = BN / SN / 8;
UNROLL for (int i = 0; i < BM / SM / 16 * NI * 4; i++) {
  const int pair = first + y_row<BM, SM, SN, NI>(i, sg, lane), col = y_col<BN, SN, NI>(i, sg, lane);
  const int n = tg.y * (BN / 2) + col / 16 * 8 + col % 8;
  if (i / 4 % 2 == 0 && pair < end && n < N) {
    const float g = acc[i], u = acc[i + 4];
    const size_t at = (size_t)e * N + n;
    y[pair_row<TO>(to, pair) * N + n] = T(gated<ACT, ALPHA, LIMIT>(
        BIAS ? g + float(c0[at]) : g, BIAS ? u + float(c1[at]) : u));
  }
}

//! kernel gather_qmm_glu_fp (x, w0, s0, c0, w1, s1, c1, tiles, rows, to) -> (y)
threadgroup uint4 tile[2 * (BM + BN) * BK * sizeof(T) / 16];
const uint sg = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
const uint3 tg = threadgroup_position_in_grid;
const int N = w0_shape[1], KW = w0_shape[2], K = KW * 32 / bits, G = K / group;
const int e = tiles[4 * tg.x], first = tiles[4 * tg.x + 1], end = tiles[4 * tg.x + 2];
if (first >= end) return;
Row<T> from[X_UNITS];
UNROLL for (int i = 0; i < X_UNITS; i++) {
  const int pair = min(first + x_row<BM>(i, SM * SN * 32, sg * 32 + lane), end - 1);
  from[i].p = x + pair_row<ROWS>(rows, pair) * K;
}
float acc[BM * BN / (SM * SN * 32)];
expert_tile<T, bits, group, BM, BN, BK, SM, SN, true>(
    from, ALIGNED(x, 16), matrix_of(w0, s0, s0, e, N, KW, G), matrix_of(w1, s1, s1, e, N, KW, G), acc, tile, N, K, tg.y, sg, lane);
const int NI = BN / SN / 8;
UNROLL for (int i = 0; i < BM / SM / 16 * NI * 4; i++) {
  const int pair = first + y_row<BM, SM, SN, NI>(i, sg, lane), col = y_col<BN, SN, NI>(i, sg, lane);
  const int n = tg.y * (BN / 2) + col / 16 * 8 + col % 8;
  if (i / 4 % 2 == 0 && pair < end && n < N) {
    const float g = acc[i], u = acc[i + 4];
    const size_t at = (size_t)e * N + n;
    y[pair_row<TO>(to, pair) * N + n] = T(gated<ACT, ALPHA, LIMIT>(
        BIAS ? g + float(c0[at]) : g, BIAS ? u + float(c1[at]) : u));
  }
}
