// Kernel side of the sanitizer: what clang calls on every access (its thread sanitizer's calls, without its
// runtime), and what a normal build has instead: nothing.
#pragma once

#ifndef EMU_SANITIZE

#define EMU_ATOMIC(p, size, kind)   // an access of `size` bytes; kind 1 reads, 2 writes, 3 both
#define EMU_FENCE()
#define EMU_PLACE(offset, size, type) offset
#define EMU_TYPE nullptr
#define EMU_UNCHECKED_BEGIN
#define EMU_UNCHECKED_END
#define EMU_IN(T) const T&
#define EMU_CALL(...) __VA_ARGS__

#else

#define EMU_UNCHECKED \
  __attribute__((no_sanitize("thread", "alignment", "bounds"), visibility("hidden"), used, noinline))
// Between these, functions are the executor's own: they touch its memory, not the kernel's.
#define EMU_UNCHECKED_BEGIN \
  _Pragma("clang attribute push(__attribute__((no_sanitize(\"thread\", \"alignment\", \"bounds\"))), apply_to = function)")
#define EMU_UNCHECKED_END _Pragma("clang attribute pop")
#define EMU_IN(T) T  // by value: the load is the kernel's, and checked

#define EMU_PC __builtin_return_address(0)

// 0 while the library is loaded: its constructors are no Metal threads.
extern "C" {
__attribute__((visibility("default"), used)) uint32_t emu_live;
}

EMU_UNCHECKED_BEGIN
namespace emu {

// A thread's own stack is its own: most accesses end here.
__attribute__((always_inline)) inline void access(const void* p, size_t size, uint32_t kind, const void* pc) {
  if (!emu_live) return;
  EmuLane* self = emu_self();
  if (!(((uintptr_t)p ^ (uintptr_t)self) >> EMU_STACK_SHIFT)) return;
  self->worker->access(self, p, size, kind, pc);
}

}  // namespace emu
EMU_UNCHECKED_END

extern "C" {
#define EMU_ACCESS(N)                                                                                 \
  EMU_UNCHECKED void __tsan_read##N(void* p) { emu::access(p, N, 1, EMU_PC); }                        \
  EMU_UNCHECKED void __tsan_write##N(void* p) { emu::access(p, N, 2, EMU_PC); }                       \
  EMU_UNCHECKED void __tsan_unaligned_read##N(void* p) { emu::access(p, N, 1, EMU_PC); }              \
  EMU_UNCHECKED void __tsan_unaligned_write##N(void* p) { emu::access(p, N, 2, EMU_PC); }
EMU_ACCESS(1) EMU_ACCESS(2) EMU_ACCESS(4) EMU_ACCESS(8) EMU_ACCESS(16)
#undef EMU_ACCESS
EMU_UNCHECKED void* __tsan_memcpy(void* to, const void* from, size_t n) {
  emu::access(from, n, 1, EMU_PC);
  emu::access(to, n, 2, EMU_PC);
  return __builtin_memcpy(to, from, n);
}
EMU_UNCHECKED void* __tsan_memmove(void* to, const void* from, size_t n) {
  emu::access(from, n, 1, EMU_PC);
  emu::access(to, n, 2, EMU_PC);
  return __builtin_memmove(to, from, n);
}
EMU_UNCHECKED void* __tsan_memset(void* to, int value, size_t n) {
  emu::access(to, n, 2, EMU_PC);
  return __builtin_memset(to, value, n);
}
EMU_UNCHECKED void __tsan_init(void) {}

EMU_UNCHECKED void emu_checked_atomic(const void* p, size_t size, int kind) {
  emu::access(p, size, (uint32_t)kind | 4, EMU_PC);
}

// What clang knows of a failed check: the place first, then types.
struct EmuPlace { const char* file; uint32_t line, column; };
struct EmuType { uint16_t kind, info; char name[1]; };
struct EmuMisaligned { EmuPlace place; EmuType* type; unsigned char log_alignment, check; };
struct EmuOutside { EmuPlace place; EmuType *array, *index; };
EMU_UNCHECKED void __ubsan_handle_type_mismatch_v1(EmuMisaligned* data, const void* p) {
  EmuLane* self = emu_self();
  self->worker->broken(self, 0, p, (int64_t)1 << data->log_alignment, data->type->name, EMU_PC);
}
EMU_UNCHECKED void __ubsan_handle_out_of_bounds(EmuOutside* data, uint64_t index) {
  EmuLane* self = emu_self();
  // `info` of an integer type: bit 0 says signed, the others are log2 of its bits.
  const int spare = 64 - (1 << (data->index->info >> 1));
  const int64_t value = data->index->info & 1 ? (int64_t)(index << spare) >> spare : (int64_t)index;
  self->worker->broken(self, 1, nullptr, value, data->array->name, EMU_PC);
}
EMU_UNCHECKED void emu_checked_index(int64_t index, const char* type) {
  EmuLane* self = emu_self();
  self->worker->broken(self, 1, nullptr, index, type, EMU_PC);
}
}

#ifndef EMU_PROFILE
#define EMU_CALL(...) __VA_ARGS__
#else
// The kernel stays a function of its own: what calls it is not counted.
#define EMU_CALL(...) emu::opaque(&__VA_ARGS__)
namespace emu {
template <typename F>
__attribute__((always_inline)) inline F* opaque(F* f) {
  __asm__("" : "+r"(f));
  return f;
}
}  // namespace emu
extern "C" {
EMU_UNCHECKED void emu_count(uint32_t block) {
  EmuLane* self = emu_self();
  self->worker->counts[(size_t)self->index * self->worker->blocks + block]++;
}
}
#endif

#define MSL_INDEX(i, n) if ((unsigned)(i) >= n) emu_checked_index(i, "'a vector of " #n " components'");
#define EMU_ATOMIC(p, size, kind) emu_checked_atomic((const void*)(p), size, kind)
#define EMU_FENCE() emu_self()->worker->fence(emu_self())

// Threadgroup arrays lie far apart here; the sum of their sizes is still what Metal would count.
#define EMU_APART 65536
#define EMU_TYPE __PRETTY_FUNCTION__
typedef struct EmuShared { const char* type; uint32_t offset, size; } EmuShared;
extern "C" {
__attribute__((visibility("default"), used)) EmuShared emu_arrays[64];
__attribute__((visibility("default"), used)) uint32_t emu_array_count;
}
EMU_UNCHECKED_BEGIN
namespace emu {
inline uint32_t apart(size_t size, const char* type) {
  uint32_t at = EMU_APART;
  if (emu_array_count) {
    const EmuShared* last = &emu_arrays[emu_array_count - 1];
    at = (last->offset + last->size + EMU_APART - 1) / EMU_APART * EMU_APART + EMU_APART;
  }
  if (emu_array_count < 64) emu_arrays[emu_array_count++] = EmuShared{type, at, (uint32_t)size};
  return at;
}
}  // namespace emu
EMU_UNCHECKED_END
#define EMU_PLACE(offset, size, type) emu::apart(size, type)

#endif
