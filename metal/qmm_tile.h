// A tile of y = x W^T on matrix units: BM rows of x times BN rows of W by SM * SN simdgroups, BK of K
// at a time. Weights are decoded once, into threadgroup memory. There 32 of K are a block of rows, 64
// bytes each where elements have 16 bits, and nothing is padded. Tensor cores load eight rows of 16
// bytes at once, from all banks as the 16 bytes of a row change places. Others take 16 bytes a lane, in
// one run of memory; there rows of W stand in pairs, and both sides take k in another order.
#ifdef MSL_TENSOR_CORES
#define TILE_NATURAL(T) (sizeof(T) == 2)
#else
#define TILE_NATURAL(T) false
#endif
template <typename Any> METAL_FUNC void load_tiles(const threadgroup uint4* p, thread Any* w) {}
#ifdef MSL_TENSOR_CORES
METAL_FUNC void load_tiles(const threadgroup uint4* p, thread uint* w) { msl_load_tiles(p, w); }
#endif
// A unit is what a thread brings at once: 8 elements of a row of x, 8 of each of two rows of W.
#define X_UNITS (BM * BK / 8 / (SM * SN * 32))
#define W_UNITS (BN * BK / 16 / (SM * SN * 32))

// A quantised matrix, or a plain one: bits is 0, w has elements of T, s and b are not read.
template <typename S, typename B>
struct Matrix {
  const device uint* w;
  const device S* s;
  const device B* b;
};

template <typename T>
struct Row { const device T* p; };

// Unit i of a thread: which row of BM rows it belongs to, which block of 32 of K.
template <int ROWS>
METAL_FUNC int unit_row(const int i, const int threads, const int id) {
  return threads > 4 * ROWS ? id / 4 % ROWS : i * (threads / 4) % ROWS + id / 4;
}
template <int ROWS>
METAL_FUNC int unit_block(const int i, const int threads, const int id) {
  return i * (threads / 4) / ROWS + (threads > 4 * ROWS ? id / 4 / ROWS : 0);
}
// Row of the tile whose elements it has, of x; of W the first of its two rows.
template <int BM>
METAL_FUNC int x_row(const int i, const int threads, const int id) { return unit_row<BM>(i, threads, id); }
template <typename T, int BN>
METAL_FUNC int w_row(const int i, const int threads, const int id) {
  return unit_row<BN / 2>(i, threads, id) * (TILE_NATURAL(T) ? 1 : 2);
}
// The second is so far behind.
template <typename T, int BN>
METAL_FUNC constexpr int w_pair() { return TILE_NATURAL(T) ? BN / 2 : 1; }
// Vectors before those of 8 elements of row `row` of a block.
template <typename T>
METAL_FUNC int place(const int row, const int eight) {
  return (row * 4 + (TILE_NATURAL(T) ? eight ^ row / 2 % 4 : eight)) * (sizeof(T) / 2);
}
// Where accumulator i of [MI][NI][4] stands in the tile. A lane has two neighbours of a row.
template <int BM, int SM, int SN, int NI>
METAL_FUNC int y_row(const int i, const uint sg, const uint lane) {
  return sg / SN * (BM / SM) + i / 4 / NI * 16 + i % 4 / 2 * 8 + TILE_ROW(lane);
}
template <int BN, int SN, int NI>
METAL_FUNC int y_col(const int i, const uint sg, const uint lane) {
  return sg % SN * (BN / SN) + i / 4 % NI * 8 + TILE_COL(lane) * 2 + i % 2;
}

// Eight elements of a row as words. WIDE: aligned, and all there; else 0 from `left` on.
template <typename T, bool WIDE>
METAL_FUNC void fetch8(const device T* p, const int left, thread uint* w) {
  if (WIDE) {
    UNROLL for (int v = 0; v < int(sizeof(T)) / 2; v++) {
      const uint4 u = ((const device uint4*)p)[v];
      w[4 * v] = u.x; w[4 * v + 1] = u.y; w[4 * v + 2] = u.z; w[4 * v + 3] = u.w;
    }
  } else if (sizeof(T) == 4) {
    UNROLL for (int i = 0; i < 8; i++) w[i] = i < left ? ((const device uint*)p)[i] : 0;
  } else {
    const device ushort* h = (const device ushort*)p;
    UNROLL for (int i = 0; i < 4; i++)
      w[i] = (2 * i < left ? h[2 * i] : 0) | (2 * i + 1 < left ? uint(h[2 * i + 1]) << 16 : 0);
  }
}

template <int V>
METAL_FUNC void read_run(const threadgroup uint4* p, thread uint* w) {
  UNROLL for (int v = 0; v < V; v++) {
    const uint4 u = p[v];
    w[4 * v] = u.x; w[4 * v + 1] = u.y; w[4 * v + 2] = u.z; w[4 * v + 3] = u.w;
  }
}

// Two values in a word. natural: pairs (i, i + 4) of eight values as pairs of neighbours.
#ifdef MSL_TENSOR_CORES
template <typename T> METAL_FUNC uint two(const float a, const float b) { return msl_mma<T>::pack(a, b); }
METAL_FUNC void natural(const thread uint* p, thread uint* d) {
  d[0] = msl_low_halves(p[0], p[1]); d[1] = msl_low_halves(p[2], p[3]);
  d[2] = msl_high_halves(p[0], p[1]); d[3] = msl_high_halves(p[2], p[3]);
}
#else
template <typename T> METAL_FUNC uint two(const float a, const float b) { return as_type<uint>(vec<T, 2>(T(a), T(b))); }
#endif
template <typename Any> METAL_FUNC void natural(const thread Any* p, thread uint* d) {}
template <> METAL_FUNC uint two<float>(const float a, const float b) { return 0; }

// Words of a row that hold a unit, from the byte on where it begins; plain elements as they are.
template <typename T, int bits>
METAL_FUNC constexpr int unit_words() { return bits == 0 ? 2 * sizeof(T) : bits == 2 || bits == 4 ? 1 : 2; }

// Unit of two rows: q is [2][unit_words], raw, so that nothing waits for it before it is decoded. fresh:
// another group than that of the last step.
template <typename T, int bits, int group, bool WIDE, typename S, typename B>
METAL_FUNC void fetch_w(
    const thread Matrix<S, B>* rows, const uint k, const uint K, const int left, const bool fresh, thread uint* q,
    thread S* s, thread B* b) {
  const int NW = unit_words<T, bits>();
  const uint at = k / 8 * bits / 4, g = k / (bits == 0 ? 1 : group);
  UNROLL for (int r = 0; r < 2; r++) {
    if (bits == 0) {
      fetch8<T, WIDE>((const device T*)rows[r].w + k, left, q + r * NW);
    } else {
      q[r * NW] = rows[r].w[at];
      // The last codes of a row need no further word.
      if (NW == 2) q[r * NW + 1] = rows[r].w[min(at + 1, K / 8 * bits / 4 - 1)];
      if (fresh) s[r] = rows[r].s[g];
      if (fresh && AFFINE) b[r] = rows[r].b[g];
    }
  }
}

// The same unit decoded into threadgroup memory, row by row (the second `behind` vectors after the
// first) or in pairs of rows.
template <typename T, int bits, int group, typename S, typename B>
METAL_FUNC void put_w(
    const thread uint* q, const thread S* s, const thread B* b, const int k, const uint one,
    threadgroup uint4* to, const int behind) {
  const int V = sizeof(T) / 2, NW = unit_words<T, bits>(), BITS = bits == 0 ? 4 : bits;
  const bool NATURAL = TILE_NATURAL(T);
  uint d[8 * V];
  float v[16];
  if (bits == 0) {
    UNROLL for (int i = 0; i < 4 * V; i++) {
      if (NATURAL) { d[i] = q[i]; d[4 * V + i] = q[NW + i]; }
      else if (V == 2) { d[2 * i] = q[i]; d[2 * i + 1] = q[NW + i]; }
      else { d[2 * i] = (q[i] & 0xffff) | q[NW + i] << 16; d[2 * i + 1] = q[i] >> 16 | (q[NW + i] & 0xffff0000); }
    }
  } else {
    const int shift = k / 8 * bits % 4 * 8;
    UNROLL for (int r = 0; r < 2; r++) {
      uint c[2];
      c[0] = q[r * NW];
      c[1] = NW == 2 ? q[r * NW + NW - 1] : 0;
      if (bits == 2) c[0] >>= shift;
      if (bits == 3 || bits == 5 || bits == 6) {
        c[0] = c[0] >> shift | c[1] << 1 << (31 - shift);
        c[1] >>= shift;
      }
      const float2 sb = float2(group_scale<group, BITS>(s[r]), AFFINE ? float(b[r]) : 0);
      if (NATURAL && CODES4(BITS, T)) {
        PAIR(T) p[4];
        along<T, BITS, 8>(c, 0, sb, one, p);
        natural(p, d + 4 * r);
      } else {
        decode<T, BITS>(c, 0, sb, one, v + 8 * r);
        UNROLL for (int i = 0; NATURAL && i < 4; i++) d[4 * r + i] = two<T>(v[8 * r + 2 * i], v[8 * r + 2 * i + 1]);
      }
    }
    UNROLL for (int i = 0; !NATURAL && i < 8; i++) {
      if (V == 1) { d[i] = two<T>(v[i], v[8 + i]); }
      else { d[2 * i % (8 * V)] = as_type<uint>(v[i]); d[(2 * i + 1) % (8 * V)] = as_type<uint>(v[8 + i]); }
    }
  }
  UNROLL for (int i = 0; i < 2 * V; i++)
    to[NATURAL && i >= V ? behind + i - V : i] = uint4(d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]);
}

// Rows of x, as mma16 has them, times 8 rows of W.
template <typename T, int MI, int NI>
METAL_FUNC void multiply_columns(thread float* acc, const thread PAIR(T)* a, const PAIR(T) b0, const PAIR(T) b1) {
  UNROLL for (int i = 0; i < MI; i++)
    mma16<T>(acc + i * NI * 4, a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3], b0, b1);
}

// acc [MI][NI][4] += the tile's x times its W, both in threadgroup memory. NI is even.
template <typename T, int BM, int BN, int BK, int SM, int SN>
METAL_FUNC void multiply_tile(
    const threadgroup uint4* xs, const threadgroup uint4* ws, thread float* acc, const uint sg, const uint lane) {
  const int V = sizeof(T) / 2, MI = BM / SM / 16, NI = BN / SN / 8;
  const int row = TILE_ROW(lane), col = TILE_COL(lane), m0 = sg / SN * (BM / SM), n0 = sg % SN * (BN / SN);
  UNROLL for (int block = 0; block < BK / 32; block++) {
    PAIR(T) a[2][MI * 4];
    if (TILE_NATURAL(T)) {
      // 16 of K after the other: few registers hold fragments.
      UNROLL for (int j = 0; j < 2; j++) {
        const threadgroup uint4* p = xs + (block * BM + m0) * 4 + place<T>(lane % 16, 2 * j + lane / 16);
        const threadgroup uint4* q = ws + (block * BN + n0) * 4 + place<T>(lane / 16 * 8 + lane % 8, 2 * j + lane / 8 % 2);
        UNROLL for (int i = 0; i < MI; i++) load_tiles(p + i * 64, a[j] + 4 * i);
        UNROLL for (int n = 0; n < NI; n += 2) {
          PAIR(T) b[4];
          load_tiles(q + n * 32, b);
          multiply_columns<T, MI, NI>(acc + n * 4, a[j], b[0], b[1]);
          multiply_columns<T, MI, NI>(acc + n * 4 + 4, a[j], b[2], b[3]);
        }
      }
    } else {
      UNROLL for (int i = 0; i < 2 * MI; i++) {
        uint w[4 * V];
        read_run<V>(xs + ((block * BM + m0 + 8 * i + row) * 4 + col) * V, w);
        UNROLL for (int s = 0; s < 4; s++)
          a[s / 2][i / 2 * 4 + s % 2 * 2 + i % 2] = pair_across<T>(w, w + sizeof(T), s);
      }
      UNROLL for (int n = 0; n < NI; n++) {
        uint w[4 * V];
        read_run<V>(ws + (((block * BN + n0 + 8 * n) / 2 + col) * 8 + row) * V, w);
        UNROLL for (int j = 0; j < 2; j++)
          multiply_columns<T, MI, NI>(acc + n * 4, a[j], pair_at<T>(w, 2 * j), pair_at<T>(w, 2 * j + 1));
      }
    }
  }
}

// Registers of a thread between device and threadgroup memory.
template <typename T, int bits, int UX, int UW, typename S, typename B>
struct Units {
  uint x[UX * 2 * sizeof(T)];
  uint w[UW * 2 * unit_words<T, bits>()];
  S s[UW * 2];
  B b[UW * 2];
};

template <typename T, int bits, int group, int BM, int BN, int BK, int TH, int UX, int UW, bool WIDE, typename S, typename B>
METAL_FUNC void fetch_units(
    const thread Row<T>* x, const thread Matrix<S, B>* w, const int k, const int K, const int end, const bool fresh,
    const int id, thread Units<T, bits, UX, UW, S, B>* to) {
  const int NX = 2 * sizeof(T), NW = 2 * unit_words<T, bits>();
  // Behind the end of K its last elements are taken again.
  UNROLL for (int i = 0; i < UX; i++) {
    const int at = k + unit_block<BM>(i, TH, id) * 32 + id % 4 * 8;
    fetch8<T, WIDE>(x[i].p + (WIDE ? min(at, K - 8) : at), end - at, to->x + i * NX);
  }
  UNROLL for (int i = 0; i < UW; i++) {
    const int at = k + unit_block<BN / 2>(i, TH, id) * 32 + id % 4 * 8;
    fetch_w<T, bits, group, WIDE>(
        w + 2 * i, WIDE || bits != 0 ? min(at, K - 8) : at, K, end - at, fresh, to->w + i * NW, to->s + 2 * i,
        to->b + 2 * i);
  }
}

// x in rows, then W.
template <typename T, int bits, int group, int BM, int BN, int BK, int TH, int UX, int UW, typename S, typename B>
METAL_FUNC void put_units(
    const thread Units<T, bits, UX, UW, S, B>* from, threadgroup uint4* to, const uint one, const int id) {
  const int V = sizeof(T) / 2, NW = 2 * unit_words<T, bits>(), eight = id % 4;
  UNROLL for (int i = 0; i < UX; i++) {
    const int at = unit_block<BM>(i, TH, id) * BM * 4 * V + place<T>(x_row<BM>(i, TH, id), eight);
    UNROLL for (int v = 0; v < V; v++) {
      const thread uint* q = from->x + (i * V + v) * 4;
      to[at + v] = uint4(q[0], q[1], q[2], q[3]);
    }
  }
  UNROLL for (int i = 0; i < UW; i++) {
    const int r = unit_row<BN / 2>(i, TH, id);
    const int at = (BM * BK / 32 + unit_block<BN / 2>(i, TH, id) * BN) * 4 * V;
    put_w<T, bits, group>(
        from->w + i * NW, from->s + 2 * i, from->b + 2 * i, eight * 8, one,
        to + at + (TILE_NATURAL(T) ? place<T>(r, eight) : (r * 4 + eight) * 2 * V), BN / 2 * 4 * V);
  }
}

// acc [MI][NI][4] = x W^T over K from `first` (a multiple of BK) to `end`. x: the rows of this thread's
// units (x_row); from: the matrix of each of its units of W; rows: their two rows (w_row) in it.
// WIDE: x, and w if plain, can be read in vectors. All rows can be read; those of y that nobody wants
// are the caller's to drop. tile: 2 (BM + BN) BK sizeof(T) / 16 vectors.
template <typename T, int bits, int group, int BM, int BN, int BK, int SM, int SN, bool WIDE, typename S, typename B>
METAL_FUNC void qmm_tile(
    const thread Row<T>* x, const thread Matrix<S, B>* from, const thread uint* rows, thread float* acc,
    threadgroup uint4* tile, const int K, const int first, const int end, const uint sg, const uint lane) {
  const int V = sizeof(T) / 2, TH = SM * SN * 32, UX = X_UNITS, UW = W_UNITS;
  const int XS = BM * BK / 8 * V, ALL = XS + BN * BK / 8 * V, id = sg * 32 + lane;
  const uint one = one_bits(K);
  Units<T, bits, UX, UW, S, B> units;
  Matrix<S, B> w[UW * 2];
  UNROLL for (int i = 0; i < UW * 2; i++) {
    const size_t row = rows[i], G = K / (bits == 0 ? 1 : group);
    w[i].w = from[i / 2].w + row * (bits == 0 ? 0 : uint(K) / 8 * bits / 4);
    if (bits == 0) w[i].w = (const device uint*)((const device T*)from[i / 2].w + row * K);
    w[i].s = from[i / 2].s + row * G;
    w[i].b = from[i / 2].b + row * G;
  }
  UNROLL for (int i = 0; i < BM / SM / 16 * (BN / SN / 8) * 4; i++) acc[i] = 0;
  // The last step, which may be short, comes first: all others are whole.
  const int steps = (end - first + BK - 1) / BK;
  int k = first + (steps - 1) * BK;
  fetch_units<T, bits, group, BM, BN, BK, TH, UX, UW, WIDE>(x, w, k, K, end, true, id, &units);
  UNROLL for (int i = 0; i < UX * 4 * V; i++)
    if (k + unit_block<BM>(i / (4 * V), TH, id) * 32 + id % 4 * 8 >= end) units.x[i] = 0;
  // W too: 0 times an infinity is none.
  UNROLL for (int i = 0; i < UW * 2; i++) {
    if (k + unit_block<BN / 2>(i / 2, TH, id) * 32 + id % 4 * 8 >= end) {
      UNROLL for (int j = 0; j < unit_words<T, bits>(); j++) units.w[i * unit_words<T, bits>() + j] = 0;
      units.s[i] = S(0);
      units.b[i] = B(0);
    }
  }
  put_units<T, bits, group, BM, BN, BK, TH, UX, UW>(&units, tile, one, id);
  if (WIDE) fetch_units<T, bits, group, BM, BN, BK, TH, UX, UW, WIDE>(x, w, first, K, end, true, id, &units);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int now = 0;
  // One step is multiplied, the next goes to threadgroup memory, that behind it is on its way. No
  // branches, so all three can overlap; the last two times around bring what nobody needs.
  for (k = first; k < first + steps * BK; k += BK) {
    const threadgroup uint4* xs = tile + now;
    now = ALL - now;
    if (!WIDE) fetch_units<T, bits, group, BM, BN, BK, TH, UX, UW, WIDE>(x, w, k, K, end, true, id, &units);
    put_units<T, bits, group, BM, BN, BK, TH, UX, UW>(&units, tile + now, one, id);
    const bool fresh = group <= BK || (k + BK) % (group == 0 ? 1 : group) == 0;
    if (WIDE) fetch_units<T, bits, group, BM, BN, BK, TH, UX, UW, WIDE>(x, w, k + BK, K, end, fresh, id, &units);
    multiply_tile<T, BM, BN, BK, SM, SN>(xs, xs + XS, acc, sg, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}
