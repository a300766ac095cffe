// Small M on matrices: y[m, n] = sum_k x[m, k] * W[n, k] for up to 8 NB rows of x. Weights are the
// rows of the first operand, decoded in registers, rows of x the columns of the second. KS
// simdgroups share 16 R rows of W and split K. Rows of y are not those of other M, bit for bit.

// Weights that a lane takes of a row at once, 16 where words allow: the four lanes of a row then
// read x without gaps. A step is U packs of each of the four.
template <int bits>
METAL_FUNC constexpr int pack_size() { return bits == 3 || bits == 5 ? 32 : 16; }
template <int bits>
METAL_FUNC constexpr int pack_count() { return 32 / pack_size<bits>(); }

// Pack c of the lane's 2 R rows, which begin at w, scales and biases: q is [2 R][words], sb
// (scale, bias).
template <int bits, int group, int R, bool WIDE, typename S, typename B>
METAL_FUNC void load_w(
    const thread uint* rows, const device uint* w, const device S* scales, const device B* biases,
    const uint groups, const int packs, const int c, thread uint* q, thread float2* sb) {
  const int PK = pack_size<bits>(), NW = PK * bits / 32;
  const uint at = min(c, packs - 1);
  UNROLL for (int i = 0; i < 2 * R; i++) {
    const uint g = rows[i] * groups + at * PK / group;
    load_run<NW, WIDE>(w + ((size_t)rows[i] * packs + at) * NW, q + i * NW);
    sb[i].x = c < packs ? group_scale<group, bits>(scales[g]) : 0;
    sb[i].y = AFFINE && c < packs ? float(biases[g]) : 0;
  }
}

// acc [R][NB][4] as mma16 leaves it, of the steps ks, ks + KS, ...
template <typename T, int bits, int group, int M, int R, int KS, bool WIDE, typename S, typename B>
METAL_FUNC void qmm_rows(
    const device T* x, const device uint* w, const device S* scales, const device B* biases,
    thread float* acc, const int row0, const int N, const int K, const int ks, const uint lane) {
  const int PK = pack_size<bits>(), U = pack_count<bits>(), NW = PK * bits / 32, NB = (M + 7) / 8;
  const int packs = K / PK, row = TILE_ROW(lane), col = TILE_COL(lane);
  const uint one = one_bits(K);
  UNROLL for (int i = 0; i < R * NB * 4; i++) acc[i] = 0;
  uint rows[2 * R], q[U * 2 * R * NW], next[U * 2 * R * NW];
  float2 sb[U * 2 * R], next_sb[U * 2 * R];
  UNROLL for (int i = 0; i < 2 * R; i++) rows[i] = min(row0 + row + 8 * i, N - 1);
  UNROLL for (int u = 0; u < U; u++)
    load_w<bits, group, R, WIDE>(
        rows, w, scales, biases, K / group, packs, (ks * U + u) * 4 + col, q + u * 2 * R * NW, sb + u * 2 * R);
  for (int step = ks; step * U * 4 < packs; step += KS) {
    UNROLL for (int u = 0; u < U; u++)
      load_w<bits, group, R, WIDE>(
          rows, w, scales, biases, K / group, packs, ((step + KS) * U + u) * 4 + col,
          next + u * 2 * R * NW, next_sb + u * 2 * R);
    UNROLL for (int u = 0; u < U; u++) {
      PAIR(T) b[NB * PK / 2];
      // Behind the last pack it is taken again: the weights are 0 there.
      const int c = (step * U + u) * 4, mine = min(c + col, packs - 1) * PK, its = min(c + row / 2, packs - 1) * PK;
      UNROLL for (int n = 0; n < NB; n++)
        load_columns<T, bits, PK, WIDE>(
            x + (size_t)min(n * 8 + row, M - 1) * K + mine, x + (size_t)min(n * 8 + 2 * col, M - 1) * K + its,
            x + (size_t)min(n * 8 + 2 * col + 1, M - 1) * K + its, row, b + n * (PK / 2));
      UNROLL for (int j = 0; j < PK / 8; j++) {
        UNROLL for (int r = 0; r < R; r++) {
          PAIR(T) top[4], low[4];
          const int i = (u * R + r) * 2;
          along<T, bits, 8>(q + i * NW, j, sb[i], one, top);
          along<T, bits, 8>(q + (i + 1) * NW, j, sb[i + 1], one, low);
          UNROLL for (int n = 0; n < NB; n++) {
            const thread PAIR(T)* bn = b + n * (PK / 2) + 4 * j;
            mma16<T>(acc + (r * NB + n) * 4, top[0], low[0], top[1], low[1], bn[0], bn[1]);
            mma16<T>(acc + (r * NB + n) * 4, top[2], low[2], top[3], low[3], bn[2], bn[3]);
          }
        }
      }
    }
    UNROLL for (int i = 0; i < U * 2 * R * NW; i++) q[i] = next[i];
    UNROLL for (int i = 0; i < U * 2 * R; i++) sb[i] = next_sb[i];
  }
}

template <typename T, int bits, int group, int M, int R, int KS, typename S, typename B>
METAL_FUNC void qmm_small(
    const device T* x, const device uint* w, const device S* scales, const device B* biases,
    device T* y, threadgroup float* part, const int N, const int KW, const int tile,
    const int ks, const uint lane) {
  const int K = KW * 32 / bits, NB = (M + 7) / 8, row0 = tile * R * 16;
  float acc[R * NB * 4];
  // All threads of the grid take the same branch.
  if (ALIGNED(x, 16) && ALIGNED(w, 16))
    qmm_rows<T, bits, group, M, R, KS, true>(x, w, scales, biases, acc, row0, N, K, ks, lane);
  else
    qmm_rows<T, bits, group, M, R, KS, false>(x, w, scales, biases, acc, row0, N, K, ks, lane);
  UNROLL for (int i = 0; i < R * NB * 4; i++) part[(ks * R * NB * 4 + i) * 32 + lane] = acc[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = ks; i < R * NB * 4; i += KS) {
    float t = part[i * 32 + lane];
    UNROLL for (int k = 1; k < KS; k++) t += part[(k * R * NB * 4 + i) * 32 + lane];
    const int n = row0 + i / 4 / NB * 16 + i % 4 / 2 * 8 + TILE_ROW(lane);
    const int m = i / 4 % NB * 8 + 2 * TILE_COL(lane) + i % 2;
    if (n < N && m < M) y[(size_t)m * N + n] = T(t);
  }
}

//! kernel qmm_small (x, w, scales, biases) -> (y)
threadgroup float part[KS * R * ((M + 7) / 8) * 128];
qmm_small<T, bits, group, M, R, KS>(
    x, w, scales, biases, y, part, w_shape[0], w_shape[1], threadgroup_position_in_grid.x,
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);

//! kernel qmm_small_fp (x, w, scales) -> (y)
threadgroup float part[KS * R * ((M + 7) / 8) * 128];
qmm_small<T, bits, group, M, R, KS>(
    x, w, scales, scales, y, part, w_shape[0], w_shape[1], threadgroup_position_in_grid.x,
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
