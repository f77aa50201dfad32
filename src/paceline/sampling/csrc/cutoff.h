// Top-k, top-p and min-p of a row. Each keeps the least deep tokens, of equally deep ones the lowest ids, so that
// one `Cutoff` stands for all three. A row may be of some tokens only; its indices are in the order of their ids.

#pragma once

#include <algorithm>
#include <vector>

#include "exact_math.h"

namespace {

constexpr int64_t BLOCK = 64;                           // tokens looked at together
constexpr float DEPTHS[] = {3, 6, 9, 12, 16, 20, FAR};  // tried in this order: the cutoff mostly lies near the top

struct Cutoff {  // keeps tokens less deep, and those as deep up to this index
    float depth;
    int64_t last;
};

struct Scratch {  // of one thread; grows to the longest row it has seen
    std::vector<int64_t> ids;      // [FEW + 1] the first allowed ones, where there is a mask
    std::vector<float> row;        // [n] the logits, where something changed them
    std::vector<int32_t> counts;    // [n] all zero between calls
    std::vector<float> depth;      // [blocks * BLOCK] at most FAR, which is what lies beyond the row
    std::vector<uint32_t> lowest;  // [blocks] the bits of the least depth in each
    int64_t gathered;              // how many tokens the rest is about
    std::vector<int64_t> near;     // [blocks * BLOCK] their indices, ascending
    std::vector<uint32_t> level;   // likewise, the bits of their depths
    std::vector<int64_t> weight;   // likewise, what they weigh
};

template <class T>
void hold(std::vector<T>& v, int64_t n) {  // never shrinks: growing again would write to all of it
    if (static_cast<int64_t>(v.size()) < n) v.resize(n);
}

FOR_EACH_MACHINE int64_t total_weight(const float* depth, int64_t n) {
    int64_t sum = 0;
    for (int64_t i = 0; i < n; i++) sum += weight_of(depth[i]);
    return sum;
}

FOR_EACH_MACHINE int64_t weigh(const uint32_t* level, int64_t* weight, int64_t n) {
    int64_t sum = 0;
    for (int64_t i = 0; i < n; i++) {
        weight[i] = weight_of(as_float(level[i]));
        sum += weight[i];
    }
    return sum;
}

FOR_EACH_MACHINE int64_t weight_up_to(uint32_t cutoff, const uint32_t* level, const int64_t* weight,
                                      int64_t n) {
    int64_t sum = 0;
    for (int64_t i = 0; i < n; i++) sum += level[i] <= cutoff ? weight[i] : 0;
    return sum;
}

// Gathers the tokens down to a depth that the cutoff keeps; returns what they weigh together.
int64_t gather(Scratch& own, int64_t length, float deepest, Cutoff cutoff, bool counted) {
    int64_t n = 0;
    const uint32_t limit = as_bits(std::min(deepest, cutoff.depth));
    for (int64_t first = 0; first < length; first += BLOCK) {
        if (own.lowest[first / BLOCK] > limit) continue;
        for (int64_t i = first; i < std::min(first + BLOCK, length); i++) {
            const float depth = own.depth[i];
            own.near[n] = i;
            own.level[n] = as_bits(depth);
            n += (as_bits(depth) <= limit) & ((depth != cutoff.depth) | (i <= cutoff.last));  // without a branch
        }
    }
    own.gathered = n;
    if (!counted) return weigh(own.level.data(), own.weight.data(), n);
    std::fill(own.weight.begin(), own.weight.begin() + n, 1);
    return n;
}

// Drops the first n tokens that are not in low..high; returns how many are left. `above` gains the less deep.
int64_t narrow(Scratch& own, int64_t n, uint32_t low, uint32_t high, int64_t& above) {
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t level = own.level[i];
        const int64_t weight = own.weight[i];
        above += level < low ? weight : 0;
        own.level[kept] = level;
        own.weight[kept] = weight;
        kept += level >= low && level <= high;
    }
    return kept;
}

// The cutoff of the fewest gathered tokens whose weight reaches the target, as that of all of them does.
Cutoff cutoff_of_gathered(Scratch& own, double target) {
    int64_t n = own.gathered;
    uint32_t low = 0, high = as_bits(FAR);  // the cutoff's level is in low..high
    int64_t above = 0;                      // what the tokens that were dropped for being less deep weigh
    while (low < high) {
        for (int step = 0; step < 4 && low < high; step++) {
            const uint32_t middle = low + (high - low) / 2;
            const int64_t reached = above + weight_up_to(middle, own.level.data(), own.weight.data(), n);
            if (static_cast<double>(reached) >= target)
                high = middle;
            else
                low = middle + 1;
        }
        n = narrow(own, n, low, high, above);
    }
    const int64_t each = own.weight[0];  // the n tokens left are equally deep
    int64_t spare = 0;                   // of them, those before the last that is needed
    while (spare < n - 1 && static_cast<double>(above + each * (spare + 1)) < target) spare++;
    const auto is_last = [&](int64_t at) { return as_bits(own.depth[at]) == low && spare-- == 0; };
    return {as_float(low), *std::find_if(own.near.begin(), own.near.begin() + own.gathered, is_last)};
}

Cutoff nearest(Scratch& own, int64_t length, double target, Cutoff cutoff, bool counted) {
    for (const float depth : DEPTHS)
        if (static_cast<double>(gather(own, length, depth, cutoff, counted)) >= target) break;
    return cutoff_of_gathered(own, target);
}

}  // namespace
