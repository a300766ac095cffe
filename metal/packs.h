// A matrix of codes as qmv reads it: packs of a row, and the rows of a simdgroup.

// Weights per lane and step.
template <int bits, int group>
METAL_FUNC constexpr int pack_size() { return bits == 6 || bits == 8 || group == 16 ? 16 : 32; }

template <int NW, bool WIDE>
METAL_FUNC void load_words(const device uint* p, thread uint* q) {
  if (WIDE && NW == 4) {
    const uint4 v = *(const device uint4*)p;
    q[0] = v.x; q[1] = v.y; q[2] = v.z; q[3] = v.w;
  } else if (WIDE && NW == 2) {
    const uint2 v = *(const device uint2*)p;
    q[0] = v.x; q[1] = v.y;
  } else {
    UNROLL for (int i = 0; i < NW; i++) q[i] = p[i];
  }
}

// Where the R rows of a simdgroup lie: H = (R + 1) / 2 of them from the first pointers on. PAIR: the
// others from the second ones on, otherwise they follow.
template <typename S, typename B>
struct Rows {
  const device uint *w, *w2;
  const device S *s, *s2;
  const device B *b, *b2;
};
