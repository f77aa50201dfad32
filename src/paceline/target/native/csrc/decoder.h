// One pass of the decoder: every row through every layer that is to run, in one parallel region.
//
// Between two barriers each thread of the pool takes pieces of one phase. A piece is always computed whole by
// one thread, in one order, so the bits do not depend on how many threads there are.
#pragma once

#include <memory>
#include <vector>

#include "activations.h"
#include "attention.h"
#include "model.h"
#include "threads.h"
#include "vector_ops.h"

namespace PACELINE_PATH {

class Decoder {
public:
    Decoder(const Model& model, ThreadPool& pool);
    void forward(const Pass& pass);

private:
    // Some rows of a span and one KV head, over one chunk of keys or over all of them in order.
    struct Attending {
        int span, first, rows, kv_head;
        int chunk, end;  // the first chunk, and the one behind the last
        int keys;        // that the last row sees up to that end

        int64_t work() const { return (int64_t)rows * (keys - chunk * kChunk); }
    };

    // Rows that go through a layer as a whole, beyond their keys and values. They are numbered from 0.
    struct LayerRows {
        int count = 0;
        std::vector<Span> spans;               // first: index into span_rows
        std::vector<int> span_rows;
        std::vector<int> position;             // of each row
        std::vector<Attending> attending, attending_locally;
        int slots = 1;                         // partial softmax results for each row and head
        Activations normed, attended, gated;
    };

    void prepare();
    void prepare_rows(LayerRows& rows);
    void choose_scored();
    void prepare_experts();
    void plan_attention(LayerRows& rows) const;
    void plan_attention(const LayerRows& rows, int window, bool split, std::vector<Attending>& attending) const;
    void work(int me);

    void embed(int me);
    void copy_taps(int layer, int me);
    void copy_sub_blocks(int layer, int me);
    void keep_scored();
    void normalise(const float* weight, const int32_t* rows, int count, Activations& out, int me);
    void project_heads(int layer, int me);
    void finish_query(const Layer& layer, int head, float* heads);
    void finish_key(int layer, int head, float* heads);
    void finish_value(int layer, int head, float* heads);
    void store_key(int16_t* keys, int64_t slot, const int16_t* codes, float scale) const;
    void store_value(int16_t* values, int64_t slot, const int16_t* codes, float scale) const;
    void attend(int layer, int me);
    Walk walk_of(int layer, const Attending& piece) const;
    void attend_piece(int layer, const Attending& piece, Prefetcher& prefetcher, float* scratch);
    void join_chunks(const Layer& layer, int me);
    void add_product(const Linear& weight, const float* bias, const Activations& in, const float* norm, int me);
    void add_normed(const float* norm, int me);
    void feed_forward(const Layer& layer, int me);
    void mix_experts(const Layer& layer, int me);
    void route(const Layer& layer, int me);
    void sort_by_expert();
    void normalise_slots(const float* weight, int me);
    void expert_gates(const Layer& layer, int me);
    void expert_downs(const Layer& layer, int me);
    void add_experts(int me);
    Floats gated(Floats gate, Floats up) const {
        if (model_.activation == kClampedSwiglu) return clamped_swiglu(gate, up, model_.gate_limit, model_.gate_slope);
        return (model_.activation == kGeluTanh ? gelu_tanh(gate) : silu(gate)) * up;
    }
    void cap_logits(float* logits, int64_t stride) const;
    void score(int me);

    int64_t cache_at(int layer, int kv_head) const {
        return ((int64_t)layer * model_.kv_heads + kv_head) * model_.sub_blocks * sub_block_size(model_.head_dim);
    }
    // A row of the pass, for one of the current layer.
    int row_of(int row) const { return rows_ == &every_ ? row : pass_->scored_rows[row]; }
    const float* cosines_of(int row, bool local) const {
        return (local ? pass_->local_cosines : pass_->cosines) + (size_t)row * (model_.head_dim / 2);
    }
    const float* sines_of(int row, bool local) const {
        return (local ? pass_->local_sines : pass_->sines) + (size_t)row * (model_.head_dim / 2);
    }
    // The first chunk of keys that a row at this position sees in a layer.
    int first_chunk(int position, bool local) const {
        return local ? std::max(0, position - model_.window + 1) / kChunk : 0;
    }
    float* sums_of(int row, int head, int chunk) const {
        return sums_.get() + (((int64_t)row * model_.heads + head) * rows_->slots + chunk) * model_.head_dim;
    }

    const Model model_;
    const int width_;        // padded to a group
    ThreadPool& pool_;
    const Pass* pass_ = nullptr;
    // Of the last layer's rows that nobody scores or taps only keys and values are needed.
    LayerRows every_, scored_;
    LayerRows* rows_ = &every_;            // of the current layer
    bool narrows_ = false;                 // the last layer has only the scored ones
    const int query_rows_;                 // rows of a span that attend together
    Buffer<float> x_;                      // [rows][width_]: the residual stream
    Buffer<int16_t> queries_;              // [rows][heads][head_dim]: codes
    Buffer<float> query_scales_;           // [rows][heads]: of the codes, with that of attention, for powers of two
    Buffer<float> sums_;                   // [rows][heads][slots][head_dim]
    std::vector<Partial> partials_;        // [rows][heads][slots]
    Buffer<float> added_;                  // [rows][width_]: a product that is normed before it is added
    Activations head_in_;
    // Experts: each row has a slot for every expert that it uses, and an expert's slots lie together, in order of rows.
    std::vector<int> chosen_;              // [rows][experts_used]: experts, ascending
    std::vector<float> chosen_weights_;    // [rows][experts_used]
    std::vector<int> slot_of_;             // [rows][experts_used]
    std::vector<int> row_of_slot_;
    std::vector<int> active_, active_rows_, active_first_;  // experts that some row uses: their rows, their first slot
    std::vector<int> next_slot_;           // [experts]
    Activations slots_in_, slots_gated_;
    Buffer<float> slots_out_;              // [slots][width_]
    std::vector<Buffer<float>> scratch_;   // of each thread
};

}  // namespace PACELINE_PATH
