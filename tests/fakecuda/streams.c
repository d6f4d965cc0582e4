// Streams. A stream is a thread that carries out its operations one by one.
#include "fake.h"

enum { NON_BLOCKING = 1 };
struct Stream {
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t moved;
  Operation *head, *tail;
  long pushed, done;
  int flags, priority, stopping, held, actor;
  Clock clock;
  Stream *next;
};

static Stream *streams, *default_stream;
static int all_held;

void drop_plain(Operation *operation) { free(operation); }

static void *work(void *argument) {
  Stream *stream = argument;
  for (;;) {
    pthread_mutex_lock(&stream->lock);
    while ((!stream->head && !stream->stopping) || (stream->head && (stream->held || all_held)))
      pthread_cond_wait(&stream->moved, &stream->lock);
    Operation *operation = stream->head;
    if (operation) stream->head = operation->next;
    if (!stream->head) stream->tail = NULL;
    pthread_mutex_unlock(&stream->lock);
    if (!operation) return NULL;
    if (operation->runs_when_lost || !atomic_load(&sticky)) operation->run(operation);
    operation->drop(operation);
    pthread_mutex_lock(&stream->lock);
    stream->done++;
    pthread_cond_broadcast(&stream->moved);
    pthread_mutex_unlock(&stream->lock);
  }
}

static Stream *stream_new(int flags, int priority) { // with `books` held
  Stream *stream = calloc(1, sizeof *stream);
  pthread_mutex_init(&stream->lock, NULL);
  pthread_cond_init(&stream->moved, NULL);
  stream->flags = flags;
  stream->priority = priority;
  stream->actor = actor_take();
  stream->next = streams;
  streams = stream;
  pthread_create(&stream->thread, NULL, work, stream);
  return stream;
}

static void stream_end(Stream *stream) { // what it still has to do, it does; events may point to it for ever
  actor_leave(stream->actor);
  pthread_mutex_lock(&stream->lock);
  stream->stopping = 1;
  stream->held = 0;
  pthread_cond_broadcast(&stream->moved);
  pthread_mutex_unlock(&stream->lock);
  pthread_detach(stream->thread);
}

static long sequence_of(Stream *stream) {
  pthread_mutex_lock(&stream->lock);
  long pushed = stream->pushed;
  pthread_mutex_unlock(&stream->lock);
  return pushed;
}

int stream_is_over(Stream *stream, long sequence) {
  pthread_mutex_lock(&stream->lock);
  int over = stream->done >= sequence;
  pthread_mutex_unlock(&stream->lock);
  return over;
}

void stream_await(Stream *stream, long sequence) {
  pthread_mutex_lock(&stream->lock);
  while (stream->done < sequence) pthread_cond_wait(&stream->moved, &stream->lock);
  pthread_mutex_unlock(&stream->lock);
}

typedef struct { Operation base; Stream *stream; long sequence; } Wait;
static void wait_run(Operation *self) { stream_await(((Wait *)self)->stream, ((Wait *)self)->sequence); }

static long append(Stream *stream, Operation *operation) {
  pthread_mutex_lock(&stream->lock);
  if (stream->tail) stream->tail->next = operation;
  else stream->head = operation;
  stream->tail = operation;
  long sequence = ++stream->pushed;
  pthread_cond_broadcast(&stream->moved);
  pthread_mutex_unlock(&stream->lock);
  return sequence;
}

void stream_push_wait(Stream *stream, Stream *other, long sequence, const Clock *known) {
  Wait *wait = calloc(1, sizeof *wait);
  *wait = (Wait){{wait_run, drop_plain, 1, NULL}, other, sequence};
  append(stream, &wait->base);
  clock_join(&stream->clock, known);
}

// The default stream comes after and before all streams that are not made as independent ones.
Stream *stream_of(void *handle) {
  int is_default = (uintptr_t)handle <= 2;
  if (is_default && !default_stream) default_stream = stream_new(0, 0);
  Stream *stream = is_default ? default_stream : handle;
  for (Stream *other = streams; other; other = other->next)
    if (other != stream && !((other->flags | stream->flags) & NON_BLOCKING) && (is_default || other == default_stream))
      stream_push_wait(stream, other, sequence_of(other), &other->clock);
  return stream;
}

long stream_push(Stream *stream, Operation *operation, const Footprint *footprint, Result *result) {
  clock_enqueue(&stream->clock, stream->actor);
  if (footprint)
    *result = clock_touch(&stream->clock, stream->actor, footprint->what, footprint->touches, footprint->count,
                          footprint->unordered);
  return append(stream, operation);
}

Clock stream_clock(Stream *stream) { return stream->clock; }

void learn(const Clock *known) {
  pthread_mutex_lock(&books);
  host_learns(known);
  pthread_mutex_unlock(&books);
}

// How far a stream has been filled: exactly that, and nothing pushed later, is known to who waits for it.
typedef struct { Stream *stream; long sequence; Clock clock; } Extent;
static Extent extent_of(void *handle) {
  pthread_mutex_lock(&books);
  Stream *stream = (uintptr_t)handle <= 2 ? stream_of(handle) : handle;
  Extent extent = {stream, sequence_of(stream), stream->clock};
  pthread_mutex_unlock(&books);
  return extent;
}

void stream_synchronize(void *handle) {
  Extent extent = extent_of(handle);
  stream_await(extent.stream, extent.sequence);
  learn(&extent.clock);
}

// Ends all streams that tests have left, once they are done: their handles are worth nothing from now on.
void streams_reset(void) {
  pthread_mutex_lock(&books);
  Stream *left = streams;
  streams = default_stream = NULL;
  pthread_mutex_unlock(&books);
  for (Stream *stream = left; stream; stream = stream->next) {
    stream_await(stream, sequence_of(stream));
    pthread_mutex_lock(&books);
    stream_end(stream);
    pthread_mutex_unlock(&books);
  }
}

// Work waits from now on, in one stream or (NULL) in all, or goes on: what is pending in a test needs no time.
API void fakecu_hold(void *handle, int held) {
  pthread_mutex_lock(&books);
  if (handle) ((Stream *)handle)->held = held;
  else all_held = held;
  for (Stream *stream = streams; stream; stream = stream->next) {
    pthread_mutex_lock(&stream->lock);
    if (!handle && !held) stream->held = 0;
    pthread_cond_broadcast(&stream->moved);
    pthread_mutex_unlock(&stream->lock);
  }
  pthread_mutex_unlock(&books);
}

// ---------------------------------------------------------------- streams
static Result create(void **handle, unsigned flags, int priority) {
  if (flags > NON_BLOCKING) return INVALID_VALUE;
  pthread_mutex_lock(&books);
  *handle = stream_new(flags, priority);
  pthread_mutex_unlock(&books);
  return OK;
}

API Result cuStreamCreateWithPriority(void **handle, unsigned flags, int priority) {
  ENTER(1);
  return create(handle, flags, priority);
}

API Result cuStreamCreate(void **handle, unsigned flags) {
  ENTER(1);
  return create(handle, flags, 0);
}

API Result cuStreamDestroy_v2(void *handle) {
  ENTER(1);
  Result result = INVALID_HANDLE;
  pthread_mutex_lock(&books);
  for (Stream **at = &streams; *at; at = &(*at)->next)
    if (*at == handle) {
      Stream *stream = *at;
      *at = stream->next;
      stream_end(stream);
      result = OK;
      break;
    }
  pthread_mutex_unlock(&books);
  return result;
}

// On a lost device too it returns only when nothing moves any more: what comes next may be the end of the memory.
API Result cuStreamSynchronize(void *handle) {
  Result refused = enter(__func__, 1);
  if (refused && refused != atomic_load(&sticky)) return refused;
  stream_synchronize(handle);
  return atomic_load(&sticky);
}

API Result cuStreamQuery(void *handle) {
  ENTER(1);
  Extent extent = extent_of(handle);
  if (!stream_is_over(extent.stream, extent.sequence)) return NOT_READY;
  learn(&extent.clock);
  return atomic_load(&sticky);
}

API Result cuCtxSynchronize(void) {
  ENTER(1);
  pthread_mutex_lock(&books);
  Stream *first = streams;
  pthread_mutex_unlock(&books);
  for (Stream *stream = first; stream; stream = stream->next) stream_synchronize(stream);
  return atomic_load(&sticky);
}

API Result cuStreamGetFlags(void *handle, unsigned *flags) {
  ENTER(1);
  *flags = extent_of(handle).stream->flags;
  return OK;
}

API Result cuStreamGetPriority(void *handle, int *priority) {
  ENTER(1);
  *priority = extent_of(handle).stream->priority;
  return OK;
}

API Result cuStreamGetCtx(void *handle, void **context) {
  ENTER(1);
  (void)handle;
  *context = current_context;
  return OK;
}

API Result cuStreamIsCapturing(void *handle, int *status) {
  ENTER(1);
  (void)handle;
  *status = 0;
  return OK;
}

// ---------------------------------------------------------------- for tests
static void nothing_run(Operation *self) { (void)self; }

// What a kernel would do: use memory in this stream. Moves no bytes.
API Result fakecu_touch(void *handle, Pointer start, size_t length, int writes) {
  Result result = OK;
  Operation *operation = calloc(1, sizeof *operation);
  *operation = (Operation){nothing_run, drop_plain, 0, NULL};
  pthread_mutex_lock(&books);
  stream_push(stream_of(handle), operation, &(Footprint){"a kernel", &(Touch){start, length, writes, 0}, 1, 0}, &result);
  pthread_mutex_unlock(&books);
  return result;
}
