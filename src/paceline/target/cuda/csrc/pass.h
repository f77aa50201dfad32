// What a pass is given, and what every kernel of it agrees on. arguments.py mirrors the structures field by field.
#pragma once

constexpr int MAX_ROWS = 64;       // of a pass
constexpr int MAX_SEQUENCES = 64;  // of a pass: two for each lane of a warp
constexpr int MAX_DEPTH = 64;   // positions of a path that a pass sees outside the page table
constexpr int PAGE = 64;        // keys in a page of the cache
constexpr int KEY_CHUNK = 128;  // keys summed into one partial result of attention
constexpr int WARPS = 8;        // of a block that computes products or attention
constexpr int THREADS = 32 * WARPS;

// Written by the host into pinned memory, copied to the device by the first kernel. Everything that differs between two
// passes is in here or in the page tables, so that a captured graph serves every pass of its row bucket.
//
// Row r writes its key and value to slot[r]. Keys before `length` are found through the page table. The pass's own keys,
// and those of earlier nodes of a tree that was cut into several passes, are found through path_slot, in the order of
// their positions. A row therefore sums its keys in one order, in a chain, in a tree, or alone.
struct PassInput {
    int number;  // of the pass, counted by the host
    int rows, sequences, paths;
    // by row; unused rows have token 0, position 0, slot -1
    int token[MAX_ROWS], position[MAX_ROWS], slot[MAX_ROWS];
    int path[MAX_ROWS];      // among its sequence's paths
    int part[MAX_ROWS];      // where its partial results begin
    int sequence[MAX_ROWS];  // whose it is
    int parent[MAX_ROWS];    // the row of the draft's token before; < 0: none, the text comes before
    // by sequence
    int first_row[MAX_SEQUENCES], row_count[MAX_SEQUENCES];
    int length[MAX_SEQUENCES];         // keys found through the page table
    int last_position[MAX_SEQUENCES];  // the largest of its rows
    int first_path[MAX_SEQUENCES], path_count[MAX_SEQUENCES];
    int table[MAX_SEQUENCES];  // row of the page tables
    // by sequence: how its tokens are chosen
    u64 seed[MAX_SEQUENCES];
    u32 choice[MAX_SEQUENCES];
    u32 index_shift[MAX_SEQUENCES];             // from a row's position to the place of its token in the output
    float inverse_temperature[MAX_SEQUENCES];   // 0: greedy
    int top_k[MAX_SEQUENCES];                   // 0: off
    double top_p[MAX_SEQUENCES];                // 1: off
    float min_p_logit[MAX_SEQUENCES];           // log(min_p); -INFINITE: off
    int history[MAX_SEQUENCES];                 // row of the tables of bias and counts; < 0: neither bias nor penalties
    float repetition[MAX_SEQUENCES];            // 1: off
    double presence[MAX_SEQUENCES], frequency[MAX_SEQUENCES];  // 0: off
    // by path, last: only the paths in use are copied
    int path_slot[MAX_ROWS][MAX_DEPTH];
};

// A key of this layer and head is at cache.keys + head * cache.head_stride + slot * head_dim.
struct KvCache {
    u16 *keys, *values;
    long long head_stride;
};

// Sums of squares are added as integers in units of 2^-28: whichever block comes first, the sum has the same bits.
DEVICE u64 to_fixed(float v) { return (u64)(v * 268435456.0f + 0.5f); }
DEVICE float from_fixed(u64 v) { return (float)v * 3.7252902984619140625e-9f; }

DEVICE float warp_sum(float v) {
    for (int mask = 16; mask; mask >>= 1) v += shuffle_xor(v, mask);
    return v;
}
