// Copies and fills. Memory that is not pinned is staged at once on the way up, and waited for on the way down.
#include "fake.h"
#include <time.h>

enum { CHUNK = 256 << 10, FROM_CALL = 2, FROM_ANYTIME = 3 };
typedef struct { Operation base; size_t count; Pointer *to, *from; size_t *lengths; char *staged; } Copies;

static void pass(double seconds) {
  if (seconds <= 0) return;
  struct timespec rest = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
  nanosleep(&rest, NULL);
}

// In chunks, so that what is unmapped meanwhile is found to be so.
static void copy_one(Pointer to, Pointer from, size_t length) {
  while (length) {
    size_t writable = length < CHUNK ? length : CHUNK, readable = writable;
    pthread_mutex_lock(&books);
    char *target = reach(to, &writable, 1), *source = reach(from, &readable, 0);
    size_t chunk = writable < readable ? writable : readable;
    if (target && source) memmove(target, source, chunk);
    pthread_mutex_unlock(&books);
    if (!target || !source) { stick(ILLEGAL_ADDRESS); return; }
    to += chunk;
    from += chunk;
    length -= chunk;
    if (copy_gbps > 0) pass((double)chunk / (copy_gbps * 1e9));
  }
}

static void copies_run(Operation *self) {
  Copies *copies = (Copies *)self;
  pass((double)copy_latency_us * 1e-6);
  for (size_t i = 0; i < copies->count; i++) copy_one(copies->to[i], copies->from[i], copies->lengths[i]);
}

static void copies_drop(Operation *self) {
  Copies *copies = (Copies *)self;
  free(copies->to);
  free(copies->from);
  free(copies->lengths);
  free(copies->staged);
  free(copies);
}

static void *duplicate(const void *source, size_t length) { return memcpy(malloc(length), source, length); }

// Reads the sources that must be read now: unpinned host memory, or all of the host's if `stage_all`. With `books` held.
static void stage(Copies *copies, int stage_all) {
  size_t staged_bytes = 0, place = 0;
  char *wanted = calloc(copies->count, 1);
  for (size_t i = 0; i < copies->count; i++) {
    int pinned = is_pinned(copies->from[i], copies->lengths[i]);
    wanted[i] = !is_device(copies->from[i]) && (stage_all || !pinned);
    if (wanted[i]) staged_bytes += copies->lengths[i];
    if (wanted[i] && !pinned) count_call("pageable_copies", 1);
  }
  copies->staged = staged_bytes ? malloc(staged_bytes) : NULL;
  for (size_t i = 0; i < copies->count; i++) {
    if (!wanted[i]) continue;
    memcpy(copies->staged + place, (void *)copies->from[i], copies->lengths[i]);
    copies->from[i] = (Pointer)copies->staged + place;
    place += copies->lengths[i];
  }
  free(wanted);
}

// `order`: that of reading the sources in a batch; 0 for a copy alone.
static Result enqueue(const Pointer *to, const Pointer *from, const size_t *lengths, size_t count, void *handle,
                      int order, int waits) {
  Copies *copies = calloc(1, sizeof *copies);
  Touch *touches = calloc(2 * count, sizeof *touches);
  size_t bytes = 0;
  Result result = OK;
  *copies = (Copies){{copies_run, copies_drop, 0, NULL}, count, duplicate(to, count * sizeof *to),
                     duplicate(from, count * sizeof *from), duplicate(lengths, count * sizeof *lengths), NULL};
  pthread_mutex_lock(&books);
  stage(copies, order == FROM_CALL);
  for (size_t i = 0; i < count; i++) {
    touches[2 * i] = (Touch){copies->from[i], lengths[i], 0, order == FROM_ANYTIME};
    touches[2 * i + 1] = (Touch){to[i], lengths[i], 1, 0};
    bytes += lengths[i];
    if (is_device(to[i]) || is_pinned(to[i], lengths[i])) continue;
    waits = 1;
    count_call("pageable_copies", 1);
  }
  Footprint footprint = {order ? "a batch of copies" : "a copy", touches, 2 * count, order != 0};
  stream_push(stream_of(handle), &copies->base, &footprint, &result);
  pthread_mutex_unlock(&books);
  free(touches);
  count_call("bytes_copied", (long)bytes);
  count_call("copy_descriptors", (long)count);
  if (waits) stream_synchronize(handle);
  return result ? result : waits ? atomic_load(&sticky) : OK;
}

API Result cuMemcpyHtoDAsync_v2(Pointer to, const void *from, size_t length, void *handle) {
  ENTER(1);
  return enqueue(&to, &(Pointer){(Pointer)from}, &length, 1, handle, 0, 0);
}

API Result cuMemcpyDtoHAsync_v2(void *to, Pointer from, size_t length, void *handle) {
  ENTER(1);
  return enqueue(&(Pointer){(Pointer)to}, &from, &length, 1, handle, 0, 0);
}

API Result cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t length, void *handle) {
  ENTER(1);
  return enqueue(&to, &from, &length, 1, handle, 0, 0);
}

API Result cuMemcpyAsync(Pointer to, Pointer from, size_t length, void *handle) {
  ENTER(1);
  return enqueue(&to, &from, &length, 1, handle, 0, 0);
}

API Result cuMemcpyHtoD_v2(Pointer to, const void *from, size_t length) {
  ENTER(1);
  return enqueue(&to, &(Pointer){(Pointer)from}, &length, 1, NULL, 0, 1);
}

API Result cuMemcpyDtoH_v2(void *to, Pointer from, size_t length) {
  ENTER(1);
  return enqueue(&(Pointer){(Pointer)to}, &from, &length, 1, NULL, 0, 1);
}

// Refuses the default stream, as documented; one order serves all copies here.
static Result batch(const Pointer *to, const Pointer *from, const size_t *lengths, size_t count,
                    const CopyAttributes *attributes, const size_t *starts, size_t attribute_count, void *handle) {
  if (!count || !handle || handle == (void *)1 || handle == (void *)2) return INVALID_VALUE;
  if (!attributes || !starts || !attribute_count || attribute_count > count || starts[0]) return INVALID_VALUE;
  for (size_t i = 0; i < attribute_count; i++)
    if (attributes[i].order < 1 || attributes[i].order > FROM_ANYTIME || starts[i] >= count) return INVALID_VALUE;
  return enqueue(to, from, lengths, count, handle, attributes[0].order, 0);
}

API Result cuMemcpyBatchAsync(const Pointer *to, const Pointer *from, const size_t *lengths, size_t count,
                              const CopyAttributes *attributes, const size_t *starts, size_t attribute_count,
                              size_t *failed_at, void *handle) {
  if (failed_at) *failed_at = SIZE_MAX;
  ENTER(1);
  return batch(to, from, lengths, count, attributes, starts, attribute_count, handle);
}

API Result cuMemcpyBatchAsync_v2(const Pointer *to, const Pointer *from, const size_t *lengths, size_t count,
                                 const CopyAttributes *attributes, const size_t *starts, size_t attribute_count,
                                 void *handle) {
  ENTER(1);
  return batch(to, from, lengths, count, attributes, starts, attribute_count, handle);
}

// ---------------------------------------------------------------- fills
typedef struct { Operation base; Pointer to; size_t length; unsigned char value; } Fill;

static void fill_run(Operation *self) {
  Fill *fill = (Fill *)self;
  pthread_mutex_lock(&books);
  while (fill->length) {
    size_t chunk = fill->length;
    char *target = reach(fill->to, &chunk, 1);
    if (!target) { stick(ILLEGAL_ADDRESS); break; }
    memset(target, fill->value, chunk);
    fill->to += chunk;
    fill->length -= chunk;
  }
  pthread_mutex_unlock(&books);
}

API Result cuMemsetD8Async(Pointer to, unsigned char value, size_t length, void *handle) {
  ENTER(1);
  Result result = OK;
  Fill *fill = calloc(1, sizeof *fill);
  *fill = (Fill){{fill_run, drop_plain, 0, NULL}, to, length, value};
  pthread_mutex_lock(&books);
  stream_push(stream_of(handle), &fill->base, &(Footprint){"a fill", &(Touch){to, length, 1, 0}, 1, 0}, &result);
  pthread_mutex_unlock(&books);
  return result;
}
