// Prompts with heads too wide for sdpa_prefill.metal: SG simdgroups share R = 8 NB query rows. Each takes a
// share of head_dim of K and of V, so neither is read twice and both come straight from memory: keys,
// or elements of V, are the rows of the first operand as in sdpa_matrix.metal. Scores of the shares meet in
// threadgroup memory; the first NB simdgroups add those of 8 query rows each and pass on weights.

// Element i % 2 of two pairs.
template <typename T>
METAL_FUNC PAIR(T) twin(OPERAND a, OPERAND b, const int i) {
  return i % 2 ? pair_of<T>(a.y, b.y) : pair_of<T>(a.x, b.x);
}
#ifdef MSL_TENSOR_CORES
template <typename T> METAL_FUNC uint twin(const uint a, const uint b, const int i) { return halves_of(a, b, i); }
#endif

template <typename T, int D, int DV, int KB, int KG, int VB, int VG, int R, int SG, int BK, int MASK,
          bool SINKS, bool DIRECT>
struct SdpaWide {
  typedef Units<T, KB, KG, D> K;
  typedef Units<T, VB, VG, DV> V;
  // Blocks of a simdgroup: KU of 32 elements of K, every SG-th, and VU of 64 of V. TK: tiles of 16 keys.
  static constexpr constant int KU = (D / 32 + SG - 1) / SG, VU = DV / (64 * SG), NB = R / 8, TK = BK / 16;
  // S: words of two elements. PARTS, WEIGHTS: those of a step in threadgroup memory, in units of their types.
  static constexpr constant int S = sizeof(T) / 2, PARTS = SG * TK * NB * 32, WEIGHTS = TK * NB * 64 * S;

  template <bool WIDE>
  static METAL_FUNC void load_keys(
      const thread K& k, const thread Place& at, const int key, const int last, thread uint* w, thread T* sb) {
    EACH(i, KU * TK * 2)
      k.template load<WIDE>(min(key + i % (TK * 2) * 8 + TILE_ROW(at.lane), last),
                            (i / (TK * 2) * SG + at.sg) * 4 + TILE_COL(at.lane), w + i * K::NW, sb + 2 * i);
  }
  template <bool WIDE>
  static METAL_FUNC void load_values(
      const thread V& v, const thread Place& at, const int key, const int last, thread uint* w, thread T* sb) {
    EACH(i, VU * TK * 4)
      v.template load<WIDE>(min(key + i % (TK * 4) / 2 * 8 + 2 * TILE_COL(at.lane) + i % 2, last),
                            (at.sg * VU + i / (TK * 4)) * 8 + TILE_ROW(at.lane), w + i * V::NW, sb + 2 * i);
  }
  // A unit of values of two keys: each element with its twin.
  static METAL_FUNC void across(const thread V& v, const thread uint* w, const thread T* sb, const uint one, thread PAIR(T)* a) {
    if (V::CODED) {
      PAIR(T) x[4], y[4];
      v.pairs(w, sb, one, x);
      v.pairs(w + V::NW, sb + 2, one, y);
      EACH(i, 8) a[element<V::BITS>(i / 2) + i % 2 * partner<V::BITS>()] = twin<T>(x[i / 2], y[i / 2], i);
    } else EACH(i, 8) a[i] = pair_across<T>(w, w + V::NW, i);
  }

  // keys: of a chunk.
  template <typename Mask, typename Sinks, typename O>
  static METAL_FUNC void run(
      const device T* q, const int3 q_steps, const float q_scale, const thread K& k, const thread V& v,
      const bool wide, const Mask mask, const int4 mask_steps, const Sinks sinks, device O* out, device float* ml,
      threadgroup float4* parts, threadgroup uint* weights, threadgroup float* factors, const thread Place& at,
      const int keys) {
    const float scale = q_scale * LOG2E;
    const int lane_row = TILE_ROW(at.lane), col = TILE_COL(at.lane), row0 = at.block * R, rows = at.G * at.q_len;
    const uint one = one_bits(at.q_len);
    // Keys that some row sees, and those that all of the 8 rows see of which this simdgroup adds the scores.
    const int mine = row0 + min(at.sg, NB - 1) * 8;
    const int from = max(prompt_row(at, row0).from, at.chunk * keys);
    const int to = min(prompt_row(at, row0 + R - 1).to, min(at.len, (at.chunk + 1) * keys));
    const int all_from = prompt_row(at, mine + 7).from, all_to = min(prompt_row(at, mine).to, to);
    // The lane's two columns of the 8.
    Row c[2];
    size_t seen[2];
    EACH(e, 2) {
      c[e] = prompt_row(at, mine + 2 * col + e);
      seen[e] = at.b * (size_t)mask_steps.x + (at.head + c[e].head) * (size_t)mask_steps.y + c[e].i * (size_t)mask_steps.z;
    }
    uint qs[NB * KU * 4 * S];
    q += (long)at.b * q_steps.x + (long)at.head * q_steps.y;
    EACH(n, NB) {
      const Row m = prompt_row(at, row0 + n * 8 + lane_row), a = prompt_row(at, row0 + n * 8 + 2 * col), b = prompt_row(at, row0 + n * 8 + 2 * col + 1);
      EACH(j, KU) {
        // Blocks behind the last are not multiplied.
        const int e = min(j * SG + at.sg, D / 32 - 1) * 32;
        const device T* own = q + (long)m.head * q_steps.y + (long)m.i * q_steps.z + e + col * 8;
        const device T* x = q + (long)a.head * q_steps.y + (long)a.i * q_steps.z + e + lane_row / 2 * 8;
        const device T* y = q + (long)b.head * q_steps.y + (long)b.i * q_steps.z + e + lane_row / 2 * 8;
        PAIR(T) p[4];
        const int CODE = K::CODED ? K::BITS : 16;
        if (wide) load_columns<T, CODE, 8, true>(own, x, y, lane_row, p);
        else load_columns<T, CODE, 8, false>(own, x, y, lane_row, p);
        EACH(i, 4) keep<T>(p[i], qs + ((n * KU + j) * 4 + i) * S);
      }
    }
    uint kw[KU * TK * 2 * K::NW], vw[VU * TK * 4 * V::NW];
    T ks[KU * TK * 4], vs[VU * TK * 8];
    float o[NB * VU * 16], top[2] = {LOWEST, LOWEST}, sum[2] = {0, 0};
    EACH(i, NB * VU * 16) o[i] = 0;
    // Keys behind the last are the last again: nothing behind it is read, and they have no weight.
    if (from < to) {
      if (wide) load_keys<true>(k, at, from, to - 1, kw, ks);
      else load_keys<false>(k, at, from, to - 1, kw, ks);
    }
    // The weights of a step are found while the values of the step before it are multiplied.
    for (int key = from, turn = 0; from < to && key < to + BK; key += BK, turn ^= 1) {
      if (key < to) {
        float s[TK * NB * 4];
        EACH(i, TK * NB * 4) s[i] = 0;
        EACH(j, KU) {
          if (j * SG + at.sg < D / 32) {
            EACH(t, TK) {
              PAIR(T) x[4], y[4];
              const int i = (j * TK + t) * 2;
              k.pairs(kw + i * K::NW, ks + 2 * i, one, x);
              k.pairs(kw + (i + 1) * K::NW, ks + 2 * i + 2, one, y);
              EACH(n, NB) EACH(h, 2) {
                const thread uint* b = qs + ((n * KU + j) * 4 + 2 * h) * S;
                mma16<T>(s + (t * NB + n) * 4, x[2 * h], y[2 * h], x[2 * h + 1], y[2 * h + 1], pair_at<T>(b, 0), pair_at<T>(b, 1));
              }
            }
          }
        }
        // The next keys are on their way while these are weighted.
        if (key + BK < to) {
          if (wide) load_keys<true>(k, at, key + BK, to - 1, kw, ks);
          else load_keys<false>(k, at, key + BK, to - 1, kw, ks);
        }
        EACH(i, TK * NB) parts[(at.sg * TK * NB + i) * 32 + at.lane] = float4(s[4 * i], s[4 * i + 1], s[4 * i + 2], s[4 * i + 3]);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (key < to && at.sg < NB) {
        float x[TK * 4], f[2];
        EACH(t, TK) {
          float4 all = 0;
          EACH(g, SG) all += parts[((g * TK + t) * NB + at.sg) * 32 + at.lane];
          all *= scale;
          x[4 * t] = all.x; x[4 * t + 1] = all.y; x[4 * t + 2] = all.z; x[4 * t + 3] = all.w;
        }
        if (MASK || key < all_from || key + BK > all_to) {
          EACH(i, TK * 4) {
            const int e = i % 2, j = key + i / 2 * 8 + lane_row;
            if (j < c[e].from || j >= min(c[e].to, to)) x[i] = -INFINITY;
            else if (MASK) x[i] = fma(added(mask[seen[e] + (size_t)j * mask_steps.w]), LOG2E, x[i]);
          }
        }
        EACH(e, 2) {
          float most = top[e], more = 0;
          EACH(i, TK * 2) most = max(most, x[2 * i + e]);
          most = rows_max(most);
          f[e] = EXP2(top[e] - most);
          top[e] = most;
          EACH(i, TK * 2) {
            x[2 * i + e] = EXP2(x[2 * i + e] - most);
            more += x[2 * i + e];
          }
          sum[e] = fma(sum[e], f[e], more);
          if (lane_row == 0) factors[turn * R + at.sg * 8 + 2 * col + e] = f[e];
        }
        EACH(i, TK * 2) {
          uint w[S];
          keep<T>(to_b<T>(pair_of<T>(x[2 * i], x[2 * i + 1])), w);
          EACH(j, S) weights[turn * WEIGHTS + (((i / 2 * NB + at.sg) * 2 + i % 2) * S + j) * 32 + at.lane] = w[j];
        }
      }
      if (key > from) {
        EACH(n, NB) {
          const float f0 = factors[(turn ^ 1) * R + n * 8 + 2 * col], f1 = factors[(turn ^ 1) * R + n * 8 + 2 * col + 1];
          if (simd_any(f0 != 1 || f1 != 1)) EACH(i, VU * 16) o[n * VU * 16 + i] *= i % 2 ? f1 : f0;
        }
        EACH(t, TK) {
          uint p[NB * 2 * S];
          EACH(i, NB * 2 * S) p[i] = weights[(turn ^ 1) * WEIGHTS + (t * NB * 2 * S + i) * 32 + at.lane];
          EACH(u, VU) {
            PAIR(T) x[8], y[8];
            const int i = (u * TK + t) * 4;
            across(v, vw + i * V::NW, vs + 2 * i, one, x);
            across(v, vw + (i + 2) * V::NW, vs + 2 * i + 4, one, y);
            EACH(n, NB) EACH(j, 4)
              mma16<T>(o + ((n * VU + u) * 4 + j) * 4, x[2 * j], x[2 * j + 1], y[2 * j], y[2 * j + 1],
                       pair_at<T>(p + n * 2 * S, 0), pair_at<T>(p + n * 2 * S, 1));
          }
        }
      }
      if (key < to) {
        if (wide) load_values<true>(v, at, key, to - 1, vw, vs);
        else load_values<false>(v, at, key, to - 1, vw, vs);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (at.sg < NB) {
      EACH(e, 2) {
        sum[e] = rows_sum(sum[e]);
        const int h = at.head + c[e].head;
        const float high = top[e] > LOWEST ? top[e] * 0.6931471805599453f : LOWEST;
        const float2 by = settle<SINKS>(high, sum[e], SINKS ? float(sinks[h]) : 0);
        if (lane_row == 0) factors[at.sg * 8 + 2 * col + e] = DIRECT ? by.x * by.y : 1;
        if (!DIRECT && lane_row == 0 && mine + 2 * col + e < rows) {
          const size_t r = ((size_t)(at.b * at.Hq + h) * at.q_len + c[e].i) * at.chunks + at.chunk;
          ml[2 * r] = high > LOWEST ? high : -INFINITY;
          ml[2 * r + 1] = sum[e];
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    EACH(e, NB * 2) {
      const int n = e / 2 * 8 + 2 * col + e % 2;
      if (row0 + n >= rows) continue;
      const Row m = prompt_row(at, row0 + n);
      const int h = at.head + m.head;
      const size_t r = DIRECT ? (size_t)(at.b * at.q_len + m.i) * at.Hq + h
                              : ((size_t)(at.b * at.Hq + h) * at.q_len + m.i) * at.chunks + at.chunk;
      device O* to_row = out + r * DV + (at.sg * VU * 8 + lane_row) * 8;
      EACH(i, VU * 8) to_row[i / 8 * 64 + i % 8] = O(o[(e / 2 * VU * 8 + i) * 2 + e % 2] * factors[n]);
    }
  }
};

//! kernel sdpa_prefill_wide (q, k, v, mask, sinks, lens, numbers) -> (out, ml)
typedef SdpaWide<T, D, DV, 16, 64, 16, 64, R, SG, BK, MASK, SINKS, DIRECT> X;
threadgroup float4 parts[X::PARTS];
threadgroup uint weights[2 * X::WEIGHTS];
threadgroup float factors[2 * R];
const Place at = prefill_place(
    q_shape, k_shape, LENS ? int(lens[threadgroup_position_in_grid.x / k_shape[1]]) : k_shape[2], numbers,
    threadgroup_position_in_grid, threadgroups_per_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
const typename X::K kr = units_at<typename X::K>(k, k_strides, at);
const typename X::V vr = units_at<typename X::V>(v, v_strides, at);
// Rows are read along the last axis; a layout that has it elsewhere gets NaN, never a wrong number.
const bool rows = q_strides[3] == 1 && k_strides[3] == 1 && v_strides[3] == 1;
const int3 q_steps = int3(q_strides[0], q_strides[1], q_strides[2]);
const int4 m_steps = MASK ? mask_steps(mask_shape, mask_strides) : int4(0);
const bool wide = even(q, q_strides) && even(k, k_strides) && even(v, v_strides);
X::run(q, q_steps, rows ? numbers[0] : NAN, kr, vr, wide, mask, m_steps, sinks, out, ml, parts, weights, factors, at, int(numbers[3]));

//! kernel sdpa_prefill_wide_codes (q, k, ks, kb, v, vs, vb, mask, sinks, lens, numbers) -> (out, ml)
typedef SdpaWide<T, D, DV, KB, KG, VB, VG, R, SG, BK, MASK, SINKS, DIRECT> X;
threadgroup float4 parts[X::PARTS];
threadgroup uint weights[2 * X::WEIGHTS];
threadgroup float factors[2 * R];
const Place at = prefill_place(
    q_shape, k_shape, LENS ? int(lens[threadgroup_position_in_grid.x / k_shape[1]]) : k_shape[2], numbers,
    threadgroup_position_in_grid, threadgroups_per_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
const typename X::K kr = units_at<typename X::K>(k, k_strides, ks, ks_strides, kb, kb_strides, at);
const typename X::V vr = units_at<typename X::V>(v, v_strides, vs, vs_strides, vb, vb_strides, at);
const bool rows = q_strides[3] == 1 && k_strides[3] == 1 && v_strides[3] == 1;
const int3 q_steps = int3(q_strides[0], q_strides[1], q_strides[2]);
const int4 m_steps = MASK ? mask_steps(mask_shape, mask_strides) : int4(0);
const bool wide = even(q, q_strides) && even(k, k_strides) && even(v, v_strides);
X::run(q, q_steps, rows ? numbers[0] : NAN, kr, vr, wide, mask, m_steps, sinks, out, ml, parts, weights, factors, at, int(numbers[3]));
