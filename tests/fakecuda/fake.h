// fakecuda: a libcuda.so.1 for machines with no GPU, so that the real bindings run and every rule is enforced.
//
// Physical memory is a memfd, a reservation is an inaccessible mapping, and mapping is mmap(MAP_FIXED). Each reservation
// has a twin, always readable and writable, through which copies, fills and strict launches reach the memory: a bad
// device pointer then gives the sticky error of a device, never a SIGSEGV. Streams are threads.
//
//   calls.c    what may be called, faults on request, names of errors      copies.c   copies and fills
//   memory.c   the books of ranges and physical memory                     kernels.c  modules and launches
//   vmm.c      calls that change them; pins.c  pinned host memory          clocks.c   who is ordered after whom
//   streams.c  streams; events.c  events and host functions                device.c   device, context, look-up of symbols
//
// Lock order: `books`, then a stream's own `lock`. A worker thread never holds its stream's lock while it takes `books`.
#pragma once
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))

typedef int Result;
typedef uint64_t Pointer; // a CUdeviceptr; host pointers are valid ones too
typedef int Device;

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
       INVALID_IMAGE = 200, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
       ILLEGAL_ADDRESS = 700, HOST_ALREADY_REGISTERED = 712, HOST_NOT_REGISTERED = 713, LAUNCH_FAILED = 719,
       NOT_PERMITTED = 800, NOT_SUPPORTED = 801 };
enum { ACCESS_NONE = 0, ACCESS_READ = 1, ACCESS_READ_WRITE = 3, LOCATION_DEVICE = 1, HANDLE_FD = 1 };

// Layouts as in cuda.h (12.0 to 13.x).
typedef struct { int type, id; } Location;
typedef struct {
  int type, handle_types;
  Location location;
  void *windows;
  struct { unsigned char compression, rdma; unsigned short usage; unsigned char rest[4]; } flags;
} AllocationProp;
typedef struct { Location location; int flags; } AccessDesc;
typedef struct { int order; Location src, dst; unsigned flags; } CopyAttributes;

// ---------------------------------------------------------------- settings and calls (calls.c)
extern pthread_mutex_t books; // guards memory, registries and clocks
extern size_t capacity_bytes, granule_bytes;
extern int strict, devices, read_only_works, initialized;
extern double copy_gbps;
extern long copy_latency_us;
extern atomic_int sticky; // the error that has ended the context, or 0
extern __thread void *current_context;

Result enter(const char *call, int needs_context);
void count_call(const char *call, long times);
void stick(int code);
int is_hidden(const char *symbol);
int attribute_or(int attribute, int otherwise);
#define ENTER(needs_context) \
  do { Result refused = enter(__func__, needs_context); if (refused) return refused; } while (0)

// ---------------------------------------------------------------- order (clocks.c): all with `books` held
enum { ACTORS = 256 };
typedef struct { uint32_t at[ACTORS]; } Clock; // how far each stream's work is known to be over
typedef struct { Pointer start; size_t length; int writes, early; } Touch; // early: before what the stream did so far

int actor_take(void);
void actor_leave(int actor);
void clock_join(Clock *known, const Clock *more);
void host_learns(const Clock *known);
void clock_enqueue(Clock *stream_clock, int actor); // a new operation
Result clock_touch(const Clock *stream_clock, int actor, const char *what, const Touch *touches, size_t count, int unordered);
Result clock_expect_idle(Pointer start, size_t length, const char *what, int code);
void clock_forget(uint64_t memory);
void clock_reset(void);

// ---------------------------------------------------------------- memory (memory.c): with `books` held
char *reach(Pointer pointer, size_t *length, int writes); // where a worker finds it, cut to what is contiguous; 0: illegal
int is_device(Pointer pointer);
int is_pinned(Pointer pointer, size_t length);
void pins_reset(void);
Pointer twin_of(Pointer pointer); // itself unless it lies in a reservation
uint64_t memory_of(Pointer pointer, size_t *offset, size_t *length); // which memory; 0 for the host's

// ---------------------------------------------------------------- streams (streams.c)
typedef struct Stream Stream;
typedef struct Operation {
  void (*run)(struct Operation *self);
  void (*drop)(struct Operation *self); // frees what it owns, and itself
  int runs_when_lost;                   // events, waits and host functions come to an end on a lost device too
  struct Operation *next;
} Operation;
typedef struct { const char *what; const Touch *touches; size_t count; int unordered; } Footprint;

// With `books` held. A NULL handle is the default stream. Returns the operation's number in the stream.
Stream *stream_of(void *handle);
long stream_push(Stream *stream, Operation *operation, const Footprint *footprint, Result *result);
void stream_push_wait(Stream *stream, Stream *other, long sequence, const Clock *known);
Clock stream_clock(Stream *stream);
void drop_plain(Operation *operation);
// Without `books`.
int stream_is_over(Stream *stream, long sequence);
void stream_await(Stream *stream, long sequence);
void stream_synchronize(void *handle); // waits, and the host learns
void learn(const Clock *known);
void streams_reset(void);
void fakecu_hold(void *handle, int held);
