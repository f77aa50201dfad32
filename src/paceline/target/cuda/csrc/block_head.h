// A block head's draft (heads/block.py): cache rows of what the target has read, one pass over the blocks of some texts, and
// the tokens of their chains one after the other. Its products are those of linear.h, its attention that of attention.h.
//
// A block's bits depend on its text and its number of slots alone, for the reasons a row of the target does.
#pragma once
#include "attention.h"
#include "choose.h"
#include "linear.h"
#include "rows.h"

constexpr int MAX_TEXTS = 16;  // of one draft: MAX_ROWS / 4
constexpr int MAX_BLOCK = 16;  // tokens of one chain

// Written by the host into pinned memory, copied to the device by the first kernel. Addresses are data: the tensors of a
// text's cache rows and results differ from draft to draft.
struct DraftInput {
    int number;                       // of the draft, counted by the host
    int read_rows;                    // rows of the target that become cache rows
    int texts, slots, chains;         // each text fills `slots` rows
    int padding[3];
    // by row that is read
    const float* hidden[MAX_ROWS];    // [width] of the first tap
    long long tap_stride[MAX_ROWS];   // floats from one tap to the next
    u16* cache_row[MAX_ROWS];         // [layers, 2, kv_heads, head_dim]
    int read_position[MAX_ROWS];
    // by text
    const u16* context[MAX_TEXTS];    // the first visible cache row
    float* logits[MAX_TEXTS];         // [slots, columns]
    float* sure[MAX_TEXTS];           // [slots]
    int token[MAX_TEXTS], position[MAX_TEXTS], length[MAX_TEXTS];  // the anchor's; visible cache rows
    // by chain
    const float* chain_logits[MAX_TEXTS];
    const float* chain_sure[MAX_TEXTS];
    int slot[MAX_TEXTS], previous[MAX_TEXTS], size[MAX_TEXTS];     // previous: number in the draft vocabulary
    float inverse_temperature[MAX_TEXTS];                          // 0: greedy
    u32 key[MAX_TEXTS][MAX_BLOCK][2];                              // of the noise
};

struct DraftResult {  // pinned memory of the host
    int number;       // of the draft, written last
    int token[MAX_TEXTS][MAX_BLOCK];
    float sure[MAX_TEXTS][MAX_BLOCK];
};

struct TakeDraft {
    const DraftInput* host;  // pinned memory
    DraftInput* input;
    PassInput* pass;         // what attention reads: positions are numbers of visible keys
    float** rows;            // [MAX_ROWS] where a row's logits go; null: an unused row
    u64* best;               // [MAX_TEXTS, MAX_BLOCK]
    int* host_taken;
    int columns;
};

// One block.
DEVICE void take_draft(const TakeDraft& a) {
    constexpr int PIECES = (int)sizeof(DraftInput) / 16, EACH = (PIECES + THREADS - 1) / THREADS;
    static_assert(sizeof(DraftInput) % 16 == 0, "copied in pieces of 16 bytes");
    let_next_kernel_start();
    wait_for_previous_kernel();
    uint4 piece[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (const int at = i * THREADS + threadIdx.x; at < PIECES) piece[i] = load_host16((const uint4*)a.host + at);
    DraftInput* in = (DraftInput*)shared_memory;
#pragma unroll
    for (int i = 0; i < EACH; i++)
        if (const int at = i * THREADS + threadIdx.x; at < PIECES)
            ((uint4*)in)[at] = piece[i], ((uint4*)a.input)[at] = piece[i];
    for (int i = threadIdx.x; i < MAX_TEXTS * MAX_BLOCK; i += THREADS) a.best[i] = 0;
    sync_block();
    const int row = threadIdx.x, slots = in->slots, rows = in->texts * slots;
    if (row == 0) {
        a.pass->rows = rows, a.pass->sequences = a.pass->paths = in->texts;
        publish(a.host_taken, in->number);
    }
    if (row < MAX_ROWS) {
        const int text = row < rows ? row / slots : 0, slot = row - text * slots, last = in->length[text] + slots - 1;
        a.pass->position[row] = row < rows ? last : 0;  // every row sees the whole block
        a.pass->path[row] = 0;
        int part = 0;
        for (int i = 0; i < text; i++) part += slots * ((in->length[i] + slots - 1) / KEY_CHUNK + 1);
        a.pass->part[row] = part + slot * (last / KEY_CHUNK + 1);
        a.pass->sequence[row] = text;
        a.rows[row] = row < rows ? in->logits[text] + (long long)slot * a.columns : nullptr;
    }
    if (row < MAX_SEQUENCES) {
        const bool used = row < in->texts;
        a.pass->first_row[row] = row * slots, a.pass->row_count[row] = used ? slots : 0;
        a.pass->length[row] = used ? in->length[row] : 0;
        a.pass->last_position[row] = used ? in->length[row] + slots - 1 : 0;
        a.pass->first_path[row] = row, a.pass->path_count[row] = 1, a.pass->table[row] = 0;
    }
}

// ---- cache rows of what the target has read

struct GatherTaps {
    const DraftInput* input;
    u16* out;         // [rows, taps * width] bf16
    float* residual;  // [rows, width] of the product to come, which adds to it
    u64* square_sum;  // [rows]
    int taps, width;
};

// One block for each row of the bucket.
DEVICE void gather_taps(const GatherTaps& a) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int row = blockIdx.x, width = a.width;
    for (int i = threadIdx.x; i < width; i += THREADS) a.residual[(long long)row * width + i] = 0;
    if (threadIdx.x == 0) a.square_sum[row] = 0;
    if (row >= load_fresh(&a.input->read_rows)) return;
    const float* from = a.input->hidden[row];
    u16* to = a.out + (long long)row * a.taps * width;
    for (int tap = 0; tap < a.taps; tap++, from += a.input->tap_stride[row], to += width)
        for (int i = threadIdx.x; i < width; i += THREADS) to[i] = to_bf16(load_fresh(from + i));
}

struct ContextKeys {
    const float* products;  // [rows, layers, 2, kv_heads, head_dim]
    const float* key_norm;  // [layers, head_dim]
    const float *cos, *sin;
    const DraftInput* input;
    int layers, kv_heads;
    float norm_eps;
};

// A warp for each row, layer, and head of keys or values.
template <int D> DEVICE void store_context(const ContextKeys& a) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int heads = a.layers * 2 * a.kv_heads, item = blockIdx.x * 4 + (threadIdx.x >> 5);
    const int row = item / heads, head = item % heads, layer = head / (2 * a.kv_heads);
    if (row >= a.input->read_rows) return;
    HeadRow<D> values(a.products + (long long)item * D);
    if (head % (2 * a.kv_heads) < a.kv_heads) {
        values.normalise(a.key_norm + layer * D, a.norm_eps);
        values.rotate(a.cos, a.sin, a.input->read_position[row]);
    }
    values.store(a.input->cache_row[row] + (long long)head * D, 1.0f);
}

// ---- the pass over the blocks

struct EmbedBlock {
    const DraftInput* input;
    const u16* embeddings;  // [vocab, width] bf16, of the target
    const float* mask;      // [width] the input of every slot but the anchor's
    const float* norm;      // the first layer's
    float* residual;
    u64* square_sums;       // [norms, MAX_ROWS]
    u16* out;
    int width, norms;
};

// One block for each row of the bucket.
DEVICE void embed_block(const EmbedBlock& a) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int row = blockIdx.x, slots = load_fresh(&a.input->slots), text = row / slots;
    const bool is_anchor = row % slots == 0 && text < load_fresh(&a.input->texts);
    const u16* embedding = a.embeddings + (long long)(is_anchor ? load_fresh(a.input->token + text) : 0) * a.width;
    float squares = 0;
    for (int i = threadIdx.x; i < a.width; i += THREADS) {
        const float v = is_anchor ? as_float((u32)embedding[i] << 16) : a.mask[i];
        a.residual[(long long)row * a.width + i] = v;
        a.out[(long long)row * a.width + i] = to_bf16(v * a.norm[i]);
        squares += v * v;
    }
    start_square_sums(a.square_sums, a.norms, row, squares);
}

struct BlockHeads {
    const float* qkv;  // [rows, heads + 2 * kv_heads, head_dim]
    const float *query_norm, *key_norm;  // [head_dim]
    const float *cos, *sin;
    const DraftInput* input;
    u16* queries;  // [rows, heads, head_dim]
    u16* own;      // [2, kv_heads, MAX_ROWS, head_dim]: the blocks' own keys and values
    int heads, kv_heads;
    float norm_eps, query_scale;
};

// A warp for each row and head.
template <int D> DEVICE void normalise_block_head(const BlockHeads& a) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int heads = a.heads + 2 * a.kv_heads, item = blockIdx.x * 4 + (threadIdx.x >> 5);
    const int row = item / heads, head = item % heads, slots = a.input->slots, text = row / slots;
    if (text >= a.input->texts) return;
    const bool is_query = head < a.heads, is_value = head >= a.heads + a.kv_heads;
    HeadRow<D> values(a.qkv + (long long)item * D);
    if (!is_value) {
        values.normalise(is_query ? a.query_norm : a.key_norm, a.norm_eps);
        values.rotate(a.cos, a.sin, a.input->position[text] + row % slots);
    }
    u16* to = is_query ? a.queries + ((long long)row * a.heads + head) * D
                       : a.own + ((long long)(head - a.heads) * MAX_ROWS + row) * D;
    values.store(to, is_query ? a.query_scale : 1.0f);
}

// Keys and values of a block: the text's cache rows, then the block's own.
struct BlockAttention {
    Attention attention;
    const DraftInput* draft;
    const u16* own;      // of this layer
    int layer, row_size;  // elements of a cache row
};

template <int D> struct BlockKeys {
    const BlockAttention& b;
    const ChunkTask& task;
    const int which;

    DEVICE BlockKeys(const BlockAttention& b, const ChunkTask& task, int which) : b(b), task(task), which(which) {}
    DEVICE const u16* cached_row(int key, int page) const { return row(key, page); }
    DEVICE const u16* row(int key, int) const {
        const int at = task.chunk * KEY_CHUNK + key, kv_heads = b.attention.kv_heads, own = at - task.length;
        if (own < 0)
            return b.draft->context[task.sequence] + (long long)at * b.row_size + ((b.layer * 2 + which) * kv_heads + task.kv_head) * D;
        const int deepest = task.row_count - 1, slot = own < deepest ? own : deepest;
        return b.own + ((long long)(which * kv_heads + task.kv_head) * MAX_ROWS + task.first_row + slot) * D;
    }
};

struct BlockSure {
    const DraftInput* input;
    const float *residual, *norm, *weight;  // norm, weight: [width]
    const u64* square_sum;
    int width;
    float bias, inverse_width, norm_eps;
};

// The part of each slot's confidence that its hidden state gives. A warp for each row.
DEVICE void block_sure(const BlockSure& a) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int row = blockIdx.x * WARPS + (threadIdx.x >> 5), slots = a.input->slots, text = row / slots;
    if (text >= a.input->texts) return;
    float sum = 0;
    for (int i = threadIdx.x & 31; i < a.width; i += 32)
        sum += load_fresh(a.residual + (long long)row * a.width + i) * a.norm[i] * a.weight[i];
    sum = warp_sum(sum);
    const float factor = rsqrtf(from_fixed(load_fresh(a.square_sum + row)) * a.inverse_width + a.norm_eps);
    if (threadIdx.x % 32 == 0) a.input->sure[text][row % slots] = sum * factor + a.bias;
}

// ---- chains

struct ChainStep {
    const DraftInput* input;
    const u16* markov_in;   // [draft_vocab + 1, rank] bf16
    const u16* markov_out;  // [draft_vocab, rank] bf16
    const float* weight;    // [rank] of the confidence
    const int* ids;         // [draft_vocab] the target's
    u64* best;              // [MAX_TEXTS, MAX_BLOCK]: rank of the score, then ~number
    float* sure;            // [MAX_TEXTS, MAX_BLOCK]
    u32* arrived;
    DraftResult* host;
    int draft_vocab, columns, rank;  // rank: a multiple of 64
    int step, steps;
};

DEVICE float low_bf16(u32 v) { return as_float(v << 16); }
DEVICE float high_bf16(u32 v) { return as_float(v & 0xFFFF0000u); }

// The token of one step of every chain: the largest of block logits, Markov logits of the token before, and noise.
// Eight lanes compute the Markov logit of a token.
//
// What a step needs besides the token before is loaded while the step before runs: its first Markov rows, and the block
// logits of the first chain. Those are there, since no step starts before the first one has waited for them.
struct ChainStepKernel {
    static constexpr int LANES = 8, AT_ONCE = 32 / LANES;  // tokens of a warp
    static constexpr int EARLY = 4;                        // turns of a warp whose tokens are loaded early

    const ChainStep& a;
    const DraftInput& in;
    const int lane, warp, first, stride;  // a lane's first token, and from one turn to the next
    float* pairs;  // [MAX_TEXTS, rank]
    u64* tops;     // [WARPS]
    u32* nth;
    uint4 early_row[EARLY];
    float early_logit[EARLY];

    DEVICE ChainStepKernel(const ChainStep& a)
        : a(a), in(*a.input), lane(threadIdx.x & 31), warp(threadIdx.x >> 5),
          first((blockIdx.x * WARPS + warp) * AT_ONCE + lane / LANES), stride(gridDim.x * WARPS * AT_ONCE),
          pairs((float*)shared_memory), tops((u64*)(pairs + MAX_TEXTS * a.rank)), nth((u32*)(tops + WARPS)) {}

    DEVICE const uint4* markov_row(int number) const { return (const uint4*)(a.markov_out + (long long)number * a.rank); }
    DEVICE const float* logits_of(int chain) const {
        return in.chain_logits[chain] + (long long)(in.slot[chain] + a.step) * a.columns;
    }
    DEVICE void load_early() {
        if (in.chains == 0) return;
        const bool in_first = a.step < in.size[0];
        const float* logits = logits_of(0);
#pragma unroll
        for (int i = 0; i < EARLY; i++) {
            const int number = first + i * stride;
            if (number >= a.draft_vocab) break;
            early_row[i] = markov_row(number)[lane % LANES];
            if (in_first) early_logit[i] = load_fresh(logits + number);
        }
    }
    DEVICE int number_of(u64 best) const { return (int)~(u32)best; }
    DEVICE u64* best_at(int chain, int step) const { return a.best + chain * MAX_BLOCK + step; }

    DEVICE void load_pairs() const {
        for (int chain = 0; chain < in.chains; chain++) {
            if (a.step >= in.size[chain]) continue;
            const int before = a.step ? number_of(load_fresh(best_at(chain, a.step - 1))) : in.previous[chain];
            for (int i = threadIdx.x; i < a.rank; i += THREADS)
                pairs[chain * a.rank + i] = as_float((u32)a.markov_in[(long long)before * a.rank + i] << 16);
        }
        sync_block();
    }
    DEVICE static float product(const uint4& w, const float* p) {
        const float low = low_bf16(w.x) * p[0] + high_bf16(w.x) * p[1] + low_bf16(w.y) * p[2] + high_bf16(w.y) * p[3];
        return low + (low_bf16(w.z) * p[4] + high_bf16(w.z) * p[5] + low_bf16(w.w) * p[6] + high_bf16(w.w) * p[7]);
    }
    // By 8 lanes; row: the first piece of this lane.
    DEVICE float markov(int number, const float* pair, const uint4& row) const {
        float sum = product(row, pair + lane % LANES * 8);
        for (int i = lane % LANES + LANES; i < a.rank / 8; i += LANES) sum += product(markov_row(number)[i], pair + i * 8);
        for (int mask = LANES / 2; mask; mask >>= 1) sum += shuffle_xor(sum, mask);
        return sum;
    }
    DEVICE u64 key_of(int number, float score, float inverse_temperature, const NoiseKey& noise) const {
        if (number >= a.draft_vocab) return 0;
        if (inverse_temperature > 0)
            score = (float)((double)(score * inverse_temperature) + gumbel(noise.bits((u32)a.ids[number])));
        return (u64)rank_of(score) << 32 | (u32)~number;  // of equals the first
    }
    DEVICE void find_best(int chain) const {
        const float inverse_temperature = in.inverse_temperature[chain], *pair = pairs + chain * a.rank;
        const NoiseKey noise(in.key[chain][a.step][0], in.key[chain][a.step][1]);
        const float* logits = logits_of(chain);
        const int warp_first = first - lane / LANES;  // the same for all lanes, which meet in every turn
        u64 best = 0;
#pragma unroll
        for (int i = 0; i < EARLY; i++) {
            if (warp_first + i * stride >= a.draft_vocab) break;
            const int number = first + i * stride;
            const float added = markov(number < a.draft_vocab ? number : 0, pair, early_row[i]);
            const float logit = number >= a.draft_vocab ? 0 : chain == 0 ? early_logit[i] : load_fresh(logits + number);
            const u64 key = key_of(number, logit + added, inverse_temperature, noise);
            best = key > best ? key : best;
        }
        for (int i = EARLY; warp_first + i * stride < a.draft_vocab; i++) {
            const int number = first + i * stride, some = number < a.draft_vocab ? number : 0;
            const float added = markov(some, pair, markov_row(some)[lane % LANES]);
            const u64 key = key_of(number, load_fresh(logits + some) + added, inverse_temperature, noise);
            best = key > best ? key : best;
        }
        for (int mask = 16; mask; mask >>= 1) {
            const u64 other = shuffle_xor(best, mask);
            best = other > best ? other : best;
        }
        if (lane == 0) tops[warp] = best;
        sync_block();
        if (threadIdx.x == 0) {
            for (int i = 1; i < WARPS; i++) best = tops[i] > best ? tops[i] : best;
            atomic_max(best_at(chain, a.step), best);
        }
        sync_block();
    }
    DEVICE void find_sure() const {  // by one block
        for (int chain = warp; chain < in.chains; chain += WARPS) {
            if (a.step >= in.size[chain]) continue;
            float sum = 0;
            for (int i = lane; i < a.rank; i += 32) sum += pairs[chain * a.rank + i] * a.weight[i];
            sum = warp_sum(sum) + load_fresh(in.chain_sure[chain] + in.slot[chain] + a.step);
            if (lane == 0) a.sure[chain * MAX_BLOCK + a.step] = sum;
        }
    }
    // The last block to arrive tells the host.
    DEVICE void publish_chains() const {
        sync_block();
        if (threadIdx.x == 0) *nth = arrive(a.arrived);
        sync_block();
        if (*nth != gridDim.x - 1) return;
        for (int i = threadIdx.x; i < in.chains * MAX_BLOCK; i += THREADS) {
            const int chain = i / MAX_BLOCK, step = i % MAX_BLOCK;
            if (step >= in.size[chain]) continue;
            a.host->token[chain][step] = a.ids[number_of(load_fresh(best_at(chain, step)))];
            a.host->sure[chain][step] = load_fresh(a.sure + i);
        }
        sync_block();
        if (threadIdx.x > 0) return;
        *a.arrived = 0;
        publish(&a.host->number, in.number);
    }

    DEVICE void run() {
        if (a.step > 0) {
            let_next_kernel_start();
            load_early();
            wait_for_previous_kernel();
        } else {
            wait_for_previous_kernel();
            let_next_kernel_start();
            load_early();
        }
        load_pairs();
        for (int chain = 0; chain < in.chains; chain++)
            if (a.step < in.size[chain]) find_best(chain);
        if (blockIdx.x == 0) find_sure();
        if (a.step == a.steps - 1) publish_chains();
    }
};
