// Floats as ordered integers, and weights whose sums are exact. Plain IEEE arithmetic in a fixed order: no
// instruction set changes a bit.

#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(PACELINE_ONE_CLONE)
#define FOR_EACH_MACHINE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_MACHINE
#endif

namespace {

constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float FAR = 30.0f;  // nats: no token this deep can win, for all noise lies between -3.2 and 22.9

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// Integers in the order of the floats; NaNs are beyond both infinities.
inline int32_t rank_of(float x) {
    const auto bits = static_cast<int32_t>(bits_of(x));
    return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

inline float of_rank(int32_t rank) {
    return float_of(static_cast<uint32_t>(rank ^ ((rank >> 31) & 0x7FFFFFFF)));
}

// exp(-depth) * 2^scale of a depth in 0..FAR, to 2e-7 of itself. Operation for operation what law.py's _weights does.
inline float exp_minus(float depth, uint32_t scale) {
    const float x = -depth;
    const float shifted = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to a whole number
    const float n = shifted - 12582912.0f;
    const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * (r * r) + r) + 1.0f;
    return float_of(bits_of(p) + ((bits_of(shifted) - 0x4B400000u + scale) << 23));  // p * 2^(n + scale)
}

// exp(-depth) in units of 2^-34, a whole number: sums are exact, whatever their order.
inline int64_t weight_of(float depth) {
    const double shifted = static_cast<double>(exp_minus(depth, 34)) + 0x1.8p52;  // in its last bits
    int64_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    return bits - 0x4338000000000000;
}

}  // namespace
