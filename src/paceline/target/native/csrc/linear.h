// Products of packed weights with quantised rows. Each block of weights is unpacked once for all rows of a strip.
//
// A row's sum runs over the groups in their order, so its bits do not depend on the rows beside it.
#pragma once

#include "activations.h"

namespace PACELINE_PATH {

constexpr int kAhead = 4096;  // bytes of codes fetched before they are needed: memory latency at full bandwidth

#define PL_ROWS _Pragma("GCC unroll 16") for (int r = 0; r < R; ++r)

template <int format>
struct Traits {
    static constexpr int bits = format == K6 ? 6 : kCodeBytes[format] / 64;
    static constexpr bool two_level = format == K4 || format == K8;
    static constexpr bool has_base = two_level || format == H4 || format == H8;
    static constexpr int offset_bits = format == O4 ? 3 : format == O8 ? 7 : format == K6 ? 5 : 0;
};

// Adds the dot products of one group, or of one half of it where a format has a scale for each half.
template <int format, int R>
PL_INLINE void add_dots(Ints (&a)[R], const uint8_t* codes, const int8_t* x, int half) {
    constexpr int bits = Traits<format>::bits;
    if constexpr (bits == 4) {
        _Pragma("GCC unroll 4") for (int j = 0; j < 4; ++j) {
            Codes w = load_codes(codes + j * 64), low = low_nibbles(w), high = high_nibbles(w);
            PL_ROWS a[r] = dot<bits>(a[r], low, x + r * kGroup + j * 8);
            PL_ROWS a[r] = dot<bits>(a[r], high, x + r * kGroup + j * 8 + 4);
        }
    } else if constexpr (bits == 8) {
        _Pragma("GCC unroll 8") for (int j = 0; j < 8; ++j) {
            Codes w = load_codes(codes + j * 64);
            PL_ROWS a[r] = dot<bits>(a[r], w, x + r * kGroup + j * 4);
        }
    } else {
        codes += half * 192;
        x += half * 16;
        Codes first = load_codes(codes), second = load_codes(codes + 64), crumbs = load_codes(codes + 128);
        Codes w = with_crumbs<0>(low_nibbles(first), crumbs);
        PL_ROWS a[r] = dot<bits>(a[r], w, x + r * kGroup);
        w = with_crumbs<1>(high_nibbles(first), crumbs);
        PL_ROWS a[r] = dot<bits>(a[r], w, x + r * kGroup + 4);
        w = with_crumbs<2>(low_nibbles(second), crumbs);
        PL_ROWS a[r] = dot<bits>(a[r], w, x + r * kGroup + 8);
        w = with_crumbs<3>(high_nibbles(second), crumbs);
        PL_ROWS a[r] = dot<bits>(a[r], w, x + r * kGroup + 12);
    }
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
        Ints a[R];
        if constexpr (format == K6) {
            Floats first, last, part[R];
            scales.next_halves(g, first, last);
            PL_ROWS a[r] = all_shifted<0>(negative[r]);
            add_dots<format, R>(a, codes, xc, 0);
            PL_ROWS part[r] = to_floats(a[r]) * first;
            PL_ROWS a[r] = all_shifted<0>(negative[R + r]);
            add_dots<format, R>(a, codes, xc, 1);
            PL_ROWS part[r] = fma(to_floats(a[r]), last, part[r]);
            PL_ROWS sums[r] = fma(part[r], all(xs[r]), sums[r]);
        } else {
            Floats scale, base;
            scales.next(g, scale, base);
            if constexpr (Traits<format>::offset_bits == 0) {
                PL_ROWS a[r] = no_ints();
            } else {
                PL_ROWS a[r] = all_shifted<Traits<format>::offset_bits>(negative[2 * R + r]);
            }
            add_dots<format, R>(a, codes, xc, 0);
            PL_ROWS sums[r] = fma(to_floats(a[r]), scale * all(xs[r]), sums[r]);
            if constexpr (Traits<format>::has_base) {
                const float* totals = x.total + (size_t)g * R;
                PL_ROWS sums[r] = fma(base, all(totals[r]), sums[r]);
            }
        }
    }
    PL_ROWS store(out + r * stride, sums[r]);
}

#undef PL_ROWS

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
