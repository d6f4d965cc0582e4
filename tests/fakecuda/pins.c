// Pinned host memory: allocated here, or registered.
#include "memory.h"
#include <sys/mman.h>

enum { PAGE = 4096 };
typedef struct Pin {
  char *start;
  size_t length;
  int allocated;
  struct Pin *next;
} Pin;

static Pin *pins;

int is_pinned(Pointer pointer, size_t length) { // with `books` held
  for (Pin *pin = pins; pin; pin = pin->next)
    if (pointer >= (Pointer)pin->start && pointer + length <= (Pointer)pin->start + pin->length) return 1;
  return 0;
}

static Result pin_add(void *start, size_t length, int allocated) {
  for (Pin *pin = pins; pin; pin = pin->next)
    if ((char *)start < pin->start + pin->length && pin->start < (char *)start + length) return HOST_ALREADY_REGISTERED;
  Pin *made = calloc(1, sizeof *made);
  *made = (Pin){start, length, allocated, pins};
  pins = made;
  return OK;
}

static Result pin_drop(void *start, int allocated) {
  for (Pin **at = &pins; *at; at = &(*at)->next) {
    Pin *pin = *at;
    if (pin->start != start || pin->allocated != allocated) continue;
    Result pending = clock_expect_idle((Pointer)start, pin->length, "unpinning", ILLEGAL_ADDRESS);
    if (pending) return pending;
    *at = pin->next;
    if (allocated) munmap(pin->start, pin->length);
    free(pin);
    return OK;
  }
  return allocated ? INVALID_VALUE : HOST_NOT_REGISTERED;
}

void pins_reset(void) { // with `books` held; what a lost device did not take back
  for (Pin *pin = pins, *next; pin; pin = next) {
    next = pin->next;
    if (pin->allocated) munmap(pin->start, pin->length);
    free(pin);
  }
  pins = NULL;
}

API Result cuMemHostAlloc(void **start, size_t length, unsigned flags) {
  ENTER(1);
  (void)flags;
  length = (length + PAGE - 1) / PAGE * PAGE;
  if (!length) return INVALID_VALUE;
  *start = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*start == MAP_FAILED) return OUT_OF_MEMORY;
  LOCKED(pin_add(*start, length, 1));
}

API Result cuMemAllocHost_v2(void **start, size_t length) { return cuMemHostAlloc(start, length, 0); }

API Result cuMemFreeHost(void *start) {
  ENTER(1);
  LOCKED(pin_drop(start, 1));
}

API Result cuMemHostRegister_v2(void *start, size_t length, unsigned flags) {
  ENTER(1);
  (void)flags;
  if (!start || !length) return INVALID_VALUE;
  LOCKED(pin_add(start, length, 0));
}

API Result cuMemHostUnregister(void *start) {
  ENTER(1);
  LOCKED(pin_drop(start, 0));
}

API Result cuMemHostGetDevicePointer_v2(Pointer *pointer, void *start, unsigned flags) {
  ENTER(1);
  (void)flags;
  *pointer = (Pointer)start;
  return OK;
}
