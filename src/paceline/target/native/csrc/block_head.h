// A block head: the KV rows of its context, its one pass over a block, and the chain of draft tokens.
//
// As in the decoder, a piece of work is computed whole by one thread of the pool, in one order.
#pragma once

#include <vector>

#include "activations.h"
#include "online_softmax.h"
#include "block_model.h"
#include "linear.h"
#include "threads.h"
#include "vector_ops.h"

namespace PACELINE_PATH {

// Weights of the head are all of one format.
PL_INLINE void product(const Linear& w, int tile, const Activations& x, float* out, int64_t stride) {
    linear_tile_of<O8>(w, tile, x, out, stride);
}

class BlockFiller {
public:
    BlockFiller(const BlockModel& model, ThreadPool& pool);
    void run(const Drafting& drafting);

private:
    struct Attending {
        int text, kv_head, chunk, begin, end;  // keys: the context's, then the block's own
    };
    struct Best {
        float logit;
        int32_t number;
    };

    void prepare_reading();
    void prepare_filling();
    void prepare_chaining();
    void plan_attention();

    void work(int me);
    void read_rows(int me);
    void fill_blocks(int me);
    void follow(int me);

    void embed_rows(int me);
    void normalise(const Buffer<float>& x, const float* weight, int count, int step, Activations& out, int me);
    Floats normalise_row(const float* x, const float* weight, int to, const Share& groups, Activations& out) const;
    void project_mask();
    void project(int layer, int me);
    void spread_query(const Layer& layer, int head, int row, float* query);
    void key_head(const Layer& layer, float* head, int position, const Rotations& rotations, uint16_t* out) const;
    void value_head(const float* head, uint16_t* out) const;
    void attend(int layer, int me);
    void join_chunks(int me);
    void add_product(const Linear& weight, const Activations& in, int me);
    void feed_forward(const Layer& layer, int me);
    void finish(int me);
    void score(int me);
    void score_share(int step, int me, Best* best);
    void sample(int step, int me, Best* best);
    float confidence(const Chain& chain, int step, const float* pair) const;

    int64_t row_size() const { return (int64_t)model_.layers * 2 * model_.kv_heads * model_.head_dim; }
    // Of one head among a row: kind 0 for keys, 1 for values.
    int64_t head_at(int layer, int kind, int kv_head) const {
        return (((int64_t)layer * 2 + kind) * model_.kv_heads + kv_head) * model_.head_dim;
    }
    int piece_of(int text, int kv_head, int chunk) const { return (text * model_.kv_heads + kv_head) * chunks_ + chunk; }
    float* stats_of(int piece) const { return stats_.get() + (int64_t)piece * 2 * padded_; }
    float* sums_of(int piece) const { return sums_.get() + (int64_t)piece * queries_ * model_.head_dim; }

    const BlockModel model_;
    ThreadPool& pool_;
    const int group_, queries_, padded_;  // query heads of a KV head; those times the block; and padded to lanes
    const Reading* reading_ = nullptr;
    const Filling* filling_ = nullptr;
    const Chaining* chaining_ = nullptr;
    std::vector<int32_t> read_at_;        // the position of each row that is read
    std::vector<uint16_t*> contexts_;     // and where it goes
    Buffer<float> read_;                  // [rows read][width]
    Activations features_, read_normed_;
    int block_ = 0;                       // rows of each block that are asked for
    int rows_ = 0;                        // of all blocks
    int chunks_ = 1;                      // of the longest text
    std::vector<Attending> attending_;
    std::vector<int32_t> positions_;      // of each row
    Buffer<float> mask_heads_;            // [2 * kv_heads + heads][head_dim]: of the first layer, not rotated
    Buffer<float> x_;                     // [rows][width]: the residual stream
    Buffer<float> rotated_;                // [texts][kv_heads][head_dim][padded_]: queries
    Buffer<uint16_t> own_;                // [rows][2][kv_heads][head_dim]: keys and values of one layer
    Buffer<float> stats_;                 // [pieces][2][padded_]: highest scores, sums
    Buffer<float> sums_;                  // [pieces][queries_][head_dim]
    Activations anchors_, normed_, attended_, gated_;
    std::vector<Activations> pairs_;      // of each thread
    std::vector<std::vector<int32_t>> previous_;  // of each thread: the tokens before, by number
    std::vector<Best> best_;              // [2][threads][chains]: of even and odd steps
    bool samples_ = false;                  // whether any chain samples
    std::atomic<bool> sample_failed_{false};    // one of them had no memory
    Buffer<float> logits_;                // [chains][head.outputs]
    float* step_logits_ = nullptr;               // null: the logits of a step are not stored
    std::vector<Buffer<float>> scratch_;  // of each thread
};

}  // namespace PACELINE_PATH
