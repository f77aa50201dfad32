// Sixteen lanes at a time, in AVX-512, in AVX2, in NEON and in plain C++.
//
// Every operation here is exact or correctly rounded, and reductions fold their lanes in one fixed order, so
// that a kernel written with these types gives the same bits whatever it was compiled for.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

#define PL_INLINE __attribute__((always_inline)) inline

namespace PACELINE_PATH {

constexpr int kLanes = 16;

// Denormals cost a hundred times a normal number and carry nothing here: while one of these lives they are flushed
// to zero, on its thread. x86 tells a denormal after rounding, ARM before: a result less than half a unit in the last
// place below 2 ** -126 is 2 ** -126 on the one and 0 on the other. Only sums of numbers as small can show it.
class NoDenormals {
public:
#if defined(__x86_64__)
    NoDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
    ~NoDenormals() { _mm_setcsr(before_); }

private:
    const unsigned before_;
#elif defined(__aarch64__)
    NoDenormals() {
        asm volatile("mrs %0, fpcr" : "=r"(before_));
        asm volatile("msr fpcr, %0" : : "r"(before_ | 1 << 24) : "memory");
    }
    ~NoDenormals() { asm volatile("msr fpcr, %0" : : "r"(before_) : "memory"); }

private:
    uint64_t before_;
#else
    NoDenormals() {}
    ~NoDenormals() {}
#endif
};

PL_INLINE int32_t two_shorts(const int16_t* p) {
    int32_t both;
    std::memcpy(&both, p, 4);
    return both;
}

PL_INLINE void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }
// Into the second level: so much of it that the first one would lose what is in use.
PL_INLINE void prefetch_early(const void* address) { __builtin_prefetch(address, 0, 2); }

}  // namespace PACELINE_PATH

#if defined(__AVX512VNNI__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#elif defined(PACELINE_NEON)
#include "simd_neon.h"
#else
#include "simd_portable.h"
#endif

namespace PACELINE_PATH {

#if !defined(PACELINE_FOLDS)
// Lane i: the sum of row i, of sixteen.
PL_INLINE Floats row_sums(const float* rows) {
    alignas(64) float sums[kLanes];
    for (int i = 0; i < kLanes; ++i) sums[i] = sum(load(rows + i * kLanes));
    return load(sums);
}
// The highest number of each.
PL_INLINE Floats row_peaks(const float* rows) {
    alignas(64) float peaks[kLanes];
    for (int i = 0; i < kLanes; ++i) peaks[i] = highest(load(rows + i * kLanes));
    return load(peaks);
}
// The sums of both.
PL_INLINE void sum_both(Ints a, Ints b, int& first, int& second) {
    first = sum(a);
    second = sum(b);
}
#endif

// A float added to this one, 1.5 * 2 ** 23, is rounded to an integer, ties to even, which its lowest bits then hold.
// `times_power_of_two` takes it from there. The results below are normal floats: at the smallest power the factor is at
// least 1, so adding to its exponent multiplies it.
constexpr float kToInteger = 12582912.0f;

// e ** x for x <= 0 or moderately above; below -87 it stays at e ** -87, above 88 at e ** 88.
PL_INLINE Floats exponential(Floats x) {
    x = min(max(x, all(-87.0f)), all(88.0f));
    const Floats shifted = x * all(1.44269504f) + all(kToInteger), k = shifted - all(kToInteger);
    Floats r = fma(k, all(-0.693359375f), x);  // ln 2 in two parts, so that the remainder keeps its bits
    r = fma(k, all(2.12194440e-4f), r);
    Floats p = all(1.9875691500e-4f);
    p = fma(p, r, all(1.3981999507e-3f));
    p = fma(p, r, all(8.3334519073e-3f));
    p = fma(p, r, all(4.1665795894e-2f));
    p = fma(p, r, all(1.6666665459e-1f));
    p = fma(p, r, all(5.0000001201e-1f));
    p = fma(p, r * r, r + all(1.0f));
    return times_power_of_two(p, shifted);
}

// cap * tanh(x / cap)
PL_INLINE Floats softcap(Floats x, float cap) {
    const Floats e = exponential(x * all(2.0f / cap));
    return fma(all(-2.0f * cap), all(1.0f) / (e + all(1.0f)), all(cap));
}

// 2 ** x for x <= 0 or a little above; below -126 it stays at 2 ** -126. Exactly 1 at 0.
PL_INLINE Floats exponential2(Floats x) {
    x = max(x, all(-126.0f));
    const Floats shifted = x + all(kToInteger), r = x - (shifted - all(kToInteger));
    Floats p = all(1.3264727e-3f);
    p = fma(p, r, all(9.6715126e-3f));
    p = fma(p, r, all(5.5507337e-2f));
    p = fma(p, r, all(2.4022242e-1f));
    p = fma(p, r, all(6.9314698e-1f));
    p = fma(p, r, all(1.0f));
    return times_power_of_two(p, shifted);
}

}  // namespace PACELINE_PATH
