// What the CPU and CUDA executors share of the Metal standard library and of MLX's prelude.
// Needs msl_vec.h before it and, from the platform header: half, bfloat, uint8_t .. uint64_t, size_t,
// MSL_FN (inline specifier), METAL_FUNC, and the address-space words as empty macros. Includes nothing: include
// it inside a namespace of your own (then `using namespace metal;`) so that C's exp(double) is not a candidate.
#pragma once

#include "msl_traits.h"

namespace metal {

// ---- how the elementwise functions take scalars, vectors and swizzles alike
template <typename A> struct val { typedef A type; typedef A elem; static constexpr int n = 1; };
template <typename T, int N> struct val<vec<T, N>> { typedef vec<T, N> type; typedef T elem; static constexpr int n = N; };
template <typename T, int N> struct val<packed_vec<T, N>> : val<vec<T, N>> {};
template <typename T, int N, unsigned K, typename V> struct val<swizzle<T, N, K, V>> : val<V> {};
template <typename E, int N> struct sized { typedef vec<E, N> type; };
template <typename E> struct sized<E, 1> { typedef E type; };
template <typename A> using val_t = typename val<A>::type;
template <typename A, typename E> using like_t = typename sized<E, val<A>::n>::type;  // A with elements E
template <typename T> using float_elem = conditional_t<is_integral<T>::value, float, T>;
template <typename A> using float_t = like_t<A, float_elem<typename val<A>::elem>>;
template <typename A> using bool_t = like_t<A, bool>;
template <typename A, typename B> struct sum_type { typedef decltype(A() + B()) type; };
template <typename A> struct sum_type<A, A> { typedef A type; };
template <typename A, typename B> struct both {
  static constexpr int nA = val<A>::n, nB = val<B>::n, n = nA > nB ? nA : nB;
  typedef typename val<A>::elem EA;
  typedef typename val<B>::elem EB;
  // A scalar beside a vector takes the vector's element type.
  typedef conditional_t<nA == nB, typename sum_type<EA, EB>::type, conditional_t<(nA > nB), EA, EB>> elem;
  typedef typename sized<elem, n>::type type;
};
template <typename A, typename B> using both_t = typename both<A, B>::type;
template <typename A, typename B, typename C> using three_t = both_t<both_t<A, B>, C>;
template <typename E, typename A> MSL_FN E at(const A& a, int i) {
  if constexpr (val<A>::n == 1) return (E)a;
  else return (E)a.d[i];
}
template <typename A> MSL_FN const A& plain(const A& a) { return a; }
template <typename T, int N, unsigned K, typename V> MSL_FN V plain(const swizzle<T, N, K, V>& a) { return a.get(); }
template <typename T, int N> MSL_FN vec<T, N> plain(const packed_vec<T, N>& a) { return vec<T, N>(a); }

#define MSL_MAP(R, EXPR)                                                                       \
  if constexpr (val<R>::n == 1) { constexpr int i = 0; return (R)(EXPR); }                     \
  else {                                                                                       \
    constexpr int N = val<R>::n;                                                               \
    typedef typename val<R>::elem RE;                                                          \
    R r;                                                                                       \
    { constexpr int i = 0; r.d[i] = (RE)(EXPR); }                                              \
    { constexpr int i = 1; r.d[i] = (RE)(EXPR); }                                              \
    if constexpr (N > 2) { constexpr int i = N > 2 ? 2 : 0; r.d[i] = (RE)(EXPR); }             \
    if constexpr (N > 3) { constexpr int i = N > 3 ? 3 : 0; r.d[i] = (RE)(EXPR); }             \
    return r;                                                                                  \
  }
template <typename F, typename E, typename R, typename A> MSL_FN R map1(const A& a) {
  MSL_MAP(R, F::f(at<E>(a, i)))
}
template <typename F, typename E, typename R, typename A, typename B> MSL_FN R map2(const A& a, const B& b) {
  MSL_MAP(R, F::f(at<E>(a, i), at<E>(b, i)))
}
template <typename F, typename E, typename R, typename A, typename B, typename C>
MSL_FN R map3(const A& a, const B& b, const C& c) {
  MSL_MAP(R, F::f(at<E>(a, i), at<E>(b, i), at<E>(c, i)))
}

// name(x) in float, result in the type of x; name(x, y) and name(x, y, z) likewise
#define MSL_FLOAT1(name, expr)                                                    \
  struct fn_##name { MSL_FN static float f(float x) { return expr; } };           \
  template <typename A> MSL_FN float_t<A> name(const A& a) {                      \
    return map1<fn_##name, float, float_t<A>>(plain(a));                          \
  }
#define MSL_FLOAT2(name, expr)                                                    \
  struct fn_##name { MSL_FN static float f(float x, float y) { return expr; } };  \
  template <typename A, typename B> MSL_FN float_t<both_t<A, B>> name(const A& a, const B& b) { \
    return map2<fn_##name, float, float_t<both_t<A, B>>>(plain(a), plain(b));     \
  }
#define MSL_FLOAT3(name, expr)                                                    \
  struct fn_##name { MSL_FN static float f(float x, float y, float z) { return expr; } }; \
  template <typename A, typename B, typename C>                                   \
  MSL_FN float_t<three_t<A, B, C>> name(const A& a, const B& b, const C& c) {     \
    return map3<fn_##name, float, float_t<three_t<A, B, C>>>(plain(a), plain(b), plain(c)); \
  }
// the same in the type of the arguments
#define MSL_ANY1(name, stmt)                                                      \
  struct fn_##name { template <typename T> MSL_FN static T f(T x) { stmt } };     \
  template <typename A> MSL_FN val_t<A> name(const A& a) {                        \
    return map1<fn_##name, typename val<A>::elem, val_t<A>>(plain(a));            \
  }
#define MSL_ANY2(name, stmt)                                                      \
  struct fn_##name { template <typename T> MSL_FN static T f(T x, T y) { stmt } };\
  template <typename A, typename B> MSL_FN both_t<A, B> name(const A& a, const B& b) { \
    return map2<fn_##name, typename both<A, B>::elem, both_t<A, B>>(plain(a), plain(b)); \
  }
#define MSL_ANY3(name, stmt)                                                      \
  struct fn_##name { template <typename T> MSL_FN static T f(T x, T y, T z) { stmt } }; \
  template <typename A, typename B, typename C>                                   \
  MSL_FN three_t<A, B, C> name(const A& a, const B& b, const C& c) {              \
    typedef three_t<A, B, C> R;                                                   \
    return map3<fn_##name, typename val<R>::elem, R>(plain(a), plain(b), plain(c)); \
  }
#define MSL_TEST1(name, expr)                                                     \
  struct fn_##name { MSL_FN static bool f(float x) { return expr; } };            \
  template <typename A> MSL_FN bool_t<A> name(const A& a) {                       \
    return map1<fn_##name, float, bool_t<A>>(plain(a));                           \
  }

// ---- bits
template <typename T, typename U> MSL_FN T msl_cast_bits(const U& u) {
  static_assert(sizeof(T) == sizeof(U), "as_type: sizes differ");
  T t;
  MSL_MEMCPY((void*)&t, (const void*)&u, sizeof(T));
  return t;
}
template <typename T, typename U> MSL_FN T as_type(const U& u) { return msl_cast_bits<T>(plain(u)); }
MSL_FN unsigned int msl_float_bits(float x) { return msl_cast_bits<unsigned int>(x); }

#ifdef __CUDACC__
MSL_FN int msl_popcount(unsigned long long x) { return ::__popcll((long long)x); }
MSL_FN int msl_clz(unsigned long long x) { return ::__clzll((long long)x); }
MSL_FN unsigned long long msl_reverse(unsigned long long x) { return ::__brevll(x); }
#else
MSL_FN int msl_popcount(unsigned long long x) { return __builtin_popcountll(x); }
MSL_FN int msl_clz(unsigned long long x) { return x ? __builtin_clzll(x) : 64; }
MSL_FN unsigned long long msl_reverse(unsigned long long x) { return __builtin_bitreverse64(x); }
#endif
template <typename T> using uns = make_unsigned_t<T>;
template <typename T> inline constexpr int bits_of = sizeof(T) * 8;
MSL_ANY1(popcount, return (T)msl_popcount((uns<T>)x);)
MSL_ANY1(clz, return (T)(msl_clz((uns<T>)x) - (64 - bits_of<T>));)
MSL_ANY1(reverse_bits, return (T)(msl_reverse((uns<T>)x) >> (64 - bits_of<T>));)
// All bits above the lowest set one cleared, minus one: as many ones as there are trailing zeros.
MSL_ANY1(ctz, return (T)msl_popcount((uns<T>)((uns<T>)(~x) & (uns<T>)(x - 1)));)
template <typename A> MSL_FN val_t<A> extract_bits(const A& a, uint offset, uint bits) {
  typedef typename val<A>::elem T;
  if (bits == 0) return val_t<A>(0);
  const uint up = bits_of<T> - offset - bits, down = bits_of<T> - bits;
  struct F { MSL_FN static T f(T x, T u, T d) { return (T)((T)((uns<T>)x << u) >> d); } };
  return map3<F, T, val_t<A>>(plain(a), (T)up, (T)down);
}
template <typename A> MSL_FN val_t<A> insert_bits(const A& base, const A& field, uint offset, uint bits) {
  typedef typename val<A>::elem T;
  const uns<T> ones = bits >= (uint)bits_of<T> ? (uns<T>)~(uns<T>)0 : (uns<T>)(((uns<T>)1 << bits) - 1);
  const T mask = (T)(uns<T>)(ones << offset);
  struct F { MSL_FN static T f(T x, T y, T m) { return (T)((x & ~m) | (y & m)); } };
  struct S { MSL_FN static T f(T x, T s) { return (T)((uns<T>)x << s); } };
  return map3<F, T, val_t<A>>(plain(base), map2<S, T, val_t<A>>(plain(field), (T)offset), mask);
}

// ---- integers and comparison
MSL_ANY2(min, if constexpr (is_floating_point<T>::value) return (T)MSL_M(fminf)((float)x, (float)y);
         else return y < x ? y : x;)
MSL_ANY2(max, if constexpr (is_floating_point<T>::value) return (T)MSL_M(fmaxf)((float)x, (float)y);
         else return x < y ? y : x;)
MSL_ANY2(fmin, return (T)MSL_M(fminf)((float)x, (float)y);)
MSL_ANY2(fmax, return (T)MSL_M(fmaxf)((float)x, (float)y);)
MSL_ANY3(clamp, return fn_min::f(fn_max::f(x, y), z);)
template <typename A, typename B, typename C> MSL_FN three_t<A, B, C> min3(const A& a, const B& b, const C& c) { return min(a, min(b, c)); }
template <typename A, typename B, typename C> MSL_FN three_t<A, B, C> max3(const A& a, const B& b, const C& c) { return max(a, max(b, c)); }
MSL_ANY3(median3, return fn_max::f(fn_min::f(x, y), fn_min::f(fn_max::f(x, y), z));)
MSL_ANY1(abs, if constexpr (is_floating_point<T>::value) return (T)MSL_M(fabsf)((float)x);
         else if constexpr (is_unsigned<T>::value) return x;
         else return x < (T)0 ? (T)-x : x;)
MSL_ANY2(absdiff, return (T)(x < y ? (uns<T>)y - (uns<T>)x : (uns<T>)x - (uns<T>)y);)
MSL_ANY2(hadd, return (T)((x & y) + ((x ^ y) >> 1));)
MSL_ANY2(rhadd, return (T)((x | y) - ((x ^ y) >> 1));)
template <typename T> MSL_FN T msl_mulhi(T x, T y) {
  if constexpr (sizeof(T) < 4) return (T)(((int)x * (int)y) >> bits_of<T>);
  else if constexpr (sizeof(T) == 4) {
    if constexpr (is_unsigned<T>::value) return (T)(((unsigned long long)x * y) >> 32);
    else return (T)(((long long)x * y) >> 32);
  } else {
    typedef unsigned long long W;
    const W a = (W)x, b = (W)y, al = a & 0xffffffffu, ah = a >> 32, bl = b & 0xffffffffu, bh = b >> 32;
    const W mid = ah * bl + (al * bl >> 32), low = al * bh + (mid & 0xffffffffu);
    W high = ah * bh + (mid >> 32) + (low >> 32);
    if constexpr (is_signed<T>::value) high -= (x < 0 ? b : 0) + (y < 0 ? a : 0);
    return (T)high;
  }
}
MSL_ANY2(mulhi, return msl_mulhi(x, y);)
MSL_ANY3(madhi, return (T)((uns<T>)msl_mulhi(x, y) + (uns<T>)z);)
MSL_ANY2(mul24, return (T)((uns<T>)x * (uns<T>)y);)
MSL_ANY3(mad24, return (T)((uns<T>)x * (uns<T>)y + (uns<T>)z);)
MSL_ANY2(rotate, const int n = (int)y & (bits_of<T> - 1);
         return n == 0 ? x : (T)((uns<T>)((uns<T>)x << n) | (uns<T>)((uns<T>)x >> (bits_of<T> - n)));)
MSL_ANY2(addsat, typedef numeric_limits<T> L;
         if constexpr (is_unsigned<T>::value) return (T)(L::max() - x) < y ? L::max() : (T)(x + y);
         else return y > 0 && x > L::max() - y ? L::max() : y < 0 && x < L::min() - y ? L::min() : (T)(x + y);)
MSL_ANY2(subsat, typedef numeric_limits<T> L;
         if constexpr (is_unsigned<T>::value) return x < y ? (T)0 : (T)(x - y);
         else return y < 0 && x > L::max() + y ? L::max() : y > 0 && x < L::min() + y ? L::min() : (T)(x - y);)

template <typename A, typename B, typename C> MSL_FN both_t<A, B> select(const A& a, const B& b, const C& c) {
  typedef both_t<A, B> R;
  typedef typename val<R>::elem E;
  const auto& pa = plain(a);
  const auto& pb = plain(b);
  const auto& pc = plain(c);
  MSL_MAP(R, at<bool>(pc, i) ? at<E>(pb, i) : at<E>(pa, i))
}
template <typename A> MSL_FN bool all(const A& a) {
  const auto& v = plain(a);
  constexpr int n = val<A>::n;
  bool r = at<bool>(v, 0);
  for (int i = 1; i < n; i++) r = r & at<bool>(v, i);
  return r;
}
template <typename A> MSL_FN bool any(const A& a) {
  const auto& v = plain(a);
  constexpr int n = val<A>::n;
  bool r = at<bool>(v, 0);
  for (int i = 1; i < n; i++) r = r | at<bool>(v, i);
  return r;
}

MSL_TEST1(isnan, x != x)
MSL_TEST1(isinf, (msl_float_bits(x) & 0x7fffffffu) == 0x7f800000u)
MSL_TEST1(isfinite, (msl_float_bits(x) & 0x7f800000u) != 0x7f800000u)
MSL_TEST1(isnormal, (msl_float_bits(x) & 0x7f800000u) != 0x7f800000u && (msl_float_bits(x) & 0x7f800000u) != 0)
MSL_TEST1(signbit, (msl_float_bits(x) >> 31) != 0)

// ---- floating-point functions
MSL_FN float msl_exp10(float x) {
#ifdef __CUDACC__
  return ::exp10f(x);
#else
  return MSL_M(powf)(10.0f, x);
#endif
}
MSL_FN float msl_rsqrt(float x) {
#ifdef __CUDACC__
  return ::rsqrtf(x);
#else
  return 1.0f / MSL_M(sqrtf)(x);
#endif
}
MSL_FN float msl_fract(float x) {
  const float f = x - MSL_M(floorf)(x);
  return f < 1.0f ? f : 0x1.fffffep-1f;
}
MSL_FLOAT1(floor, MSL_M(floorf)(x))
MSL_FLOAT1(ceil, MSL_M(ceilf)(x))
MSL_FLOAT1(round, MSL_M(roundf)(x))
MSL_FLOAT1(rint, MSL_M(rintf)(x))
MSL_FLOAT1(trunc, MSL_M(truncf)(x))
MSL_FLOAT1(fabs, MSL_M(fabsf)(x))
MSL_FLOAT1(fract, msl_fract(x))
MSL_FLOAT1(saturate, MSL_M(fminf)(MSL_M(fmaxf)(x, 0.0f), 1.0f))
MSL_FLOAT1(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x == 0.0f ? x : 0.0f)
#define MSL_TRANSCENDENTALS                                             \
  MSL_FLOAT1(exp10, msl_exp10(x))                                       \
  MSL_FLOAT1(sqrt, MSL_M(sqrtf)(x))                                     \
  MSL_FLOAT1(rsqrt, msl_rsqrt(x))                                       \
  MSL_FLOAT1(tan, MSL_M(tanf)(x))                                       \
  MSL_FLOAT1(sinh, MSL_M(sinhf)(x))                                     \
  MSL_FLOAT1(cosh, MSL_M(coshf)(x))                                     \
  MSL_FLOAT1(tanh, MSL_M(tanhf)(x))                                     \
  MSL_FLOAT1(asin, MSL_M(asinf)(x))                                     \
  MSL_FLOAT1(acos, MSL_M(acosf)(x))                                     \
  MSL_FLOAT1(atan, MSL_M(atanf)(x))                                     \
  MSL_FLOAT1(asinh, MSL_M(asinhf)(x))                                   \
  MSL_FLOAT1(acosh, MSL_M(acoshf)(x))                                   \
  MSL_FLOAT1(atanh, MSL_M(atanhf)(x))                                   \
  MSL_FLOAT1(sinpi, MSL_M(sinf)(x* M_PI_F))                             \
  MSL_FLOAT1(cospi, MSL_M(cosf)(x* M_PI_F))                             \
  MSL_FLOAT2(atan2, MSL_M(atan2f)(x, y))                                \
  MSL_FLOAT2(fmod, MSL_M(fmodf)(x, y))                                  \
  MSL_FLOAT2(powr, MSL_M(powf)(x, y))
#define MSL_EXACT                                                       \
  MSL_FLOAT1(exp, MSL_M(expf)(x))                                       \
  MSL_FLOAT1(exp2, MSL_M(exp2f)(x))                                     \
  MSL_FLOAT1(log, MSL_M(logf)(x))                                       \
  MSL_FLOAT1(log2, MSL_M(log2f)(x))                                     \
  MSL_FLOAT1(log10, MSL_M(log10f)(x))                                   \
  MSL_FLOAT1(sin, MSL_M(sinf)(x))                                       \
  MSL_FLOAT1(cos, MSL_M(cosf)(x))                                       \
  MSL_FLOAT2(pow, MSL_M(powf)(x, y))                                    \
  MSL_FLOAT2(divide, x / y)
MSL_TRANSCENDENTALS
MSL_EXACT
MSL_FLOAT1(expm1, MSL_M(expm1f)(x))
MSL_FLOAT2(copysign, MSL_M(copysignf)(x, y))
MSL_FLOAT2(fdim, MSL_M(fdimf)(x, y))
MSL_FLOAT2(remainder, MSL_M(remainderf)(x, y))
MSL_FLOAT2(nextafter, MSL_M(nextafterf)(x, y))
MSL_FLOAT2(step, y < x ? 0.0f : 1.0f)
MSL_FLOAT3(fma, MSL_M(fmaf)(x, y, z))
MSL_FLOAT3(mix, x + (y - x) * z)
MSL_FN float msl_smoothstep(float a, float b, float x) {
  const float t = fn_saturate::f((x - a) / (b - a));
  return t * t * (3.0f - 2.0f * t);
}
MSL_FLOAT3(smoothstep, msl_smoothstep(x, y, z))
template <typename A, typename B> MSL_FN float_t<A> ldexp(const A& a, const B& b) {
  struct F { MSL_FN static float f(float x, float y) { return MSL_M(ldexpf)(x, (int)y); } };
  return map2<F, float, float_t<A>>(plain(a), plain(b));
}
template <typename A> MSL_FN like_t<A, int> ilogb(const A& a) {
  struct F { MSL_FN static int f(float x) { return MSL_M(ilogbf)(x); } };
  return map1<F, float, like_t<A, int>>(plain(a));
}
template <typename A, typename I> MSL_FN val_t<A> frexp(const A& a, I& exponent) {
  if constexpr (val<A>::n == 1) {
    int e;
    const val_t<A> m = (val_t<A>)MSL_M(frexpf)((float)a, &e);
    exponent = e;
    return m;
  } else {
    val_t<A> r, v = a;
    for (int i = 0; i < val<A>::n; i++) r.d[i] = frexp(v.d[i], exponent.d[i]);
    return r;
  }
}
template <typename A> MSL_FN A modf(const A& a, A& whole) { whole = trunc(a); return copysign(a - whole, a); }
template <typename A> MSL_FN A sincos(const A& a, A& c) { c = cos(a); return sin(a); }

#ifdef __CUDACC__
#define MSL_QUICK(name, arguments) ::__##name arguments
#else
#define MSL_QUICK(name, arguments) __builtin_##name arguments
#endif
namespace precise {
MSL_TRANSCENDENTALS
MSL_EXACT
MSL_FLOAT3(fma, MSL_M(fmaf)(x, y, z))
using metal::abs; using metal::ceil; using metal::clamp; using metal::fabs; using metal::floor; using metal::fmax;
using metal::fmin; using metal::fract; using metal::max; using metal::min; using metal::mix; using metal::rint;
using metal::round; using metal::saturate; using metal::sign; using metal::trunc;
}  // namespace precise
namespace fast {
MSL_TRANSCENDENTALS
MSL_FLOAT1(exp, MSL_QUICK(expf, (x)))
MSL_FLOAT1(exp2, MSL_M(exp2f)(x))
MSL_FLOAT1(log, MSL_QUICK(logf, (x)))
MSL_FLOAT1(log2, MSL_QUICK(log2f, (x)))
MSL_FLOAT1(log10, MSL_QUICK(log10f, (x)))
MSL_FLOAT1(sin, MSL_QUICK(sinf, (x)))
MSL_FLOAT1(cos, MSL_QUICK(cosf, (x)))
MSL_FLOAT2(pow, MSL_QUICK(powf, (x, y)))
#ifdef __CUDACC__
MSL_FLOAT2(divide, ::__fdividef(x, y))
#else
MSL_FLOAT2(divide, x / y)
#endif
MSL_FLOAT3(fma, MSL_M(fmaf)(x, y, z))
using metal::abs; using metal::ceil; using metal::clamp; using metal::fabs; using metal::floor; using metal::fmax;
using metal::fmin; using metal::fract; using metal::max; using metal::min; using metal::mix; using metal::rint;
using metal::round; using metal::saturate; using metal::sign; using metal::trunc;
}  // namespace fast
#undef MSL_QUICK

// ---- geometry; half and bfloat sum in float
template <typename A, typename B> MSL_FN typename both<A, B>::elem dot(const A& a, const B& b) {
  typedef typename both<A, B>::elem E;
  typedef conditional_t<is_integral<E>::value, E, float> S;
  const auto& u = plain(a);
  const auto& v = plain(b);
  S sum = at<S>(u, 0) * at<S>(v, 0);
  for (int i = 1; i < both<A, B>::n; i++) sum += at<S>(u, i) * at<S>(v, i);
  return (E)sum;
}
template <typename A> MSL_FN typename val<A>::elem length_squared(const A& a) { return dot(a, a); }
template <typename A> MSL_FN typename val<A>::elem length(const A& a) { return sqrt(dot(a, a)); }
template <typename A, typename B> MSL_FN typename both<A, B>::elem distance(const A& a, const B& b) {
  return length(val_t<A>(a) - val_t<B>(b));
}
template <typename A> MSL_FN val_t<A> normalize(const A& a) { return val_t<A>(a) * rsqrt(dot(a, a)); }
template <typename A, typename B> MSL_FN val_t<A> cross(const A& a, const B& b) {
  val_t<A> u = a, v = b;
  return val_t<A>(u.y * v.z - u.z * v.y, u.z * v.x - u.x * v.z, u.x * v.y - u.y * v.x);
}

}  // namespace metal

#include "msl_prelude.h"
