// From the blocks of a GGUF file, or from floats, to the packed formats: nothing is rounded but floats.
//
// An encoding says what lies in a block of one row; `Packer` puts the blocks of 16 rows side by side.
#include <algorithm>

#include "formats.h"
#include "half.h"

namespace {

using Bytes = const uint8_t*;

// Eight scales and minima of six bits in twelve bytes: see dequant.py.
void six_bit_scale(Bytes s, int g, uint8_t& scale, uint8_t& minimum) {
    if (g < 4) {
        scale = s[g] & 63;
        minimum = s[g + 4] & 63;
    } else {
        scale = (s[g + 4] & 15) | (s[g - 4] >> 6) << 4;
        minimum = s[g + 4] >> 4 | (s[g] >> 6) << 4;
    }
}

// ---- encodings: codes(block, g, out) gives the 32 codes of group g of a block

void nibbles_of_pair(Bytes from, int g, uint8_t* out) {  // 32 bytes hold two groups, one in each nibble
    const int shift = g % 2 * 4;
    for (int i = 0; i < 32; ++i) out[i] = from[g / 2 * 32 + i] >> shift & 15;
}

void nibbles_of_group(Bytes from, uint8_t* out) {  // 16 bytes hold one group, its second half in the high nibbles
    for (int i = 0; i < 16; ++i) {
        out[i] = from[i] & 15;
        out[i + 16] = from[i] >> 4;
    }
}

void fifth_bits(Bytes from, uint8_t* out) {
    uint32_t bits;
    std::memcpy(&bits, from, 4);
    for (int i = 0; i < 32; ++i) out[i] |= (bits >> i & 1) << 4;
}

struct Q4_K {
    static constexpr Format format = K4;
    static constexpr int bytes = 144, groups = 8, d = 0, minima = 2, scales = 4;
    static void codes(Bytes b, int g, uint8_t* out) { nibbles_of_pair(b + 16, g, out); }
};

struct Q5_K {
    static constexpr Format format = K8;
    static constexpr int bytes = 176, groups = 8, d = 0, minima = 2, scales = 4;
    static void codes(Bytes b, int g, uint8_t* out) {
        nibbles_of_pair(b + 48, g, out);
        for (int i = 0; i < 32; ++i) out[i] |= (b[16 + i] >> g & 1) << 4;
    }
};

struct Q4_1 {
    static constexpr Format format = H4;
    static constexpr int bytes = 20, groups = 1, d = 0, base = 2;
    static void codes(Bytes b, int, uint8_t* out) { nibbles_of_group(b + 4, out); }
};

struct Q5_1 {
    static constexpr Format format = H8;
    static constexpr int bytes = 24, groups = 1, d = 0, base = 2;
    static void codes(Bytes b, int, uint8_t* out) {
        nibbles_of_group(b + 8, out);
        fifth_bits(b + 4, out);
    }
};

struct Q4_0 {
    static constexpr Format format = O4;
    static constexpr int bytes = 18, groups = 1, d = 0;
    static void codes(Bytes b, int, uint8_t* out) { nibbles_of_group(b + 2, out); }
};

struct Q5_0 {
    static constexpr Format format = O8;
    static constexpr int bytes = 22, groups = 1, d = 0;
    static void codes(Bytes b, int, uint8_t* out) {
        nibbles_of_group(b + 6, out);
        fifth_bits(b + 2, out);
        for (int i = 0; i < 32; ++i) out[i] += 128 - 16;
    }
};

struct Q8_0 {
    static constexpr Format format = O8;
    static constexpr int bytes = 34, groups = 1, d = 0;
    static void codes(Bytes b, int, uint8_t* out) {
        for (int i = 0; i < 32; ++i) out[i] = b[2 + i] ^ 128;
    }
};

struct Q6_K {
    static constexpr Format format = K6;
    static constexpr int bytes = 210, groups = 8, d = 208;
    static void codes(Bytes b, int g, uint8_t* out) {
        const int half = g / 4, quarter = g % 4;
        Bytes low = b + half * 64 + quarter % 2 * 32, high = b + 128 + half * 32;
        for (int i = 0; i < 32; ++i)
            out[i] = (low[i] >> quarter / 2 * 4 & 15) | (high[i] >> 2 * quarter & 3) << 4;
    }
    static int8_t scale(Bytes b, int run) { return (int8_t)b[192 + run]; }
};

struct Q3_K {
    static constexpr Format format = K6;
    static constexpr int bytes = 110, groups = 8, d = 108;
    static void codes(Bytes b, int g, uint8_t* out) {
        Bytes low = b + 32 + g / 4 * 32;
        for (int i = 0; i < 32; ++i) {
            const int code = (low[i] >> g % 4 * 2 & 3) | (b[i] >> g & 1) << 2;
            out[i] = (uint8_t)(code - 4 + 32);
        }
    }
    static int8_t scale(Bytes b, int run) {
        const int low = b[96 + run % 8] >> run / 8 * 4 & 15, high = b[104 + run % 4] >> run / 4 * 2 & 3;
        return (int8_t)((low | high << 4) - 32);
    }
};

// The scale is a power of two: exact as a half from 2 ** -24 on, zero below.
struct MXFP4 {
    static constexpr Format format = F4;
    static constexpr int bytes = 17, groups = 1;
    static float scale(Bytes b) { return std::ldexp(1.0f, std::min(b[0] - 128, 15)); }
    static void codes(Bytes b, int, uint8_t* out) { nibbles_of_group(b + 1, out); }
};

// A group of 32 floats, rounded to 8 bits with a half-precision scale.
struct F32 {
    static constexpr Format format = O8;
    static constexpr int bytes = 128, groups = 1;
    static float scale(Bytes b) {
        float peak = 0;
        for (int i = 0; i < 32; ++i) peak = std::max(peak, std::fabs(value(b, i)));
        return from_half(to_half(std::min(peak / 127.0f, 65504.0f)));
    }
    static float value(Bytes b, int i) {
        float f;
        std::memcpy(&f, b + 4 * i, 4);
        return f;
    }
    static void codes(Bytes b, int, uint8_t* out) {
        const float by = scale(b);
        for (int i = 0; i < 32; ++i) {
            const float q = by > 0 ? std::nearbyint(value(b, i) / by) : 0.0f;
            out[i] = (uint8_t)(128 + (int)std::min(127.0f, std::max(-127.0f, q)));
        }
    }
};

// A group of 32 floats, rounded to 4 bits with the half-precision scale, of a few, with the smallest squared error.
struct F32To4 {
    static constexpr Format format = O4;
    static constexpr int bytes = 128, groups = 1;
    static float error(Bytes b, float by) {
        float sum = 0;
        for (int i = 0; i < 32; ++i) {
            const float off = F32::value(b, i) - by * (code(F32::value(b, i), by) - 8);
            sum += off * off;
        }
        return sum;
    }
    static int code(float value, float by) {
        const float q = by != 0 ? std::nearbyint(value / by) : 0.0f;
        return 8 + (int)std::min(7.0f, std::max(-8.0f, q));
    }
    static float scale(Bytes b) {
        float peak = 0;  // of largest magnitude: it gets the code that has no opposite, -8
        for (int i = 0; i < 32; ++i)
            if (std::fabs(F32::value(b, i)) > std::fabs(peak)) peak = F32::value(b, i);
        float best = 0, lowest = error(b, 0);
        for (int step = 0; step < 8; ++step) {
            const float exact = std::min(65504.0f, std::max(-65504.0f, peak / (-8.8f + 0.2f * step)));
            const float by = from_half(to_half(exact)), off = error(b, by);
            if (off < lowest) best = by, lowest = off;
        }
        return best;
    }
    static void codes(Bytes b, int, uint8_t* out) {
        const float by = scale(b);
        for (int i = 0; i < 32; ++i) out[i] = (uint8_t)code(F32::value(b, i), by);
    }
};

// ---- formats: codes and scales of output o

void store_codes(Format format, const uint8_t* codes, int o, uint8_t* group) {
    uint32_t words[8], *out = reinterpret_cast<uint32_t*>(group);  // a word: 4 inputs of one output
    std::memcpy(words, codes, 32);
    const int bits = format == K6 ? 6 : kCodeBytes[format] / 64;
    for (int c = 0; c < 8; ++c) {
        if (bits == 8) {
            out[c * 16 + o] = words[c];
        } else if (bits == 4) {
            if (c % 2 == 0) out[c / 2 * 16 + o] = words[c] | words[c + 1] << 4;
        } else {
            uint32_t *half = out + c / 4 * 48, nibbles = words[c] & 0x0f0f0f0f, crumbs = words[c] >> 4 & 0x03030303;
            const int in_half = c % 4;
            uint32_t &low = half[in_half / 2 * 16 + o], &high = half[32 + o];
            low = in_half % 2 ? low | nibbles << 4 : nibbles;
            high = in_half ? high | crumbs << 2 * in_half : crumbs;
        }
    }
}

template <class E>
void store_scales(Bytes block, int g, int o, uint8_t* out) {
    if constexpr (E::format == K4 || E::format == K8) {
        std::memcpy(out + 2 * o, block + E::d, 2);
        std::memcpy(out + 32 + 2 * o, block + E::minima, 2);
        six_bit_scale(block + E::scales, g, out[64 + g * 32 + o], out[64 + g * 32 + 16 + o]);
    } else if constexpr (E::format == K6) {
        std::memcpy(out + 2 * o, block + E::d, 2);
        out[32 + g * 32 + o] = (uint8_t)E::scale(block, 2 * g);
        out[32 + g * 32 + 16 + o] = (uint8_t)E::scale(block, 2 * g + 1);
    } else if constexpr (E::bytes == F32::bytes || E::format == F4) {
        const uint16_t h = to_half(E::scale(block));
        std::memcpy(out + 2 * o, &h, 2);
    } else {
        std::memcpy(out + 2 * o, block + E::d, 2);
        if constexpr (E::format == H4 || E::format == H8) std::memcpy(out + 32 + 2 * o, block + E::base, 2);
    }
}

// order[o]: the row of the source that becomes output o; below 0: none, all its weights are zero.
template <class E>
void pack_tiles(Bytes rows, int64_t row_bytes, int row_groups, const int32_t* order, const Linear& to, int begin, int end) {
    const int per_scale = kScaleGroups[E::format];
    for (int tile = begin; tile < end; ++tile) {
        uint8_t* codes = const_cast<uint8_t*>(to.codes_of(tile));
        uint8_t* scales = const_cast<uint8_t*>(to.scales_of(tile));
        std::memset(codes, 0, to.tile_codes());
        std::memset(scales, 0, to.tile_scales());
        for (int o = 0; o < kTile; ++o) {
            if (order[tile * kTile + o] < 0) continue;
            Bytes row = rows + order[tile * kTile + o] * row_bytes;
            for (int g = 0; g < row_groups; ++g) {
                Bytes block = row + (int64_t)(g / E::groups) * E::bytes;
                uint8_t group[kGroup];
                E::codes(block, g % E::groups, group);
                store_codes(E::format, group, o, codes + (int64_t)g * kCodeBytes[E::format]);
                store_scales<E>(block, g % per_scale, o, scales + (int64_t)(g / per_scale) * kScaleBytes[E::format]);
            }
        }
    }
}

using Pack = void (*)(Bytes, int64_t, int, const int32_t*, const Linear&, int, int);
// In the order of library.py's ENCODINGS.
constexpr Pack kPackers[] = {pack_tiles<Q4_K>, pack_tiles<Q5_K>, pack_tiles<Q4_1>, pack_tiles<Q5_1>, pack_tiles<Q4_0>,
                             pack_tiles<Q5_0>, pack_tiles<Q8_0>, pack_tiles<Q6_K>, pack_tiles<Q3_K>, pack_tiles<F32>,
                             pack_tiles<F32To4>, pack_tiles<MXFP4>};

}  // namespace

extern "C" void paceline_pack(int encoding, Bytes rows, int64_t row_bytes, int row_groups, const int32_t* order,
                              const Linear* to, int begin, int end) {
    kPackers[encoding](rows, row_bytes, row_groups, order, *to, begin, end);
}
