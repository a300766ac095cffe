// Pairs of a row and an expert, sorted by expert, in tiles of up to BM pairs of one expert, so that
// nobody has to count them on the host.

// How many of the sorted rhs [n] are below e.
template <typename I>
METAL_FUNC int pairs_below(const I rhs, const int n, const int e) {
  int low = 0, high = n;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (uint(rhs[middle]) < uint(e)) low = middle + 1;
    else high = middle;
  }
  return low;
}

//! kernel gather_tiles (rhs) -> (tiles)
// tiles [P / BM + min(E, P)][4]: expert, first pair, end; the last ones may be empty. TH threads.
threadgroup int part[TH / 32];
const uint lane = thread_index_in_simdgroup, sg = simdgroup_index_in_threadgroup;
const int P = rhs_shape[0], COUNT = P / BM + min(E, P);
int done = 0;
for (int first = 0; first < E; first += TH) {
  const int e = first + sg * 32 + lane;
  // What is beyond the last expert counts as the last, as in the other kernels.
  const int start = e < E ? pairs_below(rhs, P, e) : P, end = e < E - 1 ? pairs_below(rhs, P, e + 1) : P;
  const int n = (end - start + BM - 1) / BM;
  int at = simd_prefix_exclusive_sum(n);
  if (lane == 31) part[sg] = at + n;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  at += done;
  for (uint i = 0; i < TH / 32; i++) {
    at += i < sg ? part[i] : 0;
    done += part[i];
  }
  for (int i = 0; i < n; i++) {
    tiles[4 * (at + i)] = e;
    tiles[4 * (at + i) + 1] = start + i * BM;
    tiles[4 * (at + i) + 2] = min(end, start + (i + 1) * BM);
    tiles[4 * (at + i) + 3] = 0;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
for (int i = 4 * done + sg * 32 + lane; i < 4 * COUNT; i += TH) tiles[i] = 0;
