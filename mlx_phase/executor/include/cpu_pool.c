// OS threads that share a launch's threadgroups, and the net that catches faults in kernels.
#include "cpu_worker.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_WORKERS 1024
#define ALT_STACK 65536

static pthread_mutex_t launch_lock = PTHREAD_MUTEX_INITIALIZER;  // one launch at a time
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t begin = PTHREAD_COND_INITIALIZER, finished = PTHREAD_COND_INITIALIZER;
static Worker* workers[MAX_WORKERS];  // 0 is whoever launches
static uint32_t started = 1, wanted, busy;
static uint64_t turn;
static EmuLaunch* current;
static uint64_t next_group, group_count, chunk;
static int stopped;
static __thread Worker* mine;  // set while this OS thread runs kernels

static const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
enum { SIGNALS = sizeof signals / sizeof *signals };
static struct sigaction before[SIGNALS];

static void on_fault(int number, siginfo_t* info, void* context) {
  Worker* w = mine;
  if (w && w->shared.running) {
    w->fault_signal = number;
    w->fault_code = info->si_code;
    w->fault_address = (uintptr_t)info->si_addr;
    siglongjmp(w->escape, 1);
  }
  // Not ours: hand it to whoever was there before.
  for (int i = 0; i < SIGNALS; i++) {
    if (signals[i] != number) continue;
    if (before[i].sa_flags & SA_SIGINFO && before[i].sa_sigaction) {
      before[i].sa_sigaction(number, info, context);
    } else if (before[i].sa_handler == SIG_DFL || before[i].sa_handler == SIG_IGN) {
      sigaction(number, &before[i], NULL);  // returns to the faulting instruction, which now ends the process
    } else {
      before[i].sa_handler(number);
    }
  }
}

static void run_share(Worker* w) {
  mine = w;
  if (sigsetjmp(w->escape, 1)) {
    emu_fault(w);
    w->shared.running = NULL;
    w->prepared = 0;
  } else {
    for (;;) {
      uint64_t i = __atomic_fetch_add(&next_group, chunk, __ATOMIC_RELAXED);
      if (i >= group_count || __atomic_load_n(&stopped, __ATOMIC_RELAXED)) goto out;
      uint64_t end = i + chunk < group_count ? i + chunk : group_count;
      for (; i < end; i++) {
#ifdef EMU_SANITIZE
        if (emu_run_group(w, current, emu_sanitize_order(i))) goto failed;
#else
        if (emu_run_group(w, current, i)) goto failed;
#endif
      }
    }
  }
failed:
  if (!__atomic_exchange_n(&stopped, 1, __ATOMIC_ACQ_REL)) current->error = w->error;
out:
  mine = NULL;
}

static void* worker_main(void* argument) {
  uint32_t index = (uint32_t)(uintptr_t)argument;
  Worker* w = workers[index];
  stack_t alt = {.ss_sp = malloc(ALT_STACK), .ss_size = ALT_STACK};
  if (alt.ss_sp) sigaltstack(&alt, NULL);
  uint64_t seen = 0;
  pthread_mutex_lock(&lock);
  for (;;) {
    while (turn == seen || index >= wanted) {
      seen = turn;
      pthread_cond_wait(&begin, &lock);
    }
    seen = turn;
    pthread_mutex_unlock(&lock);
    run_share(w);
    pthread_mutex_lock(&lock);
    if (--busy == 0) pthread_cond_signal(&finished);
  }
  return NULL;
}

static Worker* open_worker(uint32_t index) {
  if (workers[index]) return workers[index];
  void* at = NULL;
  if (posix_memalign(&at, 64, sizeof(Worker))) return NULL;
  memset(at, 0, sizeof(Worker));
  if (emu_open_worker(at)) {
    free(at);
    return NULL;
  }
  return workers[index] = at;
}

// Starts OS threads up to `count`; fewer are fine, the launch then takes longer.
static uint32_t grow(uint32_t count) {
  if (count > MAX_WORKERS) count = MAX_WORKERS;
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  sigset_t all, old;
  sigfillset(&all);
  for (int i = 0; i < SIGNALS; i++) sigdelset(&all, signals[i]);
  pthread_sigmask(SIG_SETMASK, &all, &old);  // the interpreter's signals are not for these threads
  while (started < count) {
    pthread_t thread;
    if (!open_worker(started)) break;
    if (pthread_create(&thread, &attributes, worker_main, (void*)(uintptr_t)started)) break;
    started++;
  }
  pthread_sigmask(SIG_SETMASK, &old, NULL);
  pthread_attr_destroy(&attributes);
  return started < count ? started : count;
}

// Threads do not survive a fork: the child starts its own.
EXPORT void emu_after_fork(void) {
  pthread_mutex_init(&launch_lock, NULL);
  pthread_mutex_init(&lock, NULL);
  pthread_cond_init(&begin, NULL);
  pthread_cond_init(&finished, NULL);
  started = 1, busy = 0, wanted = 0, turn = 0;
}

EXPORT uint32_t emu_launch_bytes(void) {
  return sizeof(EmuLaunch);
}

// Runs every threadgroup. Returns 0, or the code of the first error, which is in launch->error.
EXPORT int emu_launch(EmuLaunch* launch) {
  static unsigned char alt_stack[ALT_STACK] __attribute__((aligned(64)));
  pthread_mutex_lock(&launch_lock);
  memset(&launch->error, 0, sizeof launch->error);
  group_count = 1;
  for (int d = 0; d < 3; d++) {
    launch->groups[d] = (launch->grid[d] - 1) / launch->group[d] + 1;
    group_count *= launch->groups[d];
  }
  uint32_t threads = launch->threads < group_count ? launch->threads : (uint32_t)group_count;
  if (!open_worker(0)) {
    launch->error.code = EMU_NOMEM;
    strcpy(launch->error.text, "no memory for the runtime");
    pthread_mutex_unlock(&launch_lock);
    return EMU_NOMEM;
  }
  if (threads > started) threads = grow(threads);
  chunk = group_count / (threads * 8ull);
  chunk = chunk < 1 ? 1 : chunk > 64 ? 64 : chunk;
  next_group = 0;
  stopped = 0;
  current = launch;

  struct sigaction action;
  memset(&action, 0, sizeof action);
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int i = 0; i < SIGNALS; i++) sigaction(signals[i], &action, &before[i]);
  stack_t alt = {.ss_sp = alt_stack, .ss_size = ALT_STACK}, old_alt;
  sigaltstack(&alt, &old_alt);

  if (threads > 1) {
    pthread_mutex_lock(&lock);
    wanted = threads;
    busy = threads - 1;
    turn++;
    pthread_cond_broadcast(&begin);
    pthread_mutex_unlock(&lock);
  }
  run_share(workers[0]);
  if (threads > 1) {
    pthread_mutex_lock(&lock);
    while (busy) pthread_cond_wait(&finished, &lock);
    pthread_mutex_unlock(&lock);
  }
  sigaltstack(&old_alt, NULL);
  for (int i = 0; i < SIGNALS; i++) sigaction(signals[i], &before[i], NULL);
  int code = launch->error.code;
  pthread_mutex_unlock(&launch_lock);
  return code;
}

// Pages around `bytes` that start at `data`, at the same offset within a page.
static size_t copy_bytes(const void* data, size_t bytes, size_t margin, size_t* offset) {
  const size_t page = (size_t)sysconf(_SC_PAGESIZE);
  *offset = margin + (uintptr_t)data % page;
  return (*offset + bytes + margin + page - 1) / page * page;
}

// A copy that can only be read, with `margin` (a multiple of the page size) of zeros to both sides.
EXPORT void* emu_copy(const void* data, size_t bytes, size_t margin) {
  size_t offset, size = copy_bytes(data, bytes, margin, &offset);
  unsigned char* at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return NULL;
  memcpy(at + offset, data, bytes);
  mprotect(at, size, PROT_READ);
  return at + offset;
}

EXPORT void emu_free_copy(void* copy, size_t bytes, size_t margin) {
  size_t offset, size = copy_bytes(copy, bytes, margin, &offset);
  munmap((unsigned char*)copy - offset, size);
}
