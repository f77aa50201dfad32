// The token of each row: argmax((logits - largest) / temperature + Gumbel noise), the noise random access by seed, choice,
// output index and token id. Bits, operations and ties are those of sampling/noise.py and sampling/choose.py.
//
// Two kernels, SPLITS blocks for each row: the largest logit first, since temperature applies to the distance from it.
#pragma once
#include "pass.h"

constexpr int SPLITS = 8;  // blocks that share a row of logits

struct Chosen {  // pinned memory of the host
    int number;  // of the pass, written last
    int token[MAX_ROWS];
};

struct Choose {
    const float* logits;  // [rows, stride]
    int vocab, stride;
    const PassInput* input;
    u64* top;      // [MAX_ROWS, SPLITS] the largest of each part
    u64* score;    // [MAX_ROWS, SPLITS]
    int* token;    // [MAX_ROWS, SPLITS]
    u32* arrived;
    Chosen* host;
};

// Integers in the order of the floats, a NaN above all, and no zero with a sign.
DEVICE u32 rank_of(float v) {
    const u32 bits = as_bits(v + 0.0f);
    if (v != v) return ~0u;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
DEVICE float of_rank(u32 rank) { return as_float(rank >> 31 ? rank & 0x7FFFFFFFu : ~rank); }
DEVICE u64 rank_of(double v) {
    const u64 bits = as_bits(v + 0.0);
    return bits >> 63 ? ~bits : bits | 1ull << 63;
}

struct RowPart {  // of the logits
    int row, split, first, end;

    DEVICE RowPart(const Choose& a) : row(blockIdx.x / SPLITS), split(blockIdx.x % SPLITS) {
        const int each = (a.vocab + SPLITS - 1) / SPLITS;
        first = split * each;
        end = first + each < a.vocab ? first + each : a.vocab;
    }
    DEVICE int place() const { return row * SPLITS + split; }
};

// The largest of a block's values, in thread 0.
DEVICE u64 block_max(u64 v, u64* shared) {
    for (int mask = 16; mask; mask >>= 1) {
        const u64 other = shuffle_xor(v, mask);
        v = other > v ? other : v;
    }
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
    sync_block();
    if (threadIdx.x == 0)
        for (int i = 1; i < WARPS; i++) v = shared[i] > v ? shared[i] : v;
    return v;
}

// Rank of the logit above, complement of the token below: of equal logits the lowest token is the largest.
DEVICE void find_top(const Choose& a) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const RowPart part(a);
    if (part.row >= a.input->rows) return;
    const float* logits = a.logits + (long long)part.row * a.stride;
    u64 best = 0;
#pragma unroll 4
    for (int id = part.first + threadIdx.x; id < part.end; id += THREADS) {
        const u64 here = (u64)rank_of(load_fresh(logits + id)) << 32 | (u32)~id;
        best = here > best ? here : best;
    }
    best = block_max(best, (u64*)shared_memory);
    if (threadIdx.x == 0) a.top[part.place()] = best;
}

DEVICE u64 mix64(u64 x) {  // the splitmix64 finaliser
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}

struct NoiseKey {
    u32 high, low;

    DEVICE NoiseKey(const PassInput& in, int row) {
        u64 x = mix64(((u64)in.seed_high[row] << 32 | in.seed_low[row]) + 0x9E3779B97F4A7C15ull);
        x = mix64(x ^ (u64)in.choice[row] << 3);
        x = mix64(x ^ (u64)in.output_index[row] << 20);
        high = (u32)(x >> 32), low = (u32)x;
    }
    DEVICE u32 bits(u32 id) const {
        u32 x = id * 0x9E3779B1u;
        x ^= x >> 15;
        x = (x ^ high) * (low | 1);
        x = (x ^ x >> 16) * 0x7FEB352Du;
        x = (x ^ x >> 15) * 0x846CA68Bu;
        return x ^ x >> 16;
    }
};
DEVICE double gumbel(u32 bits) { return -log(-log((bits + 0.5) * 2.3283064365386963e-10)); }

// All noise lies above -3.2 and the best token's depth is 0, so a token scores less than the best one if it is 12 nats
// below it and its noise is below 8: no logarithm is taken for such a token.
constexpr float REACH = -12.0f;
constexpr u32 RARE = 4293526736u;  // floor(2^32 * exp(-exp(-8))): bits below it give noise below 8

struct Best {
    u64 score = 0;
    int token = 0x7FFFFFFF;

    DEVICE void take(u64 other_score, int other_token) {
        if (other_score > score || (other_score == score && other_token < token)) score = other_score, token = other_token;
    }
};

DEVICE Best best_of_part(const Choose& a, const RowPart& part, float top) {
    const float* logits = a.logits + (long long)part.row * a.stride;
    const float inverse_temperature = a.input->inverse_temperature[part.row];
    const NoiseKey key(*a.input, part.row);
    Best best;
    for (int id = part.first + threadIdx.x; id < part.end; id += THREADS) {
        const float x = (load_fresh(logits + id) - top) * inverse_temperature;
        const u32 bits = key.bits(id);
        if (x >= REACH || bits >= RARE) best.take(rank_of((double)x + gumbel(bits)), id);
    }
    for (int mask = 16; mask; mask >>= 1) {
        const u64 score = shuffle_xor(best.score, mask);
        const int token = shuffle_xor(best.token, mask);
        best.take(score, token);
    }
    return best;
}

// The last block to arrive picks each row's token among its parts and tells the host.
DEVICE void publish_tokens(const Choose& a) {
    const int row = threadIdx.x;
    if (row < a.input->rows) {
        Best best;
        for (int i = 0; i < SPLITS; i++)
            best.take(load_fresh(a.score + row * SPLITS + i), load_fresh(a.token + row * SPLITS + i));
        a.host->token[row] = best.token;
    }
    sync_warp();
    if (row == 0) publish(&a.host->number, a.input->number);
}

DEVICE void choose_tokens(const Choose& a) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const RowPart part(a);
    u64* scores = (u64*)shared_memory;  // [WARPS]
    int* tokens = (int*)(scores + WARPS);
    u32* nth = (u32*)(tokens + WARPS);
    if (part.row < a.input->rows) {
        u64 top = 0;
        for (int i = 0; i < SPLITS; i++) {
            const u64 other = load_fresh(a.top + part.row * SPLITS + i);
            top = other > top ? other : top;
        }
        const u32 top_rank = (u32)(top >> 32);
        const float top_logit = of_rank(top_rank);
        // Greedy, or a logit that is infinite or no number: the largest it is, and the lowest of equals.
        const bool greedy = a.input->inverse_temperature[part.row] == 0 || top_rank == ~0u || !(fabsf(top_logit) < INFINITE);
        Best best;
        if (greedy) best.take(top, (int)~(u32)top);
        else best = best_of_part(a, part, top_logit);
        if (threadIdx.x % 32 == 0) scores[threadIdx.x / 32] = best.score, tokens[threadIdx.x / 32] = best.token;
        sync_block();
        if (threadIdx.x == 0) {
            for (int i = 1; i < WARPS; i++) best.take(scores[i], tokens[i]);
            a.score[part.place()] = best.score, a.token[part.place()] = best.token;
        }
    }
    if (threadIdx.x == 0) *nth = arrive(a.arrived);
    sync_block();
    if (*nth != gridDim.x - 1 || threadIdx.x >= 32) return;
    publish_tokens(a);
    if (threadIdx.x == 0) *a.arrived = 0;
}
