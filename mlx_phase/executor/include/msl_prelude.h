// The names that MLX puts in front of every custom Metal kernel: number types, Limits, element offsets.
// Written from their documented behaviour; included by msl_common.h.
#pragma once

typedef half float16_t;
typedef bfloat bfloat16_t;

#ifndef METAL_FUNC
#define METAL_FUNC MSL_FN
#endif
#define MLX_MTL_CONST static constexpr
#define MTL_CONST
#define MLX_MTL_PRAGMA_UNROLL _Pragma("unroll")
#define MLX_MTL_LOOP_UNROLL _Pragma("unroll")
#define PRAGMA_UNROLL _Pragma("unroll")

struct complex64_t {
  float real;
  float imag;
  complex64_t() = default;
  MSL_FN constexpr complex64_t(float re, float im) : real(re), imag(im) {}
  template <typename T, typename metal::msl_require<metal::msl_is_scalar<T>::value>::type = 0>
  MSL_FN constexpr complex64_t(T re) : real((float)re), imag(0.0f) {}
  template <typename T, typename metal::msl_require<metal::msl_is_scalar<T>::value>::type = 0>
  MSL_FN constexpr explicit operator T() const { return (T)real; }

  // Friends, so that they are no candidates for half < half.
  friend MSL_FN constexpr complex64_t operator-(complex64_t a) { return complex64_t(-a.real, -a.imag); }
  friend MSL_FN constexpr complex64_t operator+(complex64_t a, complex64_t b) {
    return complex64_t(a.real + b.real, a.imag + b.imag);
  }
  friend MSL_FN constexpr complex64_t operator-(complex64_t a, complex64_t b) {
    return complex64_t(a.real - b.real, a.imag - b.imag);
  }
  friend MSL_FN constexpr complex64_t operator*(complex64_t a, complex64_t b) {
    return complex64_t(a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real);
  }
  friend MSL_FN constexpr complex64_t operator/(complex64_t a, complex64_t b) {
    const float norm = b.real * b.real + b.imag * b.imag;
    return complex64_t((a.real * b.real + a.imag * b.imag) / norm, (a.imag * b.real - a.real * b.imag) / norm);
  }
  friend MSL_FN complex64_t& operator+=(complex64_t& a, complex64_t b) { return a = a + b; }
  friend MSL_FN complex64_t& operator-=(complex64_t& a, complex64_t b) { return a = a - b; }
  friend MSL_FN complex64_t& operator*=(complex64_t& a, complex64_t b) { return a = a * b; }
  friend MSL_FN complex64_t& operator/=(complex64_t& a, complex64_t b) { return a = a / b; }
  friend MSL_FN constexpr bool operator==(complex64_t a, complex64_t b) { return a.real == b.real && a.imag == b.imag; }
  friend MSL_FN constexpr bool operator!=(complex64_t a, complex64_t b) { return !(a == b); }
  // Order by the real part, then by the imaginary one.
  friend MSL_FN constexpr bool operator<(complex64_t a, complex64_t b) {
    return a.real == b.real ? a.imag < b.imag : a.real < b.real;
  }
  friend MSL_FN constexpr bool operator>(complex64_t a, complex64_t b) { return b < a; }
  friend MSL_FN constexpr bool operator>=(complex64_t a, complex64_t b) { return a > b || a == b; }
  friend MSL_FN constexpr bool operator<=(complex64_t a, complex64_t b) { return b >= a; }
  // As NumPy: the result has the sign of the divisor.
  friend MSL_FN complex64_t operator%(complex64_t a, complex64_t b) {
    const complex64_t q = a / b;
    return a - complex64_t(metal::floor(q.real), metal::floor(q.imag)) * b;
  }
};

// Highest and lowest value of T; for floating point max and min are the infinities.
template <typename T>
struct Limits {
  static constexpr T max = metal::numeric_limits<T>::max();
  static constexpr T min = metal::numeric_limits<T>::min();
  static constexpr T finite_max = metal::numeric_limits<T>::max();
  static constexpr T finite_min = metal::numeric_limits<T>::min();
};
#define MSL_FLOAT_LIMITS(T, MINUS_INFINITY)                                  \
  template <>                                                                \
  struct Limits<T> {                                                         \
    static constexpr T max = metal::numeric_limits<T>::infinity();           \
    static constexpr T min = MINUS_INFINITY;                                 \
    static constexpr T finite_max = metal::numeric_limits<T>::max();         \
    static constexpr T finite_min = metal::numeric_limits<T>::lowest();      \
  };
MSL_FLOAT_LIMITS(float, -INFINITY)
MSL_FLOAT_LIMITS(half, MSL_BITS(half, 0xfc00))
MSL_FLOAT_LIMITS(bfloat, MSL_BITS(bfloat, 0xff80))
#undef MSL_FLOAT_LIMITS
template <>
struct Limits<complex64_t> {
  static constexpr complex64_t max = complex64_t(INFINITY, 0.0f);
  static constexpr complex64_t min = complex64_t(-INFINITY, 0.0f);
};

template <bool condition, typename T, typename U> struct ConditionalType { typedef U type; };
template <typename T, typename U> struct ConditionalType<true, T, U> { typedef T type; };
// Elements that one thread of an elementwise kernel takes: eight bytes of them.
template <typename T> struct WorkPerThread {
  static constexpr int n = sizeof(T) < 8 ? 8 / sizeof(T) : 1;
};
static constexpr int REDUCE_N_READS = 4, REDUCE_N_WRITES = 4, SOFTMAX_N_READS = 4, RMS_N_READS = 4;
static constexpr int RMS_LOOPED_LIMIT = 4096;

template <typename T, typename U>
MSL_FN T ceildiv(T N, U M) { return (N + M - 1) / M; }

// log(1 + x) without losing the low bits of a small x.
template <typename T>
MSL_FN metal::float_t<T> log1p(const T& x) {
  struct F { MSL_FN static float f(float v) { return MSL_M(log1pf)(v); } };
  return metal::map1<F, float, metal::float_t<T>>(metal::plain(x));
}
MSL_FN complex64_t log1p(complex64_t z) {
  const float x = z.real, y = z.imag;
  const float abs2 = x * (2.0f + x) + y * y;  // |1 + z|^2 - 1
  return complex64_t(0.5f * MSL_M(log1pf)(abs2), MSL_M(atan2f)(y, 1.0f + x));
}

// ---- offset of an element in a strided array (strides in elements, last axis fastest)
template <typename IdxT = int64_t, typename ElemT = int64_t>
MSL_FN IdxT elem_to_loc(ElemT elem, const int* shape, const int64_t* strides, int ndim) {
  IdxT loc = 0;
  for (int i = ndim - 1; i >= 0 && elem > 0; --i) {
    loc += (IdxT)(elem % (ElemT)shape[i]) * (IdxT)strides[i];
    elem /= (ElemT)shape[i];
  }
  return loc;
}
// elem: position along the last axis (x), the one before (y), and all others together (z)
template <typename IdxT = int64_t>
MSL_FN IdxT elem_to_loc(metal::uint3 elem, const int* shape, const int64_t* strides, int ndim) {
  IdxT loc = (IdxT)elem.x * (IdxT)strides[ndim - 1] + (IdxT)elem.y * (IdxT)strides[ndim - 2];
  for (int d = ndim - 3; d >= 0; --d) {
    loc += (IdxT)(elem.z % (uint)shape[d]) * (IdxT)strides[d];
    elem.z /= (uint)shape[d];
  }
  return loc;
}
template <typename IdxT = int64_t>
MSL_FN IdxT elem_to_loc_1(uint elem, const int64_t& stride) {
  return (IdxT)elem * (IdxT)stride;
}
template <typename IdxT = int64_t>
MSL_FN IdxT elem_to_loc_2(metal::uint2 elem, const int64_t* strides) {
  return (IdxT)elem.x * (IdxT)strides[1] + (IdxT)elem.y * (IdxT)strides[0];
}
template <typename IdxT = int64_t>
MSL_FN IdxT elem_to_loc_3(metal::uint3 elem, const int64_t* strides) {
  return (IdxT)elem.x * (IdxT)strides[2] + (IdxT)elem.y * (IdxT)strides[1] + (IdxT)elem.z * (IdxT)strides[0];
}
// The offsets in two or three arrays of one shape.
template <typename IdxT = int64_t>
MSL_FN metal::vec<IdxT, 2> elem_to_loc_2_nd(
    metal::uint3 elem, const int* shape, const int64_t* a_strides, const int64_t* b_strides, int ndim) {
  return metal::vec<IdxT, 2>(elem_to_loc<IdxT>(elem, shape, a_strides, ndim),
                             elem_to_loc<IdxT>(elem, shape, b_strides, ndim));
}
template <typename IdxT = int64_t>
MSL_FN metal::vec<IdxT, 3> elem_to_loc_3_nd(metal::uint3 elem, const int* shape, const int64_t* a_strides,
                                            const int64_t* b_strides, const int64_t* c_strides, int ndim) {
  return metal::vec<IdxT, 3>(elem_to_loc<IdxT>(elem, shape, a_strides, ndim),
                             elem_to_loc<IdxT>(elem, shape, b_strides, ndim),
                             elem_to_loc<IdxT>(elem, shape, c_strides, ndim));
}
