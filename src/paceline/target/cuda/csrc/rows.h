// The first kernels of a pass, and the one that moves rows of the cache.
#pragma once
#include "pass.h"

struct TakeInput {
    const PassInput* host;  // pinned memory
    PassInput* input;
    int* host_taken;        // pinned memory: the number of the last pass whose input has been read
};

// One block. Every read crosses the bus, so they are few, 16 bytes each, and at once: the header and the first path,
// then the other paths of a tree or a batch.
DEVICE void take_input(const TakeInput& a) {
    constexpr int PIECE = 16, PATH_PIECES = MAX_DEPTH * 4 / PIECE;
    constexpr int HEADER_PIECES = (int)sizeof(PassInput) / PIECE - (MAX_ROWS - 1) * PATH_PIECES;
    constexpr int EACH = (HEADER_PIECES + THREADS - 1) / THREADS;
    wait_for_previous_kernel();
    uint4 *to = (uint4*)a.input, piece[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (const int at = i * THREADS + threadIdx.x; at < HEADER_PIECES) piece[i] = load_host16((const uint4*)a.host + at);
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (const int at = i * THREADS + threadIdx.x; at < HEADER_PIECES) to[at] = piece[i];
    u32* first = (u32*)shared_memory;  // number, rows, sequences, paths
    if (threadIdx.x == 0) first[0] = piece[0].x, first[3] = piece[0].w;
    sync_block();
    const int end = HEADER_PIECES + ((int)first[3] - 1) * PATH_PIECES;
    for (int i = HEADER_PIECES + threadIdx.x; i < end; i += THREADS) to[i] = load_host16((const uint4*)a.host + i);
    sync_block();
    if (threadIdx.x == 0) publish(a.host_taken, (int)first[0]);
}

struct Embed {
    const PassInput* input;
    const u16* embeddings;  // [vocab, width] bf16
    const float* norm;      // the first layer's
    float* residual;
    u64* square_sums;       // [norms, MAX_ROWS]
    u16* out;
    int width, norms;
};

// Sets a row's sums of squares, which the layers add to: the first to the sum over the block, the others to 0.
DEVICE void start_square_sums(u64* square_sums, int norms, int row, float squares) {
    float* sums = (float*)shared_memory;  // [WARPS]
    squares = warp_sum(squares);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
    for (int i = 1 + threadIdx.x; i < norms; i += THREADS) square_sums[i * MAX_ROWS + row] = 0;
    sync_block();
    if (threadIdx.x > 0) return;
    for (int i = 1; i < WARPS; i++) squares += sums[i];
    square_sums[row] = to_fixed(squares);
}

// One block for each row of the bucket.
DEVICE void embed_row(const Embed& a) {
    wait_for_previous_kernel();
    const int row = blockIdx.x, thread = threadIdx.x;
    const u16* embedding = a.embeddings + (long long)load_fresh(a.input->token + row) * a.width;
    float squares = 0;
    for (int i = thread; i < a.width; i += THREADS) {
        const float v = as_float((u32)embedding[i] << 16);
        a.residual[(long long)row * a.width + i] = v;
        a.out[(long long)row * a.width + i] = to_bf16(v * a.norm[i]);
        squares += v * v;
    }
    start_square_sums(a.square_sums, a.norms, row, squares);
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

// Tokens that an output has gained, for its penalties.
struct CountTokens {
    u32* counts;  // [vocab] of its history
    int count;
    int token[MAX_DEPTH];
};

DEVICE void count_tokens(const CountTokens& a) {
    wait_for_previous_kernel();
    if ((int)threadIdx.x < a.count) atomic_add(a.counts + a.token[threadIdx.x], 1u);
}
