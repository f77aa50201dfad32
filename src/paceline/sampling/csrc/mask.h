// Masks of bits: token t is allowed if bit t % 32 of word t / 32 is set. Bits beyond the vocabulary count for
// nothing.

#pragma once

#include "exact_math.h"

namespace {

constexpr int64_t WORD = 32;   // bits
constexpr int64_t FEW = 2048;  // up to so many allowed tokens, only they are looked at

inline bool allows(const uint32_t* mask, int64_t id) { return mask[id / WORD] >> (id % WORD) & 1; }

// The next word, from w on, that allows a token. Most allow none where few tokens are allowed.
int64_t next_word(const uint32_t* mask, int64_t w, int64_t words) {
    const auto none_of_8 = [&] {
        uint32_t any = 0;
        for (int64_t i = w; i < w + 8; i++) any |= mask[i];
        return any == 0;
    };
    while (w + 8 <= words && none_of_8()) w += 8;
    while (w < words && mask[w] == 0) w++;
    return w;
}

// Writes the first allowed ids, at most `limit`; returns how many.
int64_t first_allowed(const uint32_t* mask, int64_t vocab, int64_t* ids, int64_t limit) {
    const int64_t words = (vocab + WORD - 1) / WORD;
    int64_t n = 0;
    for (int64_t w = next_word(mask, 0, words); w < words; w = next_word(mask, w + 1, words))
        for (uint32_t word = mask[w]; word != 0; word &= word - 1) {
            const int64_t id = w * WORD + __builtin_ctz(word);
            if (n == limit || id >= vocab) return n;
            ids[n++] = id;
        }
    return n;
}

inline void forbid_in_word(const float* x, uint32_t word, int64_t n, float* out) {
    float allowed[WORD] = {};
    std::memcpy(allowed, x, n * sizeof(float));
    for (uint32_t j = 0; j < WORD; j++) allowed[j] = word >> j & 1 ? allowed[j] : -INF;
    std::memcpy(out, allowed, n * sizeof(float));
}

// The row with -INF where a token is not allowed. It may be written where it is read.
FOR_EACH_MACHINE void forbid(const float* x, const uint32_t* mask, int64_t vocab, float* out) {
    const int64_t whole = vocab / WORD * WORD;
    for (int64_t i = 0; i < whole; i += WORD) forbid_in_word(x + i, mask[i / WORD], WORD, out + i);
    if (whole < vocab) forbid_in_word(x + whole, mask[whole / WORD], vocab - whole, out + whole);
}

}  // namespace
