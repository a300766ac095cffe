// Small M on matrix units, codes as they are: sum_k x_k (s c_k + b) over a group is
// s sum x_k (BASE + c_k) + (b - BASE s) sum x_k, so nothing is dequantised, weights are never rounded
// and scales cost two multiply-adds per group. A tile is 16 rows of W times 8 rows of x, 16 deep; of a
// row of it lane TILE_COL takes a fourth of each group. Codes go through threadgroup memory: straight
// from rows a load would touch eight cache lines for 256 bytes.

// A code becomes a number of T by standing in the low bits of one.
template <typename T> METAL_FUNC constexpr float code_base() { return 1024; }
template <> METAL_FUNC constexpr float code_base<float>() { return 0; }
// K is never negative, but a compiler can't know: the bits stay in a register.
template <typename T> METAL_FUNC uint code_bits(const int K) { return K < 0 ? 0 : 0x64006400; }
#ifdef MSL_TENSOR_CORES
template <> METAL_FUNC constexpr float code_base<bfloat>() { return 128; }
template <> METAL_FUNC uint code_bits<bfloat>(const int K) { return K < 0 ? 0 : 0x43004300; }
// The codes in bits 0..3 and 16..19 of w.
template <typename T> METAL_FUNC PAIR(T) code_pair(const uint w, const uint one) { return (w & 0x000f000f) | one; }
template <typename T> METAL_FUNC PAIR(T) pair_times(const PAIR(T) a, const PAIR(T) b) { return msl_mma<T>::times(a, b); }
template <typename T> METAL_FUNC void set_ones(thread PAIR(T)* a) { msl_mma<T>::ones(a); }
#else
template <typename T> METAL_FUNC PAIR(T) code_pair(const uint w, const uint one) {
  const half2 h = as_type<half2>((w & 0x000f000f) | one);
  return pair_of<T>(h.x, h.y);
}
template <typename T> METAL_FUNC PAIR(T) pair_times(const PAIR(T) a, const PAIR(T) b) { return a * b; }
template <typename T> METAL_FUNC void set_ones(thread PAIR(T)* a) {
  UNROLL for (int i = 0; i < 4; i++) a[i] = pair_of<T>(1.0f, 1.0f);
}
#endif
template <> METAL_FUNC float2 code_pair<float>(const uint w, const uint one) {
  const half2 h = as_type<half2>((w & 0x000f000f) | one);
  return float2(float(h.x) - 1024, float(h.y) - 1024);
}
// Sums of the squares of an operand's columns, one multiply as it lies: its product with itself has them
// on the diagonal. column_squares: those of the lane's two columns.
template <typename T>
METAL_FUNC void add_squares(thread float* sq, const PAIR(T) b0, const PAIR(T) b1) {
#ifdef MSL_TENSOR_CORES
  mma16<T>(sq, b0, b0, b1, b1, b0, b1);
#else
  sq[0] = fma(float(b1.x), float(b1.x), fma(float(b0.x), float(b0.x), sq[0]));
  sq[1] = fma(float(b1.y), float(b1.y), fma(float(b0.y), float(b0.y), sq[1]));
#endif
}
METAL_FUNC void column_squares(thread float* sq, const uint lane) {
#ifdef MSL_TENSOR_CORES
  sq[0] = simd_shuffle(sq[0], ushort(9 * TILE_COL(lane)));
  sq[1] = simd_shuffle(sq[1], ushort(9 * TILE_COL(lane) + 4));
#else
  sq[0] = rows_sum(sq[0]);
  sq[1] = rows_sum(sq[1]);
#endif
}
// The other code of a pair is so far behind.
template <int bits> METAL_FUNC constexpr int code_partner() { return 16 / bits; }

// Where a simdgroup's tiles lie: rows 0 to 7 of tile t are those of w from first + t step on, `stride` apart,
// rows 8 to 15 those of w2 from second + t step on. So a lane has the sums of both rows of a pair.
template <typename T>
struct Tiles {
  const device uint *w, *w2;
  const device T *s, *s2, *b, *b2;
  int first, second, step, stride;
};
template <typename T>
METAL_FUNC Tiles<T> tiles_at(
    const device uint* w, const device T* s, const device T* b, const device uint* w2, const device T* s2,
    const device T* b2, const int first, const int second, const int step, const int stride) {
  Tiles<T> at;
  at.w = w; at.s = s; at.b = b;
  at.w2 = w2; at.s2 = s2; at.b2 = b2;
  at.first = first; at.second = second; at.step = step; at.stride = stride;
  return at;
}
// Tiles of neighbours, from `row` on.
template <typename T>
METAL_FUNC Tiles<T> tiles_at(const device uint* w, const device T* s, const device T* b, const int row) {
  return tiles_at(w, s, b, w, s, b, row, row + 8, 16, 1);
}
// Row i of the tiles.
METAL_FUNC bool in_first(const int i) { return i % 16 < 8; }
template <typename T>
METAL_FUNC int tile_row(const Tiles<T> at, const int i) {
  return (in_first(i) ? at.first : at.second) + i / 16 * at.step + i % 8 * at.stride;
}

// A step is U groups of each row. Words of a row's codes and scales there, of all rows' in a stage.
template <int bits, int group, int U> METAL_FUNC constexpr int code_words() { return U * group * bits / 32; }
template <typename T, int U> METAL_FUNC constexpr int scale_words() { return U * sizeof(T) / 4; }
template <typename T, int bits, int group, int R, int U>
METAL_FUNC constexpr int stage_words() { return 16 * R * (code_words<bits, group, U>() + 2 * scale_words<T, U>()); }
// Chunks of 16 bytes change places, so that eight rows at once come from different banks.
template <int RW> METAL_FUNC constexpr int chunk_turn(const int row) { return row * RW / 32 * 2 % (RW / 4); }

// Copies of NW words, in the background where the hardware can.
#ifdef MSL_TENSOR_CORES
#define COPY_DONE(n) msl_copy_wait<n>()
#define COPY_NEXT() msl_copy_commit()
#else
#define COPY_DONE(n)
#define COPY_NEXT()
#endif
template <int NW, bool WIDE, typename Data>
METAL_FUNC void copy_run(threadgroup uint* to, const device Data* p) {
#ifdef MSL_TENSOR_CORES
  if (WIDE) {
    msl_copy<4 * NW>(to, p);
    return;
  }
#endif
  uint w[NW];
  load_run<NW, WIDE>(p, w);
  UNROLL for (int i = 0; i < NW; i++) to[i] = w[i];
}
// A step of all rows: codes [16 R][code_words], then scales and biases [2][16 R][scale_words].
template <typename T, int bits, int group, int R, int U, bool WIDE>
METAL_FUNC void load_stage(
    const Tiles<T> at, threadgroup uint* stage, const int K, const int step, const uint lane) {
  const int RW = code_words<bits, group, U>(), NS = scale_words<T, U>(), C = RW / 4;
  UNROLL for (int j = 0; j < 16 * R * C / 32; j++) {
    const int i = j * 32 + lane, row = i / C, c = i % C;
    copy_run<4, WIDE>(
        stage + row * RW + (c ^ chunk_turn<RW>(row)) * 4,
        (in_first(row) ? at.w : at.w2) + (size_t)tile_row(at, row) * (K / 32 * bits) + step * RW + c * 4);
  }
  UNROLL for (int j = 0; j < R; j++) {
    const int i = j * 32 + lane, row = i % (16 * R);
    const device T* p = i < 16 * R ? (in_first(row) ? at.s : at.s2) : in_first(row) ? at.b : at.b2;
    copy_run<NS, WIDE>(
        stage + 16 * R * RW + i * NS, p + (size_t)tile_row(at, row) * (K / group) + step * U);
  }
}
// The same words back, aligned for vectors of two or four.
template <int NW>
METAL_FUNC void read_run(const threadgroup uint* p, thread uint* w) {
  if (NW % 4 == 0) {
    UNROLL for (int i = 0; i < NW; i += 4) {
      const uint4 v = *(const threadgroup uint4*)(p + i);
      w[i] = v.x; w[i + 1] = v.y; w[i + 2] = v.z; w[i + 3] = v.w;
    }
  } else if (NW == 2) {
    const uint2 v = *(const threadgroup uint2*)p;
    w[0] = v.x; w[1] = v.y;
  } else {
    w[0] = p[0];
  }
}
template <typename T>
METAL_FUNC float scale_at(const thread uint* w, const int u) {
  const vec<T, 2> v = as_type<vec<T, 2>>(w[u / 2]);
  return float(u % 2 ? v.y : v.x);
}
template <>
METAL_FUNC float scale_at<float>(const thread uint* w, const int u) { return as_type<float>(w[u]); }

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

// acc [R][NB][4] as mma16 leaves it, of the steps ks, ks + KS, ... NORM: x is multiplied by nw [K], and
// sq [NB][4] is what column_squares takes. stages: the simdgroup's own, ST of them.
template <typename T, int bits, int group, int NB, int R, int KS, int U, int ST, bool WIDE, bool NORM>
METAL_FUNC void code_rows(
    const device T* x, const device T* nw, const Tiles<T> at, threadgroup uint* stages, thread float* acc,
    thread float* sq, const int M, const int K, const int ks, const uint lane) {
  const int NP = group / 8, P = code_partner<bits>(), A = NB * 4;
  const int RW = code_words<bits, group, U>(), NS = scale_words<T, U>(), NW = RW / U / 4, HI = bits == 8 ? A : 0;
  const int SIZE = stage_words<T, bits, group, R, U>();
  const int row = TILE_ROW(lane), col = TILE_COL(lane), steps = K / (group * U);
  const uint one = code_bits<T>(K);
  PAIR(T) ones[4];
  set_ones<T>(ones);
  UNROLL for (int i = 0; i < R * A; i++) acc[i] = 0;
  UNROLL for (int i = 0; i < (NORM ? A : 1); i++) sq[i] = 0;
  UNROLL for (int i = 0; i < ST - 1; i++) {
    if (ks + i * KS < steps) load_stage<T, bits, group, R, U, WIDE>(at, stages + i * SIZE, K, ks + i * KS, lane);
    COPY_NEXT();
  }
  // x of the next step is on its way while this one is multiplied.
  PAIR(T) next_x[U * NB * NP], next_norm[NORM ? U * NP : 1];
  UNROLL for (int u = 0; u < U; u++) {
    const int g = min(ks, steps - 1) * U + u;
    fetch_x<T, bits, group, NB, WIDE>(x, M, K, g, row, col, next_x + u * NB * NP);
    if (NORM) fetch_x<T, bits, group, 1, WIDE>(nw, 1, K, g, row, col, next_norm + u * NP);
  }
  int now = 0;
  for (int step = ks; step < steps; step += KS) {
    const int last = now == 0 ? ST - 1 : now - 1;
    if (step + (ST - 1) * KS < steps)
      load_stage<T, bits, group, R, U, WIDE>(at, stages + last * SIZE, K, step + (ST - 1) * KS, lane);
    COPY_NEXT();
    COPY_DONE(ST - 1);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const threadgroup uint* stage = stages + now * SIZE;
    uint sb[4 * R * NS];
    UNROLL for (int i = 0; i < 2 * R; i++)
      UNROLL for (int k = 0; k < 2; k++)
        read_run<NS>(stage + 16 * R * RW + (k * 16 * R + i * 8 + row) * NS, sb + (2 * i + k) * NS);
    UNROLL for (int u = 0; u < U; u++) {
      PAIR(T) x_of[NB * NP], norm[NORM ? NP : 1];
      UNROLL for (int n = 0; n < NB; n++) arrange<T, P, 2 * NP>(next_x + (u * NB + n) * NP, x_of + n * NP);
      if (NORM) {
        arrange<T, P, 2 * NP>(next_norm + u * NP, norm);
        UNROLL for (int i = 0; i < NB * NP; i += 2) add_squares<T>(sq + i / NP * 4, x_of[i], x_of[i + 1]);
        UNROLL for (int i = 0; i < NB * NP; i++) x_of[i] = pair_times<T>(x_of[i], norm[i % NP]);
      }
      const int g = min(step + KS, steps - 1) * U + u;
      fetch_x<T, bits, group, NB, WIDE>(x, M, K, g, row, col, next_x + u * NB * NP);
      if (NORM) fetch_x<T, bits, group, 1, WIDE>(nw, 1, K, g, row, col, next_norm + u * NP);
      float sum[A];
      UNROLL for (int i = 0; i < A; i++) sum[i] = 0;
      UNROLL for (int n = 0; n < NB; n++)
        UNROLL for (int i = 0; i < NP; i += 2)
          mma16<T>(sum + 4 * n, ones[0], ones[1], ones[2], ones[3], x_of[n * NP + i], x_of[n * NP + i + 1]);
      UNROLL for (int r = 0; r < R; r++) {
        float dot[A + HI];
        UNROLL for (int i = 0; i < A + HI; i++) dot[i] = 0;
        uint q[2 * NW];
        UNROLL for (int h = 0; h < 2; h++) {
          const int i = r * 16 + h * 8 + row, word = (u * 4 + col) * NW;
          const threadgroup uint* p = stage + i * RW + (word / 4 ^ chunk_turn<RW>(i)) * 4 + word % 4;
          read_run<NW>(p, q + h * NW);
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
            UNROLL for (int e = 0; e < 2; e++) {
              const int i = 4 * n + 2 * h + e;
              const float t = bits == 8 ? fma(16.0f, dot[i + HI], dot[i]) : dot[i];
              acc[r * A + i] = fma(off, sum[4 * n + e], fma(s, t, acc[r * A + i]));
            }
        }
      }
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    now = now == ST - 1 ? 0 : now + 1;
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
    UNROLL for (int n = 0; n < NB; n++) {
      column_squares(sq + 4 * n, lane);
      UNROLL for (int e = 0; e < 2; e++) part[(ks * ALL + A + 2 * n + e) * 32 + lane] = sq[4 * n + e];
    }
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

// 16-byte chunks of threadgroup memory: stages, and later sums.
template <typename T, int bits, int group, int NB, int R, int KS, int U, int ST, bool NORM>
METAL_FUNC constexpr int shared_chunks() {
  return KS * (ST * stage_words<T, bits, group, R, U>() > 32 * NB * (R * 4 + (NORM ? 2 : 0))
                   ? ST * stage_words<T, bits, group, R, U>() / 4
                   : 8 * NB * (R * 4 + (NORM ? 2 : 0)));
}
// The products of the KS simdgroups' tiles with x, as share_sums leaves them.
template <typename T, int bits, int group, int NB, int R, int KS, int U, int ST, bool NORM>
METAL_FUNC void code_product(
    const device T* x, const device T* nw, const Tiles<T> at, threadgroup uint4* shared, const int M, const int K,
    const int ks, const uint lane) {
  const int A = R * NB * 4;
  float acc[A], sq[NORM ? NB * 4 : 1];
  threadgroup uint* stages = (threadgroup uint*)shared + ks * ST * stage_words<T, bits, group, R, U>();
  // All threads of the grid take the same branch.
  if (ALIGNED(x, 16) && (!NORM || ALIGNED(nw, 16)) && ALIGNED(at.w, 16) && ALIGNED(at.s, 8) && ALIGNED(at.b, 8) &&
      ALIGNED(at.w2, 16) && ALIGNED(at.s2, 8) && ALIGNED(at.b2, 8))
    code_rows<T, bits, group, NB, R, KS, U, ST, true, NORM>(x, nw, at, stages, acc, sq, M, K, ks, lane);
  else
    code_rows<T, bits, group, NB, R, KS, U, ST, false, NORM>(x, nw, at, stages, acc, sq, M, K, ks, lane);
  share_sums<A, KS, NB, NORM>(acc, sq, (threadgroup float*)shared, ks, lane);
}
// The first sum of pair i of a lane; the second is two behind it.
METAL_FUNC int pair_sum(const int i) { return i / 2 * 4 + i % 2; }
