// Rows in memory, plain or of codes, as operands of mma16.

// NW words; WIDE: p is aligned for a vector of them.
template <int NW, bool WIDE, typename Data>
METAL_FUNC void load_run(const device Data* p, thread uint* w) {
  if (WIDE && NW == 4) {
    const uint4 v = *(const device uint4*)p;
    w[0] = v.x; w[1] = v.y; w[2] = v.z; w[3] = v.w;
  } else if (WIDE && NW == 2) {
    const uint2 v = *(const device uint2*)p;
    w[0] = v.x; w[1] = v.y;
  } else if (WIDE || sizeof(Data) == 4) {
    UNROLL for (int i = 0; i < NW; i++) w[i] = ((const device uint*)p)[i];
  } else {
    const device ushort* h = (const device ushort*)p;
    UNROLL for (int i = 0; i < NW; i++) w[i] = h[2 * i] | uint(h[2 * i + 1]) << 16;
  }
}

// Eight elements of a run of codes.
template <typename T, int BITS>
METAL_FUNC void decode(const thread uint* w, const int j, const float2 sb, const uint one, thread float* v) {
  decode8<BITS>(w, j, one, v);
  UNROLL for (int i = 0; i < 8; i++) {
    const float s = sb.x * unscale<BITS>(i);
    if (!AFFINE) v[i] *= s;
    // Floats have more digits than the 1024 leaves them: take it out exactly.
    else if (sizeof(T) == 4) v[i] = fma(v[i] - 1024, s, sb.y);
    else v[i] = fma(v[i], s, fma(-1024.0f, s, sb.y));
  }
}

// Tensor cores take half the work to decode 4 bits if both halves of a register are done at once.
#ifdef MSL_TENSOR_CORES
#define CODES4(BITS, T) (AFFINE && BITS == 4 && sizeof(T) == 2)
#else
#define CODES4(BITS, T) false
#endif
// The other element of pair i is so far behind.
template <int BITS>
METAL_FUNC constexpr int partner() { return BITS == 4 ? 4 : 1; }
template <int BITS>
METAL_FUNC constexpr int element(const int i) { return BITS == 4 ? i / 4 * 8 + i % 4 : 2 * i; }

// Unit j of a run, E elements, in pairs.
template <typename T, int BITS, int E>
METAL_FUNC void along(
    const thread uint* w, const int j, const float2 sb, const uint one, thread PAIR(T)* a) {
  if (CODES4(BITS, T)) {
#ifdef MSL_TENSOR_CORES
    UNROLL for (int i = 0; i < E / 2; i++)
      a[i] = msl_mma<T>::codes4(w[j] >> 4 * i, one, pair_of<T>(sb.x, sb.x), pair_of<T>(sb.y, sb.y));
#endif
  } else {
    float v[8];
    decode<T, BITS>(w, j, sb, one, v);
    UNROLL for (int i = 0; i < E / 2; i++) a[i] = pair_of<T>(v[element<BITS>(i)], v[element<BITS>(i) + partner<BITS>()]);
  }
}
// A run of 8 columns as the other operand: b[RUN / 2] pairs that meet those of `along`. own: the run
// of this lane in column TILE_ROW. x and y: that of lane TILE_ROW / 2 in the two columns of a tile
// that this lane holds. Tensor cores want the one, others have the other.
template <typename T, int BITS, int RUN, bool WIDE, typename Data>
METAL_FUNC void load_columns(
    const device Data* own, const device Data* x, const device Data* y, const int row, thread PAIR(T)* b) {
#ifdef MSL_TENSOR_CORES
  if (sizeof(T) == 2) {
    UNROLL for (int j = 0; j < RUN; j += 8) {
      uint w[4];
      load_run<RUN < 8 ? RUN / 2 : 4, WIDE>(own + j, w);
      UNROLL for (int i = 0; i < (RUN < 8 ? RUN / 2 : 4); i++)
        b[j / 2 + i] = partner<BITS>() == 4 ? pair_across<T>(w, w + 2, i) : pair_at<T>(w, i);
    }
    return;
  }
#endif
  const int k = row % 2 * partner<BITS>();
  UNROLL for (int i = 0; i < RUN / 2; i++)
    b[i] = to_b<T>(pair_of<T>(float(x[element<BITS>(i) + k]), float(y[element<BITS>(i) + k])));
}
