// Attention of a few queries that share a KV head over one chunk of keys, and the joining of chunks.
//
// A query's score with a key is one chain of products over the head's dimensions; the softmax of a chunk and
// the joining of chunks run in the order of positions. Neither depends on which queries are computed together.
#pragma once

#include "prefetch.h"

namespace PACELINE_PATH {

constexpr float kHidden = -3e38f;  // the score of a key that a query must not see

// What a query has gathered so far; a partial result is these two numbers, then head_dim weighted values.
struct Partial {
    float top;    // highest score
    float total;  // sum of exp(score - top)
};

// Scores of B queries with the keys of U sub-blocks.
template <int B, int U>
PL_INLINE void score_keys(const HeadCache& cache, Prefetcher* prefetcher, int sub, const float (*q)[kMaxHeadDim],
                          float (*scores)[kChunk], int at) {
    Floats a[B][U];
    const uint16_t *k[U], *later[U];
    for (int u = 0; u < U; ++u) {
        k[u] = cache.keys_of(sub + u);
        later[u] = prefetcher ? prefetcher->while_reading(k[u]) : k[u];
    }
    _Pragma("GCC unroll 16") for (int b = 0; b < B; ++b)
        _Pragma("GCC unroll 4") for (int u = 0; u < U; ++u) a[b][u] = zeros();
    for (int d = 0; d < cache.head_dim; ++d) {
        Floats key[U];
        _Pragma("GCC unroll 4") for (int u = 0; u < U; ++u) {
            key[u] = load_halves(k[u] + d * kSubBlock);
            prefetch_early(later[u] + d * kSubBlock);
        }
        _Pragma("GCC unroll 16") for (int b = 0; b < B; ++b) {
            Floats query = all(q[b][d]);
            _Pragma("GCC unroll 4") for (int u = 0; u < U; ++u) a[b][u] = fma(key[u], query, a[b][u]);
        }
    }
    _Pragma("GCC unroll 16") for (int b = 0; b < B; ++b)
        _Pragma("GCC unroll 4") for (int u = 0; u < U; ++u) store(scores[b] + at + u * kSubBlock, a[b][u]);
}

// Scores to weights, in place; keys from `visible` on get none. padded: a multiple of 16.
PL_INLINE Partial soften(float* scores, int visible, int padded) {
    Floats tops = all(kHidden);
    for (int t = 0; t < padded; t += kLanes) {
        Floats s = first_lanes(visible - t, load(scores + t), all(kHidden));
        store(scores + t, s);
        tops = max(tops, s);
    }
    float top = highest(tops);
    Floats total = zeros();
    for (int t = 0; t < padded; t += kLanes) {
        Floats p = first_lanes(visible - t, exponential(load(scores + t) - all(top)), zeros());
        store(scores + t, p);
        total = total + p;
    }
    return {top, sum(total)};
}

// Values of `keys` tokens, weighted: 16 * W dimensions from `first` on, for B queries. later: what is fetched
// while a sub-block is read, the same share of it.
template <int B, int W>
PL_INLINE void weigh_values(const HeadCache& cache, const uint16_t* const* later, int sub, int keys,
                            float (*weights)[kChunk], int first, float* const* out) {
    Floats a[B][W];
    _Pragma("GCC unroll 16") for (int b = 0; b < B; ++b)
        _Pragma("GCC unroll 4") for (int w = 0; w < W; ++w) a[b][w] = zeros();
    for (int t = 0; t < keys; ++t) {
        const int token = t % kSubBlock;
        const uint16_t* v = cache.values_of(sub + t / kSubBlock) + token * cache.head_dim + first;
        const uint16_t* share = later[t / kSubBlock] + (first + token * W) * kSubBlock;
        _Pragma("GCC unroll 4") for (int w = 0; w < W; w += 2) prefetch_early(share + w * kSubBlock);
        Floats value[W];
        _Pragma("GCC unroll 4") for (int w = 0; w < W; ++w) value[w] = load_halves(v + w * kLanes);
        _Pragma("GCC unroll 16") for (int b = 0; b < B; ++b) {
            Floats weight = all(weights[b][t]);
            _Pragma("GCC unroll 4") for (int w = 0; w < W; ++w) a[b][w] = fma(value[w], weight, a[b][w]);
        }
    }
    _Pragma("GCC unroll 16") for (int b = 0; b < B; ++b)
        _Pragma("GCC unroll 4") for (int w = 0; w < W; ++w) store(out[b] + first + w * kLanes, a[b][w]);
}

// B queries over one chunk. visible[b]: how many of its keys query b sees; out[b]: head_dim floats. prefetcher: null
// where the chunk was read before.
template <int B>
void attend_chunk(const HeadCache& cache, Prefetcher* prefetcher, int chunk, const float* const* q, const int* visible,
                  Partial* partial, float* const* out) {
    alignas(64) float scores[B][kChunk], near[B][kMaxHeadDim];  // side by side, so that one pointer finds them
    int keys = 0;
    for (int b = 0; b < B; ++b) {
        keys = std::max(keys, visible[b]);
        std::memcpy(near[b], q[b], cache.head_dim * sizeof(float));
    }
    const int subs = (keys + kSubBlock - 1) / kSubBlock, first = chunk * (kChunk / kSubBlock);
    int s = 0;
    for (; s + kWide <= subs; s += kWide)
        score_keys<B, kWide>(cache, prefetcher, first + s, near, scores, s * kSubBlock);
    for (; s < subs; ++s) score_keys<B, 1>(cache, prefetcher, first + s, near, scores, s * kSubBlock);
    for (int b = 0; b < B; ++b) partial[b] = soften(scores[b], visible[b], subs * kSubBlock);
    const uint16_t* later[kChunk / kSubBlock];
    for (s = 0; s < subs; ++s) {
        later[s] = cache.values_of(first + s);
        if (prefetcher) later[s] = prefetcher->while_reading(later[s]);
    }
    int d = 0;
    for (; d + kWide * kLanes <= cache.head_dim; d += kWide * kLanes)
        weigh_values<B, kWide>(cache, later, first, keys, scores, d, out);
    for (; d < cache.head_dim; d += kLanes) weigh_values<B, 1>(cache, later, first, keys, scores, d, out);
}

// Joins a later chunk to what came before it.
PL_INLINE void join(Partial& before, float* sums, const Partial& later, const float* more, int head_dim) {
    float top = before.top > later.top ? before.top : later.top;
    alignas(64) float pair[kLanes] = {before.top - top, later.top - top};
    store(pair, exponential(load(pair)));
    Floats old_share = all(pair[0]), new_share = all(pair[1]);
    for (int d = 0; d < head_dim; d += kLanes)
        store(sums + d, fma(load(more + d), new_share, load(sums + d) * old_share));
    before.total = std::fmaf(later.total, pair[1], before.total * pair[0]);
    before.top = top;
}

}  // namespace PACELINE_PATH
