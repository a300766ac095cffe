// Decode and exact small M: y[m, n] = sum_k x[m, k] * W[n, k], weights read once for all M rows.
// A simdgroup owns R rows and lane l the packs l, l + 32, ... of each (KS simdgroups take turns),
// for every M alike: the order of additions does not depend on M, R or the grid.

// Weights per lane and step.
template <int bits, int group>
METAL_FUNC constexpr int pack_size() { return bits == 6 || bits == 8 || group == 16 ? 16 : 32; }

template <int NW, bool WIDE>
METAL_FUNC void load_words(const device uint* p, thread uint* q) {
  if (WIDE && NW == 4) {
    const uint4 v = *(const device uint4*)p;
    q[0] = v.x; q[1] = v.y; q[2] = v.z; q[3] = v.w;
  } else if (WIDE && NW == 2) {
    const uint2 v = *(const device uint2*)p;
    q[0] = v.x; q[1] = v.y;
  } else {
    UNROLL for (int i = 0; i < NW; i++) q[i] = p[i];
  }
}

// One pack: acc[r][m] += sum over PK weights. q is [R][NW], s and b [R]. NORM: x is multiplied by
// nw [K], and acc[R M + m] += x^2, for an RMS norm without a pass of its own.
template <typename T, int bits, int group, int M, int R, bool WIDE, bool NORM>
METAL_FUNC void add_pack(
    const device T* x, const device T* nw, const int K, const thread uint* q, const thread float* s,
    const thread float* b, const uint one, thread float* acc) {
  const int PK = pack_size<bits, group>(), NW = PK * bits / 32, P = in_place<bits>();
  // part[k]: the sum of the x whose codes sit k places up in their halves.
  float dot[R * M], part[M * P];
  UNROLL for (int i = 0; i < R * M; i++) dot[i] = 0;
  UNROLL for (int i = 0; i < M * P; i++) part[i] = 0;
  UNROLL for (int j = 0; j < PK / 8; j++) {
    float h[R][8];
    UNROLL for (int r = 0; r < R; r++) {
      decode8<bits>(q + r * NW, j, one, h[r]);
      // fp32 activations keep more digits than the 1024 leaves them: take it out exactly.
      if (AFFINE && sizeof(T) == 4) {
        UNROLL for (int i = 0; i < 8; i++) h[r][i] -= 1024.0f;
      }
    }
    float n[8];
    if (NORM) load8<T, WIDE>(nw + 8 * j, n);
    UNROLL for (int m = 0; m < M; m++) {
      float v[8];
      load8<T, WIDE>(x + (size_t)m * K + 8 * j, v);
      if (NORM) {
        UNROLL for (int i = 0; i < 8; i++) {
          acc[R * M + m] = fma(v[i], v[i], acc[R * M + m]);
          if (AFFINE) part[m * P + i % P] = fma(v[i], n[i], part[m * P + i % P]);
          v[i] *= n[i];
        }
      } else if (AFFINE) {
        UNROLL for (int k = 0; k < P; k++) {
          float t = v[k];
          UNROLL for (int i = k + P; i < 8; i += P) t += v[i];
          part[m * P + k] += t;
        }
      }
      UNROLL for (int i = 0; i < 8; i++) {
        const float xi = v[i] * unscale<bits>(i);
        UNROLL for (int r = 0; r < R; r++) dot[r * M + m] = fma(xi, h[r][i], dot[r * M + m]);
      }
    }
  }
  UNROLL for (int m = 0; m < M; m++) {
    float sum = 0, off = 0;
    UNROLL for (int k = 0; k < P; k++) {
      sum += part[m * P + k];
      off = fma(part[m * P + k], unscale<bits>(k), off);
    }
    UNROLL for (int r = 0; r < R; r++) {
      const int i = r * M + m;
      const float d = AFFINE && sizeof(T) < 4 ? fma(-1024.0f, off, dot[i]) : dot[i];
      acc[i] = fma(s[r], d, acc[i]);
      if (AFFINE) acc[i] = fma(b[r], sum, acc[i]);
    }
  }
}

// Where the R rows of a simdgroup lie: H = (R + 1) / 2 of them from the first pointers on. PAIR: the
// others from the second ones on, otherwise they follow.
template <typename S, typename B>
struct Rows {
  const device uint *w, *w2;
  const device S *s, *s2;
  const device B *b, *b2;
};

// The lane's packs are c0, c0 + 32 KS, ... of each row.
template <typename T, int bits, int group, int M, int R, int KS, bool WIDE, bool NORM, bool PAIR, typename S,
          typename B>
METAL_FUNC void qmv_rows(
    const device T* x, const device T* nw, Rows<S, B> at, thread float* acc, const int K, const int c0,
    const int end) {
  const int PK = pack_size<bits, group>(), NW = PK * bits / 32, H = (R + 1) / 2;
  UNROLL for (int i = 0; i < (NORM ? R * M + M : R * M); i++) acc[i] = 0;
  const uint one = one_bits(K);
  at.w += c0 * NW;
  if (PAIR) at.w2 += c0 * NW;
  x += c0 * PK;
  if (NORM) nw += c0 * PK;
  for (int c = c0; c < end; c += 32 * KS) {
    uint q[R * NW];
    float s[R], b[R];
    UNROLL for (int r = 0; r < R; r++) {
      const bool two = PAIR && r >= H;
      const int i = two ? r - H : r;
      load_words<NW, WIDE>((two ? at.w2 : at.w) + (uint)(i * (K / PK * NW)), q + r * NW);
      const uint g = (uint)(i * (K / group) + c * PK / group);
      s[r] = group_scale<group, bits>((two ? at.s2 : at.s)[g]);
      b[r] = AFFINE ? float((two ? at.b2 : at.b)[g]) : 0;
    }
    add_pack<T, bits, group, M, R, WIDE, NORM>(x, nw, K, q, s, b, one, acc);
    at.w += 32 * KS * NW;
    if (PAIR) at.w2 += 32 * KS * NW;
    x += 32 * KS * PK;
    if (NORM) nw += 32 * KS * PK;
  }
}

template <typename T, int bits, int group, int M, int R, int SG, int KS, int SPLITS,
          typename S, typename B, typename O>
METAL_FUNC void qmv(
    const device T* x, const device uint* w, const device S* scales, const device B* biases,
    device O* y, threadgroup float* part, const int N, const int KW, const uint3 tg,
    const uint sg, const uint lane) {
  const int K = KW * 32 / bits;
  const int packs = K / pack_size<bits, group>(), share = (packs + SPLITS - 1) / SPLITS;
  // The last tile moves back to stay inside; rows it shares with the one before are not stored.
  const int row0 = (tg.x * (SG / KS) + sg / KS) * R, row = min(row0, N - R);
  const int c = tg.y * share + sg % KS * 32 + lane, end = min(packs, int(tg.y + 1) * share);
  // Looked at before the row is added: all threads of the grid take the same branch.
  const bool wide = ALIGNED(x, 16) && ALIGNED(w, 16);
  Rows<S, B> at;
  at.w = w + (size_t)row * KW;
  at.s = scales + (size_t)row * (K / group);
  at.b = biases + (size_t)row * (K / group);
  float acc[R * M];
  if (wide)
    qmv_rows<T, bits, group, M, R, KS, true, false, false>(x, x, at, acc, K, c, end);
  else
    qmv_rows<T, bits, group, M, R, KS, false, false, false>(x, x, at, acc, K, c, end);
  finish<O, M, R, SG, KS>(acc, y + (size_t)tg.y * M * N, part, N, row0, row, sg, lane);
}

//! kernel qmv (x, w, scales, biases) -> (y)
threadgroup float part[KS > 1 ? SG * R * M : 1];
qmv<T, bits, group, M, R, SG, KS, SPLITS>(
    x, w, scales, biases, y, part, w_shape[0], w_shape[1], threadgroup_position_in_grid,
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);

//! kernel qmv_fp (x, w, scales) -> (y)
threadgroup float part[KS > 1 ? SG * R * M : 1];
qmv<T, bits, group, M, R, SG, KS, SPLITS>(
    x, w, scales, scales, y, part, w_shape[0], w_shape[1], threadgroup_position_in_grid,
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);

// Layers that read the same x share a launch: threadgroups are dealt out to the matrices in turn.

//! kernel qmv_pair (x, w0, s0, b0, w1, s1, b1) -> (y0, y1)
threadgroup float part[KS > 1 ? SG * R * M : 1];
const int TILE = R * (SG / KS), N0 = w0_shape[0], N1 = w1_shape[0];
uint3 tg = threadgroup_position_in_grid;
const uint t0 = (N0 + TILE - 1) / TILE;
const bool in0 = tg.x < t0;
if (!in0) tg.x -= t0;
qmv<T, bits, group, M, R, SG, KS, SPLITS>(
    x, in0 ? w0 : w1, in0 ? s0 : s1, in0 ? b0 : b1, in0 ? y0 : y1, part, in0 ? N0 : N1,
    w0_shape[1], tg, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);

//! kernel qmv_triple (x, w0, s0, b0, w1, s1, b1, w2, s2, b2) -> (y0, y1, y2)
threadgroup float part[KS > 1 ? SG * R * M : 1];
const int TILE = R * (SG / KS), N0 = w0_shape[0], N1 = w1_shape[0], N2 = w2_shape[0];
uint3 tg = threadgroup_position_in_grid;
const uint t0 = (N0 + TILE - 1) / TILE, t1 = t0 + (N1 + TILE - 1) / TILE;
const bool in0 = tg.x < t0, in1 = tg.x < t1;
tg.x -= in0 ? 0 : in1 ? t0 : t1;
qmv<T, bits, group, M, R, SG, KS, SPLITS>(
    x, in0 ? w0 : in1 ? w1 : w2, in0 ? s0 : in1 ? s1 : s2, in0 ? b0 : in1 ? b1 : b2,
    in0 ? y0 : in1 ? y1 : y2, part, in0 ? N0 : in1 ? N1 : N2, w0_shape[1], tg,
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
