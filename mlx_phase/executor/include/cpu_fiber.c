// Stacks, the context switch and the scheduler of one OS thread.
#include "cpu_worker.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MAP_ANONYMOUS
#define MAP_ANONYMOUS MAP_ANON
#endif

#if defined(__APPLE__)
#define SYMBOL "_emu_switch"
#else
#define SYMBOL "emu_switch"
#endif
#if defined(__x86_64__)
#define SAVED 6
__asm__(".text\n.p2align 4\n.globl " SYMBOL "\n" SYMBOL ":\n"
        " push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
        " mov %rsp,(%rdi)\n mov %rsi,%rsp\n"
        " pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");
#else
#define SAVED 20
__asm__(".text\n.p2align 4\n.globl " SYMBOL "\n" SYMBOL ":\n"
        " sub sp,sp,#160\n"
        " stp x19,x20,[sp]\n stp x21,x22,[sp,#16]\n stp x23,x24,[sp,#32]\n"
        " stp x25,x26,[sp,#48]\n stp x27,x28,[sp,#64]\n stp x29,x30,[sp,#80]\n"
        " stp d8,d9,[sp,#96]\n stp d10,d11,[sp,#112]\n"
        " stp d12,d13,[sp,#128]\n stp d14,d15,[sp,#144]\n"
        " mov x9,sp\n str x9,[x0]\n mov sp,x1\n"
        " ldp x19,x20,[sp]\n ldp x21,x22,[sp,#16]\n ldp x23,x24,[sp,#32]\n"
        " ldp x25,x26,[sp,#48]\n ldp x27,x28,[sp,#64]\n ldp x29,x30,[sp,#80]\n"
        " ldp d8,d9,[sp,#96]\n ldp d10,d11,[sp,#112]\n"
        " ldp d12,d13,[sp,#128]\n ldp d14,d15,[sp,#144]\n"
        " add sp,sp,#160\n ret\n");
#endif

static void fiber_main(void);

// Sets the stack up so that a switch to it calls fiber_main.
static void reset(EmuLane* lane) {
  void** top = (void**)((uintptr_t)lane & ~(uintptr_t)63);
#if defined(__x86_64__)
  top -= 2;
  top[0] = (void*)fiber_main;
  top[1] = NULL;
  top -= SAVED;
  memset(top, 0, SAVED * sizeof(void*));
#else
  top -= SAVED;
  memset(top, 0, SAVED * sizeof(void*));
  top[11] = (void*)fiber_main;
#endif
  lane->sp = top;
}

static EmuLane* new_fiber(Worker* w) {
  enum { BATCH = 32 };
  if (w->fibers == EMU_MAX_THREADS) return NULL;
  size_t bytes = (BATCH + 1) * EMU_STACK;
  unsigned char* at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return NULL;
  unsigned char* first = (unsigned char*)(((uintptr_t)at + EMU_STACK - 1) & ~(uintptr_t)(EMU_STACK - 1));
  if (first > at) munmap(at, first - at);
  unsigned char* end = first + BATCH * EMU_STACK;
  if (end < at + bytes) munmap(end, at + bytes - end);
  long page = sysconf(_SC_PAGESIZE);
  for (int i = 0; i < BATCH; i++) {
    unsigned char* base = first + i * EMU_STACK;
    // A machine may be out of mappings: the stack then works unguarded.
    (void)mprotect(base, page, PROT_NONE);
    EmuLane* lane = emu_lane_at((uintptr_t)base);
    lane->worker = &w->shared;
    lane->wait = emu_wait;
    w->fiber[w->fibers++] = w->idle[w->idles++] = lane;
  }
  return w->idle[--w->idles];
}

static void assign(Worker* w, EmuLane* lane, uint32_t index) {
  EmuWorker* s = &w->shared;
#ifdef EMU_SANITIZE
  index = s->order[index];
#endif
  lane->index = index;
  lane->lane = index & 31;
  lane->simd = &s->simds[index >> 5];
  lane->arena = s->arena;
  uint32_t x = s->size[0], y = s->size[1];
  if (s->count == x) {
    lane->local[0] = index, lane->local[1] = lane->local[2] = 0;
  } else {
    lane->local[0] = index % x;
    lane->local[1] = index / x % y;
    lane->local[2] = index / x / y;
  }
}

static EmuLane* start(Worker* w) {
  EmuLane* lane = w->idles ? w->idle[--w->idles] : new_fiber(w);
  if (!lane) {
    emu_error(w, EMU_NOMEM, NULL, 0, NULL, "no memory for the stacks of a threadgroup");
    return NULL;
  }
  reset(lane);
  assign(w, lane, w->shared.next++);
  return lane;
}

__attribute__((noreturn)) void emu_leave(Worker* w) {
  void* ignored;
  emu_switch(&ignored, w->shared.scheduler);
  __builtin_unreachable();
}

static EmuLane* pop(EmuWorker* s) {
#ifdef EMU_SANITIZE
  EmuLane** first = &s->ready[s->head & (EMU_MAX_THREADS - 1)];
  EmuLane** chosen = &s->ready[(s->head + s->choose(s->tail - s->head)) & (EMU_MAX_THREADS - 1)];
  EmuLane* lane = *chosen;
  *chosen = *first, *first = lane;
#endif
  return s->ready[s->head++ & (EMU_MAX_THREADS - 1)];
}

// Runs another lane until somebody wakes this one. Nobody left to run: a deadlock.
void emu_wait(EmuLane* lane) {
  EmuWorker* s = lane->worker;
  EmuLane* next;
  if (s->head != s->tail) {
    next = pop(s);
  } else if (s->next < s->count) {
    next = start((Worker*)s);
    if (!next) emu_leave((Worker*)s);
  } else {
    emu_deadlock((Worker*)s);
    emu_leave((Worker*)s);
  }
  s->running = next;
  emu_switch(&lane->sp, next->sp);
}

// One fiber runs Metal threads one after the other for as long as none of them waits.
static void fiber_main(void) {
  EmuLane* lane = emu_self();
  Worker* w = (Worker*)lane->worker;
  EmuWorker* s = &w->shared;
  for (;;) {
    s->launch->entry(lane);
    w->returned[lane->index >> 5] |= 1u << (lane->index & 31);
    s->done++;
    if (s->head != s->tail) {
      EmuLane* next = pop(s);
      w->idle[w->idles++] = lane;
      s->running = next;
      emu_switch(&lane->sp, next->sp);
    } else if (s->next < s->count) {
      assign(w, lane, s->next++);
    } else {
      if (s->done != s->count) emu_deadlock(w);
      w->idle[w->idles++] = lane;
      emu_leave(w);
    }
  }
}

#ifdef EMU_SANITIZE
void emu_barrier(EmuLane* lane, uint32_t at, const char* file, uint32_t flags) {
#else
void emu_barrier(EmuLane* lane, uint32_t at, const char* file) {
#endif
  EmuWorker* s = lane->worker;
  if (s->barrier_arrived == 0) {
    s->barrier_at = at;
    s->barrier_file = file;
  } else if (s->barrier_at != at) {
    emu_fail(lane, EMU_DIVERGED, EMU_threadgroup_barrier, at, file, NULL);
  }
  if (s->barrier_arrived + 1 < s->count) {
    s->barrier_waiting[s->barrier_arrived++] = lane;
    emu_wait(lane);
    return;
  }
  for (uint32_t i = 0; i < s->barrier_arrived; i++)
    s->ready[s->tail++ & (EMU_MAX_THREADS - 1)] = s->barrier_waiting[i];
  s->barrier_arrived = 0;
#ifdef EMU_SANITIZE
  s->barriers++;
  s->ops[EMU_threadgroup_barrier]++;
  s->epoch[0] += flags >> 1 & 1;
  s->epoch[1] += flags & 1;
#endif
}

void emu_fail(EmuLane* lane, int code, EmuOp op, uint32_t at, const char* file, const char* text) {
  emu_describe((Worker*)lane->worker, lane, code, op, at, file, text);
  emu_leave((Worker*)lane->worker);
}

// Collective state of a fresh worker, after an error, or for another threadgroup size.
static void prepare(Worker* w) {
  EmuWorker* s = &w->shared;
  for (uint32_t i = 0; i < (s->count + 31) / 32; i++) {
    EmuSimd* simd = &s->simds[i];
    uint32_t lanes = s->count - i * 32 < 32 ? s->count - i * 32 : 32;
    for (int q = -1; q < 8; q++) {
      EmuMeet* meet = q < 0 ? &simd->whole : &simd->quad[q];
      uint32_t first = q < 0 ? 0 : q * 4, most = q < 0 ? 32 : 4;
      uint32_t here = lanes <= first ? 0 : lanes - first < most ? lanes - first : most;
      meet->arrived = 0;
      meet->count = here;
      meet->full = here == 32 ? ~0u : (1u << here) - 1;
      meet->waiting = &simd->waiting[first];
      meet->slot[0] = q < 0 ? simd->slots[0] : simd->quad_slots[q][0];
      meet->slot[1] = q < 0 ? simd->slots[1] : simd->quad_slots[q][1];
    }
  }
  // Fibers that an error left behind are free again: their threads are abandoned.
  memcpy(w->idle, w->fiber, w->fibers * sizeof(EmuLane*));
  w->idles = w->fibers;
  w->prepared = s->count;
}

int emu_run_group(Worker* w, const EmuLaunch* launch, uint64_t index) {
  EmuWorker* s = &w->shared;
  s->launch = launch;
  s->position[0] = (uint32_t)(index % launch->groups[0]);
  s->position[1] = (uint32_t)(index / launch->groups[0] % launch->groups[1]);
  s->position[2] = (uint32_t)(index / launch->groups[0] / launch->groups[1]);
  s->count = 1;
  for (int d = 0; d < 3; d++) {
    uint32_t left = launch->grid[d] - s->position[d] * launch->group[d];
    s->size[d] = left < launch->group[d] ? left : launch->group[d];
    s->count *= s->size[d];
  }
  if (w->prepared != s->count) prepare(w);
  // The block ends at an unmapped page: running off the last array faults instead of passing.
  s->arena = w->arena_end - ((launch->arena_bytes + 63) & ~63u);
#ifdef EMU_SANITIZE
  emu_sanitize_group(w, index);
#else
  memset(s->arena, 0xff, w->arena_end - s->arena);
#endif
  memset(w->returned, 0, sizeof w->returned);
  s->next = s->done = s->head = s->tail = s->barrier_arrived = 0;
  w->error.code = EMU_OK;
  EmuLane* first = start(w);
  if (first) {
    s->running = first;
    emu_switch(&s->scheduler, first->sp);
    s->running = NULL;
  }
#ifdef EMU_SANITIZE
  emu_sanitize_end(w);
#endif
  if (w->error.code != EMU_OK) w->prepared = 0;
  return w->error.code;
}

int emu_open_worker(Worker* w) {
  size_t bytes = EMU_MAX_ARENA + EMU_GUARD;
  unsigned char* at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return -1;
  (void)mprotect(at + EMU_MAX_ARENA, EMU_GUARD, PROT_NONE);
  w->arena_end = at + EMU_MAX_ARENA;
  w->shared.barrier = emu_barrier;
  w->shared.fail = emu_fail;
#ifdef EMU_SANITIZE
  emu_sanitize_worker(w);
#endif
  return 0;
}
