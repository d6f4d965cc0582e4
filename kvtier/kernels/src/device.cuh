// What all kernels share: integers named by width, addresses, reductions over a warp, copies by a thread block.
//
// One source for two compilers: NVRTC for the device, and a C++ compiler with an emulation header for tests of the
// arithmetic on a CPU. No other header is included, so that nothing but the compiler is needed.
#pragma once
#ifndef __CUDACC__
#include "cuda_emu.h"
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define ALL_LANES 0xffffffffu
#define WARP_LANES 32

struct alignas(16) Bytes16 {
    u32 words[4];
};

// One array of a foreign cache, by kvtier/kernels/launch.py: where it starts, the bytes between its blocks, and where
// its part of a block lies in a slot of ours.
struct Fragment {
    u64 address, stride_bytes, offset_bytes;
};

// An address that came as a number. The emulation may have to look up where the bytes of a fake device lie.
__device__ inline u8* at(u64 address) {
#ifdef __CUDACC__
    return (u8*)address;
#else
    return (u8*)emu_reach(address);
#endif
}

// The largest value of the warp, in all its lanes.
template <class T> __device__ inline T warp_max(T value) {
    for (int step = WARP_LANES / 2; step; step /= 2) {
        T other = __shfl_xor_sync(ALL_LANES, value, step);
        value = other > value ? other : value;
    }
    return value;
}

// Copies `bytes` (a multiple of 16, both sides aligned to 16) with all threads. Four loads are in flight per thread:
// one alone cannot hide the latency of a link.
__device__ inline void copy_by_block(u8* to, const u8* from, u64 bytes) {
    const Bytes16* source = (const Bytes16*)from;
    Bytes16* target = (Bytes16*)to;
    u64 count = bytes / 16, step = blockDim.x, i = threadIdx.x;
    for (; i + 3 * step < count; i += 4 * step) {
        Bytes16 a = source[i], b = source[i + step], c = source[i + 2 * step], d = source[i + 3 * step];
        target[i] = a;
        target[i + step] = b;
        target[i + 2 * step] = c;
        target[i + 3 * step] = d;
    }
    for (; i < count; i += step) target[i] = source[i];
}
