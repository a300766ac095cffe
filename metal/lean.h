// The sums of qmv for GPUs where instructions, not memory, bound a decode step (Apple). The bits of a row
// do not depend on M, R or SG here either. Codes are read as halves below the normal ones, c 2^-24, so
// that nothing is to be taken out again, and sums count in 2^-24. From SG > 2 KS on, a threadgroup widens,
// scales and sums x once for all of its simdgroups, eight values of each pack (a slice) at a time.

typedef float4 Shared;
constant constexpr float UNIT = AFFINE ? 1.0f / 16777216 : 1.0f;

template <int M, int SG, int KS>
METAL_FUNC constexpr bool shares_x() { return SG > 2 * KS && KS * M <= 16; }
// Slices in threadgroup memory: one is filled while the other is multiplied.
template <int M, int KS>
METAL_FUNC constexpr int slices() { return KS * M > 8 ? 1 : 2; }
// Whether neighbouring lanes share the biases of their groups: not from KS = 4 on, where x is not shared.
template <int bits, int group, int KS>
METAL_FUNC constexpr bool by_two() { return AFFINE && KS <= 2 && group >= 2 * pack_size<bits, group>(); }
// Rows of x that a simdgroup widens, of the M of each KS.
template <int M, int SG, int KS>
METAL_FUNC constexpr int units() { return shares_x<M, SG, KS>() ? (KS * M + SG - 1) / SG : M; }
// Sums of a lane that go through threadgroup memory at once, by four, up to 16 of A.
template <int A>
METAL_FUNC constexpr int quads() { return ((A + 3) / 4 + (A + 15) / 16 - 1) / ((A + 15) / 16); }
// Of a simdgroup: five for four lanes, which keeps these in other banks.
template <int A>
METAL_FUNC constexpr int turn() { return quads<A>() * 40; }
// Slices and sums of x of two steps; later, in the same place, sums of lanes, of simdgroups and of squares.
template <int M, int R, int SG, int KS, bool NORM>
METAL_FUNC constexpr int shared_size() {
  const int staged = KS * M * (64 * slices<M, KS>() + 16), sums = KS > 1 ? (SG * R * M + KS * M + 3) / 4 : 1;
  return !shares_x<M, SG, KS>() ? sums : staged > SG * turn<R * M>() ? staged : SG * turn<R * M>();
}

// Pairs of v[0 .. N - 1], each added to those of the lane that differs by o: the first of a pair in lanes
// without the bit o, the other in lanes with it.
template <int N>
METAL_FUNC void fold(thread float* v, const uint lane, const ushort o) {
  const bool odd = lane & o;
  UNROLL for (int i = 0; i < N; i += 2) {
    const float a = v[i], b = v[i + 1 < N ? i + 1 : i];
    v[i / 2] = (odd ? b : a) + simd_shuffle_xor(odd ? a : b, o);
  }
}
// Sums over the lanes of v[0 .. A - 1], up to 32, the one of v[i] in lane i: along one tree for each A.
template <int A>
METAL_FUNC float lane_sum(thread float* v, const uint lane) {
  fold<A>(v, lane, 1);
  fold<(A + 1) / 2>(v, lane, 2);
  fold<(A + 3) / 4>(v, lane, 4);
  fold<(A + 7) / 8>(v, lane, 8);
  fold<(A + 15) / 16>(v, lane, 16);
  return v[0];
}
// The same along the same tree by way of mem [turn<A>()]: four lanes, then eight such fours. v is padded
// to fours.
template <int A>
METAL_FUNC float lane_sum(thread float* v, threadgroup float4* mem, const uint lane) {
  const int QUADS = quads<A>(), TURNS = (A + 4 * QUADS - 1) / (4 * QUADS);
  const uint n = A < 32 ? min(lane, uint(A - 1)) : lane;
  threadgroup float4 *to = mem + lane + (lane >> 2), *next = mem + lane + (lane >> 3);
  const threadgroup float4* from = mem + 5 * (QUADS == 4 || lane < 8 * QUADS ? lane : lane & 7);
  const threadgroup float* own = (const threadgroup float*)mem + (n >> 2) * 32 + n;
  float4 four[TURNS];
  UNROLL for (int i = 0; i < TURNS; i++) {
    if (i > 0) simdgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (int j = 0, k = 4 * i * QUADS; j < QUADS && k < A; j++, k += 4)
      to[40 * j] = float4(v[k], v[k + 1], v[k + 2], v[k + 3]);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    const float4 a = from[0], b = from[1], c = from[2], d = from[3];
    four[i] = (a + b) + (c + d);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  if (QUADS == 4 || lane < 8 * QUADS) {
    UNROLL for (int i = 0; i < TURNS; i++) next[9 * QUADS * i] = four[i];
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  return ((own[0] + own[4]) + (own[8] + own[12])) + ((own[16] + own[20]) + (own[24] + own[28]));
}

// Eight values of x, normed if NORM, as decode8 wants them; their sum is added and, to count, their squares.
template <typename T, int bits, bool WIDE, bool NORM>
METAL_FUNC void take8(
    const device T* x, const device T* nw, thread float* v, thread float* sum, thread float* square,
    const bool count) {
  float n[8], t = 0, squares = *square;
  load8<T, WIDE>(x, v);
  if (NORM) load8<T, WIDE>(nw, n);
  UNROLL for (int i = 0; i < 8; i++) {
    if (NORM) {
      squares = fma(v[i], v[i], squares);
      t = fma(v[i], n[i], t);
      v[i] *= n[i];
    } else if (AFFINE) {
      t = i == 0 ? v[0] : t + v[i];
    }
    v[i] *= unscale<bits>(i);
  }
  *sum += t;
  if (count) *square = squares;
}

// Slice j of the lane's pack, from x[m, at] on, of the units sg, sg + SG, ...: x, xs and sums are those of the
// first. Unit KS m + ks is row m for simdgroups ks.
template <typename T, int bits, int M, int SG, int KS, int PK, bool WIDE, bool NORM>
METAL_FUNC void stage(
    const device T* x, const device T* nw, threadgroup float4* xs, threadgroup float* sums, thread float* sum,
    thread float* square, const uint K, const uint at, const bool count, const int j, const uint sg) {
  const int U = units<M, SG, KS>();
  UNROLL for (int u = 0; u < U; u++) {
    if (SG * U > KS * M && sg + u * SG >= KS * M) continue;
    float v[8];
    if (j == 0) sum[u] = 0;
    take8<T, bits, WIDE, NORM>(
        x + (size_t)(u * SG / KS) * K + at + 8 * j, nw + at + 8 * j, v, sum + u, square + u, count);
    threadgroup float4* to = xs + u * SG * 64;
    to[0] = float4(v[0], v[1], v[2], v[3]);
    to[32] = float4(v[4], v[5], v[6], v[7]);
    if (AFFINE && j == PK / 8 - 1) sums[u * SG * 64] = sum[u] * UNIT;
  }
}

// BY_TWO: lanes 2 i and 2 i + 1 have packs of the same groups, so that each adds one of a group's biases for
// both, the first that of a step, the other that of the next.
template <typename T, int bits, int group, int M, int R, int SG, int KS, bool WIDE, bool NORM, bool PAIR,
          typename S>
METAL_FUNC void lean_rows(
    const device T* x, const device T* nw, const Rows<S, S> at, threadgroup float4* xs, thread float* acc,
    thread float* square, const uint K, const int first, const int end, const uint sg, const uint lane) {
  const int PK = pack_size<bits, group>(), NW = PK * bits / 32, J = PK / 8, H = (R + 1) / 2;
  const int B = slices<M, KS>(), SLICE = KS * M * 64, ks = sg % KS;
  const bool SHARES = shares_x<M, SG, KS>(), BY_TWO = by_two<bits, group, KS>();
  const int PG = group / PK, groups = uint(end) / PG;
  // Where this simdgroup's unit comes from and goes to; sums of an odd step lie 32 behind those before.
  const device T* x_in = x + (size_t)(sg / KS) * K;
  threadgroup float4* x_to = xs + sg * 64 + lane;
  threadgroup float* sums = (threadgroup float*)(xs + SLICE * B);
  threadgroup float* sum_to = sums + sg * 64 + lane;
  float sum[M], before[M];
  int c = first + ks * 32 + lane;
  uint parity = 0, next = min(c, end - 1), at_x = next * PK;
  // The group whose bias the lane adds next, and its sums of x.
  int gb = uint(c + (lane & 1) * (32 * KS - 1)) / PG;
  const threadgroup float* sums_of = sums + ks * 64 + lane + (BY_TWO ? (lane & 1) * 31 : 0);
  if (SHARES && first < end)
    stage<T, bits, M, SG, KS, PK, WIDE, NORM>(x_in, nw, x_to, sum_to, sum, square, K, at_x, c < end, 0, sg);
  if (SHARES) threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int base = first; base < end; base += 32 * KS) {
    // Lanes behind the end take the last pack and add nothing.
    const int d = c + 32 * KS;
    const uint p = SHARES ? next : min(c, end - 1), g = p / PG;
    const bool more = base + 32 * KS < end, adds = AFFINE && (!BY_TWO || parity || !more);
    uint q[R * NW];
    S b[R];
    float s[R], dot[R * M];
    UNROLL for (int r = 0; r < R; r++) {
      const bool two = PAIR && r >= H;
      const uint i = two ? r - H : r;
      load_words<NW, WIDE>((two ? at.w2 : at.w) + (i * (K / PK * NW) + p * NW), q + r * NW);
    }
    UNROLL for (int i = 0; i < R * M; i++) dot[i] = 0;
    if (!SHARES) {
      UNROLL for (int m = 0; m < M; m++) sum[m] = 0;
    }
    UNROLL for (int j = 0; j < J; j++) {
      const bool last = j + 1 == J, fills = !last || more;
      if (SHARES && B == 2 && fills) {
        if (last) next = min(d, end - 1), at_x = next * PK;
        stage<T, bits, M, SG, KS, PK, WIDE, NORM>(
            x_in, nw, x_to + SLICE * ((j + 1) % B), sum_to + parity, sum, square, K, at_x,
            last ? d < end : c < end, (j + 1) % J, sg);
      }
      if (j == (SHARES ? J - 1 : 0)) {  // late where registers are short
        UNROLL for (int r = 0; r < R; r++) {
          const bool two = PAIR && r >= H;
          const uint n = (two ? r - H : r) * (K / group);
          s[r] = group_scale<group, bits>((two ? at.s2 : at.s)[n + g]);
        }
        if (AFFINE && (!SHARES || adds)) {
          const uint of = BY_TWO ? min(gb, groups - 1) : g;
          UNROLL for (int r = 0; r < R; r++) {
            const bool two = PAIR && r >= H;
            b[r] = ((two ? at.b2 : at.b) + of)[(two ? r - H : r) * (K / group)];
          }
        }
      }
      float h[R][8];
      UNROLL for (int r = 0; r < R; r++) decode8<bits>(q + r * NW, j, 0, h[r]);
      UNROLL for (int m = 0; m < M; m++) {
        float v[8];
        const uint k = p * PK + 8 * j;
        const threadgroup float4* from = xs + SLICE * (j % B) + (KS * m + ks) * 64 + lane;
        if (SHARES) spread(v, from[0], from[32]);
        else take8<T, bits, WIDE, NORM>(x + (size_t)m * K + k, nw + k, v, sum + m, square + m, c < end);
        UNROLL for (int i = 0; i < 8; i++) {
          UNROLL for (int r = 0; r < R; r++) dot[r * M + m] = fma(v[i], h[r][i], dot[r * M + m]);
        }
      }
      if (last && c < end) {
        UNROLL for (int i = 0; i < R * M; i++) acc[i] = fma(s[i / M], dot[i], acc[i]);
      }
      if (last && adds) {
        UNROLL for (int m = 0; BY_TWO && !SHARES && m < M; m++) {
          float t[2] = {parity ? before[m] : sum[m], sum[m]};
          fold<2>(t, lane, 1);
          sum[m] = t[0];
        }
        if (BY_TWO ? gb < groups : c < end) {
          UNROLL for (int m = 0; m < M; m++) {
            float t = sum[m] * UNIT;
            if (SHARES && BY_TWO) {
              const float2 u = *(const threadgroup float2*)(sums_of + KS * m * 64);
              t = u.x + u.y;
            } else if (SHARES) {
              t = sums_of[KS * m * 64];
            }
            UNROLL for (int r = 0; r < R; r++) acc[r * M + m] = fma(float(b[r]), t, acc[r * M + m]);
          }
        }
        gb += 64 * KS / PG;
      }
      UNROLL for (int m = 0; last && BY_TWO && !SHARES && m < M; m++) before[m] = sum[m];
      if (SHARES) threadgroup_barrier(mem_flags::mem_threadgroup);
      if (SHARES && B == 1) {
        if (fills) {
          if (last) next = min(d, end - 1), at_x = next * PK;
          stage<T, bits, M, SG, KS, PK, WIDE, NORM>(
              x_in, nw, x_to, sum_to + parity, sum, square, K, at_x, last ? d < end : c < end, (j + 1) % J, sg);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
    }
    c = d;
    if (BY_TWO) parity ^= 32;
  }
}

// As the one of product.h; SPLITS: of share number split of the packs.
template <typename T, int bits, int group, int M, int R, int SG, int KS, bool NORM, bool PAIR, typename S,
          int SPLITS = 1>
METAL_FUNC float product(
    const device T* x, const device T* nw, const Rows<S, S> at, threadgroup float4* part, const int K,
    const float eps, const float add, const uint sg, const uint lane, const uint split = 0) {
  const bool SHARES = shares_x<M, SG, KS>();
  const int A = R * M, U = units<M, SG, KS>(), ks = sg % KS, i = min(int(lane), A - 1);
  const int packs = uint(K) / pack_size<bits, group>(), PG = group / pack_size<bits, group>();
  const int share = uint(packs + PG * SPLITS - 1) / (PG * SPLITS) * PG;  // whole groups
  const int first = SPLITS > 1 ? split * share : 0, end = SPLITS > 1 ? min(packs, first + share) : packs;
  const bool wide = ALIGNED(x, 16) && (!NORM || ALIGNED(nw, 16)) && ALIGNED(at.w, (pack_bytes<bits, group>())) &&
                    (!PAIR || ALIGNED(at.w2, (pack_bytes<bits, group>())));
  const int PADDED = (A + 3) / 4 * 4;
  float acc[PADDED], square[U];
  UNROLL for (int a = 0; a < PADDED; a++) acc[a] = 0;
  UNROLL for (int u = 0; u < U; u++) square[u] = 0;
  if (wide)
    lean_rows<T, bits, group, M, R, SG, KS, true, NORM, PAIR>(
        x, nw, at, part, acc, square, K, first, end, sg, lane);
  else
    lean_rows<T, bits, group, M, R, SG, KS, false, NORM, PAIR>(
        x, nw, at, part, acc, square, K, first, end, sg, lane);
  float t = SHARES ? lane_sum<A>(acc, part + sg * turn<A>(), lane) : lane_sum<A>(acc, lane), n = 0;
  if (KS == 1 && !(SHARES && NORM)) {
    if (NORM) n = simd_shuffle(lane_sum<M>(square, lane), ushort(i % M));
  } else {
    threadgroup float *p = (threadgroup float*)part, *norms = p + SG * A;
    if (SHARES) threadgroup_barrier(mem_flags::mem_threadgroup);
    if (lane < A) p[sg * A + lane] = t;
    UNROLL for (int u = 0; NORM && u < (SHARES ? U : 1); u++) {
      // Of all rows, or of the one that this simdgroup has widened.
      const float squares = SHARES ? lane_sum<1>(square + u, lane) : lane_sum<M>(square, lane);
      const uint unit = SHARES ? sg + u * SG : sg < KS ? lane * KS + sg : KS * M;
      if (lane < (SHARES ? 1 : M) && unit < KS * M) norms[unit] = squares;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (ks != 0) return 0;
    t = p[sg * A + i];
    UNROLL for (int k = 1; k < KS; k++) t += p[(sg + k) * A + i];
    UNROLL for (int k = 0; NORM && k < KS; k++) n = k == 0 ? norms[i % M * KS] : n + norms[i % M * KS + k];
  }
  t *= 1 / UNIT;
  if (!NORM) return t + add;
  return fma(t, rsqrt(n / float(K) + eps), add);
}

template <typename T, int bits, int group, int M, int R, int SG, int KS, int SPLITS, typename S, typename O>
METAL_FUNC void qmv(
    const device T* x, const device uint* w, const device S* scales, const device S* biases, device O* y,
    threadgroup float4* part, const int N, const int KW, const uint3 tg, const uint sg, const uint lane) {
  const int K = uint(KW * 32) / bits, row0 = (tg.x * (SG / KS) + sg / KS) * R, row = min(row0, N - R);
  Rows<S, S> at;
  set_rows(at, w, scales, biases, KW, uint(K) / group, row, row);
  const float t = product<T, bits, group, M, R, SG, KS, false, false, S, SPLITS>(
      x, x, at, part, K, 0.0f, -0.0f, sg, lane, tg.y);
  const int n = row + lane / M;
  // The last tile moves back to stay inside; rows it shares with the one before are not stored.
  if (sg % KS == 0 && (R * M == 32 || lane < R * M) && n >= row0)
    y[(size_t)((SPLITS > 1 ? tg.y * M : 0) + lane % M) * N + n] = O(t);
}
