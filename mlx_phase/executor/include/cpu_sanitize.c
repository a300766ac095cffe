// The sanitizer's memory of a launch: which bytes exist, who wrote and read them, and when.
// Sanitized launches use one OS thread, so nothing here is locked.
#include "cpu_worker.h"

#include <string.h>
#include <sys/mman.h>

#define EXPORT __attribute__((visibility("default")))
#define NEAR (1 << 20)  // constants of a kernel lie this near to its code

enum { MEM = 1, RACE = 2, INIT = 4, PROFILE = 8 };  // checks, or a profile
enum { READ = 1, WRITE = 2, ATOMIC = 4 };         // kinds of access
enum { INPUT = 0, OUTPUT = 1, THREADGROUP = 2 };  // kinds of buffer
enum { FORWARD = 0, REVERSE = 1, RANDOM = 2 };    // schedules
enum { OUTSIDE = 1, BETWEEN, WILD, WROTE_INPUT, MISALIGNED, INDEX, UNWRITTEN, CLASH, GROUPS_CLASH };

// Who touched a byte, and how many barriers the toucher had passed.
typedef struct Touch {
  uint32_t serial;  // of the threadgroup, from 1; 0 is nobody
  uint16_t thread, atomic;
  uint32_t epoch, simd_epoch, barriers;
  int32_t pc;       // from the kernel's entry
} Touch;

// The last two writers of different threads; the last reader, the last of another thread, the last of
// another simdgroup. Whoever clashes with any reader since the last barrier clashes with one of these.
typedef struct Cell {
  Touch write[2], read[3];
} Cell;

typedef struct Buffer {
  uint64_t start, end;    // its bytes, for the kernel; a threadgroup array's begin as an offset
  uint64_t low, high;     // and the room around them that is no other buffer's
  const uint8_t* inside;  // 1 for each byte that belongs to an element; NULL: all
  uint8_t* written;       // 1 for each byte that has a value; NULL: all
  Cell* cells;
  uint32_t kind, unit;    // unit: bytes that share a cell
} Buffer;

typedef struct Finding {
  uint64_t address, size, pc, other_pc;
  uint64_t group, other_group;
  int64_t value;     // an index, an alignment
  int32_t what, buffer;
  uint32_t access, other_access, thread, other_thread;
  uint32_t barrier;  // one stood between, of the wrong kind
  char type[256];
} Finding;

static Buffer* buffers;
static uint32_t count, last, checks, schedule, rebased, fenced;
static const uint64_t* group_order;
static uint64_t serial, seed;
static Finding finding;

// A write over another thread's write is no bug if it brings the same value, as tiles that overlap at an
// edge do. The store comes after its check, so the value is looked at when the next thing happens.
static struct {
  const void* at;  // NULL: none
  size_t size;
  Finding found;
  unsigned char before[64];
} pending;

static uint32_t draw(uint32_t below) {
  seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
  return (uint32_t)((seed >> 32) * below >> 32);
}

static uint32_t choose(uint32_t ready) {
  return schedule == RANDOM ? draw(ready) : schedule == REVERSE ? ready - 1 : 0;
}

static int32_t offset_of(const EmuWorker* s, const void* pc) {
  return (int32_t)((intptr_t)pc - (intptr_t)s->launch->entry);
}

static uint64_t address_of(const EmuWorker* s, int32_t offset) {
  return (uint64_t)((intptr_t)s->launch->entry + offset);
}

// The second write turned out to bring another value.
static int overwritten(void) {
  if (!pending.at) return 0;
  const int same = !memcmp(pending.at, pending.before, pending.size);
  pending.at = NULL;
  if (!same) finding = pending.found;
  return !same;
}

static void describe(EmuLane* lane, int what, const void* p, size_t size, uint32_t kind, const void* pc) {
  finding.what = what;
  finding.address = (uint64_t)p;
  finding.size = size;
  finding.access = kind;
  finding.thread = lane->index;
  finding.group = serial - 1;
  finding.pc = (uint64_t)pc;
}

static void stop(EmuLane* lane, int what, const void* p, size_t size, uint32_t kind, const void* pc) {
  if (what) describe(lane, what, p, size, kind, pc);
  emu_error((Worker*)lane->worker, EMU_FOUND, lane, 0, NULL, "");
  emu_leave((Worker*)lane->worker);
}

// The buffer whose room holds an address; else the nearest, with `*mine` 0.
static Buffer* find(uint64_t at, int* mine) {
  *mine = 1;
  if (last < count && at >= buffers[last].low && at < buffers[last].high) return &buffers[last];
  Buffer* nearest = NULL;
  uint64_t best = ~0ull;
  for (uint32_t i = 0; i < count; i++) {
    Buffer* b = &buffers[i];
    if (at >= b->low && at < b->high) {
      last = i;
      return b;
    }
    uint64_t away = at < b->start ? b->start - at : at - b->end;
    if (away < best) best = away, nearest = b;
  }
  *mine = 0;
  return nearest;
}

static int within(uint64_t at, const void* start, size_t bytes) {
  return at >= (uint64_t)start && at < (uint64_t)start + bytes;
}

// Whether two accesses of one byte, of which one writes, may happen in either order.
static int clash(const Touch* old, const Touch* now, int shared) {
  if (!old->serial || (old->atomic && now->atomic)) return 0;
  if (old->serial != now->serial) return !shared && !fenced;
  if (old->thread == now->thread || old->epoch != now->epoch) return 0;
  return old->thread >> 5 != now->thread >> 5 || old->simd_epoch == now->simd_epoch;
}

static void race(EmuLane* lane, Buffer* b, const void* p, size_t size, uint32_t kind, const void* pc) {
  EmuWorker* s = lane->worker;
  const int shared = b->kind == THREADGROUP, device = !shared;
  const Touch now = {
    .serial = (uint32_t)serial, .thread = (uint16_t)lane->index, .atomic = (kind & ATOMIC) != 0,
    .epoch = s->epoch[device], .simd_epoch = lane->simd->epoch[device], .barriers = s->barriers,
    .pc = offset_of(s, pc),
  };
  const uint64_t first = ((uint64_t)p - b->start) / b->unit, end = ((uint64_t)p + size - 1 - b->start) / b->unit;
  for (uint64_t i = first; i <= end; i++) {
    Cell* c = &b->cells[i];
    const Touch* old = NULL;
    uint32_t was = WRITE;
    for (int k = 0; k < 2 && !old; k++)
      if (clash(&c->write[k], &now, shared)) old = &c->write[k];
    for (int k = 0; k < 3 && !old && kind & WRITE; k++)
      if (clash(&c->read[k], &now, shared)) old = &c->read[k], was = READ;
    if (old) {
      finding.other_pc = address_of(s, old->pc);
      finding.other_thread = old->thread;
      finding.other_group = old->serial - 1;
      finding.other_access = was | (old->atomic ? ATOMIC : 0);
      finding.buffer = (int32_t)(b - buffers);
      finding.barrier = old->serial == now.serial && old->barriers != now.barriers;
      const int what = old->serial == now.serial ? CLASH : GROUPS_CLASH;
      const void* byte = (void*)(b->start + i * b->unit);
      if (was != WRITE || kind & READ || size > sizeof pending.before) stop(lane, what, byte, size, kind, pc);
      if (!pending.at) {
        describe(lane, what, byte, size, kind, pc);
        pending.at = p;
        pending.size = size;
        pending.found = finding;
        memcpy(pending.before, p, size);
      }
    }
    if (kind & WRITE) {
      Touch* t = c->write;
      if (t->thread != now.thread || t->serial != now.serial) t[1] = t[0];
      t[0] = now;
    }
    if (kind & READ) {
      Touch* t = c->read;
      if (t->serial == now.serial) {
        if (t->thread != now.thread) t[1] = t[0];
        if (t->thread >> 5 != now.thread >> 5) t[2] = t[0];
      } else {
        memset(t, 0, sizeof c->read);
      }
      t[0] = now;
    }
  }
}

static void on_access(EmuLane* lane, const void* p, size_t size, uint32_t kind, const void* pc) {
  const uint64_t at = (uint64_t)p;
  int mine;
  if (overwritten()) stop(lane, 0, p, size, kind, pc);
  if (!size) return;
  Buffer* b = find(at, &mine);
  if (!mine) {
    EmuWorker* s = lane->worker;
    if (within(at, s, sizeof(Worker)) || within(at, s->launch, s->launch->block_bytes)) return;
    if (at + NEAR - (uint64_t)pc < 2 * NEAR || !(checks & MEM)) return;
    finding.buffer = b ? (int32_t)(b - buffers) : -1;
    stop(lane, WILD, p, size, kind, pc);
  }
  finding.buffer = (int32_t)(b - buffers);
  const int outside = at < b->start || at + size > b->end;
  if (checks & MEM) {
    if (kind & WRITE && b->kind == INPUT) stop(lane, WROTE_INPUT, p, size, kind, pc);
    if (outside) stop(lane, OUTSIDE, at < b->start || at >= b->end ? p : (void*)b->end, size, kind, pc);
    if (kind & ATOMIC && at % size) finding.value = (int64_t)size, stop(lane, MISALIGNED, p, size, kind, pc);
    for (uint64_t i = 0; b->inside && i < size; i++)
      if (!b->inside[at - b->start + i]) stop(lane, BETWEEN, (char*)p + i, size, kind, pc);
  }
  if (outside || b->kind == INPUT) return;
  if (checks & RACE) race(lane, b, p, size, kind, pc);
  if (!b->written) return;
  uint8_t* written = b->written + (at - b->start);
  uint8_t* missing = kind & READ && checks & INIT ? memchr(written, 0, size) : NULL;
  if (missing) stop(lane, UNWRITTEN, (char*)p + (missing - written), size, kind, pc);
  if (kind & WRITE) memset(written, 1, size);
}

static void on_broken(EmuLane* lane, int what, const void* p, int64_t value, const char* type, const void* pc) {
  if (!(checks & MEM)) return;
  int mine;
  Buffer* b = p ? find((uint64_t)p, &mine) : NULL;
  finding.buffer = b && mine ? (int32_t)(b - buffers) : -1;
  finding.value = value;
  strncpy(finding.type, type, sizeof finding.type - 1);
  stop(lane, what ? INDEX : MISALIGNED, p, 0, READ, pc);
}

// Metal's atomics are relaxed: what other threadgroups wrote is ordered by a fence alone.
static void on_fence(EmuLane* lane) {
  (void)lane;
  fenced = 1;
}

void emu_sanitize_worker(Worker* w) {
  w->shared.broken = on_broken;
  w->shared.fence = on_fence;
  w->shared.choose = choose;
}

void emu_sanitize_end(Worker* w) {
  if (checks & PROFILE) emu_profile_group(w, 0);
  if (w->error.code == EMU_OK && overwritten()) emu_error(w, EMU_FOUND, NULL, 0, NULL, "");
}

uint64_t emu_sanitize_order(uint64_t index) {
  return group_order ? group_order[index] : index;
}

void emu_sanitize_group(Worker* w, uint64_t index) {
  EmuWorker* s = &w->shared;
  serial = index + 1;
  pending.at = NULL;
  fenced = 0;
  s->barriers = s->epoch[0] = s->epoch[1] = 0;
  for (uint32_t i = 0; i < (s->count + 31) / 32; i++) s->simds[i].epoch[0] = s->simds[i].epoch[1] = 0;
  for (uint32_t i = 0; i < count; i++) {
    Buffer* b = &buffers[i];
    if (b->kind != THREADGROUP) continue;
    if (!rebased) {
      uint64_t* ends[] = {&b->start, &b->end, &b->low, &b->high};
      for (int k = 0; k < 4; k++) *ends[k] += (uint64_t)s->arena;
    }
    memset((void*)b->start, 0xff, b->end - b->start);
    memset(b->written, 0, b->end - b->start);
  }
  rebased = 1;
  s->access = on_access;
  if (checks & PROFILE) emu_profile_group(w, 1);
  for (uint32_t i = 0; i < s->count; i++) s->order[i] = (uint16_t)(schedule == REVERSE ? s->count - 1 - i : i);
  for (uint32_t i = s->count; schedule == RANDOM && i > 1; i--) {
    const uint32_t k = draw(i);
    const uint16_t swap = s->order[k];
    s->order[k] = s->order[i - 1];
    s->order[i - 1] = swap;
  }
}

EXPORT uint32_t emu_sanitize_cell(void) {
  return sizeof(Cell);
}

// Before a launch. `order` lists the threadgroups, NULL as they are; all of it outlives the launch.
EXPORT void emu_sanitize_begin(Buffer* b, uint32_t n, uint32_t wanted, uint32_t scheduled, uint64_t random,
                               const uint64_t* order) {
  buffers = b, count = n, last = 0, checks = wanted, schedule = scheduled, rebased = 0;
  seed = random * 0x9e3779b97f4a7c15ull + 0x2545f4914f6cdd1dull;
  group_order = order;
  memset(&finding, 0, sizeof finding);
}

EXPORT const Finding* emu_sanitize_finding(void) {
  return &finding;
}
