// The token of each row: argmax((logits - largest) / temperature + Gumbel noise), the noise random access by seed, choice,
// output index and token id. Bits, operations and ties are those of sampling/noise.py and sampling/choose.py.
//
// Two kernels, SPLITS blocks for each row: the largest logit first, since temperature applies to the distance from it.
// Bias, penalties and masks of grammars come before them, where a row has any.
#pragma once
#include "cut.h"
#include "pass.h"

constexpr int SPLITS = 8;               // blocks that share a row of logits
constexpr int IN_PROMPT = 1 << 30;      // of a token's count: beside how often the output holds it

struct Chosen {  // pinned memory of the host
    int number;  // of the pass, written last
    int token[MAX_ROWS];
};

struct HostMasks {  // the words of all rows follow
    uint4 masked[MAX_ROWS];  // x; 16 bytes, so that one load reads it
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
    CutBuffers cut;  // null where no row is cut
    // Where some rows have a bias or penalties:
    float* processed;   // [MAX_ROWS, stride] their logits after both; else null
    const float* bias;  // [histories, stride]
    const int* counts;  // [histories, stride]: how often the output holds the token, and IN_PROMPT
    // Where some rows have a mask: a bit for each token that may come next.
    const HostMasks* host_masks;  // pinned memory
    u32* masks;                   // [MAX_ROWS, mask_words]; else null
    int* masked;                  // [MAX_ROWS] 0: any token may come
    int mask_words;               // a multiple of 4
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

// The masks come while the pass before is running, or after it.
DEVICE void take_masks(const Choose& a) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int row = blockIdx.x / SPLITS, split = blockIdx.x % SPLITS;
    if (row >= a.input->rows) return;
    int* masked = (int*)shared_memory;
    if (threadIdx.x == 0) *masked = (int)load_host16(a.host_masks->masked + row).x;
    sync_block();
    if (threadIdx.x == 0 && split == 0) a.masked[row] = *masked;
    if (!*masked) return;
    const int pieces = a.mask_words / 4, each = (pieces + SPLITS - 1) / SPLITS;
    const uint4* from = (const uint4*)(a.host_masks + 1) + (long long)row * pieces;
    uint4* to = (uint4*)a.masks + (long long)row * pieces;
    for (int i = split * each + threadIdx.x; i < (split + 1) * each && i < pieces; i += THREADS) to[i] = load_host16(from + i);
}

struct Penalties {  // of a row
    float repetition;
    double presence, frequency;

    DEVICE Penalties(const PassInput& in, int s)
        : repetition(in.repetition[s]), presence(in.presence[s]), frequency(in.frequency[s]) {}
    DEVICE float operator()(float x, int count) const {
        const int spoken = count & (IN_PROMPT - 1);
        if (repetition != 1 && count) x = x > 0 ? x / repetition : x * repetition;
        if ((presence != 0 || frequency != 0) && spoken) x -= (float)(presence + frequency * spoken);
        return x;
    }
};

// Bias, then penalties. The draft's tokens before a row count like those of the output.
DEVICE void process_logits(const Choose& a) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const RowPart part(a);
    const PassInput& in = *a.input;
    if (part.row >= in.rows) return;
    const int s = in.sequence[part.row], history = in.history[s];
    if (history < 0) return;
    const Penalties penalised(in, s);
    const float *logits = a.logits + (long long)part.row * a.stride, *bias = a.bias + (long long)history * a.stride;
    const int* counts = a.counts + (long long)history * a.stride;
    float* out = a.processed + (long long)part.row * a.stride;
    for (int id = part.first + threadIdx.x; id < part.end; id += THREADS)
        out[id] = penalised(load_fresh(logits + id) + load_fresh(bias + id), load_fresh(counts + id));
    int *drafted = (int*)shared_memory, *depth = drafted + MAX_ROWS;  // the draft's tokens before the row
    if (threadIdx.x == 0) {
        *depth = 0;
        for (int row = part.row; in.parent[row] >= 0; row = in.parent[row]) drafted[(*depth)++] = in.token[row];
    }
    sync_block();
    if ((int)threadIdx.x >= *depth) return;
    const int id = drafted[threadIdx.x];
    int times = 0;
    for (int i = 0; i < *depth; i++) {
        if (i < (int)threadIdx.x && drafted[i] == id) return;  // an earlier thread's
        times += drafted[i] == id;
    }
    if (id >= part.first && id < part.end)
        out[id] = penalised(load_fresh(logits + id) + load_fresh(bias + id), load_fresh(counts + id) + times);
}

struct RowLogits {  // what a row's token is chosen from
    const float* values;
    const u32* mask;  // null: any token may come

    DEVICE RowLogits(const Choose& a, int row) {
        const bool processed = a.processed != nullptr && a.input->history[a.input->sequence[row]] >= 0;
        values = (processed ? a.processed : a.logits) + (long long)row * a.stride;
        mask = a.masks != nullptr && load_fresh(a.masked + row) ? a.masks + (long long)row * a.mask_words : nullptr;
    }
    DEVICE bool allows(int id) const {
        return mask == nullptr || (u32)load_fresh((const int*)mask + id / 32) >> id % 32 & 1;
    }
    DEVICE float operator[](int id) const { return load_fresh(values + id); }
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

// Rank of the logit above, complement of the token below: of equal logits the lowest token is the largest. Where no token
// is allowed, 0 is left, which stands for the token -1.
DEVICE void find_top(const Choose& a) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const RowPart part(a);
    if (part.row >= a.input->rows) return;
    const RowLogits logits(a, part.row);
    u64 best = 0;
#pragma unroll 4
    for (int id = part.first + threadIdx.x; id < part.end; id += THREADS) {
        if (!logits.allows(id)) continue;
        const u64 here = (u64)rank_of(logits[id]) << 32 | (u32)~id;
        best = here > best ? here : best;
    }
    best = block_max(best, (u64*)shared_memory);
    if (threadIdx.x == 0) a.top[part.place()] = best;
    if (a.cut.counts == nullptr || part.split > 0) return;
    for (int i = threadIdx.x; i < BINS; i += THREADS)
        a.cut.counts[part.row * BINS + i] = 0, a.cut.weights[part.row * BINS + i] = 0;
    if (threadIdx.x == 0) a.cut.found[part.row] = 0;
}

// A row's largest logit, and whether there is a choice at all: neither greedy, nor a logit that is infinite or no number.
struct Top {
    u64 rank = 0;
    float logit;
    bool decides;

    DEVICE Top(const Choose& a, int row) {
        for (int i = 0; i < SPLITS; i++) {
            const u64 other = load_fresh(a.top + row * SPLITS + i);
            rank = other > rank ? other : rank;
        }
        logit = of_rank((u32)(rank >> 32));
        decides = a.input->inverse_temperature[a.input->sequence[row]] == 0 || (u32)(rank >> 32) == ~0u || !(fabsf(logit) < INFINITE);
    }
    DEVICE int token() const { return (int)~(u32)rank; }
};

DEVICE void count_depths(const Choose& a) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const RowPart part(a);
    if (part.row >= a.input->rows || !Cut(*a.input, part.row, a.vocab).cuts()) return;
    const Top top(a, part.row);
    if (top.decides) return;
    u64* weights = (u64*)shared_memory;  // [BINS]
    u32* counts = (u32*)(weights + BINS);
    for (int i = threadIdx.x; i < BINS; i += THREADS) counts[i] = 0, weights[i] = 0;
    sync_block();
    const RowLogits logits(a, part.row);
    const float scale = a.input->inverse_temperature[a.input->sequence[part.row]];
    for (int id = part.first + threadIdx.x; id < part.end; id += THREADS) {
        if (!logits.allows(id)) continue;
        const float x = (logits[id] - top.logit) * scale;
        const int bin = bin_of(x);
        block_add(counts + bin, 1u);
        block_add(weights + bin, weight_of(x));
    }
    sync_block();
    for (int i = threadIdx.x; i < BINS; i += THREADS) {
        atomic_add(a.cut.counts + part.row * BINS + i, counts[i]);
        atomic_add(a.cut.weights + part.row * BINS + i, weights[i]);
    }
}

DEVICE void gather_candidates(const Choose& a) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const RowPart part(a);
    if (part.row >= a.input->rows) return;
    const Cut cut(*a.input, part.row, a.vocab);
    const Top top(a, part.row);
    if (!cut.cuts() || top.decides) return;
    int* edge = (int*)shared_memory;
    if (threadIdx.x == 0) *edge = edge_of(cut, a.cut.counts + part.row * BINS, a.cut.weights + part.row * BINS);
    sync_block();
    const RowLogits logits(a, part.row);
    const float scale = a.input->inverse_temperature[a.input->sequence[part.row]];
    for (int id = part.first + threadIdx.x; id < part.end; id += THREADS) {
        if (!logits.allows(id)) continue;
        const float x = (logits[id] - top.logit) * scale;
        if (bin_of(x) > *edge) continue;
        const u32 at = take_place(a.cut.found + part.row);
        if (at < MAX_CANDIDATES) a.cut.candidates[part.row * MAX_CANDIDATES + at] = (u64)rank_of(x) << 32 | (u32)~id;
    }
}

DEVICE u64 mix64(u64 x) {  // the splitmix64 finaliser
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}

struct NoiseKey {
    u32 high, low;

    DEVICE NoiseKey(u32 high, u32 low) : high(high), low(low) {}
    DEVICE NoiseKey(const PassInput& in, int row) {
        const int s = in.sequence[row];
        u64 x = mix64(in.seed[s] + 0x9E3779B97F4A7C15ull);
        x = mix64(x ^ (u64)in.choice[s] << 3);
        x = mix64(x ^ (u64)(in.index_shift[s] + (u32)in.position[row]) << 20);
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
    DEVICE void reduce() {  // over the warp
        for (int mask = 16; mask; mask >>= 1) {
            const u64 other_score = shuffle_xor(score, mask);
            const int other_token = shuffle_xor(token, mask);
            take(other_score, other_token);
        }
    }
};

DEVICE Best best_of_part(const Choose& a, const RowPart& part, float top) {
    const RowLogits logits(a, part.row);
    const float inverse_temperature = a.input->inverse_temperature[a.input->sequence[part.row]];
    const NoiseKey key(*a.input, part.row);
    Best best;
    for (int id = part.first + threadIdx.x; id < part.end; id += THREADS) {
        if (!logits.allows(id)) continue;
        const float x = (logits[id] - top) * inverse_temperature;
        const u32 bits = key.bits(id);
        if (x >= REACH || bits >= RARE) best.take(rank_of((double)x + gumbel(bits)), id);
    }
    best.reduce();
    return best;
}

// Among the tokens that the cut leaves, by one block; a token of -1 leaves it to the host.
DEVICE Best best_of_cut(const Choose& a, int row) {
    const int count = load_fresh((const int*)a.cut.found + row);
    Best best;
    if (count > MAX_CANDIDATES) {
        best.take(~0ull, -1);
        return best;
    }
    u64 *keys = (u64*)shared_memory, *sums = keys + MAX_CANDIDATES;  // [MAX_CANDIDATES], [THREADS]
    int* below = (int*)(sums + THREADS);
    int padded = 1;
    while (padded < count) padded <<= 1;
    for (int i = threadIdx.x; i < padded; i += THREADS)
        keys[i] = i < count ? load_fresh(a.cut.candidates + row * MAX_CANDIDATES + i) : 0;
    sync_block();
    sort_descending(keys, padded);
    const Cut cut(*a.input, row, a.vocab);
    const auto depth_at = [&](int i) { return of_rank((u32)(keys[i] >> 32)); };
    int kept = cut.top_k > 0 && cut.top_k < count ? cut.top_k : count;
    if (cut.top_p < 1) {
        const auto weight_at = [&](int i) { return weight_of(depth_at(i)); };
        double total = 0;  // exact, in any order
        if (cut.top_k > 0)
            for (int i = 0; i < kept; i++) total += from_units(weight_at(i));
        else
            for (int i = 0; i < BINS; i++) total += from_units(load_fresh(a.cut.weights + row * BINS + i));
        const int enough = count_below(weight_at, kept, cut.top_p * total, sums, below) + 1;
        kept = enough < kept ? enough : kept;
    }
    const NoiseKey noise(*a.input, row);
    for (int i = threadIdx.x; i < kept; i += THREADS) {
        const int id = (int)~(u32)keys[i];
        const float x = depth_at(i);
        if (x >= cut.lowest) best.take(rank_of((double)x + gumbel(noise.bits(id))), id);
    }
    best.reduce();
    return best;
}

// The last block to arrive picks each row's token among its parts and tells the host.
DEVICE void publish_tokens(const Choose& a) {  // by one warp
    for (int row = threadIdx.x; row < a.input->rows; row += 32) {
        Best best;
        for (int i = 0; i < SPLITS; i++)
            best.take(load_fresh(a.score + row * SPLITS + i), load_fresh(a.token + row * SPLITS + i));
        a.host->token[row] = best.token;
    }
    sync_warp();
    if (threadIdx.x == 0) publish(&a.host->number, a.input->number);
}

DEVICE void choose_tokens(const Choose& a) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const RowPart part(a);
    u64* scores = (u64*)shared_memory;  // [WARPS]
    int* tokens = (int*)(scores + WARPS);
    u32* nth = (u32*)(tokens + WARPS);
    if (part.row < a.input->rows) {
        const Top top(a, part.row);
        const bool cut = a.cut.counts != nullptr && Cut(*a.input, part.row, a.vocab).cuts();
        Best best;
        if (top.decides) best.take(top.rank, top.token());
        else if (!cut) best = best_of_part(a, part, top.logit);
        else if (part.split == 0) best = best_of_cut(a, part.row);
        sync_block();  // the list was in the same memory
        if (threadIdx.x % 32 == 0) scores[threadIdx.x / 32] = best.score, tokens[threadIdx.x / 32] = best.token;
        sync_block();
        if (threadIdx.x == 0) {
            for (int i = 1; i < WARPS; i++) best.take(scores[i], tokens[i]);
            a.score[part.place()] = best.score, a.token[part.place()] = best.token;
        }
    }
    if (threadIdx.x == 0) *nth = arrive(a.arrived);
    sync_block();
    if ((int)*nth != (int)gridDim.x - 1 || threadIdx.x >= 32) return;
    publish_tokens(a);
    if (threadIdx.x == 0) *a.arrived = 0;
}
