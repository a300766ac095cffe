// Rows in memory as the second operand of mma16.

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

// A run of columns: b[RUN / 2] pairs. own: the run of this lane in column TILE_ROW. x and y: that of lane
// TILE_ROW / 2 in the two columns of a tile that this lane holds. Tensor cores want the one, others have
// the other. fetch_columns can be early, arrange makes b of what it brought. P: how far behind the other
// element of a pair is.
template <typename T, int P, int RUN, bool WIDE, typename Data>
METAL_FUNC void fetch_columns(
    const device Data* own, const device Data* x, const device Data* y, const int row, thread PAIR(T)* b) {
#ifdef MSL_TENSOR_CORES
  if (sizeof(T) == 2) {
    UNROLL for (int j = 0; j < RUN; j += 8) {
      uint w[4];
      load_run<RUN < 8 ? RUN / 2 : 4, WIDE>(own + j, w);
      UNROLL for (int i = 0; i < (RUN < 8 ? RUN / 2 : 4); i++) b[j / 2 + i] = pair_at<T>(w, i);
    }
    return;
  }
#endif
  UNROLL for (int i = 0; i < RUN / 2; i++) {
    const int k = i / P * 2 * P + i % P + row % 2 * P;
    b[i] = to_b<T>(pair_of<T>(float(x[k]), float(y[k])));
  }
}
#ifdef MSL_TENSOR_CORES
METAL_FUNC uint halves_of(const uint a, const uint b, const int i) {
  return i % 2 ? msl_high_halves(a, b) : msl_low_halves(a, b);
}
METAL_FUNC float2 halves_of(const float2 a, const float2 b, const int i) { return i % 2 ? b : a; }
#endif
template <typename T, int P, int RUN>
METAL_FUNC void arrange(const thread PAIR(T)* f, thread PAIR(T)* b) {
  UNROLL for (int i = 0; i < RUN / 2; i++) {
#ifdef MSL_TENSOR_CORES
    if (P > 1 && sizeof(T) == 2) {
      const int j = i / P * P + i % P / 2;
      b[i] = halves_of(f[j], f[j + P / 2], i);
    } else
#endif
      b[i] = f[i];
  }
}
