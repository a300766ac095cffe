// Rows of a simdgroup in one matrix or two, and how its packs are aligned.

// What load_words wants: a pack is 4, 8 or 16 bytes, or read word by word.
template <int bits, int group>
METAL_FUNC constexpr int pack_bytes() {
  return pack_size<bits, group>() * bits == 128 ? 16 : pack_size<bits, group>() * bits == 64 ? 8 : 4;
}

template <typename S>
METAL_FUNC void set_rows(
    thread Rows<S, S>& at, const device uint* w, const device S* s, const device S* b, const int KW,
    const int G, const int first, const int second) {
  at.w = w + (size_t)first * KW;
  at.s = s + (size_t)first * G;
  at.b = b + (size_t)first * G;
  at.w2 = w + (size_t)second * KW;
  at.s2 = s + (size_t)second * G;
  at.b2 = b + (size_t)second * G;
}
