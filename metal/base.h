// Shared by every kernel: vector loads that know their alignment.

// On CUDA a misaligned vector load traps, and addresses can be looked at. Elsewhere the wide path
// is taken, unless the check at patch time saw other bits with a misaligned x and asked for text
// with narrow loads.
#ifndef ALIGNED
#ifdef MSL_ADDRESS
#define ALIGNED(p, n) ((MSL_ADDRESS(p) & (n - 1)) == 0)
#else
#define ALIGNED(p, n) true
#endif
#endif

// Full unrolling: a register array indexed at run time spills.
#define UNROLL _Pragma("clang loop unroll(full)")

// Eight values of x or of a plain weight row. WIDE: p is 16-byte aligned.
METAL_FUNC void spread(thread float* v, const float4 a, const float4 b) {
  v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w;
  v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
}
template <typename T>
METAL_FUNC void load8_wide(const device T* p, thread float* v) {
  const uint4 u = *(const device uint4*)p;
  spread(v, float4(as_type<vec<T, 4>>(uint2(u.x, u.y))), float4(as_type<vec<T, 4>>(uint2(u.z, u.w))));
}
METAL_FUNC void load8_wide(const device float* p, thread float* v) {
  spread(v, *(const device float4*)p, *(const device float4*)(p + 4));
}
template <typename T, bool WIDE>
METAL_FUNC void load8(const device T* p, thread float* v) {
  if (WIDE) load8_wide(p, v);
  else UNROLL for (int i = 0; i < 8; i++) v[i] = float(p[i]);
}

// The two halves of u as h[i] and h[j].
METAL_FUNC void halves(thread float* h, const uint u, const int i, const int j) {
  const half2 p = as_type<half2>(u);
  h[i] = float(p.x);
  h[j] = float(p.y);
}
