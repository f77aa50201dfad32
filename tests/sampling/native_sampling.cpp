// Runs choose.cpp over rows of every awkward size and kind; built with sanitizers, which do the checking.

#include <cstdio>
#include <random>

#include "../../src/paceline/sampling/csrc/choose.cpp"

int main() {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (const int64_t vocab : {1, 2, 33, 63, 64, 65, 127, 128, 1000, 4096, 4097, 9000})
        for (int round = 0; round < 48; round++) {
            const float scale = round % 3 == 0 ? 0.01f : round % 3 == 1 ? 3.0f : 1e38f;
            std::vector<float> logits(vocab);  // exactly as long as the row, so that a step beyond is seen
            std::vector<uint32_t> mask((vocab + 31) / 32);
            for (auto& x : logits) x = round % 4 ? normal(random) * scale : std::round(normal(random));
            for (auto& m : mask) m = random() & random() & random();
            if (round % 8 == 1) std::fill(mask.begin(), mask.end(), 0);
            if (round % 8 == 3) std::fill(mask.begin(), mask.end(), ~0u);
            if (round % 16 == 1) mask[random() % mask.size()] = random();
            if (round % 11 == 0) logits[random() % vocab] = round % 2 ? NAN : INF;
            if (round % 13 == 0) std::fill(logits.begin(), logits.end(), -INF);
            const std::vector<int64_t> text = {0, vocab - 1, 0, vocab, -1, vocab / 2};
            const std::vector<int64_t> bias_ids = {0, vocab, -1};
            const std::vector<float> biases = {2.0f, 1.0f, 1.0f};
            Settings settings{};
            settings.top_p = round % 5 < 2 ? 1.0 : round % 5 == 2 ? 0.999999 : 0.6;
            settings.presence = round % 7 == 0 ? 0.5 : 0;
            settings.frequency = round % 7 == 1 ? -0.5 : 0;
            settings.per_temperature = round % 6 == 0 ? 0 : round % 6 == 1 ? 1e4f : 1.25f;
            settings.repetition = round % 7 == 2 ? 1.3f : 1;
            settings.min_p_depth = round % 4 == 1 ? 2.0f : INF;
            settings.top_k = round % 3 == 1 ? 0 : 1 + static_cast<int32_t>(random() % 50);
            settings.biased = round % 5 == 4 ? 3 : 0;
            settings.bias_ids = bias_ids.data();
            settings.biases = biases.data();
            const uint32_t* allowed = round % 2 ? mask.data() : nullptr;
            const int64_t token = paceline_choose(logits.data(), vocab, &settings, allowed, text.data(), 6, 2,
                                                  static_cast<uint32_t>(random()), 7);
            int64_t first;
            const bool none = allowed != nullptr && first_allowed(allowed, vocab, &first, 1) == 0;
            if (none ? token != -1 : token < 0 || token >= vocab) return std::puts("no such token"), 1;
            if (allowed != nullptr && !none && !allows(allowed, token)) return std::puts("forbidden"), 1;
        }
    std::puts("fine");
}
