// Caches of keys or values, plain or of codes, for sdpa_matrix.metal.

#define EACH(i, n) UNROLL for (int i = 0; i < n; i++)
// For what runs once a chunk: short code.
#define ROLLED _Pragma("unroll 1")

// Unit j of a run, E elements, in pairs.
template <typename T, int E>
METAL_FUNC void plain_along(const thread uint* w, const int j, thread PAIR(T)* a) {
  EACH(i, E / 2) a[i] = pair_at<T>(w, j * E / 2 + i);
}
// Unit j of the runs v and w of two keys: each element with its twin.
template <typename T, int E>
METAL_FUNC void across(const thread uint* v, const thread uint* w, const int j, thread PAIR(T)* a) {
  EACH(i, E) a[i] = pair_across<T>(v, w, j * E + i);
}

// A pair of elements of 16 bits as one word, and back.
template <typename T> METAL_FUNC uint word_of(const uint p) { return p; }
template <typename T> METAL_FUNC uint word_of(const vec<typename Operand<T>::element, 2> p) {
  typedef conditional_t<sizeof(T) == 2, T, half> H;
  return as_type<uint>(vec<H, 2>(H(p.x), H(p.y)));
}
template <typename T> METAL_FUNC PAIR(T) pair_of_word(const uint u) {
  const uint w[2] = {u, 0};
  return pair_at<T>(w, 0);
}

// Made once, where the compiler would make it again for each use; not for pairs of floats, which have no ring.
METAL_FUNC uint once(const uint p) { return simd_shuffle_xor(p, 0); }
template <typename T> METAL_FUNC vec<T, 2> once(const vec<T, 2> p) { return p; }

// The same of codes as they are, times unit / unscale: scales and biases are for sums. A code is exact in H: half,
// where T is. Tensor cores multiply subnormal halves exactly, so there the bits of a code are a number.
template <typename H>
METAL_FUNC constexpr float unit() {
#ifdef MSL_TENSOR_CORES
  if (sizeof(H) == 2) return 5.9604645e-8f;
#endif
  return 1;
}
template <int BITS>
METAL_FUNC float code_at(const thread uint* w, const int e) {
  return float(w[e * BITS / 32] >> e * BITS % 32 & (1u << BITS) - 1) / unscale<BITS>(e);
}
template <typename T, int BITS, int E, typename H>
METAL_FUNC void codes_along(const thread uint* w, const int j, thread PAIR(H)* a) {
#ifdef MSL_TENSOR_CORES
  if (sizeof(T) == 2) {
    EACH(i, E / 2)
      a[i] = BITS == 4 ? w[j] >> i / 2 * 8 & (i % 2 ? 0x00f000f0 : 0x000f000f)
                       : msl_bytes(w[2 * j + i / 2], 0, i % 2 ? 0x4342 : 0x4140);
    return;
  }
#endif
  EACH(i, E / 2) {
    const int e = element<BITS>(i), f = e + partner<BITS>();
    a[i] = pair_of<H>(code_at<BITS>(w + 8 * j * BITS / 32, e), code_at<BITS>(w + 8 * j * BITS / 32, f));
  }
}
// Code i of two keys, which share a word.
#ifdef MSL_TENSOR_CORES
template <int BITS>
METAL_FUNC uint codes_in(const uint u, const int i) {
  return BITS == 4 ? u >> i / 2 % 2 * 8 & (i % 2 ? 0x00f000f0 : 0x000f000f) : msl_bytes(u, 0, i % 2 ? 0x4341 : 0x4240);
}
#endif
template <typename T, int BITS, int E, typename H>
METAL_FUNC void codes_across(
    const thread uint* v, const thread uint* w, const int j, const uint one, thread PAIR(H)* a) {
#ifdef MSL_TENSOR_CORES
  if (sizeof(T) == 2) {
    EACH(i, E) {
      const int at = BITS == 4 ? j : j * (E / 4) + i / 4;
      const uint u = i / (16 / BITS) % 2 ? msl_high_halves(v[at], w[at]) : msl_low_halves(v[at], w[at]);
      a[i] = codes_in<BITS>(u, i);
    }
    return;
  }
#endif
  float x[8], y[8];
  decode8<BITS>(v, j, one, x);
  decode8<BITS>(w, j, one, y);
  EACH(i, E)
    a[i] = pair_of<H>(x[i] - 1024, y[i] - 1024);
}

// From pairs of keys: 16 bits of each, as they come through threadgroup memory.
template <int BITS, typename H>
METAL_FUNC void codes_of_pair(const uint u, thread PAIR(H)* a) {
  EACH(i, 16 / BITS) {
#ifdef MSL_TENSOR_CORES
    if (sizeof(H) == 2) {
      a[i] = codes_in<BITS>(u, i);
      continue;
    }
#endif
    a[i] = pair_of<H>(code_at<BITS>(&u, i), code_at<BITS>(&u, i + 16 / BITS));
  }
}

// NG scales of a row, two of 16 bits in a word.
template <int NG, bool WIDE, typename T>
METAL_FUNC void load_scales(const device T* p, thread uint* w) {
  if (NG * sizeof(T) % 4 == 0) load_run<NG * sizeof(T) / 4, WIDE>(p, w);
  else {
    const device ushort* h = (const device ushort*)p;
    EACH(g, NG) w[g / 2] = g % 2 ? w[g / 2] | uint(h[g]) << 16 : h[g];
  }
}
template <typename T>
METAL_FUNC float scale_at(const thread uint* w, const int g) {
  const vec<T, 2> v = as_type<vec<T, 2>>(w[g / 2]);
  return float(g % 2 ? v.y : v.x);
}
template <> METAL_FUNC float scale_at<bfloat>(const thread uint* w, const int g) {
  return as_type<float>(g % 2 ? w[g / 2] & 0xffff0000 : w[g / 2] << 16);
}
template <> METAL_FUNC float scale_at<float>(const thread uint* w, const int g) { return as_type<float>(w[g]); }

// A lane's share of a query row, N elements in runs that begin every 4 RUN.
template <int RUN, int N, bool WIDE, typename T>
METAL_FUNC void load_query(const device T* own, thread uint* w) {
  const int L = RUN * sizeof(T) > 16 ? 16 / sizeof(T) : RUN, S = L * sizeof(T) / 4;  // elements, words of a load
  EACH(i, N / L) load_run<S, WIDE>(own + i * L / RUN * 4 * RUN + i * L % RUN, w + i * S);
}

// The columns of load_columns for codes, from floats: own is times mine, x and y times fx and fy.
template <typename H, int BITS, int RUN, typename T>
METAL_FUNC void code_columns(
    const thread float* own, const device T* x, const device T* y, const float mine, const float fx,
    const float fy, const int row, thread PAIR(H)* b) {
  EACH(i, RUN / 2) {
    const int e = element<BITS>(i), p = partner<BITS>();
#ifdef MSL_TENSOR_CORES
    if (sizeof(H) == 2) {
      b[i] = pair_of<H>(own[e] * (mine * unscale<BITS>(e)), own[e + p] * (mine * unscale<BITS>(e)));
      continue;
    }
#endif
    const int k = e + row % 2 * p;
    b[i] = to_b<H>(pair_of<H>(float(x[k]) * (fx * unscale<BITS>(e)), float(y[k]) * (fy * unscale<BITS>(e))));
  }
}

// k or v at a kv head: DIM plain T, or codes of B bits in groups of G. LANES lanes share a row: one
// has N runs of RUN elements, NW words each, of which U become operands at once. Runs number i of
// all lanes are in one group. RING: those of a lane are in all chunks of 16 bytes. RECENT: the last
// rows lie elsewhere (sdpa_recent.h).
template <typename T, int B, int G, int DIM, int LANES, bool RING, bool RECENT>
struct Rows {
  static constexpr constant bool CODED = B < 16;
  static constexpr constant int MOST = CODED && G * B < LANES * 128 ? G / LANES : 128 / B;
  static constexpr constant int RUN = RING ? 128 / B / LANES : DIM % (LANES * MOST) == 0 ? MOST : DIM % (LANES * 64 / B) == 0 ? 64 / B : 32 / B;
  static constexpr constant int WORDS = DIM * B / 32, N = DIM / (LANES * RUN), BYTES = RUN * B / 8, NW = (BYTES + 3) / 4, U = RUN < 8 ? RUN : 8;
  // Groups of a row, words of their scales, runs of each.
  static constexpr constant int NG = CODED ? DIM / G : 1, NS = (NG * sizeof(T) + 3) / 4, PER = CODED ? N / NG : N;
  static constexpr constant bool BESIDE = RECENT;
  // Bytes of a row, of its scales, and what these are aligned to.
  static constexpr constant int ROW = WORDS * 4, SIDE = NG * sizeof(T), EVEN = SIDE % 16 == 0 ? 16 : SIDE & -SIDE;
  typedef T Side;
  typedef conditional_t<CODED && sizeof(T) == 2, half, T> Operand;
  const device uchar *data, *scales, *biases;
  int stride, scale_stride, bias_stride;  // in bytes, negative where rows run backwards
  Recent recent;
  // Is each row behind the one before, and the key up to which all of `len` are in the cache.
  METAL_FUNC bool dense() const { return stride == ROW && scale_stride == SIDE && bias_stride == scale_stride; }
  // May rows be read in steps of 16 bytes, scales in words. No &&: a chain of branches before the first load.
  METAL_FUNC bool even() const {
    const bool rows = ALIGNED(data, 16) & ALIGNED(data + stride, 16);
    return !CODED ? rows : rows & ALIGNED(scales, EVEN) & ALIGNED(scales + scale_stride, EVEN) &
        ALIGNED(biases, EVEN) & ALIGNED(biases + bias_stride, EVEN);
  }
  METAL_FUNC int whole(const int len) const { return RECENT ? min(len, recent.held) : len; }

  // The share of lane `part` in a row: w [N][NW].
  template <bool WIDE>
  static METAL_FUNC void load_words(const device uchar* row, const int part, thread uint* w) {
    const device uchar* p = row + part * BYTES;
    EACH(i, N) {
      const device uchar* run = p + i * (LANES * BYTES);
      if (BYTES == 2) w[i] = *(const device ushort*)run;
      else load_run<NW, WIDE>((const device conditional_t<CODED, uint, T>*)run, w + i * NW);
    }
  }
};

// Where row `key` lies, and its scales or biases. NEAR: it may be a recent one.
template <typename Rows>
METAL_FUNC bool is_recent(const thread Rows& r, const int key) {
  return Rows::BESIDE && key >= r.recent.held && key < r.recent.stop;
}
#define ROW_OF(name, own, step, bytes) \
  template <bool NEAR, typename Rows> \
  METAL_FUNC const device uchar* name##_of(const thread Rows& r, const int key) { \
    if (NEAR && is_recent(r, key)) return RECENT_ROW(Rows::bytes, r.recent, r.recent.name, key); \
    return r.own + (size_t)key * r.step; \
  }
ROW_OF(rows, data, stride, ROW)
ROW_OF(scales, scales, scale_stride, SIDE)
ROW_OF(biases, biases, bias_stride, SIDE)

// Of UK tiles of 16 keys that begin at `key` the lane's share: w [2 UK][N][NW], its two keys of each tile, or, ACROSS,
// [4 UK][N][NW], its four of their values; scales and biases [2 UK][2][NS]. Keys behind the last are the last again.
template <bool ACROSS, int UK, bool WIDE, bool NEAR, typename Rows>
METAL_FUNC void load_as(
    const thread Rows& r, const int key, const int len, const int lane, thread uint* w, thread uint* sb) {
  typedef const device typename Rows::Side* Side;
  const int row = TILE_ROW(lane), col = TILE_COL(lane), NS = Rows::NS;
  EACH(i, (ACROSS ? 4 : 2) * UK) {
    const int mine = min(key + (ACROSS ? i / 2 * 8 + 2 * col + i % 2 : 8 * i + row), len - 1);
    Rows::template load_words<WIDE>(rows_of<NEAR>(r, mine), ACROSS ? row : col, w + i * Rows::N * Rows::NW);
  }
  if (Rows::CODED) EACH(h, 2 * UK) {
    const int mine = min(key + 8 * h + row, len - 1);
    load_scales<Rows::NG, WIDE>((Side)scales_of<NEAR>(r, mine), sb + h * 2 * NS);
    load_scales<Rows::NG, WIDE>((Side)biases_of<NEAR>(r, mine), sb + (h * 2 + 1) * NS);
  }
}
// One branch for all loads of a step.
template <bool ACROSS, int UK, typename Rows>
METAL_FUNC void load_step(
    const thread Rows& r, const int key, const int len, const int lane, const bool wide, thread uint* w, thread uint* sb) {
  const bool near = Rows::BESIDE && key + 16 * UK > r.recent.held && key < r.recent.stop;
  if (wide && !near) load_as<ACROSS, UK, true, false>(r, key, len, lane, w, sb);
  else if (wide) load_as<ACROSS, UK, true, true>(r, key, len, lane, w, sb);
  else load_as<ACROSS, UK, false, true>(r, key, len, lane, w, sb);
}
