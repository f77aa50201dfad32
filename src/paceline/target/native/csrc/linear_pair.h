// Products of packed weights with many rows: a pair of tiles at a time, 32 outputs.
//
// A block of the pair's weights is unpacked once, into the first level of cache, and every row passes over it. Each load
// of an activation feeds both tiles. What is left is arithmetic: of 16 outputs, 32 inputs and a row 8 dot products, and
// a product and two fused multiply-adds for the scales. Sums are those of linear.h, in the same order: the same bits.
#pragma once

#include "linear.h"

namespace PACELINE_PATH {

#if defined(PACELINE_PAIRS)

constexpr int kNearGroups = 2 * kSuper;  // groups of a block

// Unpacked weights of a pair of tiles.
struct NearWeights {
    alignas(64) uint8_t codes[kNearGroups][2][kGroup / 4][64];
    alignas(64) float scales[kNearGroups][2][2][kTile];  // scale and base, or those of both halves of a group
};

template <int format, size_t... four>
PL_INLINE void unpack_group(const uint8_t* codes, uint8_t (*to)[64], std::index_sequence<four...>) {
    (store_codes(to[four], codes_of<format, (int)four>(codes)), ...);
}

// `count` groups of both tiles from `first` on, which is a multiple of kSuper.
template <int format>
void unpack_pair(const Linear& w, int pair, int first, int count, NearWeights& to) {
    for (int t = 0; t < 2; ++t) {
        const uint8_t* codes = w.codes_of(2 * pair + t) + (int64_t)first * kCodeBytes[format];
        const int64_t at = (int64_t)(first / kScaleGroups[format]) * kScaleBytes[format];
        Scales<format> scales{w.scales_of(2 * pair + t) + at, zeros(), zeros()};
        for (int g = 0; g < count; ++g, codes += kCodeBytes[format]) {
            unpack_group<format>(codes, to.codes[g][t], std::make_index_sequence<kGroup / 4>());
            Floats scale, second = zeros();
            if constexpr (format == K6) scales.next_halves(g, scale, second);
            else scales.next(g, scale, second);
            store(to.scales[g][t][0], scale);
            store(to.scales[g][t][1], second);
        }
    }
}

// What kernels know of a format once it is unpacked.
enum Kind { kBased, kOffset3, kOffset4, kOffset7, kHalves };
template <int format>
constexpr Kind kKindOf = format == K6   ? kHalves
                         : format == O4 ? kOffset3
                         : format == F4 ? kOffset4
                         : format == O8 ? kOffset7
                                        : kBased;

// Some rows of a strip, from a group on: see StripView.
struct NearRows {
    const int8_t* codes;
    const float *scale, *total;
    const int32_t* negative;
    int64_t strip_rows;  // from one group to the next
};

#define PL_ROWS _Pragma("GCC unroll 16") for (int r = 0; r < R; ++r)
#define PL_TILES _Pragma("GCC unroll 2") for (int t = 0; t < 2; ++t)

// Adds the dot products of four fours of a group, from the `first` on.
template <int R>
PL_INLINE void add_fours(Ints (&a)[R][2], const uint8_t (*codes)[kGroup / 4][64], const int8_t* x, int first) {
    _Pragma("GCC unroll 4") for (int four = first; four < first + 4; ++four) {
        const Codes w[2] = {load_codes(codes[0][four]), load_codes(codes[1][four])};
        PL_ROWS {
            const Fours inputs = all_fours(x + r * kGroup + 4 * four);
            PL_TILES a[r][t] = dot(a[r][t], w[t], inputs);
        }
    }
}

// Adds `groups` groups to the sums of R rows, out [R][32], which begin here if `begins`. ahead: codes of each tile that are
// prefetched meanwhile, `ahead_bytes` of each for every group; null: none.
template <Kind kind, int R>
void pair_product(const NearWeights& w, int groups, const NearRows& rows, float* out, bool begins, const uint8_t* const* ahead,
                  int ahead_bytes) {
    NearRows x = rows;
    Floats sums[R][2];
    if (begins) PL_ROWS PL_TILES sums[r][t] = zeros();
    else PL_ROWS PL_TILES sums[r][t] = load(out + (2 * r + t) * kTile);
    for (int g = 0; g < groups; ++g) {
        if (ahead)
            for (int i = 0; i < ahead_bytes; i += 64) PL_TILES prefetch(ahead[t] + g * ahead_bytes + i);
        const auto& scales = w.scales[g];
        Ints a[R][2];
        if constexpr (kind == kHalves) {
            Floats part[R][2];
            PL_ROWS a[r][0] = a[r][1] = all_shifted<0>(x.negative[r]);
            add_fours<R>(a, w.codes[g], x.codes, 0);
            PL_ROWS PL_TILES part[r][t] = to_floats(a[r][t]) * load(scales[t][0]);
            PL_ROWS a[r][0] = a[r][1] = all_shifted<0>(x.negative[x.strip_rows + r]);
            add_fours<R>(a, w.codes[g], x.codes, 4);
            PL_ROWS PL_TILES part[r][t] = fma(to_floats(a[r][t]), load(scales[t][1]), part[r][t]);
            PL_ROWS PL_TILES sums[r][t] = fma(part[r][t], all(x.scale[r]), sums[r][t]);
        } else {
            constexpr int offset_bits = kind == kOffset3 ? 3 : kind == kOffset4 ? 4 : kind == kOffset7 ? 7 : 0;
            PL_ROWS a[r][0] = a[r][1] = offset_bits ? all_shifted<offset_bits>(x.negative[2 * x.strip_rows + r]) : no_ints();
            add_fours<R>(a, w.codes[g], x.codes, 0);
            add_fours<R>(a, w.codes[g], x.codes, 4);
            PL_ROWS PL_TILES sums[r][t] = fma(to_floats(a[r][t]), load(scales[t][0]) * all(x.scale[r]), sums[r][t]);
            if constexpr (kind == kBased) PL_ROWS PL_TILES sums[r][t] = fma(load(scales[t][1]), all(x.total[r]), sums[r][t]);
        }
        x.codes += x.strip_rows * kGroup;
        x.scale += x.strip_rows;
        x.total += x.strip_rows;
        x.negative += 3 * x.strip_rows;
    }
    PL_ROWS PL_TILES store(out + (2 * r + t) * kTile, sums[r][t]);
}

#undef PL_ROWS
#undef PL_TILES

using PairProduct = void (*)(const NearWeights&, int, const NearRows&, float*, bool, const uint8_t* const*, int);

template <Kind kind, size_t... rows>
PairProduct pair_product_of(int count, std::index_sequence<rows...>) {
    static constexpr PairProduct of[] = {pair_product<kind, (int)rows + 1>...};
    return of[count - 1];
}

template <int format>
void linear_pair_as(const Linear& w, int pair, const Activations& x, const Strip* begin, const Strip* end, float* out) {
    NearWeights near;
    const uint8_t* codes[2] = {w.codes_of(2 * pair), w.codes_of(2 * pair + 1)};
    for (int first = 0, groups; first < w.groups(); first += groups) {
        groups = std::min(kNearGroups, w.groups() - first);
        unpack_pair<format>(w, pair, first, groups, near);
        // The next block, or the next pair's first one, which lies behind this pair.
        const uint8_t* ahead[2];
        const bool last = first + groups == w.groups();
        for (int t = 0; t < 2; ++t)
            ahead[t] = last ? codes[1] + (1 + t) * w.tile_codes() : codes[t] + (int64_t)(first + groups) * kCodeBytes[format];
        for (const Strip* strip = begin; strip < end; ++strip) {
            const StripView view = x.view(*strip);
            const int parts = (strip->rows + kPairRows - 1) / kPairRows;
            for (int part = 0, row = 0, rows; part < parts; ++part, row += rows) {
                rows = strip->rows / parts + (part < strip->rows % parts);
                const size_t at = (size_t)first * strip->rows + row;
                const NearRows these{view.codes + at * kGroup, view.scale + at, view.total + at,
                                     view.negative + 3 * (size_t)first * strip->rows + row, strip->rows};
                pair_product_of<kKindOf<format>>(rows, std::make_index_sequence<kPairRows>())(
                    near, groups, these, out + (strip->first - begin->first + row) * kUnit, first == 0, strip == begin && row == 0 ? ahead : nullptr, kCodeBytes[format]);
            }
        }
    }
}

using NearPair = void (*)(const Linear&, int, const Activations&, const Strip*, const Strip*, float*);

template <size_t... formats>
NearPair near_pair_of(int format, std::index_sequence<formats...>) {
    static constexpr NearPair of[] = {linear_pair_as<(int)formats>...};
    return of[format];
}

#endif

// How many tiles one piece of a product has, for so many strips of rows.
inline int tiles_at_once([[maybe_unused]] size_t strips) {
#if defined(PACELINE_PAIRS)
    if (strips >= kPairStrips) return 2;
#endif
    return 1;
}

// out [rows][32] for a pair of tiles and the rows of some strips, the first of which is row 0.
inline void linear_pair(const Linear& w, int pair, const Activations& x, const Strip* begin, const Strip* end, float* out) {
#if defined(PACELINE_PAIRS)
    if (tiles_at_once(end - begin) == 2)
        return near_pair_of(w.format, std::make_index_sequence<kFormats>())(w, pair, x, begin, end, out);
#endif
    for (int t = 0; t < 2; ++t) linear_strips(w, 2 * pair + t, x, begin, end, out + t * kTile, kUnit);
}

// The same for every row.
inline void linear_pair(const Linear& w, int pair, const Activations& x, float* out) {
    linear_pair(w, pair, x, x.strips().data(), x.strips().data() + x.strips().size(), out);
}

}  // namespace PACELINE_PATH
