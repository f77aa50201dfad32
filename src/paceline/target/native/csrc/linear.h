// Products of packed weights with quantised rows. Each block of weights is unpacked once for all rows of a strip.
//
// A row's sum runs over the groups in their order, so its bits do not depend on the rows beside it.
#pragma once

#include "activations.h"

namespace PACELINE_PATH {

constexpr int kAhead = 4096;  // bytes of codes fetched before they are needed: memory latency at full bandwidth

#define PL_ROWS _Pragma("GCC unroll 16") for (int r = 0; r < R; ++r)
#define PL_PAIRS _Pragma("GCC unroll 8") for (int p = 0; p < R / 2; ++p)

template <int format>
struct Traits {
    static constexpr int bits = format == K6 ? 6 : kCodeBytes[format] / 64;
    static constexpr bool two_level = format == K4 || format == K8;
    static constexpr bool has_base = two_level || format == H4 || format == H8;
    static constexpr int offset_bits = format == O4 ? 3 : format == O8 ? 7 : format == K6 ? 5 : format == F4 ? 4 : 0;
    static constexpr int code_bits = (bits == 8 && has_base) || format == F4 ? 5 : bits;  // those that are not always 0
    static constexpr bool dot_takes_offset = kSignedDots && code_bits == 8;
};

// The codes of four inputs of a group: those from 4 * four on.
template <int format, int four>
PL_INLINE Codes codes_of(const uint8_t* codes) {
    if constexpr (Traits<format>::bits == 8) {
        return load_codes(codes + four * 64);
    } else if constexpr (Traits<format>::bits == 4) {
        const Codes both = load_codes(codes + four / 2 * 64);
        const Codes nibbles = four % 2 ? high_nibbles(both) : low_nibbles(both);
        return format == F4 ? look_up(nibbles, kFloatCodes) : nibbles;
    } else {
        codes += four / 4 * 192;
        const Codes both = load_codes(codes + four % 4 / 2 * 64);
        return with_crumbs<four % 4>(four % 2 ? high_nibbles(both) : low_nibbles(both), load_codes(codes + 128));
    }
}

// The sums of R rows' dot products with a tile of outputs: they start somewhere, eight inputs after the other are added,
// and `finish` ends a run of them.
template <int R>
struct VectorSums {
    Ints each[R];

    // bits: how far the numbers at `sums`, one for each row, are shifted.
    template <int bits>
    PL_INLINE void start(const int32_t* sums) { PL_ROWS each[r] = all_shifted<bits>(sums[r]); }
    PL_INLINE void start() { PL_ROWS each[r] = no_ints(); }
    // The inputs from 4 * four on.
    template <int format, int four>
    PL_INLINE void add_eight(const uint8_t* codes, const int8_t* x) {
        constexpr int bits = Traits<format>::code_bits;
        Codes w = codes_of<format, four>(codes);
        PL_ROWS each[r] = dot<bits, four>(each[r], w, x + r * kGroup);
        w = codes_of<format, four + 1>(codes);
        PL_ROWS each[r] = dot<bits, four + 1>(each[r], w, x + r * kGroup);
    }
    template <int format, int first, int fours>
    PL_INLINE void finish(const uint8_t*, const int8_t*) {}
    PL_INLINE Ints row(int r) const { return each[r]; }
};

#if defined(PACELINE_ROW_PAIRS)
// Matrix products take two rows at once; dot products take the last of an odd number.
template <int R>
struct PairSums {
    RowPair pair[R / 2 + 1];
    Ints odd;

    template <int bits>
    PL_INLINE void start(const int32_t* sums) {
        PL_PAIRS pair[p] = pair_shifted<bits>(sums + 2 * p);
        if constexpr (R % 2) odd = all_shifted<bits>(sums[R - 1]);
    }
    PL_INLINE void start() {
        PL_PAIRS pair[p] = no_pair();
        if constexpr (R % 2) odd = no_ints();
    }
    template <int format, int four>
    PL_INLINE void add_eight(const uint8_t* codes, const int8_t* x) {
        constexpr int bits = Traits<format>::code_bits;
        const Codes first = codes_of<format, four>(codes), second = codes_of<format, four + 1>(codes);
        const Eights w = eights(first, second);
        PL_PAIRS pair[p] = dot<four>(pair[p], w, x + 2 * p * kGroup, x + (2 * p + 1) * kGroup);
        if constexpr (R % 2) {
            odd = dot<bits, four>(odd, first, x + (R - 1) * kGroup);
            odd = dot<bits, four + 1>(odd, second, x + (R - 1) * kGroup);
        }
    }
    template <int format, int first, int fours>
    PL_INLINE void finish(const uint8_t*, const int8_t*) {}
    PL_INLINE Ints row(int r) const { return R % 2 && r == R - 1 ? odd : row_of(pair[r / 2], r % 2); }
};
template <int R>
using RowSums = PairSums<R>;
#elif defined(PACELINE_TILES)
// A tile is loaded from memory, to which a group's codes are unpacked.
template <int R>
struct TileSums {
    alignas(64) uint8_t unpacked[kGroup / 4 * 64];
    alignas(64) int32_t sums[kTileRows * kTile];
    Ints before[R];

    template <int bits>
    PL_INLINE void start(const int32_t* sums) { PL_ROWS before[r] = all_shifted<bits>(sums[r]); }
    PL_INLINE void start() { PL_ROWS before[r] = no_ints(); }
    template <int format, int four>
    PL_INLINE void add_eight(const uint8_t* codes, const int8_t*) {
        if constexpr (Traits<format>::bits == 8) return;  // nothing is packed
        store_codes(unpacked + four * 64, codes_of<format, four>(codes));
        store_codes(unpacked + (four + 1) * 64, codes_of<format, four + 1>(codes));
    }
    template <int format, int first, int fours>
    PL_INLINE void finish(const uint8_t* codes, const int8_t* x) {
        multiply_tiles<first, fours>(x, Traits<format>::bits == 8 ? codes : unpacked, sums);
    }
    PL_INLINE Ints row(int r) const { return before[r] + load_ints(sums + r * kTile); }
};
template <int R>
using RowSums = std::conditional_t<(R >= kTiledRows), TileSums<R>, VectorSums<R>>;
#else
template <int R>
using RowSums = VectorSums<R>;
#endif

// Adds the dot products of some fours of a group, from the `first` on.
template <int format, int first, class Sums, size_t... i>
PL_INLINE void add_dots(Sums& sums, const uint8_t* codes, const int8_t* x, std::index_sequence<i...>) {
    (sums.template add_eight<format, first + 2 * (int)i>(codes, x), ...);
    sums.template finish<format, first, 2 * (int)sizeof...(i)>(codes, x);
}

// The scales of one tile, group by group.
template <int format>
struct Scales {
    const uint8_t* at;
    Floats d, minimum;

    PL_INLINE void next(int g, Floats& scale, Floats& base) {
        if constexpr (Traits<format>::two_level) {
            if (g % kSuper == 0) {
                if (g) at += kScaleBytes[format];
                d = load_halves((const uint16_t*)at);
                minimum = zeros() - load_halves((const uint16_t*)(at + 32));
                for (int i = 0; i < kScaleBytes[format]; i += 64) prefetch(at + 2 * kScaleBytes[format] + i);
            }
            const uint8_t* bytes = at + 64 + g % kSuper * 32;
            scale = d * load_unsigned_bytes(bytes);
            base = minimum * load_unsigned_bytes(bytes + 16);
        } else {
            scale = load_halves((const uint16_t*)at);
            if constexpr (Traits<format>::has_base) base = load_halves((const uint16_t*)(at + 32));
            at += kScaleBytes[format];
            if (Traits<format>::has_base || g % 2) prefetch(at + kAhead / 8);
        }
    }

    PL_INLINE void next_halves(int g, Floats& first, Floats& last) {
        if (g % kSuper == 0) {
            if (g) at += kScaleBytes[format];
            d = load_halves((const uint16_t*)at);
            for (int i = 0; i < kScaleBytes[format]; i += 64) prefetch(at + 2 * kScaleBytes[format] + i);
        }
        const int8_t* bytes = (const int8_t*)at + 32 + g % kSuper * 32;
        first = d * load_signed_bytes(bytes);
        last = d * load_signed_bytes(bytes + 16);
    }
};

// out[r * stride + o] for one tile and R rows.
template <int format, int R>
void tile_product(const Linear& w, int tile, const StripView& x, float* out, int64_t stride) {
    const uint8_t* codes = w.codes_of(tile);
    Scales<format> scales{w.scales_of(tile), zeros(), zeros()};
    Floats sums[R];
    PL_ROWS sums[r] = zeros();
    const int groups = w.groups();
    for (int g = 0; g < groups; ++g, codes += kCodeBytes[format]) {
        _Pragma("GCC unroll 8") for (int i = 0; i < kCodeBytes[format]; i += 64) prefetch(codes + kAhead + i);
        const int8_t* xc = x.codes + (size_t)g * R * kGroup;
        const float* xs = x.scale + (size_t)g * R;
        const int32_t* negative = x.negative + (size_t)g * 3 * R;
        RowSums<R> a;
        if constexpr (format == K6) {
            constexpr auto half = std::make_index_sequence<2>();
            Floats first, last, part[R];
            scales.next_halves(g, first, last);
            a.template start<0>(negative);
            add_dots<format, 0>(a, codes, xc, half);
            PL_ROWS part[r] = to_floats(a.row(r)) * first;
            a.template start<0>(negative + R);
            add_dots<format, 4>(a, codes, xc, half);
            PL_ROWS part[r] = fma(to_floats(a.row(r)), last, part[r]);
            PL_ROWS sums[r] = fma(part[r], all(xs[r]), sums[r]);
        } else {
            Floats scale, base;
            scales.next(g, scale, base);
            constexpr int offset_bits = Traits<format>::dot_takes_offset ? 0 : Traits<format>::offset_bits;
            if constexpr (offset_bits == 0) a.start();
            else a.template start<offset_bits>(negative + 2 * R);
            add_dots<format, 0>(a, codes, xc, std::make_index_sequence<4>());
            PL_ROWS sums[r] = fma(to_floats(a.row(r)), scale * all(xs[r]), sums[r]);
            if constexpr (Traits<format>::has_base) {
                const float* totals = x.total + (size_t)g * R;
                PL_ROWS sums[r] = fma(base, all(totals[r]), sums[r]);
            }
        }
    }
    PL_ROWS store(out + r * stride, sums[r]);
}

#undef PL_ROWS
#undef PL_PAIRS

using TileProduct = void (*)(const Linear&, int, const StripView&, float*, int64_t);

template <int format, size_t... rows>
constexpr void fill_row(TileProduct* row, std::index_sequence<rows...>) {
    ((row[rows + 1] = tile_product<format, (int)rows + 1>), ...);
}

struct TileProducts {
    TileProduct of[kFormats][kStripRows + 1];

    TileProducts() { fill(std::make_integer_sequence<int, kFormats>()); }
    template <int... formats>
    void fill(std::integer_sequence<int, formats...>) {
        (fill_row<formats>(of[formats], std::make_index_sequence<kStripRows>()), ...);
    }
};

// The same for weights that are all of one format: only its kernels are built.
template <int format>
void linear_tile_of(const Linear& w, int tile, const Activations& x, float* out, int64_t stride) {
    struct Row {
        TileProduct of[kStripRows + 1];
        Row() { fill_row<format>(of, std::make_index_sequence<kStripRows>()); }
    };
    static const Row products;
    for (const Strip& strip : x.strips())
        products.of[strip.rows](w, tile, x.view(strip), out + strip.first * stride, stride);
}

// out[row * stride + o] for one tile and the rows of some strips, the first of which is row 0 of `out`.
inline void linear_strips(const Linear& w, int tile, const Activations& x, const Strip* begin, const Strip* end, float* out,
                          int64_t stride) {
    static const TileProducts products;
    for (const Strip* strip = begin; strip < end; ++strip)
        products.of[w.format][strip->rows](w, tile, x.view(*strip), out + (strip->first - begin->first) * stride, stride);
}

// The same for every row.
inline void linear_tile(const Linear& w, int tile, const Activations& x, float* out, int64_t stride) {
    linear_strips(w, tile, x, x.strips().data(), x.strips().data() + x.strips().size(), out, stride);
}

}  // namespace PACELINE_PATH
