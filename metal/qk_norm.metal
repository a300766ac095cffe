// What qwen3-like blocks have between q, k and their rotation.

//! kernel qk_norm (q, kv=q, qw, kw, cs) -> (qo, kvo=qo)
// RMS norm of each head of q and k, then the rotation as in qmv_qkv; v, the second half of kv, as it
// is. One simdgroup per row of D. KV: heads of k. PACKED: kv lies behind q's heads, as given and as left.
threadgroup float row[D];
const uint lane = thread_index_in_simdgroup;
const int n = threadgroup_position_in_grid.x, Q = q_shape[0] * (q_shape[1] - (PACKED ? 2 * KV : 0)) * q_shape[2];
const bool in_q = n < Q;
const int i0 = in_q ? n : n - Q, at = PACKED ? n : i0, K = q_shape[0] * KV * q_shape[2];
const bool in_v = !in_q && i0 >= K;
const device T* x = (in_q ? q : kv) + (size_t)at * D;
const device T* w = in_q ? qw : kw;
float sum = 0;
for (int d = lane; d < D; d += 32) {
  const float v = float(x[d]);
  sum = fma(v, v, sum);
}
const float scale = rsqrt(simd_sum(sum) / float(D) + as_type<float>(EPS));
for (int d = lane; d < D; d += 32) row[d] = float(x[d]) * scale * float(w[d]);
threadgroup_barrier(mem_flags::mem_threadgroup);
const device float* a = cs + i0 % cs_shape[0] * D;
device T* y = (in_q ? qo : kvo) + (size_t)at * D;
for (int d = lane; d < D; d += 32) {
  float t = row[d];
  if (d < ROT) {
    const bool low = TRAD ? d % 2 == 0 : d < ROT / 2;
    const int e = TRAD ? d ^ 1 : low ? d + ROT / 2 : d - ROT / 2;
    t = low ? fma(t, a[d], -(row[e] * a[e])) : fma(t, a[e], row[e] * a[d]);
  }
  y[d] = in_v ? x[d] : T(t);
}
