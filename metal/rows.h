// Decode and exact small M: y[m, n] = sum_k x[m, k] * W[n, k], weights read once for all M rows.
// A simdgroup owns R rows and lane l the packs l, l + 32, ... of each (KS simdgroups take turns),
// for every M alike: the order of additions does not depend on M, R or the grid.

// What simdgroups that share rows pass on; NORM: with their sums of squares.
typedef float Shared;
template <int M, int R, int SG, int KS, bool NORM>
METAL_FUNC constexpr int shared_size() { return KS > 1 ? SG * (NORM ? R * M + M : R * M) : 1; }

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
