// Metal's collectives, barriers and atomics as warp operations; part of metal_cuda.h.
#pragma once

namespace metal {

// ---- lanes
constexpr unsigned int msl_all_lanes = 0xffffffffu;
MSL_FN unsigned int msl_mask() { return MSL_RAGGED ? ::__activemask() : msl_all_lanes; }
MSL_FN uint msl_lane() {
  uint lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// Apply a 32-bit shuffle to every word of v; vectors, 64-bit and 16-bit types included.
template <typename T, typename F>
MSL_FN T msl_words(const T& v, F shuffle) {
  constexpr int n = (sizeof(T) + 3) / 4;
  unsigned int words[n];
  words[n - 1] = 0;
  MSL_MEMCPY((void*)words, (const void*)&v, sizeof(T));
#pragma unroll
  for (int i = 0; i < n; i++) words[i] = shuffle(words[i]);
  T r;
  MSL_MEMCPY((void*)&r, (const void*)words, sizeof(T));
  return r;
}
template <typename T> MSL_FN T msl_from(const T& v, uint lane) {
  return msl_words(v, [=](unsigned int w) { return ::__shfl_sync(msl_mask(), w, (int)lane); });
}
template <typename T> MSL_FN T msl_xor(const T& v, uint mask) {
  return msl_words(v, [=](unsigned int w) { return ::__shfl_xor_sync(msl_mask(), w, (int)mask); });
}
// Lane - delta and lane + delta; lanes without a source keep their own value.
template <typename T> MSL_FN T msl_up(const T& v, uint delta) {
  return msl_words(v, [=](unsigned int w) { return ::__shfl_up_sync(msl_mask(), w, delta); });
}
template <typename T> MSL_FN T msl_down(const T& v, uint delta) {
  return msl_words(v, [=](unsigned int w) { return ::__shfl_down_sync(msl_mask(), w, delta); });
}

// ---- reductions and scans over `width` neighbouring lanes
template <int width, typename T, typename F>
MSL_FN T msl_reduce(T v, F f) {
#if MSL_RAGGED
  const unsigned int mask = ::__activemask();
  const int base = (int)msl_lane() & ~(width - 1);
  T r = v;
  bool first = true;
  for (int i = 0; i < width; i++) {
    const int source = base + i;
    const T other = msl_words(v, [=](unsigned int w) { return ::__shfl_sync(mask, w, source); });
    if (mask >> source & 1) {
      r = first ? other : f(r, other);
      first = false;
    }
  }
  return r;
#else
#pragma unroll
  for (int offset = width / 2; offset > 0; offset /= 2) v = f(v, msl_xor(v, offset));
  return v;
#endif
}
template <int width, bool inclusive, typename T, typename F>
MSL_FN T msl_scan(T v, T identity, F f) {
  const uint lane = msl_lane() & (width - 1);
#if MSL_RAGGED
  const unsigned int mask = ::__activemask();
  const int base = (int)msl_lane() & ~(width - 1);
  T r = identity;
  for (int i = 0; i < width; i++) {
    const int source = base + i;
    const T other = msl_words(v, [=](unsigned int w) { return ::__shfl_sync(mask, w, source); });
    if ((mask >> source & 1) && (uint)i < lane + (inclusive ? 1 : 0)) r = f(r, other);
  }
  return r;
#else
#pragma unroll
  for (uint offset = 1; offset < width; offset *= 2) {
    const T other = msl_up(v, offset);
    if (lane >= offset) v = f(other, v);
  }
  if (inclusive) return v;
  const T before = msl_up(v, 1);
  return lane == 0 ? identity : before;
#endif
}
struct msl_add { template <typename T> MSL_FN T operator()(const T& a, const T& b) const { return (T)(a + b); } };
struct msl_mul { template <typename T> MSL_FN T operator()(const T& a, const T& b) const { return (T)(a * b); } };
struct msl_and { template <typename T> MSL_FN T operator()(const T& a, const T& b) const { return (T)(a & b); } };
struct msl_or { template <typename T> MSL_FN T operator()(const T& a, const T& b) const { return (T)(a | b); } };
struct msl_bitxor { template <typename T> MSL_FN T operator()(const T& a, const T& b) const { return (T)(a ^ b); } };
struct msl_min { template <typename T> MSL_FN T operator()(const T& a, const T& b) const { return min(a, b); } };
struct msl_max { template <typename T> MSL_FN T operator()(const T& a, const T& b) const { return max(a, b); } };

// A ballot: one bit for each lane.
struct simd_vote {
  typedef uint64_t vote_t;
  vote_t v;
  MSL_FN explicit constexpr simd_vote(vote_t bits = 0) : v(bits) {}
  MSL_FN explicit constexpr operator vote_t() const { return v; }
  MSL_FN bool all() const { return v == (vote_t)msl_mask(); }
  MSL_FN bool any() const { return v != 0; }
};
struct quad_vote {
  typedef uint vote_t;
  vote_t v;
  MSL_FN explicit constexpr quad_vote(vote_t bits = 0) : v(bits) {}
  MSL_FN explicit constexpr operator vote_t() const { return v; }
  MSL_FN bool all() const { return v == (msl_mask() >> (msl_lane() & ~3u) & 15u); }
  MSL_FN bool any() const { return v != 0; }
};

#define MSL_COLLECTIVES(group, width)                                                                      \
  template <typename A> MSL_FN val_t<A> group##_sum(const A& a) { return msl_reduce<width>(val_t<A>(plain(a)), msl_add()); } \
  template <typename A> MSL_FN val_t<A> group##_product(const A& a) { return msl_reduce<width>(val_t<A>(plain(a)), msl_mul()); } \
  template <typename A> MSL_FN val_t<A> group##_min(const A& a) { return msl_reduce<width>(val_t<A>(plain(a)), msl_min()); } \
  template <typename A> MSL_FN val_t<A> group##_max(const A& a) { return msl_reduce<width>(val_t<A>(plain(a)), msl_max()); } \
  template <typename A> MSL_FN val_t<A> group##_and(const A& a) { return msl_reduce<width>(val_t<A>(plain(a)), msl_and()); } \
  template <typename A> MSL_FN val_t<A> group##_or(const A& a) { return msl_reduce<width>(val_t<A>(plain(a)), msl_or()); } \
  template <typename A> MSL_FN val_t<A> group##_xor(const A& a) { return msl_reduce<width>(val_t<A>(plain(a)), msl_bitxor()); } \
  template <typename A> MSL_FN val_t<A> group##_prefix_inclusive_sum(const A& a) {                          \
    return msl_scan<width, true>(val_t<A>(plain(a)), val_t<A>(0), msl_add());                               \
  }                                                                                                        \
  template <typename A> MSL_FN val_t<A> group##_prefix_exclusive_sum(const A& a) {                          \
    return msl_scan<width, false>(val_t<A>(plain(a)), val_t<A>(0), msl_add());                              \
  }                                                                                                        \
  template <typename A> MSL_FN val_t<A> group##_prefix_inclusive_product(const A& a) {                      \
    return msl_scan<width, true>(val_t<A>(plain(a)), val_t<A>(1), msl_mul());                               \
  }                                                                                                        \
  template <typename A> MSL_FN val_t<A> group##_prefix_exclusive_product(const A& a) {                      \
    return msl_scan<width, false>(val_t<A>(plain(a)), val_t<A>(1), msl_mul());                              \
  }                                                                                                        \
  template <typename A> MSL_FN val_t<A> group##_shuffle(const A& a, ushort lane) {                          \
    return msl_from(val_t<A>(plain(a)), (msl_lane() & ~(width - 1u)) + (lane & (width - 1u)));              \
  }                                                                                                        \
  template <typename A> MSL_FN val_t<A> group##_broadcast(const A& a, ushort lane) { return group##_shuffle(a, lane); } \
  template <typename A> MSL_FN val_t<A> group##_broadcast_first(const A& a) {                               \
    const uint base = msl_lane() & ~(width - 1u);                                                           \
    return msl_from(val_t<A>(plain(a)), base + (uint)::__ffs((int)(msl_mask() >> base)) - 1u);              \
  }                                                                                                        \
  template <typename A> MSL_FN val_t<A> group##_shuffle_xor(const A& a, ushort mask) {                      \
    return msl_xor(val_t<A>(plain(a)), mask & (width - 1u));                                                \
  }                                                                                                        \
  template <typename A> MSL_FN val_t<A> group##_shuffle_up(const A& a, ushort delta) {                      \
    const uint lane = msl_lane() & (width - 1u);                                                            \
    return msl_from(val_t<A>(plain(a)), msl_lane() - (delta <= lane ? delta : 0u));                         \
  }                                                                                                        \
  template <typename A> MSL_FN val_t<A> group##_shuffle_down(const A& a, ushort delta) {                    \
    const uint lane = msl_lane() & (width - 1u);                                                            \
    return msl_from(val_t<A>(plain(a)), msl_lane() + (lane + delta < width ? delta : 0u));                  \
  }                                                                                                        \
  template <typename A> MSL_FN val_t<A> group##_shuffle_rotate_up(const A& a, ushort delta) {               \
    return msl_from(val_t<A>(plain(a)), (msl_lane() & ~(width - 1u)) + ((msl_lane() - delta) & (width - 1u))); \
  }                                                                                                        \
  template <typename A> MSL_FN val_t<A> group##_shuffle_rotate_down(const A& a, ushort delta) {             \
    return msl_from(val_t<A>(plain(a)), (msl_lane() & ~(width - 1u)) + ((msl_lane() + delta) & (width - 1u))); \
  }                                                                                                        \
  template <typename A>                                                                                    \
  MSL_FN val_t<A> group##_shuffle_and_fill_up(const A& a, const A& fill, ushort delta, ushort modulo = width) { \
    const uint lane = msl_lane() & (width - 1u), part = lane & (modulo - 1u);                               \
    const val_t<A> data = msl_from(val_t<A>(plain(a)), msl_lane() - (delta <= part ? delta : 0u));          \
    const val_t<A> other = msl_from(val_t<A>(plain(fill)),                                                  \
        (msl_lane() & ~(modulo - 1u)) + ((part - delta) & (modulo - 1u)));                                  \
    return delta <= part ? data : other;                                                                   \
  }                                                                                                        \
  template <typename A>                                                                                    \
  MSL_FN val_t<A> group##_shuffle_and_fill_down(const A& a, const A& fill, ushort delta, ushort modulo = width) { \
    const uint lane = msl_lane() & (width - 1u), part = lane & (modulo - 1u);                               \
    const bool inside = part + delta < modulo;                                                             \
    const val_t<A> data = msl_from(val_t<A>(plain(a)), msl_lane() + (inside ? delta : 0u));                 \
    const val_t<A> other = msl_from(val_t<A>(plain(fill)),                                                  \
        (msl_lane() & ~(modulo - 1u)) + ((part + delta) & (modulo - 1u)));                                  \
    return inside ? data : other;                                                                          \
  }                                                                                                        \
  MSL_FN group##_vote group##_ballot(bool b) {                                                             \
    const unsigned int bits = ::__ballot_sync(msl_mask(), b);                                               \
    return group##_vote(width == 32 ? bits : bits >> (msl_lane() & ~(width - 1u)) & ((1ull << width) - 1)); \
  }                                                                                                        \
  MSL_FN bool group##_all(bool b) {                                                                         \
    return width == 32 ? (bool)::__all_sync(msl_mask(), b) : group##_ballot(b).all();                        \
  }                                                                                                        \
  MSL_FN bool group##_any(bool b) {                                                                         \
    return width == 32 ? (bool)::__any_sync(msl_mask(), b) : group##_ballot(b).any();                        \
  }                                                                                                        \
  MSL_FN group##_vote group##_active_threads_mask() { return group##_ballot(true); }                        \
  MSL_FN bool group##_is_first() {                                                                         \
    const uint base = msl_lane() & ~(width - 1u);                                                           \
    return msl_lane() == base + (uint)::__ffs((int)(::__activemask() >> base)) - 1u;                        \
  }
MSL_COLLECTIVES(simd, 32)
MSL_COLLECTIVES(quad, 4)
#undef MSL_COLLECTIVES
MSL_FN bool simd_is_helper_thread() { return false; }

// ---- barriers
enum class mem_flags : uint {
  mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4,
  mem_threadgroup_imageblock = 8, mem_object_data = 16, mem_device_and_threadgroup = 3
};
MSL_FN constexpr mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((uint)a | (uint)b); }
MSL_FN constexpr mem_flags operator&(mem_flags a, mem_flags b) { return (mem_flags)((uint)a & (uint)b); }
enum memory_order { memory_order_relaxed, memory_order_acquire, memory_order_release, memory_order_acq_rel,
                    memory_order_seq_cst };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device,
                    thread_scope_system };
typedef thread_scope memory_scope;
constexpr thread_scope memory_scope_simdgroup = thread_scope_simdgroup;
constexpr thread_scope memory_scope_threadgroup = thread_scope_threadgroup;
constexpr thread_scope memory_scope_device = thread_scope_device;
MSL_FN void threadgroup_barrier(mem_flags) { ::__syncthreads(); }
MSL_FN void threadgroup_barrier(mem_flags, thread_scope scope) {
  if (scope >= thread_scope_device) ::__threadfence();
  ::__syncthreads();
}
MSL_FN void simdgroup_barrier(mem_flags) { ::__syncwarp(msl_mask()); }
MSL_FN void simdgroup_barrier(mem_flags, thread_scope) { ::__syncwarp(msl_mask()); }
MSL_FN void atomic_thread_fence(mem_flags, memory_order, thread_scope scope = thread_scope_device) {
  if (scope >= thread_scope_device) ::__threadfence();
  else ::__threadfence_block();
}

// ---- atomics of 4 and 8 bytes
template <typename T>
struct atomic {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "atomics have 4 or 8 bytes");
  T v;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<long> atomic_long;
typedef atomic<ulong> atomic_ulong;
template <typename T> using msl_word = conditional_t<sizeof(T) == 4, unsigned int, unsigned long long>;

// Relaxed order is all that CUDA's atomic functions give; fences add the rest.
template <typename T> MSL_FN T atomic_load_explicit(const volatile atomic<T>* p, memory_order) {
  return msl_cast_bits<T>(*(const volatile msl_word<T>*)p);
}
template <typename T, typename U> MSL_FN void atomic_store_explicit(volatile atomic<T>* p, U v, memory_order) {
  *(volatile msl_word<T>*)p = msl_cast_bits<msl_word<T>>((T)v);
}
template <typename T, typename U> MSL_FN T atomic_exchange_explicit(volatile atomic<T>* p, U v, memory_order) {
  return msl_cast_bits<T>(::atomicExch((msl_word<T>*)p, msl_cast_bits<msl_word<T>>((T)v)));
}
template <typename T, typename U>
MSL_FN bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* p, T* expected, U v, memory_order, memory_order) {
  const msl_word<T> old = msl_cast_bits<msl_word<T>>(*expected);
  const msl_word<T> seen = ::atomicCAS((msl_word<T>*)p, old, msl_cast_bits<msl_word<T>>((T)v));
  *expected = msl_cast_bits<T>(seen);
  return seen == old;
}
template <typename T, typename F> MSL_FN T msl_atomic_update(volatile atomic<T>* p, T v, F f) {
  msl_word<T> seen = *(volatile msl_word<T>*)p, old;
  do {
    old = seen;
    seen = ::atomicCAS((msl_word<T>*)p, old, msl_cast_bits<msl_word<T>>(f(msl_cast_bits<T>(old), v)));
  } while (seen != old);
  return msl_cast_bits<T>(old);
}
template <typename T, typename U> MSL_FN T atomic_fetch_add_explicit(volatile atomic<T>* p, U u, memory_order) {
  const T v = (T)u;
  if constexpr (is_integral<T>::value) return (T)::atomicAdd((msl_word<T>*)p, (msl_word<T>)v);
  else if constexpr (is_same<T, float>::value) return ::atomicAdd((float*)p, v);
  else return msl_atomic_update(p, v, msl_add());
}
template <typename T, typename U> MSL_FN T atomic_fetch_sub_explicit(volatile atomic<T>* p, U u, memory_order order) {
  return atomic_fetch_add_explicit(p, (T)(-(T)u), order);
}
#define MSL_ATOMIC(name, native, generic)                                                           \
  template <typename T, typename U> MSL_FN T atomic_fetch_##name##_explicit(volatile atomic<T>* p, U u, memory_order) { \
    typedef conditional_t<sizeof(T) == 4, T, conditional_t<is_signed<T>::value, long long, unsigned long long>> W; \
    if constexpr (is_integral<T>::value) return (T)::native((W*)p, (W)(T)u);                        \
    else return msl_atomic_update(p, (T)u, generic());                                              \
  }
MSL_ATOMIC(min, atomicMin, msl_min)
MSL_ATOMIC(max, atomicMax, msl_max)
#undef MSL_ATOMIC
#define MSL_ATOMIC(name, native)                                                                    \
  template <typename T, typename U> MSL_FN T atomic_fetch_##name##_explicit(volatile atomic<T>* p, U u, memory_order) { \
    return (T)::native((msl_word<T>*)p, (msl_word<T>)(T)u);                                         \
  }
MSL_ATOMIC(and, atomicAnd)
MSL_ATOMIC(or, atomicOr)
MSL_ATOMIC(xor, atomicXor)
#undef MSL_ATOMIC

}  // namespace metal
