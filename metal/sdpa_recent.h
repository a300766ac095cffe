// Keys or values of a kv head that are not in the cache yet: in the place of its rows from `held` on there
// are those of `before` [room, D], which the step before left, and from `now` to `stop` those of `fresh`
// [q_len, D]. A key has the same place in the order of additions wherever it lies.
template <typename T, int D>
struct Recent {
  const device T *before, *fresh;
  int held, now, stop;
};
#define RECENT_OF(r) r.before, r.fresh, r.held, r.now
template <int D, typename T>
METAL_FUNC const device T* recent_row(
    const device T* before, const device T* fresh, const int held, const int now, const int key) {
  return key >= now ? fresh + (key - now) * D : before + (key - held) * D;
}
