// Rows of codes in memory as operands of mma16.

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
// Both parts at once, with pairs that meet those of `along`.
template <typename T, int BITS, int RUN, bool WIDE, typename Data>
METAL_FUNC void load_columns(
    const device Data* own, const device Data* x, const device Data* y, const int row, thread PAIR(T)* b) {
  PAIR(T) f[RUN / 2];
  fetch_columns<T, partner<BITS>(), RUN, WIDE>(own, x, y, row, f);
  arrange<T, partner<BITS>(), RUN>(f, b);
}
