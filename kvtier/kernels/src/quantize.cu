// int8 and fp8 (e4m3), one scale per token and head, fused with gather and scatter.
//
// kvtier/kernels/quantize.py describes bytes and rounding; they are the same here. A row is the head_dim values of one
// token and head; a fragment is a run of rows (a whole slot of ours is one fragment). A coded block holds the rows of
// all fragments in order: head, codes, scales.
// Grid: (blocks, fragments). Threads: 128; a warp takes a row. Rows start at multiples of the value's size.
#include "coded.cuh"
#include "floats.cuh"

#define WARPS 4

struct Int8 {
    static const u8 codec = CODED_INT8;
    __device__ static float largest() { return 127.0f; }
    __device__ static u8 encode(float ratio) { return (u8)(signed char)rintf(ratio); }
    __device__ static float decode(u8 code) { return (float)(signed char)code; }
};

struct Fp8 {
    static const u8 codec = CODED_FP8;
    __device__ static float largest() { return 448.0f; }
    // A ratio exceeds 448 by less than a rounding step, so nothing rounds to 0x7f, the NaN.
    __device__ static u8 encode(float ratio) {
        u32 bits = __float_as_uint(ratio), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
        if (magnitude < 0x3c800000u)  // below 2^-6, the least normal: count steps of 2^-9
            return (u8)(sign | (u32)rintf(__uint_as_float(magnitude) * 512.0f));
        magnitude += 0x7ffffu + (magnitude >> 20 & 1u);
        return (u8)(sign | (magnitude - 0x3c000000u) >> 20);
    }
    __device__ static float decode(u8 code) {
        float value = __uint_as_float((code & 0x7fu) << 20) * 0x1p120f;  // moves the exponent's bias from 7 to 127
        return __uint_as_float((code & 0x80u) << 24 | __float_as_uint(value));
    }
};

// The scale, as bfloat16, is rounded up: the row's largest value then never exceeds the largest code.
__device__ inline u16 scale_of(u32 largest_bits, float code_largest) {
    if (largest_bits == 0) return 0;
    if (largest_bits >= FLOAT_INFINITY_BITS) return BFLOAT16_NAN;
    u32 bits = __float_as_uint(__uint_as_float(largest_bits) / code_largest);
    u32 up = (bits + 0xffffu) >> 16;
    return (u16)(up ? up : 1);
}

__device__ inline kv_t restored(float value) {
    value = value > LARGEST ? LARGEST : value;
    return from_float(value < -LARGEST ? -LARGEST : value);
}

__device__ inline CodedHead head_of(u8 codec, u32 rows, u32 row_values) {
    u32 values = rows * row_values;
    CodedHead head = {codec, KV_DTYPE, (u16)row_values, values, 0, (u32)sizeof(CodedHead) + values + 2 * rows};
    return head;
}

__device__ inline kv_t* rows_of(const Fragment* fragments, const int* blocks) {
    Fragment fragment = fragments[blockIdx.y];
    return (kv_t*)(at(fragment.address) + (u64)blocks[blockIdx.x] * fragment.stride_bytes);
}

template <class Code>
__device__ inline void quantize_row(u8* codes, u16* scale, const kv_t* row, u32 row_values) {
    u32 lane = threadIdx.x % WARP_LANES, largest_bits = 0;
    for (u32 i = lane; i < row_values; i += WARP_LANES) {
        u32 bits = __float_as_uint(to_float(row[i])) & 0x7fffffffu;
        largest_bits = bits > largest_bits ? bits : largest_bits;
    }
    largest_bits = warp_max(largest_bits);
    u16 scale_bits = scale_of(largest_bits, Code::largest());
    if (lane == 0) *scale = scale_bits;
    bool codes_are_zero = largest_bits == 0 || largest_bits >= FLOAT_INFINITY_BITS;
    for (u32 i = lane; i < row_values; i += WARP_LANES)
        codes[i] = codes_are_zero ? 0 : Code::encode(to_float(row[i]) / bfloat16_to_float(scale_bits));
}

template <class Code>
__device__ inline void quantize(u8* coded_pool, u64 coded_stride, const int* coded_slots, const Fragment* fragments,
                                const int* blocks, u32 fragment_rows, u32 row_values) {
    u8* out = coded_pool + (u64)coded_slots[blockIdx.x] * coded_stride;
    u32 rows = fragment_rows * gridDim.y, first_row = fragment_rows * blockIdx.y;
    u8* codes = out + sizeof(CodedHead);
    u16* scales = (u16*)(codes + (u64)rows * row_values);
    const kv_t* source = rows_of(fragments, blocks);
    if (threadIdx.x == 0 && blockIdx.y == 0) *(CodedHead*)out = head_of(Code::codec, rows, row_values);
    for (u32 i = threadIdx.x / WARP_LANES; i < fragment_rows; i += WARPS)
        quantize_row<Code>(codes + (u64)(first_row + i) * row_values, scales + first_row + i,
                           source + (u64)i * row_values, row_values);
}

// status[i]: 0, or 1 if the head does not belong to such a block; the fragments are untouched then.
template <class Code>
__device__ inline void dequantize(u32* status, const Fragment* fragments, const int* blocks, const u8* coded_pool,
                                  u64 coded_stride, const int* coded_slots, u32 fragment_rows, u32 row_values) {
    const u8* coded = coded_pool + (u64)coded_slots[blockIdx.x] * coded_stride;
    u32 rows = fragment_rows * gridDim.y, first_row = fragment_rows * blockIdx.y;
    const u8* codes = coded + sizeof(CodedHead);
    const u16* scales = (const u16*)(codes + (u64)rows * row_values);
    bool ours = same_head(*(const CodedHead*)coded, head_of(Code::codec, rows, row_values));
    if (threadIdx.x == 0 && blockIdx.y == 0) status[blockIdx.x] = !ours;
    if (!ours) return;
    kv_t* target = rows_of(fragments, blocks);
    for (u32 i = threadIdx.x; i < fragment_rows * row_values; i += blockDim.x) {
        float scale = bfloat16_to_float(scales[first_row + i / row_values]);
        target[i] = restored(Code::decode(codes[(u64)first_row * row_values + i]) * scale);
    }
}

#define QUANTIZE_ENTRIES(name, Code)                                                                               \
    extern "C" __global__ void kv_quantize_##name(u8* coded_pool, u64 coded_stride, const int* coded_slots,        \
                                                  const Fragment* fragments, const int* blocks, u32 fragment_rows, \
                                                  u32 row_values) {                                                \
        quantize<Code>(coded_pool, coded_stride, coded_slots, fragments, blocks, fragment_rows, row_values);       \
    }                                                                                                              \
    extern "C" __global__ void kv_dequantize_##name(                                                               \
        u32* status, const Fragment* fragments, const int* blocks, const u8* coded_pool, u64 coded_stride,         \
        const int* coded_slots, u32 fragment_rows, u32 row_values) {                                               \
        dequantize<Code>(status, fragments, blocks, coded_pool, coded_stride, coded_slots, fragment_rows,          \
                         row_values);                                                                              \
    }

QUANTIZE_ENTRIES(int8, Int8)
QUANTIZE_ENTRIES(fp8, Fp8)

#ifndef __CUDACC__
CUDA_EMU_EXPORT(kv_quantize_int8)
CUDA_EMU_EXPORT(kv_dequantize_int8)
CUDA_EMU_EXPORT(kv_quantize_fp8)
CUDA_EMU_EXPORT(kv_dequantize_fp8)
#endif
