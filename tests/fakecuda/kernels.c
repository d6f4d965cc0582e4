// Modules and launches. A module is a shared library of kernels built for the CPU with cuda_emu.h, which defines for
// each kernel NAME: emu_NAME (runs the grid), emu_NAME_nargs and emu_NAME_sizes_p (how many arguments, of what sizes);
// and emu_set_reach, if kernels read addresses from memory.
#include "fake.h"
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

enum { THREADS_MAX = 1024, ALIGNMENT = 16, NAME_BYTES = 256, X86_64 = 62, TOUCHES = 64 };
typedef void Body(const unsigned *grid, const unsigned *block, unsigned shared_bytes, void **arguments);
typedef struct { Body *body; int arguments; const int *sizes; } Kernel;
typedef struct { Operation base; Kernel *kernel; unsigned grid[3], block[3], shared_bytes; void **arguments; char *bytes; } Launch;

static pthread_mutex_t one_kernel = PTHREAD_MUTEX_INITIALIZER; // the emulation keeps its state in globals
static Touch announced[TOUCHES];
static size_t announced_count;

// Where the CPU finds what a kernel reads by an address that lies in memory.
static uint64_t reach_address(uint64_t address) {
  if (!strict) return address;
  pthread_mutex_lock(&books);
  uint64_t twin = twin_of(address);
  pthread_mutex_unlock(&books);
  return twin;
}

static Result open_module(void **module, const char *path) {
  *module = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!*module) {
    fprintf(stderr, "fakecuda: %s\n", dlerror());
    return INVALID_IMAGE;
  }
  void (*set_reach)(uint64_t (*)(uint64_t));
  *(void **)&set_reach = dlsym(*module, "emu_set_reach");
  if (set_reach) set_reach(reach_address);
  return OK;
}

API Result cuModuleLoad(void **module, const char *path) {
  ENTER(1);
  return open_module(module, path);
}

API Result cuModuleLoadData(void **module, const void *image) {
  ENTER(1);
  const unsigned char *elf = image;
  if (memcmp(elf, "\177ELF", 4) || elf[18] != X86_64) return INVALID_IMAGE;
  size_t sections = *(const uint64_t *)(elf + 40); // they come last, and the header says where and how many
  size_t length = sections + (size_t) * (const uint16_t *)(elf + 58) * *(const uint16_t *)(elf + 60);
  int fd = memfd_create("fakecuda-module", MFD_CLOEXEC);
  if (fd < 0) return OUT_OF_MEMORY;
  char path[NAME_BYTES];
  snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
  Result result = write(fd, image, length) == (ssize_t)length ? open_module(module, path) : INVALID_IMAGE;
  if (result) close(fd); // else it stays: the next image under this path would be taken for this one
  return result;
}

API Result cuModuleUnload(void *module) { // left in memory: launches may be under way
  ENTER(1);
  return module ? OK : INVALID_HANDLE;
}

static void *symbol(void *module, const char *format, const char *name) {
  char full[NAME_BYTES];
  snprintf(full, sizeof full, format, name);
  return dlsym(module, full);
}

API Result cuModuleGetFunction(void **function, void *module, const char *name) {
  ENTER(1);
  Body *body;
  *(void **)&body = symbol(module, "emu_%s", name);
  const int *arguments = symbol(module, "emu_%s_nargs", name);
  const int **sizes = symbol(module, "emu_%s_sizes_p", name);
  if (!body || !arguments || !sizes) return NOT_FOUND;
  Kernel *kernel = calloc(1, sizeof *kernel);
  *kernel = (Kernel){body, *arguments, *sizes};
  *function = kernel;
  return OK;
}

API Result cuFuncSetAttribute(void *function, int attribute, int value) {
  ENTER(1);
  (void)attribute, (void)value;
  return function ? OK : INVALID_HANDLE;
}

static size_t aligned(size_t length) { return (length + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

static void launch_run(Operation *self) {
  Launch *launch = (Launch *)self;
  pthread_mutex_lock(&one_kernel);
  launch->kernel->body(launch->grid, launch->block, launch->shared_bytes, launch->arguments);
  pthread_mutex_unlock(&one_kernel);
}

static void launch_drop(Operation *self) {
  free(((Launch *)self)->arguments);
  free(((Launch *)self)->bytes);
  free(self);
}

// In strict mode pointers among the arguments, or in structures among them, lead to the twin.
static void translate(char *argument, size_t length) {
  for (size_t at = 0; at + sizeof(Pointer) <= length; at += sizeof(Pointer)) {
    Pointer value;
    memcpy(&value, argument + at, sizeof value);
    value = twin_of(value);
    memcpy(argument + at, &value, sizeof value);
  }
}

static void take_arguments(Launch *launch, void **given) {
  const Kernel *kernel = launch->kernel;
  size_t length = 0;
  for (int i = 0; i < kernel->arguments; i++) length += aligned(kernel->sizes[i]);
  launch->arguments = calloc(kernel->arguments + 1, sizeof(void *));
  launch->bytes = calloc(1, length + 1);
  char *argument = launch->bytes;
  for (int i = 0; i < kernel->arguments; argument += aligned(kernel->sizes[i++])) {
    launch->arguments[i] = argument;
    memcpy(argument, given[i], kernel->sizes[i]);
    if (strict) translate(argument, kernel->sizes[i]);
  }
}

API Result cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned shared_bytes, void *handle, void **arguments,
                          void **extra) {
  ENTER(1);
  Kernel *kernel = function;
  if (!grid_x || !grid_y || !grid_z || !block_x || !block_y || !block_z) return INVALID_VALUE;
  if (block_x * block_y * block_z > THREADS_MAX) return INVALID_VALUE;
  if (extra) return NOT_SUPPORTED;
  Launch *launch = calloc(1, sizeof *launch);
  *launch = (Launch){.base = {launch_run, launch_drop, 0, NULL}, .kernel = kernel, .grid = {grid_x, grid_y, grid_z},
                     .block = {block_x, block_y, block_z}, .shared_bytes = shared_bytes};
  Result result = OK;
  pthread_mutex_lock(&books);
  take_arguments(launch, arguments);
  stream_push(stream_of(handle), &launch->base, &(Footprint){"a kernel", announced, announced_count, 0}, &result);
  announced_count = 0;
  pthread_mutex_unlock(&books);
  return result;
}

// What the next launch is going to read or write: the fake cannot see it.
API void fakecu_launch_touches(Pointer start, size_t length, int writes) {
  pthread_mutex_lock(&books);
  if (announced_count < TOUCHES) announced[announced_count++] = (Touch){start, length, writes, 0};
  pthread_mutex_unlock(&books);
}
