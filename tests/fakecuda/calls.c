// What may be called: counters, faults on request, settings, the sticky error, and the names of errors.
#include "fake.h"

pthread_mutex_t books = PTHREAD_MUTEX_INITIALIZER;
size_t capacity_bytes = 1ull << 30, granule_bytes = 2u << 20;
int strict, devices = 1, read_only_works = 1, initialized;
double copy_gbps;
long copy_latency_us;
atomic_int sticky;
__thread void *current_context;

enum { NAMES = 200, HIDDEN = 16, ATTRIBUTES = 16 };
typedef struct { char name[48]; long calls, fails_in; int every, code; } Counter;
static Counter counters[NAMES];
static int counters_used;
static char hidden[HIDDEN][48];
static int hidden_used, attributes_used;
static struct { int attribute, value; } attributes[ATTRIBUTES];
static pthread_mutex_t counting = PTHREAD_MUTEX_INITIALIZER;

static Counter *counter(const char *name) {
  for (int i = 0; i < counters_used; i++)
    if (!strcmp(counters[i].name, name)) return &counters[i];
  if (counters_used == NAMES) { fprintf(stderr, "fakecuda: too many names\n"); abort(); }
  Counter *made = &counters[counters_used++];
  snprintf(made->name, sizeof made->name, "%s", name);
  return made;
}

Result enter(const char *call, int needs_context) {
  pthread_mutex_lock(&counting);
  Counter *found = counter(call);
  found->calls++;
  int code = 0;
  if (found->every) code = found->code;
  else if (found->fails_in && --found->fails_in == 0) code = found->code;
  pthread_mutex_unlock(&counting);
  if (code >= ILLEGAL_ADDRESS && code <= LAUNCH_FAILED && code != HOST_ALREADY_REGISTERED && code != HOST_NOT_REGISTERED)
    stick(code);
  if (code) return code;
  if (!initialized) return NOT_INITIALIZED;
  if (!needs_context) return OK;
  if (!current_context) return INVALID_CONTEXT;
  return atomic_load(&sticky);
}

void count_call(const char *call, long times) {
  pthread_mutex_lock(&counting);
  counter(call)->calls += times;
  pthread_mutex_unlock(&counting);
}

void stick(int code) {
  int none = 0;
  atomic_compare_exchange_strong(&sticky, &none, code); // the first one stays
}

int is_hidden(const char *symbol) {
  for (int i = 0; i < hidden_used; i++)
    if (!strcmp(hidden[i], symbol)) return 1;
  return 0;
}

int attribute_or(int attribute, int otherwise) {
  for (int i = 0; i < attributes_used; i++)
    if (attributes[i].attribute == attribute) return attributes[i].value;
  return otherwise;
}

// ---------------------------------------------------------------- what tests steer with
API long fakecu_calls(const char *call) {
  pthread_mutex_lock(&counting);
  long calls = counter(call)->calls;
  pthread_mutex_unlock(&counting);
  return calls;
}

// The n-th call from now on fails once with this code; 0: every call does.
API void fakecu_fault(const char *call, long nth, int code) {
  pthread_mutex_lock(&counting);
  Counter *found = counter(call);
  found->fails_in = nth;
  found->every = nth == 0 && code;
  found->code = code;
  pthread_mutex_unlock(&counting);
}

API void fakecu_stick(int code) { stick(code); }
API void fakecu_copy_model(double gbps, long latency_us) { copy_gbps = gbps; copy_latency_us = latency_us; }

// Only while no memory exists.
API void fakecu_configure(size_t capacity, size_t granule, int strictly, int read_only) {
  capacity_bytes = capacity;
  granule_bytes = granule;
  strict = strictly;
  read_only_works = read_only;
}

// A driver that lacks a symbol.
API void fakecu_hide(const char *symbol) {
  if (hidden_used < HIDDEN) snprintf(hidden[hidden_used++], sizeof hidden[0], "%s", symbol);
}

// A device with another property.
API void fakecu_attribute(int attribute, int value) {
  if (attributes_used == ATTRIBUTES) return;
  attributes[attributes_used].attribute = attribute;
  attributes[attributes_used++].value = value;
}

// No faults, no sticky error, no delays, no streams, nothing pinned, and the host knows of everything that was done.
API void fakecu_reset(void) {
  fakecu_copy_model(0, 0);
  fakecu_hold(NULL, 0);
  streams_reset(); // before the sticky error goes: what was given to a lost device must not be done
  atomic_store(&sticky, 0);
  pthread_mutex_lock(&counting);
  memset(counters, 0, sizeof counters);
  counters_used = hidden_used = attributes_used = 0;
  pthread_mutex_unlock(&counting);
  pthread_mutex_lock(&books);
  pins_reset();
  clock_reset();
  pthread_mutex_unlock(&books);
}

// ---------------------------------------------------------------- names
static const struct { int code; const char *name, *text; } errors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the memory range is already registered"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
};

API Result cuGetErrorName(Result code, const char **name) {
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].code == code) { *name = errors[i].name; return OK; }
  *name = NULL;
  return INVALID_VALUE;
}

API Result cuGetErrorString(Result code, const char **text) {
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].code == code) { *text = errors[i].text; return OK; }
  *text = NULL;
  return INVALID_VALUE;
}
