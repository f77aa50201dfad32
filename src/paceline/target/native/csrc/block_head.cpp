#include "block_head.h"

#include <cstring>
#include <new>

#include "block_attention.h"
#include "unpack.h"

namespace PACELINE_PATH {

namespace {

int up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace

BlockFiller::BlockFiller(const BlockModel& model, ThreadPool& pool)
    : model_(model),
      pool_(pool),
      group_(model.heads / model.kv_heads),
      queries_(group_ * model.block),
      padded_(up(queries_, kLanes)),
      pairs_(pool.size()),
      previous_(pool.size()),
      scratch_(pool.size()) {
    project_mask();
}

void BlockFiller::run(const Drafting& drafting) {
    reading_ = &drafting.reading;
    filling_ = &drafting.filling;
    chaining_ = &drafting.chaining;
    if (reading_->parts) prepare_reading();
    if (filling_->texts) prepare_filling();
    if (chaining_->chains) prepare_chaining();
    sample_failed_ = false;
    pool_.run([](void* self, ThreadPool&, int me) { static_cast<BlockFiller*>(self)->work(me); }, this);
    if (sample_failed_) throw std::bad_alloc();
    pool_.expect({model_.weights, (size_t)model_.weights_bytes});
}

void BlockFiller::work(int me) {
    const NoDenormals flushed;
    const Tiles shaped;
    if (reading_->parts) read_rows(me);
    if (filling_->texts) {
        embed_rows(me);
        pool_.barrier();
        fill_blocks(me);
    }
    pool_.barrier();
    if (chaining_->chains) follow(me);
}

// ------------------------------------------------------------------------------------------------ the context
void BlockFiller::prepare_reading() {
    read_at_.clear();
    contexts_.clear();
    for (int p = 0; p < reading_->parts; ++p)
        for (int r = 0; r < reading_->part[p].rows; ++r) {
            read_at_.push_back(reading_->part[p].start + r);
            contexts_.push_back(reading_->part[p].context + r * row_size());
        }
    const size_t rows = read_at_.size();
    read_.need(rows * model_.width);
    features_.shape((int)rows, model_.fc.groups());
    read_normed_.shape((int)rows, model_.width / kGroup);
    for (Buffer<float>& scratch : scratch_) scratch.need(rows * model_.head_dim);
}

void BlockFiller::read_rows(int me) {
    const int size = model_.head_dim, kv = model_.kv_heads, groups = model_.width / kGroup, rows = (int)read_at_.size();
    const Share mine(reading_->taps * groups, me, pool_.size());
    for (int p = 0, row = 0; p < reading_->parts; ++p)
        for (int r = 0; r < reading_->part[p].rows; ++r, ++row)
            for (int g = mine.begin; g < mine.end; ++g) {
                const float* from = reading_->part[p].hidden[g / groups] + (size_t)r * model_.width + g % groups * kGroup;
                features_.quantise(row, g, load(from), load(from + kLanes));
            }
    pool_.barrier();
    int begin, end;
    while (pool_.take(model_.fc.outputs / kTile, begin, end))
        for (int tile = begin; tile < end; ++tile)
            product(model_.fc, tile, features_, read_.get() + tile * kTile, model_.width);
    pool_.barrier();
    normalise(read_, model_.context_norm, rows, 1, read_normed_, me);
    pool_.barrier();
    float* heads = scratch_[me].get();
    while (pool_.take(model_.layers * 2 * kv, begin, end))
        for (int piece = begin; piece < end; ++piece) {
            const int layer = piece / (2 * kv), kind = piece / kv % 2, head = piece % kv;
            const Layer& part = model_.layer[layer];
            for (int t = 0; t < size / kTile; ++t)
                product(kind ? part.v : part.k, head * (size / kTile) + t, read_normed_, heads + t * kTile, size);
            for (int r = 0; r < rows; ++r) {
                uint16_t* out = contexts_[r] + head_at(layer, kind, head);
                if (kind) value_head(heads + r * size, out);
                else key_head(part, heads + r * size, read_at_[r], reading_->rotations, out);
            }
        }
}

void BlockFiller::key_head(const Layer& layer, float* head, int position, const Rotations& rotations, uint16_t* out) const {
    const int size = model_.head_dim;
    const int64_t at = (int64_t)position * (size / 2);
    normalise_head(head, layer.k_norm, size, model_.norm_eps);
    rotate_head(head, size, rotations.cosines + at, rotations.sines + at);
    value_head(head, out);
}

void BlockFiller::value_head(const float* head, uint16_t* out) const {
    for (int d = 0; d < model_.head_dim; d += kLanes) store_halves(out + d, as_half_range(load(head + d)));
}

// ---------------------------------------------------------------------------------------------------- the pass
void BlockFiller::prepare_filling() {
    const int texts = filling_->texts, groups = model_.width / kGroup;
    block_ = filling_->slots;
    rows_ = texts * block_;
    positions_.resize(rows_);
    for (int r = 0; r < rows_; ++r) positions_[r] = filling_->text[r / block_].position + r % block_;
    plan_attention();
    const size_t size = model_.head_dim, kv = model_.kv_heads, pieces = (size_t)texts * kv * chunks_;
    x_.need((size_t)rows_ * model_.width);
    rotated_.need(texts * kv * size * padded_);
    std::fill_n(rotated_.get(), texts * kv * size * padded_, 0.0f);
    own_.need(rows_ * 2 * kv * size);
    stats_.need(pieces * 2 * padded_);
    sums_.need(pieces * queries_ * size);
    attended_.shape(rows_, model_.heads * model_.head_dim / kGroup);
    gated_.shape(rows_, model_.layer[0].down.groups());
    anchors_.shape(texts, groups);
    normed_.shape(rows_, groups);
    const size_t wide = std::max<size_t>({(size_t)rows_ * size, (size_t)rows_ * 2 * kUnit, (size_t)kBlockChunk * padded_});
    for (Buffer<float>& scratch : scratch_) scratch.need(wide);
}

// The keys of a text are cut into chunks of almost equal length.
void BlockFiller::plan_attention() {
    attending_.clear();
    chunks_ = 1;
    for (int t = 0; t < filling_->texts; ++t)
        chunks_ = std::max(chunks_, up(filling_->text[t].count + block_, kBlockChunk) / kBlockChunk);
    for (int t = 0; t < filling_->texts; ++t) {
        const int keys = filling_->text[t].count + block_, chunks = up(keys, kBlockChunk) / kBlockChunk;
        for (int c = 0; c < chunks; ++c) {
            const Share share(keys, c, chunks);
            for (int head = 0; head < model_.kv_heads; ++head) attending_.push_back({t, head, c, share.begin, share.end});
        }
    }
}

void BlockFiller::fill_blocks(int me) {
    for (int l = 0; l < model_.layers; ++l) {
        const Layer& layer = model_.layer[l];
        if (l == 0) normalise(x_, layer.attn_norm, filling_->texts, block_, anchors_, me);
        else normalise(x_, layer.attn_norm, rows_, 1, normed_, me);
        pool_.barrier();
        project(l, me);
        pool_.barrier();
        attend(l, me);
        pool_.barrier();
        join_chunks(me);
        pool_.barrier();
        add_product(layer.o, attended_, me);
        pool_.barrier();
        normalise(x_, layer.ffn_norm, rows_, 1, normed_, me);
        pool_.barrier();
        feed_forward(layer, me);
        pool_.barrier();
        add_product(layer.down, gated_, me);
        pool_.barrier();
    }
    finish(me);
    pool_.barrier();
    score(me);
}

void BlockFiller::embed_rows(int me) {
    const Share share(rows_, me, pool_.size());
    for (int r = share.begin; r < share.end; ++r) {
        float* to = x_.get() + (size_t)r * model_.width;
        if (r % block_) {
            std::copy_n(model_.mask, model_.width, to);
            continue;
        }
        unpack_row(model_.embed, filling_->text[r / block_].anchor, to);
        for (int i = 0; i < model_.width; i += kLanes) store(to + i, load(to + i) * all(model_.embed_scale));
    }
}

// Of all rows every `step`-th, `count` of them. By groups, every thread finds the norms of all by itself.
void BlockFiller::normalise(const Buffer<float>& x, const float* weight, int count, int step, Activations& out, int me) {
    const QuantiseShare mine(count, model_.width, out, me, pool_.size());
    for (int i = mine.rows.begin; i < mine.rows.end; ++i)
        normalise_row(x.get() + (size_t)i * step * model_.width, weight, i, mine.groups, out);
}

// Returns what it multiplied the row by, beside the weight.
Floats BlockFiller::normalise_row(const float* x, const float* weight, int to, const Share& groups, Activations& out) const {
    const Floats by = all(inverse_rms(x, model_.width, model_.width, model_.norm_eps));
    for (int g = groups.begin; g < groups.end; ++g) {
        const float *from = x + g * kGroup, *w = weight + g * kGroup;
        out.quantise(to, g, load(from) * by * load(w), load(from + kLanes) * by * load(w + kLanes));
    }
    return by;
}

// What the first layer makes of the vector that stands in all slots but the anchors' is known beforehand.
void BlockFiller::project_mask() {
    const NoDenormals flushed;
    const Tiles shaped;
    const Layer& layer = model_.layer[0];
    const int kv = model_.kv_heads, size = model_.head_dim, tiles = size / kTile;
    mask_heads_.need((size_t)(2 * kv + model_.heads) * size);
    anchors_.shape(1, model_.width / kGroup);
    normalise_row(model_.mask, layer.attn_norm, 0, Share(model_.width / kGroup, 0, 1), anchors_);
    float* out = mask_heads_.get();
    for (int t = 0; t < kv * tiles; ++t, out += kTile) product(layer.k, t, anchors_, out, 0);
    for (int t = 0; t < kv * tiles; ++t, out += kTile) product(layer.v, t, anchors_, out, 0);
    for (int t = 0; t < model_.heads * tiles; ++t, out += kTile) product(layer.q, t, anchors_, out, 0);
}

// A piece is one head of the keys, values or queries.
void BlockFiller::project(int l, int me) {
    const Layer& layer = model_.layer[l];
    const int kv = model_.kv_heads, size = model_.head_dim, tiles = size / kTile;
    const int64_t stride = (int64_t)2 * kv * size;
    const Activations& in = l ? normed_ : anchors_;
    alignas(64) float one[kMaxHeadDim];
    float* heads = scratch_[me].get();
    int begin, end;
    while (pool_.take(model_.heads + 2 * kv, begin, end))
        for (int piece = begin; piece < end; ++piece) {
            const int kind = piece / kv, head = kind < 2 ? piece % kv : piece - 2 * kv;
            const Linear& weight = kind == 0 ? layer.k : kind == 1 ? layer.v : layer.q;
            for (int t = 0; t < tiles; ++t) product(weight, head * tiles + t, in, heads + t * kTile, size);
            for (int r = 0; r < rows_; ++r) {
                const float* made = l ? heads + r * size : r % block_ ? mask_heads_.get() + piece * size : heads + r / block_ * size;
                std::copy_n(made, size, one);
                uint16_t* out = own_.get() + r * stride + piece * size;
                if (kind > 1) spread_query(layer, head, r, one);
                else if (kind) value_head(one, out);
                else key_head(layer, one, positions_[r], filling_->rotations, out);
            }
        }
}

void BlockFiller::spread_query(const Layer& layer, int head, int row, float* query) {
    const int size = model_.head_dim;
    const int64_t at = (int64_t)positions_[row] * (size / 2);
    const Floats scale = all(model_.attn_scale);
    normalise_head(query, layer.q_norm, size, model_.norm_eps);
    rotate_head(query, size, filling_->rotations.cosines + at, filling_->rotations.sines + at);
    for (int d = 0; d < size; d += kLanes) store(query + d, load(query + d) * scale);
    const int text = row / block_, column = row % block_ * group_ + head % group_;
    float* to = rotated_.get() + (int64_t)(text * model_.kv_heads + head / group_) * size * padded_ + column;
    for (int d = 0; d < size; ++d) to[(int64_t)d * padded_] = query[d];
}

void BlockFiller::attend(int layer, int me) {
    const int total = (int)attending_.size(), size = model_.head_dim, kv = model_.kv_heads;
    const uint16_t *keys[kBlockChunk], *values[kBlockChunk];
    for (int i = pool_.take_one(total); i < total; i = pool_.take_one(total)) {
        const Attending& piece = attending_[i];
        const Text& text = filling_->text[piece.text];
        for (int k = piece.begin; k < piece.end; ++k) {
            const bool own = k >= text.count;
            const int64_t row = own ? (int64_t)piece.text * block_ + k - text.count : k;
            const uint16_t* at = own ? own_.get() + row * 2 * kv * size : text.context + row * row_size();
            keys[k - piece.begin] = at + (own ? head_at(0, 0, piece.kv_head) : head_at(layer, 0, piece.kv_head));
            values[k - piece.begin] = keys[k - piece.begin] + kv * size;
            for (int d = 0; d < size; d += 32) {  // halves of one cache line: rows lie too far apart to be foreseen
                prefetch(keys[k - piece.begin] + d);
                prefetch(values[k - piece.begin] + d);
            }
        }
        const int slot = piece_of(piece.text, piece.kv_head, piece.chunk);
        const float* queries = rotated_.get() + (int64_t)(piece.text * kv + piece.kv_head) * size * padded_;
        attend_block(keys, values, piece.end - piece.begin, queries, block_ * group_, padded_, size, scratch_[me].get(),
                     stats_of(slot), stats_of(slot) + padded_, sums_of(slot));
    }
}

void BlockFiller::join_chunks(int me) {
    const int size = model_.head_dim;
    const Share share(rows_ * model_.heads, me, pool_.size());
    const bool by_heads = shared_by_groups(rows_, attended_, pool_.size());
    for (int i = share.begin; i < share.end; ++i) {
        const int row = by_heads ? i % rows_ : i / model_.heads, head = by_heads ? i / rows_ : i % model_.heads;
        const int text = row / block_;
        const int query = row % block_ * group_ + head % group_;
        const int chunks = up(filling_->text[text].count + block_, kBlockChunk) / kBlockChunk;
        const int first = piece_of(text, head / group_, 0);
        Partial whole{stats_of(first)[query], stats_of(first)[padded_ + query]};
        float* sums = sums_of(first) + query * size;
        for (int p = first + 1; p < first + chunks; ++p)
            join<exponential>(whole, sums, {stats_of(p)[query], stats_of(p)[padded_ + query]}, sums_of(p) + query * size, size);
        const Floats by = all(1.0f / whole.total);
        for (int d = 0; d < size; d += kGroup)
            attended_.quantise(row, (head * size + d) / kGroup, load(sums + d) * by, load(sums + d + kLanes) * by);
    }
}

void BlockFiller::add_product(const Linear& weight, const Activations& in, int me) {
    float* added = scratch_[me].get();
    int begin, end;
    while (pool_.take(weight.outputs / kTile, begin, end))
        for (int tile = begin; tile < end; ++tile) {
            product(weight, tile, in, added, kTile);
            for (int i = 0; i < rows_; ++i) {
                float* x = x_.get() + (size_t)i * model_.width + tile * kTile;
                store(x, load(x) + load(added + i * kTile));
            }
        }
}

// A piece is 32 outputs of gate and up, which together are one group of inputs for the way down.
void BlockFiller::feed_forward(const Layer& layer, int me) {
    float* both = scratch_[me].get();  // [rows][2][32]
    int begin, end;
    while (pool_.take(layer.gate.outputs / kUnit, begin, end))
        for (int unit = begin; unit < end; ++unit) {
            for (int t = 0; t < 4; ++t)
                product(t < 2 ? layer.gate : layer.up, 2 * unit + t % 2, normed_, both + t * kTile, 2 * kUnit);
            for (int i = 0; i < rows_; ++i) {
                const float *gate = both + (size_t)i * 2 * kUnit, *up = gate + kUnit;
                gated_.quantise(i, unit, silu(load(gate)) * load(up), silu(load(gate + kLanes)) * load(up + kLanes));
            }
        }
}

void BlockFiller::finish(int me) {
    const QuantiseShare mine(rows_, model_.width, normed_, me, pool_.size());
    for (int i = mine.rows.begin; i < mine.rows.end; ++i) {
        const float* x = x_.get() + (size_t)i * model_.width;
        float* out = filling_->text[i / block_].hidden + (size_t)(i % block_) * model_.width;
        const Floats by = normalise_row(x, model_.norm, i, mine.groups, normed_);
        for (int d = mine.groups.begin * kGroup; d < mine.groups.end * kGroup; d += kLanes)
            store(out + d, load(x + d) * by * load(model_.norm + d));
    }
}

// Every member has the share of the vocabulary that it looks at afterwards: it is in its cache then.
void BlockFiller::score(int me) {
    const int outputs = model_.head.outputs;
    const Share share(outputs / kTile, me, pool_.size());
    float* logits = scratch_[me].get();
    for (int tile = share.begin; tile < share.end; ++tile) {
        product(model_.head, tile, normed_, logits, kTile);
        const int inside = model_.draft_vocab - tile * kTile;
        for (int i = 0; i < rows_; ++i) {
            float* out = filling_->text[i / block_].base + (int64_t)(i % block_) * outputs + tile * kTile;
            store(out, first_lanes(inside, load(logits + i * kTile), all(kHidden)));
        }
    }
}

}  // namespace PACELINE_PATH

// ---------------------------------------------------------------------------------------------- for Python
using namespace PACELINE_PATH;

// No exception may leave these. What fails is memory.
extern "C" {

// The pool must outlive it.
void* paceline_block_open(const BlockModel* model, void* pool) try {
    return new BlockFiller(*model, *static_cast<ThreadPool*>(pool));
} catch (...) {
    return nullptr;
}

void paceline_block_close(void* filler) { delete static_cast<BlockFiller*>(filler); }

// 0, or 1 where there was no memory for it.
int paceline_block_run(void* filler, const Drafting* drafting) try {
    static_cast<BlockFiller*>(filler)->run(*drafting);
    return 0;
} catch (...) {
    return 1;
}

// What library.py repeats of block_model.h, in its order.
void paceline_block_layout(int32_t* out) {
    for (size_t size : {sizeof(BlockModel), sizeof(Part), sizeof(Reading), sizeof(Text), sizeof(Filling), sizeof(Chain), sizeof(Drafting)})
        *out++ = (int32_t)size;
}

}
