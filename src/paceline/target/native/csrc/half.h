// IEEE half precision in plain C++.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

inline float from_half(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023, bits;
    if (exponent == 0) {
        float f = (float)fraction * 5.9604644775390625e-8f;  // 2 ** -24
        return sign ? -f : f;
    }
    bits = exponent == 31 ? sign | 0x7f800000 | fraction << 13 : sign | (exponent + 112) << 23 | fraction << 13;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}
// To nearest, ties to even.
inline uint16_t to_half(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    uint32_t sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
    if (rest >= 0x7f800000) return (uint16_t)(sign | 0x7c00 | (rest > 0x7f800000 ? 0x200 | (rest >> 13 & 0x3ff) : 0));
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // rounds past the largest half
    if (rest < 0x38800000) {                                   // a denormal half
        float magnitude = std::fabs(f) * 16777216.0f;          // 2 ** 24
        return (uint16_t)(sign | (uint32_t)std::lrintf(magnitude));
    }
    rest += 0xfff + (rest >> 13 & 1);
    return (uint16_t)(sign | (rest - 0x38000000) >> 13);
}
