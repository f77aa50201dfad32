// One row of a packed matrix as floats: how the embedding is read.
#pragma once

#include "linear.h"

namespace PACELINE_PATH {

// The code of input k (of 32) and output o (of 16) in a group.
template <int format>
PL_INLINE int code_at(const uint8_t* codes, int o, int k) {
    constexpr int bits = Traits<format>::bits;
    const int byte = 4 * o + k % 4;
    if constexpr (bits == 8) return codes[k / 4 * 64 + byte];
    if constexpr (bits == 6) codes += k / 16 * 192;
    const int block = bits == 6 ? k % 16 / 8 : k / 8;
    const int nibble = codes[block * 64 + byte] >> (k / 4 % 2 * 4) & 15;
    if constexpr (format == F4) return kFloatCodes[nibble];
    if constexpr (bits == 4) return nibble;
    return nibble | (codes[128 + byte] >> (2 * (k % 16 / 4)) & 3) << 4;
}

template <int format>
void unpack_row_as(const Linear& w, int row, float* out) {
    const int tile = row / kTile, o = row % kTile;
    const uint8_t* codes = w.codes_of(tile);
    Scales<format> scales{w.scales_of(tile), zeros(), zeros()};
    constexpr int zero = Traits<format>::offset_bits ? 1 << Traits<format>::offset_bits : 0;
    alignas(64) float scale[2][kTile], base[kTile] = {};
    for (int g = 0; g < w.groups(); ++g, codes += kCodeBytes[format], out += kGroup) {
        Floats first, second = zeros();
        if constexpr (format == K6) {
            scales.next_halves(g, first, second);
            store(scale[1], second);
        } else {
            scales.next(g, first, second);
            if constexpr (Traits<format>::has_base) store(base, second);
        }
        store(scale[0], first);
        for (int k = 0; k < kGroup; ++k) {
            const float by = scale[format == K6 ? k / 16 : 0][o];
            out[k] = by * (float)(code_at<format>(codes, o, k) - zero) + base[o];
        }
    }
}

inline void unpack_row(const Linear& w, int row, float* out) {
    using Unpack = void (*)(const Linear&, int, float*);
    static constexpr Unpack of[kFormats] = {unpack_row_as<K4>, unpack_row_as<K8>, unpack_row_as<H4>,
                                            unpack_row_as<H8>, unpack_row_as<O4>, unpack_row_as<O8>,
                                            unpack_row_as<K6>, unpack_row_as<F4>};
    of[w.format](w, row, out);
}

}  // namespace PACELINE_PATH
