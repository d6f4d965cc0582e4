// Device and context, and how the bindings look symbols up.
#include "fake.h"
#include <dlfcn.h>

enum { VERSION = 13020, UUID_BYTES = 16 };
enum { THREADS_PER_BLOCK = 1, WARP = 10, PROCESSORS = 16, CONCURRENT_KERNELS = 31, COPY_ENGINES = 40, ONE_ADDRESS_SPACE = 41,
       MAJOR = 75, MINOR = 76, VIRTUAL_MEMORY = 102, HANDLES_AS_FD = 103 };
static int context, context_owners;

API Result cuInit(unsigned flags) {
  initialized = 1; // before the fault check, which would otherwise refuse
  ENTER(0);
  if (flags) return INVALID_VALUE;
  return devices ? OK : NO_DEVICE;
}

API Result cuDriverGetVersion(int *version) {
  *version = VERSION;
  return OK;
}

API Result cuDeviceGetCount(int *count) {
  ENTER(0);
  *count = devices;
  return OK;
}

API Result cuDeviceGet(Device *device, int ordinal) {
  ENTER(0);
  *device = ordinal;
  return ordinal < 0 || ordinal >= devices ? INVALID_DEVICE : OK;
}

API Result cuDeviceGetName(char *name, int length, Device device) {
  ENTER(0);
  (void)device;
  snprintf(name, length, "fakecuda");
  return OK;
}

API Result cuDeviceGetUuid_v2(unsigned char *uuid, Device device) {
  ENTER(0);
  memset(uuid, 0xfa, UUID_BYTES);
  uuid[UUID_BYTES - 1] = (unsigned char)device;
  return OK;
}

API Result cuDeviceTotalMem_v2(size_t *bytes, Device device) {
  ENTER(0);
  (void)device;
  *bytes = capacity_bytes;
  return OK;
}

API Result cuDeviceGetAttribute(int *value, int attribute, Device device) {
  ENTER(0);
  static const struct { int attribute, value; } known[] = {
      {THREADS_PER_BLOCK, 1024}, {WARP, 32},          {PROCESSORS, 132}, {CONCURRENT_KERNELS, 1}, {COPY_ENGINES, 2},
      {ONE_ADDRESS_SPACE, 1},    {MAJOR, 9},          {MINOR, 0},        {VIRTUAL_MEMORY, 1},     {HANDLES_AS_FD, 1}};
  if (device < 0 || device >= devices) return INVALID_DEVICE;
  *value = 0;
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (known[i].attribute == attribute) *value = known[i].value;
  *value = attribute_or(attribute, *value);
  return OK;
}

API Result cuDevicePrimaryCtxRetain(void **made, Device device) {
  ENTER(0);
  if (device < 0 || device >= devices) return INVALID_DEVICE;
  context_owners++;
  *made = &context;
  return OK;
}

API Result cuDevicePrimaryCtxRelease_v2(Device device) {
  ENTER(0);
  (void)device;
  if (!context_owners) return INVALID_CONTEXT;
  context_owners--;
  return OK;
}

API int fakecu_context_owners(void) { return context_owners; }

API Result cuDevicePrimaryCtxGetState(Device device, unsigned *flags, int *active) {
  ENTER(0);
  (void)device;
  *flags = 0;
  *active = context_owners > 0;
  return OK;
}

API Result cuDevicePrimaryCtxSetFlags_v2(Device device, unsigned flags) {
  ENTER(0);
  (void)device, (void)flags;
  return OK;
}

API Result cuCtxSetCurrent(void *given) {
  ENTER(0);
  current_context = given;
  return OK;
}

API Result cuCtxGetCurrent(void **current) {
  ENTER(0);
  *current = current_context;
  return OK;
}

API Result cuCtxPushCurrent_v2(void *given) {
  ENTER(0);
  current_context = given;
  return OK;
}

API Result cuCtxPopCurrent_v2(void **former) {
  ENTER(0);
  if (former) *former = current_context;
  current_context = NULL;
  return OK;
}

API Result cuCtxGetDevice(Device *device) {
  ENTER(1);
  *device = 0;
  return OK;
}

API Result cuCtxGetStreamPriorityRange(int *least, int *greatest) {
  ENTER(1);
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return OK;
}

// ---------------------------------------------------------------- look-up of symbols
static const struct { const char *name, *symbol; int since; } renamed[] = {
    {"cuDeviceGetUuid", "cuDeviceGetUuid_v2", 11040},
    {"cuDeviceTotalMem", "cuDeviceTotalMem_v2", 3020},
    {"cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxRelease_v2", 11000},
    {"cuDevicePrimaryCtxSetFlags", "cuDevicePrimaryCtxSetFlags_v2", 11000},
    {"cuCtxPushCurrent", "cuCtxPushCurrent_v2", 4000},
    {"cuCtxPopCurrent", "cuCtxPopCurrent_v2", 4000},
    {"cuMemGetInfo", "cuMemGetInfo_v2", 3020},
    {"cuMemAlloc", "cuMemAlloc_v2", 3020},
    {"cuMemFree", "cuMemFree_v2", 3020},
    {"cuMemAllocHost", "cuMemAllocHost_v2", 3020},
    {"cuMemHostRegister", "cuMemHostRegister_v2", 6050},
    {"cuMemHostGetDevicePointer", "cuMemHostGetDevicePointer_v2", 3020},
    {"cuMemcpyHtoD", "cuMemcpyHtoD_v2", 3020},
    {"cuMemcpyDtoH", "cuMemcpyDtoH_v2", 3020},
    {"cuMemcpyHtoDAsync", "cuMemcpyHtoDAsync_v2", 3020},
    {"cuMemcpyDtoHAsync", "cuMemcpyDtoHAsync_v2", 3020},
    {"cuMemcpyDtoDAsync", "cuMemcpyDtoDAsync_v2", 3020},
    {"cuStreamDestroy", "cuStreamDestroy_v2", 4000},
    {"cuEventDestroy", "cuEventDestroy_v2", 4000},
    {"cuEventElapsedTime", "cuEventElapsedTime_v2", 12080},
    {"cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2", 13000},
    {"cuGetProcAddress", "cuGetProcAddress_v2", 12000},
};

API Result cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status) {
  (void)flags;
  static void *self;
  if (!self) {
    Dl_info info;
    dladdr((void *)&context, &info);
    self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }
  const char *symbol = name;
  for (size_t i = 0; i < sizeof renamed / sizeof *renamed; i++)
    if (!strcmp(renamed[i].name, name) && version >= renamed[i].since) symbol = renamed[i].symbol;
  *found = self && !is_hidden(name) ? dlsym(self, symbol) : NULL;
  if (status) *status = *found ? 0 : 1;
  return *found ? OK : NOT_FOUND;
}

API Result cuGetProcAddress(const char *name, void **found, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, found, version, flags, NULL);
}

API Result cuGetExportTable(const void **table, const void *id) {
  (void)id;
  *table = NULL;
  return NOT_FOUND;
}
