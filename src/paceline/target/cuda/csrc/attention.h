// Attention of a few rows over paged keys, in fixed chunks of keys by position (FlashDecoding, with tree paths).
//
// `attend` computes for each chunk of 128 keys a partial result: the weighted values, the largest score and the sum of
// weights. `combine` adds a row's partial results in the order of positions. Chunks, the 32 keys of a warp and every
// sum are cut by position alone, so a row's bits depend on neither the rows nor the sequences around it.
#pragma once
#include "pass.h"

struct Attention {
    const u16* queries;  // [rows, heads, head_dim], scaled by log2(e) / sqrt(head_dim)
    KvCache cache;
    const int* tables;   // [sequence's table, max_pages]
    const PassInput* input;
    float* partial;      // [heads, max_parts, head_dim]
    float2* weight;      // [heads, max_parts]: the largest score (base 2), the sum of weights relative to it
    u16* out;            // [rows, heads * head_dim] bf16
    int heads, kv_heads, max_pages, max_parts;
    int window;          // keys a row sees, its own included; 0: all
};

// One chunk of one sequence for one key head. A chunk that holds keys of the pass itself comes once for each path.
struct ChunkTask {
    int sequence = -1;  // < 0: none
    int kv_head, chunk;
    int path;  // < 0: every key is found through the page table
    int first_row, row_count, length, last_position, first_path, table;
    int pages[2];

    DEVICE bool exists() const { return sequence >= 0; }
};

// The tasks of a pass, numbered: sequence by sequence, head by head, chunk by chunk. Each lane counts those of two sequences.
struct TaskList {
    static constexpr int PER_LANE = MAX_SEQUENCES / 32;

    const Attention& a;
    int per_head[PER_LANE], sum[PER_LANE];  // of sequence lane + 32 * i: tasks of one head; of it and all before it
    int count;                              // of all

    DEVICE TaskList(const Attention& a) : a(a), count(0) {
        const PassInput& in = *a.input;
        const int lane = threadIdx.x & 31, sequences = in.sequences;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const int s = lane + 32 * i, length = in.length[s];
            const int own = (in.last_position[s] / KEY_CHUNK - length / KEY_CHUNK + 1) * in.path_count[s];
            per_head[i] = s < sequences ? shared_chunks(length) + own : 0;
            sum[i] = per_head[i] * a.kv_heads;
            for (int step = 1; step < 32; step <<= 1) {  // inclusive prefix sum
                const int other = shuffle(sum[i], lane < step ? lane : lane - step);
                sum[i] += lane < step ? 0 : other;
            }
            sum[i] += count;
            count = shuffle(sum[i], 31);
        }
    }
    // Where the earliest row's window begins, and how many chunks follow that all paths share.
    DEVICE int first_chunk(int length) const {
        return a.window && length >= a.window ? (length - a.window + 1) / KEY_CHUNK : 0;
    }
    DEVICE int shared_chunks(int length) const { return length / KEY_CHUNK - first_chunk(length); }

    DEVICE ChunkTask find(int index) const {
        ChunkTask task;
        if (index >= count) return task;
        const PassInput& in = *a.input;
        int s = 0, each = 0, at = 0;
        bool found = false;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            const u32 here = warp_ballot(index < sum[i]);
            const int lane = here ? lowest_bit(here) : 31, tasks = shuffle(per_head[i], lane), end = shuffle(sum[i], lane);
            if (here && !found) s = lane + 32 * i, each = tasks, at = index - end + tasks * a.kv_heads, found = true;
        }
        const int length = in.length[s], before = shared_chunks(length), paths = in.path_count[s], nth = at % each;
        task.sequence = s, task.kv_head = at / each;
        task.chunk = first_chunk(length) + (nth < before ? nth : before + (nth - before) / paths);
        task.path = nth < before ? -1 : (nth - before) % paths;
        task.first_row = in.first_row[s], task.row_count = in.row_count[s], task.length = length;
        task.last_position = in.last_position[s], task.first_path = in.first_path[s], task.table = in.table[s];
        return with_pages(task);
    }
    // The task after `task`, whose number is `index`; `end`: no task has this number.
    DEVICE ChunkTask next(const ChunkTask& task, int index, int end) const {
        if (!task.exists() || index >= end || (task.chunk + 2) * KEY_CHUNK > task.length)
            return find(index < end ? index : count);
        ChunkTask following = task;
        following.chunk++;
        return with_pages(following);
    }
    DEVICE ChunkTask with_pages(ChunkTask task) const {
        const int page = task.chunk * (KEY_CHUNK / PAGE), *table = a.tables + (long long)task.table * a.max_pages;
        task.pages[0] = table[page], task.pages[1] = table[page + 1 < a.max_pages ? page + 1 : page];
        return task;
    }
};

// Where the keys or values of a chunk are: through the page table, those of the pass itself through path_slot.
template <int D> struct PagedKeys {
    const PassInput& in;
    const ChunkTask& task;
    const u16* from;
    int own, deepest;  // the first key of the chunk that path_slot knows; the last there is

    DEVICE PagedKeys(const Attention& a, const ChunkTask& task, int which)
        : in(*a.input), task(task),
          from((which ? a.cache.values : a.cache.keys) + task.kv_head * a.cache.head_stride),
          own(task.length - task.chunk * KEY_CHUNK), deepest(task.last_position - task.length) {}
    DEVICE const u16* cached_row(int key, int page) const {
        return from + ((long long)page * PAGE + key % PAGE) * D;
    }
    DEVICE const u16* row(int key, int page) const {
        int slot = page * PAGE + key % PAGE;
        if (task.path >= 0 && key >= own) {
            const int depth = key - own < deepest ? key - own : deepest;
            slot = in.path_slot[task.first_path + task.path][depth];
        }
        return from + (long long)slot * D;
    }
};

// A chunk's keys and values in shared memory in pieces of 8, placed so that lanes meet in no bank.
template <int D> DEVICE int key_at(int key, int piece) { return key * D + (piece ^ (key & 1) << 2) * 8; }
template <int D> DEVICE int value_at(int key, int piece) { return key * D + (piece ^ (key & 7)) * 8; }

// A block of 8 warps: 4 share the keys of a chunk, 32 each, for 16 query rows; the other 4 for the next 16. A query row
// is a row of the pass and one of the heads that share the key head. The next chunk loads while one is worked on.
template <int D, class Keys = PagedKeys<D>, class Argument = Attention> struct AttendKernel {
    static constexpr int PIECES = D / 8, Q_PIECES = D / 32, KEYS = KEY_CHUNK * D;
    static constexpr int OUT_STRIDE = D + 8;

    const Argument& argument;
    const Attention& a;
    const PassInput& in;
    const int lane, warp, quarter, half, group, place, share;
    u16* chunks;   // [2 stages][keys, values][KEY_CHUNK][D]
    float* outs;   // [WARPS][16][OUT_STRIDE]
    float *tops, *totals;  // [WARPS][16]
    int *positions, *paths, *parts;  // [MAX_ROWS] of the pass
    uint4 query[Q_PIECES][2];
    int position[2];  // of this lane's query rows

    DEVICE AttendKernel(const Argument& argument, const Attention& a)
        : argument(argument), a(a), in(*a.input), lane(threadIdx.x & 31), warp(threadIdx.x >> 5), quarter(warp & 3), half(warp >> 2),
          group(lane >> 2), place(lane & 3), share(a.heads / a.kv_heads), chunks((u16*)shared_memory),
          outs((float*)(chunks + 4 * KEYS)), tops(outs + WARPS * 16 * OUT_STRIDE), totals(tops + WARPS * 16),
          positions((int*)(totals + WARPS * 16)), paths(positions + MAX_ROWS), parts(paths + MAX_ROWS) {
        if (threadIdx.x < MAX_ROWS) {
            positions[threadIdx.x] = in.position[threadIdx.x];
            paths[threadIdx.x] = in.path[threadIdx.x];
            parts[threadIdx.x] = in.part[threadIdx.x];
        }
        sync_block();
    }

    // Keys that were there before this pass may be fetched into L2 before the kernel before has ended.
    DEVICE void prefetch(const ChunkTask& task) const {
        const int key = threadIdx.x % KEY_CHUNK;
        if (!task.exists() || task.chunk * KEY_CHUNK + key >= task.length) return;
        const u16* row = Keys(argument, task, threadIdx.x >= KEY_CHUNK).cached_row(key, key < PAGE ? task.pages[0] : task.pages[1]);
        for (int i = 0; i < D; i += 64) prefetch_l2(row + i);
    }

    // Two copy groups: keys, then values.
    DEVICE void send(const ChunkTask& task, int stage) const {
#pragma unroll
        for (int which = 0; which < 2; which++) {
            const Keys keys(argument, task, which);
            u16* to = chunks + (stage * 2 + which) * KEYS;
            if (task.exists())
#pragma unroll
                for (int i = 0; i < PIECES / 2; i++) {
                    const int key = i * (THREADS / PIECES) + threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
                    copy_async(to + (which ? value_at<D>(key, piece) : key_at<D>(key, piece)),
                               keys.row(key, task.pages[i >= PIECES / 4]) + piece * 8);
                }
            close_copy_group();
        }
    }

    DEVICE void load_queries(const ChunkTask& task, int first, int count) {
        if (first >= count) return;
        for (int i = 0; i < 2; i++) {
            const int query_row = first + group + i * 8;
            position[i] = -1;
            for (int p = 0; p < Q_PIECES; p++) query[p][i] = make_uint4(0, 0, 0, 0);
            if (query_row >= count) continue;
            const int row = task.first_row + query_row / share, head = task.kv_head * share + query_row % share;
            position[i] = positions[row];
            const u16* from = a.queries + ((long long)row * a.heads + head) * D + place * 8;
            for (int p = 0; p < Q_PIECES; p++) query[p][i] = load_fresh16(from + p * 32);
        }
    }

    // score[j][i]: key 8 * j + 2 * place + (i & 1) of this warp's 32, query row group + 8 * (i >> 1).
    DEVICE void score_keys(float (&score)[4][4], const u16* keys) const {
#pragma unroll
        for (int j = 0; j < 4; j++) score[j][0] = score[j][1] = score[j][2] = score[j][3] = 0;
#pragma unroll
        for (int p = 0; p < Q_PIECES; p++) {
            const uint4 &upper = query[p][0], &lower = query[p][1];
            uint4 key[4];
#pragma unroll
            for (int j = 0; j < 4; j++) key[j] = *(const uint4*)(keys + key_at<D>(quarter * 32 + j * 8 + group, p * 4 + place));
#pragma unroll
            for (int j = 0; j < 4; j++) mma(score[j], upper.x, lower.x, upper.y, lower.y, key[j].x, key[j].y);
#pragma unroll
            for (int j = 0; j < 4; j++) mma(score[j], upper.z, lower.z, upper.w, lower.w, key[j].z, key[j].w);
        }
    }
    DEVICE void mask_and_find_top(float (&score)[4][4], float (&top)[2], int first_key) const {
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int key = first_key + j * 8 + 2 * place + (i & 1), row = position[i >> 1];
                if (key > row || (a.window && key <= row - a.window)) score[j][i] = -INFINITE;
                top[i >> 1] = fmaxf(top[i >> 1], score[j][i]);
            }
    }
    DEVICE void weigh(float (&score)[4][4], float (&top)[2], float (&total)[2]) const {
        for (int i = 0; i < 2; i++) {
            top[i] = fmaxf(top[i], shuffle_xor(top[i], 1));
            top[i] = fmaxf(top[i], shuffle_xor(top[i], 2));
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                score[j][i] = top[i >> 1] == -INFINITE ? 0.0f : exp2_approx(score[j][i] - top[i >> 1]);
                total[i >> 1] += score[j][i];
            }
        for (int i = 0; i < 2; i++) {
            total[i] += shuffle_xor(total[i], 1);
            total[i] += shuffle_xor(total[i], 2);
        }
    }
    DEVICE void sum_values(const float (&weight)[4][4], const u16* values) const {
        float out[PIECES][4];
#pragma unroll
        for (int n = 0; n < PIECES; n++) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0;
#pragma unroll
        for (int k16 = 0; k16 < 2; k16++) {
            const float *left = weight[2 * k16], *right = weight[2 * k16 + 1];
            const u32 a0 = pack_bf16(left[0], left[1]), a1 = pack_bf16(left[2], left[3]);
            const u32 a2 = pack_bf16(right[0], right[1]), a3 = pack_bf16(right[2], right[3]);
            const int key = quarter * 32 + k16 * 16 + (lane >> 3 & 1) * 8 + (lane & 7);
#pragma unroll
            for (int n = 0; n < PIECES; n += 2) {
                u32 b[4];
                load_transposed(b, values + value_at<D>(key, n + (lane >> 4)));
                mma(out[n], a0, a1, a2, a3, b[0], b[1]);
                mma(out[n + 1], a0, a1, a2, a3, b[2], b[3]);
            }
        }
        float* to = outs + warp * 16 * OUT_STRIDE;
#pragma unroll
        for (int n = 0; n < PIECES; n++)
#pragma unroll
            for (int i = 0; i < 4; i += 2)
                *(float2*)(to + (group + i * 4) * OUT_STRIDE + n * 8 + 2 * place) = make_float2(out[n][i], out[n][i + 1]);
    }

    // Adds what the 4 warps of a half found in their keys, in order, for the 32 query rows from `first` on.
    DEVICE void store_partial(const ChunkTask& task, int first, int count) const {
        for (int at = threadIdx.x; at < 32 * D / 4; at += THREADS) {
            const int which = at / (16 * D / 4), row16 = at / (D / 4) % 16, d = at % (D / 4) * 4;
            const int query_row = first + which * 16 + row16;
            if (query_row >= count) break;
            const int row = task.first_row + query_row / share, head = task.kv_head * share + query_row % share;
            if ((task.path >= 0 && paths[row] != task.path) || task.chunk > positions[row] / KEY_CHUNK) continue;
            float top = -INFINITE, total = 0;
            for (int i = 0; i < 4; i++) top = fmaxf(top, tops[(which * 4 + i) * 16 + row16]);
            float4 sum = make_float4(0, 0, 0, 0);
            for (int i = 0; i < 4; i++) {
                const int from = (which * 4 + i) * 16 + row16;
                const float w = tops[from] == -INFINITE ? 0.0f : exp2_approx(tops[from] - top);
                const float4 v = *(const float4*)(outs + from * OUT_STRIDE + d);
                sum.x += w * v.x, sum.y += w * v.y, sum.z += w * v.z, sum.w += w * v.w;
                total += w * totals[from];
            }
            const long long to = (long long)head * a.max_parts + parts[row] + task.chunk;
            *(float4*)(a.partial + to * D + d) = sum;
            if (d == 0) a.weight[to] = make_float2(top, total);
        }
    }

    DEVICE void run() {
        const TaskList tasks(a);
        // Where one sequence leaves blocks idle, each task is shared by several, which take 32 query rows each.
        const int sharers = (in.row_count[0] * share + 31) / 32;
        const int split = in.sequences == 1 && tasks.count * sharers <= gridDim.x ? sharers : 1;
        const int each = (tasks.count + gridDim.x - 1) / gridDim.x;
        const int first_row = split > 1 ? blockIdx.x % split * 32 : 0;
        const int end = split > 1 ? blockIdx.x / split + 1 : each * (blockIdx.x + 1);
        int index = split > 1 ? blockIdx.x / split : each * blockIdx.x;
        ChunkTask task = tasks.next(ChunkTask(), index, end), next = tasks.next(task, index + 1, end);
        ChunkTask later = tasks.next(next, index + 2, end);
        prefetch(task), prefetch(next);

        wait_for_previous_kernel();
        if (task.exists()) send(task, 0);
        int sequence = -1, kv_head = -1;  // whose queries are loaded
        for (int stage = 0; task.exists(); stage ^= 1, index++) {
            const u16 *keys = chunks + stage * 2 * KEYS, *values = keys + KEYS;
            const int count = task.row_count * share;
            const int rows_end = split > 1 && first_row + 32 < count ? first_row + 32 : count;
            if (task.sequence != sequence || task.kv_head != kv_head) load_queries(task, first_row + half * 16, count);
            sequence = task.sequence, kv_head = task.kv_head;
            send(next, stage ^ 1);
            prefetch(later);
            const ChunkTask last = tasks.next(later, index + 3, end);
            for (int base = first_row; base < rows_end; base += 32) {
                const int mine = base + half * 16;
                float score[4][4], top[2] = {-INFINITE, -INFINITE}, total[2] = {0, 0};
                if (base == first_row) {
                    wait_copy_groups<3>();  // the keys are here
                    sync_block();
                }
                if (mine < count) {
                    score_keys(score, keys);
                    mask_and_find_top(score, top, task.chunk * KEY_CHUNK + quarter * 32);
                }
                if (rows_end > first_row + 32)  // by every warp: an idle one needs its first rows again, too
                    load_queries(task, base + 32 < rows_end ? mine + 32 : first_row + half * 16, count);
                if (mine < count) weigh(score, top, total);
                if (base == first_row) {
                    wait_copy_groups<2>();  // the values too
                    sync_block();
                }
                if (mine < count) {
                    sum_values(score, values);
                    if (place == 0)
                        for (int i = 0; i < 2; i++) {
                            tops[warp * 16 + group + i * 8] = top[i];
                            totals[warp * 16 + group + i * 8] = total[i];
                        }
                }
                sync_block();
                store_partial(task, base, count);
                sync_block();
            }
            task = next, next = later, later = last;
        }
    }
};

// One row and head by a block of 4 warps: warp w takes chunks w, w + 4, ... from the row's first, 16 at a time.
template <int D> struct CombineKernel {
    static constexpr int PER_LANE = D / 32, AT_ONCE = 16, COMBINE_WARPS = 4;

    DEVICE static void run(const Attention& a) {
        let_next_kernel_start();
        const int row = blockIdx.x / a.heads, head = blockIdx.x % a.heads;
        if (row >= a.input->rows) {
            wait_for_previous_kernel();
            return;
        }
        const int position = a.input->position[row];
        const int first = a.window && position >= a.window ? (position - a.window + 1) / KEY_CHUNK : 0;
        const int count = position / KEY_CHUNK + 1 - first;
        const long long base = (long long)head * a.max_parts + a.input->part[row] + first;
        wait_for_previous_kernel();

        float* sums = (float*)shared_memory;  // [COMBINE_WARPS][D], then the totals
        const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
        float top = -INFINITE, out[PER_LANE], total = 0;
        for (int e = 0; e < PER_LANE; e++) out[e] = 0;
        for (int block = 0; block < count; block += COMBINE_WARPS * AT_ONCE) {
            float part[AT_ONCE][PER_LANE];
            float2 weight[AT_ONCE];
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                const int chunk = block + j * COMBINE_WARPS + warp;
                if (chunk >= count) break;
                weight[j] = load_fresh(a.weight + base + chunk);
                load_fresh_floats<PER_LANE>(part[j], a.partial + (base + chunk) * D + lane * PER_LANE);
            }
            if (block == 0) {
                for (int i = lane; i < count; i += 32) top = fmaxf(top, load_fresh(a.weight + base + i).x);
                for (int mask = 16; mask; mask >>= 1) top = fmaxf(top, shuffle_xor(top, mask));
            }
#pragma unroll
            for (int j = 0; j < AT_ONCE; j++) {
                if (block + j * COMBINE_WARPS + warp >= count) break;
                const float w = exp2_approx(weight[j].x - top);
                total += w * weight[j].y;
#pragma unroll
                for (int e = 0; e < PER_LANE; e++) out[e] += w * part[j][e];
            }
        }
        for (int e = 0; e < PER_LANE; e++) sums[warp * D + lane * PER_LANE + e] = out[e];
        if (lane == 0) sums[COMBINE_WARPS * D + warp] = total;
        sync_block();
        if (warp > 0) return;
        const float* totals = sums + COMBINE_WARPS * D;
        total = totals[0] + totals[1] + totals[2] + totals[3];
        for (int e = 0; e < PER_LANE; e++) {
            const int d = lane * PER_LANE + e;
            const float v = sums[d] + sums[D + d] + sums[2 * D + d] + sums[3 * D + d];
            a.out[(long long)blockIdx.x * D + d] = to_bf16(v / total);
        }
    }
};

// A head of a product's float32 result, a warp's: each lane has elements d and d + D / 2, which rotate together.
template <int D> struct HeadRow {
    static constexpr int HALF = D / 2, PER_LANE = HALF / 32;
    float low[PER_LANE], high[PER_LANE];
    const int lane = threadIdx.x & 31;

    DEVICE HeadRow(const float* from) {
        for (int e = 0; e < PER_LANE; e++) {
            const int d = lane + 32 * e;
            low[e] = load_fresh(from + d), high[e] = load_fresh(from + d + HALF);
        }
    }
    DEVICE void normalise(const float* norm, float norm_eps) {
        float squares = 0;
        for (int e = 0; e < PER_LANE; e++) squares += low[e] * low[e] + high[e] * high[e];
        const float factor = rsqrtf(warp_sum(squares) * (1.0f / D) + norm_eps);
        for (int e = 0; e < PER_LANE; e++) {
            const int d = lane + 32 * e;
            low[e] = low[e] * factor * norm[d], high[e] = high[e] * factor * norm[d + HALF];
        }
    }
    DEVICE void rotate(const float* all_cos, const float* all_sin, int position) {
        for (int e = 0; e < PER_LANE; e++) {
            const long long at = (long long)position * HALF + lane + 32 * e;
            const float x = low[e], y = high[e], cos = all_cos[at], sin = all_sin[at];
            low[e] = x * cos - y * sin, high[e] = y * cos + x * sin;
        }
    }
    DEVICE void store(u16* to, float scale) const {
        for (int e = 0; e < PER_LANE; e++) {
            const int d = lane + 32 * e;
            to[d] = to_bf16(low[e] * scale), to[d + HALF] = to_bf16(high[e] * scale);
        }
    }
};

// Queries and keys that have a norm of their own (Qwen 3): norm, rotary positions, queries scaled, keys and values to
// their slots. A warp for each row and head of the product's float32 result.
struct HeadNorm {
    const float* qkv;  // [rows, heads + 2 * kv_heads, head_dim]
    const float *query_norm, *key_norm;  // [head_dim]
    const float *cos, *sin;
    const PassInput* input;
    u16* queries;
    KvCache cache;
    int heads, kv_heads;
    float norm_eps, query_scale;
};

template <int D> DEVICE void normalise_head(const HeadNorm& a) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int heads = a.heads + 2 * a.kv_heads, item = blockIdx.x * 4 + (threadIdx.x >> 5);
    const int row = item / heads, head = item % heads, kv_head = (head - a.heads) % a.kv_heads;
    if (row >= a.input->rows) return;
    const bool is_query = head < a.heads, is_value = head >= a.heads + a.kv_heads;
    HeadRow<D> values(a.qkv + (long long)item * D);
    if (!is_value) {
        values.normalise(is_query ? a.query_norm : a.key_norm, a.norm_eps);
        values.rotate(a.cos, a.sin, a.input->position[row]);
    }
    const int slot = a.input->slot[row];
    u16* to = is_query ? a.queries + ((long long)row * a.heads + head) * D
                       : (is_value ? a.cache.values : a.cache.keys) + kv_head * a.cache.head_stride + (long long)slot * D;
    if (is_query || slot >= 0) values.store(to, is_query ? a.query_scale : 1.0f);
}
