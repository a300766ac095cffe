// Where a threadgroup of a decode-attention kernel is, and what its rows may see.
struct Place {
  int b, kv, head, Hq, G, q_len, len, window, chunk, chunks, block, sg, lane;
  float causal;  // compared where it matters, as it comes from memory
};
// numbers: scale, window (0: none), causal. head: the first query head of the kv head. block: the
// first of the W row blocks. chunk: where a threadgroup begins, in sdpa_matrix by the number of a run.
// ALONE, ONE: a batch and a q_len of 1, known to the compiler as G is: no divisions before the first load.
template <int CHUNK, int W, bool WINDOW, int G, bool ALONE, bool ONE, typename Heads, typename Ints, typename Floats>
METAL_FUNC Place place(
    const Heads q_shape, const Ints k_shape, const int len, const Floats numbers, const uint3 tg,
    const uint sg, const uint lane) {
  const uint b = ALONE ? 0 : tg.z / uint(k_shape[1]);
  const int kv = tg.z - b * k_shape[1], k_len = k_shape[2];
  // Told to be the same in all lanes, so loops of a simdgroup are no divergent branches.
  const int same = simd_broadcast_first(sg);
  return {int(b), kv, kv * G, q_shape[1], G, ONE ? 1 : q_shape[2], min(k_len, len), WINDOW ? int(numbers[1]) : 0,
          int(tg.y), (k_len + CHUNK - 1) / CHUNK, int(tg.x) * W, same, int(lane), numbers[2]};
}

// A query row of the kv head: its head there, its position, the keys from <= key < to it sees.
struct Row {
  int head, i, from, to;
};
METAL_FUNC Row row_at(const thread Place& at, const int row) {
  const int n = min(row, at.G * at.q_len - 1), i = n % at.q_len, end = at.len - at.q_len + i + 1;
  return {n / at.q_len, i, at.window ? end - at.window : 0, at.causal ? end : at.len};
}
// Where the state of row n of the kv head lies, one of each FOLD chunks.
template <int FOLD>
METAL_FUNC size_t state_at(const thread Place& at, const int n, const int chunk) {
  const size_t row = (size_t)(at.b * at.Hq + at.head) * at.q_len + n;
  return row * ((at.chunks + FOLD - 1) / FOLD) + chunk / FOLD;
}

// What a mask adds to a score, and its strides: dimensions of size 1 are there for everyone. Views may
// run backwards, so strides have signs.
template <typename A>
METAL_FUNC float added(const A m) { return float(m); }
METAL_FUNC float added(const bool m) { return m ? 0.0f : -INFINITY; }
template <typename Ints, typename Longs>
METAL_FUNC int4 mask_steps(const Ints shape, const Longs strides) {
  return int4(
      shape[0] == 1 ? 0 : strides[0], shape[1] == 1 ? 0 : strides[1], shape[2] == 1 ? 0 : strides[2],
      shape[3] == 1 ? 0 : strides[3]);
}

// May rows at p be read in steps of 16 bytes.
template <typename At, typename Longs>
METAL_FUNC bool even(const At p, const Longs s) {
  return ALIGNED(p, 16) & ALIGNED(p + s[0], 16) & ALIGNED(p + s[1], 16) & ALIGNED(p + s[2], 16);
}
