#include "decoder.h"

#include <new>

#include "linear.h"
#include "vector_ops.h"
#include "unpack.h"

namespace PACELINE_PATH {

namespace {

constexpr int kQueryRows = 16;       // rows of a span that attend together, at most
constexpr int kSplitRows = 64;       // up to which chunks of keys may be shared out

int chunks_for(int position) { return position / kChunk + 1; }

constexpr float kBinaryLog = 1.44269504f;  // of e

}  // namespace

Decoder::Decoder(const Model& model, ThreadPool& pool)
    : model_(model),
      width_((model.width + kGroup - 1) / kGroup * kGroup),
      pool_(pool),
      query_rows_(std::clamp(kTileQueries * model.kv_heads / model.heads, 1, kQueryRows)),
      scratch_(pool.size()) {}

void Decoder::forward(const Pass& pass) {
    pass_ = &pass;
    prepare();
    pool_.run([](void* self, ThreadPool&, int me) { static_cast<Decoder*>(self)->work(me); }, this, pool_.expected());
    pass_ = nullptr;
}

void Decoder::prepare() {
    const int rows = pass_->rows, across = model_.heads * model_.head_dim;
    position_.resize(rows);
    for (int s = 0; s < pass_->spans; ++s) {
        const Span& span = pass_->span[s];
        for (int i = 0; i < span.count; ++i) position_[pass_->span_rows[span.first + i]] = span.start + i;
    }
    plan_attention();
    x_.need((size_t)rows * width_);
    queries_.need((size_t)rows * across);
    query_scales_.need((size_t)rows * model_.heads);
    sums_.need((size_t)rows * across * slots_);
    partials_.resize((size_t)rows * model_.heads * slots_);
    normed_.shape(rows, width_ / kGroup);
    attended_.shape(rows, across / kGroup);
    gated_.shape(rows, model_.layer[0].down.groups());
    scored_.shape(pass_->scored, width_ / kGroup);
    const size_t widest = std::max(model_.head_dim, 2 * kUnit);
    for (Buffer<float>& scratch : scratch_)
        scratch.need(std::max(rows * widest, QueryTile::floats(model_.head_dim)));
}

// Many rows keep every member busy as they are; few rows have their keys shared out instead.
void Decoder::plan_attention() {
    attending_.clear();
    int longest = 0;
    for (int position : position_) longest = std::max(longest, chunks_for(position));
    int pieces = 0;
    for (int s = 0; s < pass_->spans; ++s) pieces += (pass_->span[s].count + query_rows_ - 1) / query_rows_;
    const bool split = pass_->rows <= kSplitRows && pieces * model_.kv_heads < 4 * pool_.size();
    slots_ = split ? longest : 1;
    for (int s = 0; s < pass_->spans; ++s) {
        const Span& span = pass_->span[s];
        for (int first = 0; first < span.count; first += query_rows_) {
            const int rows = std::min(query_rows_, span.count - first);
            const int keys = span.start + first + rows, chunks = chunks_for(keys - 1);
            for (int head = 0; head < model_.kv_heads; ++head) {
                if (!split) attending_.push_back({s, first, rows, head, 0, chunks, keys});
                for (int c = 0; split && c < chunks; ++c)
                    attending_.push_back({s, first, rows, head, c, c + 1, std::min(keys, (c + 1) * kChunk)});
            }
        }
    }
    // The longest first: what is left at the end, when some have nothing to do, is short.
    std::stable_sort(attending_.begin(), attending_.end(),
                     [](const Attending& a, const Attending& b) { return a.work() > b.work(); });
}

void Decoder::work(int me) {
    const NoDenormals flushed;
    embed(me);
    for (int i = 0; i < pass_->layers; ++i) {
        const int l = pass_->run_layers[i];
        const Layer& layer = model_.layer[l];
        pool_.barrier();
        if (i) copy_taps(pass_->run_layers[i - 1], me);
        copy_sub_blocks(l, me);
        normalise(layer.attn_norm, nullptr, pass_->rows, normed_, me);
        pool_.barrier();
        project_heads(l, me);
        pool_.barrier();
        attend(l, me);
        pool_.barrier();
        join_chunks(me);
        pool_.barrier();
        add_product(layer.o, layer.o_bias, attended_, me);
        pool_.barrier();
        normalise(layer.ffn_norm, nullptr, pass_->rows, normed_, me);
        pool_.barrier();
        feed_forward(layer, me);
        pool_.barrier();
        add_product(layer.down, nullptr, gated_, me);
    }
    pool_.barrier();
    copy_taps(pass_->run_layers[pass_->layers - 1], me);
    if (pass_->scored) {
        normalise(model_.norm, pass_->scored_rows, pass_->scored, scored_, me);
        pool_.barrier();
        score(me);
    }
}

void Decoder::embed(int me) {
    const Share share(pass_->rows, me, pool_.size());
    for (int r = share.begin; r < share.end; ++r)
        unpack_row(model_.embed, pass_->tokens[r], x_.get() + (size_t)r * width_);
}

void Decoder::copy_taps(int layer, int me) {
    for (int t = 0; t < pass_->taps; ++t) {
        if (pass_->tap_layers[t] != layer) continue;
        const Share share(pass_->rows, me, pool_.size());
        for (int r = share.begin; r < share.end; ++r)
            std::memcpy(pass_->hidden + ((size_t)t * pass_->rows + r) * model_.width, x_.get() + (size_t)r * width_,
                        model_.width * sizeof(float));
    }
}

void Decoder::copy_sub_blocks(int layer, int me) {
    const int64_t size = sub_block_size(model_.head_dim);
    const Share share(pass_->copies * model_.kv_heads, me, pool_.size());
    for (int i = share.begin; i < share.end; ++i) {
        const int32_t* pair = pass_->copy + i / model_.kv_heads * 2;
        const int64_t at = cache_at(layer, i % model_.kv_heads);
        for (int16_t* cache : {model_.keys, model_.values})
            std::memcpy(cache + at + pair[1] * size, cache + at + pair[0] * size, size * sizeof(int16_t));
    }
}

// A single row is cut into ranges of groups, which all need the norm of the whole row.
void Decoder::normalise(const float* weight, const int32_t* rows, int count, Activations& out, int me) {
    const int parts = count < 2 * pool_.size() ? pool_.size() : 1, groups = width_ / kGroup;
    const Share share(count * parts, me, pool_.size());
    for (int i = share.begin; i < share.end; ++i) {
        const int row = i / parts;
        const float* x = x_.get() + (size_t)(rows ? rows[row] : row) * width_;
        const Floats by = all(inverse_rms(x, model_.width, width_, model_.norm_eps));
        const Share part(groups, i % parts, parts);
        for (int g = part.begin; g < part.end; ++g) {
            const float *from = x + g * kGroup, *w = weight + g * kGroup;
            out.quantise(row, g, load(from) * by * load(w), load(from + kLanes) * by * load(w + kLanes));
        }
    }
}

// A piece is one head of the queries, keys or values: its product, its norm and rotation, its way to the cache.
void Decoder::project_heads(int layer, int me) {
    const Layer& part = model_.layer[layer];
    const int kv = model_.kv_heads, size = model_.head_dim, tiles = size / kTile;
    float* heads = scratch_[me].get();
    int begin, end;
    while (pool_.take(model_.heads + 2 * kv, begin, end)) {
        for (int piece = begin; piece < end; ++piece) {
            const bool key = piece < kv, value = !key && piece < 2 * kv;
            const Linear& weight = key ? part.k : value ? part.v : part.q;
            const float* bias = key ? part.k_bias : value ? part.v_bias : part.q_bias;
            const int head = key ? piece : value ? piece - kv : piece - 2 * kv;
            for (int t = 0; t < tiles; ++t) linear_tile(weight, head * tiles + t, normed_, heads + t * kTile, size);
            if (bias)
                for (int r = 0; r < pass_->rows; ++r)
                    for (int d = 0; d < size; d += kLanes)
                        store(heads + r * size + d, load(heads + r * size + d) + load(bias + head * size + d));
            if (key) finish_key(layer, head, heads);
            else if (value) finish_value(layer, head, heads);
            else finish_query(part, head, heads);
        }
    }
}

void Decoder::finish_query(const Layer& layer, int head, float* heads) {
    const int size = model_.head_dim;
    for (int r = 0; r < pass_->rows; ++r, heads += size) {
        if (layer.q_norm) normalise_head(heads, layer.q_norm, size, model_.norm_eps);
        rotate_head(heads, size, cosines_of(r), sines_of(r));
        const size_t query = (size_t)r * model_.heads + head;
        const float scale = dot_scale(heads, size);
        store_codes(heads, size, scale, queries_.get() + query * size);
        query_scales_.get()[query] = scale * (model_.attn_scale * kBinaryLog);
    }
}

void Decoder::finish_key(int layer, int head, float* heads) {
    const int size = model_.head_dim;
    const float* norm = model_.layer[layer].k_norm;
    int16_t* keys = model_.keys + cache_at(layer, head);
    alignas(64) int16_t codes[kMaxHeadDim];
    for (int r = 0; r < pass_->rows; ++r, heads += size) {
        if (norm) normalise_head(heads, norm, size, model_.norm_eps);
        rotate_head(heads, size, cosines_of(r), sines_of(r));
        const float scale = dot_scale(heads, size);
        store_codes(heads, size, scale, codes);
        for (int w = pass_->write_starts[r]; w < pass_->write_starts[r + 1]; ++w)
            store_key(keys, pass_->writes[w], codes, scale);
    }
}

void Decoder::finish_value(int layer, int head, float* heads) {
    const int size = model_.head_dim;
    int16_t* values = model_.values + cache_at(layer, head);
    alignas(64) int16_t codes[kMaxHeadDim];
    for (int r = 0; r < pass_->rows; ++r, heads += size) {
        const float scale = value_scale(heads, size);
        store_codes(heads, size, scale, codes);
        for (int w = pass_->write_starts[r]; w < pass_->write_starts[r + 1]; ++w)
            store_value(values, pass_->writes[w], codes, scale);
    }
}

void Decoder::store_key(int16_t* keys, int64_t slot, const int16_t* codes, float scale) const {
    const int64_t token = slot % kSubBlock;
    int16_t* sub_block = keys + slot / kSubBlock * sub_block_size(model_.head_dim);
    for (int d = 0; d < model_.head_dim; d += 2)
        std::memcpy(sub_block + d * kSubBlock + 2 * token, codes + d, 2 * sizeof(int16_t));
    std::memcpy(sub_block + kSubBlock * model_.head_dim + 2 * token, &scale, sizeof(float));
}

void Decoder::store_value(int16_t* values, int64_t slot, const int16_t* codes, float scale) const {
    const int64_t token = slot % kSubBlock, size = model_.head_dim;
    int16_t *sub_block = values + slot / kSubBlock * sub_block_size(size), *to = sub_block + token / 2 * 2 * size + token % 2;
    for (int d = 0; d < size; ++d) to[2 * d] = codes[d];
    std::memcpy(sub_block + kSubBlock * size + 2 * token, &scale, sizeof(float));
}

// The next piece is taken while there is one in hand, so that its keys are on their way.
void Decoder::attend(int layer, int me) {
    const int total = (int)attending_.size();
    Prefetcher prefetcher;
    int piece = pool_.take_one(total), next;
    if (piece < total) prefetcher.add(walk_of(layer, attending_[piece]));
    for (; piece < total; piece = next) {
        next = pool_.take_one(total);
        if (next < total) prefetcher.add(walk_of(layer, attending_[next]));
        attend_piece(layer, attending_[piece], prefetcher, scratch_[me].get());
    }
}

Walk Decoder::walk_of(int layer, const Attending& piece) const {
    const int64_t at = cache_at(layer, piece.kv_head);
    const int32_t* table = pass_->tables + pass_->span[piece.span].table;
    const HeadCache cache{model_.keys + at, model_.values + at, table, model_.head_dim};
    return {cache, piece.chunk, piece.end, (piece.keys + kSubBlock - 1) / kSubBlock};
}

void Decoder::attend_piece(int layer, const Attending& piece, Prefetcher& prefetcher, float* scratch) {
    const int group = model_.heads / model_.kv_heads, size = model_.head_dim, queries = piece.rows * group;
    const Span& span = pass_->span[piece.span];
    const HeadCache cache = walk_of(layer, piece).cache;
    for (int z = 0; z < queries; z += kTileQueries) {
        QueryTile tile(std::min(kTileQueries, queries - z), scratch);
        int seen[kTileQueries];  // keys
        for (int i = 0; i < tile.count; ++i) {
            const int index = piece.first + (z + i) / group, row = pass_->span_rows[span.first + index];
            const size_t query = (size_t)row * model_.heads + piece.kv_head * group + (z + i) % group;
            const size_t slot = query * slots_ + piece.chunk;
            std::memcpy(tile.codes + i * size, queries_.get() + query * size, size * sizeof(int16_t));
            tile.scale[i] = query_scales_.get()[query];
            tile.partial[i] = &partials_[slot];
            tile.sums[i] = sums_.get() + slot * size;
            seen[i] = span.start + index + 1;
        }
        for (int chunk = piece.chunk; chunk < piece.end; ++chunk) {
            for (int i = 0; i < tile.count; ++i) tile.visible[i] = std::min(kChunk, seen[i] - chunk * kChunk);
            attend_chunk(cache, z ? nullptr : &prefetcher, chunk, tile, chunk > piece.chunk);
        }
    }
}

void Decoder::join_chunks(int me) {
    const int size = model_.head_dim;
    const Share share(pass_->rows * model_.heads, me, pool_.size());
    for (int i = share.begin; i < share.end; ++i) {
        const int row = i / model_.heads, head = i % model_.heads;
        const int chunks = slots_ == 1 ? 1 : chunks_for(position_[row]);
        Partial all_keys = partials_[(size_t)i * slots_];
        float* sums = sums_of(row, head, 0);
        for (int c = 1; c < chunks; ++c)
            join<exponential2>(all_keys, sums, partials_[(size_t)i * slots_ + c], sums_of(row, head, c), size);
        const Floats share_of_one = all(1.0f / all_keys.total);
        for (int d = 0; d < size; d += kGroup)
            attended_.quantise(row, (head * size + d) / kGroup, load(sums + d) * share_of_one,
                               load(sums + d + kLanes) * share_of_one);
    }
}

// x += weight * in (+ bias)
void Decoder::add_product(const Linear& weight, const float* bias, const Activations& in, int me) {
    float* product = scratch_[me].get();
    int begin, end;
    while (pool_.take(weight.outputs / kTile, begin, end)) {
        for (int tile = begin; tile < end; ++tile) {
            linear_tile(weight, tile, in, product, kTile);
            float* x = x_.get() + tile * kTile;
            const Floats more = bias ? load(bias + tile * kTile) : zeros();
            for (int r = 0; r < pass_->rows; ++r, x += width_) {
                Floats sum = load(x) + load(product + r * kTile);
                store(x, bias ? sum + more : sum);
            }
        }
    }
}

// A piece is 32 outputs of gate and up, which together are one group of inputs for the way down.
void Decoder::feed_forward(const Layer& layer, int me) {
    float* both = scratch_[me].get();  // [rows][2][32]
    int begin, end;
    while (pool_.take(layer.gate.outputs / kUnit, begin, end)) {
        for (int unit = begin; unit < end; ++unit) {
            for (int t = 0; t < 2; ++t) linear_tile(layer.gate, 2 * unit + t, normed_, both + t * kTile, 2 * kUnit);
            for (int t = 0; t < 2; ++t)
                linear_tile(layer.up, 2 * unit + t, normed_, both + kUnit + t * kTile, 2 * kUnit);
            for (int r = 0; r < pass_->rows; ++r) {
                const float *gate = both + (size_t)r * 2 * kUnit, *up = gate + kUnit;
                gated_.quantise(r, unit, silu(load(gate)) * load(up), silu(load(gate + kLanes)) * load(up + kLanes));
            }
        }
    }
}

void Decoder::score(int me) {
    float* edge = scratch_[me].get();
    int begin, end;
    while (pool_.take(model_.head.outputs / kTile, begin, end)) {
        for (int tile = begin; tile < end; ++tile) {
            float* out = pass_->logits + tile * kTile;
            const int inside = std::min(kTile, model_.vocab - tile * kTile);
            if (inside == kTile) {
                linear_tile(model_.head, tile, scored_, out, model_.vocab);
            } else if (inside > 0) {
                linear_tile(model_.head, tile, scored_, edge, kTile);
                for (int r = 0; r < pass_->scored; ++r)
                    std::memcpy(out + (size_t)r * model_.vocab, edge + r * kTile, inside * sizeof(float));
            }
        }
    }
}

}  // namespace PACELINE_PATH

// ---------------------------------------------------------------------------------------------- for Python
using namespace PACELINE_PATH;

// No exception may leave these. What fails is memory, or a thread that cannot be had.
extern "C" {

void* paceline_pool_open(int threads) try {
    return new ThreadPool(threads);
} catch (...) {
    return nullptr;
}

void paceline_pool_close(void* pool) { delete static_cast<ThreadPool*>(pool); }

void paceline_pool_stop_prefetching(void* pool) { static_cast<ThreadPool*>(pool)->stop_prefetching(); }

// The pool must outlive it.
void* paceline_open(const Model* model, void* pool) try {
    return new Decoder(*model, *static_cast<ThreadPool*>(pool));
} catch (...) {
    return nullptr;
}

void paceline_close(void* decoder) { delete static_cast<Decoder*>(decoder); }

// 0, or 1 where there was no memory for it.
int paceline_forward(void* decoder, const Pass* pass) try {
    static_cast<Decoder*>(decoder)->forward(*pass);
    return 0;
} catch (...) {
    return 1;
}

// y [rows][outputs] = x [rows][inputs] with the rows quantised as in a pass: for tests and measurements.
// 0, or 1 where there was no memory for it.
int paceline_multiply(const Linear* weight, const float* x, int rows, float* y) try {
    Activations in;
    in.shape(rows, weight->groups());
    const NoDenormals flushed;
    for (int r = 0; r < rows; ++r)
        for (int g = 0; g < weight->groups(); ++g) {
            const float* from = x + (size_t)r * weight->inputs + g * kGroup;
            in.quantise(r, g, load(from), load(from + kLanes));
        }
    for (int tile = 0; tile < weight->outputs / kTile; ++tile)
        linear_tile(*weight, tile, in, y + tile * kTile, weight->outputs);
    return 0;
} catch (...) {
    return 1;
}

// What library.py repeats of formats.h and model.h, in its order.
void paceline_layout(int32_t* out) {
    for (size_t size : {sizeof(Linear), sizeof(Layer), sizeof(Model), sizeof(Pass)}) *out++ = (int32_t)size;
    for (const int* table : {kCodeBytes, kScaleBytes, kScaleGroups}) out = std::copy_n(table, kFormats, out);
}

// out: [count][inputs]
void paceline_unpack(const Linear* weight, const int32_t* rows, int count, float* out) {
    for (int i = 0; i < count; ++i) unpack_row(*weight, rows[i], out + (int64_t)i * weight->inputs);
}

}
