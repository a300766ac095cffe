// Quantised caches on their way through threadgroup memory, for sdpa_matrix.metal: ST slots take keys and values of a
// step in turn and fill in the background while a simdgroup computes, without a register. K, V: Rows of both caches.

// Copies of N words, which go on in the background where the hardware can.
#ifdef MSL_TENSOR_CORES
#define COPIES_END() msl_copy_commit()
#define COPIES_WAIT(n) msl_copy_wait<n>()
#else
#define COPIES_END()
#define COPIES_WAIT(n)
#endif
template <int N>
METAL_FUNC void copy_words(threadgroup uint* to, const device uint* p) {
#ifdef MSL_TENSOR_CORES
  const int B = N % 4 == 0 ? 4 : N % 2 == 0 ? 2 : 1;  // the hardware copies 4, 8 or 16 bytes
  EACH(i, N / B) msl_copy<4 * B>(to + i * B, p + i * B);
#else
  uint w[N];
  load_run<N, true>(p, w);
  EACH(i, N) to[i] = w[i];
#endif
}

// A slot has the codes of 16 UK keys of one cache, then scales and biases of each key. Kernel: says in which order a
// simdgroup takes its steps.
template <typename Kernel, typename K, typename V, int UK, int ST>
struct Ring {
  static constexpr constant int KEYS = 16 * UK;
  int len, lane;
  bool wide;
  // The step that is copied next: it begins at `key`, those of its chunk end at `stop`, up to `sure` it is simple.
  int chunk, key, stop, sure;
  // Rows lie one behind the other up to this key. Where a lane has its first 16 bytes of a slot, and where it reads of
  // each pair of chunks of 16 rows.
  int dense;
  uint k_place, v_place;
#ifdef MSL_TENSOR_CORES
  uint k_tile[K::WORDS / 8], v_tile[V::WORDS / 8];
#endif

  template <typename Rows>
  static METAL_FUNC uint place(const uint lane) {
    const uint C = Rows::WORDS / 4, own = lane / C;
    return once(own * C * 4 + (lane % C ^ turn<C * 4>(own)) * 4);
  }
  template <typename Rows>
  static METAL_FUNC void find_tile(const uint lane, thread uint* at) {
    const int RW = Rows::WORDS;
    EACH(c, RW / 8) at[c] = once(lane % 16 * RW + ((2 * c + lane / 16) ^ turn<RW>(lane % 16)) * 4);
  }
  METAL_FUNC void take(const thread Place& at, const int which) thread {
    chunk = which;
    key = Kernel::first_key(at, chunk);
    stop = min(len, (chunk + 1) * Kernel::CHUNK_KEYS);
    sure = min(stop, dense);
  }
  METAL_FUNC void start(const thread K& k, const thread V& v, const thread Place& at, const int first, const bool is_wide) thread {
    len = at.len;
    lane = at.lane;
    wide = is_wide;
    dense = wide && k.dense() && v.dense() && len < 1 << 22 ? k.whole(len) : 0;
    k_place = place<K>(lane);
    v_place = place<V>(lane);
#ifdef MSL_TENSOR_CORES
    find_tile<K>(lane, k_tile);
    if (K::WORDS != V::WORDS) find_tile<V>(lane, v_tile);
#endif
    take(at, first);
  }
  template <typename Rows>
  METAL_FUNC void copy(const thread Rows& from, threadgroup uint* slot, const uint own) const {
    if (key + KEYS <= sure) copy_dense(from, slot, own);
    else if (key < stop) {
      if (wide) copy_slot<Rows, true>(from, slot);
      else copy_slot<Rows, false>(from, slot);
    }
    COPIES_END();
  }
  METAL_FUNC void next_keys(const thread K& k, threadgroup uint* slot, const thread Place& at, const int stride) thread {
    if (key + KEYS > sure)
      while (key >= stop && chunk * Kernel::CHUNK_KEYS < len) take(at, Kernel::Chunks::after(chunk, stride));
    copy(k, slot, k_place);
  }
  METAL_FUNC void next_values(const thread V& v, threadgroup uint* slot) thread {
    copy(v, slot, v_place);
    key += Kernel::STEP;
  }
  // Chunks of 16 bytes change places, so that those of eight rows come from different banks.
  template <int RW> static METAL_FUNC constexpr uint turn(const uint row) {
    return (RW & (RW - 1)) != 0 ? 0 : RW > 32 ? row % 8 : row * RW / 32 % (RW / 4);
  }
  template <typename Rows, bool WIDE>
  METAL_FUNC void copy_rows(const thread Rows& from, threadgroup uint* to) const {
    const int RW = Rows::WORDS;
    if (WIDE) {
      EACH(j, KEYS * RW / 128) {
        const uint i = j * 32 + lane, row = i / (RW / 4), x = i % (RW / 4);
        copy_words<4>(
            to + row * RW + (x ^ turn<RW>(row)) * 4,
            (const device uint*)(rows_of<true>(from, min(int(key + row), len - 1)) + x * 16));
      }
    } else {
      ROLLED for (int i = lane; i < KEYS * RW; i += 32) {
        const int row = i / RW, w = i % RW;
        to[row * RW + (w / 4 ^ turn<RW>(row)) * 4 + w % 4] =
            ((const device uint*)rows_of<true>(from, min(key + row, len - 1)))[w];
      }
    }
  }
  // Scales or biases, NG of a key.
  template <int NG, bool WIDE>
  METAL_FUNC void copy_scales(threadgroup uint* to, const device uchar* p) const {
    if (WIDE) copy_words<NG / 2>(to, (const device uint*)p);
    else EACH(i, NG) ((threadgroup ushort*)to)[i] = ((const device ushort*)p)[i];
  }
  // Keys behind the last are the last again: nothing behind it is read, and they have no weight.
  template <typename Rows, bool WIDE>
  METAL_FUNC void copy_slot(const thread Rows& from, threadgroup uint* to) const {
    const int row = lane % KEYS, mine = min(key + row, len - 1);
    const device uchar *s = scales_of<true>(from, mine), *b = biases_of<true>(from, mine);
    copy_rows<Rows, WIDE>(from, to);
    to += KEYS * Rows::WORDS + row * Rows::NG;
    if (UK == 2) {
      copy_scales<Rows::NG, WIDE>(to, s);
      copy_scales<Rows::NG, WIDE>(to + Rows::NS, b);
    } else copy_scales<Rows::NG, WIDE>(to + (lane < 16 ? 0 : Rows::NS), lane < 16 ? s : b);
  }
  template <typename Rows>
  METAL_FUNC void copy_dense(const thread Rows& from, threadgroup uint* to, const uint own) const {
    const int RW = Rows::WORDS, B = 4 * Rows::NS;
    const device uchar* p = from.data + (uint(key) * (RW * 4) + uint(lane) * 16);
    EACH(j, KEYS * RW / 128) copy_words<4>(to + j * 128 + (own ^ turn<RW>(j * 128 / RW) * 4), (const device uint*)(p + j * 512));
    const uint row = UK == 2 ? lane : lane % KEYS, at = (uint(key) + row) * B;
    to += KEYS * RW + row * Rows::NG;
    if (UK == 2) {
      copy_words<Rows::NS>(to, (const device uint*)(from.scales + at));
      copy_words<Rows::NS>(to + Rows::NS, (const device uint*)(from.biases + at));
    } else copy_words<Rows::NS>(to + (lane < 16 ? 0 : Rows::NS), (const device uint*)((lane < 16 ? from.scales : from.biases) + at));
  }

  // 16 keys from row `first` on, w[2][RW / 4]. Of each half and chunk the word TILE_COL of key TILE_ROW, or, ACROSS, 16
  // bits, number TILE_ROW, of the keys 2 TILE_COL and 2 TILE_COL + 1.
  template <int RW, bool ACROSS>
  METAL_FUNC void tile(const threadgroup uint* rows, const int first, thread uint* w) const {
#ifdef MSL_TENSOR_CORES
    EACH(c, RW / 8) {
      const threadgroup uint* p = rows + (ACROSS && K::WORDS != V::WORDS ? v_tile[c] : k_tile[c]) + first * RW;
      uint t[4];
      if (ACROSS) msl_load_tiles_across(p, t);
      else msl_load_tiles(p, t);
      EACH(i, 4) w[i % 2 * (RW / 4) + 2 * c + i / 2] = t[i];
    }
#else
    EACH(i, RW / 2) {
      const int c = i % (RW / 4), row = first + i / (RW / 4) * 8 + (ACROSS ? 2 * TILE_COL(lane) : TILE_ROW(lane));
      const threadgroup uint* p = rows + row * RW + (c ^ turn<RW>(row)) * 4;
      const threadgroup uint* next = rows + (row + 1) * RW + (c ^ turn<RW>(row + 1)) * 4;
      const int d = TILE_ROW(lane);
      w[i] = ACROSS ? ((const threadgroup ushort*)p)[d] | uint(((const threadgroup ushort*)next)[d]) << 16 : p[TILE_COL(lane)];
    }
#endif
  }
  // mma16 with the first 8 of k alone.
  template <typename H>
  static METAL_FUNC void mma8(thread float* c, const PAIR(H) x, const PAIR(H) y, const PAIR(H) b) {
#ifdef MSL_TENSOR_CORES
    if (sizeof(H) == 2) return msl_mma<H>::k8(c, x, y, b);
#endif
    mma16<H>(c, x, y, x, y, b, pair_of<H>(0.0f, 0.0f));
  }
  // The words of a slot, and scales and biases of the keys 8 h + TILE_ROW, [h][2][NS].
  template <typename Rows, bool ACROSS>
  METAL_FUNC void words(const threadgroup uint* slot, thread uint* w) const {
    EACH(t, UK) tile<Rows::WORDS, ACROSS>(slot, 16 * t, w + t * (Rows::WORDS / 2));
  }
  template <typename Rows>
  METAL_FUNC void scales(const threadgroup uint* slot, thread uint* sb) const {
    EACH(h, 2 * UK) {
      const threadgroup uint2* p = (const threadgroup uint2*)(slot + KEYS * Rows::WORDS) + (8 * h + TILE_ROW(lane)) * Rows::NS;
      EACH(i, Rows::NS) {
        const uint2 x = p[i];
        sb[(h * Rows::NS + i) * 2] = x.x;
        sb[(h * Rows::NS + i) * 2 + 1] = x.y;
      }
    }
  }
};
