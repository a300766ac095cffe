// Decode attention where keys and values are one array kv [2 B, Hkv, k_len, D], keys first, and those of
// the last tokens lie beside it in recent [2 B, Hkv, room, D] and fresh [2 B, Hkv, q_len, D]
// (sdpa_recent.h): a step writes nothing to the cache. kept: recent of the next step, which the last
// threadgroups of a head copy. lens [3, B]: keys that there are, the place in kv from which on recent ones
// count, and that of the step's first. Every row lies behind the one before: nothing asks for strides.
// Masks have kernels with strides.

// All recent rows in one place, for the next step to find as `before`. index: among `threads`.
template <typename T, int D>
METAL_FUNC void keep(
    const thread Recent<T, D>& r, device T* kept, const bool wide, const int index, const int threads) {
  const int V = 16 / sizeof(T), C = D / V, all = (r.stop - r.held) * C;
  if (!wide) {
    for (int i = index; i < all * V; i += threads) kept[i] = recent_row<D>(RECENT_OF(r), r.held + i / D)[i % D];
    return;
  }
  // Several loads before the first store, which would wait for its own.
  for (int first = index; first < all; first += 4 * threads) {
    uint4 w[4];
    UNROLL for (int i = 0; i < 4; i++) {
      const int c = min(first + i * threads, all - 1);
      w[i] = *(const device uint4*)(recent_row<D>(RECENT_OF(r), r.held + c / C) + c % C * V);
    }
    UNROLL for (int i = 0; i < 4; i++) {
      const int c = first + i * threads;
      if (c < all) *(device uint4*)(kept + c * V) = w[i];
    }
  }
}

// Keys and values of a kv head, and where their rows lie in kv.
template <typename T, int D>
struct Heads {
  const device T *keys, *values;
  Recent<T, D> k, v;
  bool wide;
};
template <typename T, int D, typename Ints, typename Lens>
METAL_FUNC Heads<T, D> heads_at(
    const device T* kv, const device T* recent, const device T* fresh, const Ints shape, const int room, const int q_len,
    const Lens lens, const uint z) {
  const uint b = z / shape[1], half_of = uint(shape[0] / 2) * shape[1];
  const int B = shape[0] / 2, now = lens[2 * B + b], held = max(int(lens[B + b]), now + q_len - room);
  const size_t head = (size_t)shape[2] * D, v = (size_t)(half_of + z);
  return {kv + z * head, kv + v * head,
          {recent + (size_t)z * room * D, fresh + (size_t)z * q_len * D, held, now, now + q_len},
          {recent + v * room * D, fresh + v * q_len * D, held, now, now + q_len},
          ALIGNED(kv, 16) && ALIGNED(recent, 16) && ALIGNED(fresh, 16)};
}

//! kernel sdpa_split_joint (q, kv, recent, fresh, sinks, lens, numbers) -> (out, ml, kept)
typedef Sdpa<T, D, DV, 16, 64, 16, 64, L, U, R, KP, W, CHUNK, MASK, SINKS, DIRECT, true> X;
threadgroup float part[KP * W * (DV + 8)];
threadgroup float state[KP * W * R * 2];
const uint3 tg = threadgroup_position_in_grid, groups = threadgroups_per_grid;
const int room = recent_shape[2], q_len = q_shape[2];
const Heads<T, D> h = heads_at<T, D>(kv, recent, fresh, kv_shape, room, q_len, lens, tg.z);
if (tg.y + 1 == groups.y) {
  const size_t values = (size_t)(kv_shape[0] / 2) * kv_shape[1] + tg.z;
  const int index = thread_position_in_grid.x, threads = threads_per_grid.x;
  keep(h.k, kept + (size_t)tg.z * room * D, h.wide, index, threads);
  keep(h.v, kept + values * room * D, h.wide, index, threads);
} else {
  const Place at = place<CHUNK, W, WINDOW>(
      q_shape, kv_shape, lens[tg.z / kv_shape[1]], numbers, tg, simdgroup_index_in_threadgroup,
      thread_index_in_simdgroup);
  const typename X::K kr = {h.keys, kv, kv, D, 0, 0, {RECENT_OF(h.k), h.k.stop}};
  const typename X::V vr = {h.values, kv, kv, D, 0, 0, {RECENT_OF(h.v), h.v.stop}};
  const int one = q_len * D;
  X::run(
      q, int3(at.Hq * one, one, D), numbers[0], kr, vr, ALIGNED(q, 16) && h.wide, numbers, int4(0), sinks, out, ml, part,
      state, at);
}

//! kernel sdpa_matrix_joint (q, kv, recent, fresh, sinks, lens, numbers) -> (out, ml, kept)
typedef SdpaMatrix<T, D, DV, 16, 64, 16, 64, R, KP, W, CHUNK, U / 16, MASK, SINKS, DIRECT, AHEAD, true> X;
threadgroup float part[KP * W * R * X::Merge::P];
threadgroup float state[KP * W * R * 2];
threadgroup uint4 ring[1];
const uint3 tg = threadgroup_position_in_grid, groups = threadgroups_per_grid;
const int room = recent_shape[2], q_len = q_shape[2];
const Heads<T, D> h = heads_at<T, D>(kv, recent, fresh, kv_shape, room, q_len, lens, tg.z);
if (tg.y + 1 == groups.y) {
  const size_t values = (size_t)(kv_shape[0] / 2) * kv_shape[1] + tg.z;
  const int index = thread_position_in_grid.x, threads = threads_per_grid.x;
  keep(h.k, kept + (size_t)tg.z * room * D, h.wide, index, threads);
  keep(h.v, kept + values * room * D, h.wide, index, threads);
} else {
  const Place at = place<CHUNK, W, WINDOW>(
      q_shape, kv_shape, lens[tg.z / kv_shape[1]], numbers, tg, simdgroup_index_in_threadgroup,
      thread_index_in_simdgroup);
  const typename X::K kr = {(const device uchar*)h.keys, nullptr, nullptr, int(D * sizeof(T)), 0, 0, {RECENT_OF(h.k), h.k.stop}};
  const typename X::V vr = {(const device uchar*)h.values, nullptr, nullptr, int(D * sizeof(T)), 0, 0, {RECENT_OF(h.v), h.v.stop}};
  const int one = q_len * D;
  X::run(
      q, int3(at.Hq * one, one, D), numbers[0], kr, vr, ALIGNED(q, 16) && h.wide, numbers, int4(0), sinks, out, ml, part,
      state, ring, at, int(groups.y) - 1);
}
