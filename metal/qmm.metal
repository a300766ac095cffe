// y[m, n] = sum_k x[m, k] * W[n, k] for many rows of x: tiles of BM rows by BN, K in SPLITS shares.
// Rows of y are not those of other M, bit for bit: weights are rounded to T before they are multiplied.

// The sums of this threadgroup's tile. Columns of the grid are tiles of M: threadgroups that share
// rows of W run together. GLU: of w0 and w1, in turns of 8 rows.
template <
    typename T, int bits, int group, int BM, int BN, int BK, int SM, int SN, int SPLITS, bool GLU, typename S,
    typename B>
METAL_FUNC void qmm(
    const device T* x, const Matrix<S, B> w0, const Matrix<S, B> w1, thread float* acc, threadgroup uint4* tile,
    const int M, const int N, const int K, const uint3 tg, const uint sg, const uint lane) {
  const int TH = SM * SN * 32, id = sg * 32 + lane, share = ((K + BK - 1) / BK + SPLITS - 1) / SPLITS * BK;
  const int first = tg.z * share, end = min(K, first + share);
  Row<T> rows[X_UNITS];
  Matrix<S, B> from[W_UNITS];
  uint w_rows[2 * W_UNITS];
  UNROLL for (int i = 0; i < X_UNITS; i++)
    rows[i].p = x + (size_t)min(int(tg.x) * BM + x_row<BM>(i, TH, id), M - 1) * K;
  UNROLL for (int i = 0; i < W_UNITS; i++) {
    const int r = w_row<T, BN>(i, TH, id);
    from[i] = GLU && r / 8 % 2 ? w1 : w0;
    UNROLL for (int j = 0; j < 2; j++) {
      const int at = r + j * w_pair<T, BN>();
      w_rows[2 * i + j] = min(GLU ? int(tg.y) * (BN / 2) + at / 16 * 8 + at % 8 : int(tg.y) * BN + at, N - 1);
    }
  }
  // All threads of the grid take the same branch.
  if (ALIGNED(x, 16) && (bits != 0 || (ALIGNED(w0.w, 16) && K % 8 == 0)))
    qmm_tile<T, bits, group, BM, BN, BK, SM, SN, true>(rows, from, w_rows, acc, tile, K, first, end, sg, lane);
  else
    qmm_tile<T, bits, group, BM, BN, BK, SM, SN, false>(rows, from, w_rows, acc, tile, K, first, end, sg, lane);
}

// Two neighbours of row m of y, of which N may end the first.
template <typename O>
METAL_FUNC void store2(device O* y, const float a, const float b, const int n, const int N) {
  if (n + 1 < N && N % 2 == 0) {
    *(device vec<O, 2>*)y = vec<O, 2>(O(a), O(b));
  } else {
    if (n < N) y[0] = O(a);
    if (n + 1 < N) y[1] = O(b);
  }
}

// The tile's sums into y. RES: plus 1 res[n] (a bias), 2 res[m, n] (a residual).
template <int BM, int BN, int SM, int SN, int RES, typename O, typename Res>
METAL_FUNC void store_tile(
    const thread float* acc, device O* y, const device Res* res, const int M, const int N, const uint3 tg,
    const uint sg, const uint lane) {
  const int NI = BN / SN / 8;
  UNROLL for (int i = 0; i < BM / SM / 16 * NI * 4; i += 2) {
    const int m = tg.x * BM + y_row<BM, SM, SN, NI>(i, sg, lane), n = tg.y * BN + y_col<BN, SN, NI>(i, sg, lane);
    if (m < M && n < N) {
      const size_t at = (size_t)m * N + n;
      const device Res* r = res + (RES == 1 ? (size_t)n : at);
      const float a = RES == 0 ? 0.0f : float(r[0]), b = RES == 0 || n + 1 == N ? 0.0f : float(r[1]);
      store2(y + at, acc[i] + a, acc[i + 1] + b, n, N);
    }
  }
}

//! kernel qmm (x, w, scales, biases) -> (y)
threadgroup uint4 tile[2 * (BM + BN) * BK * sizeof(T) / 16];
const uint sg = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
const uint3 tg = threadgroup_position_in_grid;
const int M = x_shape[0], N = w_shape[0];
const Matrix<T, T> from = {w, scales, biases};
float acc[BM * BN / (SM * SN * 32)];
qmm<T, bits, group, BM, BN, BK, SM, SN, SPLITS, false>(x, from, from, acc, tile, M, N, x_shape[1], tg, sg, lane);
store_tile<BM, BN, SM, SN, 0>(acc, y + (size_t)tg.z * M * N, x, M, N, tg, sg, lane);

//! kernel qmm_fp (x, w, scales) -> (y)
threadgroup uint4 tile[2 * (BM + BN) * BK * sizeof(T) / 16];
const uint sg = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
const uint3 tg = threadgroup_position_in_grid;
const int M = x_shape[0], N = w_shape[0];
const Matrix<uint8_t, uint8_t> from = {w, scales, scales};
float acc[BM * BN / (SM * SN * 32)];
qmm<T, bits, group, BM, BN, BK, SM, SN, SPLITS, false>(x, from, from, acc, tile, M, N, x_shape[1], tg, sg, lane);
store_tile<BM, BN, SM, SN, 0>(acc, y + (size_t)tg.z * M * N, x, M, N, tg, sg, lane);

//! kernel qmm_plain (x, w) -> (y)
// bits is 0: elements of T
threadgroup uint4 tile[2 * (BM + BN) * BK * sizeof(T) / 16];
const uint sg = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
const uint3 tg = threadgroup_position_in_grid;
const int M = x_shape[0], N = w_shape[0];
const Matrix<T, T> from = {(const device uint*)w, w, w};
float acc[BM * BN / (SM * SN * 32)];
qmm<T, bits, group, BM, BN, BK, SM, SN, SPLITS, false>(x, from, from, acc, tile, M, N, x_shape[1], tg, sg, lane);
store_tile<BM, BN, SM, SN, 0>(acc, y + (size_t)tg.z * M * N, x, M, N, tg, sg, lane);

//! kernel qmm_add (x, w, scales, biases, res) -> (y)
// y = x W^T + res: a bias or a residual
threadgroup uint4 tile[2 * (BM + BN) * BK * sizeof(T) / 16];
const uint sg = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
const uint3 tg = threadgroup_position_in_grid;
const int M = x_shape[0], N = w_shape[0];
const Matrix<T, T> from = {w, scales, biases};
float acc[BM * BN / (SM * SN * 32)];
qmm<T, bits, group, BM, BN, BK, SM, SN, 1, false>(x, from, from, acc, tile, M, N, x_shape[1], tg, sg, lane);
store_tile<BM, BN, SM, SN, RES>(acc, y, res, M, N, tg, sg, lane);

//! kernel qmm_glu (x, w0, s0, b0, w1, s1, b1) -> (y)
// y = act(x W0^T) * (x W1^T)
threadgroup uint4 tile[2 * (BM + BN) * BK * sizeof(T) / 16];
const uint sg = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
const uint3 tg = threadgroup_position_in_grid;
const int M = x_shape[0], N = w0_shape[0], NI = BN / SN / 8;
const Matrix<T, T> gate = {w0, s0, b0}, up = {w1, s1, b1};
float acc[BM * BN / (SM * SN * 32)];
qmm<T, bits, group, BM, BN, BK, SM, SN, 1, true>(x, gate, up, acc, tile, M, N, x_shape[1], tg, sg, lane);
UNROLL for (int i = 0; i < BM * BN / (SM * SN * 32); i += 2) {
  const int m = tg.x * BM + y_row<BM, SM, SN, NI>(i, sg, lane), at = y_col<BN, SN, NI>(i, sg, lane);
  const int n = tg.y * (BN / 2) + at / 16 * 8 + at % 8;
  // Neighbouring tiles of 8 columns are gate and up of the same rows.
  if (i / 4 % 2 == 0 && m < M && n < N)
    store2(y + (size_t)m * N + n, activate<ACT>(acc[i]) * acc[i + 4], activate<ACT>(acc[i + 1]) * acc[i + 5], n, N);
}
