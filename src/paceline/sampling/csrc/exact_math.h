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

inline uint32_t as_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline uint64_t as_bits(double x) {
    uint64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float as_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// Integers in the order of the floats; NaNs are beyond both infinities.
inline int32_t rank_of(float x) {
    const auto bits = static_cast<int32_t>(as_bits(x));
    return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

inline float of_rank(int32_t rank) {
    return as_float(static_cast<uint32_t>(rank ^ ((rank >> 31) & 0x7FFFFFFF)));
}

}  // namespace

#define EXACT static inline
#include "exact_exp.h"

namespace {

inline float exp_minus(float depth, uint32_t scale) { return scaled_exp(-depth, scale); }  // depth: in 0..FAR
inline int64_t weight_of(float depth) { return static_cast<int64_t>(exp_units(-depth)); }  // in units of 2^-34

}  // namespace
