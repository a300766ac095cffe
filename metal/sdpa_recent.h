// Rows of a cache at a kv head that are not in it yet: in the place of those from `held` on there are
// those of `before` [room], which the step before left, and from `now` to `stop` those of `fresh` [q_len].
// A key has the same place in the order of additions wherever it lies.
struct Beside {
  const device uchar *before, *fresh;
};
struct Recent {
  Beside rows, scales, biases;
  int held, now, stop;
};
#define RECENT_ROW(bytes, at, of, key) \
  ((key) >= (at).now ? (of).fresh + ((key) - (at).now) * (bytes) : (of).before + ((key) - (at).held) * (bytes))
