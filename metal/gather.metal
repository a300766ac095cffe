// Experts of MoE layers, few tokens: y[p] = x[row p] * W[expert p]^T for pairs p of a row of x and
// an expert, with the sums of qmv.metal: a pair has the bits it has alone. Pairs run side by
// side over the same rows of W, so that what two of them need comes from memory once.

// How many pairs this threadgroup computes: SHARE neighbours, from a multiple of SHARE on, if all
// are of one expert, else its own. 0: an earlier pair's threadgroup has them.
template <int SHARE, typename I>
METAL_FUNC int share_of(const I rhs, const uint p, const uint pairs) {
  if (SHARE == 1) return 1;
  const uint first = p / SHARE * SHARE;
  bool same = first + SHARE <= pairs;
  for (uint i = first; same && i < first + SHARE; i++) same = rhs[i] == rhs[p];
  return !same ? 1 : p == first ? SHARE : 0;
}

template <typename S, typename C>
struct Expert {
  const device uint* w;
  const device S *s, *b;
  const device C* c;
};
template <typename S, typename C>
METAL_FUNC Expert<S, C> expert(
    const device uint* w, const device S* s, const device S* b, const device C* c, const uint e, const int N,
    const int KW, const int G) {
  Expert<S, C> x;
  x.w = w + (size_t)e * N * KW;
  x.s = s + (size_t)e * N * G;
  x.b = b + (size_t)e * N * G;
  x.c = c + (size_t)e * N;
  return x;
}

// M rows of x with one expert; BIAS: its c [N] is added.
template <typename T, int bits, int group, int M, int R, int SG, int KS, bool BIAS, typename S, typename C>
METAL_FUNC void expert_rows(
    const device T* x, const Expert<S, C> e, device T* y, threadgroup float* part, const int N, const int KW,
    const uint tile, const uint sg, const uint lane) {
  const int K = KW * 32 / bits, row0 = (tile * (SG / KS) + sg / KS) * R, row = min(row0, N - R);
  Rows<S, S> at;
  set_rows(at, e.w, e.s, e.b, KW, K / group, row, row);
  const int n = row + min(int(lane) / M, R - 1);
  const float t = product<T, bits, group, M, R, SG, KS, false, false>(
      x, x, at, part, K, 0.0f, BIAS ? float(e.c[n]) : 0.0f, sg, lane);
  if (sg % KS == 0 && lane < R * M && n >= row0) y[(size_t)(lane % M) * N + n] = T(t);
}

// One row of x with gate and up: y = act(gate) * up.
template <typename T, int bits, int group, int R, int SG, int KS, bool BIAS, int ACT, int ALPHA, int LIMIT,
          typename S, typename C>
METAL_FUNC void glu_row(
    const device T* x, const Expert<S, C> gate, const Expert<S, C> up, device T* y, threadgroup float* part,
    const int N, const int KW, const uint tile, const uint sg, const uint lane) {
  const int K = KW * 32 / bits, H = R / 2, row0 = (tile * (SG / KS) + sg / KS) * H, row = min(row0, N - H);
  Rows<S, S> at;
  set_rows(at, gate.w, gate.s, gate.b, KW, K / group, row, row);
  at.w2 = up.w + (size_t)row * KW;
  at.s2 = up.s + (size_t)row * (K / group);
  at.b2 = up.b + (size_t)row * (K / group);
  const int r = min(int(lane), R - 1), n = row + r % H;
  const float t = product<T, bits, group, 1, R, SG, KS, false, true>(
      x, x, at, part, K, 0.0f, BIAS ? float(r < H ? gate.c[n] : up.c[n]) : 0.0f, sg, lane);
  const float u = simd_shuffle(t, ushort((lane + H) % 32));
  if (sg % KS == 0 && lane < H && n >= row0) y[n] = T(gated<ACT, ALPHA, LIMIT>(t, u));
}

// n pairs, 1 or SHARE.
template <typename T, int bits, int group, int SHARE, int R, int SG, int KS, bool BIAS, typename S, typename C>
METAL_FUNC void expert_pairs(
    const int n, const device T* x, const Expert<S, C> e, device T* y, threadgroup float* part, const int N,
    const int KW, const uint tile, const uint sg, const uint lane) {
  if (n == 1)
    expert_rows<T, bits, group, 1, R, SG, KS, BIAS>(x, e, y, part, N, KW, tile, sg, lane);
  else
    expert_rows<T, bits, group, SHARE, R, SG, KS, BIAS>(x, e, y, part, N, KW, tile, sg, lane);
}

//! kernel gather_qmv (x, w, s, b, c, lhs, rhs) -> (y)
// Grid: pairs of a row of x, rows, tiles of W; with LHS, pair p reads row lhs[p]. c: BIAS [experts, N].
threadgroup float part[KS > 1 ? SG * R * SHARE : 1];
const int N = w_shape[1], KW = w_shape[2], K = KW * 32 / bits, G = K / group;
const uint3 tg = threadgroup_position_in_grid, grid = threadgroups_per_grid;
const uint p = tg.y * grid.x + tg.x, row = LHS ? uint(lhs[p]) : tg.y;
const int n = share_of<SHARE>(rhs, p, grid.x * grid.y);
if (n == 0) return;
const uint e = min(uint(rhs[p]), uint(w_shape[0] - 1));
expert_pairs<T, bits, group, SHARE, R, SG, KS, BIAS>(
    n, x + (size_t)row * K, expert(w, s, b, c, e, N, KW, G), y + (size_t)p * N, part, N, KW, tg.z,
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);

//! kernel gather_qmv_fp (x, w, s, c, lhs, rhs) -> (y)
threadgroup float part[KS > 1 ? SG * R * SHARE : 1];
const int N = w_shape[1], KW = w_shape[2], K = KW * 32 / bits, G = K / group;
const uint3 tg = threadgroup_position_in_grid, grid = threadgroups_per_grid;
const uint p = tg.y * grid.x + tg.x, row = LHS ? uint(lhs[p]) : tg.y;
const int n = share_of<SHARE>(rhs, p, grid.x * grid.y);
if (n == 0) return;
const uint e = min(uint(rhs[p]), uint(w_shape[0] - 1));
expert_pairs<T, bits, group, SHARE, R, SG, KS, BIAS>(
    n, x + (size_t)row * K, expert(w, s, s, c, e, N, KW, G), y + (size_t)p * N, part, N, KW, tg.z,
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);

//! kernel gather_glu (x, w0, s0, b0, c0, w1, s1, b1, c1, rhs) -> (y)
threadgroup float part[KS > 1 ? SG * R : 1];
const int N = w0_shape[1], KW = w0_shape[2], K = KW * 32 / bits, G = K / group;
const uint3 tg = threadgroup_position_in_grid, grid = threadgroups_per_grid;
const uint p = tg.y * grid.x + tg.x;
const uint e = min(uint(rhs[p]), uint(w0_shape[0] - 1));
glu_row<T, bits, group, R, SG, KS, BIAS, ACT, ALPHA, LIMIT>(
    x + (size_t)tg.y * K, expert(w0, s0, b0, c0, e, N, KW, G), expert(w1, s1, b1, c1, e, N, KW, G),
    y + (size_t)p * N, part, N, KW, tg.z,
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);

//! kernel gather_glu_fp (x, w0, s0, c0, w1, s1, c1, rhs) -> (y)
threadgroup float part[KS > 1 ? SG * R : 1];
const int N = w0_shape[1], KW = w0_shape[2], K = KW * 32 / bits, G = K / group;
const uint3 tg = threadgroup_position_in_grid, grid = threadgroups_per_grid;
const uint p = tg.y * grid.x + tg.x;
const uint e = min(uint(rhs[p]), uint(w0_shape[0] - 1));
glu_row<T, bits, group, R, SG, KS, BIAS, ACT, ALPHA, LIMIT>(
    x + (size_t)tg.y * K, expert(w0, s0, s0, c0, e, N, KW, G), expert(w1, s1, s1, c1, e, N, KW, G),
    y + (size_t)p * N, part, N, KW, tg.z,
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
