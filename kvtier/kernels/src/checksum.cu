// xxh3_64 of whole blocks, each with a seed of its own: the checksum that the index keeps (kvtier/blocks/codec.py).
//
// After the XXH3 specification, for inputs over 240 bytes; lengths here are multiples of 16. The algorithm takes the
// input in chunks of 1024 bytes and scrambles eight accumulators between chunks. Only the scrambling is serial: what a
// chunk adds to the accumulators does not depend on them. So all threads add up chunks (thread = chunk of a tile and
// lane), and eight threads then walk through the tile's sums.
// Grid: (blocks). Threads: 256, a tile of 32 chunks.
#include "device.cuh"

#define LANES 8
#define STRIPE_BYTES 64
#define CHUNK_BYTES 1024
#define CHUNK_STRIPES 16
#define TILE_CHUNKS 32
#define SECRET_BYTES 192

#define PRIME32_1 0x9E3779B1ull
#define PRIME32_2 0x85EBCA77ull
#define PRIME32_3 0xC2B2AE3Dull
#define PRIME64_1 0x9E3779B185EBCA87ull
#define PRIME64_2 0xC2B2AE3D27D4EB4Full
#define PRIME64_3 0x165667B19E3779F9ull
#define PRIME64_4 0x85EBCA77C2B2AE63ull
#define PRIME64_5 0x27D4EB2F165667C5ull
#define PRIME_AVALANCHE 0x165667919E3779F9ull

__constant__ u64 SECRET[SECRET_BYTES / 8] = {
    0xbe4ba423396cfeb8ull, 0x1cad21f72c81017cull, 0xdb979083e96dd4deull, 0x1f67b3b7a4a44072ull,
    0x78e5c0cc4ee679cbull, 0x2172ffcc7dd05a82ull, 0x8e2443f7744608b8ull, 0x4c263a81e69035e0ull,
    0xcb00c391bb52283cull, 0xa32e531b8b65d088ull, 0x4ef90da297486471ull, 0xd8acdea946ef1938ull,
    0x3f349ce33f76faa8ull, 0x1d4f0bc7c7bbdcf9ull, 0x3159b4cd4be0518aull, 0x647378d9c97e9fc8ull,
    0xc3ebd33483acc5eaull, 0xeb6313faffa081c5ull, 0x49daf0b751dd0d17ull, 0x9e68d429265516d3ull,
    0xfca1477d58be162bull, 0xce31d07ad1b8f88full, 0x280416958f3acb45ull, 0x7e404bbbcafbd7afull,
};

// Eight bytes of the seeded secret, from an offset that need not be aligned.
__device__ inline u64 secret_at(const u64* secret, u32 offset) {
    u32 word = offset / 8, shift = offset % 8 * 8;
    return shift ? secret[word] >> shift | secret[word + 1] << (64 - shift) : secret[word];
}

__device__ inline u64 low_times_high(u64 key) { return (key & 0xffffffffu) * (key >> 32); }

__device__ inline u64 folded_product(u64 a, u64 b) { return (a * b) ^ __umul64hi(a, b); }

// What `stripes` stripes add to the accumulator of one lane. Lanes in pairs swap their plain sums.
__device__ inline u64 sum_of_stripes(const u8* data, u32 stripes, const u64* secret, u32 secret_offset, u32 lane) {
    u64 products = 0, plain = 0;
    for (u32 stripe = 0; stripe < stripes; stripe++) {
        u64 value = ((const u64*)(data + stripe * STRIPE_BYTES))[lane];
        products += low_times_high(value ^ secret_at(secret, secret_offset + 8 * (stripe + lane)));
        plain += value;
    }
    return products + __shfl_xor_sync(ALL_LANES, plain, 1);
}

__device__ inline u64 first_accumulator(u32 lane) {
    switch (lane) {
        case 0: return PRIME32_3;
        case 1: return PRIME64_1;
        case 2: return PRIME64_2;
        case 3: return PRIME64_3;
        case 4: return PRIME64_4;
        case 5: return PRIME32_2;
        case 6: return PRIME64_5;
        default: return PRIME32_1;
    }
}

__device__ inline u64 merged(const u64* accumulators, const u64* secret, u64 length_bytes) {
    u64 sum = length_bytes * PRIME64_1;
    for (u32 pair = 0; pair < LANES / 2; pair++)
        sum += folded_product(accumulators[2 * pair] ^ secret_at(secret, 11 + 16 * pair),
                              accumulators[2 * pair + 1] ^ secret_at(secret, 19 + 16 * pair));
    sum = (sum ^ sum >> 37) * PRIME_AVALANCHE;
    return sum ^ sum >> 32;
}

extern "C" __global__ void __launch_bounds__(LANES * TILE_CHUNKS)
    kv_checksum(u64* sums, const u8* pool, u64 slot_stride, const int* slots, const u64* seeds, u64 length_bytes) {
    __shared__ u64 secret[SECRET_BYTES / 8];
    __shared__ u64 tile[TILE_CHUNKS][LANES];
    __shared__ u64 accumulators[LANES];
    const u8* data = pool + (u64)slots[blockIdx.x] * slot_stride;
    u32 lane = threadIdx.x % LANES, chunk_of_tile = threadIdx.x / LANES;
    u64 seed = seeds[blockIdx.x], accumulator = first_accumulator(lane);

    if (threadIdx.x < SECRET_BYTES / 8) secret[threadIdx.x] = SECRET[threadIdx.x] + (threadIdx.x % 2 ? 0 - seed : seed);
    __syncthreads();

    // The last chunk is never whole: it ends before the last byte, and a last stripe that ends with it is added.
    u64 chunks_whole = (length_bytes - 1) / CHUNK_BYTES;
    for (u64 tile_start = 0; tile_start < chunks_whole; tile_start += TILE_CHUNKS) {
        u64 chunk = tile_start + chunk_of_tile;
        u32 stripes = chunk < chunks_whole ? CHUNK_STRIPES : 0;
        tile[chunk_of_tile][lane] = sum_of_stripes(data + chunk * CHUNK_BYTES, stripes, secret, 0, lane);
        __syncthreads();
        if (threadIdx.x < LANES)
            for (u32 i = 0; i < TILE_CHUNKS && tile_start + i < chunks_whole; i++) {
                accumulator += tile[i][lane];
                accumulator ^= accumulator >> 47 ^ secret_at(secret, SECRET_BYTES - STRIPE_BYTES + 8 * lane);
                accumulator *= PRIME32_1;
            }
        __syncthreads();
    }
    if (threadIdx.x >= WARP_LANES) return;
    u64 rest_start = chunks_whole * CHUNK_BYTES;
    u32 rest_stripes = (u32)((length_bytes - 1 - rest_start) / STRIPE_BYTES);
    accumulator += sum_of_stripes(data + rest_start, rest_stripes, secret, 0, lane);
    accumulator += sum_of_stripes(data + length_bytes - STRIPE_BYTES, 1, secret, SECRET_BYTES - STRIPE_BYTES - 7, lane);
    if (threadIdx.x < LANES) accumulators[lane] = accumulator;
    __syncwarp();
    if (threadIdx.x == 0) sums[blockIdx.x] = merged(accumulators, secret, length_bytes);
}

#ifndef __CUDACC__
CUDA_EMU_EXPORT(kv_checksum)
#endif
