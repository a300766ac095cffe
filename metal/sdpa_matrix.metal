// Decode attention, matrix variant: a simdgroup takes 16 keys at once for R = 8 NB query rows. Scores
// are K Q^T and the output O^T += V^T P^T: keys and elements of V are the rows of the first operand
// and come straight from memory, query rows are the columns of the second. What a column gets does
// not depend on the other columns, on R or on W: a row has the same bits whatever q_len is.

template <typename T, int D, int DV, int KBITS, int KG, int VBITS, int VG, int R, int KP, int W,
          int CHUNK, int MASK, bool SINKS, bool DIRECT>
struct SdpaMatrix {
  static constexpr constant int KB = KBITS < 16 ? KBITS : 8 * sizeof(T), VB = VBITS < 16 ? VBITS : 8 * sizeof(T);
  static constexpr constant int NB = R / 8, STEP = 16 * KP;

  // k or v at a kv head: DIM plain T, or codes of B bits in groups of G. LANES lanes share a row: one
  // has N runs of RUN elements, NW words each, of which U become operands at once.
  template <int B, int G, int DIM, int LANES>
  struct Rows {
    static constexpr constant int RUN = DIM % (LANES * 128 / B) == 0 ? 128 / B
                                      : DIM % (LANES * 64 / B) == 0 ? 64 / B : 32 / B;
    static constexpr constant int N = DIM / (LANES * RUN), NW = RUN * B / 32, U = RUN < 8 ? RUN : 8;
    typedef conditional_t<(B < 16), uint, T> Element;
    const device Element* data;
    const device T* scales;
    const device T* biases;
    uint stride, scale_stride, bias_stride;

    // The share of lane `part` in row `key`: w [N][NW], and sb [N] of (scale, bias).
    METAL_FUNC void load(const int key, const int part, const bool wide, thread uint* w, thread float2* sb) const {
      const device Element* p = data + (size_t)key * stride + part * (B < 16 ? NW : RUN);
      if (wide) {
        UNROLL for (int i = 0; i < N; i++) load_run<NW, true>(p + i * (LANES * (B < 16 ? NW : RUN)), w + i * NW);
      } else {
        UNROLL for (int i = 0; i < N; i++) load_run<NW, false>(p + i * (LANES * (B < 16 ? NW : RUN)), w + i * NW);
      }
      UNROLL for (int i = 0; i < N; i++) {
        if (B < 16) {
          const uint g = uint((i * LANES + part) * RUN) / G;
          sb[i].x = float(scales[(size_t)key * scale_stride + g]);
          sb[i].y = float(biases[(size_t)key * bias_stride + g]);
        }
      }
    }
  };
  typedef Rows<KB, KG, D, 4> K;
  typedef Rows<VB, VG, DV, 8> V;
  // Units of V whose parts are added up at once, so that 32 KiB hold them; their padding is against
  // bank conflicts.
  static constexpr constant int E = V::U == 8 && KP * W * NB > 12 ? 4 : V::U, P = 8 * E + 4;

  // The first key of a simdgroup in a chunk, of which it takes 16 every STEP. A window leaves out whole
  // steps, so that steps begin at the same keys for every row.
  static METAL_FUNC int first_key(const thread Place& at, const int chunk) {
    const int c0 = chunk * CHUNK;
    return c0 + (at.window ? max(0, at.len - at.q_len - at.window + 1 - c0) / STEP * STEP : 0) + at.sg % KP * 16;
  }

  // The first chunk from `chunk` on that has keys for a row; those before are marked as empty.
  static METAL_FUNC int skip(const thread Place& at, int chunk, const int stride, const int row0, device float* ml) {
    for (; !DIRECT && chunk < at.chunks; chunk += stride) {
      if (first_key(at, chunk) - at.sg % KP * 16 < min(at.len, (chunk + 1) * CHUNK)) break;
      const int n = row0 + at.sg % KP * 32 + at.lane;
      if (n < min(at.G * at.q_len, row0 + R)) {
        const size_t c = state_at(at, n) - at.chunk + chunk;
        ml[2 * c] = -INFINITY;
        ml[2 * c + 1] = 0;
      }
    }
    return chunk;
  }

  // The chunks at.chunk, at.chunk + stride, ... of a threadgroup. o: [NB][DV / 16][4] as mma16 leaves
  // it, top (times log2(e)) and sum: [NB][2].
  template <typename Mask, typename S, typename O>
  static METAL_FUNC void attend(
      const device T* q, const uint3 q_steps, const float scale, const thread K& k, const thread V& v,
      const Mask mask, const uint4 mask_steps, const S sinks, device O* out, device float* ml,
      threadgroup float* part, threadgroup float* state, const thread Place& at, const int stride, const bool wide) {
    const int row = TILE_ROW(at.lane), col = TILE_COL(at.lane), row0 = (at.block + at.sg / KP) * R;
    const uint one = one_bits(at.q_len);
    uint kw[2 * K::N * K::NW], vw[4 * V::N * V::NW];
    float2 ks[2 * K::N], vs[4 * V::N];
    // Keys behind the last are the last again: nothing behind it is read, and they have no weight.
    int chunk = skip(at, at.chunk, stride, row0, ml);
    if (chunk * CHUNK < at.len) {
      UNROLL for (int h = 0; h < 2; h++)
        k.load(min(first_key(at, chunk) + 8 * h + row, at.len - 1), col, wide, kw + h * K::N * K::NW, ks + h * K::N);
    }
    // The lane's two columns of each tile, and q in the order in which keys are held.
    Row c[NB * 2];
    PAIR(T) qs[NB * D / 8], p[NB * 2];
    size_t seen[NB * 2];
    UNROLL for (int i = 0; i < NB * 2; i++) {
      c[i] = row_at(at, row0 + i / 2 * 8 + 2 * col + i % 2);
      seen[i] = at.b * (size_t)mask_steps.x + (at.head + c[i].head) * (size_t)mask_steps.y + c[i].i * (size_t)mask_steps.z;
    }
    q += at.b * q_steps.x + at.head * q_steps.y;
    UNROLL for (int n = 0; n < NB; n++) {
      const Row m = row_at(at, row0 + n * 8 + row);
      const device T* own = q + m.head * q_steps.y + m.i * q_steps.z + col * K::RUN;
      const device T* x = q + c[2 * n].head * q_steps.y + c[2 * n].i * q_steps.z + row / 2 * K::RUN;
      const device T* y = q + c[2 * n + 1].head * q_steps.y + c[2 * n + 1].i * q_steps.z + row / 2 * K::RUN;
      UNROLL for (int i = 0; i < K::N; i++) {
        const int at_run = i * 4 * K::RUN;
        thread PAIR(T)* to = qs + (n * K::N + i) * (K::RUN / 2);
        if (wide) load_columns<T, KB, K::RUN, true>(own + at_run, x + at_run, y + at_run, row, to);
        else load_columns<T, KB, K::RUN, false>(own + at_run, x + at_run, y + at_run, row, to);
      }
    }
    for (bool again = false; chunk * CHUNK < at.len || (DIRECT && !again); chunk += stride, again = true) {
      const int end = min(at.len, (chunk + 1) * CHUNK), begin = first_key(at, chunk);
      const int next = (chunk + stride) * CHUNK < at.len ? first_key(at, chunk + stride) : at.len;
      float o[NB * DV / 4], top[NB * 2], sum[NB * 2];
      UNROLL for (int i = 0; i < NB * 2; i++) top[i] = LOWEST;
      UNROLL for (int i = 0; i < NB * 2; i++) sum[i] = 0;
      UNROLL for (int i = 0; i < NB * DV / 4; i++) o[i] = 0;
      for (int key = begin; key < end; key += STEP) {
        UNROLL for (int i = 0; i < 4; i++)
          v.load(min(key + i / 2 * 8 + 2 * col + i % 2, end - 1), row, wide, vw + i * V::N * V::NW, vs + i * V::N);
        // Two sums of every other 16 elements each: shorter chains of dependent multiplies.
        float s[NB * 8];
        UNROLL for (int i = 0; i < NB * 8; i++) s[i] = 0;
        UNROLL for (int u = 0; u < D / 4 / K::U; u++) {
          const int r = u * K::U / K::RUN, j = u % (K::RUN / K::U);
          PAIR(T) a[K::U];
          along<T, KB, K::U>(kw + r * K::NW, j, ks[r], one, a);
          along<T, KB, K::U>(kw + (K::N + r) * K::NW, j, ks[K::N + r], one, a + K::U / 2);
          UNROLL for (int i = 0; i < K::U / 4; i++) {
            const int t = u * (K::U / 4) + i;
            UNROLL for (int n = 0; n < NB; n++)
              mma16<T>(s + n * 8 + t % 2 * 4, a[2 * i], a[K::U / 2 + 2 * i], a[2 * i + 1],
                       a[K::U / 2 + 2 * i + 1], qs[n * (D / 8) + 2 * t], qs[n * (D / 8) + 2 * t + 1]);
          }
        }
        // The next keys are on their way while these are weighted.
        const int after = key + STEP < end ? key + STEP : next;
        if (after < at.len) {
          UNROLL for (int h = 0; h < 2; h++)
            k.load(min(after + 8 * h + row, at.len - 1), col, wide, kw + h * K::N * K::NW, ks + h * K::N);
        }
        UNROLL for (int n = 0; n < NB; n++) {
          thread float* x = s + n * 8;
          UNROLL for (int i = 0; i < 4; i++) {
            const Row m = c[2 * n + i % 2];
            const int j = key + i / 2 * 8 + row;
            x[i] = (x[i] + x[i + 4]) * scale;
            if (j < m.from || j >= m.to) x[i] = -INFINITY;
            else if (MASK)
              x[i] = fma(added(mask[seen[2 * n + i % 2] + (size_t)j * mask_steps.w]), LOG2E, x[i]);
          }
          float f[2];
          UNROLL for (int i = 0; i < 2; i++) {
            const float high = max(top[2 * n + i], rows_max(max(x[i], x[2 + i])));
            f[i] = fast::exp2(top[2 * n + i] - high);
            top[2 * n + i] = high;
            x[i] = fast::exp2(x[i] - high);
            x[2 + i] = fast::exp2(x[2 + i] - high);
            sum[2 * n + i] = fma(sum[2 * n + i], f[i], x[i] + x[2 + i]);
          }
          p[2 * n] = to_b<T>(pair_of<T>(x[0], x[1]));
          p[2 * n + 1] = to_b<T>(pair_of<T>(x[2], x[3]));
          UNROLL for (int i = 0; i < DV / 4; i++) o[n * (DV / 4) + i] *= f[i % 2];
        }
        UNROLL for (int u = 0; u < DV / 8 / V::U; u++) {
          const int r = u * V::U / V::RUN, j = u % (V::RUN / V::U), L = V::N * V::NW;
          const thread uint* w = vw + r * V::NW;
          PAIR(T) a[2 * V::U];
          across<T, VB, V::U>(w, w + L, j, vs[r], vs[V::N + r], one, a);
          across<T, VB, V::U>(w + 2 * L, w + 3 * L, j, vs[2 * V::N + r], vs[3 * V::N + r], one, a + V::U);
          UNROLL for (int i = 0; i < V::U / 2; i++) {
            UNROLL for (int n = 0; n < NB; n++)
              mma16<T>(o + n * (DV / 4) + (u * (V::U / 2) + i) * 4, a[2 * i], a[2 * i + 1],
                       a[V::U + 2 * i], a[V::U + 2 * i + 1], p[2 * n], p[2 * n + 1]);
          }
        }
      }
      UNROLL for (int i = 0; i < NB * 2; i++) sum[i] = rows_sum(sum[i]);
      if (again) threadgroup_barrier(mem_flags::mem_threadgroup);
      store(o, top, sum, part, state, sinks, out, ml, at, chunk);
    }
    skip(at, chunk, stride, row0, ml);
  }

  // Adds up the simdgroups of each row block in order, E elements of each run at a time, and
  // stores a row's state or, if the chunk holds all keys, its output.
  template <typename S, typename O>
  static METAL_FUNC void store(
      const thread float* o, const thread float* top, const thread float* sum, threadgroup float* part,
      threadgroup float* state, const S sinks, device O* out, device float* ml, const thread Place& at, const int chunk) {
    const int row = TILE_ROW(at.lane), col = TILE_COL(at.lane);
    UNROLL for (int i = 0; i < NB * 2; i++) {
      threadgroup float* st = state + (at.sg * R + i / 2 * 8 + 2 * col + i % 2) * 2;
      if (row == 0) {
        st[0] = top[i] > LOWEST ? top[i] * 0.6931471805599453f : LOWEST;
        st[1] = sum[i];
      }
    }
    UNROLL for (int u = 0; u < DV / 8 / E; u++) {
      if (u) threadgroup_barrier(mem_flags::mem_threadgroup);
      UNROLL for (int i = 0; i < NB * E * 2; i++) {
        const int n = i / (E * 2), j = i % (E * 2);
        part[(at.sg * R + n * 8 + 2 * col + i % 2) * P + (j / 4 * 2 + j / 2 % 2) * 8 + row] = o[n * (DV / 4) + u * E * 2 + j];
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (int x = at.sg * 32 + at.lane; x < W * R * 8 * E; x += KP * W * 32) {
        const int w = x / (R * 8 * E), r = x / (8 * E) % R, lane_row = x / E % 8, e = x % E;
        const int n = (at.block + w) * R + r, d = (u * E / V::RUN * 8 + lane_row) * V::RUN + u * E % V::RUN + e;
        if (n >= at.G * at.q_len) continue;
        const threadgroup float* st = state + (w * KP * R + r) * 2;
        float high = LOWEST, all = 0, t = 0;
        UNROLL for (int k = 0; k < KP; k++) high = max(high, st[k * R * 2]);
        UNROLL for (int k = 0; k < KP; k++) {
          const float f = weight(st[k * R * 2], high);
          all = fma(st[k * R * 2 + 1], f, all);
          t = fma(part[((w * KP + k) * R + r) * P + e * 8 + lane_row], f, t);
        }
        const int h = at.head + n / at.q_len, i = n % at.q_len;
        if (DIRECT) {
          const float2 f = settle<SINKS>(high, all, SINKS ? float(sinks[h]) : 0);
          out[((size_t)(at.b * at.q_len + i) * at.Hq + h) * DV + d] = O(t * f.x * f.y);
        } else {
          const size_t c = state_at(at, n) - at.chunk + chunk;
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
      const device T* q, const uint3 q_steps, const float scale, const thread K& k, const thread V& v,
      const bool wide, const Mask mask, const uint4 mask_steps, const S sinks, device O* out,
      device float* ml, threadgroup float* part, threadgroup float* state, const thread Place& at, const int stride) {
    attend(q, q_steps, scale * LOG2E, k, v, mask, mask_steps, sinks, out, ml, part, state, at, stride, wide);
  }
};

//! kernel sdpa_matrix (q, k, v, mask, sinks, lens, numbers) -> (out, ml)
typedef SdpaMatrix<T, D, DV, 16, 64, 16, 64, R, KP, W, CHUNK, MASK, SINKS, DIRECT> X;
threadgroup float part[KP * W * R * X::P];
threadgroup float state[KP * W * R * 2];
const Place at = place<CHUNK, W>(
    q_shape, k_shape, LENS ? int(lens[threadgroup_position_in_grid.z / k_shape[1]]) : k_shape[2], numbers,
    threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
const typename X::K kr = {
    k + at.b * k_strides[0] + at.kv * k_strides[1], k, k, uint(k_strides[2]), 0, 0};
const typename X::V vr = {
    v + at.b * v_strides[0] + at.kv * v_strides[1], v, v, uint(v_strides[2]), 0, 0};
// Rows are read along the last axis; a layout that has it elsewhere gets NaN, never a wrong number.
const bool rows = q_strides[3] == 1 && k_strides[3] == 1 && v_strides[3] == 1;
X::run(
    q, uint3(q_strides[0], q_strides[1], q_strides[2]), rows ? numbers[0] : NAN, kr, vr,
    even(q, q_strides) && even(k, k_strides) && even(v, v_strides), mask, MASK ? mask_steps(mask_shape, mask_strides) : uint4(0),
    sinks, out, ml, part, state, at, threadgroups_per_grid.y);

//! kernel sdpa_matrix_codes (q, k, ks, kb, v, vs, vb, mask, sinks, lens, numbers) -> (out, ml)
typedef SdpaMatrix<T, D, DV, KB, KG, VB, VG, R, KP, W, CHUNK, MASK, SINKS, DIRECT> X;
threadgroup float part[KP * W * R * X::P];
threadgroup float state[KP * W * R * 2];
const Place at = place<CHUNK, W>(
    q_shape, k_shape, LENS ? int(lens[threadgroup_position_in_grid.z / k_shape[1]]) : k_shape[2], numbers,
    threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
const typename X::K kr = {
    k + at.b * k_strides[0] + at.kv * k_strides[1], ks + at.b * ks_strides[0] + at.kv * ks_strides[1],
    kb + at.b * kb_strides[0] + at.kv * kb_strides[1], uint(k_strides[2]), uint(ks_strides[2]), uint(kb_strides[2])};
const typename X::V vr = {
    v + at.b * v_strides[0] + at.kv * v_strides[1], vs + at.b * vs_strides[0] + at.kv * vs_strides[1],
    vb + at.b * vb_strides[0] + at.kv * vb_strides[1], uint(v_strides[2]), uint(vs_strides[2]), uint(vb_strides[2])};
// Rows are read along the last axis; a layout that has it elsewhere gets NaN, never a wrong number.
const bool rows = q_strides[3] == 1 && k_strides[3] == 1 && v_strides[3] == 1;
X::run(
    q, uint3(q_strides[0], q_strides[1], q_strides[2]), rows ? numbers[0] : NAN, kr, vr,
    even(q, q_strides) && even(k, k_strides) && even(v, v_strides), mask, MASK ? mask_steps(mask_shape, mask_strides) : uint4(0),
    sinks, out, ml, part, state, at, threadgroups_per_grid.y);
