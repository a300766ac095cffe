// Attention of many query rows: a tile of SG R rows of one kv head walks over its keys, BK at a time,
// with an online softmax in fp32. As in sdpa_matrix.metal scores are K Q^T and the output is O^T += V^T
// P^T: a simdgroup has R = 8 NB rows as columns. Keys and values are read, and codes decoded, once a
// threadgroup, and lie in threadgroup memory in the order in which lanes want their operands. While one
// of them is multiplied the next words of the other are on their way.

#ifdef MSL_TENSOR_CORES
METAL_FUNC uint twins(const uint a, const uint b, const int i) { return i ? msl_high_halves(a, b) : msl_low_halves(a, b); }
#else
METAL_FUNC uint twins(const uint a, const uint b, const int i) {
  const ushort2 x = as_type<ushort2>(a), y = as_type<ushort2>(b);
  return as_type<uint>(i ? ushort2(x.y, y.y) : ushort2(x.x, y.x));
}
#endif

// k or v at a kv head in steps of BK keys that THREADS threads fetch, a unit of two keys at a time.
//
// Tiles in threadgroup memory are [DIM / 16][TK] blocks of 16 x 16, rows of the first operand of
// mma16 by columns: 32 chunks of what a lane holds of one, in the order in which it is multiplied.
template <typename T, int FORM, int G, int DIM, int BK, int THREADS>
struct Steps {
  typedef Units<T, FORM, G, DIM> In;
  // NW, TW: words of 8 elements as they come and as T.
  static constexpr constant bool CODED = In::CODED;
  static constexpr constant int BITS = In::BITS, NW = In::NW, TW = 2 * sizeof(T);
  static constexpr constant int PAD = (DIM + 15) / 16 * 16, TK = BK / 16, WORDS = PAD * BK * sizeof(T) / 4;
  // Keys as rows: a lane's columns of W / 16 blocks are RUN neighbours. C units make such blocks. A
  // thread has N units of two keys 8 apart, of TURNS pairs of keys in turns, in every EVERY-th W.
  static constexpr constant int W = PAD % 32 == 0 ? 32 : 16, RUN = W / 4, C = W / 8, PAIRS = C * BK / 2;
  static constexpr constant int TURNS = PAIRS > THREADS ? PAIRS / THREADS : 1, EVERY = THREADS > PAIRS ? THREADS / PAIRS : 1;
  static constexpr constant int N = (PAD / W + EVERY - 1) / EVERY * TURNS;
  // Keys as columns: N2 units, NEXT apart, of two neighbour keys.
  static constexpr constant int NEXT = THREADS / (BK / 2), N2 = (PAD / 8 + NEXT - 1) / NEXT;
  In in;

  // A unit as words of T, in the order of `along`; what is behind DIM is 0.
  METAL_FUNC void decoded(const uint unit, const thread uint* w, const thread T* sb, const uint one, thread uint* t) const {
    if (CODED) {
      PAIR(T) a[4];
      in.pairs(w, sb, one, a);
      EACH(i, 4) keep<T>(a[i], t + i * (TW / 4));
    } else EACH(i, TW) t[i] = w[i];
    if (PAD > DIM && unit * 8 >= DIM) EACH(i, TW) t[i] = 0;
  }

  static METAL_FUNC uint row_of(const int i, const uint id) { return id / C % (BK / 2) + i % TURNS * (THREADS / C); }
  static METAL_FUNC uint unit_of(const int i, const uint id) { return (i / TURNS * EVERY + id / PAIRS) * C + id % C; }
  template <bool WIDE>
  METAL_FUNC void fetch_rows(const int key, const int last, const uint id, thread uint* w, thread T* sb) const {
    EACH(i, 2 * N) {
      const uint x = row_of(i / 2, id);
      in.template load<WIDE>(min(key + int(x + x / 8 * 8) + i % 2 * 8, last), unit_of(i / 2, id), w + i * NW, sb + 2 * i);
    }
  }
  METAL_FUNC void stage_rows(const thread uint* w, const thread T* sb, const uint one, const uint id, threadgroup uint4* tile) const {
    EACH(i, N) {
      const uint x = row_of(i, id), unit = unit_of(i, id);
      if (PAD / W % EVERY && unit * 8 >= PAD) continue;
      uint a[TW], b[TW];
      decoded(unit, w + 2 * i * NW, sb + 4 * i, one, a);
      decoded(unit, w + (2 * i + 1) * NW, sb + 4 * i + 2, one, b);
      // Two pairs go to the next block or to the next lane.
      const uint at = (unit / C * (W / 16) * TK + x / 8) * 32 + x % 8 * 4 + unit % C * (W == 32 ? 1 : 2);
      EACH(h, 2) {
        threadgroup uint4* to = tile + (at + h * (W == 32 ? TK * 32 : 1)) * (TW / 4);
        const thread uint* u = a + h * (TW / 2);
        const thread uint* v = b + h * (TW / 2);
        if (sizeof(T) == 2) to[0] = uint4(u[0], v[0], u[1], v[1]);
        else {
          to[0] = uint4(u[0], u[1], v[0], v[1]);
          to[1] = uint4(u[2 % TW], u[3 % TW], v[2 % TW], v[3 % TW]);
        }
      }
    }
  }

  template <bool WIDE>
  METAL_FUNC void fetch_columns(const int key, const int last, const uint id, thread uint* w, thread T* sb) const {
    EACH(i, 2 * N2)
      in.template load<WIDE>(min(key + int(id % (BK / 2)) * 2 + i % 2, last), id / (BK / 2) + i / 2 * NEXT, w + i * NW, sb + 2 * i);
  }
  METAL_FUNC void stage_columns(const thread uint* w, const thread T* sb, const uint one, const uint id, threadgroup uint* tile) const {
    const uint x = id % (BK / 2), c = x % 4, h = x / 4 % 2, t = x / 8;
    EACH(i, N2) {
      const uint unit = id / (BK / 2) + i * NEXT;
      if (PAD / 8 % NEXT && unit * 8 >= PAD) continue;
      uint a[TW], b[TW];
      decoded(unit, w + 2 * i * NW, sb + 4 * i, one, a);
      decoded(unit, w + (2 * i + 1) * NW, sb + 4 * i + 2, one, b);
      threadgroup uint* to = tile + ((unit / 2 * TK + t) * 32 + c) * TW + (2 * h + unit % 2) * (TW / 4);
      EACH(j, 8) {
        const int e = CODED ? element<BITS>(j / 2) + j % 2 * partner<BITS>() : j;
        // Rows of odd blocks change places in pairs: stores meet all banks.
        threadgroup uint* at = to + (e / 2 * 2 + (e % 2 ? 1 - t % 2 : t % 2)) * (4 * TW);
        if (sizeof(T) == 2) at[0] = twins(a[j / 2], b[j / 2], j % 2);
        else {
          at[0] = a[j % TW];
          at[1] = b[j % TW];
        }
      }
    }
  }

  METAL_FUNC void fetch(const bool columns, const int key, const int last, const uint id, const bool wide, thread uint* w, thread T* sb) const {
    if (columns && wide) fetch_columns<true>(key, last, id, w, sb);
    else if (columns) fetch_columns<false>(key, last, id, w, sb);
    else if (wide) fetch_rows<true>(key, last, id, w, sb);
    else fetch_rows<false>(key, last, id, w, sb);
  }
};

// A chunk, and c += the chunk times b.
template <typename T>
METAL_FUNC void load_chunk(const threadgroup uint4* p, const int chunk, thread uint* a) {
  EACH(i, int(sizeof(T) / 2)) {
    const uint4 v = p[chunk * int(sizeof(T) / 2) + i];
    a[4 * i] = v.x; a[4 * i + 1] = v.y; a[4 * i + 2] = v.z; a[4 * i + 3] = v.w;
  }
}
template <typename T>
METAL_FUNC void mma_chunk(thread float* c, const thread uint* a, PAIR(T) b0, PAIR(T) b1) {
  mma16<T>(c, pair_at<T>(a, 0), pair_at<T>(a, 1), pair_at<T>(a, 2), pair_at<T>(a, 3), b0, b1);
}

template <typename T, int D, int DV, int KB, int KG, int VB, int VG, int R, int SG, int BK, int MASK,
          bool SINKS, bool DIRECT>
struct SdpaPrefill {
  typedef Steps<T, KB, KG, D, BK, 32 * SG> K;
  typedef Steps<T, VB, VG, DV, BK, 32 * SG> V;
  // TK: tiles of 16 keys, TV: of 16 elements of V; S: words of an element, twice.
  static constexpr constant int NB = R / 8, TK = BK / 16, TV = V::PAD / 16, S = sizeof(T) / 2;

  // keys: of a chunk.
  template <typename Mask, typename Sinks, typename O>
  static METAL_FUNC void run(
      const device T* q, const int3 q_steps, const float q_scale, const thread K& k, const thread V& v,
      const bool wide, const Mask mask, const int4 mask_steps, const Sinks sinks, device O* out, device float* ml,
      threadgroup uint4* k_tile, threadgroup uint4* v_tile, const thread Place& at, const int keys) {
    const float scale = q_scale * LOG2E;
    const int lane_row = TILE_ROW(at.lane), col = TILE_COL(at.lane), odd_row = lane_row ^ 1, rows = at.G * at.q_len;
    // The compiler is to know how large it may be.
    const uint here = uint(at.sg * 32 + at.lane) % (32 * SG);
    const int row0 = (at.block * SG + at.sg) * R;
    const uint one = one_bits(at.q_len);
    // Keys that some row of the threadgroup sees, and those that all rows of the simdgroup see.
    const Row first = prompt_row(at, at.block * SG * R), last = prompt_row(at, (at.block + 1) * SG * R - 1);
    const int from = max(first.from, at.chunk * keys), to = min(last.to, min(at.len, (at.chunk + 1) * keys));
    const int all_from = prompt_row(at, row0 + R - 1).from, all_to = prompt_row(at, row0).to;
    // The lane's two columns of each 8.
    Row c[NB * 2];
    size_t seen[NB * 2];
    EACH(i, NB * 2) {
      c[i] = prompt_row(at, row0 + i / 2 * 8 + 2 * col + i % 2);
      seen[i] = at.b * (size_t)mask_steps.x + (at.head + c[i].head) * (size_t)mask_steps.y + c[i].i * (size_t)mask_steps.z;
    }
    uint qs[NB * K::PAD / 8 * S];
    q += (long)at.b * q_steps.x + (long)at.head * q_steps.y;
    EACH(n, NB) {
      const Row m = prompt_row(at, row0 + n * 8 + lane_row);
      const device T* own = q + (long)m.head * q_steps.y + (long)m.i * q_steps.z;
      const device T* x = q + (long)c[2 * n].head * q_steps.y + (long)c[2 * n].i * q_steps.z;
      const device T* y = q + (long)c[2 * n + 1].head * q_steps.y + (long)c[2 * n + 1].i * q_steps.z;
      EACH(j, K::PAD / K::W) {
        // Behind the last element keys are 0.
        const int a = min(j * K::W + col * K::RUN, D - K::RUN), b = min(j * K::W + lane_row / 2 * K::RUN, D - K::RUN);
        PAIR(T) p[K::RUN / 2];
        const int CODE = K::CODED ? K::BITS : 16;
        if (wide) load_columns<T, CODE, K::RUN, true>(own + a, x + b, y + b, lane_row, p);
        else load_columns<T, CODE, K::RUN, false>(own + a, x + b, y + b, lane_row, p);
        EACH(i, K::RUN / 2) keep<T>(p[i], qs + (n * (K::PAD / 8) + j * (K::RUN / 2) + i) * S);
      }
    }
    uint kw[2 * K::N * K::NW], vw[2 * V::N2 * V::NW];
    T ks[4 * K::N], vs[4 * V::N2];
    float o[NB * TV * 4], top[NB * 2], sum[NB * 2];
    EACH(i, NB * 2) top[i] = LOWEST;
    EACH(i, NB * 2) sum[i] = 0;
    EACH(i, NB * TV * 4) o[i] = 0;
    // Keys behind the last are the last again: nothing behind it is read, and they have no weight.
    if (from < to) {
      k.fetch(false, from, to - 1, here, wide, kw, ks);
      k.stage_rows(kw, ks, one, here, k_tile);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int key = from; key < to; key += BK) {
      v.fetch(true, key, to - 1, here, wide, vw, vs);
      float s[TK * NB * 4];
      EACH(i, TK * NB * 4) s[i] = 0;
      EACH(j, K::PAD / 16) {
        EACH(t, TK) {
          uint a[K::TW];
          load_chunk<T>(k_tile, (j * TK + t) * 32 + lane_row * 4 + col, a);
          EACH(n, NB) {
            const thread uint* b = qs + (n * (K::PAD / 8) + 2 * j) * S;
            mma_chunk<T>(s + (t * NB + n) * 4, a, pair_at<T>(b, 0), pair_at<T>(b, 1));
          }
        }
      }
      v.stage_columns(vw, vs, one, here, (threadgroup uint*)v_tile);
      // The values are there, and nobody needs these keys any more.
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (key + BK < to) k.fetch(false, key + BK, to - 1, here, wide, kw, ks);
      EACH(i, TK * NB * 4) s[i] *= scale;
      if (MASK || key < all_from || key + BK > min(all_to, to)) {
        EACH(i, TK * NB * 4) {
          const int e = i / 4 % NB * 2 + i % 2, j = key + i / 4 / NB * 16 + i % 4 / 2 * 8 + lane_row;
          if (j < c[e].from || j >= min(c[e].to, to)) s[i] = -INFINITY;
          else if (MASK) s[i] = fma(added(mask[seen[e] + (size_t)j * mask_steps.w]), LOG2E, s[i]);
        }
      }
      float f[NB * 2];
      bool rises = false;
      EACH(e, NB * 2) {
        float most = top[e];
        EACH(i, TK * 2) most = max(most, s[(i / 2 * NB + e / 2) * 4 + i % 2 * 2 + e % 2]);
        most = rows_max(most);
        f[e] = EXP2(top[e] - most);
        rises = rises || most > top[e];
        top[e] = most;
        float more = 0;
        EACH(i, TK * 2) {
          thread float* x = s + (i / 2 * NB + e / 2) * 4 + i % 2 * 2 + e % 2;
          *x = EXP2(*x - most);
          more += *x;
        }
        sum[e] = fma(sum[e], f[e], more);
      }
      if (simd_any(rises)) {
        EACH(i, NB * TV * 4) o[i] *= f[i / (TV * 4) * 2 + i % 2];
      }
      PAIR(T) p[TK * NB * 2];
      EACH(i, TK * NB * 2) p[i] = to_b<T>(pair_of<T>(s[2 * i], s[2 * i + 1]));
      EACH(t, TK) {
        EACH(u, TV) {
          uint a[V::TW];
          load_chunk<T>(v_tile, (u * TK + t) * 32 + (t % 2 ? odd_row : lane_row) * 4 + col, a);
          EACH(n, NB) mma_chunk<T>(o + (n * TV + u) * 4, a, p[(t * NB + n) * 2], p[(t * NB + n) * 2 + 1]);
        }
      }
      if (key + BK < to) k.stage_rows(kw, ks, one, here, k_tile);
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    EACH(e, NB * 2) {
      sum[e] = rows_sum(sum[e]);
      if (row0 + e / 2 * 8 + 2 * col + e % 2 >= rows) continue;
      const int h = at.head + c[e].head;
      const float high = top[e] > LOWEST ? top[e] * 0.6931471805599453f : LOWEST;
      const size_t r = DIRECT ? (size_t)(at.b * at.q_len + c[e].i) * at.Hq + h
                              : ((size_t)(at.b * at.Hq + h) * at.q_len + c[e].i) * at.chunks + at.chunk;
      float2 by = 1;
      if (DIRECT) by = settle<SINKS>(high, sum[e], SINKS ? float(sinks[h]) : 0);
      else if (lane_row == 0) {
        ml[2 * r] = high > LOWEST ? high : -INFINITY;
        ml[2 * r + 1] = sum[e];
      }
      EACH(i, TV * 2) {
        const int d = i * 8 + lane_row;
        if (d < DV && (DIRECT || high > LOWEST)) out[r * DV + d] = O(o[(e / 2 * TV + i / 2) * 4 + i % 2 * 2 + e % 2] * by.x * by.y);
      }
    }
  }
};

//! kernel sdpa_prefill (q, k, v, mask, sinks, lens, numbers) -> (out, ml)
typedef SdpaPrefill<T, D, DV, 16, 64, 16, 64, R, SG, BK, MASK, SINKS, DIRECT> X;
threadgroup uint4 k_tile[X::K::WORDS / 4], v_tile[X::V::WORDS / 4];
const Place at = prefill_place(
    q_shape, k_shape, LENS ? int(lens[threadgroup_position_in_grid.x / k_shape[1]]) : k_shape[2], numbers,
    threadgroup_position_in_grid, threadgroups_per_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
const typename X::K kr = {units_at<typename X::K::In>(k, k_strides, at)};
const typename X::V vr = {units_at<typename X::V::In>(v, v_strides, at)};
// Rows are read along the last axis; a layout that has it elsewhere gets NaN, never a wrong number.
const bool rows = q_strides[3] == 1 && k_strides[3] == 1 && v_strides[3] == 1;
const int3 q_steps = int3(q_strides[0], q_strides[1], q_strides[2]);
const int4 m_steps = MASK ? mask_steps(mask_shape, mask_strides) : int4(0);
const float scale = rows ? numbers[0] : NAN;
const bool wide = even(q, q_strides) && even(k, k_strides) && even(v, v_strides);
X::run(q, q_steps, scale, kr, vr, wide, mask, m_steps, sinks, out, ml, k_tile, v_tile, at, int(numbers[3]));

//! kernel sdpa_prefill_codes (q, k, ks, kb, v, vs, vb, mask, sinks, lens, numbers) -> (out, ml)
typedef SdpaPrefill<T, D, DV, KB, KG, VB, VG, R, SG, BK, MASK, SINKS, DIRECT> X;
threadgroup uint4 k_tile[X::K::WORDS / 4], v_tile[X::V::WORDS / 4];
const Place at = prefill_place(
    q_shape, k_shape, LENS ? int(lens[threadgroup_position_in_grid.x / k_shape[1]]) : k_shape[2], numbers,
    threadgroup_position_in_grid, threadgroups_per_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
const typename X::K kr = {units_at<typename X::K::In>(k, k_strides, ks, ks_strides, kb, kb_strides, at)};
const typename X::V vr = {units_at<typename X::V::In>(v, v_strides, vs, vs_strides, vb, vb_strides, at)};
const bool rows = q_strides[3] == 1 && k_strides[3] == 1 && v_strides[3] == 1;
const int3 q_steps = int3(q_strides[0], q_strides[1], q_strides[2]);
const int4 m_steps = MASK ? mask_steps(mask_shape, mask_strides) : int4(0);
const float scale = rows ? numbers[0] : NAN;
const bool wide = even(q, q_strides) && even(k, k_strides) && even(v, v_strides);
X::run(q, q_steps, scale, kr, vr, wide, mask, m_steps, sinks, out, ml, k_tile, v_tile, at, int(numbers[3]));
