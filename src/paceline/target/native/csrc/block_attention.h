// Attention of all rows of a block over one chunk of keys, which all of them see.
//
// Queries of one KV head stand side by side, [head_dim][queries], so that a key is multiplied with all at once.
#pragma once

#include "model.h"
#include "online_softmax.h"

namespace PACELINE_PATH {

constexpr int kBlockChunk = 128;                         // keys
constexpr int kScoreKeys = kQueryBlock * kWide / 3;      // times two vectors of queries

// Scores of T keys with V vectors of queries. scores: [T][padded].
template <int T, int V>
PL_INLINE void score_block(const uint16_t* const* keys, const float* queries, int padded, int size, float* scores) {
    alignas(64) float near[T][kMaxHeadDim];
    for (int t = 0; t < T; ++t)
        for (int d = 0; d < size; d += kLanes) store(near[t] + d, load_halves(keys[t] + d));
    Floats a[T][V];
    _Pragma("GCC unroll 8") for (int t = 0; t < T; ++t)
        _Pragma("GCC unroll 2") for (int v = 0; v < V; ++v) a[t][v] = zeros();
    for (int d = 0; d < size; ++d, queries += padded) {
        Floats q[V];
        _Pragma("GCC unroll 2") for (int v = 0; v < V; ++v) q[v] = load(queries + v * kLanes);
        _Pragma("GCC unroll 8") for (int t = 0; t < T; ++t) {
            const Floats key = all(near[t][d]);
            _Pragma("GCC unroll 2") for (int v = 0; v < V; ++v) a[t][v] = fma(key, q[v], a[t][v]);
        }
    }
    _Pragma("GCC unroll 8") for (int t = 0; t < T; ++t)
        _Pragma("GCC unroll 2") for (int v = 0; v < V; ++v) store(scores + t * padded + v * kLanes, a[t][v]);
}

template <int T>
PL_INLINE void score_all(const uint16_t* const* keys, const float* queries, int count, int padded, int size,
                         float* scores) {
    int q = 0;
    for (; q + kLanes < count; q += 2 * kLanes) score_block<T, 2>(keys, queries + q, padded, size, scores + q);
    if (q < count) score_block<T, 1>(keys, queries + q, padded, size, scores + q);
}

// Scores to weights, in place, for each column. tops, total: [padded].
PL_INLINE void soften_columns(float* scores, int keys, int count, int padded, float* tops, float* total) {
    for (int q = 0; q < count; q += kLanes) {
        Floats top = load(scores + q), whole = zeros();
        for (int t = 1; t < keys; ++t) top = max(top, load(scores + t * padded + q));
        for (int t = 0; t < keys; ++t) {
            const Floats share = exponential(load(scores + t * padded + q) - top);
            store(scores + t * padded + q, share);
            whole = whole + share;
        }
        store(tops + q, top);
        store(total + q, whole);
    }
}

// 16 * W dimensions of the values, weighted for B queries. weights: [keys][padded], of the first of them.
template <int B, int W>
PL_INLINE void weigh_block(const uint16_t* const* values, int keys, const float* weights, int padded, int first,
                           int size, float* out) {
    Floats a[B][W];
    _Pragma("GCC unroll 16") for (int b = 0; b < B; ++b)
        _Pragma("GCC unroll 4") for (int w = 0; w < W; ++w) a[b][w] = zeros();
    for (int t = 0; t < keys; ++t, weights += padded) {
        Floats value[W];
        _Pragma("GCC unroll 4") for (int w = 0; w < W; ++w) value[w] = load_halves(values[t] + first + w * kLanes);
        _Pragma("GCC unroll 16") for (int b = 0; b < B; ++b) {
            const Floats weight = all(weights[b]);
            _Pragma("GCC unroll 4") for (int w = 0; w < W; ++w) a[b][w] = fma(value[w], weight, a[b][w]);
        }
    }
    _Pragma("GCC unroll 16") for (int b = 0; b < B; ++b)
        _Pragma("GCC unroll 4") for (int w = 0; w < W; ++w) store(out + b * size + first + w * kLanes, a[b][w]);
}

template <int B>
PL_INLINE void weigh_all(const uint16_t* const* values, int keys, const float* weights, int padded, int size, float* out) {
    int d = 0;
    for (; d + kWide * kLanes <= size; d += kWide * kLanes)
        weigh_block<B, kWide>(values, keys, weights, padded, d, size, out);
    for (; d < size; d += kLanes) weigh_block<B, 1>(values, keys, weights, padded, d, size, out);
}

// keys, values: where each of up to kBlockChunk lies. queries: [size][padded]. scores: room for [keys][padded].
// out: [count][size].
inline void attend_block(const uint16_t* const* keys, const uint16_t* const* values, int number, const float* queries,
                         int count, int padded, int size, float* scores, float* tops, float* total, float* out) {
    int t = 0;
    for (; t + kScoreKeys <= number; t += kScoreKeys)
        score_all<kScoreKeys>(keys + t, queries, count, padded, size, scores + t * padded);
    for (; t < number; ++t) score_all<1>(keys + t, queries, count, padded, size, scores + t * padded);
    soften_columns(scores, number, count, padded, tops, total);
    int q = 0;
    for (; q + kQueryBlock <= count; q += kQueryBlock)
        weigh_all<kQueryBlock>(values, number, scores + q, padded, size, out + q * size);
    for (; q < count; ++q) weigh_all<1>(values, number, scores + q, padded, size, out + q * size);
}

}  // namespace PACELINE_PATH
