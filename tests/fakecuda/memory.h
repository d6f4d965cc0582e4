// What the books of memory hold, for the calls that change them. All with `books` held.
#pragma once
#include "fake.h"

typedef struct Physical {
  int fd, owners, mappings, counted;
  size_t length;
  uint64_t inode; // the same memory, imported, is another Physical
  AllocationProp prop;
  struct Physical *next;
} Physical;
typedef struct Mapping {
  Pointer start;
  size_t length;
  Physical *physical;
  int access;
  struct Mapping *next; // ascending
} Mapping;

extern size_t used_bytes;

Mapping *mapping_of(Pointer pointer);
Mapping *whole_mappings(Pointer start, size_t length);
Physical *physical_of(uint64_t handle);
Result physical_new(Physical **made, size_t length, const AllocationProp *prop, int imported_fd);
void physical_collect(Physical *physical);
Result range_new(Pointer *start, size_t length, size_t alignment);
Result range_drop(Pointer start, size_t length);
Result map_in(Pointer start, size_t length, Physical *physical);
Result unmap_from(Pointer start, size_t length);
Result open_to(Pointer start, size_t length, int access);

#define LOCKED(expression) \
  pthread_mutex_lock(&books); Result result = (expression); pthread_mutex_unlock(&books); return result
