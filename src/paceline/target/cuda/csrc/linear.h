// Products of 8, 16, 32 or 64 rows with a weight [features, inputs], row-major, read once.
//
// Every product is mma.m16n8k16 with 16 features as M and 8 rows as N. The inputs are cut over the 8 warps of a block in
// a fixed pattern: warp w sums groups w, w + 8, ... in order, and the 8 sums are added in order. More rows are more
// mma beside the first, never other ones, so a row's bits depend on nothing but the row. This needs -fmad=false: the
// compiler would contract a product and a sum in one row count and not in another.
//
// The root-mean-square norm before a product costs no kernel: whoever wrote x multiplied it by the norm's weight and
// collected its sum of squares, and the factor 1 / rms multiplies the result.
#pragma once
#include "pass.h"

enum WeightType { BF16, INT8, FP8, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };

struct Linear {
    const void* weight;
    const float* scale;  // [features] of INT8 and FP8
    const float* bias;   // [features] or null
    const u16* x;        // [rows, inputs] bf16
    const u64* square_sum;  // [rows] of what x was made of, fixed point; null: no norm
    int inputs;
    int first_feature;     // of the weight among those of the product, which may come in parts of several types
    int starts_next_late;  // 1: the next kernel may start only after this one has waited
    float inverse_width, norm_eps;
    const PassInput* input;
    // queries, keys and values
    u16* queries;            // [rows, heads, head_dim]
    KvCache cache;
    const float *cos, *sin;  // [position, head_dim / 2]
    int head_dim, heads, kv_heads;
    float query_scale;
    // the residual stream
    float* residual;         // [rows, columns]
    const float* next_norm;  // [columns] weight of the norm that comes next
    u64* next_square_sum;    // [rows]
    float* tap;              // [rows, columns] a copy of the stream for whoever asked; or null
    // results
    u16* out;        // [rows, columns] bf16
    float* out_f32;  // [rows, columns]
    int columns;
    float* const* out_rows;  // [rows] where each row goes instead; null: nowhere
    // passes of several groups of MAX_ROWS rows, whose buffers follow one another
    int row_groups;
    int square_stride;  // sums of squares from one group to the next
    const u16* sums;    // [rows, features] bf16, where torch has multiplied; else null
    int features;       // of the whole product

    DEVICE Linear group(int which) const {
        const long long row = (long long)which * MAX_ROWS;
        Linear own = *this;
        own.input += which, own.x += row * inputs;
        if (square_sum) own.square_sum += which * square_stride;
        own.next_square_sum += which * square_stride;
        own.queries += row * heads * head_dim;
        own.residual += row * columns, own.out += row * columns, own.out_f32 += row * columns;
        if (tap) own.tap += row * columns;
        own.sums += row * features;
        return own;
    }
};

// ---- epilogues: what becomes of a sum
//
// An epilogue object serves one result of one thread. `load_constants` runs while the kernel before may still be
// working and reads weights only; `load_inputs` runs after it has ended. PAIRED epilogues take the sums of two tiles.

template <WeightType W> DEVICE float scale_of(const Linear& a, int feature) {
    return W == INT8 || W == FP8 ? a.scale[feature] : 1.0f;
}

// Rotary positions (half rotation) for queries and keys; keys and values go to their slots of the cache.
template <WeightType W> struct QkvEpilogue {
    static constexpr bool PAIRED = true;
    float low_scale, high_scale, low_bias = 0, high_bias = 0, cos, sin;
    int slot;

    // Tiles come in pairs that rotate together: features d and d + head_dim / 2 of a head.
    DEVICE static int first_feature(const Linear& a, int tile) {
        const int pair = tile >> 1, pairs_per_head = a.head_dim / 32;
        return pair / pairs_per_head * a.head_dim + pair % pairs_per_head * 16 + (tile & 1) * (a.head_dim / 2);
    }
    DEVICE void load_constants(const Linear& a, int low, int high) {
        low_scale = scale_of<W>(a, low), high_scale = scale_of<W>(a, high);
        if (a.bias) low_bias = a.bias[low], high_bias = a.bias[high];
    }
    DEVICE void load_inputs(const Linear& a, int feature, int row) {
        slot = a.input->slot[row];
        const bool rotates = feature < (a.heads + a.kv_heads) * a.head_dim;
        const long long at = (long long)a.input->position[row] * (a.head_dim / 2) + feature % a.head_dim;
        cos = rotates ? a.cos[at] : 1.0f, sin = rotates ? a.sin[at] : 0.0f;
    }
    DEVICE void store(const Linear& a, int feature, int row, float low, float high) const {
        low = low * low_scale + low_bias, high = high * high_scale + high_bias;
        const float left = low * cos - high * sin, right = high * cos + low * sin;
        const int head = feature / a.head_dim, d = feature % a.head_dim, half = a.head_dim / 2;
        if (head < a.heads) {
            u16* to = a.queries + ((long long)row * a.heads + head) * a.head_dim + d;
            to[0] = to_bf16(left * a.query_scale), to[half] = to_bf16(right * a.query_scale);
        } else if (slot >= 0) {
            const int kv_head = (head - a.heads) % a.kv_heads;
            u16* to = head - a.heads < a.kv_heads ? a.cache.keys : a.cache.values;
            to += kv_head * a.cache.head_stride + (long long)slot * a.head_dim + d;
            to[0] = to_bf16(left), to[half] = to_bf16(right);
        }
    }
};

// silu(gate) * up.
template <WeightType W> struct GatedEpilogue {
    static constexpr bool PAIRED = true;
    float gate_scale, up_scale;

    DEVICE static int first_feature(const Linear& a, int tile) {
        return (tile >> 1) * 16 + (tile & 1) * a.columns;
    }
    DEVICE void load_constants(const Linear& a, int gate, int up) {
        gate_scale = scale_of<W>(a, gate), up_scale = scale_of<W>(a, up);
    }
    DEVICE void load_inputs(const Linear&, int, int) {}
    DEVICE void store(const Linear& a, int feature, int row, float gate, float up) const {
        gate = gate * gate_scale, up = up * up_scale;
        a.out[(long long)row * a.columns + feature] = to_bf16(gate / (1 + exp2f(-1.44269504f * gate)) * up);
    }
};

// Adds to the residual stream; writes it times the next norm's weight, and its sum of squares.
template <WeightType W> struct ResidualEpilogue {
    static constexpr bool PAIRED = false;
    float scale, bias = 0, norm_weight, before;

    DEVICE static int first_feature(const Linear&, int tile) { return tile * 16; }
    DEVICE void load_constants(const Linear& a, int feature, int) {
        scale = scale_of<W>(a, feature), norm_weight = a.next_norm[feature];
        if (a.bias) bias = a.bias[feature];
    }
    DEVICE void load_inputs(const Linear& a, int feature, int row) {
        before = load_fresh(a.residual + (long long)row * a.columns + feature);
    }
    DEVICE void store(const Linear& a, int feature, int row, float sum, float) const {
        const long long at = (long long)row * a.columns + feature;
        const float v = before + (sum * scale + bias);
        a.residual[at] = v;
        a.out[at] = to_bf16(v * norm_weight);
        if (a.tap) a.tap[at] = v;
        float squares = v * v;  // of the 16 features that 16 neighbouring lanes hold
        for (int mask = 8; mask; mask >>= 1) squares += shuffle_xor(squares, mask);
        if (feature % 16 == 0) atomic_add(a.next_square_sum + row, to_fixed(squares));
    }
};

// Writes the sums in float32: logits, or queries and keys that have a norm of their own before they rotate.
template <WeightType W> struct StoreEpilogue {
    static constexpr bool PAIRED = false;
    float scale, bias = 0;

    DEVICE static int first_feature(const Linear&, int tile) { return tile * 16; }
    DEVICE void load_constants(const Linear& a, int feature, int) {
        scale = scale_of<W>(a, feature);
        if (a.bias) bias = a.bias[feature];
    }
    DEVICE void load_inputs(const Linear&, int, int) {}
    DEVICE void store(const Linear& a, int feature, int row, float sum, float) const {
        a.out_f32[(long long)row * a.columns + feature] = sum * scale + bias;
    }
};

// Writes each row in float32 to a place of its own.
template <WeightType W> struct StoreRowsEpilogue : StoreEpilogue<W> {
    float* to;

    DEVICE void load_inputs(const Linear& a, int, int row) { to = (float*)load_fresh((const u64*)(a.out_rows + row)); }
    DEVICE void store(const Linear&, int feature, int, float sum, float) const {
        if (to) to[feature] = sum * this->scale + this->bias;
    }
};

// ---- weights of 8 bits

// Four int8 to two pairs of bf16, exactly: (128 + the low 7 bits) - (128, or 256 where the sign bit is set).
DEVICE void widen_int8(u32 four, u32& low, u32& high) {
    const u32 a = byte_permute(four, 0x4140), b = byte_permute(four, 0x4342);
    low = subtract_bf16x2(and_or(a, 0x007F007Fu, 0x43004300u), and_or(a, 0x00800080u, 0x43004300u));
    high = subtract_bf16x2(and_or(b, 0x007F007Fu, 0x43004300u), and_or(b, 0x00800080u, 0x43004300u));
}

// ---- the product

// How a block of TILES tiles of 16 features works for ROW_TILES * 8 rows.
//
// Weights and x go through a ring of stages in shared memory, each warp its own: 128 bytes of each row at a time, the
// length of a cache line. (Loads into registers share six scoreboards: waiting for an old one waits for new ones.) Where
// x is long beside the weights, or two blocks of 32 rows share a multiprocessor, a stage is half as long, so that three
// of them fit. Pieces of 16 bytes swap places between odd and even rows where lanes would meet in a bank.
template <int ROW_TILES, int TILES, WeightType W, int SHARED_KB> struct LinearShape {
    static constexpr int ROWS = ROW_TILES * 8;
    static constexpr bool SHORT = ROWS * (W == INT8 ? 2 : 1) > 32 || (ROWS == 32 && SHARED_KB < 200);
    static constexpr int HALVES = SHORT ? 1 : 2;                  // of 64 bytes of a weight's row, in a stage
    static constexpr int PER_GROUP = 2 / HALVES;                  // stages that a warp takes of one group of inputs
    static constexpr int GROUP = (W == BF16 ? 32 : 64) * HALVES;  // inputs of a stage
    static constexpr int ROW_PIECES = 4 * HALVES;                 // of 16 bytes, in a row of the weight
    static constexpr int X_PIECES = GROUP / 8;                    // likewise of x
    static constexpr int WEIGHT_PIECES = TILES * 16 * ROW_PIECES;  // of a stage
    static constexpr int STAGE_PIECES = WEIGHT_PIECES + ROWS * X_PIECES;
    static constexpr int STAGE_BYTES = 16 * STAGE_PIECES * WARPS;
    static constexpr int FITTING = SHARED_KB * 1024 / STAGE_BYTES;
    static constexpr int STAGES = FITTING < 2 ? 2 : FITTING > 8 ? 8 : FITTING;

    // The place of a piece among those of its row.
    DEVICE static int weight_piece(int row, int piece) { return HALVES == 2 ? piece ^ (row & 1) << 2 : piece; }
    DEVICE static int x_piece(int row, int piece) {
        return W == BF16 ? weight_piece(row, piece) : piece ^ (row & 1);
    }
};

// Weights that lie row by row, as torch has them.
template <int ROW_TILES, int TILES, WeightType W, int SHARED_KB> struct RowMajorProduct {
    using Shape = LinearShape<ROW_TILES, TILES, W, SHARED_KB>;
    static constexpr int ROWS = Shape::ROWS, GROUP = Shape::GROUP, X_PIECES = Shape::X_PIECES, STAGES = Shape::STAGES;
    static constexpr int ROW_PIECES = Shape::ROW_PIECES;

    const Linear& a;
    const int lane, warp;
    const int steps;  // stages that this warp goes through
    const long long weight_row_bytes;
    uint4* const ring;  // [STAGES][STAGE_PIECES] of this warp
    const char* from[TILES];

    DEVICE RowMajorProduct(const Linear& a, uint4* rings)
        : a(a), lane(threadIdx.x & 31), warp(threadIdx.x >> 5),
          steps((a.inputs / GROUP / Shape::PER_GROUP - warp + WARPS - 1) / WARPS * Shape::PER_GROUP),
          weight_row_bytes((long long)a.inputs * (W == BF16 ? 2 : 1)), ring(rings + warp * STAGES * Shape::STAGE_PIECES) {}

    template <class FirstFeature> DEVICE void find_tiles(const FirstFeature& first_feature) {
        for (int j = 0; j < TILES; j++)
            from[j] = (const char*)a.weight + (first_feature(j) + lane / ROW_PIECES) * weight_row_bytes + lane % ROW_PIECES * 16;
    }

    // Which stage's inputs of the row come nth for this warp: whole groups w, w + 8, ... in order.
    DEVICE int stage_of_row(int step) const {
        return (warp + step / Shape::PER_GROUP * WARPS) * Shape::PER_GROUP + step % Shape::PER_GROUP;
    }
    DEVICE void send_weights(int stage, int step) const {
        constexpr int ROWS_AT_ONCE = 32 / ROW_PIECES;
        const int row = lane / ROW_PIECES, piece = lane % ROW_PIECES;
        uint4* to = ring + stage * Shape::STAGE_PIECES + row * ROW_PIECES + Shape::weight_piece(row, piece);
        const long long at = (long long)stage_of_row(step) * (16 * ROW_PIECES);
        for (int j = 0; j < TILES; j++)
            for (int i = 0; i < 16 / ROWS_AT_ONCE; i++)
                copy_weight_async(to + (j * 16 + i * ROWS_AT_ONCE) * ROW_PIECES,
                                  from[j] + i * ROWS_AT_ONCE * weight_row_bytes + at);
    }
    DEVICE void send_x(int stage, int step) const {
        uint4* to = ring + stage * Shape::STAGE_PIECES + Shape::WEIGHT_PIECES;
        const int at = stage_of_row(step) * GROUP;
        for (int tile = 0; tile < ROW_TILES; tile++)
#pragma unroll
            for (int i = 0; i < X_PIECES / 4; i++) {
                const int row = tile * 8 + (i * 32 + lane) / X_PIECES, piece = lane % X_PIECES;
                copy_async(to + row * X_PIECES + Shape::x_piece(row, piece), a.x + (long long)row * a.inputs + at + piece * 8);
            }
    }

    // Which input is which within an mma is free, as long as weight and x agree: a lane takes 16 neighbouring bytes.
    DEVICE void multiply(float (&acc)[TILES][ROW_TILES][4], int stage) const {
        const int group = lane >> 2, place = lane & 3;
        const uint4 *weights = ring + stage * Shape::STAGE_PIECES, *xs = weights + Shape::WEIGHT_PIECES;
#pragma unroll
        for (int half = 0; half < Shape::HALVES; half++) {  // 64 bytes of each row
            const int piece = Shape::weight_piece(group, 4 * half + place);
            constexpr int EACH = W == BF16 ? 1 : 2;  // pieces of x for one of the weight
            uint4 x[ROW_TILES][EACH];
            for (int tile = 0; tile < ROW_TILES; tile++)
                for (int i = 0; i < EACH; i++)
                    x[tile][i] = xs[(tile * 8 + group) * X_PIECES + Shape::x_piece(group, EACH * (4 * half + place) + i)];
#pragma unroll
            for (int j = 0; j < TILES; j++) {
                const uint4 upper = weights[(j * 16 + group) * ROW_PIECES + piece];
                const uint4 lower = weights[(j * 16 + group + 8) * ROW_PIECES + piece];
                const u32 up[4] = {upper.x, upper.y, upper.z, upper.w}, low[4] = {lower.x, lower.y, lower.z, lower.w};
#pragma unroll
                for (int step = 0; step < 2 * EACH; step++) {
                    u32 a0, a1, a2, a3;
                    if constexpr (W == BF16) {
                        a0 = up[2 * step], a1 = low[2 * step], a2 = up[2 * step + 1], a3 = low[2 * step + 1];
                    } else {
                        widen_int8(up[step], a0, a2);
                        widen_int8(low[step], a1, a3);
                    }
#pragma unroll
                    for (int tile = 0; tile < ROW_TILES; tile++) {
                        const uint4& v = x[tile][step / 2];
                        mma(acc[j][tile], a0, a1, a2, a3, step & 1 ? v.z : v.x, step & 1 ? v.w : v.y);
                    }
                }
            }
        }
    }
};

template <int ROW_TILES, int TILES, WeightType W, int SHARED_KB> struct PackedProduct;  // packed.h

template <int ROW_TILES, int TILES, WeightType W, int SHARED_KB> struct ProductOf {
    using Type = PackedProduct<ROW_TILES, TILES, W, SHARED_KB>;
};
template <int ROW_TILES, int TILES, int SHARED_KB> struct ProductOf<ROW_TILES, TILES, BF16, SHARED_KB> {
    using Type = RowMajorProduct<ROW_TILES, TILES, BF16, SHARED_KB>;
};
template <int ROW_TILES, int TILES, int SHARED_KB> struct ProductOf<ROW_TILES, TILES, INT8, SHARED_KB> {
    using Type = RowMajorProduct<ROW_TILES, TILES, INT8, SHARED_KB>;
};

// A product, then the sums of its warps in order, then an epilogue.
template <int ROW_TILES, int TILES, WeightType W, int SHARED_KB, template <WeightType> class EpilogueOf>
struct LinearKernel {
    using Product = typename ProductOf<ROW_TILES, TILES, W, SHARED_KB>::Type;
    using Epilogue = EpilogueOf<W>;
    static constexpr int ROWS = ROW_TILES * 8, STAGES = Product::STAGES;
    static constexpr int UNITS = Epilogue::PAIRED ? TILES / 2 : TILES;
    static constexpr int RESULTS = UNITS * 16 * ROWS;  // of a block
    static constexpr int PER_THREAD = (RESULTS + THREADS - 1) / THREADS;
    static constexpr bool LOADS_EARLY = PER_THREAD <= 4;  // what epilogues need; else registers would not suffice

    const Linear& a;
    const int lane, warp, first_tile;
    float* inverse_rms;  // [MAX_ROWS]
    float* sums;         // [WARPS][TILES * 16][ROWS + 1], where the rings of the product were
    Product product;

    DEVICE LinearKernel(const Linear& a) : LinearKernel(a, blockIdx.x) {}
    DEVICE LinearKernel(const Linear& a, int nth)  // of the blocks that share the features
        : a(a), lane(threadIdx.x & 31), warp(threadIdx.x >> 5), first_tile(a.first_feature / 16 + nth * TILES),
          inverse_rms((float*)shared_memory), sums(inverse_rms + MAX_ROWS), product(a, (uint4*)sums) {}

    struct Result {  // one of a thread's
        int feature, row, unit;
        bool exists;
    };
    DEVICE static Result result(int e) {
        const int at = threadIdx.x + e * THREADS;
        return {at & 15, (at >> 4) % ROWS, at / (16 * ROWS), at < RESULTS};
    }
    DEVICE int feature_of(const Result& r, int which = 0) const {
        return Epilogue::first_feature(a, first_tile + (Epilogue::PAIRED ? 2 * r.unit + which : r.unit)) + r.feature;
    }

    DEVICE void write_sums(const float (&acc)[TILES][ROW_TILES][4]) const {
        const int group = lane >> 2, place = lane & 3;
#pragma unroll
        for (int j = 0; j < TILES; j++)
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; tile++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int feature = (warp * TILES + j) * 16 + group + (i >> 1) * 8;
                    sums[feature * (ROWS + 1) + tile * 8 + 2 * place + (i & 1)] = acc[j][tile][i];
                }
    }
    DEVICE float sum_of(int tile, int feature, int row) const {
        float s = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) s += sums[((i * TILES + tile) * 16 + feature) * (ROWS + 1) + row];
        return s * inverse_rms[row];
    }

    DEVICE void run() {
        if (!a.starts_next_late) let_next_kernel_start();
        const int steps = product.steps;
        product.find_tiles([&](int j) { return Epilogue::first_feature(a, first_tile + j) - a.first_feature; });
#pragma unroll
        for (int n = 0; n < STAGES; n++) {
            if (n < steps) product.send_weights(n, n);
            close_copy_group();
        }
        Epilogue epilogue[PER_THREAD];
#pragma unroll
        for (int e = 0; e < PER_THREAD; e++)
            if (const Result r = result(e); LOADS_EARLY && r.exists)
                epilogue[e].load_constants(a, feature_of(r), feature_of(r, 1));

        wait_for_previous_kernel();
        if (a.starts_next_late) let_next_kernel_start();
#pragma unroll
        for (int n = 0; n < STAGES; n++) {
            if (n < steps) product.send_x(n, n);
            close_copy_group();
        }
#pragma unroll
        for (int e = 0; e < PER_THREAD; e++)
            if (const Result r = result(e); LOADS_EARLY && r.exists) epilogue[e].load_inputs(a, feature_of(r), r.row);
        if (threadIdx.x < ROWS)
            inverse_rms[threadIdx.x] =
                a.square_sum ? rsqrtf(from_fixed(load_fresh(a.square_sum + threadIdx.x)) * a.inverse_width + a.norm_eps) : 1.0f;

        float acc[TILES][ROW_TILES][4];
        for (int j = 0; j < TILES; j++)
            for (int tile = 0; tile < ROW_TILES; tile++)
                for (int i = 0; i < 4; i++) acc[j][tile][i] = 0;
        for (int step = 0, stage = 0; step < steps; step++, stage = stage + 1 == STAGES ? 0 : stage + 1) {
            wait_copy_groups<STAGES - 1>();
            sync_warp();
            product.multiply(acc, stage);
            sync_warp();
            if (const int next = step + STAGES; next < steps) product.send_weights(stage, next), product.send_x(stage, next);
            close_copy_group();
        }
        sync_block();
        write_sums(acc);
        sync_block();
#pragma unroll
        for (int e = 0; e < PER_THREAD; e++) {
            const Result r = result(e);
            if (!r.exists) break;
            if (!LOADS_EARLY) {
                epilogue[e].load_constants(a, feature_of(r), feature_of(r, 1));
                epilogue[e].load_inputs(a, feature_of(r), r.row);
            }
            if constexpr (Epilogue::PAIRED) {
                const float low = sum_of(2 * r.unit, r.feature, r.row), high = sum_of(2 * r.unit + 1, r.feature, r.row);
                epilogue[e].store(a, feature_of(r), r.row, low, high);
            } else {
                epilogue[e].store(a, feature_of(r), r.row, sum_of(r.unit, r.feature, r.row), 0);
            }
        }
    }
};

// The same for several groups of rows, with the same bits. Neighbouring blocks take the same weights, one group each, so
// that all but the first of them find the weights in L2.
template <class Kernel> DEVICE void run_groups(const Linear& a) {
    const Linear own = a.group(blockIdx.x % a.row_groups);
    Kernel(own, blockIdx.x / a.row_groups).run();
}

// The epilogue alone, for sums that torch has made: 16 rows and 16 features, or pairs of them, by a block.
template <template <WeightType> class EpilogueOf> DEVICE void finish_sums(const Linear& a) {
    using Epilogue = EpilogueOf<BF16>;
    constexpr int ROWS_OF_BLOCK = THREADS / 16, BLOCKS = MAX_ROWS / ROWS_OF_BLOCK;
    if (!a.starts_next_late) let_next_kernel_start();
    wait_for_previous_kernel();
    if (a.starts_next_late) let_next_kernel_start();
    const int rows_of = blockIdx.x % (BLOCKS * a.row_groups), unit = blockIdx.x / (BLOCKS * a.row_groups);
    const Linear own = a.group(rows_of / BLOCKS);
    const int row = rows_of % BLOCKS * ROWS_OF_BLOCK + threadIdx.x / 16;
    const int low = Epilogue::first_feature(own, Epilogue::PAIRED ? 2 * unit : unit) + threadIdx.x % 16;
    const int high = Epilogue::first_feature(own, Epilogue::PAIRED ? 2 * unit + 1 : unit) + threadIdx.x % 16;
    const float inverse_rms =
        own.square_sum ? rsqrtf(from_fixed(load_fresh(own.square_sum + row)) * own.inverse_width + own.norm_eps) : 1.0f;
    const auto sum_of = [&](int feature) {
        return as_float((u32)own.sums[(long long)row * own.features + feature] << 16) * inverse_rms;
    };
    Epilogue epilogue;
    epilogue.load_constants(own, low, high);
    epilogue.load_inputs(own, low, row);
    epilogue.store(own, low, row, sum_of(low), sum_of(high));
}
