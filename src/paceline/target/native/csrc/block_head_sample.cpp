// The guesses of a block that is filled, one after the other.
#include "block_head.h"
#include "vector_ops.h"

namespace PACELINE_PATH {

namespace {

constexpr int kLook = 16;  // tiles of the vocabulary

}  // namespace

void BlockFiller::prepare_chaining() {
    const int chains = chaining_->chains;
    best_.resize((size_t)2 * team_.size() * chains);
    for (std::vector<int32_t>& previous : previous_) previous.resize(chains);
    for (Activations& pairs : pairs_) pairs.shape(chains, model_.rank / kGroup);
    for (Buffer<float>& scratch : scratch_) scratch.need((size_t)chains * kLook * kTile);
    draws_ = false;
    for (int c = 0; c < chains; ++c) draws_ |= chaining_->chain[c].draw.choose != nullptr;
    if (draws_) logits_.need((size_t)chains * model_.markov_out.outputs);
    kept_ = chaining_->logits ? chaining_->logits : draws_ ? logits_.get() : nullptr;
}

// Every member looks at its share of the vocabulary, and then finds the best of all members' by itself.
void BlockFiller::follow(int me) {
    const int chains = chaining_->chains, steps = chaining_->steps;
    std::vector<int32_t>& previous = previous_[me];
    for (int c = 0; c < chains; ++c) previous[c] = chaining_->chain[c].previous;
    for (int step = 0; step < steps; ++step) {
        Best* best = best_.data() + (size_t)step % 2 * team_.size() * chains;  // of all members
        for (int c = 0; c < chains; ++c) {
            const float* pair = model_.markov_in + (size_t)previous[c] * model_.rank;
            for (int g = 0; g < model_.rank / kGroup; ++g)
                pairs_[me].quantise(c, g, load(pair + g * kGroup), load(pair + g * kGroup + kLanes));
            if (c % team_.size() == me && step < chaining_->chain[c].steps)
                chaining_->sure[c * steps + step] = confidence(chaining_->chain[c], step, pair);
        }
        look(step, me, best + me * chains);
        team_.barrier();
        if (draws_) {
            draw(step, me, best);
            team_.barrier();
        }
        for (int c = 0; c < chains; ++c) {
            Best most = best[c];
            for (int m = 1; m < team_.size(); ++m)
                if (best[m * chains + c].most > most.most) most = best[m * chains + c];
            previous[c] = most.number;
            if (me == 0) chaining_->numbers[c * steps + step] = most.number;
        }
    }
}

// Some tiles at a time: the highest of them is searched for only where it is higher than all before.
void BlockFiller::look(int step, int me, Best* best) {
    const int chains = chaining_->chains, outputs = model_.markov_out.outputs;
    const Share share(outputs / kTile, me, team_.size());
    std::fill_n(best, chains, Best{kHidden, 0});
    float* added = scratch_[me].get();  // [chains][kLook][kTile]
    for (int first = share.begin; first < share.end; first += kLook) {
        const int tiles = std::min(kLook, share.end - first);
        for (int t = 0; t < tiles; ++t) product(model_.markov_out, first + t, pairs_[me], added + t * kTile, kLook * kTile);
        for (int c = 0; c < chains; ++c) {
            const Chain& chain = chaining_->chain[c];
            if (step >= chain.steps) continue;
            const float* base = chain.base + (int64_t)(chain.place + step) * outputs + first * kTile;
            float* logits = added + c * kLook * kTile;
            Floats top = all(kHidden);
            for (int i = 0; i < tiles * kTile; i += kLanes) {
                const Floats sum = load(base + i) + load(logits + i);
                store(logits + i, sum);
                top = max(top, sum);
            }
            if (kept_) std::copy_n(logits, tiles * kTile, kept_ + (int64_t)c * outputs + first * kTile);
            const float most = highest(top);
            if (!(most > best[c].most)) continue;
            best[c] = {most, (int32_t)(first * kTile + (std::find(logits, logits + tiles * kTile - 1, most) - logits))};
        }
    }
}

// Puts what is drawn in the place of the best.
void BlockFiller::draw(int step, int me, Best* best) {
    for (int c = me; c < chaining_->chains; c += team_.size()) {
        const Chain& chain = chaining_->chain[c];
        if (!chain.draw.choose || step >= chain.steps) continue;
        const float* logits = kept_ + (int64_t)c * model_.markov_out.outputs;
        const uint32_t* key = chain.draw.keys + 2 * step;
        const int64_t number = chain.draw.choose(logits, model_.ids, model_.draft_vocab, chain.draw.settings, key[0], key[1]);
        if (number < 0) no_draw_ = true;
        else best[c] = {INFINITY, (int32_t)number};
    }
}

float BlockFiller::confidence(const Chain& chain, int step, const float* pair) const {
    const float* hidden = chain.hidden + (int64_t)(chain.place + step) * model_.width;
    Floats total = zeros();
    for (int i = 0; i < model_.width; i += kLanes) total = fma(load(hidden + i), load(model_.sure + i), total);
    for (int i = 0; i < model_.rank; i += kLanes) total = fma(load(pair + i), load(model_.sure + model_.width + i), total);
    return sum(total) + model_.sure_bias;
}

}  // namespace PACELINE_PATH
