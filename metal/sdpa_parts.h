// Weights of keys in sdpa_matrix.metal, and where simdgroups of a threadgroup put what they found and add it up.

// Scores of 16 UK keys, s [UK][NB][8]: the first four of eight are scores, the others become weights, 2^(score - top).
// top is not the largest score but stays near it: it moves where the weights of a lane in one step reach FAR, so that
// most steps neither look for a max among lanes nor touch the sums before. SCALED: weights times the largest scale of
// V of their key, as halves hold no more. TIMES: scores are still to be multiplied by `by`, which is not exact. What a
// LARGE product loses is more than a weight can hold, so there products are rounded first and all steps move top.
template <int NB, int UK, bool S, bool TIMES>
struct Weights {
  static constexpr constant bool SCALED = S;
  static constexpr constant float FAR = 32768, LARGE = 16777216;

  // Scores times `by` less top. key: the lane's first. whole: rows see all keys of the step.
  static METAL_FUNC void relative(
      thread float* s, const thread Row* c, const thread float* by, const thread float* top, const int key, const bool whole) {
    EACH(i, NB * UK * 4) {
      const int e = i / 4 % NB * 2 + i % 2;
      thread float* x = s + i / 4 * 8 + i % 4;
      x[4] = fma(x[0], by[e], -top[e]);
    }
    if (!whole) EACH(i, NB * UK * 4) {
      const int e = i / 4 % NB * 2 + i % 2, j = key + i / (4 * NB) * 16 + i % 4 / 2 * 8;
      if (uint(j - c[e].from) >= uint(c[e].to - c[e].from)) s[i / 4 * 8 + 4 + i % 4] = -INFINITY;
    }
  }
  // Weights, and their sums in this lane: all, and mass, which stays below FAR.
  static METAL_FUNC void weigh(thread float* s, const thread float* most, thread float* all, thread float* mass) {
    EACH(e, NB * 2) {
      float a = 0, m = 0;
      EACH(h, 2 * UK) {
        thread float* x = s + (h / 2 * NB + e / 2) * 8 + 4 + h % 2 * 2 + e % 2;
        *x = EXP2(*x);
        a = h ? a + *x : *x;
        m = h ? fma(*x, most[h], m) : *x * most[h];
      }
      all[e] = a;
      mass[e] = SCALED ? fma(a, 9.094947e-13f, m) : a;  // weights of no scale have an end too, 2^55
    }
  }

  // The weights of a step, of which most[h] is the largest scale of a key. True: some may be too large or no number.
  static METAL_FUNC bool find(
      thread float* s, const thread Row* c, const thread float* by, const thread float* most, const thread float* top,
      thread float* all, thread float* mass, const int key, const bool whole, const bool first) {
    float sum = INFINITY;
    EACH(e, NB * 2) mass[e] = INFINITY;
    if (!first) {
      relative(s, c, by, top, key, whole);
      weigh(s, most, all, mass);
      if (TIMES) EACH(e, NB * 2) mass[e] = fma(fabs(top[e]), FAR / LARGE, mass[e]);
      sum = mass[0];
      UNROLL for (int e = 1; e < NB * 2; e++) sum += mass[e];
    }
    return simd_any(!(sum <= FAR));
  }
  // Then the top of columns with too large ones moves, and their sums before are to be multiplied by f. What happens to
  // a column depends on it alone: f of the others is 1.
  static METAL_FUNC void follow(
      thread float* s, const thread Row* c, const thread float* by, const thread float* most, thread float* top,
      thread float* all, thread float* mass, thread float* f, const int key, const bool whole) {
    uint far = 0;
    EACH(e, NB * 2) far |= uint(!(mass[e] <= FAR)) << e;
    EACH(i, 3) far |= simd_shuffle_xor(far, i < 2 ? TILE_BIT << i : 16);
    EACH(e, NB * 2) f[e] = 0;
    relative(s, c, by, f, key, whole);
    float times[NB * 2];
    bool any = false;
    EACH(e, NB * 2) {
      float high = -INFINITY;
      EACH(h, 2 * UK) {
        const float x = s[(h / 2 * NB + e / 2) * 8 + 4 + h % 2 * 2 + e % 2];
        // The bits of a float are close to its logarithm, in steps of 2^-23 from -127 on.
        high = max(high, SCALED && fabs(x) <= LARGE ? x + max(fma(float(as_type<int>(most[h])), 1.1920929e-7f, -134.0f), -47.0f) : x);
      }
      high = max(top[e], rows_max(high));
      if ((far >> e & 1) == 0) high = top[e];
      f[e] = EXP2(top[e] - high);
      top[e] = high;
      const bool large = TIMES && fabs(high) > LARGE;
      times[e] = large ? 1 : by[e];
      any = any || large;
    }
    if (any) EACH(i, NB * UK * 4) {
      thread float* x = s + i / 4 * 8 + i % 4;
      if (fabs(top[i / 4 % NB * 2 + i % 2]) > LARGE) *x = x[4];
    }
    relative(s, c, times, top, key, whole);
    weigh(s, most, all, mass);
  }
};

// Places next to each other: their address is found once.
#ifdef MSL_TENSOR_CORES
typedef uint Slot;
METAL_FUNC Slot slot_at(threadgroup float* p) { return msl_place(p); }
METAL_FUNC void put(const Slot at, const int i, const float v) { msl_put(at + 4 * i, v); }
METAL_FUNC float get(const Slot at, const int i) { return msl_get(at + 4 * i); }
#else
typedef threadgroup float* Slot;
METAL_FUNC Slot slot_at(threadgroup float* p) { return p; }
METAL_FUNC void put(const Slot at, const int i, const float v) { at[i] = v; }
METAL_FUNC float get(const Slot at, const int i) { return at[i]; }
#endif

// Chunks of CHUNK keys in runs of FOLD, of which a threadgroup takes each stride-th: the one after another, and whether
// it is the last of its run or has the last of so many keys.
template <int CHUNK, int FOLD>
struct Runs {
  static METAL_FUNC int after(const int chunk, const int stride) {
    return (chunk + 1) % FOLD ? chunk + 1 : chunk + 1 + (stride - 1) * FOLD;
  }
  static METAL_FUNC bool ends(const int chunk, const int keys) {
    return (chunk + 1) % FOLD == 0 || (chunk + 1) * CHUNK >= keys;
  }
};

// RUN: elements of o that follow each other in a lane, U: how many may go at once, WORDS: of threadgroup memory. FOLD:
// chunks of a run, whose states a threadgroup adds up in the order in which sdpa_reduce would.
template <int DV, int R, int KP, int W, int RUN, int U, int WORDS, bool SINKS, bool DIRECT, int FOLD>
struct Parts {
  static constexpr constant int NB = R / 8;
  static constexpr constant bool EVEN = (R & (R - 1)) == 0;
  // Up to four of E elements, of which a run and a share hold whole numbers.
  static METAL_FUNC constexpr int together(const int e) { return e % 4 == 0 && RUN % 4 == 0 ? 4 : e % 2 == 0 && RUN % 2 == 0 ? 2 : 1; }
  // Of a run: what is there of F elements of a row, with max and sum. One thread has them, whatever the chunk.
  static METAL_FUNC constexpr int held_words(const int f) { return FOLD > 1 ? W * R * (DV / f) * (f + 2) : 0; }
  // Elements of a lane whose parts are added up at once: as many as threadgroup memory holds.
  static METAL_FUNC constexpr int share() {
    int e = DV / 8;
    for (int i = U; KP * W * R * (8 * e + 6) + held_words(together(e)) > WORDS && i > 0; i /= 2) e = i;
    return e;
  }
  // The padding is against bank conflicts.
  static constexpr constant int E = share(), P = 8 * E + 4, F = together(E);
  static constexpr constant int HELD = KP * W * R * P, WORDS_USED = HELD + held_words(F);
  // Elements e of a lane, F of which are read at once, are in different banks.
  static METAL_FUNC constexpr int bank(const int e) { return (e / F) * F + (e + e / F) % F; }

  // Adds up the simdgroups of each row block in order, and what the run has before, if the chunk is not its first; stores
  // a row's state if it is the last or, if the chunk holds all keys, its output. E elements of a lane and a row at a
  // time, of fewer rows a multiple of it.
  template <typename S, typename O>
  static METAL_FUNC void store(
      const thread float* o, const thread float* top, const thread float* sum, threadgroup float* part, threadgroup float* state,
      const S sinks, device O* out, device float* ml, const thread Place& at, const int chunk, const bool first, const bool last) {
    const int row = TILE_ROW(at.lane), col = TILE_COL(at.lane);
    const bool ALL = E == DV / 8;
    const Slot own = slot_at(part + (at.sg * R + 2 * col) * P + row);
    EACH(i, NB * 2) {
      threadgroup float* st = state + (at.sg * R + i / 2 * 8 + 2 * col + i % 2) * 2;
      if (row == 0) {
        st[0] = top[i] > LOWEST ? top[i] * 0.6931471805599453f : LOWEST;
        st[1] = sum[i];
      }
    }
    // Rows have room for 2^more elements in the place of one, of which `held` are there.
    int more = 0, held = 0;
    while (!ALL && EVEN && more < 2 && at.G * at.q_len <= R >> (more + 1)) more++;
    const uint rows = ALL ? min(R, at.G * at.q_len) : R >> more;
    EACH(u, DV / 8 / E) {
      if (u && held == 0) threadgroup_barrier(mem_flags::mem_threadgroup);
      EACH(i, NB * E * 2) {
        const int n = i / (E * 2), j = i % (E * 2), r = n * 8 + 2 * col + i % 2;
        if (r < int(rows)) put(own, (held * int(rows) + n * 8 + i % 2) * P + bank(j / 4 * 2 + j / 2 % 2) * 8, o[n * (DV / 4) + u * E * 2 + j]);
      }
      held++;
      if (held < 1 << more && u + 1 < DV / 8 / E) continue;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      ROLLED for (uint x = at.sg * 32 + at.lane; x < held * rows * (W * 8 * E / F); x += KP * W * 32) {
        const uint y = x / (8 * E / F) / W, w = x / (8 * E / F) % W, lane_row = x % 8, e = x / 8 % (E / F) * F;
        const uint r = ALL ? y : EVEN ? y & (rows - 1) : y % R, s = ALL ? 0 : EVEN ? (y * (1 << more)) / R : y / R;
        const int all_e = (u + 1 - held + s) * E + e, n = (at.block + w) * R + r, d = (all_e / RUN * 8 + lane_row) * RUN + all_e % RUN;
        if (n >= at.G * at.q_len) continue;
        const threadgroup float* st = state + (w * KP * R + r) * 2;
        const Slot from = slot_at(part + (w * KP * R + s * rows + r) * P + lane_row);
        float high = LOWEST, all = 0, t[F];
        EACH(k, KP) high = max(high, st[k * R * 2]);
        EACH(i, F) t[i] = 0;
        EACH(k, KP) {
          const float f = weight(st[k * R * 2], high);
          all = fma(st[k * R * 2 + 1], f, all);
          EACH(i, F) t[i] = fma(get(from, k * R * P + bank(e + i) * 8), f, t[i]);
        }
        if (FOLD > 1) {
          if (!(high > LOWEST)) EACH(i, F) t[i] = 0;  // it may be NaN, and sdpa_reduce reads no o of no keys
          threadgroup float* run = part + HELD + (w * R + r) * (DV / F) + 8 * (all_e / F) + lane_row;
          const int STEP = W * R * (DV / F);
          if (!first) {
            const float3 f = joined(run[0], high);
            high = f.z;
            all = fma(all, f.y, run[STEP] * f.x);
            EACH(i, F) t[i] = fma(t[i], f.y, run[(2 + i) * STEP] * f.x);
          }
          if (!last) {
            run[0] = high;
            run[STEP] = all;
            EACH(i, F) run[(2 + i) * STEP] = t[i];
            continue;
          }
        }
        const int h = at.head + n / at.q_len, i = n % at.q_len;
        if (DIRECT) {
          const float2 f = settle<SINKS>(high, all, SINKS ? float(sinks[h]) : 0);
          EACH(j, F) out[((size_t)(at.b * at.q_len + i) * at.Hq + h) * DV + d + j] = O(t[j] * f.x * f.y);
        } else {
          const size_t c = state_at<FOLD>(at, n, chunk);
          if (high > LOWEST) {  // nobody reads the o of no keys
            if (F == 4) *(device float4*)(out + c * DV + d) = float4(t[0], t[1 % F], t[2 % F], t[3 % F]);
            else EACH(j, F) out[c * DV + d + j] = t[j];
          }
          if (d == 0) {
            ml[2 * c] = high > LOWEST ? high : -INFINITY;
            ml[2 * c + 1] = all;
          }
        }
      }
      held = 0;
    }
  }
};
