// The token of one row of logits: the same one that choose(law(...)) gives, without making the law.
//
// A token's depth is how many nats it lies below the best, after temperature; its weight is exp(-depth).
// Top-k, top-p and min-p each keep the least deep tokens, of equally deep ones the lowest ids, so all that is
// kept of a row is said by one `Edge`. Then the kept tokens race: the one with the largest noise - depth wins.
//
// Every step is plain IEEE arithmetic in a fixed order, or exact: no instruction set changes a token.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(PACELINE_ONE_CLONE)
#define FOR_EACH_MACHINE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_MACHINE
#endif

namespace {

constexpr int64_t BLOCK = 64;    // tokens looked at together
constexpr int64_t CHUNK = 4096;  // tokens with one maximum, a multiple of BLOCK
constexpr float INF = std::numeric_limits<float>::infinity();
constexpr float DEPTHS[] = {3, 6, 9, 12, 16, 20, INF};  // tried in turn: the edge mostly lies near the top
constexpr double MOST_NOISE = 22.9;          // no noise is larger

struct Settings {             // filled in by native.py, field by field
    double top_p;             // 1: off
    double presence;          // 0: off
    double frequency;         // 0: off
    float per_temperature;    // 1 / temperature; 0: greedy
    float repetition;         // 1: off
    float min_p_depth;        // the deepest that min-p keeps; infinite: off
    int32_t top_k;            // 0: off
    int64_t biased;           // how many tokens have a bias
    const int64_t* bias_ids;  // [biased]
    const float* biases;      // [biased]
};

struct Edge {  // tokens less deep are kept, and those as deep up to this id
    float depth;
    int64_t last;
};

struct Key {
    uint32_t high, low;
};

struct Scratch {  // of one thread; grows to the largest vocabulary it has seen
    std::vector<float> row;        // [vocab] the logits, where something changed them
    std::vector<int32_t> said;     // [vocab] all zero between calls
    std::vector<float> depth;      // [blocks * BLOCK], infinite beyond the vocabulary
    std::vector<uint32_t> least;   // [blocks] the bits of the least depth in each
    int64_t gathered;              // how many tokens the rest is about
    std::vector<int64_t> near;     // [blocks * BLOCK] their ids, ascending
    std::vector<uint32_t> level;   // likewise, the bits of their depths
    std::vector<int64_t> weight;   // likewise, what they weigh
};

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// ---- the best token

// Integers in the order of the floats; NaNs are beyond both infinities.
inline int32_t rank_of(float x) {
    const auto bits = static_cast<int32_t>(bits_of(x));
    return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

inline float of_rank(int32_t rank) { return float_of(static_cast<uint32_t>(rank ^ ((rank >> 31) & 0x7FFFFFFF))); }

FOR_EACH_MACHINE float largest(const float* x, int64_t n, bool& has_nan) {
    int32_t best = rank_of(-INF), nan = 0;
    for (int64_t i = 0; i < n; i++) {
        const int32_t rank = rank_of(x[i]);
        best = rank > best ? rank : best;
        nan |= (bits_of(x[i]) & 0x7FFFFFFF) > bits_of(INF);
    }
    has_nan = nan != 0;
    return of_rank(best);
}

// The first of the largest; the first NaN if there is one.
int64_t best_of(const float* x, int64_t vocab) {
    float best = -INF;
    int64_t chunk = 0;
    for (int64_t i = 0; i < vocab; i += CHUNK) {
        bool has_nan;
        const float here = largest(x + i, std::min(CHUNK, vocab - i), has_nan);
        if (has_nan) return std::find_if(x + i, x + vocab, [](float v) { return v != v; }) - x;
        if (here > best) best = here, chunk = i;
    }
    return std::find(x + chunk, x + vocab, best) - x;
}

// ---- bias, mask, penalties

struct Text {  // what stands before the row
    const int64_t* tokens;
    int64_t length;
    int64_t spoken;  // where the output begins
};

void penalise(float* x, int64_t vocab, const Settings& s, const Text& text, std::vector<int32_t>& said) {
    if (static_cast<int64_t>(said.size()) < vocab) said.resize(vocab);
    const auto each = [&](int64_t first, auto&& visit) {
        for (int64_t i = first; i < text.length; i++)
            if (text.tokens[i] >= 0 && text.tokens[i] < vocab) visit(text.tokens[i]);
    };
    if (s.repetition != 1) {
        each(0, [&](int64_t t) {
            if (said[t]++ == 0) x[t] = x[t] > 0 ? x[t] / s.repetition : x[t] * s.repetition;
        });
        each(0, [&](int64_t t) { said[t] = 0; });
    }
    if (s.presence != 0 || s.frequency != 0) {
        each(text.spoken, [&](int64_t t) { said[t]++; });
        each(text.spoken, [&](int64_t t) {
            if (said[t] > 0) x[t] -= static_cast<float>(s.presence + s.frequency * said[t]);
            said[t] = 0;
        });
    }
}

// The row itself where nothing changes it.
const float* processed(const float* logits, int64_t vocab, const Settings& s, const uint8_t* mask,
                       const Text& text, Scratch& own) {
    const bool penalised = text.length > 0 && (s.repetition != 1 || s.presence != 0 || s.frequency != 0);
    if (s.biased == 0 && mask == nullptr && !penalised) return logits;
    own.row.assign(logits, logits + vocab);
    float* x = own.row.data();
    for (int64_t i = 0; i < s.biased; i++)
        if (s.bias_ids[i] >= 0 && s.bias_ids[i] < vocab) x[s.bias_ids[i]] += s.biases[i];
    if (mask != nullptr)
        for (int64_t i = 0; i < vocab; i++) x[i] = mask[i] ? x[i] : -INF;
    if (penalised) penalise(x, vocab, s, text, own.said);
    return x;
}

// ---- depths and weights

inline void depths_of_block(const float* x, float top, float per_temperature, float* depth, uint32_t& least) {
    int32_t lowest = std::numeric_limits<int32_t>::max();
    for (int64_t j = 0; j < BLOCK; j++) {
        depth[j] = (top - x[j]) * per_temperature + 0.0f;  // and no zero has a sign
        const auto bits = static_cast<int32_t>(bits_of(depth[j]));  // of floats >= 0: in the floats' order
        lowest = bits < lowest ? bits : lowest;
    }
    least = static_cast<uint32_t>(lowest);
}

FOR_EACH_MACHINE void depths_of(const float* x, int64_t vocab, float top, float per_temperature, float* depth,
                                uint32_t* least) {
    const int64_t whole = vocab / BLOCK;
    for (int64_t b = 0; b < whole; b++)
        depths_of_block(x + b * BLOCK, top, per_temperature, depth + b * BLOCK, least[b]);
    if (vocab % BLOCK) {
        float rest[BLOCK];
        std::fill(rest, rest + BLOCK, -INF);
        std::copy(x + whole * BLOCK, x + vocab, rest);
        depths_of_block(rest, top, per_temperature, depth + whole * BLOCK, least[whole]);
    }
}

inline float clamped(float depth) { return depth < 30.0f ? depth : 30.0f; }

// exp(-depth) of a clamped depth, to 2e-7 of itself. Operation for operation what law.py's _weights does.
inline float exp_minus(float depth) {
    const float x = -depth;
    const float shifted = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to a whole number
    const float n = shifted - 12582912.0f;
    const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * (r * r) + r) + 1.0f;
    return float_of(bits_of(p) + ((bits_of(shifted) - 0x4B400000u) << 23));  // p * 2^n
}

// Of a clamped depth, in units of 2^-34, a whole number: sums are exact, whatever their order.
inline int64_t weight_of(float depth) {
    const double shifted = static_cast<double>(exp_minus(depth)) * 0x1p34 + 0x1.8p52;  // whole in its last bits
    int64_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    return bits - 0x4338000000000000;
}

// Clamping is a loop of its own, here and below: together the compiler would branch, and not vectorise.
FOR_EACH_MACHINE int64_t total_weight(const float* depth, int64_t blocks) {
    int64_t sum = 0;
    float near[BLOCK];
    for (int64_t b = 0; b < blocks; b++) {
        for (int64_t j = 0; j < BLOCK; j++) near[j] = clamped(depth[b * BLOCK + j]);
        for (int64_t j = 0; j < BLOCK; j++) sum += weight_of(near[j]);
    }
    return sum;
}

FOR_EACH_MACHINE int64_t weigh(const uint32_t* level, int64_t* weight, int64_t n) {
    int64_t sum = 0;
    const uint32_t deepest = bits_of(30.0f);
    for (int64_t i = 0; i < n; i++) weight[i] = level[i] < deepest ? level[i] : deepest;
    for (int64_t i = 0; i < n; i++) {
        weight[i] = weight_of(float_of(static_cast<uint32_t>(weight[i])));
        sum += weight[i];
    }
    return sum;
}

// ---- where top-k and top-p end

FOR_EACH_MACHINE int64_t weight_up_to(const uint32_t* level, const int64_t* weight, int64_t n, uint32_t edge) {
    int64_t sum = 0;
    for (int64_t i = 0; i < n; i++) sum += level[i] <= edge ? weight[i] : 0;
    return sum;
}

// Gathers the tokens down to a depth that the edge keeps; returns what they weigh together.
int64_t gather(Scratch& own, int64_t vocab, float deepest, Edge edge, bool counted) {
    int64_t n = 0;
    const uint32_t limit = bits_of(std::min(deepest, edge.depth));
    for (int64_t first = 0; first < vocab; first += BLOCK) {
        if (own.least[first / BLOCK] > limit) continue;
        for (int64_t i = first; i < std::min(first + BLOCK, vocab); i++) {
            const float depth = own.depth[i];
            own.near[n] = i;
            own.level[n] = bits_of(depth);
            n += static_cast<int>(bits_of(depth) <= limit) & static_cast<int>(depth != edge.depth || i <= edge.last);
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

// The edge of the fewest gathered tokens that weigh as much as wanted, which all of them do.
Edge edge_of_gathered(Scratch& own, double wanted) {
    int64_t n = own.gathered;
    uint32_t low = 0, high = bits_of(INF);  // the edge's level is in low..high
    int64_t above = 0;                      // what the tokens that were dropped for being less deep weigh
    while (low < high) {
        for (int step = 0; step < 4 && low < high; step++) {
            const uint32_t middle = low + (high - low) / 2;
            const int64_t reached = above + weight_up_to(own.level.data(), own.weight.data(), n, middle);
            if (static_cast<double>(reached) >= wanted)
                high = middle;
            else
                low = middle + 1;
        }
        n = narrow(own, n, low, high, above);
    }
    const int64_t each = own.weight[0];  // the n tokens left are equally deep
    int64_t spare = 0;                   // of them, those before the last that is wanted
    while (spare < n - 1 && static_cast<double>(above + each * (spare + 1)) < wanted) spare++;
    const auto is_last = [&](int64_t id) { return bits_of(own.depth[id]) == low && spare-- == 0; };
    return {float_of(low), *std::find_if(own.near.begin(), own.near.begin() + own.gathered, is_last)};
}

Edge nearest(Scratch& own, int64_t vocab, double wanted, Edge edge, bool counted) {
    for (const float depth : DEPTHS)
        if (static_cast<double>(gather(own, vocab, depth, edge, counted)) >= wanted) break;
    return edge_of_gathered(own, wanted);
}

Edge edge_of(Scratch& own, int64_t vocab, const Settings& s) {
    Edge edge{INF, vocab};
    const bool some = s.top_k > 0 && s.top_k < vocab;
    if (some) edge = nearest(own, vocab, s.top_k, edge, true);
    if (s.top_p < 1) {
        const int64_t blocks = static_cast<int64_t>(own.least.size());
        const int64_t total =
            some ? gather(own, vocab, INF, edge, false) : total_weight(own.depth.data(), blocks);
        edge = nearest(own, vocab, s.top_p * static_cast<double>(total), edge, false);
    }
    if (s.min_p_depth < edge.depth) edge = {s.min_p_depth, vocab};
    return edge;
}

// ---- the race

inline uint32_t noise_bits(uint32_t id, Key key) {  // as noise.py's _scramble
    uint32_t x = id * 0x9E3779B1u;
    x ^= x >> 15;
    x ^= key.high;
    x *= key.low | 1;
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ (x >> 16);
}

inline double noise_of(uint32_t bits) { return -std::log(-std::log((bits + 0.5) * 0x1p-32)); }

// Whether noise - depth may be as large as a score; false for nearly all tokens, and never wrongly.
// With u the bits over 2^32, it is if -log(u) <= exp(-depth - score), and 1 - u <= -log(u) always holds.
// depth: clamped. bar: exp(-score) * 2^31, and a thousandth more for rounding.
inline bool may_reach(float depth, uint32_t bits, float bar) {
    return static_cast<float>(static_cast<int32_t>(~bits >> 1)) <= exp_minus(depth) * bar;
}

inline float bar_of(double score) { return static_cast<float>(std::exp(-score) * 0x1p31 * 1.001); }

// The next block, from b on, in which a token no deeper than the limit may reach the bar.
FOR_EACH_MACHINE int64_t next_block(const float* depth, const uint32_t* least, int64_t b, int64_t blocks,
                                    uint32_t limit, Key key, float bar) {
    for (; b < blocks; b++) {
        if (least[b] > limit) continue;
        int32_t any = 0;
        float near[BLOCK];
        for (int64_t j = 0; j < BLOCK; j++) near[j] = clamped(depth[b * BLOCK + j]);
        for (int64_t j = 0; j < BLOCK; j++)
            any |= may_reach(near[j], noise_bits(static_cast<uint32_t>(b * BLOCK + j), key), bar);
        if (any) break;
    }
    return b;
}

int64_t race(const Scratch& own, int64_t vocab, int64_t top, Edge edge, Key key) {
    const int64_t blocks = static_cast<int64_t>(own.least.size());
    const auto score_of = [&](int64_t id, uint32_t bits) { return noise_of(bits) - own.depth[id]; };
    int64_t winner = top;
    double best = score_of(top, noise_bits(static_cast<uint32_t>(top), key));
    for (int64_t b = 0;; b++) {
        const float reach = std::min(edge.depth, static_cast<float>(MOST_NOISE - best));
        float bar = bar_of(best);
        b = next_block(own.depth.data(), own.least.data(), b, blocks, bits_of(reach), key, bar);
        if (b == blocks) return winner;
        for (int64_t id = b * BLOCK; id < std::min((b + 1) * BLOCK, vocab); id++) {
            const float depth = own.depth[id];
            const bool kept = depth < edge.depth || (depth == edge.depth && id <= edge.last);
            const uint32_t bits = noise_bits(static_cast<uint32_t>(id), key);
            if (!kept || !may_reach(clamped(depth), bits, bar)) continue;
            const double score = score_of(id, bits);
            if (score < best || (score == best && id > winner)) continue;
            winner = id, best = score, bar = bar_of(best);
        }
    }
}

}  // namespace

// mask: [vocab] not 0 where a token is allowed, or null. text: read only where there are penalties.
extern "C" int64_t paceline_choose(const float* logits, int64_t vocab, const Settings* settings,
                                   const uint8_t* mask, const int64_t* text, int64_t length, int64_t spoken,
                                   uint32_t key_high, uint32_t key_low) {
    thread_local Scratch own;
    const float* x = processed(logits, vocab, *settings, mask, {text, length, spoken}, own);
    const int64_t top = best_of(x, vocab);
    if (settings->per_temperature == 0 || !std::isfinite(x[top])) return top;
    const int64_t blocks = (vocab + BLOCK - 1) / BLOCK;
    own.depth.resize(blocks * BLOCK);
    own.least.resize(blocks);
    own.near.resize(blocks * BLOCK);
    own.level.resize(blocks * BLOCK);
    own.weight.resize(blocks * BLOCK);
    depths_of(x, vocab, x[top], settings->per_temperature, own.depth.data(), own.least.data());
    return race(own, vocab, top, edge_of(own, vocab, *settings), {key_high, key_low});
}
