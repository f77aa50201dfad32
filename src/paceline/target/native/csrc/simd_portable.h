// The sixteen lanes in plain C++, for any processor: right, and slow.
#pragma once

#include "half.h"

namespace PACELINE_PATH {

constexpr int kStripRows = 4;
constexpr int kQueryBlock = 3;
constexpr int kWide = 2;
constexpr bool kSignedDots = false;

struct Floats { float v[16]; };
struct Ints { int32_t v[16]; };
struct Codes { uint8_t v[64]; };
struct Pairs { int16_t v[32]; };
using OnePair = Pairs;

#define PL_LANES for (int i = 0; i < 16; ++i)

PL_INLINE Floats all(float x) { Floats r; PL_LANES r.v[i] = x; return r; }
PL_INLINE Floats zeros() { return all(0.0f); }
PL_INLINE Floats load(const float* p) { Floats r; std::memcpy(r.v, p, 64); return r; }
PL_INLINE void store(float* p, Floats a) { std::memcpy(p, a.v, 64); }
PL_INLINE Floats operator+(Floats a, Floats b) { PL_LANES a.v[i] += b.v[i]; return a; }
PL_INLINE Floats operator-(Floats a, Floats b) { PL_LANES a.v[i] -= b.v[i]; return a; }
PL_INLINE Floats operator*(Floats a, Floats b) { PL_LANES a.v[i] *= b.v[i]; return a; }
PL_INLINE Floats operator/(Floats a, Floats b) { PL_LANES a.v[i] /= b.v[i]; return a; }
PL_INLINE Floats fma(Floats a, Floats b, Floats c) { PL_LANES c.v[i] = std::fmaf(a.v[i], b.v[i], c.v[i]); return c; }
PL_INLINE Floats max(Floats a, Floats b) { PL_LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
PL_INLINE Floats min(Floats a, Floats b) { PL_LANES a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
PL_INLINE Floats magnitude(Floats a) { PL_LANES a.v[i] = std::fabs(a.v[i]); return a; }
PL_INLINE Floats to_floats(Ints a) { Floats r; PL_LANES r.v[i] = (float)a.v[i]; return r; }
// What is no number, or too large for one, becomes the lowest integer, as the vector instructions do.
PL_INLINE Ints to_ints(Floats a) {
    Ints r;
    PL_LANES r.v[i] = std::fabs(a.v[i]) < 2147483648.0f ? (int32_t)std::lrintf(a.v[i]) : INT32_MIN;
    return r;
}
PL_INLINE Floats times_power_of_two(Floats x, Floats shifted) {
    PL_LANES {
        uint32_t bits, exponent;
        std::memcpy(&bits, &x.v[i], 4);
        std::memcpy(&exponent, &shifted.v[i], 4);
        bits += exponent << 23;
        std::memcpy(&x.v[i], &bits, 4);
    }
    return x;
}
PL_INLINE Floats first_lanes(int count, Floats a, Floats b) { PL_LANES if (i >= count) a.v[i] = b.v[i]; return a; }
PL_INLINE Floats load_halves(const uint16_t* p) { Floats r; PL_LANES r.v[i] = from_half(p[i]); return r; }
PL_INLINE void store_halves(uint16_t* p, Floats a) { PL_LANES p[i] = to_half(a.v[i]); }
PL_INLINE Floats load_unsigned_bytes(const uint8_t* p) { Floats r; PL_LANES r.v[i] = (float)p[i]; return r; }
PL_INLINE Floats load_signed_bytes(const int8_t* p) { Floats r; PL_LANES r.v[i] = (float)p[i]; return r; }
PL_INLINE void store_signed_bytes(int8_t* p, Ints a) { PL_LANES p[i] = (int8_t)a.v[i]; }
PL_INLINE int sum(Ints a) { int s = 0; PL_LANES s += a.v[i]; return s; }
PL_INLINE float sum(Floats a) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; ++i) a.v[i] += a.v[i + half];
    return a.v[0];
}
PL_INLINE float highest(Floats a) {
    float h = a.v[0];
    PL_LANES h = h > a.v[i] ? h : a.v[i];
    return h;
}

template <int bits>
PL_INLINE Ints all_shifted(int32_t x) { Ints r; PL_LANES r.v[i] = (int32_t)((uint32_t)x << bits); return r; }
PL_INLINE Ints no_ints() { return all_shifted<0>(0); }
PL_INLINE Codes load_codes(const uint8_t* p) { Codes r; std::memcpy(r.v, p, 64); return r; }
PL_INLINE Codes low_nibbles(Codes w) { for (uint8_t& b : w.v) b &= 15; return w; }
PL_INLINE Codes high_nibbles(Codes w) { for (uint8_t& b : w.v) b >>= 4; return w; }
PL_INLINE Codes look_up(Codes nibbles, const uint8_t* table) { for (uint8_t& b : nibbles.v) b = table[b]; return nibbles; }
template <int pair>
PL_INLINE Codes with_crumbs(Codes nibbles, Codes crumbs) {
    for (int i = 0; i < 64; ++i) nibbles.v[i] |= (uint8_t)((crumbs.v[i] >> 2 * pair & 3) << 4);
    return nibbles;
}
template <int bits, int four>
PL_INLINE Ints dot(Ints sum, Codes w, const int8_t* row) {
    PL_LANES for (int j = 0; j < 4; ++j) sum.v[i] += w.v[4 * i + j] * row[4 * four + j];
    return sum;
}

PL_INLINE Pairs load_pairs(const int16_t* p) { Pairs r; std::memcpy(r.v, p, 64); return r; }
PL_INLINE OnePair all_pairs(const int16_t* p) {
    Pairs r;
    PL_LANES { r.v[2 * i] = p[0]; r.v[2 * i + 1] = p[1]; }
    return r;
}
PL_INLINE Ints dot(Ints sum, Pairs a, OnePair b) {
    PL_LANES sum.v[i] += a.v[2 * i] * b.v[2 * i] + a.v[2 * i + 1] * b.v[2 * i + 1];
    return sum;
}
PL_INLINE void store_shorts(int16_t* p, Ints a) { PL_LANES p[i] = (int16_t)a.v[i]; }

#undef PL_LANES

}  // namespace PACELINE_PATH
