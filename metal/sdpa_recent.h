// Rows of a cache at a kv head that are not in it yet: in the place of those from `held` on there are
// those of `before` [heads, room], which the step before left, and from `now` to `stop` those of `fresh`
// [heads, q_len]. A key has the same place in the order of additions wherever it lies.
struct Beside {
  const device uchar *before, *fresh;
};
struct Recent {
  Beside rows, scales, biases;
  int head, room, held, now, stop;
};
// Found when it is looked for: pointers to a head's rows would take registers all along.
#define RECENT_ROW(bytes, at, of, key) \
  ((key) >= (at).now ? (of).fresh + (size_t)((at).head * ((at).stop - (at).now) + (key) - (at).now) * (bytes) \
                     : (of).before + (size_t)((at).head * (at).room + (key) - (at).held) * (bytes))
