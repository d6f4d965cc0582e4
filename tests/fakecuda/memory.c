// The books of address ranges and of the physical memory behind them. All with `books` held.
#include "memory.h"
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct Range {
  Pointer start;
  size_t length;
  char *twin;
  struct Range *next;
} Range;
static Physical *physicals;
static Mapping *mappings;
static Range *ranges;
size_t used_bytes;

// ---------------------------------------------------------------- finding
static Range *range_of(Pointer pointer) {
  for (Range *range = ranges; range; range = range->next)
    if (pointer >= range->start && pointer < range->start + range->length) return range;
  return NULL;
}

Mapping *mapping_of(Pointer pointer) {
  for (Mapping *mapping = mappings; mapping; mapping = mapping->next)
    if (pointer >= mapping->start && pointer < mapping->start + mapping->length) return mapping;
  return NULL;
}

Physical *physical_of(uint64_t handle) {
  for (Physical *physical = physicals; physical; physical = physical->next)
    if ((uint64_t)physical == handle) return physical;
  return NULL;
}

int is_device(Pointer pointer) { return range_of(pointer) != NULL; }

Pointer twin_of(Pointer pointer) {
  Range *range = range_of(pointer);
  return range ? (Pointer)range->twin + (pointer - range->start) : pointer;
}

char *reach(Pointer pointer, size_t *length, int writes) {
  if (!is_device(pointer)) return (char *)pointer;
  Mapping *mapping = mapping_of(pointer);
  if (!mapping || !mapping->access || (writes && mapping->access != ACCESS_READ_WRITE)) return NULL;
  size_t left = mapping->start + mapping->length - pointer;
  if (*length > left) *length = left;
  return (char *)twin_of(pointer);
}

uint64_t memory_of(Pointer pointer, size_t *offset, size_t *length) {
  Mapping *mapping = mapping_of(pointer);
  *offset = pointer;
  if (!mapping) return 0;
  size_t left = mapping->start + mapping->length - pointer;
  if (*length > left) *length = left;
  *offset = pointer - mapping->start;
  return mapping->physical->inode;
}

// ---------------------------------------------------------------- physical memory
void physical_collect(Physical *physical) {
  if (physical->owners || physical->mappings) return;
  Physical **at = &physicals;
  while (*at != physical) at = &(*at)->next;
  *at = physical->next;
  clock_forget(physical->inode);
  close(physical->fd);
  if (physical->counted) used_bytes -= physical->length;
  free(physical);
}

Result physical_new(Physical **made, size_t length, const AllocationProp *prop, int imported_fd) {
  int fd = imported_fd;
  struct stat status;
  if (fd < 0) {
    if (used_bytes + length > capacity_bytes) return OUT_OF_MEMORY;
    fd = memfd_create("fakecuda", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, length)) return OUT_OF_MEMORY;
    used_bytes += length;
  }
  fstat(fd, &status);
  Physical *physical = calloc(1, sizeof *physical);
  *physical = (Physical){.fd = fd, .owners = 1, .counted = imported_fd < 0, .length = length,
                         .inode = status.st_ino, .prop = *prop, .next = physicals};
  physicals = physical;
  *made = physical;
  return OK;
}

// ---------------------------------------------------------------- ranges and mappings
static void *inaccessible(void *at, size_t length) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at ? MAP_FIXED : 0);
  return mmap(at, length, PROT_NONE, flags, -1, 0);
}

Result range_new(Pointer *start, size_t length, size_t alignment) {
  if (alignment < granule_bytes) alignment = granule_bytes;
  char *raw = inaccessible(NULL, length + alignment);
  char *twin = inaccessible(NULL, length);
  if (raw == MAP_FAILED || twin == MAP_FAILED) return OUT_OF_MEMORY;
  Pointer first = ((Pointer)raw + alignment - 1) / alignment * alignment;
  if (first > (Pointer)raw) munmap(raw, first - (Pointer)raw);
  if (first < (Pointer)raw + alignment) munmap((void *)(first + length), (Pointer)raw + alignment - first);
  Range *range = calloc(1, sizeof *range);
  *range = (Range){first, length, twin, ranges};
  ranges = range;
  *start = first;
  return OK;
}

Result range_drop(Pointer start, size_t length) {
  for (Range **at = &ranges; *at; at = &(*at)->next) {
    Range *range = *at;
    if (range->start != start || range->length != length) continue;
    for (Mapping *mapping = mappings; mapping; mapping = mapping->next)
      if (mapping->start >= start && mapping->start < start + length) return INVALID_VALUE;
    *at = range->next;
    munmap((void *)range->start, range->length);
    munmap(range->twin, range->length);
    free(range);
    return OK;
  }
  return INVALID_VALUE;
}

Result map_in(Pointer start, size_t length, Physical *physical) {
  Range *range = range_of(start);
  if (!range || start + length > range->start + range->length) return INVALID_VALUE;
  for (Mapping *mapping = mappings; mapping; mapping = mapping->next)
    if (start < mapping->start + mapping->length && mapping->start < start + length) return INVALID_VALUE;
  int shared = MAP_SHARED | MAP_FIXED;
  if (mmap((void *)start, length, PROT_NONE, shared, physical->fd, 0) == MAP_FAILED) return OUT_OF_MEMORY;
  mmap((void *)twin_of(start), length, PROT_READ | PROT_WRITE, shared, physical->fd, 0);
  Mapping *made = calloc(1, sizeof *made), **at = &mappings;
  while (*at && (*at)->start < start) at = &(*at)->next;
  *made = (Mapping){start, length, physical, ACCESS_NONE, *at};
  *at = made;
  physical->mappings++;
  return OK;
}

// The mappings that fill [start, start + length) exactly; NULL if there is a gap or one sticks out.
Mapping *whole_mappings(Pointer start, size_t length) {
  Mapping *first = NULL;
  Pointer reached = start;
  for (Mapping *mapping = mappings; mapping; mapping = mapping->next) {
    if (mapping->start + mapping->length <= start || mapping->start >= start + length) continue;
    if (mapping->start != reached || mapping->start + mapping->length > start + length) return NULL;
    if (!first) first = mapping;
    reached += mapping->length;
  }
  return reached == start + length ? first : NULL;
}

Result unmap_from(Pointer start, size_t length) {
  if (!whole_mappings(start, length)) return INVALID_VALUE;
  inaccessible((void *)twin_of(start), length);
  inaccessible((void *)start, length);
  for (Mapping **at = &mappings; *at;) {
    Mapping *mapping = *at;
    if (mapping->start < start || mapping->start >= start + length) { at = &mapping->next; continue; }
    *at = mapping->next;
    mapping->physical->mappings--;
    physical_collect(mapping->physical);
    free(mapping);
  }
  return OK;
}

Result open_to(Pointer start, size_t length, int access) {
  Mapping *mapping = whole_mappings(start, length);
  if (!mapping) return INVALID_VALUE;
  if (access == ACCESS_READ && !read_only_works) return NOT_SUPPORTED;
  for (; mapping && mapping->start < start + length; mapping = mapping->next) mapping->access = access;
  int protection = access == ACCESS_READ_WRITE ? PROT_READ | PROT_WRITE : access == ACCESS_READ ? PROT_READ : PROT_NONE;
  if (!strict) mprotect((void *)start, length, protection);
  return OK;
}
