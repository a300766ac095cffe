// Codes as operands, and rows of them on their way through threadgroup memory, for qmm_codes.h.

// A code becomes a number of T by standing in the low bits of one.
template <typename T> METAL_FUNC constexpr float code_base() { return 1024; }
template <> METAL_FUNC constexpr float code_base<float>() { return 0; }
// K is never negative, but a compiler can't know: the bits stay in a register.
template <typename T> METAL_FUNC uint code_bits(const int K) { return K < 0 ? 0 : 0x64006400; }
#ifdef MSL_TENSOR_CORES
template <> METAL_FUNC constexpr float code_base<bfloat>() { return 128; }
template <> METAL_FUNC uint code_bits<bfloat>(const int K) { return K < 0 ? 0 : 0x43004300; }
// The codes in bits 0..3 and 16..19 of w.
template <typename T> METAL_FUNC PAIR(T) code_pair(const uint w, const uint one) { return (w & 0x000f000f) | one; }
template <typename T> METAL_FUNC PAIR(T) pair_times(const PAIR(T) a, const PAIR(T) b) { return msl_mma<T>::times(a, b); }
template <typename T> METAL_FUNC void set_ones(thread PAIR(T)* a) { msl_mma<T>::ones(a); }
#else
template <typename T> METAL_FUNC PAIR(T) code_pair(const uint w, const uint one) {
  const half2 h = as_type<half2>((w & 0x000f000f) | one);
  return pair_of<T>(h.x, h.y);
}
template <typename T> METAL_FUNC PAIR(T) pair_times(const PAIR(T) a, const PAIR(T) b) { return a * b; }
template <typename T> METAL_FUNC void set_ones(thread PAIR(T)* a) {
  UNROLL for (int i = 0; i < 4; i++) a[i] = pair_of<T>(1.0f, 1.0f);
}
#endif
template <> METAL_FUNC float2 code_pair<float>(const uint w, const uint one) {
  const half2 h = as_type<half2>((w & 0x000f000f) | one);
  return float2(float(h.x) - 1024, float(h.y) - 1024);
}
// The other code of a pair is so far behind.
template <int bits> METAL_FUNC constexpr int code_partner() { return 16 / bits; }

// Where a simdgroup's tiles lie: rows 0 to 7 of tile t are those of w from first + t step on, `stride` apart,
// rows 8 to 15 those of w2 from second + t step on. So a lane has the sums of both rows of a pair.
template <typename T>
struct Tiles {
  const device uint *w, *w2;
  const device T *s, *s2, *b, *b2;
  int first, second, step, stride;
};
template <typename T>
METAL_FUNC Tiles<T> tiles_at(
    const device uint* w, const device T* s, const device T* b, const device uint* w2, const device T* s2,
    const device T* b2, const int first, const int second, const int step, const int stride) {
  Tiles<T> at;
  at.w = w; at.s = s; at.b = b;
  at.w2 = w2; at.s2 = s2; at.b2 = b2;
  at.first = first; at.second = second; at.step = step; at.stride = stride;
  return at;
}
// Tiles of neighbours, from `row` on.
template <typename T>
METAL_FUNC Tiles<T> tiles_at(const device uint* w, const device T* s, const device T* b, const int row) {
  return tiles_at(w, s, b, w, s, b, row, row + 8, 16, 1);
}
// Row i of the tiles.
METAL_FUNC bool in_first(const int i) { return i % 16 < 8; }
template <typename T>
METAL_FUNC int tile_row(const Tiles<T> at, const int i) {
  return (in_first(i) ? at.first : at.second) + i / 16 * at.step + i % 8 * at.stride;
}

// A step is U groups of each row. Words of a row's codes and scales there, of all rows' in a stage.
template <int bits, int group, int U> METAL_FUNC constexpr int code_words() { return U * group * bits / 32; }
template <typename T, int U> METAL_FUNC constexpr int scale_words() { return U * sizeof(T) / 4; }
template <typename T, int bits, int group, int R, int U>
METAL_FUNC constexpr int stage_words() { return 16 * R * (code_words<bits, group, U>() + 2 * scale_words<T, U>()); }
// Chunks of 16 bytes change places, so that eight rows at once come from different banks.
template <int RW> METAL_FUNC constexpr int chunk_turn(const int row) { return row * RW / 32 * 2 % (RW / 4); }

// Copies of NW words, in the background where the hardware can.
#ifdef MSL_TENSOR_CORES
#define COPY_DONE(n) msl_copy_wait<n>()
#define COPY_NEXT() msl_copy_commit()
#else
#define COPY_DONE(n)
#define COPY_NEXT()
#endif
template <int NW, bool WIDE, typename Data>
METAL_FUNC void copy_run(threadgroup uint* to, const device Data* p) {
#ifdef MSL_TENSOR_CORES
  if (WIDE) {
    msl_copy<4 * NW>(to, p);
    return;
  }
#endif
  uint w[NW];
  load_run<NW, WIDE>(p, w);
  UNROLL for (int i = 0; i < NW; i++) to[i] = w[i];
}
// Where a lane's copies begin: chunk c of every ROWS-th row's codes, and a row's scales or biases.
template <int RW> METAL_FUNC constexpr int round_rows() { return 128 / RW; }
template <typename T, int bits, int group, int R, int U>
struct Feed {
  const device uint* w[16 * R / round_rows<code_words<bits, group, U>()>()];
  const device T* s[R];
};
template <typename T, int bits, int group, int R, int U>
METAL_FUNC Feed<T, bits, group, R, U> feed_at(const Tiles<T> at, const int K, const uint lane) {
  const int RW = code_words<bits, group, U>(), ROWS = round_rows<RW>();
  Feed<T, bits, group, R, U> f;
  UNROLL for (int j = 0; j < 16 * R; j += ROWS) {
    const int row = j + lane / (RW / 4);
    f.w[j / ROWS] = (in_first(row) ? at.w : at.w2) + (size_t)tile_row(at, row) * (K / 32 * bits) + lane % (RW / 4) * 4;
  }
  UNROLL for (int j = 0; j < R; j++) {
    const int i = j * 32 + lane, row = i % (16 * R);
    f.s[j] = (i < 16 * R ? (in_first(row) ? at.s : at.s2) : in_first(row) ? at.b : at.b2) +
             (size_t)tile_row(at, row) * (K / group);
  }
  return f;
}
// A step of all rows: codes [16 R][code_words], then scales and biases [2][16 R][scale_words].
template <typename T, int bits, int group, int R, int U, bool WIDE>
METAL_FUNC void load_stage(
    const Feed<T, bits, group, R, U> from, threadgroup uint* stage, const int step, const uint lane) {
  const int RW = code_words<bits, group, U>(), NS = scale_words<T, U>(), ROWS = round_rows<RW>();
  const int row = lane / (RW / 4), c = lane % (RW / 4) ^ chunk_turn<RW>(row);
  UNROLL for (int j = 0; j < 16 * R; j += ROWS)
    copy_run<4, WIDE>(stage + (j + row) * RW + (c ^ chunk_turn<RW>(j)) * 4, from.w[j / ROWS] + step * RW);
  UNROLL for (int j = 0; j < R; j++)
    copy_run<NS, WIDE>(stage + 16 * R * RW + (j * 32 + lane) * NS, from.s[j] + step * U);
}
// The same words back, aligned for vectors of two or four.
template <int NW>
METAL_FUNC void read_run(const threadgroup uint* p, thread uint* w) {
  if (NW % 4 == 0) {
    UNROLL for (int i = 0; i < NW; i += 4) {
      const uint4 v = *(const threadgroup uint4*)(p + i);
      w[i] = v.x; w[i + 1] = v.y; w[i + 2] = v.z; w[i + 3] = v.w;
    }
  } else if (NW == 2) {
    const uint2 v = *(const threadgroup uint2*)p;
    w[0] = v.x; w[1] = v.y;
  } else {
    w[0] = p[0];
  }
}
template <typename T>
METAL_FUNC float scale_at(const thread uint* w, const int u) {
  const vec<T, 2> v = as_type<vec<T, 2>>(w[u / 2]);
  return float(u % 2 ? v.y : v.x);
}
template <>
METAL_FUNC float scale_at<float>(const thread uint* w, const int u) { return as_type<float>(w[u]); }
