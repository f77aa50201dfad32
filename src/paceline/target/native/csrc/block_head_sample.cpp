// The draft tokens of a filled block, one after the other: argmax, or Gumbel-max sampling.
#include "block_head.h"

namespace PACELINE_PATH {

namespace {

constexpr int kTilesAtOnce = 16;  // of the vocabulary

}  // namespace

void BlockFiller::prepare_chaining() {
    const int chains = chaining_->chains;
    best_.resize((size_t)2 * pool_.size() * chains);
    for (std::vector<int32_t>& previous : previous_) previous.resize(chains);
    for (Activations& pairs : pairs_) pairs.shape(chains, model_.rank / kGroup);
    for (Buffer<float>& scratch : scratch_) scratch.need((size_t)chains * kTilesAtOnce * kTile);
    samples_ = false;
    for (int c = 0; c < chains; ++c) samples_ |= chaining_->chain[c].sample.choose != nullptr;
    if (samples_) logits_.need((size_t)chains * model_.markov_out.outputs);
    step_logits_ = chaining_->logits ? chaining_->logits : samples_ ? logits_.get() : nullptr;
}

// Every thread scores its share of the vocabulary, and then finds the best of all shares by itself.
void BlockFiller::follow(int me) {
    const int chains = chaining_->chains, steps = chaining_->steps;
    std::vector<int32_t>& previous = previous_[me];
    for (int c = 0; c < chains; ++c) previous[c] = chaining_->chain[c].previous;
    for (int step = 0; step < steps; ++step) {
        Best* best = best_.data() + (size_t)step % 2 * pool_.size() * chains;  // of all members
        for (int c = 0; c < chains; ++c) {
            const float* pair = model_.markov_in + (size_t)previous[c] * model_.rank;
            for (int g = 0; g < model_.rank / kGroup; ++g)
                pairs_[me].quantise(c, g, load(pair + g * kGroup), load(pair + g * kGroup + kLanes));
            if (c % pool_.size() == me && step < chaining_->chain[c].steps)
                chaining_->sure[c * steps + step] = confidence(chaining_->chain[c], step, pair);
        }
        score_share(step, me, best + me * chains);
        pool_.barrier();
        if (samples_) {
            sample(step, me, best);
            pool_.barrier();
        }
        for (int c = 0; c < chains; ++c) {
            Best highest_of_all = best[c];
            for (int m = 1; m < pool_.size(); ++m)
                if (best[m * chains + c].logit > highest_of_all.logit) highest_of_all = best[m * chains + c];
            previous[c] = highest_of_all.number;
            if (me == 0) chaining_->numbers[c * steps + step] = highest_of_all.number;
        }
    }
}

// Some tiles at a time: the highest of them is searched for only where it is higher than all before.
void BlockFiller::score_share(int step, int me, Best* best) {
    const int chains = chaining_->chains, outputs = model_.markov_out.outputs;
    const Share share(outputs / kTile, me, pool_.size());
    std::fill_n(best, chains, Best{kHidden, 0});
    float* added = scratch_[me].get();  // [chains][kTilesAtOnce][kTile]
    for (int first = share.begin; first < share.end; first += kTilesAtOnce) {
        const int tiles = std::min(kTilesAtOnce, share.end - first);
        for (int t = 0; t < tiles; ++t) product(model_.markov_out, first + t, pairs_[me], added + t * kTile, kTilesAtOnce * kTile);
        for (int c = 0; c < chains; ++c) {
            const Chain& chain = chaining_->chain[c];
            if (step >= chain.steps) continue;
            const float* base = chain.base + (int64_t)(chain.slot + step) * outputs + first * kTile;
            float* logits = added + c * kTilesAtOnce * kTile;
            Floats top = all(kHidden);
            for (int i = 0; i < tiles * kTile; i += kLanes) {
                const Floats sum = load(base + i) + load(logits + i);
                store(logits + i, sum);
                top = max(top, sum);
            }
            if (step_logits_) std::copy_n(logits, tiles * kTile, step_logits_ + (int64_t)c * outputs + first * kTile);
            const float logit = highest(top);
            if (!(logit > best[c].logit)) continue;
            best[c] = {logit, (int32_t)(first * kTile + (std::find(logits, logits + tiles * kTile - 1, logit) - logits))};
        }
    }
}

// Replaces the best token by the sampled one.
void BlockFiller::sample(int step, int me, Best* best) {
    for (int c = me; c < chaining_->chains; c += pool_.size()) {
        const Chain& chain = chaining_->chain[c];
        if (!chain.sample.choose || step >= chain.steps) continue;
        const float* logits = step_logits_ + (int64_t)c * model_.markov_out.outputs;
        const uint32_t* key = chain.sample.keys + 2 * step;
        const int64_t number = chain.sample.choose(logits, model_.ids, model_.draft_vocab, chain.sample.settings, key[0], key[1]);
        if (number < 0) sample_failed_ = true;
        else best[c] = {INFINITY, (int32_t)number};
    }
}

float BlockFiller::confidence(const Chain& chain, int step, const float* pair) const {
    const float* hidden = chain.hidden + (int64_t)(chain.slot + step) * model_.width;
    Floats total = zeros();
    for (int i = 0; i < model_.width; i += kLanes) total = fma(load(hidden + i), load(model_.sure + i), total);
    for (int i = 0; i < model_.rank; i += kLanes) total = fma(load(pair + i), load(model_.sure + model_.width + i), total);
    return sum(total) + model_.sure_bias;
}

}  // namespace PACELINE_PATH
