// Metal atomics on processor atomics; types without one (float, half) go through compare and exchange.
#pragma once

namespace metal {

enum memory_order { memory_order_relaxed, memory_order_acquire, memory_order_release, memory_order_acq_rel,
                    memory_order_seq_cst };
enum thread_scope { thread_scope_thread, thread_scope_simdgroup, thread_scope_threadgroup, thread_scope_device };

template <typename T>
struct alignas(sizeof(T)) atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
typedef atomic<unsigned long> atomic_ulong;
typedef atomic<long> atomic_long;

inline void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) {
  EMU_FENCE();
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

}  // namespace metal

namespace emu {

template <typename T> struct Same { typedef T type; };
template <int N> struct Bits;
template <> struct Bits<1> { typedef uint8_t type; };
template <> struct Bits<2> { typedef uint16_t type; };
template <> struct Bits<4> { typedef uint32_t type; };
template <> struct Bits<8> { typedef uint64_t type; };

// Replaces the value by f(value); returns the one before.
template <typename T, typename F>
inline T update(volatile metal::atomic<T>* p, F f, int kind = 3) {
  EMU_ATOMIC(p, sizeof(T), kind);
  typedef typename Bits<sizeof(T)>::type B;
  volatile B* bits = (volatile B*)p;
  B old = __atomic_load_n(bits, __ATOMIC_RELAXED), next;
  T value;
  do {
    __builtin_memcpy((void*)&value, &old, sizeof(T));
    const T result = f(value);
    __builtin_memcpy(&next, (const void*)&result, sizeof(T));
  } while (!__atomic_compare_exchange_n(bits, &old, next, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED));
  return value;
}

}  // namespace emu

namespace metal {

template <typename T>
inline T atomic_load_explicit(const volatile atomic<T>* p, memory_order) {
  return emu::update((volatile atomic<T>*)p, [](T v) { return v; }, 1);
}
template <typename T>
inline void atomic_store_explicit(volatile atomic<T>* p, typename emu::Same<T>::type v, memory_order) {
  emu::update(p, [v](T) { return v; }, 2);
}
template <typename T>
inline T atomic_exchange_explicit(volatile atomic<T>* p, typename emu::Same<T>::type v, memory_order) {
  return emu::update(p, [v](T) { return v; });
}
template <typename T>
inline bool atomic_compare_exchange_weak_explicit(
    volatile atomic<T>* p, T* expected, typename emu::Same<T>::type desired, memory_order, memory_order) {
  EMU_ATOMIC(p, sizeof(T), 3);
  typedef typename emu::Bits<sizeof(T)>::type B;
  B old, next;
  __builtin_memcpy(&old, (const void*)expected, sizeof(T));
  __builtin_memcpy(&next, (const void*)&desired, sizeof(T));
  const bool done =
      __atomic_compare_exchange_n((volatile B*)p, &old, next, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
  __builtin_memcpy((void*)expected, &old, sizeof(T));
  return done;
}

#define EMU_FETCH(NAME, EXPR)                                                                       \
  template <typename T>                                                                             \
  inline T atomic_fetch_##NAME##_explicit(volatile atomic<T>* p, typename emu::Same<T>::type b,     \
                                          memory_order) {                                           \
    return emu::update(p, [b](T a) { return (T)(EXPR); });                                          \
  }
EMU_FETCH(add, a + b)
EMU_FETCH(sub, a - b)
EMU_FETCH(and, a & b)
EMU_FETCH(or, a | b)
EMU_FETCH(xor, a ^ b)
EMU_FETCH(min, a < b ? a : b)
EMU_FETCH(max, a > b ? a : b)
#undef EMU_FETCH

}  // namespace metal
