// exp4, the lossless codec: 64 values share a base exponent, and each keeps a 4-bit distance to it.
//
// kvtier/kernels/exponents.py describes the bytes; they are the same here, escapes in ascending order included. A block
// that would not shrink is written raw, and its head says so.
// Grid: (blocks). Threads: 256. A warp takes a group of 64 values: lane i has the values i and i + 32.
#include "coded.cuh"
#include "floats.cuh"

#define GROUP_VALUES 64
#define ESCAPE 15u
#define WARPS 8
#define EXPONENT_MASK ((1u << EXPONENT_BITS) - 1)
#define MANTISSA_MASK ((1u << MANTISSA_BITS) - 1)
#define RESIDUE_BYTES ((MANTISSA_BITS + 1) / 8)   // sign and mantissa: whole bytes of it in planes of bytes,
#define RESIDUE_PLANES ((MANTISSA_BITS + 1) % 8)  // the bits above in planes of bits
#define VALUES_MAX (1u << 24)                     // an escape keeps its position in 24 bits

struct Layout {
    u32 nibbles, bytes, planes, bases, escapes, escapes_max, raw_bytes;
};

// Where the parts of a coded block begin. No escapes fit if exp4 cannot help at all.
__device__ inline Layout layout_of(u32 values) {
    u32 groups = values / GROUP_VALUES;
    Layout layout;
    layout.nibbles = sizeof(CodedHead);
    layout.bytes = layout.nibbles + groups * (GROUP_VALUES / 2);
    layout.planes = layout.bytes + groups * GROUP_VALUES * RESIDUE_BYTES;
    layout.bases = layout.planes + groups * RESIDUE_PLANES * 8;
    layout.escapes = layout.bases + (groups + 3) / 4 * 4;
    layout.raw_bytes = sizeof(CodedHead) + values * (u32)sizeof(kv_t);
    layout.escapes_max = layout.raw_bytes > layout.escapes ? (layout.raw_bytes - layout.escapes - 1) / 4 : 0;
    return layout;
}

__device__ inline bool can_shrink(u32 values, const Layout& layout) {
    return values % GROUP_VALUES == 0 && values < VALUES_MAX && layout.escapes < layout.raw_bytes;
}

__device__ inline u32 exponent_of(kv_t bits) { return (u32)bits >> MANTISSA_BITS & EXPONENT_MASK; }

__device__ inline u32 residue_of(kv_t bits) {
    return ((u32)bits >> (EXPONENT_BITS + MANTISSA_BITS)) << MANTISSA_BITS | ((u32)bits & MANTISSA_MASK);
}

__device__ inline kv_t joined(u32 residue, u32 exponent) {
    u32 sign = residue >> MANTISSA_BITS;
    return (kv_t)((sign << EXPONENT_BITS | exponent) << MANTISSA_BITS | (residue & MANTISSA_MASK));
}

__device__ inline CodedHead head_of(u8 codec, u32 values, u32 escapes, u32 length_bytes) {
    CodedHead head = {codec, KV_DTYPE, 0, values, escapes, length_bytes};
    return head;
}

// Writes one half (32 values) of a group's sign and mantissa bits.
__device__ inline void put_residue(u8* out, const Layout& layout, u32 values, u32 group, u32 half, u32 residue) {
    u32 lane = threadIdx.x % WARP_LANES, index = group * GROUP_VALUES + half * WARP_LANES + lane;
    for (int plane = 0; plane < RESIDUE_BYTES; plane++)
        out[layout.bytes + plane * values + index] = (u8)(residue >> 8 * plane);
    for (int plane = 0; plane < RESIDUE_PLANES; plane++) {
        u32 bits = __ballot_sync(ALL_LANES, residue >> (8 * RESIDUE_BYTES + plane) & 1u);
        if (lane == 0) ((u32*)(out + layout.planes))[(group * RESIDUE_PLANES + plane) * 2 + half] = bits;
    }
}

__device__ inline u32 get_residue(const u8* coded, const Layout& layout, u32 values, u32 group, u32 half) {
    u32 lane = threadIdx.x % WARP_LANES, index = group * GROUP_VALUES + half * WARP_LANES + lane, residue = 0;
    for (int plane = 0; plane < RESIDUE_BYTES; plane++)
        residue |= (u32)coded[layout.bytes + plane * values + index] << 8 * plane;
    for (int plane = 0; plane < RESIDUE_PLANES; plane++) {
        u32 bits = ((const u32*)(coded + layout.planes))[(group * RESIDUE_PLANES + plane) * 2 + half];
        residue |= (bits >> lane & 1u) << (8 * RESIDUE_BYTES + plane);
    }
    return residue;
}

__device__ inline void put_escape(u8* out, const Layout& layout, u32 number, u32 position, u32 exponent) {
    if (number < layout.escapes_max) ((u32*)(out + layout.escapes))[number] = position << 8 | exponent;
}

extern "C" __global__ void __launch_bounds__(WARPS* WARP_LANES)
    kv_exp4_encode(u8* coded_pool, u64 coded_stride, const int* coded_slots, const u8* pool, u64 slot_stride,
                   const int* slots, u32 values) {
    __shared__ u32 escapes_of_warp[WARPS];
    u8* out = coded_pool + (u64)coded_slots[blockIdx.x] * coded_stride;
    const u8* raw = pool + (u64)slots[blockIdx.x] * slot_stride;
    const kv_t* source = (const kv_t*)raw;
    u32 lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES, below = (1u << lane) - 1;
    u32 groups = values / GROUP_VALUES, escapes = 0;
    Layout layout = layout_of(values);
    bool shrinks = can_shrink(values, layout);

    for (u32 first = 0; shrinks && first < groups; first += WARPS) {
        u32 group = first + warp, low = 0, high = 0, exponent_low = 0, exponent_high = 0, mine = group < groups;
        if (mine) {
            kv_t a = source[group * GROUP_VALUES + lane], b = source[group * GROUP_VALUES + WARP_LANES + lane];
            exponent_low = exponent_of(a);
            exponent_high = exponent_of(b);
            u32 base = warp_max(exponent_low > exponent_high ? exponent_low : exponent_high);
            low = base - exponent_low < ESCAPE ? base - exponent_low : ESCAPE;
            high = base - exponent_high < ESCAPE ? base - exponent_high : ESCAPE;
            out[layout.nibbles + group * WARP_LANES + lane] = (u8)(low | high << 4);
            if (lane == 0) out[layout.bases + group] = (u8)base;
            put_residue(out, layout, values, group, 0, residue_of(a));
            put_residue(out, layout, values, group, 1, residue_of(b));
        }
        u32 escaped_low = __ballot_sync(ALL_LANES, low == ESCAPE);
        u32 escaped_high = __ballot_sync(ALL_LANES, high == ESCAPE);
        u32 count_low = __popc(escaped_low), number = escapes;
        if (lane == 0) escapes_of_warp[warp] = count_low + __popc(escaped_high);
        __syncthreads();
        for (u32 i = 0; i < WARPS; i++) {
            if (i < warp) number += escapes_of_warp[i];
            escapes += escapes_of_warp[i];
        }
        u32 position = group * GROUP_VALUES + lane, number_high = number + count_low + __popc(escaped_high & below);
        if (low == ESCAPE) put_escape(out, layout, number + __popc(escaped_low & below), position, exponent_low);
        if (high == ESCAPE) put_escape(out, layout, number_high, position + WARP_LANES, exponent_high);
        __syncthreads();
    }

    if (shrinks && escapes <= layout.escapes_max) {
        if (threadIdx.x < layout.escapes - layout.bases - groups) out[layout.bases + groups + threadIdx.x] = 0;
        if (threadIdx.x == 0) *(CodedHead*)out = head_of(CODED_EXP4, values, escapes, layout.escapes + 4 * escapes);
        return;
    }
    copy_by_block(out + sizeof(CodedHead), raw, layout.raw_bytes - sizeof(CodedHead));
    if (threadIdx.x == 0) *(CodedHead*)out = head_of(CODED_RAW, values, 0, layout.raw_bytes);
}

// status[i]: 0, or 1 if the head does not belong to such a block (the slot is untouched then), or an escape lies
// outside the block. Nothing is read or written outside the block and its coded form, whatever the bytes say.
extern "C" __global__ void __launch_bounds__(WARPS* WARP_LANES)
    kv_exp4_decode(u32* status, u8* pool, u64 slot_stride, const int* slots, const u8* coded_pool, u64 coded_stride,
                   const int* coded_slots, u32 values) {
    u8* out = pool + (u64)slots[blockIdx.x] * slot_stride;
    const u8* coded = coded_pool + (u64)coded_slots[blockIdx.x] * coded_stride;
    kv_t* target = (kv_t*)out;
    u32 lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES, groups = values / GROUP_VALUES;
    Layout layout = layout_of(values);
    CodedHead head = *(const CodedHead*)coded;

    bool raw = same_head(head, head_of(CODED_RAW, values, 0, layout.raw_bytes));
    bool packed = can_shrink(values, layout) && head.escapes <= layout.escapes_max &&
                  same_head(head, head_of(CODED_EXP4, values, head.escapes, layout.escapes + 4 * head.escapes));
    if (threadIdx.x == 0) status[blockIdx.x] = !(raw || packed);
    if (raw) copy_by_block(out, coded + sizeof(CodedHead), layout.raw_bytes - sizeof(CodedHead));
    if (!packed) return;

    for (u32 group = warp; group < groups; group += WARPS) {
        u32 base = coded[layout.bases + group], nibbles = coded[layout.nibbles + group * WARP_LANES + lane];
        u32 low = get_residue(coded, layout, values, group, 0), high = get_residue(coded, layout, values, group, 1);
        target[group * GROUP_VALUES + lane] = joined(low, base - (nibbles & 15u));
        target[group * GROUP_VALUES + WARP_LANES + lane] = joined(high, base - (nibbles >> 4));
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < head.escapes; i += blockDim.x) {
        u32 escape = ((const u32*)(coded + layout.escapes))[i], position = escape >> 8;
        if (position < values)
            target[position] = joined(residue_of(target[position]), escape & 0xffu);
        else
            status[blockIdx.x] = 1;
    }
}

#ifndef __CUDACC__
CUDA_EMU_EXPORT(kv_exp4_encode)
CUDA_EMU_EXPORT(kv_exp4_decode)
#endif
