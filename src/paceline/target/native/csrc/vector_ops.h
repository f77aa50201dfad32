// Small steps that the passes of decoder and drafter share.
#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"

namespace PACELINE_PATH {

constexpr float kLargestHalf = 65504.0f;

// An even share of `total` pieces.
struct Share {
    int begin, end;
    Share(int total, int me, int pool) : begin((int)((int64_t)total * me / pool)), end((int)((int64_t)total * (me + 1) / pool)) {}
};

PL_INLINE Floats silu(Floats x) { return x / (all(1.0f) + exponential(zeros() - x)); }

// x * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (x + 0.044715 * x ** 3)
PL_INLINE Floats gelu_tanh(Floats x) {
    const Floats twice = x * fma(x * x, all(2 * 0.7978845608f * 0.044715f), all(2 * 0.7978845608f));
    return x / (all(1.0f) + exponential(zeros() - twice));
}

PL_INLINE Floats clamped_swiglu(Floats gate, Floats up, float limit, float slope) {
    gate = min(gate, all(limit));
    up = max(min(up, all(limit)), all(-limit));
    return gate / (all(1.0f) + exponential(zeros() - gate * all(slope))) * (up + all(1.0f));
}

PL_INLINE float inverse_rms(const float* x, int count, int padded, float eps) {
    Floats squares = zeros();
    for (int i = 0; i < padded; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
    return 1.0f / std::sqrt(sum(squares) / (float)count + eps);
}

PL_INLINE Floats as_half_range(Floats x) { return min(max(x, all(-kLargestHalf)), all(kLargestHalf)); }

PL_INLINE void normalise_head(float* head, const float* weight, int size, float eps) {
    const Floats by = all(inverse_rms(head, size, size, eps));
    for (int d = 0; d < size; d += kLanes) store(head + d, load(head + d) * by * load(weight + d));
}

// The half rotation: dimension d turns with d + size / 2.
PL_INLINE void rotate_head(float* head, int size, const float* cosines, const float* sines) {
    const int half = size / 2;
    for (int d = 0; d < half; d += kLanes) {
        const Floats a = load(head + d), b = load(head + half + d), c = load(cosines + d), s = load(sines + d);
        store(head + d, a * c - b * s);
        store(head + half + d, b * c + a * s);
    }
}

}  // namespace PACELINE_PATH
