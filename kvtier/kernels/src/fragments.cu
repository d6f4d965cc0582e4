// Blocks between a foreign cache and our slots.
//
// A foreign cache keeps a block as fragments: one run of bytes per layer and K or V, each in an array of its own
// whose first axis is the foreign block index. A slot holds the fragments one after the other.
// Grid: (blocks, fragments). Bytes per fragment, addresses and strides are multiples of 16.
#include "device.cuh"

__device__ inline u8* foreign_place(const Fragment* fragments, const int* blocks) {
    Fragment fragment = fragments[blockIdx.y];
    return at(fragment.address) + (u64)blocks[blockIdx.x] * fragment.stride_bytes;
}

__device__ inline u8* slot_place(u8* pool, u64 slot_stride, const int* slots, const Fragment* fragments) {
    return pool + (u64)slots[blockIdx.x] * slot_stride + fragments[blockIdx.y].offset_bytes;
}

extern "C" __global__ void kv_gather(u8* pool, u64 slot_stride, const int* slots, const Fragment* fragments,
                                     const int* blocks, u64 fragment_bytes) {
    copy_by_block(slot_place(pool, slot_stride, slots, fragments), foreign_place(fragments, blocks), fragment_bytes);
}

extern "C" __global__ void kv_scatter(const Fragment* fragments, const int* blocks, u8* pool, u64 slot_stride,
                                      const int* slots, u64 fragment_bytes) {
    copy_by_block(foreign_place(fragments, blocks), slot_place(pool, slot_stride, slots, fragments), fragment_bytes);
}

#ifndef __CUDACC__
CUDA_EMU_EXPORT(kv_gather)
CUDA_EMU_EXPORT(kv_scatter)
#endif
