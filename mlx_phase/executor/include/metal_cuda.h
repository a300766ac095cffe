// Metal's language and library on CUDA, for NVRTC with C++17 and --device-as-default-execution-space.
// All of it lives in namespace msl, which also holds the kernel's text: there, float4, half, min or exp mean
// Metal's, not CUDA's, and nothing of MLX's own CUDA headers is hidden or changed.
// MSL_RAGGED 1 before inclusion: warps may lack lanes (threadgroup size no multiple of 32, or threads beyond the
// grid that have left); collectives then walk the lanes that are there, as Metal does, at a lower speed.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef MSL_RAGGED
#define MSL_RAGGED 0
#endif
#define MSL_FN __forceinline__
#define METAL_FUNC __forceinline__
#define MSL_ADDRESS(p) ((unsigned long)(p))  // lets a kernel check the alignment that a vector load needs
#define device
#define constant const
#define thread
#define threadgroup
#define kernel
#undef assert
#define assert(x)
#undef inf  // MLX's

namespace msl {

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;  // as in Metal, where int64_t is long
typedef unsigned long uint64_t;
typedef unsigned long size_t;
typedef long ptrdiff_t;
static_assert(sizeof(long) == 8, "long has 64 bits in Metal");

// ---- half and bfloat: implicit to float, rounding back, half op half stays half
template <typename T> struct msl_builtin { static constexpr bool integer = false, real = false; };
#define MSL_BUILTIN(T, INTEGER) \
  template <> struct msl_builtin<T> { static constexpr bool integer = INTEGER, real = !INTEGER; };
MSL_BUILTIN(bool, true) MSL_BUILTIN(char, true) MSL_BUILTIN(signed char, true) MSL_BUILTIN(unsigned char, true)
MSL_BUILTIN(short, true) MSL_BUILTIN(unsigned short, true) MSL_BUILTIN(int, true) MSL_BUILTIN(unsigned int, true)
MSL_BUILTIN(long, true) MSL_BUILTIN(unsigned long, true) MSL_BUILTIN(long long, true)
MSL_BUILTIN(unsigned long long, true) MSL_BUILTIN(float, false) MSL_BUILTIN(double, false)
#undef MSL_BUILTIN
template <bool B, typename T> struct msl_if {};
template <typename T> struct msl_if<true, T> { typedef T type; };

struct half_format {
  typedef __half raw;
  static raw from_bits(unsigned short b) { return __ushort_as_half(b); }
  static unsigned short to_bits(raw r) { return __half_as_ushort(r); }
  static float to_float(unsigned short b) { return __half2float(__ushort_as_half(b)); }
  static raw from_float(float f) { return __float2half_rn(f); }
};
struct bfloat_format {
  typedef __nv_bfloat16 raw;
  static raw from_bits(unsigned short b) { return __ushort_as_bfloat16(b); }
  static unsigned short to_bits(raw r) { return __bfloat16_as_ushort(r); }
  static float to_float(unsigned short b) { return __uint_as_float((unsigned int)b << 16); }
  static raw from_float(float f) { return __float2bfloat16_rn(f); }
};

template <typename F>
struct small_float {
  unsigned short bits;
  small_float() = default;
  template <typename U, typename msl_if<msl_builtin<U>::integer || msl_builtin<U>::real, int>::type = 0>
  MSL_FN small_float(U u) : bits(F::to_bits(F::from_float((float)u))) {}
  template <typename G>
  MSL_FN explicit small_float(small_float<G> o) : small_float((float)o) {}
  MSL_FN operator float() const { return F::to_float(bits); }
  MSL_FN static constexpr small_float from_bits(unsigned short b) { return small_float(b, 0, 0); }
  MSL_FN static small_float from_raw(typename F::raw r) { return from_bits(F::to_bits(r)); }
  MSL_FN typename F::raw raw() const { return F::from_bits(bits); }
  template <typename U> MSL_FN small_float& operator+=(U u) { return *this = small_float(*this + u); }
  template <typename U> MSL_FN small_float& operator-=(U u) { return *this = small_float(*this - u); }
  template <typename U> MSL_FN small_float& operator*=(U u) { return *this = small_float(*this * u); }
  template <typename U> MSL_FN small_float& operator/=(U u) { return *this = small_float(*this / u); }
  MSL_FN small_float& operator++() { return *this += 1; }
  MSL_FN small_float& operator--() { return *this -= 1; }
  MSL_FN small_float operator++(int) { small_float r = *this; *this += 1; return r; }
  MSL_FN small_float operator--(int) { small_float r = *this; *this -= 1; return r; }
  MSL_FN small_float operator+() const { return *this; }
  MSL_FN small_float operator-() const { return from_bits(bits ^ 0x8000); }

 private:
  MSL_FN constexpr small_float(unsigned short b, int, int) : bits(b) {}
};
// The _rn forms are not contracted into a multiply-add.
#define MSL_SMALL(op, expr)                                                                  \
  template <typename F> MSL_FN small_float<F> operator op(small_float<F> a, small_float<F> b) { \
    return expr;                                                                             \
  }                                                                                          \
  template <typename F, typename I, typename msl_if<msl_builtin<I>::integer, int>::type = 0> \
  MSL_FN small_float<F> operator op(small_float<F> a, I b) { return a op small_float<F>(b); } \
  template <typename F, typename I, typename msl_if<msl_builtin<I>::integer, int>::type = 0> \
  MSL_FN small_float<F> operator op(I a, small_float<F> b) { return small_float<F>(a) op b; }
MSL_SMALL(+, small_float<F>::from_raw(__hadd_rn(a.raw(), b.raw())))
MSL_SMALL(-, small_float<F>::from_raw(__hsub_rn(a.raw(), b.raw())))
MSL_SMALL(*, small_float<F>::from_raw(__hmul_rn(a.raw(), b.raw())))
MSL_SMALL(/, small_float<F>((float)a / (float)b))
#undef MSL_SMALL
typedef small_float<half_format> half;
typedef small_float<bfloat_format> bfloat;
MSL_FN half operator""h(long double x) { return half((float)x); }
MSL_FN bfloat operator""bf(long double x) { return bfloat((float)x); }

#include "msl_vec.h"

#include "msl_common.h"

namespace metal {
MSL_FN half fma(half a, half b, half c) { return half::from_raw(__hfma(a.raw(), b.raw(), c.raw())); }
}

#include "metal_cuda_simd.h"
#include "metal_cuda_matrix.h"

using namespace metal;

// ---- what the generated kernel function needs
// MLX's CUDA types and ours: same bits, other names.
template <typename T, size_t S> struct msl_type { typedef T type; };
template <> struct msl_type<__half, 2> { typedef half type; };
template <> struct msl_type<__nv_bfloat16, 2> { typedef bfloat type; };
template <> struct msl_type<long long, 8> { typedef long type; };
template <> struct msl_type<unsigned long long, 8> { typedef unsigned long type; };
template <typename T> struct msl_type<T, 8> {
  typedef conditional_t<is_integral<T>::value, T, complex64_t> type;
};
template <typename T> using msl_t = typename msl_type<remove_cv_t<T>, sizeof(T)>::type;
template <typename T> MSL_FN const msl_t<T>* msl_input(const T* p) { return (const msl_t<T>*)p; }
template <typename T> MSL_FN msl_t<T>* msl_output(T* p) { return (msl_t<T>*)p; }
template <typename T> MSL_FN atomic<msl_t<T>>* msl_atomic_output(T* p) { return (atomic<msl_t<T>>*)p; }

MSL_FN uint3 msl_thread() { return uint3(threadIdx.x, threadIdx.y, threadIdx.z); }
MSL_FN uint3 msl_block() { return uint3(blockIdx.x, blockIdx.y, blockIdx.z); }
MSL_FN uint3 msl_block_size() { return uint3(blockDim.x, blockDim.y, blockDim.z); }
MSL_FN uint3 msl_blocks() { return uint3(gridDim.x, gridDim.y, gridDim.z); }
MSL_FN uint msl_linear(uint3 p, uint3 size) { return (p.z * size.y + p.y) * size.x + p.x; }
MSL_FN uint msl_linear() { return msl_linear(msl_thread(), msl_block_size()); }
MSL_FN uint msl_volume(uint3 v) { return v.x * v.y * v.z; }

}  // namespace msl
