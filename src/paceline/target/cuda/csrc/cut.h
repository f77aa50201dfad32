// Top-k, top-p and min-p on the device, with the tokens that sampling/distribution.py keeps.
//
// A token's depth is how many nats it lies below the best, after temperature; its weight exp(-depth) is an integer in
// units of 2^-34, so that sums are exact in any order. Two kernels run before `choose`: a histogram of each row by depth,
// then a list of the tokens down to the depth at which the cut must lie. `choose` sorts the list and cuts it. A list that
// is too long leaves the choice to the host.
#pragma once
#include "pass.h"

#define EXACT DEVICE
#include "exact_exp.h"  // of sampling/csrc

constexpr int BINS = 64;               // of half a nat; the last one takes all that is deeper
constexpr int MAX_CANDIDATES = 2048;   // of a row
constexpr float WEIGHTLESS = -24.5f;   // what lies below has the weight 0

struct CutBuffers {
    u32* counts;      // [MAX_ROWS, BINS]
    u64* weights;     // [MAX_ROWS, BINS]
    u64* candidates;  // [MAX_ROWS, MAX_CANDIDATES]: rank of the depth above, complement of the token below
    u32* found;       // [MAX_ROWS] candidates; more than fit: none can be trusted
};

struct Cut {  // of a row
    int top_k;      // 0: off
    double top_p;   // 1: off
    float lowest;   // that min-p keeps, relative to the best; -INFINITE: off

    DEVICE Cut(const PassInput& in, int row, int vocab) {
        const int s = in.sequence[row];
        top_k = in.top_k[s] < vocab ? in.top_k[s] : 0, top_p = in.top_p[s], lowest = in.min_p_logit[s];
    }
    DEVICE bool cuts() const { return top_k > 0 || top_p < 1 || lowest > -INFINITE; }
};

// exp(x) in units of 2^-34, of what is not too deep to weigh anything.
DEVICE u64 weight_of(float x) { return x > WEIGHTLESS ? exp_units(x) : 0; }
DEVICE double from_units(u64 weight) { return (double)weight * 5.8207660913467407e-11; }  // 2^-34
DEVICE int bin_of(float x) { return x > -31.5f ? (int)(x * -2.0f) : BINS - 1; }

// The last bin that the cut may reach into. What lies in the last of all neither weighs anything nor can be chosen, since
// all noise lies between -3.2 and 22.9: whether the cut keeps it makes no difference.
DEVICE int edge_of(const Cut& cut, const u32* counts, const u64* weights) {
    u64 count = 0, weight = 0, total = 0;
    for (int i = 0; i < BINS; i++) total += load_fresh(weights + i);
    const double wanted = cut.top_p * from_units(total);
    for (int i = 0; i < BINS - 1; i++) {
        count += (u32)load_fresh((const int*)counts + i), weight += load_fresh(weights + i);
        if (cut.top_k > 0 ? count >= (u64)cut.top_k : cut.top_p < 1 ? from_units(weight) >= wanted : i >= bin_of(cut.lowest))
            return i;
    }
    return BINS - 2;
}

// Sorts 2^n keys in shared memory, largest first (bitonic).
DEVICE void sort_descending(u64* keys, int count) {
    for (int size = 2; size <= count; size <<= 1)
        for (int step = size >> 1; step; step >>= 1) {
            for (int i = threadIdx.x; i < count; i += THREADS) {
                const int j = i ^ step;
                const u64 a = keys[i], b = keys[j];
                if (j > i && ((i & size) == 0 ? a < b : a > b)) keys[i] = b, keys[j] = a;
            }
            sync_block();
        }
}

// How many leading keys have together less than the wanted weight. sums: [THREADS] in shared memory.
template <class WeightAt> DEVICE int count_below(WeightAt weight_at, int count, double wanted, u64* sums, int* below) {
    constexpr int EACH = MAX_CANDIDATES / THREADS;
    const int thread = threadIdx.x, first = thread * EACH;
    u64 own = 0;
    for (int i = first; i < first + EACH && i < count; i++) own += weight_at(i);
    sums[thread] = own;
    if (thread == 0) *below = 0;
    sync_block();
    for (int step = 1; step < THREADS; step <<= 1) {  // inclusive prefix sum
        const u64 other = thread >= step ? sums[thread - step] : 0;
        sync_block();
        sums[thread] += other;
        sync_block();
    }
    u64 reached = sums[thread] - own;
    int less = 0;
    for (int i = first; i < first + EACH && i < count; i++) {
        reached += weight_at(i);
        less += from_units(reached) < wanted;
    }
    for (int mask = 16; mask; mask >>= 1) less += shuffle_xor(less, mask);
    if (thread % 32 == 0) block_add(below, less);
    sync_block();
    return *below;
}
