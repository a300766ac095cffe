// The end of a dot product.

// Sums the lanes of each simdgroup, then the KS simdgroups that share rows, in index order, so
// that the bits depend on neither M nor R. acc is [R][M] of rows from row on; those from row0 on
// are stored in y [M][N].
template <typename O, int M, int R, int SG, int KS>
METAL_FUNC void finish(
    thread float* acc, device O* y, threadgroup float* part,
    const int N, const int row0, const int row, const uint sg, const uint lane) {
  UNROLL for (int i = 0; i < R * M; i++) acc[i] = simd_sum(acc[i]);
  if (lane == 0) {
    UNROLL for (int i = 0; i < R * M; i++) {
      if (KS > 1) part[sg * R * M + i] = acc[i];
      else if (row + i / M >= row0) y[(size_t)(i % M) * N + row + i / M] = O(acc[i]);
    }
  }
  if (KS == 1) return;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int i = lane;  // R * M is at most 32
  if (sg % KS == 0 && i < R * M && row + i / M >= row0) {
    float t = part[sg * R * M + i];
    UNROLL for (int k = 1; k < KS; k++) t += part[(sg + k) * R * M + i];
    y[(size_t)(i % M) * N + row + i / M] = O(t);
  }
}
