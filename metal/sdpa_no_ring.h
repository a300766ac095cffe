// What takes the place of sdpa_ring.h where caches have no codes.
#define COPIES_WAIT(n)
template <typename Kernel, typename K, typename V, int UK, int ST>
struct Ring {
  METAL_FUNC void start(const thread K& k, const thread V& v, const thread Place& at, const int first, const bool wide) thread {}
  METAL_FUNC void next_keys(const thread K& k, threadgroup uint* slot, const thread Place& at, const int stride) thread {}
  METAL_FUNC void next_values(const thread V& v, threadgroup uint* slot) thread {}
  template <typename H> static METAL_FUNC void mma8(thread float* c, const PAIR(H) x, const PAIR(H) y, const PAIR(H) b) {}
  template <typename Rows, bool ACROSS> METAL_FUNC void words(const threadgroup uint* slot, thread uint* w) const {}
  template <typename Rows> METAL_FUNC void scales(const threadgroup uint* slot, thread uint* sb) const {}
};
