// The KV dtype (KV_DTYPE, fixed at compile time) and its conversions from and to float.
//
// Always: to_float is exact; from_float rounds to nearest, ties to even; the NaN that kernels write is QUIET_NAN.
#pragma once
#include "device.cuh"

#define KV_FLOAT32 1
#define KV_FLOAT16 2
#define KV_BFLOAT16 3

#ifndef __CUDACC__
#define half_to_float emu_half_to_float
#define float_to_half emu_float_to_half
#else
__device__ inline float half_to_float(u16 half) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
}
__device__ inline u16 float_to_half(float value) {
    u16 half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
}
#endif

#define BFLOAT16_NAN 0x7fc0u
#define FLOAT_INFINITY_BITS 0x7f800000u

__device__ inline float bfloat16_to_float(u16 bits) { return __uint_as_float((u32)bits << 16); }

#if KV_DTYPE == KV_FLOAT32
typedef u32 kv_t;  // the bits; float would let a compiler quiet a NaN while copying
#define EXPONENT_BITS 8
#define MANTISSA_BITS 23
#define QUIET_NAN 0x7fc00000u
#define LARGEST __uint_as_float(0x7f7fffffu)
__device__ inline float to_float(kv_t bits) { return __uint_as_float(bits); }
__device__ inline kv_t from_float(float value) { return value != value ? QUIET_NAN : __float_as_uint(value); }
#elif KV_DTYPE == KV_FLOAT16
typedef u16 kv_t;
#define EXPONENT_BITS 5
#define MANTISSA_BITS 10
#define QUIET_NAN 0x7e00u
#define LARGEST 65504.0f
__device__ inline float to_float(kv_t bits) { return half_to_float(bits); }
__device__ inline kv_t from_float(float value) { return value != value ? QUIET_NAN : float_to_half(value); }
#elif KV_DTYPE == KV_BFLOAT16
typedef u16 kv_t;
#define EXPONENT_BITS 8
#define MANTISSA_BITS 7
#define QUIET_NAN BFLOAT16_NAN
#define LARGEST __uint_as_float(0x7f7f0000u)
__device__ inline float to_float(kv_t bits) { return bfloat16_to_float(bits); }
__device__ inline kv_t from_float(float value) {
    u32 bits = __float_as_uint(value);
    return value != value ? QUIET_NAN : (kv_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
#else
#error "KV_DTYPE is 1 (float32), 2 (float16) or 3 (bfloat16)"
#endif
