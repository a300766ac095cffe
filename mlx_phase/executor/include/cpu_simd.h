// simdgroup and quadgroup operations and barriers among the fibers of a threadgroup.
// Sums and products follow a butterfly (xor 16, 8, 4, 2, 1): every lane gets the same bits.
#pragma once

EMU_UNCHECKED_BEGIN
namespace emu {

// Place of the call, taken where a default argument is used: the user's line.
#define EMU_AT                                                                     \
  uint32_t at = EMU_SITE(__builtin_LINE(), __builtin_COLUMN()), const char *file = __builtin_FILE()

// Brings `value` to the meeting. Returns the slots, one per lane, after the last lane ran `finish`.
// Out of line: inlined into each call it would be most of what a small kernel compiles.
template <typename T, typename F>
__attribute__((noinline)) T* meet(EmuLane* self, EmuMeet* m, uint32_t me, const T& value, EmuOp op, uint32_t at, const char* file,
               F finish) {
  static_assert(sizeof(T) <= EMU_VALUE, "a value of more than 64 bytes cannot be exchanged between lanes");
  T* slots = (T*)m->slot[m->generation & 1];
  __builtin_memcpy((void*)&slots[me], (const void*)&value, sizeof(T));
  if (m->arrived == 0) {
    m->op = op;
    m->at = at;
    m->file = file;
  } else if (__builtin_expect(m->at != at || m->op != op, 0)) {
    self->worker->fail(self, EMU_DIVERGED, op, at, file, nullptr);
  }
  const uint32_t arrived = m->arrived | 1u << me;
  if (arrived != m->full) {
    m->arrived = arrived;
    m->waiting[me] = self;
    self->wait(self);
    return slots;
  }
  finish(slots, m->count);
#ifdef EMU_SANITIZE
  self->worker->ops[op]++;
#endif
  m->arrived = 0;
  m->generation++;
  EmuWorker* w = self->worker;
  uint32_t tail = w->tail;
  for (uint32_t i = 0; i < m->count; i++)
    if (i != me) w->ready[tail++ & (EMU_MAX_THREADS - 1)] = m->waiting[i];
  w->tail = tail;
  return slots;
}

struct Whole {
  enum { WIDTH = 32 };
  static EmuMeet* of(EmuLane* l) { return &l->simd->whole; }
  static uint32_t lane(EmuLane* l) { return l->lane; }
};
struct Quad {
  enum { WIDTH = 4 };
  static EmuMeet* of(EmuLane* l) { return &l->simd->quad[l->lane >> 2]; }
  static uint32_t lane(EmuLane* l) { return l->lane & 3; }
};

struct Nothing {
  template <typename T> void operator()(T*, uint32_t) const {}
};
#ifdef EMU_SANITIZE
// A simdgroup barrier orders the kinds of memory that it names.
struct Order {
  EmuSimd* simd;
  uint32_t flags;
  template <typename T> void operator()(T*, uint32_t) const {
    simd->epoch[0] += flags >> 1 & 1;
    simd->epoch[1] += flags & 1;
  }
};
#endif

#define EMU_BINARY(NAME, EXPR) \
  struct NAME {                \
    template <typename T> static T of(const T& a, const T& b) { return (T)(EXPR); } \
  };
EMU_BINARY(Add, a + b)
EMU_BINARY(Mul, a * b)
EMU_BINARY(Min, metal::min(a, b))
EMU_BINARY(Max, metal::max(a, b))
EMU_BINARY(And, a & b)
EMU_BINARY(Or, a | b)
EMU_BINARY(Xor, a ^ b)
#undef EMU_BINARY

// Butterfly; lanes that do not exist (a partial threadgroup) take no part. Only lane 0's result is used,
// so each step needs the lower half alone.
template <typename Group, typename Op>
struct Reduce {
  template <typename T> void operator()(T* a, uint32_t n) const {
    if (__builtin_expect(n == Group::WIDTH, 1)) {
      halve<Group::WIDTH / 2>(a);
      return;
    }
    for (uint32_t o = Group::WIDTH / 2; o; o >>= 1)
      for (uint32_t i = 0; i < o; i++)
        if (i + o < n) a[i] = Op::of(a[i], a[i + o]);
  }
  // Constant trip counts, for vector instructions.
  template <int N, typename T> static void halve(T* a) {
    for (int i = 0; i < N; i++) a[i] = Op::of(a[i], a[i + N]);
    if constexpr (N > 1) halve<N / 2>(a);
  }
};

// Left to right. One inclusive scan, read at the lane before for the exclusive one.
template <typename Op>
struct Scan {
  template <typename T> void operator()(T* a, uint32_t n) const {
    for (uint32_t i = 1; i < n; i++) a[i] = Op::of(a[i - 1], a[i]);
  }
};

template <typename Group, typename T, typename F>
inline T* gather(EmuLane* self, const T& value, EmuOp op, uint32_t at, const char* file, F finish) {
  return meet(self, Group::of(self), Group::lane(self), value, op, at, file, finish);
}

template <typename Group, typename Op, typename T>
inline T reduce(EMU_IN(T) v, EmuOp op, uint32_t at, const char* file) {
  return gather<Group>(emu_self(), v, op, at, file, Reduce<Group, Op>())[0];
}

template <typename Group, typename Op, typename T>
inline T scan(EMU_IN(T) v, bool exclusive, EMU_IN(T) first, EmuOp op, uint32_t at, const char* file) {
  EmuLane* self = emu_self();
  const uint32_t me = Group::lane(self);
  const T* a = gather<Group>(self, v, op, at, file, Scan<Op>());
  return exclusive ? (me ? a[me - 1] : first) : a[me];
}

// The value of lane `from(me)`; a lane that does not exist gives the caller's own value back.
template <typename Group, typename T, typename From>
inline T shuffle(EMU_IN(T) v, EmuOp op, uint32_t at, const char* file, From from) {
  EmuLane* self = emu_self();
  const uint32_t me = Group::lane(self), count = Group::of(self)->count;
  const T* a = gather<Group>(self, v, op, at, file, Nothing());
  const uint32_t i = from(me);
  return i < count ? a[i] : a[me];
}

template <typename T> struct Pair { T data, fill; };

template <typename Group, typename T>
inline T fill_shuffle(EMU_IN(T) v, EMU_IN(T) fill, int delta, uint32_t modulo, EmuOp op, uint32_t at, const char* file) {
  EmuLane* self = emu_self();
  const uint32_t me = Group::lane(self);
  const Pair<T> mine = {v, fill};
  const Pair<T>* a = gather<Group>(self, mine, op, at, file, Nothing());
  const int width = modulo && modulo <= Group::WIDTH ? (int)modulo : (int)Group::WIDTH;
  const int start = (int)me / width * width, to = (int)me - start + delta;
  if (to < 0) return a[start + to + width < (int)Group::WIDTH ? start + to + width : (int)me].fill;
  if (to >= width) return a[start + to - width].fill;
  return a[start + to].data;
}

template <typename Group>
inline uint32_t ballot(bool predicate, EmuOp op, uint32_t at, const char* file) {
  EmuLane* self = emu_self();
  const uint32_t bit = predicate ? 1u << Group::lane(self) : 0;
  return gather<Group>(self, bit, op, at, file, Reduce<Group, Or>())[0];
}

template <typename Group> inline uint32_t everyone() { return Group::of(emu_self())->full; }

}  // namespace emu
EMU_UNCHECKED_END

namespace metal {

enum class mem_flags {
  mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4, mem_threadgroup_imageblock = 8
};
inline mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((int)a | (int)b); }
inline mem_flags operator&(mem_flags a, mem_flags b) { return (mem_flags)((int)a & (int)b); }

#ifdef EMU_SANITIZE
EMU_UNCHECKED_BEGIN
inline void threadgroup_barrier(mem_flags flags, EMU_AT) {
  EmuLane* self = emu_self();
  self->worker->barrier(self, at, file, (uint32_t)flags);
}
inline void simdgroup_barrier(mem_flags flags, EMU_AT) {
  EmuLane* self = emu_self();
  emu::gather<emu::Whole>(self, (char)0, EMU_simdgroup_barrier, at, file, emu::Order{self->simd, (uint32_t)flags});
}
EMU_UNCHECKED_END
#else
inline void threadgroup_barrier(mem_flags, EMU_AT) {
  EmuLane* self = emu_self();
  self->worker->barrier(self, at, file);
}
inline void simdgroup_barrier(mem_flags, EMU_AT) {
  emu::gather<emu::Whole>(emu_self(), (char)0, EMU_simdgroup_barrier, at, file, emu::Nothing());
}
#endif

// The result of a ballot.
struct simd_vote {
  typedef uint64_t vote_t;
  uint32_t mask, lanes;
  explicit simd_vote(vote_t v) : mask((uint32_t)v), lanes(emu::everyone<emu::Whole>()) {}
  explicit operator vote_t() const { return mask; }
  bool all() const { return mask == lanes; }
  bool any() const { return mask != 0; }
};
struct quad_vote {
  typedef uint64_t vote_t;
  uint32_t mask, lanes;
  explicit quad_vote(vote_t v) : mask((uint32_t)v), lanes(emu::everyone<emu::Quad>()) {}
  explicit operator vote_t() const { return mask; }
  bool all() const { return mask == lanes; }
  bool any() const { return mask != 0; }
};

#define EMU_GROUP(P, G)                                                                                        \
  template <typename T> inline val_t<T> P##_sum(const T& v, EMU_AT) {                                          \
    return emu::reduce<G, emu::Add>(plain(v), EMU_##P##_sum, at, file);                                        \
  }                                                                                                            \
  template <typename T> inline val_t<T> P##_product(const T& v, EMU_AT) {                                      \
    return emu::reduce<G, emu::Mul>(plain(v), EMU_##P##_product, at, file);                                    \
  }                                                                                                            \
  template <typename T> inline val_t<T> P##_min(const T& v, EMU_AT) {                                          \
    return emu::reduce<G, emu::Min>(plain(v), EMU_##P##_min, at, file);                                        \
  }                                                                                                            \
  template <typename T> inline val_t<T> P##_max(const T& v, EMU_AT) {                                          \
    return emu::reduce<G, emu::Max>(plain(v), EMU_##P##_max, at, file);                                        \
  }                                                                                                            \
  template <typename T> inline val_t<T> P##_and(const T& v, EMU_AT) {                                          \
    return emu::reduce<G, emu::And>(plain(v), EMU_##P##_and, at, file);                                        \
  }                                                                                                            \
  template <typename T> inline val_t<T> P##_or(const T& v, EMU_AT) {                                           \
    return emu::reduce<G, emu::Or>(plain(v), EMU_##P##_or, at, file);                                          \
  }                                                                                                            \
  template <typename T> inline val_t<T> P##_xor(const T& v, EMU_AT) {                                          \
    return emu::reduce<G, emu::Xor>(plain(v), EMU_##P##_xor, at, file);                                        \
  }                                                                                                            \
  template <typename T> inline val_t<T> P##_prefix_inclusive_sum(const T& v, EMU_AT) {                         \
    return emu::scan<G, emu::Add>(plain(v), false, plain(v), EMU_##P##_prefix_inclusive_sum, at, file);        \
  }                                                                                                            \
  template <typename T> inline val_t<T> P##_prefix_exclusive_sum(const T& v, EMU_AT) {                         \
    return emu::scan<G, emu::Add>(plain(v), true, val_t<T>(0), EMU_##P##_prefix_exclusive_sum, at, file);      \
  }                                                                                                            \
  template <typename T> inline val_t<T> P##_prefix_inclusive_product(const T& v, EMU_AT) {                     \
    return emu::scan<G, emu::Mul>(plain(v), false, plain(v), EMU_##P##_prefix_inclusive_product, at, file);    \
  }                                                                                                            \
  template <typename T> inline val_t<T> P##_prefix_exclusive_product(const T& v, EMU_AT) {                     \
    return emu::scan<G, emu::Mul>(plain(v), true, val_t<T>(1), EMU_##P##_prefix_exclusive_product, at, file);  \
  }                                                                                                            \
  template <typename T> inline val_t<T> P##_shuffle(const T& v, ushort lane, EMU_AT) {                         \
    return emu::shuffle<G>(plain(v), EMU_##P##_shuffle, at, file,                                              \
                           [lane](uint32_t) { return (uint32_t)lane % G::WIDTH; });                            \
  }                                                                                                            \
  template <typename T> inline val_t<T> P##_shuffle_up(const T& v, ushort delta, EMU_AT) {                     \
    return emu::shuffle<G>(plain(v), EMU_##P##_shuffle_up, at, file,                                           \
                           [delta](uint32_t me) { return me >= delta ? me - delta : me; });                    \
  }                                                                                                            \
  template <typename T> inline val_t<T> P##_shuffle_down(const T& v, ushort delta, EMU_AT) {                   \
    return emu::shuffle<G>(plain(v), EMU_##P##_shuffle_down, at, file,                                         \
                           [delta](uint32_t me) { return me + delta; });                                       \
  }                                                                                                            \
  template <typename T> inline val_t<T> P##_shuffle_xor(const T& v, ushort mask, EMU_AT) {                     \
    return emu::shuffle<G>(plain(v), EMU_##P##_shuffle_xor, at, file,                                          \
                           [mask](uint32_t me) { return me ^ mask; });                                         \
  }                                                                                                            \
  template <typename T> inline val_t<T> P##_shuffle_rotate_up(const T& v, ushort delta, EMU_AT) {              \
    return emu::shuffle<G>(plain(v), EMU_##P##_shuffle_rotate_up, at, file,                                    \
                           [delta](uint32_t me) { return (me - delta) % G::WIDTH; });                          \
  }                                                                                                            \
  template <typename T> inline val_t<T> P##_shuffle_rotate_down(const T& v, ushort delta, EMU_AT) {            \
    return emu::shuffle<G>(plain(v), EMU_##P##_shuffle_rotate_down, at, file,                                  \
                           [delta](uint32_t me) { return (me + delta) % G::WIDTH; });                          \
  }                                                                                                            \
  template <typename T> inline val_t<T> P##_broadcast(const T& v, ushort lane, EMU_AT) {                       \
    return emu::shuffle<G>(plain(v), EMU_##P##_broadcast, at, file,                                            \
                           [lane](uint32_t) { return (uint32_t)lane % G::WIDTH; });                            \
  }                                                                                                            \
  template <typename T> inline val_t<T> P##_broadcast_first(const T& v, EMU_AT) {                              \
    return emu::shuffle<G>(plain(v), EMU_##P##_broadcast_first, at, file, [](uint32_t) { return 0u; });        \
  }                                                                                                            \
  template <typename T, typename U>                                                                            \
  inline val_t<T> P##_shuffle_and_fill_up(const T& v, const U& fill, ushort delta, ushort modulo = G::WIDTH, EMU_AT) { \
    return emu::fill_shuffle<G>(plain(v), val_t<T>(fill), -(int)delta, modulo, EMU_##P##_shuffle_and_fill_up, at, file); \
  }                                                                                                            \
  template <typename T, typename U>                                                                            \
  inline val_t<T> P##_shuffle_and_fill_down(const T& v, const U& fill, ushort delta, ushort modulo = G::WIDTH, EMU_AT) { \
    return emu::fill_shuffle<G>(plain(v), val_t<T>(fill), (int)delta, modulo, EMU_##P##_shuffle_and_fill_down, at, file); \
  }                                                                                                            \
  inline P##_vote P##_ballot(bool p, EMU_AT) {                                                                 \
    return P##_vote((uint64_t)emu::ballot<G>(p, EMU_##P##_ballot, at, file));                                  \
  }                                                                                                            \
  inline bool P##_all(bool p, EMU_AT) {                                                                        \
    return emu::ballot<G>(p, EMU_##P##_all, at, file) == emu::everyone<G>();                                   \
  }                                                                                                            \
  inline bool P##_any(bool p, EMU_AT) { return emu::ballot<G>(p, EMU_##P##_any, at, file) != 0; }              \
  inline bool P##_is_first() { return G::lane(emu_self()) == 0; }                                              \
  inline P##_vote P##_active_threads_mask() { return P##_vote((uint64_t)emu::everyone<G>()); }
EMU_GROUP(simd, emu::Whole)
EMU_GROUP(quad, emu::Quad)
#undef EMU_GROUP

}  // namespace metal
