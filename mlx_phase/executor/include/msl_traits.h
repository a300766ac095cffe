// Constants, type traits and numeric_limits of the Metal standard library; included by msl_common.h.
#pragma once

#undef isnan
#undef isinf
#undef isfinite
#undef isnormal
#undef signbit

#ifdef __CUDACC__
#define MSL_M(name) ::name
#define MSL_MEMCPY ::memcpy
#define MSL_BITS(T, bits) T::from_bits(bits)
#else
#define MSL_M(name) __builtin_##name
#define MSL_MEMCPY __builtin_memcpy
#define MSL_BITS(T, bits) __builtin_bit_cast(T, (unsigned short)(bits))
#endif

#undef INFINITY
#undef NAN
#undef HUGE_VALF
#define INFINITY __builtin_bit_cast(float, 0x7f800000)
#define NAN __builtin_bit_cast(float, 0x7fc00000)
#define HUGE_VALF INFINITY
#define MAXFLOAT 3.402823466e+38f
#define HALF_MAX ((half)65504.0f)
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.43429448190325182765f
#define M_LN2_F 0.69314718055994530942f
#define M_LN10_F 2.30258509299404568402f
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_PI_4_F 0.78539816339744830962f
#define M_1_PI_F 0.31830988618379067154f
#define M_2_PI_F 0.63661977236758134308f
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.70710678118654752440f

namespace metal {

// ---- type traits
template <typename T, T v> struct integral_constant {
  static constexpr T value = v;
  typedef T value_type;
  typedef integral_constant type;
  MSL_FN constexpr operator T() const { return v; }
};
template <bool B> using bool_constant = integral_constant<bool, B>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;
template <bool B, typename T = void> struct enable_if {};
template <typename T> struct enable_if<true, T> { typedef T type; };
template <bool B, typename T = void> using enable_if_t = typename enable_if<B, T>::type;
template <bool B, typename T, typename F> struct conditional { typedef T type; };
template <typename T, typename F> struct conditional<false, T, F> { typedef F type; };
template <bool B, typename T, typename F> using conditional_t = typename conditional<B, T, F>::type;
template <typename A, typename B> struct is_same : false_type {};
template <typename A> struct is_same<A, A> : true_type {};
template <typename T> struct remove_const { typedef T type; };
template <typename T> struct remove_const<const T> { typedef T type; };
template <typename T> struct remove_volatile { typedef T type; };
template <typename T> struct remove_volatile<volatile T> { typedef T type; };
template <typename T> struct remove_cv { typedef typename remove_volatile<typename remove_const<T>::type>::type type; };
template <typename T> struct remove_reference { typedef T type; };
template <typename T> struct remove_reference<T&> { typedef T type; };
template <typename T> struct remove_reference<T&&> { typedef T type; };
template <typename T> struct remove_pointer { typedef T type; };
template <typename T> struct remove_pointer<T*> { typedef T type; };
template <typename T> struct decay { typedef typename remove_cv<typename remove_reference<T>::type>::type type; };
template <typename T> struct remove_addrspace { typedef T type; };
template <typename T> using remove_addrspace_t = T;
template <typename T> using remove_const_t = typename remove_const<T>::type;
template <typename T> using remove_volatile_t = typename remove_volatile<T>::type;
template <typename T> using remove_cv_t = typename remove_cv<T>::type;
template <typename T> using remove_reference_t = typename remove_reference<T>::type;
template <typename T> using remove_pointer_t = typename remove_pointer<T>::type;
template <typename T> using decay_t = typename decay<T>::type;
template <typename T> struct msl_integral : false_type {};
#define MSL_INT(T, U, S)                                  \
  template <> struct msl_integral<T> : true_type {};      \
  template <> struct msl_unsigned<T> { typedef U type; typedef S stype; };
template <typename T> struct msl_unsigned { typedef T type; typedef T stype; };
MSL_INT(char, unsigned char, char)
MSL_INT(signed char, unsigned char, signed char)
MSL_INT(unsigned char, unsigned char, signed char)
MSL_INT(short, unsigned short, short)
MSL_INT(unsigned short, unsigned short, short)
MSL_INT(int, unsigned int, int)
MSL_INT(unsigned int, unsigned int, int)
MSL_INT(long, unsigned long, long)
MSL_INT(unsigned long, unsigned long, long)
MSL_INT(long long, unsigned long long, long long)
MSL_INT(unsigned long long, unsigned long long, long long)
#undef MSL_INT
template <> struct msl_integral<bool> : true_type {};
template <typename T> struct make_unsigned { typedef typename msl_unsigned<T>::type type; };
template <typename T> struct make_signed { typedef typename msl_unsigned<T>::stype type; };
template <typename T> using make_unsigned_t = typename make_unsigned<T>::type;
template <typename T> using make_signed_t = typename make_signed<T>::type;
template <typename T> struct is_integral : msl_integral<remove_cv_t<T>> {};
template <typename T>
struct is_floating_point
    : bool_constant<is_same<remove_cv_t<T>, float>::value || is_same<remove_cv_t<T>, half>::value ||
                    is_same<remove_cv_t<T>, bfloat>::value> {};
template <typename T>
struct is_arithmetic : bool_constant<is_integral<T>::value || is_floating_point<T>::value> {};
template <typename T> struct is_scalar : is_arithmetic<T> {};
template <typename T>
struct is_unsigned
    : bool_constant<is_integral<T>::value && is_same<remove_cv_t<T>, make_unsigned_t<remove_cv_t<T>>>::value> {};
template <typename T> struct is_signed : bool_constant<is_arithmetic<T>::value && !is_unsigned<T>::value> {};
template <typename T> struct is_pointer : false_type {};
template <typename T> struct is_pointer<T*> : true_type {};
template <typename T> struct is_const : false_type {};
template <typename T> struct is_const<const T> : true_type {};
template <typename T> struct is_void : is_same<remove_cv_t<T>, void> {};
template <typename T> struct is_vector : false_type {};
template <typename T, int N> struct is_vector<vec<T, N>> : true_type {};
template <typename A, typename B> struct is_convertible : bool_constant<__is_convertible_to(A, B)> {};
template <typename A, typename B> struct is_base_of : bool_constant<__is_base_of(A, B)> {};
#define MSL_VALUE(name) \
  template <typename T> inline constexpr bool name##_v = name<T>::value;
MSL_VALUE(is_integral) MSL_VALUE(is_floating_point) MSL_VALUE(is_arithmetic) MSL_VALUE(is_scalar)
MSL_VALUE(is_unsigned) MSL_VALUE(is_signed) MSL_VALUE(is_pointer) MSL_VALUE(is_const)
MSL_VALUE(is_void) MSL_VALUE(is_vector)
#undef MSL_VALUE
template <typename A, typename B> inline constexpr bool is_same_v = is_same<A, B>::value;
template <typename A, typename B> inline constexpr bool is_convertible_v = is_convertible<A, B>::value;
template <typename A, typename B> inline constexpr bool is_base_of_v = is_base_of<A, B>::value;
template <typename T> remove_reference_t<T>&& declval();

template <typename T, size_t N>
struct array {
  T msl_e[N];
  MSL_FN constexpr T& operator[](size_t i) { return msl_e[i]; }
  MSL_FN constexpr const T& operator[](size_t i) const { return msl_e[i]; }
  MSL_FN constexpr size_t size() const { return N; }
};

// ---- numeric_limits
template <typename T> struct numeric_limits {
  typedef make_unsigned_t<T> U;
  static constexpr bool is_signed = (T)-1 < (T)0, is_integer = true;
  static constexpr int digits = sizeof(T) * 8 - is_signed;
  MSL_FN static constexpr T max() { return (T)((U)~(U)0 >> (is_signed ? 1 : 0)); }
  MSL_FN static constexpr T min() { return is_signed ? (T)(-max() - 1) : (T)0; }
  MSL_FN static constexpr T lowest() { return min(); }
};
template <> struct numeric_limits<bool> {
  static constexpr bool is_signed = false, is_integer = true;
  static constexpr int digits = 1;
  MSL_FN static constexpr bool max() { return true; }
  MSL_FN static constexpr bool min() { return false; }
  MSL_FN static constexpr bool lowest() { return false; }
};
#define MSL_FLOAT_LIMITS(T, D, MAX, MIN, LOWEST, EPS, INF, QNAN, DENORM)       \
  template <> struct numeric_limits<T> {                                       \
    static constexpr bool is_signed = true, is_integer = false;                \
    static constexpr bool has_infinity = true, has_quiet_NaN = true;           \
    static constexpr int digits = D;                                           \
    MSL_FN static constexpr T max() { return MAX; }                            \
    MSL_FN static constexpr T min() { return MIN; }                            \
    MSL_FN static constexpr T lowest() { return LOWEST; }                      \
    MSL_FN static constexpr T epsilon() { return EPS; }                        \
    MSL_FN static constexpr T infinity() { return INF; }                       \
    MSL_FN static constexpr T quiet_NaN() { return QNAN; }                     \
    MSL_FN static constexpr T denorm_min() { return DENORM; }                  \
  };
MSL_FLOAT_LIMITS(float, 24, 3.402823466e+38f, 1.175494351e-38f, -3.402823466e+38f, 1.1920928955e-7f, INFINITY, NAN,
                 1.401298464e-45f)
MSL_FLOAT_LIMITS(half, 11, MSL_BITS(half, 0x7bff), MSL_BITS(half, 0x0400), MSL_BITS(half, 0xfbff),
                 MSL_BITS(half, 0x1400), MSL_BITS(half, 0x7c00), MSL_BITS(half, 0x7e00), MSL_BITS(half, 1))
MSL_FLOAT_LIMITS(bfloat, 8, MSL_BITS(bfloat, 0x7f7f), MSL_BITS(bfloat, 0x0080), MSL_BITS(bfloat, 0xff7f),
                 MSL_BITS(bfloat, 0x3c00), MSL_BITS(bfloat, 0x7f80), MSL_BITS(bfloat, 0x7fc0), MSL_BITS(bfloat, 1))
#undef MSL_FLOAT_LIMITS

}  // namespace metal
