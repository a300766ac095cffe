// Decode attention where keys and values are one array kv [2 B, Hkv, k_len, ...], keys first, or three: codes,
// scales and biases. Those of the last tokens lie beside it in recent [2 B, Hkv, room, ...] and fresh [2 B,
// Hkv, q_len, ...] (sdpa_recent.h): a step writes nothing to the cache. kept: recent of the next step, which
// the last threadgroups of a head copy. lens [3, B]: keys that there are, the place in kv from which on
// recent ones count, and that of the step's first. Every row lies behind the one before: nothing asks for
// strides. Masks have kernels with strides. What is the same in all steps of a model is no array, as the host walks
// over every array of a launch: SCALE has the bits of the scale, KEYS is the length of the window.

// A threadgroup's heads of keys and of values among those of kv, and the places of the step.
struct Joint {
  int k_len, room, len, held, now, stop, kh, vh, index, threads;
};
template <bool ALONE, typename Ints, typename Lens>
METAL_FUNC Joint joint_at(
    const Ints kv_shape, const int room, const int q_len, const Lens lens, const uint z, const uint index,
    const uint threads) {
  const int B = ALONE ? 1 : kv_shape[0] / 2, b = ALONE ? 0 : z / uint(kv_shape[1]), now = lens[2 * B + b], stop = now + q_len;
  return {kv_shape[2], room, lens[b], max(int(lens[B + b]), stop - room), now, stop,
          int(z), B * kv_shape[1] + int(z), int(index), int(threads)};
}

// All recent rows of a head, BYTES each, in one place, for the next step to find as `before`.
template <int BYTES>
METAL_FUNC void keep(const device uchar* before, const device uchar* fresh, device uchar* kept, const int head, const thread Joint& h) {
  const Recent at = {{before, fresh}, {}, {}, head, h.room, h.held, h.now, h.stop};
  const bool wide = BYTES % 16 == 0 && ALIGNED(before, 16) && ALIGNED(fresh, 16);
  const int C = BYTES >= 16 ? BYTES / 16 : 1, H = BYTES / 2, all = (h.stop - h.held) * (wide ? C : H);
  kept += (size_t)head * h.room * BYTES;
  if (!wide) {
    for (int i = h.index; i < all; i += h.threads)
      ((device ushort*)kept)[i] = ((const device ushort*)RECENT_ROW(BYTES, at, at.rows, h.held + i / H))[i % H];
    return;
  }
  // Several loads before the first store, which would wait for its own.
  for (int first = h.index; first < all; first += 4 * h.threads) {
    uint4 w[4];
    UNROLL for (int i = 0; i < 4; i++) {
      const int c = min(first + i * h.threads, all - 1);
      w[i] = *(const device uint4*)(RECENT_ROW(BYTES, at, at.rows, h.held + c / C) + c % C * 16);
    }
    UNROLL for (int i = 0; i < 4; i++) {
      const int c = first + i * h.threads;
      if (c < all) *(device uint4*)(kept + c * 16) = w[i];
    }
  }
}
#define NUMBERS float3(0, KEYS, CAUSAL)
// PACKED: q has the fresh keys and values behind its heads, [B, Hq + 2 Hkv, q_len, D] in all.
#define HEADS int3(q_shape[0], q_shape[1] - (PACKED ? 2 * kv_shape[1] : 0), q_shape[2])
#define BYTES_OF(a) (const device uchar*)a
#define KEEP(bytes, before, fresh, kept) \
  keep<bytes>(BYTES_OF(before), BYTES_OF(fresh), (device uchar*)kept, h.kh, h); \
  keep<bytes>(BYTES_OF(before), BYTES_OF(fresh), (device uchar*)kept, h.vh, h)
#define BESIDE(before, fresh) {BYTES_OF(before), BYTES_OF(fresh)}
#define PLACES(head) head, h.room, h.held, h.now, h.stop
#define HEAD(a, head, bytes) (BYTES_OF(a) + (size_t)(head) * h.k_len * (bytes))
#define ALL_ALIGNED(x, y, z, n) (ALIGNED(x, n) && ALIGNED(y, n) && ALIGNED(z, n))

//! kernel sdpa_split_joint (q, kv, recent, fresh=q + q_shape[0] * (q_shape[1] - 2 * kv_shape[1]) * q_shape[2] * D, lens, sinks=lens) -> (out, kept, ml=nullptr)
typedef Sdpa<T, D, DV, 16, 64, 16, 64, L, U, R, KP, W, CHUNK, MASK, SINKS, DIRECT, true> X;
threadgroup float part[KP * W * (DV + 8)];
threadgroup float state[KP * W * R * 2];
const int ROW = X::K::ROW;
const Joint h = joint_at<ALONE>(
    kv_shape, recent_shape[2], ONE ? 1 : q_shape[2], lens, threadgroup_position_in_grid.z, thread_position_in_grid.x,
    threads_per_grid.x);
if (threadgroup_position_in_grid.y + 1 == threadgroups_per_grid.y) {
  KEEP(ROW, recent, fresh, kept);
} else {
  const Place at = place<CHUNK, W, WINDOW, G, ALONE, ONE>(
      HEADS, kv_shape, h.len, NUMBERS, threadgroup_position_in_grid, simdgroup_index_in_threadgroup,
      thread_index_in_simdgroup);
  const typename X::K kr = {(const device T*)HEAD(kv, h.kh, ROW), kv, kv, D, 0, 0, {BESIDE(recent, fresh), {}, {}, PLACES(h.kh)}};
  const typename X::V vr = {(const device T*)HEAD(kv, h.vh, ROW), kv, kv, D, 0, 0, {BESIDE(recent, fresh), {}, {}, PLACES(h.vh)}};
  const bool wide = ALIGNED(q, 16) && ALL_ALIGNED(kv, recent, fresh, 16);
  const int one = at.q_len * D;
  X::run(
      q, int3(at.Hq * one, one, D), as_type<float>(SCALE), kr, vr, wide, lens, int4(0), sinks, out, ml, part, state, at);
}

//! kernel sdpa_split_codes_joint (q, kv, kv_s, kv_b, recent, recent_s, recent_b, fresh, fresh_s, fresh_b, lens, sinks=lens) -> (out, kept, kept_s, kept_b, ml=nullptr)
typedef Sdpa<T, D, DV, KB, KG, VB, VG, L, U, R, KP, W, CHUNK, MASK, SINKS, DIRECT, true> X;
threadgroup float part[KP * W * (DV + 8)];
threadgroup float state[KP * W * R * 2];
const int ROW = X::K::ROW, SIDE = X::K::SIDE;
const Joint h = joint_at<ALONE>(
    kv_shape, recent_shape[2], ONE ? 1 : q_shape[2], lens, threadgroup_position_in_grid.z, thread_position_in_grid.x,
    threads_per_grid.x);
if (threadgroup_position_in_grid.y + 1 == threadgroups_per_grid.y) {
  KEEP(ROW, recent, fresh, kept);
  KEEP(SIDE, recent_s, fresh_s, kept_s);
  KEEP(SIDE, recent_b, fresh_b, kept_b);
} else {
  const Place at = place<CHUNK, W, WINDOW, G, ALONE, ONE>(
      q_shape, kv_shape, h.len, NUMBERS, threadgroup_position_in_grid, simdgroup_index_in_threadgroup,
      thread_index_in_simdgroup);
  const typename X::K kr = {
      (const device uint*)HEAD(kv, h.kh, ROW), (const device T*)HEAD(kv_s, h.kh, SIDE), (const device T*)HEAD(kv_b, h.kh, SIDE),
      ROW / 4, SIDE / int(sizeof(T)), SIDE / int(sizeof(T)), {BESIDE(recent, fresh), BESIDE(recent_s, fresh_s), BESIDE(recent_b, fresh_b), PLACES(h.kh)}};
  const typename X::V vr = {
      (const device uint*)HEAD(kv, h.vh, ROW), (const device T*)HEAD(kv_s, h.vh, SIDE), (const device T*)HEAD(kv_b, h.vh, SIDE),
      ROW / 4, SIDE / int(sizeof(T)), SIDE / int(sizeof(T)), {BESIDE(recent, fresh), BESIDE(recent_s, fresh_s), BESIDE(recent_b, fresh_b), PLACES(h.vh)}};
  const bool wide = ALIGNED(q, 16) && ALL_ALIGNED(kv, recent, fresh, 16) && ROW % 16 == 0;
  const int one = at.q_len * D;
  X::run(
      q, int3(at.Hq * one, one, D), as_type<float>(SCALE), kr, vr, wide, lens, int4(0), sinks, out, ml, part, state, at);
}

//! kernel sdpa_matrix_joint (q, kv, recent, fresh=q + q_shape[0] * (q_shape[1] - 2 * kv_shape[1]) * q_shape[2] * D, lens, sinks=lens) -> (out, kept, ml=nullptr)
typedef SdpaMatrix<T, D, DV, 16, 64, 16, 64, R, KP, W, CHUNK, U / 16, MASK, SINKS, DIRECT, AHEAD, MEM, FOLD, true> X;
threadgroup float part[X::Merge::WORDS_USED];
threadgroup float state[KP * W * R * 2];
threadgroup uint4 ring[X::SLOTS ? X::SLOTS / 4 : 1];
const int ROW = X::K::ROW;
const Joint h = joint_at<ALONE>(
    kv_shape, recent_shape[2], ONE ? 1 : q_shape[2], lens, threadgroup_position_in_grid.z, thread_position_in_grid.x,
    threads_per_grid.x);
if (threadgroup_position_in_grid.y + 1 == threadgroups_per_grid.y) {
  KEEP(ROW, recent, fresh, kept);
} else {
  const Place at = place<CHUNK, W, WINDOW, G, ALONE, ONE>(
      HEADS, kv_shape, h.len, NUMBERS, threadgroup_position_in_grid, simdgroup_index_in_threadgroup,
      thread_index_in_simdgroup);
  const typename X::K kr = {
      HEAD(kv, h.kh, ROW), nullptr, nullptr, ROW, 0, 0,
      {BESIDE(recent, fresh), {}, {}, PLACES(h.kh)}};
  const typename X::V vr = {
      HEAD(kv, h.vh, ROW), nullptr, nullptr, ROW, 0, 0,
      {BESIDE(recent, fresh), {}, {}, PLACES(h.vh)}};
  const bool wide = ALIGNED(q, 16) && ALL_ALIGNED(kv, recent, fresh, 16);
  const int one = at.q_len * D;
  X::run(
      q, int3(at.Hq * one, one, D), as_type<float>(SCALE), kr, vr, wide, lens, int4(0), sinks, out, ml, part, state, ring, at,
      int(threadgroups_per_grid.y) - 1);
}

//! kernel sdpa_matrix_codes_joint (q, kv, kv_s, kv_b, recent, recent_s, recent_b, fresh, fresh_s, fresh_b, lens, sinks=lens) -> (out, kept, kept_s, kept_b, ml=nullptr)
typedef SdpaMatrix<T, D, DV, KB, KG, VB, VG, R, KP, W, CHUNK, U / 16, MASK, SINKS, DIRECT, AHEAD, MEM, FOLD, true> X;
threadgroup float part[X::Merge::WORDS_USED];
threadgroup float state[KP * W * R * 2];
threadgroup uint4 ring[X::SLOTS ? X::SLOTS / 4 : 1];
const int ROW = X::K::ROW, SIDE = X::K::SIDE;
const Joint h = joint_at<ALONE>(
    kv_shape, recent_shape[2], ONE ? 1 : q_shape[2], lens, threadgroup_position_in_grid.z, thread_position_in_grid.x,
    threads_per_grid.x);
if (threadgroup_position_in_grid.y + 1 == threadgroups_per_grid.y) {
  KEEP(ROW, recent, fresh, kept);
  KEEP(SIDE, recent_s, fresh_s, kept_s);
  KEEP(SIDE, recent_b, fresh_b, kept_b);
} else {
  const Place at = place<CHUNK, W, WINDOW, G, ALONE, ONE>(
      q_shape, kv_shape, h.len, NUMBERS, threadgroup_position_in_grid, simdgroup_index_in_threadgroup,
      thread_index_in_simdgroup);
  const typename X::K kr = {
      HEAD(kv, h.kh, ROW), HEAD(kv_s, h.kh, SIDE), HEAD(kv_b, h.kh, SIDE), ROW, SIDE, SIDE,
      {BESIDE(recent, fresh), BESIDE(recent_s, fresh_s), BESIDE(recent_b, fresh_b), PLACES(h.kh)}};
  const typename X::V vr = {
      HEAD(kv, h.vh, ROW), HEAD(kv_s, h.vh, SIDE), HEAD(kv_b, h.vh, SIDE), ROW, SIDE, SIDE,
      {BESIDE(recent, fresh), BESIDE(recent_s, fresh_s), BESIDE(recent_b, fresh_b), PLACES(h.vh)}};
  const bool wide = ALIGNED(q, 16) && ALL_ALIGNED(kv, recent, fresh, 16) && ROW % 16 == 0 &&
      ALL_ALIGNED(kv_s, recent_s, fresh_s, X::K::EVEN) && ALL_ALIGNED(kv_b, recent_b, fresh_b, X::K::EVEN);
  const int one = at.q_len * D;
  X::run(
      q, int3(at.Hq * one, one, D), as_type<float>(SCALE), kr, vr, wide, lens, int4(0), sinks, out, ml, part, state, ring, at,
      int(threadgroups_per_grid.y) - 1);
}
