// Virtual memory management, and plain device memory made of it.
#include "memory.h"
#include <sys/stat.h>
#include <unistd.h>

API size_t fakecu_used(void) { return used_bytes; }

API Result cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
  ENTER(1);
  pthread_mutex_lock(&books);
  *free_bytes = capacity_bytes - used_bytes;
  *total_bytes = capacity_bytes;
  pthread_mutex_unlock(&books);
  return OK;
}

API Result cuMemGetAllocationGranularity(size_t *bytes, const AllocationProp *prop, int option) {
  ENTER(0);
  (void)option;
  if (!prop) return INVALID_VALUE;
  *bytes = granule_bytes;
  return OK;
}

API Result cuMemAddressReserve(Pointer *start, size_t length, size_t alignment, Pointer hint, unsigned long long flags) {
  ENTER(0);
  (void)hint;
  if (flags || !length || length % granule_bytes || (alignment & (alignment - 1))) return INVALID_VALUE;
  LOCKED(range_new(start, length, alignment));
}

API Result cuMemAddressFree(Pointer start, size_t length) {
  ENTER(0);
  LOCKED(range_drop(start, length));
}

API Result cuMemCreate(uint64_t *handle, size_t length, const AllocationProp *prop, unsigned long long flags) {
  ENTER(0);
  if (!prop || flags || !length || length % granule_bytes || prop->type != 1) return INVALID_VALUE;
  if (prop->location.id < 0 || prop->location.id >= devices) return INVALID_DEVICE;
  if (prop->handle_types & ~HANDLE_FD) return NOT_SUPPORTED;
  Physical *made = NULL;
  pthread_mutex_lock(&books);
  Result result = physical_new(&made, length, prop, -1);
  pthread_mutex_unlock(&books);
  *handle = (uint64_t)made;
  return result;
}

API Result cuMemRelease(uint64_t handle) {
  ENTER(0);
  pthread_mutex_lock(&books);
  Physical *physical = physical_of(handle);
  Result result = physical && physical->owners ? OK : INVALID_VALUE;
  if (!result) {
    physical->owners--;
    physical_collect(physical);
  }
  pthread_mutex_unlock(&books);
  return result;
}

API Result cuMemMap(Pointer start, size_t length, size_t offset, uint64_t handle, unsigned long long flags) {
  ENTER(0);
  if (flags || offset || !length || length % granule_bytes || start % granule_bytes) return INVALID_VALUE;
  pthread_mutex_lock(&books);
  Physical *physical = physical_of(handle);
  int fits = physical && physical->owners && length == physical->length;
  Result result = fits ? map_in(start, length, physical) : INVALID_VALUE;
  pthread_mutex_unlock(&books);
  return result;
}

API Result cuMemSetAccess(Pointer start, size_t length, const AccessDesc *desc, size_t count) {
  ENTER(0);
  if (!desc || count != 1 || desc->location.type != LOCATION_DEVICE) return INVALID_VALUE;
  LOCKED(open_to(start, length, desc->flags));
}

API Result cuMemGetAccess(unsigned long long *flags, const Location *location, Pointer pointer) {
  ENTER(0);
  (void)location;
  pthread_mutex_lock(&books);
  Mapping *mapping = mapping_of(pointer);
  if (mapping) *flags = mapping->access;
  pthread_mutex_unlock(&books);
  return mapping ? OK : INVALID_VALUE;
}

API Result cuMemUnmap(Pointer start, size_t length) {
  ENTER(0);
  pthread_mutex_lock(&books);
  Result result = whole_mappings(start, length) ? OK : INVALID_VALUE;
  if (!result) result = clock_expect_idle(start, length, "unmap", ILLEGAL_ADDRESS);
  if (!result) result = unmap_from(start, length);
  pthread_mutex_unlock(&books);
  return result;
}

// ---------------------------------------------------------------- sharing between processes
API Result cuMemExportToShareableHandle(void *fd, uint64_t handle, int type, unsigned long long flags) {
  ENTER(0);
  if (type != HANDLE_FD || flags) return NOT_SUPPORTED;
  pthread_mutex_lock(&books);
  Physical *physical = physical_of(handle);
  Result result = !physical ? INVALID_VALUE : physical->prop.handle_types & HANDLE_FD ? OK : NOT_PERMITTED;
  if (!result) *(int *)fd = dup(physical->fd);
  pthread_mutex_unlock(&books);
  return result;
}

API Result cuMemImportFromShareableHandle(uint64_t *handle, void *fd, int type) {
  ENTER(0);
  if (type != HANDLE_FD) return NOT_SUPPORTED;
  struct stat status;
  int own = dup((int)(intptr_t)fd);
  if (own < 0 || fstat(own, &status) || !status.st_size) return INVALID_VALUE;
  AllocationProp prop = {.type = 1, .handle_types = HANDLE_FD, .location = {LOCATION_DEVICE, 0}};
  Physical *made;
  pthread_mutex_lock(&books);
  Result result = physical_new(&made, status.st_size, &prop, own);
  pthread_mutex_unlock(&books);
  *handle = (uint64_t)made;
  return result;
}

// ---------------------------------------------------------------- plain device memory
API Result cuMemAlloc_v2(Pointer *pointer, size_t length) {
  ENTER(1);
  if (!length) return INVALID_VALUE;
  AllocationProp prop = {.type = 1, .location = {LOCATION_DEVICE, 0}};
  Physical *physical;
  length = (length + granule_bytes - 1) / granule_bytes * granule_bytes;
  pthread_mutex_lock(&books);
  Result result = physical_new(&physical, length, &prop, -1);
  if (!result) {
    result = range_new(pointer, length, 0);
    if (!result) result = map_in(*pointer, length, physical);
    if (!result) result = open_to(*pointer, length, ACCESS_READ_WRITE);
    physical->owners = 0;
    physical_collect(physical);
  }
  pthread_mutex_unlock(&books);
  return result;
}

API Result cuMemFree_v2(Pointer pointer) {
  ENTER(1);
  pthread_mutex_lock(&books);
  Mapping *mapping = mapping_of(pointer);
  size_t length = mapping ? mapping->length : 0;
  Result result = mapping && mapping->start == pointer ? OK : INVALID_VALUE;
  if (!result) result = clock_expect_idle(pointer, length, "free", ILLEGAL_ADDRESS);
  if (!result) result = unmap_from(pointer, length);
  if (!result) result = range_drop(pointer, length);
  pthread_mutex_unlock(&books);
  return result;
}
