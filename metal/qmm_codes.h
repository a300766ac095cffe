// Small M on matrix units, codes as they are: sum_k x_k (s c_k + b) over a group is
// s sum x_k (BASE + c_k) + (b - BASE s) sum x_k, so nothing is dequantised, weights are never rounded
// and scales cost two multiply-adds per group. A tile is 16 rows of W times 8 rows of x, 16 deep; of a
// row of it lane TILE_COL takes a fourth of each group. Codes go through threadgroup memory: straight
// from rows a load would touch eight cache lines for 256 bytes.

// Adds group u of a stage: acc [R][NB][4] as mma16 leaves it, of its first E columns of two. x_of and sum are
// the group of x, sb the stage's scales and biases of the lane's rows.
template <typename T, int bits, int group, int NB, int R, int U, int E>
METAL_FUNC void add_group(
    const threadgroup uint* stage, const thread uint* sb, const thread PAIR(T)* x_of, const thread float* sum,
    thread float* acc, const int u, const int row, const int col, const uint one) {
  const int NP = group / 8, A = NB * 4, HI = bits == 8 ? A : 0;
  const int RW = code_words<bits, group, U>(), NS = scale_words<T, U>(), NW = RW / U / 4, word = (u * 4 + col) * NW;
  UNROLL for (int r = 0; r < R; r++) {
    float dot[A + HI];
    UNROLL for (int i = 0; i < A + HI; i++) dot[i] = 0;
    uint q[2 * NW];
    UNROLL for (int h = 0; h < 2; h++) {
      // Chunks lie as in the row eight before.
      const int i = r * 16 + h * 8 + row;
      read_run<NW>(stage + i * RW + (word / 4 ^ chunk_turn<RW>(row)) * 4 + word % 4, q + h * NW);
    }
    UNROLL for (int j = 0; j < NW; j++) {
      PAIR(T) c[8];
      UNROLL for (int k = 0; k < 4; k++) {
        c[2 * k] = code_pair<T>(q[j] >> 4 * k, one);
        c[2 * k + 1] = code_pair<T>(q[NW + j] >> 4 * k, one);
      }
      UNROLL for (int n = 0; n < NB; n++) {
        if (bits == 4) {
          const thread PAIR(T)* v = x_of + n * NP + 4 * j;
          mma16<T>(dot + 4 * n, c[0], c[1], c[2], c[3], v[0], v[1]);
          mma16<T>(dot + 4 * n, c[4], c[5], c[6], c[7], v[2], v[3]);
        } else {
          // Low and high halves of the same codes meet the same x.
          const thread PAIR(T)* v = x_of + n * NP + 2 * j;
          mma16<T>(dot + 4 * n, c[0], c[1], c[4], c[5], v[0], v[1]);
          mma16<T>(dot + 4 * n + HI, c[2], c[3], c[6], c[7], v[0], v[1]);
        }
      }
    }
    UNROLL for (int h = 0; h < 2; h++) {
      const thread uint* p = sb + (2 * r + h) * 2 * NS;
      const float s = scale_at<T>(p, u), b = scale_at<T>(p + NS, u);
      const float off = fma(bits == 8 ? -17 * code_base<T>() : -code_base<T>(), s, b);
      UNROLL for (int n = 0; n < NB; n++)
        UNROLL for (int e = 0; e < E; e++) {
          const int i = 4 * n + 2 * h + e;
          const float t = bits == 8 ? fma(16.0f, dot[i + HI], dot[i]) : dot[i];
          acc[r * A + i] = fma(off, sum[4 * n + e], fma(s, t, acc[r * A + i]));
        }
    }
  }
}

// acc of the steps ks, ks + KS, ... NORM: x is multiplied by nw [K], and sq [NB][4] is what column_squares
// takes. stages: the simdgroup's own, ST of them. XS, for one row of x: it is made ready in xs (codes_x.h) by
// the SG simdgroups or by each for itself, and only the first of the two columns of acc and sq counts.
template <typename T, int bits, int group, int NB, int R, int SG, int KS, int U, int ST, bool WIDE, bool NORM, int XS>
METAL_FUNC void code_rows(
    const device T* x, const device T* nw, const Tiles<T> at, threadgroup uint* stages, threadgroup uint* xs,
    thread float* acc, thread float* sq, const int M, const int K, const uint sg, const uint lane) {
  const int NP = group / 8, P = code_partner<bits>(), A = NB * 4, RW = code_words<bits, group, U>();
  const int NS = scale_words<T, U>(), SIZE = stage_words<T, bits, group, R, U>();
  // x of the next XU groups is on its way while one is multiplied: of as many as registers have room for.
  const int XU = NB > 1 && R == 1 && U > 2 ? 2 : U, AHEAD = XS ? 1 : XU * NB * NP;
  const int row = TILE_ROW(lane), col = TILE_COL(lane), groups = K / group, steps = groups / U, ks = sg % KS;
  const int turn = XS > 0 ? XS / U : steps;
  const uint one = code_bits<T>(K);
  const Feed<T, bits, group, R, U> from = feed_at<T, bits, group, R, U>(at, K, lane);
  PAIR(T) ones[4], next_x[AHEAD], next_norm[NORM && !XS ? XU * NP : 1];
  PAIR(T) own[XS ? NP : 1], own_norm[XS && NORM ? NP : 1];
  if (!XS) set_ones<T>(ones);
  UNROLL for (int i = 0; i < R * A; i++) acc[i] = 0;
  UNROLL for (int i = 0; i < (NORM ? A : 1); i++) sq[i] = 0;
  UNROLL for (int i = 0; i < ST - 1; i++) {
    if (ks + i * KS < steps) load_stage<T, bits, group, R, U, WIDE>(from, stages + i * SIZE, ks + i * KS, lane);
    COPY_NEXT();
  }
  const int first = min(ks, steps - 1) * U;
  if (XS < 0) fetch_groups<T, bits, group, WIDE, NORM>(x, nw, first, groups, lane, own, own_norm);
  UNROLL for (int u = 0; u < (XS ? 0 : XU); u++) {
    fetch_x<T, bits, group, NB, WIDE>(x, M, K, first + u, row, col, next_x + u * NB * NP);
    if (NORM) fetch_x<T, bits, group, 1, WIDE>(nw, 1, K, first + u, row, col, next_norm + u * NP);
  }
  int now = 0;
  for (int begin = 0; begin < steps; begin += turn) {
    if (XS > 0) {
      if (begin > 0) threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int g = 8 * sg; g < min(XS, groups - begin * U); g += 8 * SG) {
        fetch_groups<T, bits, group, WIDE, NORM>(x, nw, begin * U + g, groups, lane, own, own_norm);
        put_groups<T, bits, group, NORM, XS>(own, own_norm, xs, g, lane);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    const int end = XS > 0 ? min(begin + turn, steps) : steps;
    for (int step = begin + ks; step < end; step += KS) {
      const int last = now == 0 ? ST - 1 : now - 1, next = min(step + KS, steps - 1) * U;
      if (step + (ST - 1) * KS < steps)
        load_stage<T, bits, group, R, U, WIDE>(from, stages + last * SIZE, step + (ST - 1) * KS, lane);
      COPY_NEXT();
      if (XS < 0) {
        put_groups<T, bits, group, NORM, XS>(own, own_norm, xs, 0, lane);
        fetch_groups<T, bits, group, WIDE, NORM>(x, nw, next, groups, lane, own, own_norm);
      }
      COPY_DONE(ST - 1);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      const threadgroup uint* stage = stages + now * SIZE;
      uint sb[4 * R * NS];
      UNROLL for (int i = 0; i < 2 * R; i++)
        UNROLL for (int k = 0; k < 2; k++)
          read_run<NS>(stage + 16 * R * RW + (k * 16 * R + i * 8 + row) * NS, sb + (2 * i + k) * NS);
      UNROLL for (int u = 0; u < U; u++) {
        PAIR(T) x_of[NB * NP];
        float sum[A];
        UNROLL for (int i = 0; i < A; i++) sum[i] = 0;
        if (XS) {
          const int g = XS > 0 ? (step - begin) * U + u : u;
          const float2 both = ready_sums<T, group, XS>(xs)[g];
          get_x<T, NP>(xs, g, row, col, x_of);
          sum[0] = both.x;
          if (NORM) sq[0] += both.y;
        } else {
          const int slot = u % XU, g = u + XU < U ? step * U + u + XU : next + u + XU - U;
          PAIR(T) norm[NORM ? NP : 1];
          UNROLL for (int n = 0; n < NB; n++) arrange<T, P, 2 * NP>(next_x + (slot * NB + n) * NP, x_of + n * NP);
          if (NORM) {
            arrange<T, P, 2 * NP>(next_norm + slot * NP, norm);
            UNROLL for (int n = 0; n < NB; n++) group_squares<T, NP>(sq + 4 * n, x_of + n * NP);
            UNROLL for (int i = 0; i < NB * NP; i++) x_of[i] = pair_times<T>(x_of[i], norm[i % NP]);
          }
          fetch_x<T, bits, group, NB, WIDE>(x, M, K, g, row, col, next_x + slot * NB * NP);
          if (NORM) fetch_x<T, bits, group, 1, WIDE>(nw, 1, K, g, row, col, next_norm + slot * NP);
          UNROLL for (int n = 0; n < NB; n++)
            UNROLL for (int i = n * NP; i < (n + 1) * NP; i += 2)
              mma16<T>(sum + 4 * n, ones[0], ones[1], ones[2], ones[3], x_of[i], x_of[i + 1]);
        }
        add_group<T, bits, group, NB, R, U, (XS ? 1 : 2)>(stage, sb, x_of, sum, acc, u, row, col, one);
      }
      simdgroup_barrier(mem_flags::mem_threadgroup);
      now = now == ST - 1 ? 0 : now + 1;
    }
  }
}

// The sums of R NB tiles, and NORM: of the squares of the lane's columns, of the KS simdgroups that share
// rows. Afterwards tile_sum gives sum i in index order.
template <int A, int KS, int NB, bool NORM>
METAL_FUNC void share_sums(thread float* acc, thread float* sq, threadgroup float* part, const int ks, const uint lane) {
  const int ALL = NORM ? A + 2 * NB : A;
  // The stages lie there too.
  threadgroup_barrier(mem_flags::mem_threadgroup);
  UNROLL for (int i = 0; i < A; i++) part[(ks * ALL + i) * 32 + lane] = acc[i];
  if (NORM) {
    UNROLL for (int n = 0; n < NB; n++)
      UNROLL for (int e = 0; e < 2; e++) part[(ks * ALL + A + 2 * n + e) * 32 + lane] = sq[4 * n + e];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
template <int ALL, int KS>
METAL_FUNC float tile_sum(const threadgroup float* part, const int i, const uint lane) {
  float t = part[i * 32 + lane];
  UNROLL for (int k = 1; k < KS; k++) t += part[(k * ALL + i) * 32 + lane];
  return t;
}
// 1 / RMS of the column of sum i, where A sums stand before those of squares.
template <int A, int KS, int NB>
METAL_FUNC float tile_scale(
    const threadgroup float* part, const int i, const int K, const float eps, const uint lane) {
  return rsqrt(tile_sum<A + 2 * NB, KS>(part, A + i / 4 % NB * 2 + i % 2, lane) / float(K) + eps);
}
// The row of x of sum i, and its place among the 16 R rows of W.
template <int NB>
METAL_FUNC int sum_column(const int i, const uint lane) { return i / 4 % NB * 8 + 2 * TILE_COL(lane) + i % 2; }
template <int NB>
METAL_FUNC int sum_row(const int i, const uint lane) { return i / 4 / NB * 16 + i % 4 / 2 * 8 + TILE_ROW(lane); }

// 16-byte chunks of threadgroup memory: the stages of KS simdgroups, and later their sums; all of that for
// SG simdgroups, and x.
template <typename T, int bits, int group, int NB, int R, int KS, int U, int ST, bool NORM>
METAL_FUNC constexpr int part_chunks() {
  return KS * (ST * stage_words<T, bits, group, R, U>() > 32 * NB * (R * 4 + (NORM ? 2 : 0))
                   ? ST * stage_words<T, bits, group, R, U>() / 4
                   : 8 * NB * (R * 4 + (NORM ? 2 : 0)));
}
template <typename T, int bits, int group, int NB, int R, int SG, int KS, int U, int ST, bool NORM, int XS>
METAL_FUNC constexpr int shared_chunks() {
  return SG / KS * part_chunks<T, bits, group, NB, R, KS, U, ST, NORM>() +
         (XS < 0 ? SG : 1) * ready_words<T, group, XS>() / 4;
}
// May all of a matrix be read in vectors.
template <typename T>
METAL_FUNC bool even(const device uint* w, const device T* s, const device T* b) {
  return ALIGNED(w, 16) && ALIGNED(s, 4 * sizeof(T)) && ALIGNED(b, 4 * sizeof(T));
}
// The products of the SG simdgroups' tiles with x; returns what share_sums left of this one's KS.
// wide: all that is read may be read in vectors; the same for all threads of a threadgroup.
template <typename T, int bits, int group, int NB, int R, int SG, int KS, int U, int ST, bool NORM, int XS>
METAL_FUNC const threadgroup float* code_product(
    const device T* x, const device T* nw, const Tiles<T> at, threadgroup uint4* shared, const bool wide,
    const int M, const int K, const uint sg, const uint lane) {
  const int A = R * NB * 4, PART = part_chunks<T, bits, group, NB, R, KS, U, ST, NORM>(), ks = sg % KS;
  float acc[A], sq[NORM ? NB * 4 : 1];
  threadgroup uint4* part = shared + sg / KS * PART;
  threadgroup uint* stages = (threadgroup uint*)part + ks * ST * stage_words<T, bits, group, R, U>();
  threadgroup uint* xs = (threadgroup uint*)(shared + SG / KS * PART) + (XS < 0 ? sg * ready_words<T, group, XS>() : 0);
  if (wide && ALIGNED(x, 16) && (!NORM || ALIGNED(nw, 16)))
    code_rows<T, bits, group, NB, R, SG, KS, U, ST, true, NORM, XS>(x, nw, at, stages, xs, acc, sq, M, K, sg, lane);
  else
    code_rows<T, bits, group, NB, R, SG, KS, U, ST, false, NORM, XS>(x, nw, at, stages, xs, acc, sq, M, K, sg, lane);
  if (NORM && !XS) UNROLL for (int n = 0; n < NB; n++) column_squares<T>(sq + 4 * n, lane);
  share_sums<A, KS, NB, NORM>(acc, sq, (threadgroup float*)part, ks, lane);
  return (const threadgroup float*)part;
}
// The first sum of pair i of a lane; the second is two behind it.
METAL_FUNC int pair_sum(const int i) { return i / 2 * 4 + i % 2; }
