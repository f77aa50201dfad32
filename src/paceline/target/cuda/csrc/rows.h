// The first kernel of a pass, and those that move rows of the cache.
#pragma once
#include "pass.h"

struct BeginPass {
    const PassInput* host;  // pinned memory
    PassInput* input;
    int* host_taken;        // pinned memory: the number of the last pass whose input has been read
    u32* arrived;
    const u16* embeddings;  // [vocab, width] bf16
    const float* norm;      // the first layer's
    float* residual;
    u64* square_sums;       // [norms, MAX_ROWS]
    u16* out;
    int width, norms;
};

// One block for each row of the bucket: copies its share of the input, embeds its token, and sets every sum of squares.
DEVICE void begin_pass(const BeginPass& a) {
    wait_for_previous_kernel();
    const int row = blockIdx.x, rows = gridDim.x, thread = threadIdx.x;
    const volatile PassInput& host = *(const volatile PassInput*)a.host;
    const int words = (int)(sizeof(PassInput) / 4) - (MAX_ROWS - host.paths) * MAX_DEPTH;
    for (int i = row * THREADS + thread; i < words; i += rows * THREADS) ((int*)a.input)[i] = ((const volatile int*)a.host)[i];
    const u16* embedding = a.embeddings + (long long)host.token[row] * a.width;
    const int number = host.number;
    float squares = 0;
    for (int i = thread; i < a.width; i += THREADS) {
        const float v = as_float((u32)embedding[i] << 16);
        a.residual[(long long)row * a.width + i] = v;
        a.out[(long long)row * a.width + i] = to_bf16(v * a.norm[i]);
        squares += v * v;
    }
    float* sums = (float*)shared_memory;  // [WARPS]
    squares = warp_sum(squares);
    if (thread % 32 == 0) sums[thread / 32] = squares;
    for (int i = 1 + thread; i < a.norms; i += THREADS) a.square_sums[i * MAX_ROWS + row] = 0;
    sync_block();
    if (thread > 0) return;
    for (int i = 1; i < WARPS; i++) squares += sums[i];
    a.square_sums[row] = to_fixed(squares);
    if (arrive(a.arrived) == (u32)rows - 1) {  // every block has read its share
        *a.arrived = 0;
        publish(a.host_taken, number);
    }
}

// Brings rows of the cache to other slots: those of an accepted side branch to the slots of their positions. Sources
// and targets may overlap: each block reads all rows of one layer and head before it writes.
struct MoveRows {
    u16 *keys, *values;  // of all layers: [layers * kv_heads] heads
    long long head_stride;
    int head_dim, count;
    int source[MAX_DEPTH], target[MAX_DEPTH];
};

DEVICE void move_rows(const MoveRows& a) {
    wait_for_previous_kernel();
    u16* moved = (u16*)shared_memory;  // [count, head_dim]
    for (int which = 0; which < 2; which++) {
        u16* rows = (which ? a.values : a.keys) + blockIdx.x * a.head_stride;
        for (int i = threadIdx.x; i < a.count * a.head_dim; i += THREADS)
            moved[i] = rows[(long long)a.source[i / a.head_dim] * a.head_dim + i % a.head_dim];
        sync_block();
        for (int i = threadIdx.x; i < a.count * a.head_dim; i += THREADS)
            rows[(long long)a.target[i / a.head_dim] * a.head_dim + i % a.head_dim] = moved[i];
        sync_block();
    }
}
