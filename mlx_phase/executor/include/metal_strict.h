// Declarations of the Metal library for the strict check: read by clang in C++ for
// OpenCL mode, whose address spaces follow the same rules as Metal's. Nothing is
// defined here: the text is type-checked, never run.
#pragma once
#pragma clang system_header
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

#define device __global
#define threadgroup __local
#define constant __constant
#define thread __private
#define kernel
// Words that are keywords in OpenCL and plain names in Metal.
#define local msl_local
#define global msl_global
#define generic msl_generic
#define pipe msl_pipe
#define __METAL__ 1
#define __METAL_VERSION__ 310
#define __HAVE_BFLOAT__ 1
#define METAL_FUNC inline __attribute__((always_inline))

typedef __bf16 bfloat;
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef uchar uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef ulong uint64_t;
typedef ulong size_t;
typedef long ptrdiff_t;

#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define HUGE_VALF INFINITY
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define HALF_MAX 65504.0h
#define INT_MAX __INT_MAX__
#define INT_MIN (-__INT_MAX__ - 1)
#define UINT_MAX 4294967295u
#define M_PI_F 3.14159265358979323846f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f

namespace metal {

template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));

#define MSL_VECTOR_TYPES(T, E) \
  typedef vec<E, 2> T##2;      \
  typedef vec<E, 3> T##3;      \
  typedef vec<E, 4> T##4;
#define MSL_FOR_INTS_32(F) \
  F(char) F(uchar) F(short) F(ushort) F(int) F(uint)
#define MSL_FOR_INTS(F) MSL_FOR_INTS_32(F) F(long) F(ulong)
#define MSL_FOR_FLOATS(F) F(half) F(float) F(bfloat)
#define MSL_SHAPES(F, T) F(T) F(T##2) F(T##3) F(T##4)
MSL_VECTOR_TYPES(char, char)
MSL_VECTOR_TYPES(uchar, uchar)
MSL_VECTOR_TYPES(short, short)
MSL_VECTOR_TYPES(ushort, ushort)
MSL_VECTOR_TYPES(int, int)
MSL_VECTOR_TYPES(uint, uint)
MSL_VECTOR_TYPES(long, long)
MSL_VECTOR_TYPES(ulong, ulong)
MSL_VECTOR_TYPES(half, half)
MSL_VECTOR_TYPES(float, float)
MSL_VECTOR_TYPES(bfloat, bfloat)
MSL_VECTOR_TYPES(bool, int)  // OpenCL has no vectors of bool; comparisons give int

// Type traits.
template <typename T, T v>
struct integral_constant {
  static constant constexpr const T value = v;
};
typedef integral_constant<bool, true> true_type;
typedef integral_constant<bool, false> false_type;
template <bool B, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, typename T = void>
using enable_if_t = typename enable_if<B, T>::type;
template <bool B, typename T, typename U>
struct conditional {
  typedef T type;
};
template <typename T, typename U>
struct conditional<false, T, U> {
  typedef U type;
};
template <bool B, typename T, typename U>
using conditional_t = typename conditional<B, T, U>::type;
template <typename T, typename U>
struct is_same : false_type {};
template <typename T>
struct is_same<T, T> : true_type {};
template <typename T, typename U>
static constant constexpr const bool is_same_v = is_same<T, U>::value;
template <typename T>
struct is_integral : false_type {};
template <typename T>
struct is_floating_point : false_type {};
template <typename T>
struct is_unsigned : false_type {};
#define MSL_TRAIT(TRAIT, T) \
  template <>               \
  struct TRAIT<T> : true_type {};
#define MSL_INTEGRAL(T) MSL_TRAIT(is_integral, T)
#define MSL_FLOATING(T) MSL_TRAIT(is_floating_point, T)
MSL_FOR_INTS(MSL_INTEGRAL)
MSL_INTEGRAL(bool)
MSL_INTEGRAL(signed char)
MSL_FOR_FLOATS(MSL_FLOATING)
MSL_TRAIT(is_unsigned, uchar)
MSL_TRAIT(is_unsigned, ushort)
MSL_TRAIT(is_unsigned, uint)
MSL_TRAIT(is_unsigned, ulong)
template <typename T>
static constant constexpr const bool is_integral_v = is_integral<T>::value;
template <typename T>
static constant constexpr const bool is_floating_point_v = is_floating_point<T>::value;
template <typename T>
static constant constexpr const bool is_unsigned_v = is_unsigned<T>::value;
template <typename T>
static constant constexpr const bool is_arithmetic_v =
    is_integral<T>::value || is_floating_point<T>::value;

template <typename T>
struct numeric_limits;
#define MSL_LIMITS(T, LOW, MAX)                                   \
  template <>                                                     \
  struct numeric_limits<T> {                                      \
    static constexpr T lowest() { return T(LOW); }                \
    static constexpr T min() { return T(LOW); }                   \
    static constexpr T max() { return T(MAX); }                   \
    static constexpr T infinity() { return T(__builtin_inff()); } \
    static constexpr T quiet_NaN() { return T(NAN); }             \
    static constexpr T epsilon() { return T(FLT_EPSILON); }       \
  };
MSL_LIMITS(float, -FLT_MAX, FLT_MAX)
MSL_LIMITS(half, -65504.0f, 65504.0f)
MSL_LIMITS(bfloat, -3.3895314e38f, 3.3895314e38f)
#undef MSL_LIMITS
#define MSL_LIMITS(T, LOW, MAX)                    \
  template <>                                      \
  struct numeric_limits<T> {                       \
    static constexpr T lowest() { return T(LOW); } \
    static constexpr T min() { return T(LOW); }    \
    static constexpr T max() { return T(MAX); }    \
  };
MSL_LIMITS(char, -128, 127)
MSL_LIMITS(uchar, 0, 255)
MSL_LIMITS(short, -32768, 32767)
MSL_LIMITS(ushort, 0, 65535)
MSL_LIMITS(int, INT_MIN, INT_MAX)
MSL_LIMITS(uint, 0, UINT_MAX)
MSL_LIMITS(long, -__LONG_MAX__ - 1, __LONG_MAX__)
MSL_LIMITS(ulong, 0, ~0ul)
MSL_LIMITS(bool, false, true)

// T(a, b, ...) of vector types: clang has no such constructor, so it becomes a call.
template <typename T>
struct msl_width {
  static constant constexpr const int n = 1;
};
template <typename T, int N>
struct msl_width<T __attribute__((ext_vector_type(N)))> {
  static constant constexpr const int n = N;
};
template <typename... A>
struct msl_widths {
  static constant constexpr const int n = 0;
};
template <typename A, typename... B>
struct msl_widths<A, B...> {
  static constant constexpr const int n = msl_width<A>::n + msl_widths<B...>::n;
};
template <typename V>
struct msl_element;
template <typename T, int N>
struct msl_element<T __attribute__((ext_vector_type(N)))> {
  typedef T type;
};
template <typename T, typename A>
constexpr T msl_part(A a) {
  return T(a);
}
template <typename T, typename A, int N>
constexpr vec<T, N> msl_part(A __attribute__((ext_vector_type(N))) a) {
  return __builtin_convertvector(a, vec<T, N>);
}
template <typename V>
constexpr V msl_make() {
  return V();
}
template <typename V, typename A>
constexpr V msl_make(A a) {
  static_assert(msl_width<A>::n == 1 || msl_width<A>::n == msl_width<V>::n,
                "this vector cannot be built from a vector of another width");
  return V(msl_part<typename msl_element<V>::type>(a));
}
template <typename V, typename A, typename B, typename... C>
constexpr V msl_make(A a, B b, C... c) {
  static_assert(msl_widths<A, B, C...>::n == msl_width<V>::n,
                "the arguments do not add up to the vector's width");
  return V{msl_part<typename msl_element<V>::type>(a),
           msl_part<typename msl_element<V>::type>(b),
           msl_part<typename msl_element<V>::type>(c)...};
}
template <typename T, typename U>
enable_if_t<sizeof(T) == sizeof(U), T> as_type(U);
// Stand-in for a threadgroup variable; its use reports the size to the checker.
template <unsigned long Size>
[[deprecated]] constexpr int msl_storage() {
  return 0;
}

// Math. One overload per type, as in Metal, so that mixed arguments are ambiguous here too.
#define MSL_MATH(T)                                                                    \
  T acos(T); T acosh(T); T asin(T); T asinh(T); T atan(T); T atanh(T); T ceil(T);      \
  T cos(T); T cosh(T); T cospi(T); T exp(T); T exp2(T); T exp10(T); T fabs(T);         \
  T floor(T); T fract(T); T log(T); T log2(T); T log10(T); T rint(T); T round(T);      \
  T rsqrt(T); T sin(T); T sinh(T); T sinpi(T); T sqrt(T); T tan(T); T tanh(T);         \
  T tanpi(T); T trunc(T); T abs(T); T atan2(T, T); T copysign(T, T); T divide(T, T);   \
  T fdim(T, T); T fmax(T, T); T fmin(T, T); T fmod(T, T); T pow(T, T); T powr(T, T);   \
  T max(T, T); T min(T, T); T nextafter(T, T); T fma(T, T, T); T clamp(T, T, T);       \
  T max3(T, T, T); T min3(T, T, T); T median3(T, T, T); T fmax3(T, T, T);              \
  T fmin3(T, T, T); T fmedian3(T, T, T);
#define MSL_FLOAT_ONLY(T)                                                              \
  T mix(T, T, T); T saturate(T); T sign(T); T smoothstep(T, T, T); T step(T, T);
#define MSL_MATH_SHAPES(T) MSL_SHAPES(MSL_MATH, T)
MSL_FOR_FLOATS(MSL_MATH_SHAPES)
MSL_SHAPES(MSL_FLOAT_ONLY, float)
MSL_SHAPES(MSL_FLOAT_ONLY, half)
namespace fast {
MSL_FOR_FLOATS(MSL_MATH_SHAPES)
}
namespace precise {
MSL_FOR_FLOATS(MSL_MATH_SHAPES)
}
#define MSL_TESTS(T)                                                          \
  bool isnan(T); bool isinf(T); bool isfinite(T); bool isnormal(T); bool signbit(T); \
  T ldexp(T, int); int ilogb(T); T frexp(T, thread int&); T modf(T, thread T&);      \
  T sincos(T, thread T&);
MSL_FOR_FLOATS(MSL_TESTS)
#define MSL_INT_MATH(T)                                                              \
  T abs(T); T absdiff(T, T); T addsat(T, T); T subsat(T, T); T clamp(T, T, T);       \
  T clz(T); T ctz(T); T hadd(T, T); T rhadd(T, T); T max(T, T); T min(T, T);         \
  T max3(T, T, T); T min3(T, T, T); T median3(T, T, T); T mulhi(T, T);               \
  T madhi(T, T, T); T madsat(T, T, T); T popcount(T); T reverse_bits(T);             \
  T rotate(T, T); T extract_bits(T, uint, uint); T insert_bits(T, T, uint, uint);
#define MSL_INT_SHAPES(T) MSL_SHAPES(MSL_INT_MATH, T)
MSL_FOR_INTS(MSL_INT_SHAPES)
int mul24(int, int);
uint mul24(uint, uint);
int mad24(int, int, int);
uint mad24(uint, uint, uint);
bool all(bool);
bool any(bool);
template <typename T, int N>
bool all(vec<T, N>);
template <typename T, int N>
bool any(vec<T, N>);
#define MSL_SELECT(T) T select(T, T, bool);
MSL_FOR_INTS(MSL_SELECT)
MSL_FOR_FLOATS(MSL_SELECT)
bool select(bool, bool, bool);
template <typename T, typename B, int N>
vec<T, N> select(vec<T, N>, vec<T, N>, vec<B, N>);
#define MSL_GEOMETRY(T)                                                       \
  T dot(T##2, T##2); T dot(T##3, T##3); T dot(T##4, T##4); T length(T##2);    \
  T length(T##3); T length(T##4); T length_squared(T##2);                     \
  T length_squared(T##3); T length_squared(T##4); T##3 cross(T##3, T##3);     \
  T##2 normalize(T##2); T##3 normalize(T##3); T##4 normalize(T##4);
MSL_GEOMETRY(float)
MSL_GEOMETRY(half)
float4 unpack_snorm4x8_to_float(uint);
float4 unpack_unorm4x8_to_float(uint);
float2 unpack_snorm2x16_to_float(uint);
float2 unpack_unorm2x16_to_float(uint);
half4 unpack_snorm4x8_to_half(uint);
half4 unpack_unorm4x8_to_half(uint);

// Synchronisation and simdgroup functions.
enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(int(a) | int(b));
}
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
#define MSL_MOVE(P, T)                                                               \
  T P##_broadcast(T, ushort); T P##_broadcast_first(T); T P##_shuffle(T, ushort);    \
  T P##_shuffle_down(T, ushort); T P##_shuffle_up(T, ushort);                        \
  T P##_shuffle_xor(T, ushort); T P##_shuffle_rotate_down(T, ushort);                \
  T P##_shuffle_rotate_up(T, ushort); T P##_shuffle_and_fill_down(T, T, ushort);     \
  T P##_shuffle_and_fill_up(T, T, ushort);                                           \
  T P##_shuffle_and_fill_down(T, T, ushort, ushort);                                 \
  T P##_shuffle_and_fill_up(T, T, ushort, ushort);
#define MSL_REDUCE(P, T)                                                             \
  T P##_sum(T); T P##_product(T); T P##_min(T); T P##_max(T);                        \
  T P##_prefix_inclusive_sum(T); T P##_prefix_exclusive_sum(T);                      \
  T P##_prefix_inclusive_product(T); T P##_prefix_exclusive_product(T);
#define MSL_BITS(P, T) T P##_and(T); T P##_or(T); T P##_xor(T);
#define MSL_GROUP(T) \
  MSL_MOVE(simd, T) MSL_MOVE(quad, T) MSL_REDUCE(simd, T) MSL_REDUCE(quad, T)
#define MSL_GROUP_SHAPES(T) MSL_SHAPES(MSL_GROUP, T)
#define MSL_GROUP_BITS(T) MSL_BITS(simd, T) MSL_BITS(quad, T)
#define MSL_BITS_SHAPES(T) MSL_SHAPES(MSL_GROUP_BITS, T)
MSL_FOR_INTS_32(MSL_GROUP_SHAPES)
MSL_FOR_INTS_32(MSL_BITS_SHAPES)
MSL_GROUP_SHAPES(half)
MSL_GROUP_SHAPES(float)
MSL_GROUP(bfloat)
struct simd_vote {
  typedef ulong vote_t;
  explicit operator vote_t() const;
};
simd_vote simd_ballot(bool);
simd_vote simd_active_threads_mask();
bool simd_all(bool);
bool simd_any(bool);
bool simd_is_first();
bool simd_is_helper_thread();
bool quad_all(bool);
bool quad_any(bool);
bool quad_is_first();

// Atomics.
enum memory_order { memory_order_relaxed };
template <typename T>
struct atomic {
  T msl_value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
#define MSL_ATOMIC_RMW(S, OP) \
  template <typename T>       \
  T atomic_##OP##_explicit(volatile S atomic<T>*, typename enable_if<true, T>::type, memory_order);
#define MSL_ATOMICS(S)                                                             \
  MSL_ATOMIC_RMW(S, exchange) MSL_ATOMIC_RMW(S, fetch_add) MSL_ATOMIC_RMW(S, fetch_and) \
  MSL_ATOMIC_RMW(S, fetch_max) MSL_ATOMIC_RMW(S, fetch_min) MSL_ATOMIC_RMW(S, fetch_or) \
  MSL_ATOMIC_RMW(S, fetch_sub) MSL_ATOMIC_RMW(S, fetch_xor)                        \
  template <typename T>                                                            \
  T atomic_load_explicit(const volatile S atomic<T>*, memory_order);               \
  template <typename T>                                                            \
  void atomic_store_explicit(volatile S atomic<T>*, typename enable_if<true, T>::type, memory_order); \
  template <typename T>                                                            \
  bool atomic_compare_exchange_weak_explicit(                                      \
      volatile S atomic<T>*, thread T*, typename enable_if<true, T>::type, memory_order, memory_order);
MSL_ATOMICS(device)
MSL_ATOMICS(threadgroup)

// simdgroup_matrix: 8 x 8 of half, bfloat or float.
template <typename T, int Cols, int Rows>
struct simdgroup_matrix {
  static_assert(Cols == 8 && Rows == 8, "simdgroup_matrix is 8 x 8");
  static_assert(is_floating_point<T>::value, "simdgroup_matrix takes half, bfloat, float");
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T) {}
  thread vec<T, 2>& thread_elements() thread;
  vec<T, 2> msl_elements;
};
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <typename T, int C, int R>
simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T);
#define MSL_MATRIX_IO(S)                                                            \
  template <typename T, int C, int R>                                               \
  void simdgroup_load(thread simdgroup_matrix<T, C, R>&, const S T*, ulong = C,     \
                      ulong2 = ulong2(0), bool = false);                            \
  template <typename T, int C, int R>                                               \
  void simdgroup_store(thread simdgroup_matrix<T, C, R>&, S T*, ulong = C,          \
                       ulong2 = ulong2(0), bool = false);
MSL_MATRIX_IO(device)
MSL_MATRIX_IO(threadgroup)
template <typename T, typename A, typename B>
void simdgroup_multiply(
    thread simdgroup_matrix<T, 8, 8>&,
    thread simdgroup_matrix<A, 8, 8>&,
    thread simdgroup_matrix<B, 8, 8>&);
template <typename T, typename A, typename B, typename C>
void simdgroup_multiply_accumulate(
    thread simdgroup_matrix<T, 8, 8>&,
    thread simdgroup_matrix<A, 8, 8>&,
    thread simdgroup_matrix<B, 8, 8>&,
    thread simdgroup_matrix<C, 8, 8>&);

} // namespace metal

// What MLX puts before every custom kernel.
using namespace metal;
typedef bfloat bfloat16_t;
typedef half float16_t;
#define MTL_CONST constant
#define MLX_MTL_CONST static constant constexpr const
#define MLX_MTL_PRAGMA_UNROLL _Pragma("clang loop unroll(full)")
uint16_t bfloat16_to_uint16(const bfloat16_t);
bfloat16_t uint16_to_bfloat16(const uint16_t);
template <typename T>
struct Limits {
  static constant constexpr const T max = numeric_limits<T>::max();
  static constant constexpr const T min = numeric_limits<T>::min();
  static constant constexpr const T finite_max = numeric_limits<T>::max();
  static constant constexpr const T finite_min = numeric_limits<T>::lowest();
};
template <bool B, typename T, typename U>
struct ConditionalType : conditional<B, T, U> {};
template <typename T>
struct complex_t {
  T real;
  T imag;
  complex_t() = default;
  constexpr complex_t(T r, T i = T(0)) : real(r), imag(i) {}
};
typedef complex_t<half> complex32_t;
typedef complex_t<float> complex64_t;
#define MSL_COMPLEX(OP) \
  template <typename T> \
  complex_t<T> operator OP(complex_t<T>, complex_t<T>);
MSL_COMPLEX(+)
MSL_COMPLEX(-)
MSL_COMPLEX(*)
MSL_COMPLEX(/)
template <typename IdxT = int64_t>
IdxT elem_to_loc(IdxT, constant const int*, constant const int64_t*, int);
template <typename IdxT = int64_t>
IdxT elem_to_loc(uint3, constant const int*, constant const int64_t*, int);
template <typename IdxT = int64_t>
IdxT elem_to_loc_1(uint, constant const int64_t&);
template <typename IdxT = int64_t>
IdxT elem_to_loc_2(uint2, constant const int64_t*);
template <typename IdxT = int64_t>
IdxT elem_to_loc_3(uint3, constant const int64_t*);
template <typename T, typename U>
T ceildiv(T, U);
template <typename U, typename T>
U cast_to(T);
float log1p(float);
bfloat16_t log1p(bfloat16_t);
float hypot(float, float);
#define MSL_WIDE_SHUFFLE(T)                                                      \
  T simd_shuffle(T, uint16_t); T simd_shuffle_down(T, uint16_t);                 \
  T simd_shuffle_up(T, uint16_t); T simd_shuffle_and_fill_up(T, T, uint16_t);
MSL_WIDE_SHUFFLE(uint64_t)
MSL_WIDE_SHUFFLE(int64_t)
MSL_WIDE_SHUFFLE(bool)
MSL_WIDE_SHUFFLE(complex64_t)

// A name before "(" is a constructor call; the bare type name is left alone.
#define char2(...) msl_make<char2>(__VA_ARGS__)
#define char3(...) msl_make<char3>(__VA_ARGS__)
#define char4(...) msl_make<char4>(__VA_ARGS__)
#define uchar2(...) msl_make<uchar2>(__VA_ARGS__)
#define uchar3(...) msl_make<uchar3>(__VA_ARGS__)
#define uchar4(...) msl_make<uchar4>(__VA_ARGS__)
#define short2(...) msl_make<short2>(__VA_ARGS__)
#define short3(...) msl_make<short3>(__VA_ARGS__)
#define short4(...) msl_make<short4>(__VA_ARGS__)
#define ushort2(...) msl_make<ushort2>(__VA_ARGS__)
#define ushort3(...) msl_make<ushort3>(__VA_ARGS__)
#define ushort4(...) msl_make<ushort4>(__VA_ARGS__)
#define int2(...) msl_make<int2>(__VA_ARGS__)
#define int3(...) msl_make<int3>(__VA_ARGS__)
#define int4(...) msl_make<int4>(__VA_ARGS__)
#define uint2(...) msl_make<uint2>(__VA_ARGS__)
#define uint3(...) msl_make<uint3>(__VA_ARGS__)
#define uint4(...) msl_make<uint4>(__VA_ARGS__)
#define long2(...) msl_make<long2>(__VA_ARGS__)
#define long4(...) msl_make<long4>(__VA_ARGS__)
#define ulong2(...) msl_make<ulong2>(__VA_ARGS__)
#define ulong4(...) msl_make<ulong4>(__VA_ARGS__)
#define half2(...) msl_make<half2>(__VA_ARGS__)
#define half3(...) msl_make<half3>(__VA_ARGS__)
#define half4(...) msl_make<half4>(__VA_ARGS__)
#define float2(...) msl_make<float2>(__VA_ARGS__)
#define float3(...) msl_make<float3>(__VA_ARGS__)
#define float4(...) msl_make<float4>(__VA_ARGS__)
#define bfloat2(...) msl_make<bfloat2>(__VA_ARGS__)
#define bfloat3(...) msl_make<bfloat3>(__VA_ARGS__)
#define bfloat4(...) msl_make<bfloat4>(__VA_ARGS__)
#define bool2(...) msl_make<bool2>(__VA_ARGS__)
#define bool3(...) msl_make<bool3>(__VA_ARGS__)
#define bool4(...) msl_make<bool4>(__VA_ARGS__)
