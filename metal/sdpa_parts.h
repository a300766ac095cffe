// Where the simdgroups of a threadgroup of sdpa_matrix.metal put what they found, and add it up.

// RUN: elements of o that follow each other in a lane, U: how many may go at once, WORDS: of threadgroup memory.
template <int DV, int R, int KP, int W, int RUN, int U, int WORDS, bool SINKS, bool DIRECT>
struct Parts {
  static constexpr constant int NB = R / 8;
  // Elements of a lane whose parts are added up at once: as many as threadgroup memory holds.
  static METAL_FUNC constexpr int share() {
    int e = DV / 8;
    for (int i = U; KP * W * R * (8 * e + 6) > WORDS && i > 0; i /= 2) e = i;
    return e;
  }
  // The padding is against bank conflicts.
  static constexpr constant int E = share(), P = 8 * E + 4;
  // Up to four, of which a run and a share hold whole numbers.
  static constexpr constant int F = E % 4 == 0 && RUN % 4 == 0 ? 4 : E % 2 == 0 && RUN % 2 == 0 ? 2 : 1;
  // Elements e of a lane, F of which are read at once, are in different banks.
  static METAL_FUNC constexpr int bank(const int e) { return (e / F) * F + (e + e / F) % F; }

  // Adds up the simdgroups of each row block in order, E elements of each run at a time, and
  // stores a row's state or, if the chunk holds all keys, its output.
  template <typename S, typename O>
  static METAL_FUNC void store(
      const thread float* o, const thread float* top, const thread float* sum, threadgroup float* part,
      threadgroup float* state, const S sinks, device O* out, device float* ml, const thread Place& at, const int chunk) {
    const int row = TILE_ROW(at.lane), col = TILE_COL(at.lane);
    EACH(i, NB * 2) {
      threadgroup float* st = state + (at.sg * R + i / 2 * 8 + 2 * col + i % 2) * 2;
      if (row == 0) {
        st[0] = top[i] > LOWEST ? top[i] * 0.6931471805599453f : LOWEST;
        st[1] = sum[i];
      }
    }
    EACH(u, DV / 8 / E) {
      if (u) threadgroup_barrier(mem_flags::mem_threadgroup);
      EACH(i, NB * E * 2) {
        const int n = i / (E * 2), j = i % (E * 2);
        part[(at.sg * R + n * 8 + 2 * col + i % 2) * P + bank(j / 4 * 2 + j / 2 % 2) * 8 + row] = o[n * (DV / 4) + u * E * 2 + j];
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      ROLLED for (int x = at.sg * 32 + at.lane; x < W * R * 8 * E / F; x += KP * W * 32) {
        const int lane_row = x % 8, e = x / 8 % (E / F) * F, w = x / (8 * E / F) / R, r = x / (8 * E / F) % R;
        const int n = (at.block + w) * R + r, d = ((u * E + e) / RUN * 8 + lane_row) * RUN + (u * E + e) % RUN;
        if (n >= at.G * at.q_len) continue;
        const threadgroup float* st = state + (w * KP * R + r) * 2;
        const threadgroup float* from = part + (w * KP * R + r) * P + lane_row;
        float high = LOWEST, all = 0, t[F];
        EACH(k, KP) high = max(high, st[k * R * 2]);
        EACH(i, F) t[i] = 0;
        EACH(k, KP) {
          const float f = weight(st[k * R * 2], high);
          all = fma(st[k * R * 2 + 1], f, all);
          EACH(i, F) t[i] = fma(from[k * R * P + bank(e + i) * 8], f, t[i]);
        }
        const int h = at.head + n / at.q_len, i = n % at.q_len;
        if (DIRECT) {
          const float2 f = settle<SINKS>(high, all, SINKS ? float(sinks[h]) : 0);
          EACH(j, F) out[((size_t)(at.b * at.q_len + i) * at.Hq + h) * DV + d + j] = O(t[j] * f.x * f.y);
        } else {
          const size_t c = state_at(at, n) - at.chunk + chunk;
          if (high > LOWEST) {  // nobody reads the o of no keys
            EACH(j, F) out[c * DV + d + j] = t[j];
          }
          if (d == 0) {
            ml[2 * c] = high > LOWEST ? high : -INFINITY;
            ml[2 * c + 1] = all;
          }
        }
      }
    }
  }
};
