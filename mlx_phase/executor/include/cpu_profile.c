// Profiles: what a launch reads and writes, per simdgroup instruction as a GPU would issue it.
#include "cpu_worker.h"

#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define LINE 128   // bytes of a cache line of Apple GPUs
#define BANKS 32   // of threadgroup memory, four bytes wide
#define SITES 4096

enum { READ = 1, WRITE = 2, ATOMIC = 4 };

typedef struct Range {
  uint64_t start, end;
  uint8_t *read, *written;  // 1 per byte; NULL for threadgroup memory
} Range;

typedef struct Access {
  uint64_t at;
  const void* pc;
  uint32_t size, kind, turn;  // turn: which execution of this place by the thread
  const Range* range;
} Access;

typedef struct Log {
  Access* of;
  uint32_t used, room;
} Log;

typedef struct Totals {
  uint64_t device_read, device_written, threadgroup_read, threadgroup_written;  // bytes asked for by threads
  uint64_t loads, stores, threadgroup_loads, threadgroup_stores, atomics;       // by simdgroup
  uint64_t load_lines, store_lines;                                             // lines that these touch
  uint64_t conflicts;                                                           // extra turns of banks
  uint64_t groups, threads, simdgroups;
} Totals;

static Log logs[EMU_MAX_THREADS];
static Range* ranges;
static Range arena;
static uint32_t range_count, block_count, *counts;
static uint64_t *block_totals, op_totals[EMU_OP_COUNT];
static Totals totals;

// Neighbours of one vector come one by one, in either order; a GPU loads up to 16 bytes at once.
static int joins(Access* a, uint64_t at, uint32_t size, uint32_t kind, const Range* range) {
  const uint64_t first = at < a->at ? at : a->at;
  if (a->kind != kind || a->range != range || kind & ATOMIC) return 0;
  if (a->at + a->size != at && at + size != a->at) return 0;
  if (a->size + size > 16 || first / 16 != (first + a->size + size - 1) / 16) return 0;
  a->at = first, a->size += size;
  return 1;
}

static void on_access(EmuLane* lane, const void* p, size_t size, uint32_t kind, const void* pc) {
  const uint64_t at = (uint64_t)p;
  const Range* r = at >= arena.start && at < arena.end ? &arena : NULL;
  for (uint32_t i = 0; i < range_count && !r; i++)
    if (at >= ranges[i].start && at < ranges[i].end) r = &ranges[i];
  if (!r || !size) return;
  if (at + size > r->end) size = r->end - at;
  if (r->read) {
    if (kind & READ) memset(r->read + (at - r->start), 1, size), totals.device_read += size;
    if (kind & WRITE) memset(r->written + (at - r->start), 1, size), totals.device_written += size;
  } else {
    if (kind & READ) totals.threadgroup_read += size;
    if (kind & WRITE) totals.threadgroup_written += size;
  }
  Log* log = &logs[lane->index];
  if (log->used && joins(&log->of[log->used - 1], at, (uint32_t)size, kind, r)) return;
  if (log->used == log->room) {
    const uint32_t room = log->room ? 2 * log->room : 256;
    Access* more = realloc(log->of, room * sizeof(Access));
    if (!more) return;
    log->of = more;
    log->room = room;
  }
  log->of[log->used++] = (Access){at, pc, (uint32_t)size, kind, 0, r};
}

static int by_place(const void* a, const void* b) {
  const Access *x = a, *y = b;
  if (x->pc != y->pc) return x->pc < y->pc ? -1 : 1;
  if (x->turn != y->turn) return x->turn < y->turn ? -1 : 1;
  return x->at < y->at ? -1 : x->at > y->at;
}

// The n-th time that each thread of a simdgroup passes a place is one instruction of the simdgroup.
static void number(Log* log) {
  static const void* places[SITES];
  static uint32_t turns[SITES];
  memset(places, 0, sizeof places);
  for (uint32_t i = 0; i < log->used; i++) {
    uint32_t h = (uint32_t)(((uintptr_t)log->of[i].pc * 0x9e3779b97f4a7c15ull) >> 52);
    while (places[h] && places[h] != log->of[i].pc) h = (h + 1) % SITES;
    if (!places[h]) places[h] = log->of[i].pc, turns[h] = 0;
    log->of[i].turn = turns[h]++;
  }
}

static void issue(const Access* a, uint32_t n) {
  const Range* r = a->range;
  if (a->kind & ATOMIC) {
    totals.atomics++;
  } else if (r->read) {
    uint64_t lines = 0, last = ~0ull;
    for (uint32_t i = 0; i < n; i++)  // by address
      for (uint64_t l = a[i].at / LINE; l <= (a[i].at + a[i].size - 1) / LINE; l++)
        if (l != last) lines++, last = l;
    if (a->kind & WRITE) totals.stores++, totals.store_lines += lines;
    else totals.loads++, totals.load_lines += lines;
  } else {
    // Words of one bank take turns; one word is handed to all.
    uint32_t most = 1, in_bank[BANKS] = {0};
    uint64_t last = ~0ull;
    for (uint32_t i = 0; i < n; i++)
      for (uint64_t w = a[i].at / 4; w <= (a[i].at + a[i].size - 1) / 4; w++) {
        if (w == last) continue;
        last = w;
        if (++in_bank[w % BANKS] > most) most = in_bank[w % BANKS];
      }
    // A vector of 16 bytes a thread takes four turns anyway.
    const uint32_t words = (a->size + 3) / 4;
    totals.conflicts += most > words ? most - words : 0;
    if (a->kind & WRITE) totals.threadgroup_stores++;
    else totals.threadgroup_loads++;
  }
}

void emu_profile_group(Worker* w, int begins) {
  EmuWorker* s = &w->shared;
  const uint32_t simds = (s->count + 31) / 32;
  if (begins) {
    s->access = on_access;
    s->counts = counts;
    s->blocks = block_count;
    arena.start = (uint64_t)s->arena;
    arena.end = (uint64_t)w->arena_end;
    memset(counts, 0, (size_t)s->count * block_count * sizeof(uint32_t));
    memset(s->ops, 0, sizeof s->ops);
    return;
  }
  for (uint32_t i = 0; i < simds; i++) {
    const uint32_t first = i * 32, end = first + 32 < s->count ? first + 32 : s->count;
    // A simdgroup goes through a block as often as the thread that does so most often.
    for (uint32_t b = 0; b < s->blocks; b++) {
      uint32_t most = 0;
      for (uint32_t t = first; t < end; t++) {
        const uint32_t n = s->counts[(size_t)t * s->blocks + b];
        if (n > most) most = n;
      }
      block_totals[b] += most;
    }
    uint32_t n = 0;
    for (uint32_t t = first; t < end; t++) number(&logs[t]), n += logs[t].used;
    Access* all = malloc((n + 1) * sizeof(Access));
    n = 0;
    for (uint32_t t = first; t < end; t++) {
      if (all && logs[t].used) memcpy(all + n, logs[t].of, logs[t].used * sizeof(Access)), n += logs[t].used;
      logs[t].used = 0;
    }
    if (!all) continue;
    qsort(all, n, sizeof(Access), by_place);
    for (uint32_t a = 0, b; a < n; a = b) {
      for (b = a + 1; b < n && all[b].pc == all[a].pc && all[b].turn == all[a].turn; b++) {}
      issue(all + a, b - a);
    }
    free(all);
  }
  for (int i = 0; i < EMU_OP_COUNT; i++) op_totals[i] += s->ops[i];
  totals.groups++;
  totals.simdgroups += simds;
  totals.threads += s->count;
}

// Before a launch: device arrays, and room for the counts of EMU_MAX_THREADS threads and for their sums.
EXPORT void emu_profile_begin(Range* r, uint32_t n, uint32_t blocks, uint32_t* room, uint64_t* sums) {
  ranges = r, range_count = n;
  block_count = blocks, counts = room, block_totals = sums;
  memset(&totals, 0, sizeof totals);
  memset(op_totals, 0, sizeof op_totals);
  for (uint32_t i = 0; i < EMU_MAX_THREADS; i++) logs[i].used = 0;  // a launch that failed left some
}

// A name of a collective and how often it ran, by number; NULL after the last.
EXPORT const char* emu_profile_op(uint32_t i, uint64_t* n) {
#define NAME(op) #op,
  static const char* const names[] = {EMU_OPS(NAME)};
  if (i >= EMU_OP_COUNT) return NULL;
  *n = op_totals[i];
  return names[i];
}

EXPORT const Totals* emu_profile_totals(void) {
  return &totals;
}
