// Decode attention, vector variant: a threadgroup takes one chunk of the keys of one kv head for up to W * R query rows
// and leaves the state of each row. L lanes share a key, so 32 / L keys of a simdgroup go at once, U of them in turn
// before one softmax update, and KP simdgroups share the chunk. Who adds what depends on L, U, KP and the chunk alone:
// a row has the same bits whatever q_len, batch and k_len are.
constant constexpr float LN2 = 0.6931471805599453f;
#define EACH(i, n) UNROLL for (int i = 0; i < (n); i++)

template <int N, bool WIDE>
METAL_FUNC void load_words(const device uint* p, thread uint* w) {
  const int V = WIDE && N % 4 == 0 ? 4 : WIDE && N % 2 == 0 ? 2 : 1;
  UNROLL for (int i = 0; i < N; i += V) {
    if (V == 4) {
      const uint4 v = *(const device uint4*)(p + i);
      w[i] = v.x; w[i + 1] = v.y; w[i + 2] = v.z; w[i + 3] = v.w;
    } else if (V == 2) {
      const uint2 v = *(const device uint2*)(p + i);
      w[i] = v.x; w[i + 1] = v.y;
    } else {
      w[i] = p[i];
    }
  }
}
// Eight values as they lie in memory, and as floats.
template <typename T>
METAL_FUNC void load_narrow(const device T* p, thread uint* w) { EACH(i, 4) w[i] = as_type<uint>(vec<T, 2>(p[2 * i], p[2 * i + 1])); }
METAL_FUNC void load_narrow(const device float* p, thread uint* w) { EACH(i, 8) w[i] = as_type<uint>(p[i]); }
template <typename T>
METAL_FUNC void widen(const thread uint* w, thread float* h, const T) {
  EACH(i, 4) {
    const vec<T, 2> p = as_type<vec<T, 2>>(w[i]);
    h[2 * i] = float(p.x);
    h[2 * i + 1] = float(p.y);
  }
}
METAL_FUNC void widen(const thread uint* w, thread float* h, const bfloat) {
  EACH(i, 4) {
    h[2 * i] = as_type<float>(w[i] << 16);
    h[2 * i + 1] = as_type<float>(w[i] & 0xffff0000);
  }
}
METAL_FUNC void widen(const thread uint* w, thread float* h, const float) { EACH(i, 8) h[i] = as_type<float>(w[i]); }

// One step of a sum of N values over L lanes. While a lane holds several, it passes half of them
// on and keeps the other half, so value v ends in the L / N lanes from v * L / N on (or, where N >
// L, N / L values in a lane). The tree of additions does not depend on N.
template <int N, int L, int H>
METAL_FUNC void fold(thread float* s, const uint lane) {
  const int n = N * 2 * H / L;
  if (H < L && n > 1) {
    // Swapped by bits: a compiler makes selects by lane a branch, with the shuffles inside.
    const uint up = 0 - (lane / H & 1);
    EACH(i, n / 2) {
      const uint a = as_type<uint>(s[i]), b = as_type<uint>(s[i + n / 2]), t = (a ^ b) & up;
      s[i] = as_type<float>(a ^ t) + simd_shuffle_xor(as_type<float>(b ^ t), H);
    }
  } else if (H < L) {
    s[0] += simd_shuffle_xor(s[0], H);
  }
}

template <typename T, int D, int DV, int KB, int KG, int VB, int VG, int L, int U, int R, int KP,
          int W, int CHUNK, int MASK, bool SINKS, bool DIRECT, bool RECENT = false>
struct Sdpa {
  // Keys of a simdgroup at once; keys of the simdgroups that share a chunk between two updates.
  static constexpr constant int NG = 32 / L, STEP = KP * U * NG;
  // Score v = r * U + u of a step is row r and the lane group's u-th key, N with padding. A lane
  // holds HELD of them after the fold, all of one row, as SAME lanes do; a row's are in LANES.
  static constexpr constant int N = (R <= 1 ? 1 : R <= 2 ? 2 : R <= 4 ? 4 : R <= 8 ? 8 : 16) * U;
  static constexpr constant int HELD = N > L ? N / L : 1, SAME = N < L ? L / N : 1;
  static constexpr constant int LANES = U / HELD * SAME;

  // k or v at a kv head: DIM plain T (B = 16), or codes of B bits in groups of G. A lane has NP
  // packs of 8 elements, NW words each, that lie in NS groups.
  template <int B, int G, int DIM>
  struct Rows {
    static constexpr constant int NP = (DIM / 8 + L - 1) / L, NW = B < 16 ? B / 4 : 2 * sizeof(T);
    static constexpr constant int NS =
        B == 16 || G % (8 * NP) == 0 ? 1 : 8 * NP % G == 0 ? 8 * NP / G : NP;
    static constexpr constant int ROW = B < 16 ? DIM * B / 8 : DIM * sizeof(T), SIDE = DIM / G * sizeof(T);  // bytes
    typedef conditional_t<(B < 16), uint, T> Data;
    const device Data* data;
    const device T* scales;
    const device T* biases;
    int stride, scale_stride, bias_stride;
    Recent recent;

    // The lane's j-th pack: neighbours read neighbouring 16 bytes of a plain row, a lane's codes
    // lie together. And is there such a pack.
    static METAL_FUNC int pack(const int l, const int j) { return B < 16 ? l * NP + j : j * L + l; }
    static METAL_FUNC bool has(const int p) { return NP * L == DIM / 8 || p < DIM / 8; }

    // The lane's part of U keys from first + own on; keys after last are last again, so that nothing behind it is read.
    // Few steps have recent keys: in the others no lane looks for them.
    template <bool WIDE>
    METAL_FUNC void load(const int first, const int own, const int last, const int l, thread uint* w, thread T* s, thread T* b) const {
      if (RECENT && min(first + U * NG, last + 1) > recent.held) load_keys<WIDE, true>(first + own, last, l, w, s, b);
      else load_keys<WIDE, false>(first + own, last, l, w, s, b);
    }
    template <bool WIDE, bool SOME>
    METAL_FUNC void load_keys(const int key, const int last, const int l, thread uint* w, thread T* s, thread T* b) const {
      EACH(u, U) {
        const int i = min(key + u * NG, last);
        const bool beside = SOME && i >= recent.held && i < recent.stop;
        const device Data* row = beside ? (const device Data*)RECENT_ROW(ROW, recent, recent.rows, i) : data + (size_t)i * stride;
        if (B < 16) {
          const device T* of_s = beside ? (const device T*)RECENT_ROW(SIDE, recent, recent.scales, i) : scales + (size_t)i * scale_stride;
          const device T* of_b = beside ? (const device T*)RECENT_ROW(SIDE, recent, recent.biases, i) : biases + (size_t)i * bias_stride;
          if (has(l * NP)) {
            load_words<NP * NW, WIDE>((const device uint*)row + l * NP * NW, w + u * NP * NW);
            EACH(j, NS) {
              const uint g = (l * NP + j * NP / NS) * 8 / G;
              s[u * NS + j] = of_s[g];
              b[u * NS + j] = of_b[g];
            }
          }
        } else {
          EACH(j, NP) {
            const device T* p = (const device T*)row + pack(l, j) * 8;
            if (has(pack(l, j))) {
              if (WIDE) load_words<NW, true>((const device uint*)p, w + (u * NP + j) * NW);
              else load_narrow(p, w + (u * NP + j) * NW);
            }
          }
        }
      }
    }
    // A pack as floats. Codes are 1024 + code << shift, except next to fp32 activations.
    static METAL_FUNC void unpack(const thread uint* w, const uint one, thread float* h) {
      if (B == 16) widen(w, h, T(0));
      else decode8<(B < 16 ? B : 8)>(w, 0, one, h);
      if (AFFINE && B < 16 && sizeof(T) == 4) EACH(i, 8) h[i] -= 1024;
    }
    static METAL_FUNC constexpr float shift(int i) { return unscale<(B < 16 ? B : 8)>(B < 16 ? i : 0); }
  };
  typedef Rows<KB, KG, D> K;
  typedef Rows<VB, VG, DV> V;

  // The keys begin <= key < end of a simdgroup, U * NG of them every STEP: o, top (times log2(e))
  // and sum of its R rows; those two in the lanes that hold a row's scores. Strides are those of
  // batch, head, position and, of the mask, key.
  template <bool WIDE, typename Mask>
  static METAL_FUNC void attend(
      const device T* q, const int3 q_strides, const float scale, const thread K& k, const thread V& v,
      const Mask mask, const int4 mask_strides, const thread Place& at, const int row0, int begin,
      int end, thread float* o, thread float& top, thread float& sum) {
    const int l = at.lane % L, first = at.lane - l, last = at.len - 1;
    const uint one = one_bits(at.len);
    // q of the lane, times what codes are shifted by; sum of q and -1024 times the former's.
    float qv[R * K::NP * 8], qsum[R * K::NS], qoff[R * K::NS];
    EACH(r, R) {
      const Row row = row_at(at, row0 + r);
      const device T* p = q + (size_t)at.b * q_strides.x + (size_t)(at.head + row.head) * q_strides.y + (size_t)row.i * q_strides.z;
      EACH(j, K::NS) qsum[r * K::NS + j] = qoff[r * K::NS + j] = 0;
      EACH(j, K::NP) {
        const int pack = K::pack(l, j), s = r * K::NS + j * K::NS / K::NP;
        float x[8];
        if (K::has(pack)) load8<T, WIDE>(p + pack * 8, x);
        else EACH(i, 8) x[i] = 0;
        EACH(i, 8) {
          const float c = scale * LOG2E * K::shift(i);
          qv[(r * K::NP + j) * 8 + i] = x[i] * c;
          qsum[s] = fma(x[i], scale * LOG2E, qsum[s]);
          if (sizeof(T) < 4) qoff[s] = fma(x[i], -1024 * c, qoff[s]);
        }
      }
    }
    // The row whose scores the lane holds, and where its first key is in a step.
    Row mine = row_at(at, row0 + l / LANES);
    mine.to = min(mine.to, end);
    const int own = at.lane / L + l / SAME * HELD % U * NG;
    const size_t mask0 = (size_t)at.b * mask_strides.x + (size_t)(at.head + mine.head) * mask_strides.y +
        (size_t)mine.i * mask_strides.z;
    if (MASK) {
      // Steps at both ends that are masked for all R rows are left out.
      int low = end, high = begin;
      for (int t = begin; t < end; t += STEP) {
        EACH(c, HELD) {
          const int key = t + own + c * NG;
          const bool seen = added(mask[mask0 + (size_t)min(key, last) * mask_strides.w]) > -INFINITY;
          if (seen && key >= mine.from && key < mine.to) {
            low = min(low, t);
            high = t + 1;
          }
        }
      }
      begin = simd_min(low);
      end = simd_max(high);
    }
    float sums[HELD], extra[HELD], vscale[R * V::NS], vbias[R * V::NS];
    uint kw[U * K::NP * K::NW], vw[U * V::NP * V::NW];
    T ks[U * K::NS], kb[U * K::NS], vs[U * V::NS], vb[U * V::NS];
    top = LOWEST;
    EACH(c, HELD) sums[c] = 0;
    EACH(i, R * V::NP * 8) o[i] = 0;
    EACH(i, R * V::NS) vscale[i] = vbias[i] = 0;
    if (begin < end) k.template load<WIDE>(begin, at.lane / L, last, l, kw, ks, kb);
    for (int t = begin; t < end; t += STEP) {
      v.template load<WIDE>(t, at.lane / L, last, l, vw, vs, vb);
      if (MASK) EACH(c, HELD) extra[c] = added(mask[mask0 + (size_t)min(t + own + c * NG, last) * mask_strides.w]);
      float s[N], dot[R];
      EACH(i, N) s[i] = 0;
      EACH(u, U) {
        EACH(j, K::NP) {
          if (K::has(K::pack(l, j))) {
            float h[8];
            K::unpack(kw + (u * K::NP + j) * K::NW, one, h);
            EACH(r, R) {
              const int n = r * K::NS + j * K::NS / K::NP, m = u * K::NS + j * K::NS / K::NP;
              if (KB < 16 && j % (K::NP / K::NS) == 0) dot[r] = qoff[n];
              EACH(i, 8) {
                const float x = qv[(r * K::NP + j) * 8 + i];
                if (KB < 16) dot[r] = fma(x, h[i], dot[r]);
                else s[r * U + u] = fma(x, h[i], s[r * U + u]);
              }
              if (KB < 16 && (j + 1) % (K::NP / K::NS) == 0)
                s[r * U + u] = fma(float(kb[m]), qsum[n], fma(float(ks[m]), dot[r], s[r * U + u]));
            }
          }
        }
      }
      // The next keys are on their way while these are weighted.
      if (t + STEP < end) k.template load<WIDE>(t + STEP, at.lane / L, last, l, kw, ks, kb);
      fold<N, L, 16>(s, l); fold<N, L, 8>(s, l); fold<N, L, 4>(s, l); fold<N, L, 2>(s, l); fold<N, L, 1>(s, l);
      const float before = top;
      EACH(c, HELD) {
        const int key = t + own + c * NG;
        if (MASK) s[c] = fma(extra[c], LOG2E, s[c]);
        if (key < mine.from || key >= mine.to) s[c] = -INFINITY;
        top = max(top, s[c]);
      }
      UNROLL for (int h = SAME; h < LANES; h *= 2) top = max(top, simd_shuffle_xor(top, h));
      const float fade = fast::exp2(before - top);
      EACH(c, HELD) {
        s[c] = fast::exp2(s[c] - top);
        sums[c] = fma(sums[c], fade, s[c]);
      }
      if (simd_any(fade < 1)) EACH(r, R) {
        const float f = simd_shuffle(fade, first + r * LANES);
        EACH(i, V::NP * 8) o[r * V::NP * 8 + i] *= f;
        if (VB < 16) EACH(i, V::NS) {
          vscale[r * V::NS + i] *= f;
          vbias[r * V::NS + i] *= f;
        }
      }
      EACH(u, U) {
        float p[R], w[R];
        EACH(r, R) w[r] = p[r] = simd_shuffle(s[(r * U + u) % HELD], first + (r * U + u) / HELD * SAME);
        EACH(j, V::NP) {
          if (V::has(V::pack(l, j))) {
            float h[8];
            V::unpack(vw + (u * V::NP + j) * V::NW, one, h);
            EACH(r, R) {
              const int n = r * V::NS + j * V::NS / V::NP, m = u * V::NS + j * V::NS / V::NP;
              if (VB < 16 && j % (V::NP / V::NS) == 0) {
                w[r] = p[r] * float(vs[m]);
                vscale[n] = fma(p[r], float(vs[m]), vscale[n]);
                vbias[n] = fma(p[r], float(vb[m]), vbias[n]);
              }
              EACH(i, 8) o[(r * V::NP + j) * 8 + i] = fma(w[r], h[i], o[(r * V::NP + j) * 8 + i]);
            }
          }
        }
      }
    }
    // The lane groups are added to the first, which alone is used from here on.
    UNROLL for (int h = L; h < 32; h *= 2) {
      const float other = simd_shuffle_xor(top, h), high = max(top, other);
      const float f = fast::exp2(top - high), e = fast::exp2(other - high);
      top = high;
      EACH(c, HELD) sums[c] = fma(simd_shuffle_xor(sums[c], h), e, sums[c] * f);
      EACH(r, R) {
        const float fr = simd_shuffle(f, first + r * LANES), er = simd_shuffle(e, first + r * LANES);
        EACH(i, V::NP * 8) join(o[r * V::NP * 8 + i], fr, er, h);
        if (VB < 16) EACH(i, V::NS) {
          join(vscale[r * V::NS + i], fr, er, h);
          join(vbias[r * V::NS + i], fr, er, h);
        }
      }
    }
    UNROLL for (int n = 1; n < HELD; n *= 2) {
      UNROLL for (int c = 0; c < HELD; c += 2 * n) sums[c] += sums[c + n];
    }
    sum = sums[0];
    UNROLL for (int h = SAME; h < LANES; h *= 2) sum += simd_shuffle_xor(sum, h);
    if (VB < 16) EACH(i, R * V::NP * 8) {
      const int n = i / (V::NP * 8) * V::NS + i / 8 % V::NP * V::NS / V::NP;
      const float x = sizeof(T) < 4 ? fma(-1024.0f, vscale[n], o[i]) : o[i];
      o[i] = fma(x, V::shift(i % 8), vbias[n]);
    }
  }
  // x times f plus the x of lane ^ h times e.
  static METAL_FUNC void join(thread float& x, const float f, const float e, const int h) {
    x = fma(simd_shuffle_xor(x, h), e, x * f);
  }

  // Adds up the simdgroups of each row block in order, a row of each block at a time, and stores a
  // row's state or, if the chunk holds all keys, its output.
  template <typename S, typename O>
  static METAL_FUNC void store(
      const thread float* o, const float top, const float sum, threadgroup float* part,
      threadgroup float* state, const S sinks, device O* out, device float* ml, const thread Place& at) {
    const int l = at.lane % L, P = DV / 8 + 1;
    if (at.lane < L && l % LANES == 0 && l / LANES < R) {
      const int i = (at.sg * R + l / LANES) * 2;
      state[i] = top > LOWEST ? top * LN2 : LOWEST;
      state[i + 1] = sum;
    }
    EACH(r, R) {
      if (r) threadgroup_barrier(mem_flags::mem_threadgroup);
      EACH(j, V::NP) {
        const int p = V::pack(l, j);
        if (at.lane < L && V::has(p)) EACH(i, 8) part[(at.sg * 8 + i) * P + p] = o[(r * V::NP + j) * 8 + i];
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int x = at.sg * 32 + at.lane; x < W * DV; x += KP * W * 32) {
        const int w = x / DV, d = x % DV, n = (at.block + w) * R + r;
        if (n >= at.G * at.q_len) continue;
        const threadgroup float* st = state + (w * KP * R + r) * 2;
        float high = LOWEST, all = 0, t = 0;
        EACH(k, KP) high = max(high, st[k * R * 2]);
        EACH(k, KP) {
          const float f = weight(st[k * R * 2], high);
          all = fma(st[k * R * 2 + 1], f, all);
          t = fma(part[((w * KP + k) * 8 + d % 8) * P + d / 8], f, t);
        }
        if (DIRECT) {
          const int h = at.head + n / at.q_len, i = n % at.q_len;
          const float2 f = settle<SINKS>(high, all, SINKS ? float(sinks[h]) : 0);
          out[((size_t)(at.b * at.q_len + i) * at.Hq + h) * DV + d] = O(t * f.x * f.y);
        } else {
          const size_t c = state_at<1>(at, n, at.chunk);
          if (high > LOWEST) out[c * DV + d] = t;  // nobody reads the o of no keys
          if (d == 0) {
            ml[2 * c] = high > LOWEST ? high : -INFINITY;
            ml[2 * c + 1] = all;
          }
        }
      }
    }
  }

  template <typename Mask, typename S, typename O>
  static METAL_FUNC void run(
      const device T* q, const int3 q_strides, const float scale, const thread K& k, const thread V& v,
      const bool wide, const Mask mask, const int4 mask_strides, const S sinks, device O* out,
      device float* ml, threadgroup float* part, threadgroup float* state, const thread Place& at) {
    const int c0 = at.chunk * CHUNK, end = min(at.len, c0 + CHUNK), row0 = (at.block + at.sg / KP) * R;
    // A window leaves out whole steps, so that steps begin at the same keys for every row.
    const int from = c0 + (at.window ? max(0, at.len - at.q_len - at.window + 1 - c0) / STEP * STEP : 0);
    if (!DIRECT && from >= end) {
      const int n = row0 + at.sg % KP * 32 + at.lane;
      if (n < min(at.G * at.q_len, row0 + R)) {
        const size_t c = state_at<1>(at, n, at.chunk);
        ml[2 * c] = -INFINITY; ml[2 * c + 1] = 0;
      }
      return;
    }
    const int begin = from + at.sg % KP * (U * NG);
    float o[R * V::NP * 8], top, sum;
    if (wide) attend<true>(q, q_strides, scale, k, v, mask, mask_strides, at, row0, begin, end, o, top, sum);
    else attend<false>(q, q_strides, scale, k, v, mask, mask_strides, at, row0, begin, end, o, top, sum);
    store(o, top, sum, part, state, sinks, out, ml, at);
  }
};

//! kernel sdpa_split (q, k, v, mask, sinks, lens, numbers) -> (out, ml)
typedef Sdpa<T, D, DV, 16, 64, 16, 64, L, U, R, KP, W, CHUNK, MASK, SINKS, DIRECT> X;
threadgroup float part[KP * W * (DV + 8)], state[KP * W * R * 2];
const Place at = place<CHUNK, W, WINDOW, G, ALONE, ONE>(
    q_shape, k_shape, LENS ? int(lens[ALONE ? 0 : threadgroup_position_in_grid.z / k_shape[1]]) : k_shape[2], numbers,
    threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
const typename X::K kr = {
    k + at.b * k_strides[0] + at.kv * k_strides[1], k, k, int(k_strides[2]), 0, 0, {}};
const typename X::V vr = {
    v + at.b * v_strides[0] + at.kv * v_strides[1], v, v, int(v_strides[2]), 0, 0, {}};
// Rows are read along the last axis; a layout that has it elsewhere gets NaN, never a wrong number.
const bool along = q_strides[3] == 1 && k_strides[3] == 1 && v_strides[3] == 1;
X::run(
    q, int3(q_strides[0], q_strides[1], q_strides[2]), along ? numbers[0] : NAN, kr, vr,
    even(q, q_strides) && even(k, k_strides) && even(v, v_strides), mask,
    MASK ? mask_steps(mask_shape, mask_strides) : int4(0), sinks, out, ml, part, state, at);

//! kernel sdpa_split_codes (q, k, ks, kb, v, vs, vb, mask, sinks, lens, numbers) -> (out, ml)
typedef Sdpa<T, D, DV, KB, KG, VB, VG, L, U, R, KP, W, CHUNK, MASK, SINKS, DIRECT> X;
threadgroup float part[KP * W * (DV + 8)], state[KP * W * R * 2];
const Place at = place<CHUNK, W, WINDOW, G, ALONE, ONE>(
    q_shape, k_shape, LENS ? int(lens[ALONE ? 0 : threadgroup_position_in_grid.z / k_shape[1]]) : k_shape[2], numbers,
    threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
const typename X::K kr = {
    k + at.b * k_strides[0] + at.kv * k_strides[1], ks + at.b * ks_strides[0] + at.kv * ks_strides[1], kb + at.b * kb_strides[0] + at.kv * kb_strides[1],
    int(k_strides[2]), int(ks_strides[2]), int(kb_strides[2]), {}};
const typename X::V vr = {
    v + at.b * v_strides[0] + at.kv * v_strides[1], vs + at.b * vs_strides[0] + at.kv * vs_strides[1], vb + at.b * vb_strides[0] + at.kv * vb_strides[1],
    int(v_strides[2]), int(vs_strides[2]), int(vb_strides[2]), {}};
// Rows are read along the last axis; a layout that has it elsewhere gets NaN, never a wrong number.
const bool along = q_strides[3] == 1 && k_strides[3] == 1 && v_strides[3] == 1;
X::run(
    q, int3(q_strides[0], q_strides[1], q_strides[2]), along ? numbers[0] : NAN, kr, vr,
    even(q, q_strides) && even(k, k_strides) && even(v, v_strides), mask,
    MASK ? mask_steps(mask_shape, mask_strides) : int4(0), sinks, out, ml, part, state, at);
