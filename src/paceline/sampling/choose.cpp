// The token of one row of logits: the same one that choose(law(...)) gives, without making the law.
//
// A token's depth is how many nats it lies below the best, after temperature; its weight is exp(-depth).
// What is kept of a row is said by one `Edge`. Then the kept tokens race: the largest noise - depth wins.

#include <cmath>

#include "edge.h"

namespace {

constexpr int64_t CHUNK = 4096;      // tokens with one maximum
constexpr double MOST_NOISE = 22.9;  // no noise is larger

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

struct Key {
    uint32_t high, low;
};

// ---- the best token

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

// ---- depths

inline void depths_of_block(const float* x, float top, float per_temperature, float* depth, uint32_t& least) {
    int32_t lowest = std::numeric_limits<int32_t>::max();
    for (int64_t j = 0; j < BLOCK; j++) {
        const float d = (top - x[j]) * per_temperature + 0.0f;  // and no zero has a sign
        depth[j] = d < FAR ? d : FAR;
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

// ---- what is kept of a row

Edge edge_of(Scratch& own, int64_t vocab, const Settings& s) {
    Edge edge{FAR, vocab};
    const bool some = s.top_k > 0 && s.top_k < vocab;
    if (some) edge = nearest(own, vocab, s.top_k, edge, true);
    if (s.top_p < 1) {
        const int64_t total =
            some ? gather(own, vocab, FAR, edge, false) : total_weight(own.depth.data(), vocab);
        edge = nearest(own, vocab, s.top_p * static_cast<double>(total), edge, false);
    }
    if (s.min_p_depth < edge.depth) edge = {s.min_p_depth, vocab};
    return edge;
}

// ---- the race

inline uint32_t noise_bits(uint32_t id, Key key) {  // as noise.py's scramble
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
// bar: exp(-score) * 2^31, and a thousandth more for rounding.
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
        for (int64_t i = b * BLOCK; i < (b + 1) * BLOCK; i++)
            any |= may_reach(depth[i], noise_bits(static_cast<uint32_t>(i), key), bar);
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
            if (!kept || !may_reach(depth, bits, bar)) continue;
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
