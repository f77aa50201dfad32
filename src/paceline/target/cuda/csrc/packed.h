// Products with weights of 4 to 8 bits as GGUF files hold them, or of 8 bits as fp8 (e4m3). packing.py lays them out.
//
// A unit is what a warp takes at a time: 16 features of 64 inputs, so that it lies in one piece and each lane finds the
// codes of its fragments side by side. Units of a tile of 16 features follow each other by their inputs. Warp w takes units
// w, w + 8, ... in order, and the order of sums is that of linear.h.
//
// A weight has exactly the value of the file, scale * code + minimum. Codes of up to 6 bits become 128 + code in bf16
// by setting bits. The sum of 32 inputs begins with -128 (or what the code of zero needs) times the sum of their x, which
// one mma with a constant gives; then it is multiplied by the scale in float32.
#pragma once
#include "linear.h"

constexpr int UNIT_INPUTS = 64;
constexpr int SUPER_UNITS = 4;  // of a block of 256 inputs, which share what K formats keep once for all

template <WeightType W> struct PackedFormat {
    static constexpr int BITS = W == Q4_0 || W == Q4_1 || W == Q4_K ? 4 : W == Q5_0 || W == Q5_1 || W == Q5_K ? 5 : W == Q6_K ? 6 : 8;
    static constexpr bool K = W == Q4_K || W == Q5_K || W == Q6_K;
    static constexpr bool HAS_MINIMUM = W == Q4_1 || W == Q5_1 || W == Q4_K || W == Q5_K;
    static constexpr bool BY_GROUP = W != FP8;         // scales are those of 32 inputs, of 16 in Q6_K; else of a feature
    static constexpr bool FROM_128 = BITS < 8;          // codes become 128 + code
    static constexpr int ZERO = W == Q4_0 ? 8 : W == Q5_0 ? 16 : W == Q6_K ? 32 : 0;  // the code of zero
    // bytes of a unit
    static constexpr int CODES = BITS == 8 ? 1024 : 512 + (BITS - 4) * 128;
    static constexpr int SCALES = W == FP8 ? 0 : W == Q4_1 || W == Q5_1 ? 128 : 64;
    static constexpr int UNIT = CODES + SCALES;
    static constexpr int SHARED = W == Q4_K || W == Q5_K ? 64 : W == Q6_K ? 32 : 0;  // of SUPER_UNITS units
    static constexpr int UNIT_PIECES = UNIT / 16, PIECES = (UNIT + SHARED) / 16;      // of 16 bytes, in a stage
    static_assert(UNIT % 16 == 0 && SHARED % 16 == 0);

    // From the start of the tile, in bytes.
    DEVICE static int offset(int unit) {
        return K ? unit / SUPER_UNITS * (SUPER_UNITS * UNIT + SHARED) + unit % SUPER_UNITS * UNIT : unit * UNIT;
    }
    DEVICE static int shared_offset(int unit) {
        return unit / SUPER_UNITS * (SUPER_UNITS * UNIT + SHARED) + SUPER_UNITS * UNIT;
    }
    DEVICE static long long tile_bytes(int inputs) {
        const int units = inputs / UNIT_INPUTS;
        return (long long)units * UNIT + units / SUPER_UNITS * SHARED;
    }
};

// Four e4m3 to two pairs of bf16, exactly: their bits as those of a bf16, whose exponent begins 120 lower. Bytes 1 and 3
// are the first pair.
DEVICE void widen_fp8(u32 four, u32& low, u32& high) {
    const u32 first = and_or(four >> 4, 0x07F007F0u, four & 0x80008000u);
    const u32 second = and_or(four << 4, 0x07F007F0u, four << 8 & 0x80008000u);
    low = multiply_bf16x2(first, 0x7B807B80u), high = multiply_bf16x2(second, 0x7B807B80u);
}

// The fragments of one mma for 16 features: a[0] and a[2] are of features 0 to 7, a[1] and a[3] of 8 to 15.
struct Fragments {
    u32 a[4];
};

template <int ROW_TILES, int TILES, WeightType W, int SHARED_KB> struct PackedProduct {
    using Format = PackedFormat<W>;
    static constexpr int ROWS = ROW_TILES * 8;
    static constexpr int X_PIECES = UNIT_INPUTS / 8;  // of 16 bytes, in a row of x
    static constexpr int WEIGHT_PIECES = TILES * Format::PIECES;
    static constexpr int STAGE_PIECES = WEIGHT_PIECES + ROWS * X_PIECES;
    static constexpr int STAGE_BYTES = 16 * STAGE_PIECES * WARPS;
    static constexpr int FITTING = SHARED_KB * 1024 / STAGE_BYTES;
    static constexpr int STAGES = FITTING < 2 ? 2 : FITTING > 8 ? 8 : FITTING;
    // A warp sends 32 pieces at a time: of one tile while it can, then what is left of all tiles.
    static constexpr int WHOLE = Format::UNIT_PIECES / 32, REST = Format::PIECES - 32 * WHOLE;
    static constexpr int REST_TURNS = (TILES * REST + 31) / 32;

    const Linear& a;
    const int lane, warp;
    const int steps;    // units that this warp goes through
    uint4* const ring;  // [STAGES][STAGE_PIECES] of this warp
    int rows = 0;       // of the pass, known once the kernel before has ended
    const char* from[TILES];
    const char* rest_from[REST_TURNS ? REST_TURNS : 1];

    DEVICE PackedProduct(const Linear& a, uint4* rings)
        : a(a), lane(threadIdx.x & 31), warp(threadIdx.x >> 5), steps((a.inputs / UNIT_INPUTS - warp + WARPS - 1) / WARPS),
          ring(rings + warp * STAGES * STAGE_PIECES) {}

    DEVICE static int rest_tile(int turn, int lane) { return (turn * 32 + lane) / (REST ? REST : 1); }
    DEVICE static int rest_piece(int turn, int lane) { return 32 * WHOLE + (turn * 32 + lane) % (REST ? REST : 1); }

    template <class FirstFeature> DEVICE void find_tiles(const FirstFeature& first_feature) {
        const long long tile_bytes = Format::tile_bytes(a.inputs);
        for (int j = 0; j < TILES; j++) from[j] = (const char*)a.weight + first_feature(j) / 16 * tile_bytes + lane * 16;
        for (int n = 0; n < REST_TURNS; n++) {
            const int piece = rest_piece(n, lane), within = piece < Format::UNIT_PIECES ? piece : piece - Format::UNIT_PIECES;
            rest_from[n] = (const char*)a.weight + first_feature(rest_tile(n, lane)) / 16 * tile_bytes + within * 16;
        }
    }

    DEVICE void send_weights(int stage, int step) const {
        uint4* to = ring + stage * STAGE_PIECES;
        const int unit = warp + step * WARPS, offset = Format::offset(unit);
#pragma unroll
        for (int j = 0; j < TILES; j++)
#pragma unroll
            for (int i = 0; i < WHOLE; i++)
                copy_weight_async(to + j * Format::PIECES + i * 32 + lane, from[j] + offset + i * 512);
#pragma unroll
        for (int n = 0; n < REST_TURNS; n++) {
            const int tile = rest_tile(n, lane), piece = rest_piece(n, lane);
            const int start = piece < Format::UNIT_PIECES ? offset : Format::shared_offset(unit);
            if (tile < TILES) copy_weight_async(to + tile * Format::PIECES + piece, rest_from[n] + start);
        }
    }
    // Rows that the pass does not have are zeros: no byte of them is read.
    DEVICE void send_x(int stage, int step) {
        if (step == 0) rows = a.input ? load_fresh(&a.input->rows) : ROWS;
        const int row = lane / X_PIECES, piece = lane % X_PIECES;
        uint4* to = ring + stage * STAGE_PIECES + WEIGHT_PIECES + row * X_PIECES + x_piece(row, piece);
        const u16* x = a.x + (long long)row * a.inputs + (warp + step * WARPS) * UNIT_INPUTS + piece * 8;
#pragma unroll
        for (int i = 0; i < ROWS / 4; i++)
            copy_or_zero_async(to + 4 * i * X_PIECES, x + (long long)4 * i * a.inputs, row + 4 * i < rows);
    }
    // The place of a piece among those of its row: lanes of four rows that read 32 bytes each meet in no bank.
    DEVICE static int x_piece(int row, int piece) { return piece ^ (row & 3) << 1; }

    // ---- what a lane finds in a stage

    // For the two halves of 32 inputs.
    DEVICE void load_fragments(const char* unit, int group, Fragments (&f)[2]) const {
        if constexpr (Format::BITS == 8) {
            const uint4 codes = ((const uint4*)unit)[group * 32 + lane];
            const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};  // features 0 to 7, 8 to 15, of each half
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 *low = &f[i >> 1].a[i & 1], *high = &f[i >> 1].a[2 + (i & 1)];
                if constexpr (W == FP8)
                    widen_fp8(words[i], *low, *high);
                else
                    widen_int8(words[i], *low, *high);
            }
        } else {
            const uint2 low = ((const uint2*)unit)[group * 32 + lane];
            constexpr int HIGH_BITS = Format::BITS - 4;
            u32 high = 0;  // bits above the low four, in the order of fragments, those of the second inputs 16 bits higher
            if constexpr (HIGH_BITS == 1) high = ((const u32*)(unit + 512))[lane];
            if constexpr (HIGH_BITS == 2) high = ((const u32*)(unit + 512))[group * 32 + lane];
#pragma unroll
            for (int i = 0; i < 8; i++) {
                u32& a = f[i >> 2].a[i & 3];
                a = and_or((i < 4 ? low.x : low.y) >> 4 * (i & 3), 0x000F000Fu, 0x43004300u);
                const int bit = HIGH_BITS == 1 ? group * 8 + i : 2 * i;
                const u32 moved = bit < 4 ? high << (4 - bit) : high >> (bit - 4);
                if constexpr (HIGH_BITS > 0) a = and_or(moved, HIGH_BITS == 1 ? 0x00100010u : 0x00300030u, a);
            }
        }
    }

    struct Scales {
        float scale[2];  // by half of a group in Q6_K, else the first serves both
        float minimum;
    };
    // Of a feature and 32 inputs.
    DEVICE Scales scales(const char* unit, int group, int feature) const {
        const int at = group * 16 + feature;
        if constexpr (Format::K) {
            const u32 two = ((const u16*)(unit + Format::CODES))[at];
            const char* shared = unit + Format::UNIT;
            if constexpr (W == Q6_K) {
                const float d = half_to_float(((const u16*)shared)[feature]);
                return {{d * signed_byte<0>(two ^ 0x8080u), d * signed_byte<1>(two ^ 0x8080u)}, 0};
            } else {
                const u32 d = ((const u32*)shared)[feature];
                return {{times_byte<0>(half_to_float(d), two), 0}, -times_byte<1>(half_to_float(d >> 16), two)};
            }
        } else if constexpr (Format::HAS_MINIMUM) {
            const u32 both = ((const u32*)(unit + Format::CODES))[at];
            return {{half_to_float(both), 0}, half_to_float(both >> 16)};
        } else {
            return {{half_to_float(((const u16*)(unit + Format::CODES))[at]), 0}, 0};
        }
    }
    // 2^23 + byte as a float has the byte as its last bits. Exact: a float16 and a byte have 19 bits together.
    template <int BYTE> DEVICE static float from_byte(u32 v) { return as_float(byte_permute(v, 0x4B000000u, 0x7440 + BYTE)); }
    template <int BYTE> DEVICE static float times_byte(float d, u32 v) { return fused(d, from_byte<BYTE>(v), -8388608.0f * d); }
    template <int BYTE> DEVICE static float signed_byte(u32 flipped) { return from_byte<BYTE>(flipped) - 8388736.0f; }

    // Within an mma a lane takes 4 neighbouring inputs.
    DEVICE void multiply(float (&acc)[TILES][ROW_TILES][4], int stage) const {
        const int feature = lane >> 2, place = lane & 3;
        const char *units = (const char*)(ring + stage * STAGE_PIECES), *xs = units + 16 * WEIGHT_PIECES;
        constexpr int PARTS = W == Q6_K ? 2 : 1;  // sums of one scale in 32 inputs
#pragma unroll
        for (int group = 0; group < 2; group++) {
            uint2 x[ROW_TILES][2];
            float zero[ROW_TILES][PARTS][4];  // what a sum begins with
#pragma unroll
            for (int tile = 0; tile < ROW_TILES; tile++) {
#pragma unroll
                for (int step = 0; step < 2; step++) {
                    const int row = tile * 8 + feature, piece = 2 * (2 * group + step) + (place >> 1);
                    x[tile][step] = *(const uint2*)(xs + (row * X_PIECES + x_piece(row, piece)) * 16 + (place & 1) * 8);
                }
                if constexpr (Format::FROM_128) {
                    constexpr u32 start = 0xC300C300u + Format::ZERO * 0x00010001u;  // -(128 + ZERO), twice
                    const Fragments all{{start, start, start, start}};
                    const float nothing[4] = {0, 0, 0, 0};
                    mma_from(zero[tile][0], all.a, x[tile][0], nothing);
                    if constexpr (PARTS == 2)
                        mma_from(zero[tile][1], all.a, x[tile][1], nothing);
                    else
                        add(zero[tile][0], all, x[tile][1]);
                }
            }
#pragma unroll
            for (int j = 0; j < TILES; j++) {
                const char* unit = units + j * Format::PIECES * 16;
                Fragments f[2];
                load_fragments(unit, group, f);
                if constexpr (Format::BY_GROUP) {
                    const Scales upper = scales(unit, group, feature), lower = scales(unit, group, feature + 8);
#pragma unroll
                    for (int tile = 0; tile < ROW_TILES; tile++) add_group(acc[j][tile], f, x[tile], zero[tile], upper, lower);
                } else {
#pragma unroll
                    for (int tile = 0; tile < ROW_TILES; tile++) add(acc[j][tile], f[0], x[tile][0]), add(acc[j][tile], f[1], x[tile][1]);
                }
            }
        }
    }

    DEVICE static void add(float (&sum)[4], const Fragments& f, uint2 x) {
        mma(sum, f.a[0], f.a[1], f.a[2], f.a[3], x.x, x.y);
    }
    template <int PARTS>
    DEVICE static void add_group(float (&acc)[4], const Fragments (&f)[2], const uint2 (&x)[2], const float (&zero)[PARTS][4],
                                 const Scales& upper, const Scales& lower) {
        float sum[4];
        const float nothing[4] = {0, 0, 0, 0};
        mma_from(sum, f[0].a, x[0], Format::FROM_128 ? zero[0] : nothing);
        if constexpr (PARTS == 2) {
#pragma unroll
            for (int i = 0; i < 4; i++) acc[i] = fused((i < 2 ? upper : lower).scale[0], sum[i], acc[i]);
            mma_from(sum, f[1].a, x[1], zero[1]);
        } else {
            add(sum, f[1], x[1]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const Scales& s = i < 2 ? upper : lower;
            acc[i] = fused(s.scale[PARTS - 1], sum[i], acc[i]);
            if constexpr (Format::HAS_MINIMUM) acc[i] = fused(s.minimum, zero[0][i] * -0.0078125f, acc[i]);
        }
    }
};
