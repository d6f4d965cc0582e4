// Events and host functions. Events are never freed: operations under way point to them.
#include "fake.h"
#include <time.h>

enum { WITHOUT_TIME = 2 };
typedef struct { Stream *stream; long sequence; double time_s; int flags; Clock clock; } Event;

typedef struct { Operation base; Event *event; } Mark;
static void mark_run(Operation *self) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  ((Mark *)self)->event->time_s = (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

API Result cuEventCreate(void **handle, unsigned flags) {
  ENTER(1);
  Event *event = calloc(1, sizeof *event);
  event->flags = flags;
  *handle = event;
  return OK;
}

API Result cuEventDestroy_v2(void *handle) {
  ENTER(1);
  return handle ? OK : INVALID_HANDLE;
}

API Result cuEventRecord(void *handle, void *stream_handle) {
  ENTER(1);
  Event *event = handle;
  Mark *mark = calloc(1, sizeof *mark);
  *mark = (Mark){{mark_run, drop_plain, 1, NULL}, event};
  pthread_mutex_lock(&books);
  event->stream = stream_of(stream_handle);
  event->sequence = stream_push(event->stream, &mark->base, NULL, NULL);
  event->clock = stream_clock(event->stream);
  pthread_mutex_unlock(&books);
  return OK;
}

API Result cuStreamWaitEvent(void *handle, void *event_handle, unsigned flags) {
  ENTER(1);
  Event *event = event_handle;
  if (flags) return INVALID_VALUE;
  pthread_mutex_lock(&books);
  if (event->stream) stream_push_wait(stream_of(handle), event->stream, event->sequence, &event->clock);
  pthread_mutex_unlock(&books);
  return OK;
}

static Event event_now(void *handle) {
  pthread_mutex_lock(&books);
  Event now = *(Event *)handle;
  pthread_mutex_unlock(&books);
  return now;
}

API Result cuEventQuery(void *handle) {
  ENTER(1);
  Event now = event_now(handle);
  if (!now.stream) return OK;
  if (!stream_is_over(now.stream, now.sequence)) return NOT_READY;
  learn(&now.clock);
  return atomic_load(&sticky);
}

API Result cuEventSynchronize(void *handle) {
  ENTER(1);
  Event now = event_now(handle);
  if (!now.stream) return OK;
  stream_await(now.stream, now.sequence);
  learn(&now.clock);
  return atomic_load(&sticky);
}

API Result cuEventElapsedTime_v2(float *milliseconds, void *from_handle, void *to_handle) {
  ENTER(1);
  Event from = event_now(from_handle), to = event_now(to_handle);
  if (!from.stream || !to.stream || ((from.flags | to.flags) & WITHOUT_TIME)) return INVALID_HANDLE;
  if (!stream_is_over(from.stream, from.sequence) || !stream_is_over(to.stream, to.sequence)) return NOT_READY;
  *milliseconds = (float)((to.time_s - from.time_s) * 1e3);
  return OK;
}

// ---------------------------------------------------------------- host functions
typedef struct { Operation base; void (*function)(void *); void *data; } HostCall;
static void host_call_run(Operation *self) { ((HostCall *)self)->function(((HostCall *)self)->data); }

API Result cuLaunchHostFunc(void *handle, void (*function)(void *), void *data) {
  ENTER(1);
  HostCall *call = calloc(1, sizeof *call);
  *call = (HostCall){{host_call_run, drop_plain, 1, NULL}, function, data};
  pthread_mutex_lock(&books);
  stream_push(stream_of(handle), &call->base, NULL, NULL);
  pthread_mutex_unlock(&books);
  return OK;
}
