// Private to the runtime: an OS thread and its fibers.
#pragma once
#include "cpu_runtime.h"

#include <setjmp.h>

#define EMU_GUARD (1 << 20)  // unmapped bytes after threadgroup memory

typedef struct Worker {
  EmuWorker shared;  // first: kernels see this part
  EmuLane* fiber[EMU_MAX_THREADS];
  EmuLane* idle[EMU_MAX_THREADS];
  uint32_t fibers, idles, prepared;
  uint32_t returned[EMU_MAX_SIMDS];  // lane masks of finished threads
  unsigned char* arena_end;
  EmuError error;
  sigjmp_buf escape;  // out of a fault
  volatile int fault_signal, fault_code;
  uintptr_t fault_address;
} Worker;

void emu_switch(void** save, void* to);
void emu_wait(EmuLane* lane);
#ifdef EMU_SANITIZE
void emu_barrier(EmuLane* lane, uint32_t at, const char* file, uint32_t flags);
#else
void emu_barrier(EmuLane* lane, uint32_t at, const char* file);
#endif
void emu_fail(EmuLane* lane, int code, EmuOp op, uint32_t at, const char* file, const char* text);

int emu_open_worker(Worker* w);
int emu_run_group(Worker* w, const EmuLaunch* launch, uint64_t index);

__attribute__((noreturn)) void emu_leave(Worker* w);

// The sanitizer, in cpu_sanitize.c.
void emu_sanitize_worker(Worker* w);
void emu_sanitize_group(Worker* w, uint64_t index);
void emu_sanitize_end(Worker* w);
void emu_profile_group(Worker* w, int begins);
uint64_t emu_sanitize_order(uint64_t index);

// Messages, in cpu_report.c.
void emu_error(Worker* w, int code, EmuLane* lane, uint32_t at, const char* file, const char* format, ...);
void emu_describe(Worker* w, EmuLane* lane, int code, EmuOp op, uint32_t at, const char* file, const char* text);
void emu_deadlock(Worker* w);
void emu_fault(Worker* w);
