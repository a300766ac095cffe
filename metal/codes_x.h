// Rows of x as operands, for qmm_codes.h.

// Adds the squares of a group's columns, as a whole: in the same order whoever takes the group. A packed
// operand is multiplied with itself as it lies: the diagonal has them. column_squares: those of the lane's
// two columns.
template <typename T, int NP>
METAL_FUNC void group_squares(thread float* sq, const thread vec<typename Operand<T>::element, 2>* b) {
  float t[2] = {0, 0};
  UNROLL for (int i = 0; i < NP; i++) {
    t[0] = fma(float(b[i].x), float(b[i].x), t[0]);
    t[1] = fma(float(b[i].y), float(b[i].y), t[1]);
  }
  sq[0] += rows_sum(t[0]);
  sq[1] += rows_sum(t[1]);
}
#ifdef MSL_TENSOR_CORES
template <typename T, int NP>
METAL_FUNC void group_squares(thread float* sq, const thread uint* b) {
  float t[4] = {0, 0, 0, 0};
  UNROLL for (int i = 0; i < NP; i += 2) mma16<T>(t, b[i], b[i], b[i + 1], b[i + 1], b[i], b[i + 1]);
  sq[0] += t[0];
  sq[1] += t[1];
}
#endif
template <typename T>
METAL_FUNC void column_squares(thread float* sq, const uint lane) {
#ifdef MSL_TENSOR_CORES
  if (sizeof(T) == 4) return;
  sq[0] = simd_shuffle(sq[0], ushort(9 * TILE_COL(lane)));
  sq[1] = simd_shuffle(sq[1], ushort(9 * TILE_COL(lane) + 4));
#endif
}

// Group g of the M rows of x, as lanes find it: to [NB][group / 8]. The last row stands in for those
// that are missing of 8 NB.
template <typename T, int bits, int group, int NB, bool WIDE>
METAL_FUNC void fetch_x(
    const device T* x, const int M, const int K, const int g, const int row, const int col, thread PAIR(T)* to) {
  const int RUN = group / 4, mine = g * group + col * RUN, its = g * group + row / 2 * RUN;
  UNROLL for (int n = 0; n < NB; n++)
    fetch_columns<T, code_partner<bits>(), RUN, WIDE>(
        x + (size_t)min(n * 8 + row, M - 1) * K + mine, x + (size_t)min(n * 8 + 2 * col, M - 1) * K + its,
        x + (size_t)min(n * 8 + 2 * col + 1, M - 1) * K + its, row, to + n * RUN / 2);
}

// One row of x that lies ready in threadgroup memory: groups as operands, then the sum and the squares of
// each. XS > 0: so many groups at once, for all simdgroups; XS < 0: eight of each simdgroup; 0: none.
template <typename T> METAL_FUNC constexpr int pair_words() { return sizeof(PAIR(T)) / 4; }
template <int XS> METAL_FUNC constexpr int ready_groups() { return XS < 0 ? 8 : XS; }
template <typename T, int group, int XS>
METAL_FUNC constexpr int ready_words() { return ready_groups<XS>() * (group / 2 * pair_words<T>() + 2); }
template <typename T, int group, int XS>
METAL_FUNC threadgroup float2* ready_sums(threadgroup uint* xs) {
  return (threadgroup float2*)(xs + ready_groups<XS>() * group / 2 * pair_words<T>());
}
// All columns hold the same then: packed operands as they lie, of others an element for all lanes of a row.
template <typename T, int NP>
METAL_FUNC void put_x(
    threadgroup uint* xs, const int g, const int row, const int col,
    const thread vec<typename Operand<T>::element, 2>* b) {
  threadgroup typename Operand<T>::element* to = (threadgroup typename Operand<T>::element*)xs;
  UNROLL for (int i = 0; i < NP; i++) {
    to[((g + 2 * col) * 8 + row) * NP + i] = b[i].x;
    to[((g + 2 * col + 1) * 8 + row) * NP + i] = b[i].y;
  }
}
template <typename T, int NP>
METAL_FUNC void get_x(
    const threadgroup uint* xs, const int g, const int row, const int col,
    thread vec<typename Operand<T>::element, 2>* b) {
  const threadgroup typename Operand<T>::element* at = (const threadgroup typename Operand<T>::element*)xs;
  UNROLL for (int i = 0; i < NP; i++) {
    const typename Operand<T>::element v = at[(g * 8 + row) * NP + i];
    b[i] = pair_of<T>(v, v);
  }
}
#ifdef MSL_TENSOR_CORES
template <typename T, int NP>
METAL_FUNC void put_x(threadgroup uint* xs, const int g, const int row, const int col, const thread uint* b) {
  UNROLL for (int i = 0; i < NP; i++) xs[((g + row) * 4 + col) * NP + i] = b[i];
}
template <typename T, int NP>
METAL_FUNC void get_x(const threadgroup uint* xs, const int g, const int row, const int col, thread uint* b) {
  read_run<NP>(xs + (g * 4 + col) * NP, b);
}
#endif
// Eight groups of x and of the norm's weight as columns, from `first` on, to [group / 8] each; the last stands
// in for those that are missing.
template <typename T, int bits, int group, bool WIDE, bool NORM>
METAL_FUNC void fetch_groups(
    const device T* x, const device T* nw, const int first, const int end, const uint lane, thread PAIR(T)* to,
    thread PAIR(T)* norm) {
  const size_t at = (size_t)first * group;
  fetch_x<T, bits, group, 1, WIDE>(x + at, end - first, group, 0, TILE_ROW(lane), TILE_COL(lane), to);
  if (NORM) fetch_x<T, bits, group, 1, WIDE>(nw + at, end - first, group, 0, TILE_ROW(lane), TILE_COL(lane), norm);
}
// They become groups g .. g + 7 of xs.
template <typename T, int bits, int group, bool NORM, int XS>
METAL_FUNC void put_groups(
    const thread PAIR(T)* from, const thread PAIR(T)* norm, threadgroup uint* xs, const int g, const uint lane) {
  const int NP = group / 8, P = code_partner<bits>(), row = TILE_ROW(lane), col = TILE_COL(lane);
  PAIR(T) v[NP], n[NORM ? NP : 1], ones[4];
  float sq[2] = {0, 0}, sum[4] = {0, 0, 0, 0};
  arrange<T, P, 2 * NP>(from, v);
  if (NORM) {
    arrange<T, P, 2 * NP>(norm, n);
    group_squares<T, NP>(sq, v);
    column_squares<T>(sq, lane);
    UNROLL for (int i = 0; i < NP; i++) v[i] = pair_times<T>(v[i], n[i]);
  }
  put_x<T, NP>(xs, g, row, col, v);
  set_ones<T>(ones);
  UNROLL for (int i = 0; i < NP; i += 2) mma16<T>(sum, ones[0], ones[1], ones[2], ones[3], v[i], v[i + 1]);
  if (row == 0) {
    ready_sums<T, group, XS>(xs)[g + 2 * col] = float2(sum[0], sq[0]);
    ready_sums<T, group, XS>(xs)[g + 2 * col + 1] = float2(sum[1], sq[1]);
  }
}
