// What a compiled kernel and the runtime share: one fiber per Metal thread. Valid C and C++.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define EMU_MAX_THREADS 1024
#define EMU_MAX_SIMDS 32
#ifdef EMU_SANITIZE
#define EMU_MAX_ARENA (16 << 20)  // arrays far apart: a stray index meets no other array
#else
#define EMU_MAX_ARENA 32768
#endif
#define EMU_VALUE 64             // bytes a lane may bring to a collective
#define EMU_STACK_SHIFT 17       // 128 KiB a lane, its size and its alignment
#define EMU_STACK ((size_t)1 << EMU_STACK_SHIFT)

typedef struct EmuWorker EmuWorker;
typedef struct EmuLane EmuLane;

// Why a launch stopped. Text for people is made by the runtime; `code` is for Python.
enum { EMU_OK = 0, EMU_DIVERGED = 1, EMU_DEADLOCK = 2, EMU_FAULT = 3, EMU_MISUSE = 4, EMU_NOMEM = 5, EMU_FOUND = 6 };

// Collectives by name, so that two different ones at one place are told apart.
#define EMU_OPS(X) \
  X(simd_sum) X(simd_product) X(simd_min) X(simd_max) X(simd_and) X(simd_or) X(simd_xor) \
  X(simd_prefix_inclusive_sum) X(simd_prefix_exclusive_sum) \
  X(simd_prefix_inclusive_product) X(simd_prefix_exclusive_product) \
  X(simd_shuffle) X(simd_shuffle_up) X(simd_shuffle_down) X(simd_shuffle_xor) \
  X(simd_shuffle_rotate_up) X(simd_shuffle_rotate_down) \
  X(simd_shuffle_and_fill_up) X(simd_shuffle_and_fill_down) \
  X(simd_broadcast) X(simd_broadcast_first) X(simd_ballot) X(simd_all) X(simd_any) \
  X(quad_sum) X(quad_product) X(quad_min) X(quad_max) X(quad_and) X(quad_or) X(quad_xor) \
  X(quad_prefix_inclusive_sum) X(quad_prefix_exclusive_sum) \
  X(quad_prefix_inclusive_product) X(quad_prefix_exclusive_product) \
  X(quad_shuffle) X(quad_shuffle_up) X(quad_shuffle_down) X(quad_shuffle_xor) \
  X(quad_shuffle_rotate_up) X(quad_shuffle_rotate_down) \
  X(quad_shuffle_and_fill_up) X(quad_shuffle_and_fill_down) \
  X(quad_broadcast) X(quad_broadcast_first) X(quad_ballot) X(quad_all) X(quad_any) \
  X(simdgroup_barrier) X(simdgroup_multiply) X(simdgroup_multiply_accumulate) \
  X(threadgroup_barrier)
#define EMU_ENUM(name) EMU_##name,
typedef enum { EMU_OPS(EMU_ENUM) EMU_OP_COUNT } EmuOp;

// Where a group of lanes meets for a collective. Two slot buffers: a lane that runs ahead writes the
// next collective's value while slower ones still read this one's.
typedef struct EmuMeet {
  uint32_t arrived, full, generation, at;  // lane masks; parity picks the buffer; packed line and column
  EmuOp op;
  uint32_t count;                          // lanes that exist here
  const char* file;
  EmuLane** waiting;
  unsigned char* slot[2];
} EmuMeet;

typedef struct EmuSimd {
  EmuMeet whole;
  EmuMeet quad[8];
  EmuLane* waiting[32];
  unsigned char slots[2][32 * EMU_VALUE] __attribute__((aligned(64)));
  unsigned char quad_slots[8][2][4 * EMU_VALUE] __attribute__((aligned(64)));
#ifdef EMU_SANITIZE
  uint32_t epoch[2];  // simdgroup barriers passed that order threadgroup and device memory
#endif
} EmuSimd;

// State of a running Metal thread, at the top of its stack; two cache lines.
struct EmuLane {
  void* sp;                // saved stack pointer while it does not run
  EmuSimd* simd;
  EmuWorker* worker;
  unsigned char* arena;    // threadgroup memory
  void (*wait)(EmuLane*);  // gives the processor away until woken
  uint32_t lane;           // thread_index_in_simdgroup
  uint32_t index;          // thread_index_in_threadgroup
  uint32_t local[3];       // thread_position_in_threadgroup
  uint32_t used;
};

typedef struct EmuError {
  uint64_t address;    // of a fault
  int32_t code;
  int32_t line;
  int32_t thread;      // index in the threadgroup, -1 unknown
  uint32_t group[3];   // threadgroup_position_in_grid
  char file[64];       // "source", "header" or a header of ours
  char text[2048];
} EmuError;

typedef struct EmuLaunch {
  void (*entry)(EmuLane*);
  void** args;
  uint32_t grid[3], group[3], groups[3];  // threads, threads of a full threadgroup, threadgroups
  uint32_t arena_bytes, threads;          // threadgroup memory; OS threads to use
  uint32_t block_bytes;                   // of this struct and all that follows it
  EmuError error;
} EmuLaunch;

struct EmuWorker {
  void* scheduler;          // stack pointer of the OS thread's own stack
  EmuLane* running;
  const EmuLaunch* launch;
  unsigned char* arena;
  uint32_t position[3], size[3];  // of the threadgroup; its real size at the grid's edge
  uint32_t count, next, done;     // threads, next one to start, returned
  uint32_t head, tail;            // ready ring
  uint32_t barrier_arrived, barrier_at;
  const char* barrier_file;
#ifdef EMU_SANITIZE
  void (*barrier)(EmuLane*, uint32_t, const char*, uint32_t flags);
  void (*access)(EmuLane*, const void*, size_t, uint32_t kind, const void* pc);
  void (*broken)(EmuLane*, int what, const void*, int64_t value, const char* type, const void* pc);
  void (*fence)(EmuLane*);
  uint32_t epoch[2], barriers;         // barriers passed that order threadgroup and device memory; all
  uint16_t order[EMU_MAX_THREADS];     // in which threads start
  uint32_t (*choose)(uint32_t count);  // which ready thread goes on
  uint32_t* counts;                    // profiles: of every thread, how often each block of code ran
  uint32_t blocks;
  uint64_t ops[EMU_OP_COUNT];          // collectives by simdgroup, barriers by threadgroup
#else
  void (*barrier)(EmuLane*, uint32_t, const char*);
#endif
  void (*fail)(EmuLane*, int code, EmuOp op, uint32_t at, const char* file, const char* text);
  EmuLane* ready[EMU_MAX_THREADS];
  EmuLane* barrier_waiting[EMU_MAX_THREADS];
  EmuSimd simds[EMU_MAX_SIMDS];
};

#ifdef EMU_SANITIZE
#define EMU_SMALL static inline __attribute__((always_inline))  // checked and unchecked code call them
#else
#define EMU_SMALL static inline
#endif

// Tops of stacks are spread over the cache's sets: equal offsets in aligned stacks would share one set.
#define EMU_COLOR(address) ((((uintptr_t)(address) >> EMU_STACK_SHIFT) & 31) * 128)
EMU_SMALL EmuLane* emu_lane_at(uintptr_t address) {
  uintptr_t base = address & ~(uintptr_t)(EMU_STACK - 1);
  return (EmuLane*)(base + EMU_STACK - 128 - EMU_COLOR(base));
}

// The running lane, from the stack pointer alone: no thread-local storage in kernels.
EMU_SMALL EmuLane* emu_self(void) {
  uintptr_t sp;
#if defined(__x86_64__)
  __asm__("mov %%rsp, %0" : "=r"(sp));
#elif defined(__aarch64__)
  __asm__("mov %0, sp" : "=r"(sp));
#else
#error "the CPU executor knows x86-64 and aarch64"
#endif
  return emu_lane_at(sp);
}

#define EMU_SITE(line, column) ((uint32_t)(line) << 10 | ((uint32_t)(column) & 1023))
#define EMU_LINE(site) ((int32_t)((site) >> 10))
