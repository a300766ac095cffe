// Decode attention where keys and values are one array kv [2 B, Hkv, k_len, ...], keys first, or three: codes,
// scales and biases. Those of the last tokens lie beside it in recent [2 B, Hkv, room, ...] and fresh [2 B,
// Hkv, q_len, ...] (sdpa_recent.h): a step writes nothing to the cache. kept: recent of the next step, which
// the last threadgroups of a head copy. lens [3, B]: keys that there are, the place in kv from which on
// recent ones count, and that of the step's first. Every row lies behind the one before: nothing asks for
// strides. Masks have kernels with strides.

// A threadgroup's heads of keys and of values among those of kv, and the places of the step.
struct Joint {
  int k_len, room, q_len, len, held, now, stop, index, threads;
  size_t kh, vh;
};
template <typename Ints, typename Lens>
METAL_FUNC Joint joint_at(
    const Ints kv_shape, const int room, const int q_len, const Lens lens, const uint z, const uint index,
    const uint threads) {
  const int B = kv_shape[0] / 2, b = z / uint(kv_shape[1]), now = lens[2 * B + b], stop = now + q_len;
  return {kv_shape[2], room, q_len, lens[b], max(int(lens[B + b]), stop - room), now, stop, int(index), int(threads),
          z, (size_t)B * kv_shape[1] + z};
}

// One of the arrays at a head: its rows of so many bytes.
struct Part {
  const device uchar *data, *before, *fresh;
  device uchar* kept;
};
template <int BYTES, typename A>
METAL_FUNC Part part_at(
    const device A* data, const device A* before, const device A* fresh, device A* kept, const size_t head,
    const thread Joint& h) {
  return {(const device uchar*)data + head * h.k_len * BYTES, (const device uchar*)before + head * h.room * BYTES,
          (const device uchar*)fresh + head * h.q_len * BYTES, (device uchar*)kept + head * h.room * BYTES};
}
// All its recent rows in one place, for the next step to find as `before`.
template <int BYTES>
METAL_FUNC void keep(const thread Part& p, const thread Joint& h) {
  const bool wide = BYTES % 16 == 0 && ALIGNED(p.before, 16) && ALIGNED(p.fresh, 16);
  const int C = BYTES >= 16 ? BYTES / 16 : 1, H = BYTES / 2, all = (h.stop - h.held) * (wide ? C : H);
  if (!wide) {
    for (int i = h.index; i < all; i += h.threads)
      ((device ushort*)p.kept)[i] = ((const device ushort*)RECENT_ROW(BYTES, h, p, h.held + i / H))[i % H];
    return;
  }
  // Several loads before the first store, which would wait for its own.
  for (int first = h.index; first < all; first += 4 * h.threads) {
    uint4 w[4];
    UNROLL for (int i = 0; i < 4; i++) {
      const int c = min(first + i * h.threads, all - 1);
      w[i] = *(const device uint4*)(RECENT_ROW(BYTES, h, p, h.held + c / C) + c % C * 16);
    }
    UNROLL for (int i = 0; i < 4; i++) {
      const int c = first + i * h.threads;
      if (c < all) *(device uint4*)(p.kept + c * 16) = w[i];
    }
  }
}
#define BESIDE_OF(p) {p.before, p.fresh}
#define RECENT_PLAIN(p) {BESIDE_OF(p), {}, {}, h.held, h.now, h.stop}
#define RECENT_CODES(p, s, b) {BESIDE_OF(p), BESIDE_OF(s), BESIDE_OF(b), h.held, h.now, h.stop}
#define ALL_ALIGNED(x, y, z, n) (ALIGNED(x, n) && ALIGNED(y, n) && ALIGNED(z, n))

//! kernel sdpa_split_joint (q, kv, recent, fresh, sinks, lens, numbers) -> (out, ml, kept)
typedef Sdpa<T, D, DV, 16, 64, 16, 64, L, U, R, KP, W, CHUNK, MASK, SINKS, DIRECT, true> X;
threadgroup float part[KP * W * (DV + 8)];
threadgroup float state[KP * W * R * 2];
const int ROW = X::K::ROW;
const Joint h = joint_at(
    kv_shape, recent_shape[2], q_shape[2], lens, threadgroup_position_in_grid.z, thread_position_in_grid.x,
    threads_per_grid.x);
const Part k = part_at<ROW>(kv, recent, fresh, kept, h.kh, h),
           v = part_at<ROW>(kv, recent, fresh, kept, h.vh, h);
if (threadgroup_position_in_grid.y + 1 == threadgroups_per_grid.y) {
  keep<ROW>(k, h); keep<ROW>(v, h);
} else {
  const Place at = place<CHUNK, W, WINDOW>(
      q_shape, kv_shape, h.len, numbers, threadgroup_position_in_grid, simdgroup_index_in_threadgroup,
      thread_index_in_simdgroup);
  const typename X::K kr = {(const device T*)k.data, kv, kv, D, 0, 0, RECENT_PLAIN(k)};
  const typename X::V vr = {(const device T*)v.data, kv, kv, D, 0, 0, RECENT_PLAIN(v)};
  const bool wide = ALIGNED(q, 16) && ALL_ALIGNED(kv, recent, fresh, 16);
  const int one = h.q_len * D;
  X::run(
      q, int3(at.Hq * one, one, D), numbers[0], kr, vr, wide, numbers, int4(0), sinks, out, ml, part, state, at);
}

//! kernel sdpa_split_codes_joint (q, kv, kv_s, kv_b, recent, recent_s, recent_b, fresh, fresh_s, fresh_b, sinks, lens, numbers) -> (out, ml, kept, kept_s, kept_b)
typedef Sdpa<T, D, DV, KB, KG, VB, VG, L, U, R, KP, W, CHUNK, MASK, SINKS, DIRECT, true> X;
threadgroup float part[KP * W * (DV + 8)];
threadgroup float state[KP * W * R * 2];
const int ROW = X::K::ROW, SIDE = X::K::SIDE;
const Joint h = joint_at(
    kv_shape, recent_shape[2], q_shape[2], lens, threadgroup_position_in_grid.z, thread_position_in_grid.x,
    threads_per_grid.x);
const Part k = part_at<ROW>(kv, recent, fresh, kept, h.kh, h),
           v = part_at<ROW>(kv, recent, fresh, kept, h.vh, h);
const Part k_s = part_at<SIDE>(kv_s, recent_s, fresh_s, kept_s, h.kh, h),
           v_s = part_at<SIDE>(kv_s, recent_s, fresh_s, kept_s, h.vh, h);
const Part k_b = part_at<SIDE>(kv_b, recent_b, fresh_b, kept_b, h.kh, h),
           v_b = part_at<SIDE>(kv_b, recent_b, fresh_b, kept_b, h.vh, h);
if (threadgroup_position_in_grid.y + 1 == threadgroups_per_grid.y) {
  keep<ROW>(k, h); keep<ROW>(v, h);
  keep<SIDE>(k_s, h); keep<SIDE>(v_s, h);
  keep<SIDE>(k_b, h); keep<SIDE>(v_b, h);
} else {
  const Place at = place<CHUNK, W, WINDOW>(
      q_shape, kv_shape, h.len, numbers, threadgroup_position_in_grid, simdgroup_index_in_threadgroup,
      thread_index_in_simdgroup);
  const typename X::K kr = {
      (const device uint*)k.data, (const device T*)k_s.data, (const device T*)k_b.data, ROW / 4, SIDE / int(sizeof(T)), SIDE / int(sizeof(T)),
      RECENT_CODES(k, k_s, k_b)};
  const typename X::V vr = {
      (const device uint*)v.data, (const device T*)v_s.data, (const device T*)v_b.data, ROW / 4, SIDE / int(sizeof(T)), SIDE / int(sizeof(T)),
      RECENT_CODES(v, v_s, v_b)};
  const bool wide = ALIGNED(q, 16) && ALL_ALIGNED(kv, recent, fresh, 16) && ROW % 16 == 0;
  const int one = h.q_len * D;
  X::run(
      q, int3(at.Hq * one, one, D), numbers[0], kr, vr, wide, numbers, int4(0), sinks, out, ml, part, state, at);
}

//! kernel sdpa_matrix_joint (q, kv, recent, fresh, sinks, lens, numbers) -> (out, ml, kept)
typedef SdpaMatrix<T, D, DV, 16, 64, 16, 64, R, KP, W, CHUNK, U / 16, MASK, SINKS, DIRECT, AHEAD, true> X;
threadgroup float part[KP * W * R * X::Merge::P];
threadgroup float state[KP * W * R * 2];
threadgroup uint4 ring[X::RING ? X::SLOTS / 4 : 1];
const int ROW = X::K::ROW;
const Joint h = joint_at(
    kv_shape, recent_shape[2], q_shape[2], lens, threadgroup_position_in_grid.z, thread_position_in_grid.x,
    threads_per_grid.x);
const Part k = part_at<ROW>(kv, recent, fresh, kept, h.kh, h),
           v = part_at<ROW>(kv, recent, fresh, kept, h.vh, h);
if (threadgroup_position_in_grid.y + 1 == threadgroups_per_grid.y) {
  keep<ROW>(k, h); keep<ROW>(v, h);
} else {
  const Place at = place<CHUNK, W, WINDOW>(
      q_shape, kv_shape, h.len, numbers, threadgroup_position_in_grid, simdgroup_index_in_threadgroup,
      thread_index_in_simdgroup);
  const typename X::K kr = {k.data, nullptr, nullptr, ROW, 0, 0, RECENT_PLAIN(k)};
  const typename X::V vr = {v.data, nullptr, nullptr, ROW, 0, 0, RECENT_PLAIN(v)};
  const bool wide = ALIGNED(q, 16) && ALL_ALIGNED(kv, recent, fresh, 16);
  const int one = h.q_len * D;
  X::run(
      q, int3(at.Hq * one, one, D), numbers[0], kr, vr, wide, numbers, int4(0), sinks, out, ml, part, state, ring, at,
      int(threadgroups_per_grid.y) - 1);
}

//! kernel sdpa_matrix_codes_joint (q, kv, kv_s, kv_b, recent, recent_s, recent_b, fresh, fresh_s, fresh_b, sinks, lens, numbers) -> (out, ml, kept, kept_s, kept_b)
typedef SdpaMatrix<T, D, DV, KB, KG, VB, VG, R, KP, W, CHUNK, U / 16, MASK, SINKS, DIRECT, AHEAD, true> X;
threadgroup float part[KP * W * R * X::Merge::P];
threadgroup float state[KP * W * R * 2];
threadgroup uint4 ring[X::RING ? X::SLOTS / 4 : 1];
const int ROW = X::K::ROW, SIDE = X::K::SIDE;
const Joint h = joint_at(
    kv_shape, recent_shape[2], q_shape[2], lens, threadgroup_position_in_grid.z, thread_position_in_grid.x,
    threads_per_grid.x);
const Part k = part_at<ROW>(kv, recent, fresh, kept, h.kh, h),
           v = part_at<ROW>(kv, recent, fresh, kept, h.vh, h);
const Part k_s = part_at<SIDE>(kv_s, recent_s, fresh_s, kept_s, h.kh, h),
           v_s = part_at<SIDE>(kv_s, recent_s, fresh_s, kept_s, h.vh, h);
const Part k_b = part_at<SIDE>(kv_b, recent_b, fresh_b, kept_b, h.kh, h),
           v_b = part_at<SIDE>(kv_b, recent_b, fresh_b, kept_b, h.vh, h);
if (threadgroup_position_in_grid.y + 1 == threadgroups_per_grid.y) {
  keep<ROW>(k, h); keep<ROW>(v, h);
  keep<SIDE>(k_s, h); keep<SIDE>(v_s, h);
  keep<SIDE>(k_b, h); keep<SIDE>(v_b, h);
} else {
  const Place at = place<CHUNK, W, WINDOW>(
      q_shape, kv_shape, h.len, numbers, threadgroup_position_in_grid, simdgroup_index_in_threadgroup,
      thread_index_in_simdgroup);
  const typename X::K kr = {k.data, k_s.data, k_b.data, ROW, SIDE, SIDE, RECENT_CODES(k, k_s, k_b)};
  const typename X::V vr = {v.data, v_s.data, v_b.data, ROW, SIDE, SIDE, RECENT_CODES(v, v_s, v_b)};
  const bool wide = ALIGNED(q, 16) && ALL_ALIGNED(kv, recent, fresh, 16) && ROW % 16 == 0 &&
      ALL_ALIGNED(kv_s, recent_s, fresh_s, X::K::EVEN) && ALL_ALIGNED(kv_b, recent_b, fresh_b, X::K::EVEN);
  const int one = h.q_len * D;
  X::run(
      q, int3(at.Hq * one, one, D), numbers[0], kr, vr, wide, numbers, int4(0), sinks, out, ml, part, state, ring, at,
      int(threadgroups_per_grid.y) - 1);
}
