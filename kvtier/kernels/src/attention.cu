// Attention of query rows over the tokens that a block table names, and the merge of partial results.
//
// One kernel for decode (a query per sequence) and for prefill over a cached prefix. A *row* is one query token and
// one query head; the rows of a sequence that share a KV head are taken ROWS at a time, so that a tile of K and V read
// once serves grouped heads and neighbouring queries. Softmax runs along with the tiles; sums are float.
//
// A row at position p sees the cached tokens t < kv_tokens with t <= p and, under a window w, t > p - w. Tokens that no
// row of a thread block sees are never read; one that a row does not see cannot reach it, not even as NaN.
// Each split covers `split_tokens` of what the rows see; its output is normalised within the split, and its
// log-sum-exp (natural; -inf and zeros if it saw nothing) is what merges it with others.
//
// A table entry e >= 0 is a slot of the device's pool; e < 0 is slot ~e of the host's, read in place.
// Grid: (tiles of rows, sequences * KV heads, splits). Threads: 128. Rows of K, V and queries start at multiples of 16.
#include "floats.cuh"

#define ROWS 8
#define TILE_TOKENS 32  // one per lane
#define WARPS 4
#define WARP_ROWS (ROWS / WARPS)
#define LANE_VALUES (KV_HEAD_DIM / WARP_LANES)
#define LOAD_VALUES (16 / (int)sizeof(kv_t))
#define PADDED_DIM (KV_HEAD_DIM + 1)  // lanes that read one column of neighbouring tokens then use different banks
#define NOTHING __uint_as_float(0xff800000u)

#if KV_HEAD_DIM % WARP_LANES
#error "KV_HEAD_DIM is a multiple of 32"
#endif

// The same fields in the same order as AttentionShape of kvtier/kernels/launch_attention.py.
struct AttentionShape {
    u64 device_keys, host_keys;       // addresses of this layer's K in slot 0 of either pool
    i64 keys_to_values;               // from a K to its V, in both pools
    u64 device_stride, host_stride;   // between slots
    u64 token_stride, head_stride;    // inside a slot
    int table_width, block_tokens, heads, kv_heads, window, split_tokens;  // window 0: none
    float scale;
};

struct Span {
    int start, stop;
};

struct Sequence {
    int query_start, queries, position, kv_tokens;

    // What a query sees; nothing if stop <= start.
    __device__ Span seen_by(int query, int window) const {
        int after = position + query + 1;
        Span span = {window && after > window ? after - window : 0, after < kv_tokens ? after : kv_tokens};
        return span;
    }
};

__device__ inline float sum_of_warp(float value) {
    for (int step = WARP_LANES / 2; step; step /= 2) value += __shfl_xor_sync(ALL_LANES, value, step);
    return value;
}

// Where the key of a token lies.
__device__ inline u64 key_address(const AttentionShape& shape, const int* table, int token, int kv_head) {
    int entry = table[token / shape.block_tokens];
    u64 slot = entry < 0 ? shape.host_keys + (u64)~entry * shape.host_stride
                         : shape.device_keys + (u64)entry * shape.device_stride;
    return slot + (u64)(token % shape.block_tokens) * shape.token_stride + (u64)kv_head * shape.head_stride;
}

// Brings the rows at `addresses` into shared memory as float, 16 bytes per load. Where there is none (0) the tile keeps
// what it had: no row sees that token.
__device__ inline void load_tile(float (*tile)[PADDED_DIM], const u64* addresses, i64 distance) {
    union {
        Bytes16 bytes;
        kv_t values[LOAD_VALUES];
    } loaded;
    for (int i = threadIdx.x; i < TILE_TOKENS * (KV_HEAD_DIM / LOAD_VALUES); i += blockDim.x) {
        int token = i / (KV_HEAD_DIM / LOAD_VALUES), column = i % (KV_HEAD_DIM / LOAD_VALUES) * LOAD_VALUES;
        if (!addresses[token]) continue;
        loaded.bytes = *(const Bytes16*)at(addresses[token] + distance + column * sizeof(kv_t));
        for (int j = 0; j < LOAD_VALUES; j++) tile[token][column + j] = to_float(loaded.values[j]);
    }
}

// The running softmax of one row, the same in all lanes of its warp, and this lane's part of the weighted values.
struct Running {
    float largest, total, values[LANE_VALUES];

    // Takes in a tile: lane i has the score of token i, or NOTHING if the row does not see it.
    __device__ void take(float score, float* weights, const float (*tile)[PADDED_DIM]) {
        int lane = threadIdx.x % WARP_LANES;
        if (!__ballot_sync(ALL_LANES, score != NOTHING)) return;  // idle rows, or far behind a window
        float tile_largest = warp_max(score);  // lanes may differ if one has a NaN; then the sums are NaN in any case
        float grown = tile_largest > largest ? tile_largest : largest;
        float kept = largest == NOTHING ? 0.0f : expf(largest - grown);
        float weight = score == NOTHING ? 0.0f : expf(score - grown);
        weights[lane] = weight;
        largest = grown;
        total = total * kept + sum_of_warp(weight);
        __syncwarp();
        for (int i = 0; i < LANE_VALUES; i++) values[i] *= kept;
        for (int token = 0; token < TILE_TOKENS; token++) {
            if (weights[token] == 0.0f) continue;
            for (int i = 0; i < LANE_VALUES; i++) values[i] += weights[token] * tile[token][lane + i * WARP_LANES];
        }
    }
};

extern "C" __global__ void __launch_bounds__(WARPS* WARP_LANES)
    kv_attend(float* out, float* log_sums, const kv_t* queries, const int* query_starts, const int* positions,
              const int* kv_tokens, const int* tables, AttentionShape shape, u64 rows_total) {
    __shared__ float query_rows[ROWS][KV_HEAD_DIM];
    __shared__ float tile[TILE_TOKENS][PADDED_DIM];
    __shared__ float weights[ROWS][TILE_TOKENS];
    __shared__ u64 addresses[TILE_TOKENS];
    int lane = threadIdx.x % WARP_LANES, warp = threadIdx.x / WARP_LANES;
    int sequence_index = blockIdx.y / shape.kv_heads, kv_head = blockIdx.y % shape.kv_heads;
    int group = shape.heads / shape.kv_heads, first_row = blockIdx.x * ROWS;
    const int* table = tables + (u64)sequence_index * shape.table_width;
    Sequence sequence = {query_starts[sequence_index],
                         query_starts[sequence_index + 1] - query_starts[sequence_index], positions[sequence_index],
                         kv_tokens[sequence_index]};
    int rows = sequence.queries * group - first_row;
    if (rows <= 0) return;
    rows = rows < ROWS ? rows : ROWS;

    for (int i = threadIdx.x; i < ROWS * KV_HEAD_DIM; i += blockDim.x) {
        int row = i / KV_HEAD_DIM, query = (first_row + row) / group;
        int head = kv_head * group + (first_row + row) % group;
        u64 at_query = ((u64)(sequence.query_start + query) * shape.heads + head) * KV_HEAD_DIM + i % KV_HEAD_DIM;
        query_rows[row][i % KV_HEAD_DIM] = row < rows ? to_float(queries[at_query]) * shape.scale : 0.0f;
    }
    Span seen = {sequence.seen_by(first_row / group, shape.window).start,
                 sequence.seen_by((first_row + rows - 1) / group, shape.window).stop};
    Span split = {seen.start + (int)blockIdx.z * shape.split_tokens, seen.stop};
    // A split ends where a tile does, or where no row sees any further.
    if (seen.stop - split.start > shape.split_tokens) split.stop = split.start + shape.split_tokens;

    Running running[WARP_ROWS];
    for (int r = 0; r < WARP_ROWS; r++) {
        running[r].largest = NOTHING;
        running[r].total = 0.0f;
        for (int i = 0; i < LANE_VALUES; i++) running[r].values[i] = 0.0f;
    }
    for (int tile_start = split.start; tile_start < split.stop; tile_start += TILE_TOKENS) {
        int token = tile_start + lane;
        // The barrier also keeps the tile until all warps have taken in the one before.
        if (warp == 0) addresses[lane] = token < split.stop ? key_address(shape, table, token, kv_head) : 0;
        __syncthreads();
        load_tile(tile, addresses, 0);
        __syncthreads();
        float scores[WARP_ROWS];
        for (int r = 0; r < WARP_ROWS; r++) scores[r] = 0.0f;
        for (int d = 0; d < KV_HEAD_DIM; d++)
            for (int r = 0; r < WARP_ROWS; r++) scores[r] += query_rows[warp * WARP_ROWS + r][d] * tile[lane][d];
        __syncthreads();
        load_tile(tile, addresses, shape.keys_to_values);
        __syncthreads();
        for (int r = 0; r < WARP_ROWS; r++) {
            int row = warp * WARP_ROWS + r;
            Span own = sequence.seen_by((first_row + row) / group, shape.window);
            bool sees = row < rows && token >= own.start && token < own.stop;
            running[r].take(sees ? scores[r] : NOTHING, weights[row], tile);
        }
    }

    for (int r = 0; r < WARP_ROWS; r++) {
        int row = warp * WARP_ROWS + r, query = (first_row + row) / group;
        int head = kv_head * group + (first_row + row) % group;
        if (row >= rows) continue;
        u64 out_row = blockIdx.z * rows_total + (u64)(sequence.query_start + query) * shape.heads + head;
        float total = running[r].total;
        for (int i = 0; i < LANE_VALUES; i++)
            out[out_row * KV_HEAD_DIM + lane + i * WARP_LANES] = total != 0.0f ? running[r].values[i] / total : 0.0f;
        if (lane == 0) log_sums[out_row] = total != 0.0f ? running[r].largest + logf(total) : NOTHING;
    }
}

__device__ inline float weight_of(float log_sum, float largest) {
    return log_sum == NOTHING ? 0.0f : expf(log_sum - largest);
}

// Merges `parts` results of the same rows, each [rows][KV_HEAD_DIM] with a log-sum-exp per row. Grid: (rows).
extern "C" __global__ void kv_merge(kv_t* out, float* log_sums, const float* parts_out, const float* parts_log_sums,
                                    int parts) {
    u64 row = blockIdx.x, rows = gridDim.x;
    float largest = NOTHING, total = 0.0f;
    for (int part = 0; part < parts; part++) {
        float log_sum = parts_log_sums[part * rows + row];
        largest = log_sum > largest ? log_sum : largest;
    }
    for (int part = 0; part < parts; part++) total += weight_of(parts_log_sums[part * rows + row], largest);
    for (int d = threadIdx.x; d < KV_HEAD_DIM; d += blockDim.x) {
        float value = 0.0f;
        for (int part = 0; part < parts; part++) {
            float weight = weight_of(parts_log_sums[part * rows + row], largest);
            if (weight != 0.0f) value += weight / total * parts_out[(part * rows + row) * KV_HEAD_DIM + d];
        }
        out[row * KV_HEAD_DIM + d] = from_float(value);
    }
    if (threadIdx.x == 0) log_sums[row] = total != 0.0f ? largest + logf(total) : NOTHING;
}

#ifndef __CUDACC__
CUDA_EMU_EXPORT(kv_attend)
CUDA_EMU_EXPORT(kv_merge)
#endif
