// The parts of a softmax over chunks of keys, joined in the order of positions (online softmax, arXiv 1805.02867).
#pragma once

#include <cmath>

#include "simd.h"

namespace PACELINE_PATH {

constexpr float kHidden = -3e38f;  // the score of a key that a query must not see

// What a query has gathered so far; a partial result is these two numbers, then head_dim weighted values.
struct Partial {
    float top;    // highest score
    float total;  // sum of exp(score - top)
};

// What a query's earlier and later sums count for when they are joined.
struct Shares {
    float before, later;
};

template <Floats (*exponent)(Floats)>
PL_INLINE Shares join_totals(Partial& before, const Partial& later) {
    const float top = before.top > later.top ? before.top : later.top;
    alignas(64) float pair[kLanes] = {before.top - top, later.top - top};
    store(pair, exponent(load(pair)));
    before.total = std::fmaf(later.total, pair[1], before.total * pair[0]);
    before.top = top;
    return {pair[0], pair[1]};
}

PL_INLINE void join_values(float* sums, Floats more, const Shares& shares) {
    store(sums, fma(more, all(shares.later), load(sums) * all(shares.before)));
}

// Joins a later chunk to what came before it.
template <Floats (*exponent)(Floats)>
PL_INLINE void join(Partial& before, float* sums, const Partial& later, const float* more, int head_dim) {
    const Shares shares = join_totals<exponent>(before, later);
    for (int d = 0; d < head_dim; d += kLanes) join_values(sums + d, load(more + d), shares);
}

}  // namespace PACELINE_PATH
