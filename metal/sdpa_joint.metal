// Decode attention where keys and values are one array [2 B, Hkv, k_len, D], keys first, and every
// row lies behind the one before: nothing asks for strides. Masks have kernels with strides.

//! kernel sdpa_split_joint (q, kv, sinks, lens, numbers) -> (out, ml)
typedef Sdpa<T, D, DV, 16, 64, 16, 64, L, U, R, KP, W, CHUNK, MASK, SINKS, DIRECT> X;
threadgroup float part[KP * W * (DV + 8)];
threadgroup float state[KP * W * R * 2];
const Place at = place<CHUNK, W, WINDOW>(
    q_shape, kv_shape, LENS ? int(lens[threadgroup_position_in_grid.z / kv_shape[1]]) : kv_shape[2], numbers,
    threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
const size_t head = (size_t)kv_shape[2] * D, half_of = (size_t)(kv_shape[0] / 2) * kv_shape[1] * head;
const device T* keys = kv + ((size_t)at.b * kv_shape[1] + at.kv) * head;
const typename X::K kr = {keys, kv, kv, D, 0, 0};
const typename X::V vr = {keys + half_of, kv, kv, D, 0, 0};
const int one = at.q_len * D;
X::run(
    q, int3(at.Hq * one, one, D), numbers[0], kr, vr, ALIGNED(q, 16) && ALIGNED(kv, 16), numbers, int4(0), sinks,
    out, ml, part, state, at);

//! kernel sdpa_matrix_joint (q, kv, sinks, lens, numbers) -> (out, ml)
typedef SdpaMatrix<T, D, DV, 16, 64, 16, 64, R, KP, W, CHUNK, U / 16, MASK, SINKS, DIRECT, AHEAD> X;
threadgroup float part[KP * W * R * X::Merge::P];
threadgroup float state[KP * W * R * 2];
threadgroup uint4 ring[1];
const Place at = place<CHUNK, W, WINDOW>(
    q_shape, kv_shape, LENS ? int(lens[threadgroup_position_in_grid.z / kv_shape[1]]) : kv_shape[2], numbers,
    threadgroup_position_in_grid, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
const size_t head = (size_t)kv_shape[2] * D, half_of = (size_t)(kv_shape[0] / 2) * kv_shape[1] * head;
const device T* keys = kv + ((size_t)at.b * kv_shape[1] + at.kv) * head;
const typename X::K kr = {(const device uchar*)keys, nullptr, nullptr, int(D * sizeof(T)), 0, 0};
const typename X::V vr = {(const device uchar*)(keys + half_of), nullptr, nullptr, int(D * sizeof(T)), 0, 0};
const int one = at.q_len * D;
X::run(
    q, int3(at.Hq * one, one, D), numbers[0], kr, vr, ALIGNED(q, 16) && ALIGNED(kv, 16), numbers, int4(0), sinks,
    out, ml, part, state, ring, at, threadgroups_per_grid.y);
