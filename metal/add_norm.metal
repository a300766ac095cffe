// The end of half a block whose output has a norm of its own, as gemma3's.

//! kernel add_norm (x, nw, res) -> (y)
// y = res + norm(x) * nw for rows of K, each by one threadgroup of TG threads. CLIP: float16 stays
// finite, as residuals of such models leave its range.
threadgroup float sums[TG / 32];
const int E = (K + TG - 1) / TG, t = thread_index_in_threadgroup;
const size_t row = (size_t)threadgroup_position_in_grid.x * K;
float v[E], w[E], r[E], sum = 0;
UNROLL for (int i = 0; i < E; i++) {
  const int k = min(i * TG + t, K - 1);
  v[i] = float(x[row + k]);
  w[i] = float(nw[k]);
  r[i] = float(res[row + k]);
}
UNROLL for (int i = 0; i < E; i++) sum = i * TG + t < K ? fma(v[i], v[i], sum) : sum;
sum = simd_sum(sum);
if (thread_index_in_simdgroup == 0) sums[simdgroup_index_in_threadgroup] = sum;
threadgroup_barrier(mem_flags::mem_threadgroup);
sum = 0;
UNROLL for (int i = 0; i < TG / 32; i++) sum += sums[i];
const float scale = rsqrt(sum / float(K) + as_type<float>(EPS));
UNROLL for (int i = 0; i < E; i++) {
  float z = fma(v[i] * scale, w[i], r[i]);
  if (CLIP) z = z > 65504.0f ? 65504.0f : z < -65504.0f ? -65504.0f : z;
  if (i * TG + t < K) y[row + i * TG + t] = T(z);
}
