// What went wrong in a kernel, in words: place, lanes, and who is missing.
#include "cpu_worker.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define NAME(op) #op,
static const char* const op_names[] = {EMU_OPS(NAME)};

static void add(Worker* w, const char* format, ...) {
  size_t used = strlen(w->error.text);
  va_list args;
  va_start(args, format);
  vsnprintf(w->error.text + used, sizeof w->error.text - used, format, args);
  va_end(args);
}

static const char* base_name(const char* file) {
  const char* slash = file ? strrchr(file, '/') : NULL;
  return slash ? slash + 1 : file ? file : "";
}

void emu_error(Worker* w, int code, EmuLane* lane, uint32_t at, const char* file, const char* format, ...) {
  EmuError* e = &w->error;
  e->address = 0;
  e->code = code;
  e->line = EMU_LINE(at);
  e->thread = lane ? (int32_t)lane->index : -1;
  memcpy(e->group, w->shared.position, sizeof e->group);
  snprintf(e->file, sizeof e->file, "%s", base_name(file));
  va_list args;
  va_start(args, format);
  vsnprintf(e->text, sizeof e->text, format, args);
  va_end(args);
}

// Bits of a mask as ranges: "0-15, 20".
static void add_lanes(Worker* w, const uint32_t* mask, uint32_t words) {
  enum { MOST = 8 };
  int ranges = 0;
  uint32_t n = words * 32;
  for (uint32_t i = 0; i < n; i++) {
    if (!(mask[i / 32] >> (i % 32) & 1)) continue;
    if (ranges++ == MOST) {
      add(w, " and more");
      return;
    }
    uint32_t last = i;
    while (last + 1 < n && (mask[(last + 1) / 32] >> ((last + 1) % 32) & 1)) last++;
    add(w, last > i ? "%s%u-%u" : "%s%u", ranges > 1 ? ", " : "", i, last);
    i = last;
  }
}

static int any(const uint32_t* mask) {
  for (int i = 0; i < EMU_MAX_SIMDS; i++)
    if (mask[i]) return 1;
  return 0;
}

// The meetings of a threadgroup in a row: of each simdgroup the whole one, then its quads.
static uint32_t meets(EmuWorker* s) {
  return (s->count + 31) / 32 * 9;
}
static EmuMeet* meet_at(EmuWorker* s, uint32_t n) {
  return n % 9 ? &s->simds[n / 9].quad[n % 9 - 1] : &s->simds[n / 9].whole;
}
static uint32_t first_lane(uint32_t n) {
  return n % 9 ? (n % 9 - 1) * 4 : 0;
}
static int same_place(const EmuMeet* a, const EmuMeet* b) {
  return a->arrived && b->arrived && a->at == b->at && a->op == b->op;
}

// Threads by what they do, each place once: returned, at the barrier, at a collective.
static void add_others(Worker* w, const EmuMeet* except) {
  EmuWorker* s = &w->shared;
  uint32_t mask[EMU_MAX_SIMDS];
  if (any(w->returned)) {
    add(w, "; threads ");
    add_lanes(w, w->returned, EMU_MAX_SIMDS);
    add(w, " have returned");
  }
  if (except && s->barrier_arrived) {
    memset(mask, 0, sizeof mask);
    for (uint32_t i = 0; i < s->barrier_arrived; i++)
      mask[s->barrier_waiting[i]->index / 32] |= 1u << s->barrier_waiting[i]->index % 32;
    add(w, "; threads ");
    add_lanes(w, mask, EMU_MAX_SIMDS);
    add(w, " wait at threadgroup_barrier (%s line %d)", base_name(s->barrier_file), EMU_LINE(s->barrier_at));
  }
  // Meetings at one place are told together, where the first of them is found.
  for (uint32_t n = 0; n < meets(s); n++) {
    const EmuMeet* meet = meet_at(s, n);
    uint32_t first = 0;
    while (first < n && !same_place(meet_at(s, first), meet)) first++;
    if (!meet->arrived || first < n || (except && same_place(meet, except))) continue;
    memset(mask, 0, sizeof mask);
    for (uint32_t k = n; k < meets(s); k++)
      if (same_place(meet_at(s, k), meet)) mask[k / 9] |= meet_at(s, k)->arrived << first_lane(k);
    add(w, "; threads ");
    add_lanes(w, mask, EMU_MAX_SIMDS);
    add(w, " wait at %s (%s line %d)", op_names[meet->op], base_name(meet->file), EMU_LINE(meet->at));
  }
}

void emu_describe(Worker* w, EmuLane* lane, int code, EmuOp op, uint32_t at, const char* file, const char* text) {
  EmuWorker* s = &w->shared;
  if (code != EMU_DIVERGED) {
    emu_error(w, code, lane, at, file, "%s at %s line %d: %s", op_names[op], base_name(file), EMU_LINE(at), text);
    return;
  }
  EmuSimd* simd = lane->simd;
  int quad = op >= EMU_quad_sum && op <= EMU_quad_any;
  const EmuMeet* meet = quad ? &simd->quad[lane->lane / 4] : &simd->whole;
  if (op == EMU_threadgroup_barrier) {
    emu_error(w, code, lane, at, file,
              "divergent threadgroup_barrier: thread %u reached the one at %s line %d while %u threads wait at the "
              "one at %s line %d. All threads of a threadgroup must reach the same barrier",
              lane->index, base_name(file), EMU_LINE(at), s->barrier_arrived, base_name(s->barrier_file),
              EMU_LINE(s->barrier_at));
    return;
  }
  uint32_t shown = meet->arrived << (quad ? lane->lane / 4 * 4 : 0);
  emu_error(w, code, lane, at, file, "divergent %s: lane %u of simdgroup %u reached %s at %s line %d while lanes ",
            quad ? "quadgroup operation" : "simdgroup operation", lane->lane, lane->index / 32, op_names[op],
            base_name(file), EMU_LINE(at));
  add_lanes(w, &shown, 1);
  add(w, " wait at %s (%s line %d). All lanes must reach the same call: no branch or early return before it",
      op_names[meet->op], base_name(meet->file), EMU_LINE(meet->at));
}

// Nothing can run and somebody waits. The simdgroup operation comes first: it names fewer lanes.
void emu_deadlock(Worker* w) {
  EmuWorker* s = &w->shared;
  for (uint32_t n = 0; n < meets(s); n++) {
    EmuMeet* meet = meet_at(s, n);
    if (!meet->arrived) continue;
    uint32_t shown = meet->arrived << first_lane(n);
    uint32_t missing = (meet->full & ~meet->arrived) << first_lane(n);
    EmuLane* lane = meet->waiting[__builtin_ctz(meet->arrived)];
    emu_error(w, EMU_DEADLOCK, lane, meet->at, meet->file, "%s at %s line %d: lanes ", op_names[meet->op],
              base_name(meet->file), EMU_LINE(meet->at));
    add_lanes(w, &shown, 1);
    add(w, " of simdgroup %u wait for lanes ", n / 9);
    add_lanes(w, &missing, 1);
    add(w, ", which never arrive");
    add_others(w, meet);
    return;
  }
  uint32_t mask[EMU_MAX_SIMDS] = {0};
  for (uint32_t i = 0; i < s->barrier_arrived; i++)
    mask[s->barrier_waiting[i]->index / 32] |= 1u << s->barrier_waiting[i]->index % 32;
  emu_error(w, EMU_DEADLOCK, s->barrier_waiting[0], s->barrier_at, s->barrier_file,
            "threadgroup_barrier at %s line %d is not reached by all threads: threads ", base_name(s->barrier_file),
            EMU_LINE(s->barrier_at));
  add_lanes(w, mask, EMU_MAX_SIMDS);
  add(w, " of %u wait", s->count);
  add_others(w, NULL);
}

void emu_fault(Worker* w) {
  EmuLane* lane = w->shared.running;
  uintptr_t at = w->fault_address;
  uint32_t index = lane ? lane->index : 0;
  if (w->fault_signal == SIGFPE) {
    emu_error(w, EMU_FAULT, lane, 0, NULL, "integer division by zero in thread %u", index);
  } else if (w->fault_signal == SIGILL || w->fault_signal == SIGTRAP) {
    emu_error(w, EMU_FAULT, lane, 0, NULL, "thread %u reached code that the compiler holds for impossible", index);
  } else if (lane && at && at >> EMU_STACK_SHIFT == (uintptr_t)lane >> EMU_STACK_SHIFT) {
    emu_error(w, EMU_FAULT, lane, 0, NULL, "stack overflow in thread %u: its local arrays need more than %u KiB", index,
              (unsigned)(EMU_STACK >> 10));
  } else if (at >= (uintptr_t)w->arena_end && at < (uintptr_t)w->arena_end + EMU_GUARD) {
    emu_error(w, EMU_FAULT, lane, 0, NULL, "thread %u went past the end of threadgroup memory", index);
  } else if (w->fault_signal == SIGSEGV && at == 0 && w->fault_code == 0x80) {
    emu_error(w, EMU_FAULT, lane, 0, NULL, "thread %u used a misaligned vector pointer or a wild address", index);
  } else {
    emu_error(w, EMU_FAULT, lane, 0, NULL, "thread %u accessed address 0x%llx, which is not mapped", index,
              (unsigned long long)at);
  }
  w->error.address = at;
}
