// The token of one row of logits: the one that choose(distribution(...)) gives, without making the distribution.
//
// A token's depth is how many nats it lies below the best, after temperature; its weight is exp(-depth).
// One `Cutoff` stands for top-k, top-p and min-p. Among the tokens it keeps the largest noise - depth wins
// (the Gumbel-max trick).

#include <cmath>

#include "cutoff.h"
#include "mask.h"

namespace {

constexpr int64_t CHUNK = 4096;      // tokens with one maximum
constexpr double MAX_NOISE = 22.9;  // no noise is larger
constexpr int64_t NONE_ALLOWED = -1, NO_MEMORY = -2;  // instead of a token: as in native.py

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

struct Row {  // the candidates: every token, or some
    const float* x;      // [n]
    const int64_t* ids;  // [n] ascending; null: the token at i is i
    int64_t n;

    int64_t id(int64_t at) const { return ids == nullptr ? at : ids[at]; }
    int64_t at(int64_t id) const {  // -1: nowhere
        if (ids == nullptr) return id >= 0 && id < n ? id : -1;
        const int64_t* found = std::lower_bound(ids, ids + n, id);
        return found != ids + n && *found == id ? found - ids : -1;
    }
};

// ---- the best token

FOR_EACH_MACHINE float largest(const float* x, int64_t n, bool& has_nan) {
    int32_t best = rank_of(-INF), nan = 0;
    for (int64_t i = 0; i < n; i++) {
        const int32_t rank = rank_of(x[i]);
        best = rank > best ? rank : best;
        nan |= (as_bits(x[i]) & 0x7FFFFFFF) > as_bits(INF);
    }
    has_nan = nan != 0;
    return of_rank(best);
}

// The first of the largest; the first NaN if there is one.
int64_t best_of(const float* x, int64_t n) {
    float best = -INF;
    int64_t chunk = 0;
    for (int64_t i = 0; i < n; i += CHUNK) {
        bool has_nan;
        const float here = largest(x + i, std::min(CHUNK, n - i), has_nan);
        if (has_nan) return std::find_if(x + i, x + n, [](float v) { return v != v; }) - x;
        if (here > best) best = here, chunk = i;
    }
    return std::find(x + chunk, x + n, best) - x;
}

// ---- bias, mask, penalties

struct Text {  // prompt and output before the row
    const int64_t* tokens;
    int64_t length;
    int64_t spoken;  // where the output begins
};

void penalise(float* x, const Row& row, const Settings& s, const Text& text, std::vector<int32_t>& counts) {
    hold(counts, row.n);
    const auto each = [&](int64_t first, auto&& visit) {
        for (int64_t i = first; i < text.length; i++)
            if (const int64_t at = row.at(text.tokens[i]); at >= 0) visit(at);
    };
    if (s.repetition != 1) {
        each(0, [&](int64_t t) {
            if (counts[t]++ == 0) x[t] = x[t] > 0 ? x[t] / s.repetition : x[t] * s.repetition;
        });
        each(0, [&](int64_t t) { counts[t] = 0; });
    }
    if (s.presence != 0 || s.frequency != 0) {
        each(text.spoken, [&](int64_t t) { counts[t]++; });
        each(text.spoken, [&](int64_t t) {
            if (counts[t] > 0) x[t] -= static_cast<float>(s.presence + s.frequency * counts[t]);
            counts[t] = 0;
        });
    }
}

// The row of the few allowed tokens.
Row gathered(const float* logits, int64_t n, Scratch& own) {
    hold(own.row, n);
    for (int64_t i = 0; i < n; i++) own.row[i] = logits[own.ids[i]];
    return {own.row.data(), own.ids.data(), n};
}

// The row itself where nothing changes it.
Row processed(const Row& row, const Settings& s, const Text& text, Scratch& own) {
    const bool penalised = text.length > 0 && (s.repetition != 1 || s.presence != 0 || s.frequency != 0);
    if (s.biased == 0 && !penalised) return row;
    if (row.x != own.row.data()) own.row.assign(row.x, row.x + row.n);
    float* x = own.row.data();
    for (int64_t i = 0; i < s.biased; i++)
        if (const int64_t at = row.at(s.bias_ids[i]); at >= 0) x[at] += s.biases[i];
    if (penalised) penalise(x, row, s, text, own.counts);
    return {x, row.ids, row.n};
}

// Forbids tokens of the row, whose best is `top`; returns the best that is left.
int64_t best_allowed(Row& row, const uint32_t* mask, int64_t top, Scratch& own) {
    hold(own.row, row.n);
    forbid(row.x, mask, row.n, own.row.data());
    row.x = own.row.data();
    if (allows(mask, top)) return top;
    top = best_of(row.x, row.n);
    return allows(mask, top) ? top : own.ids[0];  // no: all that are allowed are -INF
}

// ---- depths

inline void depths_of_block(const float* x, float top, float per_temperature, float* depth, uint32_t& lowest_bits) {
    int32_t lowest = std::numeric_limits<int32_t>::max();
    for (int64_t j = 0; j < BLOCK; j++) {
        const float d = (top - x[j]) * per_temperature + 0.0f;  // and no zero has a sign
        depth[j] = d < FAR ? d : FAR;
        const auto bits = static_cast<int32_t>(as_bits(depth[j]));  // of floats >= 0: in the floats' order
        lowest = bits < lowest ? bits : lowest;
    }
    lowest_bits = static_cast<uint32_t>(lowest);
}

FOR_EACH_MACHINE void depths_of(const float* x, int64_t n, float top, float per_temperature, float* depth,
                                uint32_t* lowest) {
    const int64_t whole = n / BLOCK;
    for (int64_t b = 0; b < whole; b++)
        depths_of_block(x + b * BLOCK, top, per_temperature, depth + b * BLOCK, lowest[b]);
    if (n % BLOCK) {
        float rest[BLOCK];
        std::fill(rest, rest + BLOCK, -INF);
        std::copy(x + whole * BLOCK, x + n, rest);
        depths_of_block(rest, top, per_temperature, depth + whole * BLOCK, lowest[whole]);
    }
}

// ---- top-k, top-p, min-p

Cutoff cutoff_of(Scratch& own, int64_t length, const Settings& s) {
    Cutoff cutoff{FAR, length};
    const bool some = s.top_k > 0 && s.top_k < length;
    if (some) cutoff = nearest(own, length, s.top_k, cutoff, true);
    if (s.top_p < 1) {
        const int64_t total =
            some ? gather(own, length, FAR, cutoff, false) : total_weight(own.depth.data(), length);
        cutoff = nearest(own, length, s.top_p * static_cast<double>(total), cutoff, false);
    }
    if (s.min_p_depth < cutoff.depth) cutoff = {s.min_p_depth, length};
    return cutoff;
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
    return static_cast<float>(static_cast<int32_t>(~bits >> 1)) <= exp_minus(depth, 0) * bar;
}

inline float bar_of(double score) { return static_cast<float>(std::exp(-score) * 0x1p31 * 1.001); }

// The next block, from b on, in which a token no deeper than the limit may reach the bar. ids: null, or of all
// tokens in whole blocks; a block that is not whole is not looked into.
FOR_EACH_MACHINE int64_t next_block(const float* depth, const uint32_t* lowest, const int64_t* ids, int64_t n,
                                    int64_t b, int64_t blocks, uint32_t limit, Key key, float bar) {
    for (; b < blocks; b++) {
        if (lowest[b] > limit) continue;
        const int64_t first = b * BLOCK, end = first + BLOCK;
        int32_t any = ids != nullptr && end > n;
        if (ids == nullptr) {
            for (int64_t i = first; i < end; i++)
                any |= may_reach(depth[i], noise_bits(static_cast<uint32_t>(i), key), bar);
        } else if (!any) {
            for (int64_t i = first; i < end; i++)
                any |= may_reach(depth[i], noise_bits(static_cast<uint32_t>(ids[i]), key), bar);
        }
        if (any) break;
    }
    return b;
}

struct Leader {
    int64_t at;
    double score;
};

void race_of(const Scratch& own, const Row& row, int64_t first, int64_t end, Cutoff cutoff, Key key,
             Leader& leader) {
    float bar = bar_of(leader.score);
    for (int64_t at = first; at < end; at++) {
        const float depth = own.depth[at];
        const bool kept = depth < cutoff.depth || (depth == cutoff.depth && at <= cutoff.last);
        const uint32_t bits = noise_bits(static_cast<uint32_t>(row.id(at)), key);
        if (!kept || !may_reach(depth, bits, bar)) continue;
        const double score = noise_of(bits) - depth;
        if (score < leader.score || (score == leader.score && at > leader.at)) continue;
        leader = {at, score};
        bar = bar_of(score);
    }
}

int64_t race(const Scratch& own, const Row& row, int64_t top, Cutoff cutoff, Key key) {
    const uint32_t bits = noise_bits(static_cast<uint32_t>(row.id(top)), key);
    Leader leader{top, noise_of(bits) - own.depth[top]};
    if (row.n <= FEW) {
        race_of(own, row, 0, row.n, cutoff, key, leader);
        return leader.at;
    }
    const int64_t blocks = (row.n + BLOCK - 1) / BLOCK;
    for (int64_t b = 0;; b++) {
        const float reach = std::min(cutoff.depth, static_cast<float>(MAX_NOISE - leader.score));
        b = next_block(own.depth.data(), own.lowest.data(), row.ids, row.n, b, blocks, as_bits(reach), key,
                       bar_of(leader.score));
        if (b == blocks) return leader.at;
        race_of(own, row, b * BLOCK, std::min((b + 1) * BLOCK, row.n), cutoff, key, leader);
    }
}

int64_t sampled(const Row& row, int64_t top, const Settings& s, Key key, Scratch& own) {
    const int64_t blocks = (row.n + BLOCK - 1) / BLOCK;
    hold(own.depth, blocks * BLOCK);
    hold(own.lowest, blocks);
    hold(own.near, blocks * BLOCK);
    hold(own.level, blocks * BLOCK);
    hold(own.weight, blocks * BLOCK);
    depths_of(row.x, row.n, row.x[top], s.per_temperature, own.depth.data(), own.lowest.data());
    return race(own, row, top, cutoff_of(own, row.n, s), key);
}

}  // namespace

// No exception may leave these: what fails is memory.

// mask: [(vocab + 31) / 32] the bits of the allowed tokens, or null.
// text: read only where there are penalties.
extern "C" int64_t paceline_choose(const float* logits, int64_t vocab, const Settings* settings,
                                   const uint32_t* mask, const int64_t* text, int64_t length, int64_t spoken,
                                   uint32_t key_high, uint32_t key_low) try {
    thread_local Scratch own;
    hold(own.ids, FEW + 1);
    const int64_t allowed = mask == nullptr ? 0 : first_allowed(mask, vocab, own.ids.data(), FEW + 1);
    if (mask != nullptr && allowed == 0) return NONE_ALLOWED;
    if (allowed == 1) return own.ids[0];
    const bool few = mask != nullptr && allowed <= FEW;
    const bool greedy = settings->per_temperature == 0;
    Row row = few ? gathered(logits, allowed, own) : Row{logits, nullptr, vocab};
    row = processed(row, *settings, {text, length, spoken}, own);
    int64_t top = best_of(row.x, row.n);
    if (mask != nullptr && !few && !(greedy && allows(mask, top))) top = best_allowed(row, mask, top, own);
    if (!greedy && std::isfinite(row.x[top])) top = sampled(row, top, *settings, {key_high, key_low}, own);
    return row.id(top);
} catch (...) {
    return NO_MEMORY;
}

// The index of the token in a row of some tokens only, ids [n] ascending; there are no penalties.
extern "C" int64_t paceline_choose_among(const float* logits, const int64_t* ids, int64_t n, const Settings* settings,
                                         uint32_t key_high, uint32_t key_low) try {
    thread_local Scratch own;
    const Row row = processed({logits, ids, n}, *settings, {nullptr, 0, 0}, own);
    const int64_t top = best_of(row.x, row.n);
    if (settings->per_temperature == 0 || !std::isfinite(row.x[top])) return top;
    return sampled(row, top, *settings, {key_high, key_low}, own);
} catch (...) {
    return NO_MEMORY;
}
