// The head of a coded block; kvtier/kernels/coded.py describes it field by field and is its only other reader.
#pragma once
#include "device.cuh"

#define CODED_RAW 1
#define CODED_INT8 2
#define CODED_FP8 3
#define CODED_EXP4 4

struct alignas(16) CodedHead {
    u8 codec, dtype;
    u16 row_values;
    u32 values, escapes, length_bytes;
};

__device__ inline bool same_head(const CodedHead& a, const CodedHead& b) {
    return a.codec == b.codec && a.dtype == b.dtype && a.row_values == b.row_values && a.values == b.values &&
           a.escapes == b.escapes && a.length_bytes == b.length_bytes;
}
