// Merges the states that sdpa_split (or the matrix variant) left: out[b, i, h] from o [B, Hq,
// q_len, states, DV] and ml [B, Hq, q_len, states, 2] (max in natural log units, sum). States of FOLD chunks are a run:
// they are added up first, as Parts::store does (sdpa_parts.h). DS / 4 lanes take DS elements of a row, so that few
// rows keep many cores busy; run i goes to strand i % S of a threadgroup of S, ascending, and the strands are added
// along one tree. KS simdgroups have as many strands as there are runs, so few runs leave threads for more of the row.
// Empty states are not read.

template <int DV, int S, int U, int FOLD>
struct Merge {
  float m[U * FOLD], l[U * FOLD];
  float4 v[U * FOLD];
  template <typename ML>
  METAL_FUNC void load(const device float* o, const ML ml, const size_t row, const int run, const int states, const int d) thread {
    UNROLL for (int u = 0; u < U * FOLD; u++) {
      // Indexed, not pointed to: a small ml is `constant`.
      const int j = (run + u / FOLD * S) * FOLD + u % FOLD;
      m[u] = j < states ? ml[(row * states + j) * 2] : -INFINITY;
      l[u] = j < states ? ml[(row * states + j) * 2 + 1] : 0;
    }
    UNROLL for (int u = 0; u < U * FOLD; u++) {
      const int j = (run + u / FOLD * S) * FOLD + u % FOLD;
      v[u] = 0;
      if (m[u] != -INFINITY && d < DV) v[u] = *(const device float4*)(o + (row * states + j) * DV + d);
    }
  }
  // The states of run u become one, in the place of the first.
  METAL_FUNC void add_up(const int u) thread {
    const int k = u * FOLD;
    float high = max(m[k], LOWEST);
    UNROLL for (int i = k + 1; i < k + FOLD; i++) {
      const float3 f = joined(high, max(m[i], LOWEST));
      high = f.z;
      l[k] = fma(l[i], f.y, l[k] * f.x);
      v[k] = fma(v[i], float4(f.y), v[k] * f.x);
    }
    m[k] = high > LOWEST ? high : -INFINITY;
  }
};

//! kernel sdpa_reduce (o, ml, sinks=ml) -> (out)
const int C = DS / 4, P = 32 / C, SG = TG / 32, S = SG * P;
threadgroup float part[SG * (DS + 1)];
threadgroup float tops[SG];
const int t = thread_index_in_threadgroup, sg = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
const int Hq = o_shape[1], q_len = o_shape[2], states = o_shape[3];
const int runs = (states + FOLD - 1) / FOLD;
const size_t row = threadgroup_position_in_grid.y;
int KS = 1;
while (KS < SG && KS * P < runs) KS *= 2;
const int first = threadgroup_position_in_grid.x * (SG / KS), strand = sg % KS * P + lane / C;
const int d = (first + sg / KS) * DS + lane % C * 4;
// The first chunks are on their way while the max is found.
Merge<DV, S, U, FOLD> some;
some.load(o, ml, row, strand, states, d);
float top = LOWEST;
for (int i = t; i < states; i += TG) top = max(top, ml[(row * states + i) * 2]);
top = simd_max(top);
if (lane == 0) tops[sg] = top;
threadgroup_barrier(mem_flags::mem_threadgroup);
UNROLL for (int i = 0; i < SG; i++) top = max(top, tops[i]);
float4 acc = 0;
float sum = 0;
for (int i = strand; i < runs; i += U * S) {
  if (i != strand) some.load(o, ml, row, i, states, d);
  UNROLL for (int u = 0; u < U; u++) {
    if (FOLD > 1) some.add_up(u);
    const float w = weight(some.m[u * FOLD], top);
    sum = fma(some.l[u * FOLD], w, sum);
    acc = fma(some.v[u * FOLD], float4(w), acc);
  }
}
UNROLL for (int i = C; i < 32; i *= 2) {
  sum += simd_shuffle_xor(sum, i);
  acc += simd_shuffle_xor(acc, i);
}
if (lane < C) {
  threadgroup float* p = part + sg * (DS + 1) + 4 * lane;
  p[0] = acc.x; p[1] = acc.y; p[2] = acc.z; p[3] = acc.w;
  if (lane == 0) p[DS] = sum;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
// After the last barrier: no divisions where they can be spared.
const int h = ONE ? row % Hq : row / q_len % Hq, b = ONE ? 0 : row / q_len / Hq, n = ONE ? 0 : row % q_len;
for (int i = t; i < SG / KS * DS && first * DS + i < DV; i += TG) {
  float a = 0, all = 0;
  for (int k = 0; k < KS; k++) {
    const threadgroup float* p = part + (i / DS * KS + k) * (DS + 1);
    a += p[i % DS];
    all += p[DS];
  }
  const float2 f = settle<SINKS>(top, all, SINKS ? float(sinks[h]) : 0);
  out[(ONE ? row : (size_t)(b * q_len + n) * Hq + h) * DV + first * DS + i] = T(a * f.x * f.y);
}
