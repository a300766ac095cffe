// Merges the states that sdpa_split (or the matrix variant) left: out[b, i, h] from o [B, Hq,
// q_len, chunks, DV] and ml [B, Hq, q_len, chunks, 2] (max in natural log units, sum). A
// threadgroup takes DS elements of a row, so that few rows keep many cores busy: TG / (DS / 4) strands
// of threads take the chunks in turn, ascending, and are added in order. Empty chunks are not read.

//! kernel sdpa_reduce (o, ml, sinks) -> (out)
const int C = DS / 4, S = TG / C, U = 4;
threadgroup float part[S * (DS + 1)];
threadgroup float tops[TG / 32];
const uint t = thread_index_in_threadgroup, strand = t / C, c = t % C;
const int first = threadgroup_position_in_grid.x * DS;
const int Hq = o_shape[1], q_len = o_shape[2], chunks = o_shape[3];
const uint row = threadgroup_position_in_grid.y;
// Indexed, not pointed to: a small ml is `constant`.
const size_t mls = (size_t)row * chunks * 2;
float top = LOWEST;
for (int i = t; i < chunks; i += TG) top = max(top, ml[mls + 2 * i]);
top = simd_max(top);
if (thread_index_in_simdgroup == 0) tops[simdgroup_index_in_threadgroup] = top;
threadgroup_barrier(mem_flags::mem_threadgroup);
UNROLL for (int i = 0; i < TG / 32; i++) top = max(top, tops[i]);
if (strand < S && first + 4 * c < DV) {
  float4 acc = 0;
  float sum = 0;
  const device float4* rows = (const device float4*)(o + (size_t)row * chunks * DV + first) + c;
  // Several chunks on their way at once.
  for (int i = strand; i < chunks; i += U * S) {
    float m[U], l[U];
    float4 v[U];
    UNROLL for (int u = 0; u < U; u++) {
      const int j = i + u * S;
      m[u] = j < chunks ? ml[mls + 2 * j] : -INFINITY;
      l[u] = j < chunks ? ml[mls + 2 * j + 1] : 0;
    }
    UNROLL for (int u = 0; u < U; u++) {
      v[u] = 0;
      if (m[u] != -INFINITY) v[u] = rows[(i + u * S) * (DV / 4)];
    }
    UNROLL for (int u = 0; u < U; u++) {
      const float w = weight(m[u], top);
      sum = fma(l[u], w, sum);
      acc = fma(v[u], float4(w), acc);
    }
  }
  threadgroup float* p = part + strand * (DS + 1) + 4 * c;
  p[0] = acc.x; p[1] = acc.y; p[2] = acc.z; p[3] = acc.w;
  if (c == 0) part[strand * (DS + 1) + DS] = sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
const int h = row / q_len % Hq, b = row / q_len / Hq, n = row % q_len;
for (int d = t; d < min(DS, DV - first); d += TG) {
  float acc = 0, sum = 0;
  for (int i = 0; i < S; i++) {
    acc += part[i * (DS + 1) + d];
    sum += part[i * (DS + 1) + DS];
  }
  const float2 f = settle<SINKS>(top, sum, SINKS ? float(sinks[h]) : 0);
  out[((size_t)(b * q_len + n) * Hq + h) * DV + first + d] = T(acc * f.x * f.y);
}
