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
constexpr float kLargestInverse = 0x1p126f;  // of a unit: of the smallest that is not 0
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
// scores: [B][kChunk]. tops: [B][kLanes], the highest of each lane so far. later: what is prefetched meanwhile.
template <int B, int U>
void score_keys(const HeadCache& cache, const int16_t* const* keys, const int16_t* const* later, const int16_t* q,
                float* scores, float* tops) {
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
    Floats top[B];
    _Pragma("GCC unroll 16") for (int b = 0; b < B; ++b) top[b] = load(tops + b * kLanes);
    _Pragma("GCC unroll 4") for (int u = 0; u < U; ++u) {
        const Floats scale = load(cache.scales_of(keys[u]));
        _Pragma("GCC unroll 16") for (int b = 0; b < B; ++b) {
            const Floats score = to_floats(a[b][u]) * scale;
            store(scores + b * kChunk + u * kSubBlock, score);
            top[b] = max(top[b], score);
        }
    }
    _Pragma("GCC unroll 16") for (int b = 0; b < B; ++b) store(tops + b * kLanes, top[b]);
}

// Queries of one KV head, and the memory to work in.
struct QueryTile {
    const int count;                   // up to kTileQueries
    float* const scores;               // [count][kChunk]
    float* const tops;                 // [count][kLanes]: the highest score of each lane
    int16_t* const weights;            // [count][kChunk]
    int16_t* const codes;              // [count][head_dim]
    float scale[kTileQueries];         // of the codes, with that of attention, for powers of two
    int hidden[kTileQueries];          // how many of the chunk's first keys lie before each query's window
    int visible[kTileQueries];         // and up to which of its keys each query sees
    float cap = 0.0f;                  // of scores, for powers of two; 0: none
    Partial* partial[kTileQueries];
    float* sums[kTileQueries];         // head_dim each

    static size_t floats(int head_dim) { return (size_t)kTileQueries * (kChunk + kLanes + kChunk / 2 + head_dim / 2); }
    QueryTile(int queries, float* memory)
        : count(queries),
          scores(memory),
          tops(scores + kTileQueries * kChunk),
          weights(reinterpret_cast<int16_t*>(tops + kTileQueries * kLanes)),
          codes(weights + kTileQueries * kChunk) {}
};

#define PL_QUERIES _Pragma("GCC unroll 16") for (int q = 0; q < Q; ++q)

// What a tile's queries gather from one chunk. Each is a row of floats, so that sixteen queries are finished at once.
struct Softened {
    alignas(64) float top[kTileQueries];     // highest score
    alignas(64) float total[kTileQueries];   // sum of the softmax weights
    alignas(64) float peak[kTileQueries];    // the largest product of a weight and the scale of its value
    alignas(64) float whole[kTileQueries];   // their sum
    alignas(64) float unit[kTileQueries];    // of the codes of these products
    alignas(64) float inverse[kTileQueries]; // of the unit
    alignas(64) float before[kTileQueries], later[kTileQueries];  // what earlier chunks and this one count for, joined
};

// Lanes of a chunk's keys from t on that a query sees keep x, the others get `instead`.
PL_INLINE Floats where_seen(int t, int hidden, int visible, Floats x, Floats instead) {
    return first_lanes(hidden - t, instead, first_lanes(visible - t, x, instead));
}

// What sixteen queries gather from a chunk, lane by lane: see Softened.
struct Gathered {
    alignas(64) float total[kLanes * kLanes], whole[kLanes * kLanes], peak[kLanes * kLanes];
};

// Scores of Q queries to softmax weights, times the scales of their values. One query would wait for its exponentials;
// side by side they hide behind one another. masked: some query does not see all of the chunk's `padded` keys, a
// multiple of 16. first: the chunk's first sub-block.
template <int Q, bool masked>
void soften(const HeadCache& cache, int first, const QueryTile& tile, int query, int padded, const Softened& softened,
            Gathered& out) {
    float* const scores = tile.scores + query * kChunk;
    const int *hidden = tile.hidden + query, *visible = tile.visible + query;
    Floats by[Q], below[Q], total[Q], whole[Q], peak[Q];
    PL_QUERIES {
        by[q] = all(tile.cap > 0 ? 1.0f : tile.scale[query + q]);
        below[q] = all(-softened.top[query + q]);
        total[q] = whole[q] = peak[q] = zeros();
    }
    for (int t = 0; t < padded; t += kLanes) {
        const Floats scale = load(cache.scales_of(cache.values_of(first + t / kSubBlock)));
        PL_QUERIES {
            Floats p = exponential2(fma(load(scores + q * kChunk + t), by[q], below[q]));
            if (masked) p = where_seen(t, hidden[q], visible[q], p, zeros());
            total[q] = total[q] + p;
            p = p * scale;
            whole[q] = whole[q] + p;
            peak[q] = max(peak[q], p);
            store(scores + q * kChunk + t, p);
        }
    }
    PL_QUERIES {
        const int row = (query + q) % kLanes * kLanes;
        store(out.total + row, total[q]);
        store(out.whole + row, whole[q]);
        store(out.peak + row, peak[q]);
    }
}

// The highest scores of one query's lanes, of the keys that it sees.
PL_INLINE void find_tops(const QueryTile& tile, int query, int padded) {
    const float* scores = tile.scores + query * kChunk;
    Floats tops = all(kHidden);
    for (int t = 0; t < padded; t += kLanes)
        tops = max(tops, where_seen(t, tile.hidden[query], tile.visible[query], load(scores + t), all(kHidden)));
    store(tile.tops + query * kLanes, tops);
}

// Scores of one query, capped; its scale is in them afterwards.
PL_INLINE void cap_scores(const QueryTile& tile, int query, int padded) {
    float* const scores = tile.scores + query * kChunk;
    for (int t = 0; t < padded; t += kLanes)
        store(scores + t, softcap(load(scores + t) * all(tile.scale[query]), tile.cap));
}

// The units of sixteen queries, as fine as both limits of their codes allow.
PL_INLINE void set_units(Softened& softened, int query) {
    const Floats unit = max(load(softened.peak + query) / all(kMaxCode), load(softened.whole + query) / all(kMaxWeights));
    store(softened.unit + query, unit);
    store(softened.inverse + query, min(all(1.0f) / unit, all(kLargestInverse)));
}

template <int Q>
void store_weights(const QueryTile& tile, const Softened& softened, int query, int padded) {
    const float* scores = tile.scores + query * kChunk;
    int16_t* weights = tile.weights + query * kChunk;
    for (int t = 0; t < padded; t += kLanes)
        PL_QUERIES {
            const Floats codes = load(scores + q * kChunk + t) * all(softened.inverse[query + q]);
            store_shorts(weights + q * kChunk + t, to_ints(codes));
        }
}

// Scores of all queries to codes of weights, sixteen at a time: so many stay in the first level of cache.
inline void soften_all(const HeadCache& cache, int first, const QueryTile& tile, int padded, Softened& softened) {
    Gathered gathered;
    for (int begin = 0, side; begin < tile.count; begin += kLanes) {
        const int end = std::min(begin + kLanes, tile.count);
        bool masked = false;
        for (int q = begin; q < end; ++q) masked |= tile.hidden[q] > 0 || tile.visible[q] < padded;
        for (int q = begin; q < end; ++q) {
            if (tile.cap > 0) cap_scores(tile, q, padded);
            if (tile.cap > 0 || masked) find_tops(tile, q, padded);
        }
        const Floats tops = row_peaks(tile.tops + begin * kLanes);
        store(softened.top + begin, tile.cap > 0 ? tops : tops * load(tile.scale + begin));
        for (int i = begin; i < end; i += side) {
            side = i + kWide <= end ? kWide : 1;
            const auto softens = side == 1 ? masked ? soften<1, true> : soften<1, false>
                                           : masked ? soften<kWide, true> : soften<kWide, false>;
            softens(cache, first, tile, i, padded, softened, gathered);
        }
        store(softened.total + begin, row_sums(gathered.total));
        store(softened.whole + begin, row_sums(gathered.whole));
        store(softened.peak + begin, row_peaks(gathered.peak));
        set_units(softened, begin);
        for (int i = begin; i < end; i += side) {
            side = i + kWide <= end ? kWide : 1;
            (side == 1 ? store_weights<1> : store_weights<kWide>)(tile, softened, i, padded);
        }
    }
}

// Joins a chunk's totals to those of earlier ones, as `join_totals` does, sixteen queries at a time.
inline void join_tile(QueryTile& tile, Softened& softened) {
    alignas(64) float top[kLanes], total[kLanes];  // of earlier chunks, then of all
    for (int begin = 0; begin < tile.count; begin += kLanes) {
        const int count = std::min(kLanes, tile.count - begin);
        for (int i = 0; i < kLanes; ++i) {
            const Partial& before = *tile.partial[begin + std::min(i, count - 1)];
            top[i] = before.top;
            total[i] = before.total;
        }
        const Floats earlier = load(top), later = load(softened.top + begin), joined = max(earlier, later);
        const Floats share = exponential2(earlier - joined), more = exponential2(later - joined);
        store(softened.before + begin, share);
        store(softened.later + begin, more);
        store(top, joined);
        store(total, fma(load(softened.total + begin), more, load(total) * share));
        for (int i = 0; i < count; ++i) {
            const int query = begin + i;
            if (tile.visible[query] > tile.hidden[query]) {
                *tile.partial[query] = {top[i], total[i]};
            } else {
                softened.before[query] = 1.0f;
                softened.later[query] = 0.0f;
            }
        }
    }
}

#undef PL_QUERIES

// Values of `subs` sub-blocks, weighted: 16 * W dimensions from `first` on, for B queries. weights: [B][kChunk];
// query: the first of them. joins: something came before. later: what is fetched while a sub-block is read, the same share of it.
template <int B, int W>
void weigh_values(const HeadCache& cache, const int16_t* const* later, int sub, int subs, const int16_t* weights,
                  int first, const Softened& softened, int query, bool joins, float* const* sums) {
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
            const Floats more = to_floats(a[b][w]) * all(softened.unit[query + b]);
            if (joins) join_values(out, more, {softened.before[query + b], softened.later[query + b]});
            else store(out, more);
        }
}

using ScoreKeys = void (*)(const HeadCache&, const int16_t* const*, const int16_t* const*, const int16_t*, float*, float*);
using WeighValues = void (*)(const HeadCache&, const int16_t* const*, int, int, const int16_t*, int, const Softened&, int,
                             bool, float* const*);

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

// All queries of a tile over one chunk. joins: earlier chunks are in `partial` and `sums` already. prefetcher: null
// where the chunk was read before.
inline void attend_chunk(const HeadCache& cache, Prefetcher* prefetcher, int chunk, QueryTile& tile, bool joins) {
    constexpr auto each = std::make_index_sequence<kQueryBlock>();
    const int keys = *std::max_element(tile.visible, tile.visible + tile.count), size = cache.head_dim;
    const int subs = (keys + kSubBlock - 1) / kSubBlock, first = chunk * (kChunk / kSubBlock);
    const int16_t *now[kWide], *later[kChunk / kSubBlock];
    for (int i = 0; i < tile.count; ++i) store(tile.tops + i * kLanes, all(kHidden));
    for (int s = 0, wide; s < subs; s += wide) {
        wide = s + kWide <= subs ? kWide : 1;
        for (int u = 0; u < wide; ++u) {
            now[u] = cache.keys_of(first + s + u);
            later[u] = prefetcher ? prefetcher->while_reading(now[u]) : now[u];
        }
        for (int z = 0; z < tile.count; z += kQueryBlock) {
            const int queries = std::min(kQueryBlock, tile.count - z);
            const ScoreKeys score = wide == kWide ? score_with<kWide>(queries, each) : score_with<1>(queries, each);
            score(cache, now, z ? now : later, tile.codes + z * size, tile.scores + z * kChunk + s * kSubBlock,
                  tile.tops + z * kLanes);
        }
    }
    Softened softened;
    soften_all(cache, first, tile, subs * kSubBlock, softened);
    if (joins) join_tile(tile, softened);
    else
        for (int i = 0; i < tile.count; ++i) *tile.partial[i] = {softened.top[i], softened.total[i]};
    for (int s = 0; s < subs; ++s) {
        later[s] = cache.values_of(first + s);
        if (prefetcher) later[s] = prefetcher->while_reading(later[s]);
    }
    for (int d = 0, wide; d < size; d += wide * kLanes) {
        wide = d + kWide * kLanes <= size ? kWide : 1;
        for (int z = 0; z < tile.count; z += kQueryBlock) {
            const int queries = std::min(kQueryBlock, tile.count - z);
            const WeighValues weigh = wide == kWide ? weigh_with<kWide>(queries, each) : weigh_with<1>(queries, each);
            weigh(cache, later, first, subs, tile.weights + z * kChunk, d, softened, z, joins, tile.sums + z);
        }
    }
}

}  // namespace PACELINE_PATH
