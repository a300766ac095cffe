// What takes the place of sdpa_ring.h where caches have no codes.
#define COPIES_END()
#define COPIES_WAIT(n)
template <typename T, typename K, typename V, int UK, int ST>
struct Ring {
  int len, lane;
  bool wide;
  int dense;
  uint k_place, v_place;
  template <typename Rows> static METAL_FUNC uint place(const uint lane) { return 0; }
  template <typename Rows> METAL_FUNC void copy(const thread Rows& from, threadgroup uint* to, const int key, const uint place) const {}
  template <typename Rows, bool ACROSS> METAL_FUNC void words(const threadgroup uint* slot, thread uint* w) const {}
  template <typename Rows> METAL_FUNC void scales(const threadgroup uint* slot, thread uint* sb) const {}
};
