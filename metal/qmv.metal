// Decode and exact small M: y[m, n] = sum_k x[m, k] * W[n, k], with the sums of rows.h or lean.h.

//! kernel qmv (x, w, scales, biases) -> (y)
threadgroup Shared part[shared_size<M, R, SG, KS, false>()];
qmv<T, bits, group, M, R, SG, KS, SPLITS>(
    x, w, scales, biases, y, part, w_shape[0], w_shape[1], threadgroup_position_in_grid,
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);

//! kernel qmv_fp (x, w, scales) -> (y)
threadgroup Shared part[shared_size<M, R, SG, KS, false>()];
qmv<T, bits, group, M, R, SG, KS, SPLITS>(
    x, w, scales, scales, y, part, w_shape[0], w_shape[1], threadgroup_position_in_grid,
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);

// Layers that read the same x share a launch: threadgroups are dealt out to the matrices in turn.

//! kernel qmv_pair (x, w0, s0, b0, w1, s1, b1) -> (y0, y1)
threadgroup Shared part[shared_size<M, R, SG, KS, false>()];
const int TILE = R * (SG / KS), N0 = w0_shape[0], N1 = w1_shape[0];
uint3 tg = threadgroup_position_in_grid;
const uint t0 = (N0 + TILE - 1) / TILE;
const bool in0 = tg.x < t0;
if (!in0) tg.x -= t0;
qmv<T, bits, group, M, R, SG, KS, SPLITS>(
    x, in0 ? w0 : w1, in0 ? s0 : s1, in0 ? b0 : b1, in0 ? y0 : y1, part, in0 ? N0 : N1,
    w0_shape[1], tg, simdgroup_index_in_threadgroup, thread_index_in_simdgroup);

//! kernel qmv_triple (x, w0, s0, b0, w1, s1, b1, w2, s2, b2) -> (y0, y1, y2)
threadgroup Shared part[shared_size<M, R, SG, KS, false>()];
const int TILE = R * (SG / KS), N0 = w0_shape[0], N1 = w1_shape[0], N2 = w2_shape[0];
uint3 tg = threadgroup_position_in_grid;
const uint t0 = (N0 + TILE - 1) / TILE, t1 = t0 + (N1 + TILE - 1) / TILE;
const bool in0 = tg.x < t0, in1 = tg.x < t1;
tg.x -= in0 ? 0 : in1 ? t0 : t1;
qmv<T, bits, group, M, R, SG, KS, SPLITS>(
    x, in0 ? w0 : in1 ? w1 : w2, in0 ? s0 : in1 ? s1 : s2, in0 ? b0 : in1 ? b1 : b2,
    in0 ? y0 : in1 ? y1 : y2, part, in0 ? N0 : in1 ? N1 : N2, w0_shape[1], tg,
    simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
