// MSL vector types as C++17 structs, for clang and NVRTC.
// Needs from the platform header: half, bfloat, uint8_t .. uint64_t, size_t, MSL_FN (inline specifier).
// Includes nothing, so that a platform header may include it inside a namespace of its own.
#pragma once

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

namespace metal {

template <typename T, int N>
struct vec;
template <typename T, int N>
struct packed_vec;

template <typename T> struct msl_is_scalar { static constexpr bool value = false; };
#define MSL_SCALAR(T) \
  template <> struct msl_is_scalar<T> { static constexpr bool value = true; };
MSL_SCALAR(bool) MSL_SCALAR(char) MSL_SCALAR(signed char) MSL_SCALAR(unsigned char)
MSL_SCALAR(short) MSL_SCALAR(unsigned short) MSL_SCALAR(int) MSL_SCALAR(unsigned int)
MSL_SCALAR(long) MSL_SCALAR(unsigned long) MSL_SCALAR(long long) MSL_SCALAR(unsigned long long)
MSL_SCALAR(float) MSL_SCALAR(double) MSL_SCALAR(half) MSL_SCALAR(bfloat)
#undef MSL_SCALAR
template <bool B> struct msl_require {};
template <> struct msl_require<true> { typedef int type; };

template <typename T, typename U> struct msl_convert { MSL_FN static constexpr T from(U u) { return (T)u; } };
// Clang converts its two 16-bit floats into each other only through float.
template <> struct msl_convert<half, bfloat> { MSL_FN static half from(bfloat u) { return (half)(float)u; } };
template <> struct msl_convert<bfloat, half> { MSL_FN static bfloat from(half u) { return (bfloat)(float)u; } };

// MLX's arrays on the CPU start at multiples of 8 bytes: do not promise more there.
#if defined(MSL_CPU) && !defined(EMU_SANITIZE)
#define MSL_ALIGN(bytes) alignas((bytes) < 8 ? (bytes) : 8)
#else
#define MSL_ALIGN(bytes) alignas(bytes)
#endif

// The CPU executor's sanitizer looks at indices.
#ifndef MSL_INDEX
#define MSL_INDEX(i, n)
#endif

// A swizzle is a member of the vector's union and has no storage of its own: it reads and writes
// the vector around it. It cannot be copied (a copy would lose the vector), only converted.
// K holds two bits of component index per result component.
template <typename T, int N, unsigned K, typename V = vec<T, N>>
struct swizzle {
  swizzle() = default;
  swizzle(const swizzle&) = delete;  // `auto s = v.xy;`: name the type instead of auto
  MSL_FN swizzle& operator=(const swizzle& o) { return *this = o.get(); }
  MSL_FN swizzle& operator=(const V& v) {
    T* p = (T*)this;
    p[K & 3] = v.d[0];
    p[K >> 2 & 3] = v.d[1];
    if constexpr (N > 2) p[K >> 4 & 3] = v.d[2];
    if constexpr (N > 3) p[K >> 6 & 3] = v.d[3];
    return *this;
  }
  MSL_FN operator V() const { return get(); }
  MSL_FN V get() const {
    const T* p = (const T*)this;
    V r;
    r.d[0] = p[K & 3];
    r.d[1] = p[K >> 2 & 3];
    if constexpr (N > 2) r.d[2] = p[K >> 4 & 3];
    if constexpr (N > 3) r.d[3] = p[K >> 6 & 3];
    return r;
  }
};

// Operators are friends, found through the operand's type: only instantiated vectors pay for them.
template <typename T, int N>
struct vec_ops {
  typedef vec<T, N> V;
  typedef vec<bool, N> B;
#define MSL_EACH(R, EXPR)                                 \
  R r;                                                    \
  { constexpr int i = 0; r.d[i] = EXPR; }                 \
  { constexpr int i = 1; r.d[i] = EXPR; }                 \
  if constexpr (N > 2) { constexpr int i = N > 2 ? 2 : 0; r.d[i] = EXPR; } \
  if constexpr (N > 3) { constexpr int i = N > 3 ? 3 : 0; r.d[i] = EXPR; } \
  return r;
#define MSL_ARITH(op)                                                                      \
  friend MSL_FN V operator op(const V& a, const V& b) { MSL_EACH(V, (T)(a.d[i] op b.d[i])) } \
  friend MSL_FN V& operator op##=(V& a, const V& b) { return a = a op b; }                 \
  template <unsigned K>                                                                    \
  friend MSL_FN swizzle<T, N, K>& operator op##=(swizzle<T, N, K>& a, const V& b) {        \
    return a = a.get() op b;                                                                  \
  }
  MSL_ARITH(+) MSL_ARITH(-) MSL_ARITH(*) MSL_ARITH(/) MSL_ARITH(%)
  MSL_ARITH(&) MSL_ARITH(|) MSL_ARITH(^) MSL_ARITH(<<) MSL_ARITH(>>)
#undef MSL_ARITH
#define MSL_COMPARE(op) \
  friend MSL_FN B operator op(const V& a, const V& b) { MSL_EACH(B, a.d[i] op b.d[i]) }
  MSL_COMPARE(==) MSL_COMPARE(!=) MSL_COMPARE(<) MSL_COMPARE(>) MSL_COMPARE(<=)
  MSL_COMPARE(>=) MSL_COMPARE(&&) MSL_COMPARE(||)
#undef MSL_COMPARE
  friend MSL_FN V operator+(const V& a) { return a; }
  friend MSL_FN V operator-(const V& a) { MSL_EACH(V, (T)(-a.d[i])) }
  friend MSL_FN V operator~(const V& a) { MSL_EACH(V, (T)(~a.d[i])) }
  friend MSL_FN B operator!(const V& a) { MSL_EACH(B, !a.d[i]) }
  friend MSL_FN V& operator++(V& a) { return a = a + V(1); }
  friend MSL_FN V& operator--(V& a) { return a = a - V(1); }
  friend MSL_FN V operator++(V& a, int) { V r = a; a = a + V(1); return r; }
  friend MSL_FN V operator--(V& a, int) { V r = a; a = a - V(1); return r; }
};

// Swizzles that vectors of 2, 3 and 4 components have. The executors define these lists from the kernel's
// text (text.swizzle_macros), since all 336 of a vec4 would cost 0.1 s of compile time per element type.
#ifndef MSL_SWIZZLES_2
#define MSL_SWIZZLES_2 MSL_SWIZZLE(xy, 2, 4) MSL_SWIZZLE(yx, 2, 1)
#define MSL_SWIZZLES_3 \
  MSL_SWIZZLES_2 MSL_SWIZZLE(yz, 2, 9) MSL_SWIZZLE(xz, 2, 8) MSL_SWIZZLE(xyz, 3, 36) MSL_SWIZZLE(zyx, 3, 6)
#define MSL_SWIZZLES_4 \
  MSL_SWIZZLES_3 MSL_SWIZZLE(zw, 2, 14) MSL_SWIZZLE(yw, 2, 13) MSL_SWIZZLE(xw, 2, 12) \
  MSL_SWIZZLE(yzw, 3, 57) MSL_SWIZZLE(xyzw, 4, 228) MSL_SWIZZLE(wzyx, 4, 27)
#endif
#define MSL_SWIZZLE(name, n, k) swizzle<T, n, k> name;

// A vector is copied whole; a profile counts what each component would be on a GPU.
#ifdef EMU_PROFILE
#define MSL_COPY(N)                                                                               \
  MSL_FN vec(const vec& o) { for (int i = 0; i < N; i++) d[i] = o.d[i]; }                         \
  MSL_FN vec& operator=(const vec& o) { for (int i = 0; i < N; i++) d[i] = o.d[i]; return *this; }
#else
#define MSL_COPY(N)                                                                               \
  MSL_FN constexpr vec(const vec& o) : raw(o.raw) {}                                              \
  MSL_FN vec& operator=(const vec& o) { raw = o.raw; return *this; }
#endif

// What every vector has, whatever N is.
#define MSL_VEC_COMMON(N)                                                                         \
  typedef T element_type;                                                                         \
  vec() = default;                                                                                \
  MSL_COPY(N)                                                                                     \
  template <typename U, unsigned K>                                                               \
  MSL_FN explicit vec(const swizzle<U, N, K>& s) : vec(s.get()) {}                           \
  MSL_FN T& operator[](int i) { MSL_INDEX(i, N) return d[i]; }                                    \
  MSL_FN const T& operator[](int i) const { MSL_INDEX(i, N) return d[i]; }

#define MSL_IF_SCALAR(U) typename msl_require<msl_is_scalar<U>::value>::type = 0

template <typename T>
struct vec<T, 2> : vec_ops<T, 2> {
  struct MSL_ALIGN(2 * sizeof(T)) Raw { T e[2]; };
  union {
    Raw raw;
    T d[2];
    struct { T x, y; };
    struct { T r, g; };
    MSL_SWIZZLES_2
  };
  MSL_VEC_COMMON(2)
  template <typename U, MSL_IF_SCALAR(U)>
  MSL_FN constexpr vec(U a) : x((T)a), y((T)a) {}
  MSL_FN constexpr vec(T a, T b) : x(a), y(b) {}
  template <typename U>
  MSL_FN constexpr explicit vec(const vec<U, 2>& v) : x(msl_convert<T, U>::from(v.x)), y(msl_convert<T, U>::from(v.y)) {}
  MSL_FN constexpr vec(const packed_vec<T, 2>& v) : x(v.x), y(v.y) {}
};

template <typename T>
struct vec<T, 3> : vec_ops<T, 3> {
  struct MSL_ALIGN(4 * sizeof(T)) Raw { T e[4]; };  // size and alignment of four elements
  union {
    Raw raw;
    T d[3];
    struct { T x, y, z; };
    struct { T r, g, b; };
    MSL_SWIZZLES_3
  };
  MSL_VEC_COMMON(3)
  template <typename U, MSL_IF_SCALAR(U)>
  MSL_FN constexpr vec(U a) : x((T)a), y((T)a), z((T)a) {}
  MSL_FN constexpr vec(T a, T b, T c) : x(a), y(b), z(c) {}
  MSL_FN constexpr vec(const vec<T, 2>& v, T c) : x(v.x), y(v.y), z(c) {}
  MSL_FN constexpr vec(T a, const vec<T, 2>& v) : x(a), y(v.x), z(v.y) {}
  template <typename U>
  MSL_FN constexpr explicit vec(const vec<U, 3>& v) : x(msl_convert<T, U>::from(v.x)), y(msl_convert<T, U>::from(v.y)), z(msl_convert<T, U>::from(v.z)) {}
  MSL_FN constexpr vec(const packed_vec<T, 3>& v) : x(v.x), y(v.y), z(v.z) {}
};

template <typename T>
struct vec<T, 4> : vec_ops<T, 4> {
  struct MSL_ALIGN(4 * sizeof(T)) Raw { T e[4]; };
  union {
    Raw raw;
    T d[4];
    struct { T x, y, z, w; };
    struct { T r, g, b, a; };
    MSL_SWIZZLES_4
  };
  MSL_VEC_COMMON(4)
  template <typename U, MSL_IF_SCALAR(U)>
  MSL_FN constexpr vec(U s) : x((T)s), y((T)s), z((T)s), w((T)s) {}
  MSL_FN constexpr vec(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
  MSL_FN constexpr vec(const vec<T, 2>& v, T c, T d) : x(v.x), y(v.y), z(c), w(d) {}
  MSL_FN constexpr vec(T a, const vec<T, 2>& v, T d) : x(a), y(v.x), z(v.y), w(d) {}
  MSL_FN constexpr vec(T a, T b, const vec<T, 2>& v) : x(a), y(b), z(v.x), w(v.y) {}
  MSL_FN constexpr vec(const vec<T, 2>& u, const vec<T, 2>& v) : x(u.x), y(u.y), z(v.x), w(v.y) {}
  MSL_FN constexpr vec(const vec<T, 3>& v, T d) : x(v.x), y(v.y), z(v.z), w(d) {}
  MSL_FN constexpr vec(T a, const vec<T, 3>& v) : x(a), y(v.x), z(v.y), w(v.z) {}
  template <typename U>
  MSL_FN constexpr explicit vec(const vec<U, 4>& v) : x(msl_convert<T, U>::from(v.x)), y(msl_convert<T, U>::from(v.y)), z(msl_convert<T, U>::from(v.z)), w(msl_convert<T, U>::from(v.w)) {}
  MSL_FN constexpr vec(const packed_vec<T, 4>& v) : x(v.x), y(v.y), z(v.z), w(v.w) {}
};

// Packed vectors: storage with the alignment of one element; arithmetic goes through vec.
#define MSL_PACKED_COMMON(N)                                                        \
  packed_vec() = default;                                                           \
  template <typename U, MSL_IF_SCALAR(U)>                                           \
  MSL_FN constexpr packed_vec(U s) : packed_vec(vec<T, N>(s)) {}                    \
  MSL_FN T& operator[](int i) { return (&x)[i]; }                                   \
  MSL_FN const T& operator[](int i) const { return (&x)[i]; }
template <typename T>
struct packed_vec<T, 2> : vec_ops<T, 2> {
  T x, y;
  MSL_PACKED_COMMON(2)
  MSL_FN constexpr packed_vec(T a, T b) : x(a), y(b) {}
  MSL_FN constexpr packed_vec(const vec<T, 2>& v) : x(v.x), y(v.y) {}
};
template <typename T>
struct packed_vec<T, 3> : vec_ops<T, 3> {
  T x, y, z;
  MSL_PACKED_COMMON(3)
  MSL_FN constexpr packed_vec(T a, T b, T c) : x(a), y(b), z(c) {}
  MSL_FN constexpr packed_vec(const vec<T, 3>& v) : x(v.x), y(v.y), z(v.z) {}
};
template <typename T>
struct packed_vec<T, 4> : vec_ops<T, 4> {
  T x, y, z, w;
  MSL_PACKED_COMMON(4)
  MSL_FN constexpr packed_vec(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
  MSL_FN constexpr packed_vec(const vec<T, 4>& v) : x(v.x), y(v.y), z(v.z), w(v.w) {}
};

#undef MSL_VEC_COMMON
#undef MSL_PACKED_COMMON

#define MSL_NAMES(T, NAME)                                                                    \
  typedef vec<T, 2> NAME##2; typedef vec<T, 3> NAME##3; typedef vec<T, 4> NAME##4;            \
  typedef packed_vec<T, 2> packed_##NAME##2; typedef packed_vec<T, 3> packed_##NAME##3;       \
  typedef packed_vec<T, 4> packed_##NAME##4;
MSL_NAMES(bool, bool) MSL_NAMES(char, char) MSL_NAMES(uchar, uchar) MSL_NAMES(short, short)
MSL_NAMES(ushort, ushort) MSL_NAMES(int, int) MSL_NAMES(uint, uint) MSL_NAMES(long, long)
MSL_NAMES(ulong, ulong) MSL_NAMES(half, half) MSL_NAMES(bfloat, bfloat) MSL_NAMES(float, float)
#undef MSL_NAMES

}  // namespace metal
