// Attention of the queries that share a KV head over one chunk of keys, in integers.
//
// Queries, keys and values are vectors of 16-bit codes with one scale each; a chunk's softmax weights, times the
// scales of their values, are 16-bit codes too. Both dot products, scores and weighted values, are sums of 16-bit
// products in 32 bits. Their limits are chosen so that no sum overflows (Cauchy-Schwarz for scores), so every sum is
// exact, and neither the order of its terms nor the queries computed beside it can change a bit. The softmax of a
// chunk and the joining of chunks are floats in the order of positions.
#pragma once

#include <algorithm>
#include <utility>

#include "online_softmax.h"
#include "prefetch.h"

namespace PACELINE_PATH {

constexpr int kTileQueries = 96;        // that attend together: a chunk's keys are read once for all of them
constexpr float kMaxCode = 32767.0f;    // of a query, a key or a softmax weight
constexpr float kMaxNorm = 46000.0f;    // of a query's codes and of a key's: their product, with rounding, < 2 ** 31
constexpr float kMaxValue = 8191.0f;    // code of a value, and
constexpr float kMaxWeights = 261000.0f;  // the sum of a chunk's weights: their product, with rounding, < 2 ** 31
static_assert((kMaxNorm + 8.0) * (kMaxNorm + 8.0) < 2147483648.0, "rounding 256 codes adds up to 8 to a norm");
static_assert((kMaxWeights + kChunk / 2) * (double)kMaxValue < 2147483648.0, "and up to a half to each weight");
constexpr float kLargest = 1e15f, kSmallest = 1e-15f;  // magnitudes beyond are clamped; a vector below is zero

// What is no number becomes one: its row is lost, but codes stay within their limits.
PL_INLINE Floats in_range(Floats x) { return max(min(x, all(kLargest)), all(-kLargest)); }

PL_INLINE float largest_magnitude(const float* x, int size) {
    Floats peak = zeros();
    for (int d = 0; d < size; d += kLanes) peak = max(peak, magnitude(in_range(load(x + d))));
    return highest(peak);
}

// The scale of a query's or key's codes: as fine as both limits allow.
PL_INLINE float dot_scale(const float* x, int size) {
    const float peak = largest_magnitude(x, size);
    if (peak < kSmallest) return 0.0f;
    Floats squares = zeros();
    for (int d = 0; d < size; d += kLanes) squares = fma(in_range(load(x + d)), in_range(load(x + d)), squares);
    return std::max(peak / kMaxCode, std::sqrt(sum(squares)) / kMaxNorm);
}

PL_INLINE float value_scale(const float* x, int size) {
    const float peak = largest_magnitude(x, size);
    return peak < kSmallest ? 0.0f : peak / kMaxValue;
}

PL_INLINE void store_codes(const float* x, int size, float scale, int16_t* codes) {
    const Floats inverse = all(scale > 0 ? 1.0f / scale : 0.0f);
    for (int d = 0; d < size; d += kLanes) store_shorts(codes + d, to_ints(in_range(load(x + d)) * inverse));
}

// Scores of B queries with the keys of U sub-blocks, but for the scale of the query. q: [B][head_dim];
// scores: [B][kChunk]. later: what is prefetched meanwhile.
template <int B, int U>
void score_keys(const HeadCache& cache, const int16_t* const* keys, const int16_t* const* later, const int16_t* q,
                float* scores) {
    const int size = cache.head_dim;
    Ints a[B][U];
    _Pragma("GCC unroll 16") for (int b = 0; b < B; ++b)
        _Pragma("GCC unroll 4") for (int u = 0; u < U; ++u) a[b][u] = no_ints();
    for (int d = 0; d < size; d += 2) {
        Pairs key[U];
        _Pragma("GCC unroll 4") for (int u = 0; u < U; ++u) {
            key[u] = load_pairs(keys[u] + d * kSubBlock);
            prefetch_early(later[u] + d * kSubBlock);
        }
        _Pragma("GCC unroll 16") for (int b = 0; b < B; ++b) {
            const OnePair query = all_pairs(q + b * size + d);
            _Pragma("GCC unroll 4") for (int u = 0; u < U; ++u) a[b][u] = dot(a[b][u], key[u], query);
        }
    }
    _Pragma("GCC unroll 4") for (int u = 0; u < U; ++u) {
        const Floats scale = load(cache.scales_of(keys[u]));
        _Pragma("GCC unroll 16") for (int b = 0; b < B; ++b)
            store(scores + b * kChunk + u * kSubBlock, to_floats(a[b][u]) * scale);
    }
}

// The softmax weights of one query in one chunk, as codes in units of `unit`.
struct Softened {
    Partial partial;
    float unit;
};

// Scores to codes of weights; keys before `hidden` and from `visible` on get none. scale: of the query, for powers of
// two; cap: of the scores, for the same, or 0. first: the chunk's first sub-block; padded: a multiple of 16.
PL_INLINE Softened soften(const HeadCache& cache, int first, float scale, float cap, int hidden, int visible, int padded,
                          float* scores, int16_t* weights) {
    Floats tops = all(kHidden);
    int t = 0;
    if (cap > 0) {
        for (; t < padded; t += kLanes) store(scores + t, softcap(load(scores + t) * all(scale), cap));
        scale = 1.0f;
    }
    for (t = 0; t < hidden; t += kLanes) store(scores + t, first_lanes(hidden - t, all(kHidden), load(scores + t)));
    t = 0;
    for (; t + kLanes <= visible; t += kLanes) tops = max(tops, load(scores + t));
    for (; t < padded; t += kLanes) {
        const Floats s = first_lanes(visible - t, load(scores + t), all(kHidden));
        store(scores + t, s);
        tops = max(tops, s);
    }
    const float top = highest(tops) * scale;
    const Floats by = all(scale), below = all(-top);
    Floats total = zeros(), whole = zeros(), peak = zeros();
    for (t = 0; t < padded; t += kLanes) {
        Floats p = exponential2(fma(load(scores + t), by, below));
        if (t + kLanes > visible) p = first_lanes(visible - t, p, zeros());
        if (t < hidden) p = first_lanes(hidden - t, zeros(), p);
        total = total + p;
        p = p * load(cache.scales_of(cache.values_of(first + t / kSubBlock)));
        whole = whole + p;
        peak = max(peak, p);
        store(scores + t, p);
    }
    const float unit = std::max(highest(peak) / kMaxCode, sum(whole) / kMaxWeights);
    const Floats inverse = all(unit > 0 ? 1.0f / unit : 0.0f);
    for (t = 0; t < padded; t += kLanes) store_shorts(weights + t, to_ints(load(scores + t) * inverse));
    return {{top, sum(total)}, unit};
}

// Values of `subs` sub-blocks, weighted: 16 * W dimensions from `first` on, for B queries. weights: [B][kChunk];
// shares: null where nothing came before. later: what is fetched while a sub-block is read, the same share of it.
template <int B, int W>
void weigh_values(const HeadCache& cache, const int16_t* const* later, int sub, int subs, const int16_t* weights,
                  int first, const Softened* softened, const Shares* shares, float* const* sums) {
    Ints a[B][W];
    _Pragma("GCC unroll 16") for (int b = 0; b < B; ++b)
        _Pragma("GCC unroll 4") for (int w = 0; w < W; ++w) a[b][w] = no_ints();
    for (int s = 0; s < subs; ++s, weights += kSubBlock) {
        const int16_t *values = cache.values_of(sub + s) + 2 * first, *next = later[s] + first * kSubBlock;
        for (int t = 0; t < kSubBlock; t += 2, values += 2 * cache.head_dim, next += 2 * W * kSubBlock) {
            _Pragma("GCC unroll 4") for (int w = 0; w < W; ++w) prefetch_early(next + 2 * w * kSubBlock);
            Pairs value[W];
            _Pragma("GCC unroll 4") for (int w = 0; w < W; ++w) value[w] = load_pairs(values + 2 * w * kLanes);
            _Pragma("GCC unroll 16") for (int b = 0; b < B; ++b) {
                const OnePair weight = all_pairs(weights + b * kChunk + t);
                _Pragma("GCC unroll 4") for (int w = 0; w < W; ++w) a[b][w] = dot(a[b][w], value[w], weight);
            }
        }
    }
    _Pragma("GCC unroll 16") for (int b = 0; b < B; ++b)
        _Pragma("GCC unroll 4") for (int w = 0; w < W; ++w) {
            float* out = sums[b] + first + w * kLanes;
            const Floats more = to_floats(a[b][w]) * all(softened[b].unit);
            if (shares) join_values(out, more, shares[b]);
            else store(out, more);
        }
}

using ScoreKeys = void (*)(const HeadCache&, const int16_t* const*, const int16_t* const*, const int16_t*, float*);
using WeighValues = void (*)(const HeadCache&, const int16_t* const*, int, int, const int16_t*, int, const Softened*,
                             const Shares*, float* const*);

// The kernels by their number of queries, less one.
template <int wide, size_t... n>
ScoreKeys score_with(int queries, std::index_sequence<n...>) {
    static constexpr ScoreKeys of[] = {score_keys<(int)n + 1, wide>...};
    return of[queries - 1];
}
template <int wide, size_t... n>
WeighValues weigh_with(int queries, std::index_sequence<n...>) {
    static constexpr WeighValues of[] = {weigh_values<(int)n + 1, wide>...};
    return of[queries - 1];
}

// Queries of one KV head, and the memory to work in.
struct QueryTile {
    const int count;                   // up to kTileQueries
    float* const scores;               // [count][kChunk]
    int16_t* const weights;            // [count][kChunk]
    int16_t* const codes;              // [count][head_dim]
    float scale[kTileQueries];         // of the codes, with that of attention, for powers of two
    int hidden[kTileQueries];          // how many of the chunk's first keys lie before each query's window
    int visible[kTileQueries];         // and up to which of its keys each query sees
    float cap = 0.0f;                  // of scores, for powers of two; 0: none
    Partial* partial[kTileQueries];
    float* sums[kTileQueries];         // head_dim each

    static size_t floats(int head_dim) { return (size_t)kTileQueries * (kChunk + kChunk / 2 + head_dim / 2); }
    QueryTile(int queries, float* memory)
        : count(queries),
          scores(memory),
          weights(reinterpret_cast<int16_t*>(memory + kTileQueries * kChunk)),
          codes(weights + kTileQueries * kChunk) {}
};

// All queries of a tile over one chunk. joins: earlier chunks are in `partial` and `sums` already. prefetcher: null
// where the chunk was read before.
inline void attend_chunk(const HeadCache& cache, Prefetcher* prefetcher, int chunk, QueryTile& tile, bool joins) {
    constexpr auto each = std::make_index_sequence<kQueryBlock>();
    const int keys = *std::max_element(tile.visible, tile.visible + tile.count), size = cache.head_dim;
    const int subs = (keys + kSubBlock - 1) / kSubBlock, first = chunk * (kChunk / kSubBlock);
    const int16_t *now[kWide], *later[kChunk / kSubBlock];
    for (int s = 0, wide; s < subs; s += wide) {
        wide = s + kWide <= subs ? kWide : 1;
        for (int u = 0; u < wide; ++u) {
            now[u] = cache.keys_of(first + s + u);
            later[u] = prefetcher ? prefetcher->while_reading(now[u]) : now[u];
        }
        for (int z = 0; z < tile.count; z += kQueryBlock) {
            const int queries = std::min(kQueryBlock, tile.count - z);
            const ScoreKeys score = wide == kWide ? score_with<kWide>(queries, each) : score_with<1>(queries, each);
            score(cache, now, z ? now : later, tile.codes + z * size, tile.scores + z * kChunk + s * kSubBlock);
        }
    }
    Softened softened[kTileQueries];
    Shares shares[kTileQueries];
    for (int i = 0; i < tile.count; ++i) {
        softened[i] = soften(cache, first, tile.scale[i], tile.cap, std::min(tile.hidden[i], subs * kSubBlock),
                             tile.visible[i], subs * kSubBlock, tile.scores + i * kChunk, tile.weights + i * kChunk);
        if (!joins) *tile.partial[i] = softened[i].partial;
        else if (tile.visible[i] > tile.hidden[i]) shares[i] = join_totals<exponential2>(*tile.partial[i], softened[i].partial);
        else shares[i] = {1.0f, 0.0f};
    }
    for (int s = 0; s < subs; ++s) {
        later[s] = cache.values_of(first + s);
        if (prefetcher) later[s] = prefetcher->while_reading(later[s]);
    }
    for (int d = 0, wide; d < size; d += wide * kLanes) {
        wide = d + kWide * kLanes <= size ? kWide : 1;
        for (int z = 0; z < tile.count; z += kQueryBlock) {
            const int queries = std::min(kQueryBlock, tile.count - z);
            const WeighValues weigh = wide == kWide ? weigh_with<kWide>(queries, each) : weigh_with<1>(queries, each);
            weigh(cache, later, first, subs, tile.weights + z * kChunk, d, softened + z, joins ? shares + z : nullptr,
                  tile.sums + z);
        }
    }
}

}  // namespace PACELINE_PATH
