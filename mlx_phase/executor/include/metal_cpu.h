// Metal on a CPU, for clang: types, address spaces, and what lanes do together.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "cpu_runtime.h"

typedef _Float16 half;
typedef __bf16 bfloat;

// Clang rounds to bfloat by a call to these where the processor has no instruction; not every
// compiler's runtime library has them. To nearest even; a NaN stays one.
extern "C" __attribute__((used, visibility("hidden"), weak)) __bf16 __truncsfbf2(float x) {
  uint32_t u = __builtin_bit_cast(uint32_t, x);
  u = (u & 0x7fffffffu) > 0x7f800000u ? u >> 16 | 0x40 : (u + 0x7fffu + (u >> 16 & 1)) >> 16;
  return __builtin_bit_cast(__bf16, (uint16_t)u);
}

#define MSL_FN inline
#define METAL_FUNC inline
#define MSL_CPU 1
#define METAL_VERSION 310
#define __METAL_VERSION__ 310

#define device
#define constant const  // Metal too: a const int binds to `constant int&`, a table folds
#define thread
#define threadgroup
#define kernel

#include "cpu_sanitize.h"
#include "msl_vec.h"
#include "msl_common.h"
#include "cpu_simd.h"
#include "cpu_atomic.h"
#include "cpu_matrix.h"

// Threadgroup memory: every variable gets its place when the library is loaded, so that the sum of
// their sizes is known before a launch.
extern "C" {
__attribute__((visibility("default"))) uint64_t emu_arena_bytes;
}
EMU_UNCHECKED_BEGIN
namespace emu {
inline uint32_t reserve(size_t size, size_t align, const char* type) {
  if (align < 16) align = 16;
  const uint64_t offset = (emu_arena_bytes + align - 1) / align * align;
  emu_arena_bytes = offset + size;
  return EMU_PLACE((uint32_t)offset, size, type);
}
template <typename T, typename Tag, int ALIGN>
struct Shared {
  static const uint32_t offset;
  static uint32_t place() { return reserve(sizeof(T), ALIGN > (int)alignof(T) ? ALIGN : alignof(T), EMU_TYPE); }
};
template <typename T, typename Tag, int ALIGN>
const uint32_t Shared<T, Tag, ALIGN>::offset = place();
template <typename T, typename Tag, int ALIGN>
inline T& shared() {
  return *(T*)(emu_self()->arena + Shared<T, Tag, ALIGN>::offset);
}

inline metal::vec<uint, 3> three(const uint32_t* v) { return metal::vec<uint, 3>(v[0], v[1], v[2]); }
inline metal::vec<uint, 3> global(const EmuLane* l) {
  const EmuWorker* w = l->worker;
  const uint32_t* size = w->launch->group;
  return metal::vec<uint, 3>(w->position[0] * size[0] + l->local[0], w->position[1] * size[1] + l->local[1],
                             w->position[2] * size[2] + l->local[2]);
}
inline uint threads(const uint32_t* size) { return size[0] * size[1] * size[2]; }
}  // namespace emu
EMU_UNCHECKED_END

using namespace metal;
