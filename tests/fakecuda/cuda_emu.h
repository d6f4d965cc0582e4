// Runs CUDA C on a CPU: one fibre for each thread of a thread block, thread blocks one after the other.
//
// Owns: the CUDA words that kvtier uses (indices, shared memory, barriers, shuffles, ballots, atomicAdd, bit casts).
// Always: a barrier that not all threads reach aborts with a message, and so does a warp whose lanes are at different
//         kinds of warp operation. Warps run one after the other, each as far as it can, and lanes likewise: in
//         ascending order, or in descending order with EMU_REVERSE=1 in the environment. Some warp is therefore ahead
//         of all others where no barrier holds it, and what a missing barrier breaks is wrong in one of the orders.
//         One launch at a time per library; launches from several host threads wait for each other.
// Not emulated: real concurrency, memory ordering, alignment faults, the rounding of contracted multiply-adds.
//
// A fake driver whose device addresses are not directly readable gives a function to emu_set_reach; kernels pass every
// address that they read as a number (from a table, from a record) through emu_reach, which asks it.
//
// CUDA_EMU_EXPORT(f) exports emu_f(grid, block, shared_bytes, arguments), the number of arguments as emu_f_nargs and
// their sizes in bytes behind emu_f_sizes_p, which is what a fake driver needs to launch f as cuLaunchKernel would.
#pragma once
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

struct dim3_ {
    unsigned x, y, z;
};

namespace {
namespace emu {

enum { THREADS_MAX = 1024, WARP_LANES = 32, STACK_BYTES = 64 << 10 };
enum State { READY, AT_WARP, AT_BLOCK, DONE };
enum WarpOperation { NONE, SYNC, SHUFFLE, BALLOT };

struct Fibre {
    jmp_buf at;
    State state;
    WarpOperation operation;
    bool started;
    uint64_t offered;  // what the lane shows to its warp
};

dim3_ grid, block, block_index;
Fibre fibres[THREADS_MAX];
unsigned current;
jmp_buf scheduler;
ucontext_t first_entry, ignored;
char* stacks;
char* dynamic_shared;
void (*body)(void*);
void* body_argument;
pthread_mutex_t one_launch = PTHREAD_MUTEX_INITIALIZER;

[[noreturn]] void fail(const char* problem) {
    fprintf(stderr, "cuda_emu: %s (thread block %u,%u,%u)\n", problem, block_index.x, block_index.y, block_index.z);
    abort();
}

// setjmp and longjmp switch without a system call, unlike swapcontext, which only makes the first entry.
inline void pause_in(State state) {
    fibres[current].state = state;
    if (!_setjmp(fibres[current].at)) _longjmp(scheduler, 1);
}

void enter() {
    body(body_argument);
    fibres[current].state = DONE;
    _longjmp(scheduler, 1);
}

__attribute__((noinline)) void resume(unsigned index) {
    current = index;
    if (_setjmp(scheduler)) return;
    Fibre& fibre = fibres[index];
    if (fibre.started) _longjmp(fibre.at, 1);
    fibre.started = true;
    getcontext(&first_entry);
    first_entry.uc_stack.ss_sp = stacks + (size_t)index * STACK_BYTES;
    first_entry.uc_stack.ss_size = STACK_BYTES;
    first_entry.uc_link = nullptr;
    makecontext(&first_entry, enter, 0);
    swapcontext(&ignored, &first_entry);
}

// Lets a warp go on when all lanes that still run have come to the same operation.
bool release_warp(unsigned from, unsigned to) {
    unsigned waiting = 0, done = 0;
    WarpOperation operation = NONE;
    for (unsigned i = from; i < to; i++) {
        done += fibres[i].state == DONE;
        if (fibres[i].state != AT_WARP) continue;
        if (waiting && fibres[i].operation != operation) fail("lanes of a warp at different operations");
        operation = fibres[i].operation;
        waiting++;
    }
    if (!waiting || waiting + done != to - from) return false;
    for (unsigned i = from; i < to; i++)
        if (fibres[i].state == AT_WARP) fibres[i].state = READY;
    return true;
}

bool release_block(unsigned threads) {
    unsigned waiting = 0, done = 0;
    for (unsigned i = 0; i < threads; i++) {
        waiting += fibres[i].state == AT_BLOCK;
        done += fibres[i].state == DONE;
    }
    if (!waiting || waiting + done != threads) return false;
    if (done) fail("a barrier of the thread block that some threads have returned before");
    for (unsigned i = 0; i < threads; i++) fibres[i].state = READY;
    return true;
}

// Runs a warp until its lanes have returned or wait for the thread block.
void run_warp(unsigned from, unsigned to, bool descending) {
    do {
        for (unsigned j = from; j < to; j++) {
            unsigned i = descending ? to - 1 - (j - from) : j;
            if (fibres[i].state == READY) resume(i);
        }
    } while (release_warp(from, to));
}

void run_block(unsigned threads, bool descending) {
    unsigned warps = (threads + WARP_LANES - 1) / WARP_LANES;
    for (unsigned i = 0; i < threads; i++) fibres[i].state = READY, fibres[i].started = false;
    do {
        for (unsigned j = 0; j < warps; j++) {
            unsigned from = (descending ? warps - 1 - j : j) * WARP_LANES;
            run_warp(from, from + WARP_LANES < threads ? from + WARP_LANES : threads, descending);
        }
    } while (release_block(threads));
    for (unsigned i = 0; i < threads; i++)
        if (fibres[i].state != DONE) fail("a barrier that not all threads reach");
}

void run_grid(const unsigned* g, const unsigned* b, unsigned shared_bytes, void (*call)(void*), void* argument) {
    pthread_mutex_lock(&one_launch);
    const char* reverse = getenv("EMU_REVERSE");
    bool descending = reverse && *reverse && *reverse != '0';
    unsigned threads = b[0] * b[1] * b[2];
    if (!threads || threads > THREADS_MAX) fail("a thread block of no thread, or of more than 1024");
    if (!stacks) stacks = (char*)malloc((size_t)THREADS_MAX * STACK_BYTES);
    dynamic_shared = (char*)malloc(shared_bytes + 16);
    grid = {g[0], g[1], g[2]};
    block = {b[0], b[1], b[2]};
    body = call;
    body_argument = argument;
    for (unsigned z = 0; z < g[2]; z++)
        for (unsigned y = 0; y < g[1]; y++)
            for (unsigned x = 0; x < g[0]; x++) {
                block_index = {x, y, z};
                run_block(threads, descending);
            }
    free(dynamic_shared);
    pthread_mutex_unlock(&one_launch);
}

template <class T> struct Bare { typedef T type; };
template <class T> struct Bare<const T> { typedef T type; };
template <size_t... I> struct Indices {};
template <size_t N, size_t... I> struct Count : Count<N - 1, N - 1, I...> {};
template <size_t... I> struct Count<0, I...> { typedef Indices<I...> type; };

template <class... A> struct Call {
    void (*function)(A...);
    void** arguments;
    template <size_t... I> void apply(Indices<I...>) { function(*(typename Bare<A>::type*)arguments[I]...); }
    static void run(void* self) { ((Call*)self)->apply(typename Count<sizeof...(A)>::type()); }
};

template <class... A>
void launch(void (*function)(A...), const unsigned* g, const unsigned* b, unsigned shared_bytes, void** arguments) {
    Call<A...> call = {function, arguments};
    run_grid(g, b, shared_bytes, Call<A...>::run, &call);
}

template <class F> struct Signature;
template <class... A> struct Signature<void (*)(A...)> {
    static constexpr int count = sizeof...(A);
    static constexpr int sizes[] = {(int)sizeof(A)...};
};
template <class... A> constexpr int Signature<void (*)(A...)>::sizes[];

struct ThreadIndex {
    struct X { operator unsigned() const { return current % block.x; } } x;
    struct Y { operator unsigned() const { return current / block.x % block.y; } } y;
    struct Z { operator unsigned() const { return current / (block.x * block.y); } } z;
};

inline void meet(WarpOperation operation) {
    fibres[current].operation = operation;
    pause_in(AT_WARP);
}

inline unsigned lane() { return current % WARP_LANES; }

// All lanes offer a value, then all read: the second meeting keeps a fast lane from offering the next one too early.
template <class T> inline T exchange(T value, unsigned from_lane) {
    T got;
    memcpy(&fibres[current].offered, &value, sizeof value);
    meet(SHUFFLE);
    memcpy(&got, &fibres[current - lane() + from_lane % WARP_LANES].offered, sizeof got);
    meet(SHUFFLE);
    return got;
}

}  // namespace emu

emu::ThreadIndex threadIdx;
}  // namespace

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __constant__ static const
#define __shared__ static
#define DYN_SHARED(T, name) T* name = (T*)emu::dynamic_shared
#define blockIdx emu::block_index
#define blockDim emu::block
#define gridDim emu::grid

static inline void __syncthreads() { emu::pause_in(emu::AT_BLOCK); }
static inline void __syncwarp(unsigned = ~0u) { emu::meet(emu::SYNC); }
template <class T> static inline T __shfl_sync(unsigned, T value, int lane) { return emu::exchange(value, lane); }
template <class T> static inline T __shfl_xor_sync(unsigned, T value, int mask) {
    return emu::exchange(value, emu::lane() ^ mask);
}
template <class T> static inline T __shfl_up_sync(unsigned, T value, unsigned delta) {
    return emu::exchange(value, emu::lane() < delta ? emu::lane() : emu::lane() - delta);
}
template <class T> static inline T __shfl_down_sync(unsigned, T value, unsigned delta) {
    return emu::exchange(value, emu::lane() + delta > 31 ? emu::lane() : emu::lane() + delta);
}
static inline unsigned __ballot_sync(unsigned, int predicate) {
    unsigned bits = 0, first = emu::current - emu::lane();
    emu::fibres[emu::current].offered = predicate != 0;
    emu::meet(emu::BALLOT);
    for (unsigned i = 0; i < emu::WARP_LANES && first + i < emu::block.x * emu::block.y * emu::block.z; i++)
        if (emu::fibres[first + i].state != emu::DONE) bits |= (unsigned)emu::fibres[first + i].offered << i;
    emu::meet(emu::BALLOT);
    return bits;
}
template <class T> static inline T atomicAdd(T* place, T value) {
    T old = *place;
    *place = old + value;
    return old;
}

typedef uint64_t (*emu_reach_t)(uint64_t address);
static emu_reach_t emu_reach_function;
extern "C" void emu_set_reach(emu_reach_t function) { emu_reach_function = function; }
static inline uint64_t emu_reach(uint64_t address) {
    return emu_reach_function ? emu_reach_function(address) : address;
}

static inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
static inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    return bits;
}
#define __expf(x) expf(x)

// What the device does in one instruction each: cvt.f32.f16 (exact) and cvt.rn.f16.f32 (to nearest, ties to even).
static inline float emu_half_to_float(unsigned short half) {
    unsigned sign = (half & 0x8000u) << 16, magnitude = half & 0x7fffu;
    if (magnitude >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    float value = __uint_as_float(magnitude << 13) * 0x1p112f;  // moves the exponent's bias from 15 to 127
    return __uint_as_float(sign | __float_as_uint(value));
}
static inline unsigned short emu_float_to_half(float value) {
    unsigned bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fffu;
    if (magnitude >= 0x477ff000u) return (unsigned short)(sign | 0x7c00u);  // 65520 and above round to infinity
    if (magnitude < 0x38800000u)  // below the least normal half: count steps of 2^-24
        return (unsigned short)(sign | (unsigned)rintf(__uint_as_float(magnitude) * 0x1p24f));
    magnitude += 0xfffu + (magnitude >> 13 & 1u);
    return (unsigned short)(sign | (magnitude - 0x38000000u) >> 13);
}

#define CUDA_EMU_EXPORT(f)                                                                                 \
    extern "C" {                                                                                           \
    void emu_##f(const unsigned* g, const unsigned* b, unsigned shared_bytes, void** arguments) {          \
        emu::launch(f, g, b, shared_bytes, arguments);                                                     \
    }                                                                                                      \
    extern const int emu_##f##_nargs;                                                                      \
    const int emu_##f##_nargs = emu::Signature<decltype(&f)>::count;                                       \
    extern const int* const emu_##f##_sizes_p;                                                             \
    const int* const emu_##f##_sizes_p = emu::Signature<decltype(&f)>::sizes;                              \
    }
