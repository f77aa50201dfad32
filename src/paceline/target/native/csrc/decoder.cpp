#include "decoder.h"

#include <new>

#include "linear_pair.h"
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
    const int rows = pass_->rows, last = pass_->run_layers[pass_->layers - 1];
    narrows_ = pass_->scored < rows && !(pass_->taps && pass_->tap_layers[pass_->taps - 1] == last);
    every_.count = rows;
    every_.spans.assign(pass_->span, pass_->span + pass_->spans);
    every_.span_rows.assign(pass_->span_rows, pass_->span_rows + rows);
    prepare_rows(every_);
    if (narrows_) {
        choose_scored();
        prepare_rows(scored_);
    }
    rows_ = &every_;
    x_.need((size_t)rows * width_);
    head_in_.shape(pass_->scored, width_ / kGroup);
    if (model_.layer[0].post_attn_norm) added_.need((size_t)rows * width_);
    prepare_experts();
    const size_t widest = std::max(model_.head_dim + kUnit, 2 * kUnit);
    const size_t routed = (model_.experts + kLanes - 1) / kLanes * kLanes;
    for (Buffer<float>& scratch : scratch_)
        scratch.need(std::max({rows * widest, QueryTile::floats(model_.head_dim), routed}));
}

void Decoder::prepare_rows(LayerRows& rows) {
    const int across = model_.heads * model_.head_dim;
    rows.position.resize(rows.count);
    for (const Span& span : rows.spans)
        for (int i = 0; i < span.count; ++i) rows.position[rows.span_rows[span.first + i]] = span.start + i;
    plan_attention(rows);
    const size_t queries = (size_t)rows.count * model_.heads;
    queries_.need(queries * model_.head_dim);
    query_scales_.need(queries);
    sums_.need(queries * model_.head_dim * rows.slots);
    partials_.resize(std::max(partials_.size(), queries * rows.slots));
    rows.normed.shape(rows.count, width_ / kGroup);
    rows.attended.shape(rows.count, across / kGroup);
    rows.gated.shape(rows.count, (model_.ff_width + kGroup - 1) / kGroup);
}

// Scored rows next to one another in a span stay together, so that they attend together.
void Decoder::choose_scored() {
    std::vector<int> number(pass_->rows, -1);
    for (int i = 0; i < pass_->scored; ++i) number[pass_->scored_rows[i]] = i;
    scored_.count = pass_->scored;
    scored_.spans.clear();
    scored_.span_rows.clear();
    for (const Span& span : every_.spans) {
        bool joins = false;
        for (int i = 0; i < span.count; ++i) {
            const int row = number[every_.span_rows[span.first + i]];
            if (row >= 0) {
                if (!joins) scored_.spans.push_back({(int)scored_.span_rows.size(), 0, span.start + i, span.table});
                ++scored_.spans.back().count;
                scored_.span_rows.push_back(row);
            }
            joins = row >= 0;
        }
    }
}

// All memory, since nothing may be allocated while the threads work.
void Decoder::prepare_experts() {
    if (!model_.experts) return;
    const int slots = pass_->rows * model_.experts_used;
    for (std::vector<int>* each : {&chosen_, &slot_of_, &row_of_slot_}) each->resize(slots);
    chosen_weights_.resize(slots);
    next_slot_.resize(model_.experts);
    for (std::vector<int>* each : {&active_, &active_rows_, &active_first_}) each->reserve(model_.experts);
    int gated = 0;
    for (int l = 0; l < model_.layers; ++l)
        if (model_.layer[l].router) gated = model_.layer[l].experts[2].groups();
    slots_in_.reserve(slots, width_ / kGroup);
    slots_gated_.reserve(slots, gated);
    slots_out_.need((size_t)slots * width_);
}

// Many rows keep every member busy as they are; few rows have their keys shared out instead.
void Decoder::plan_attention(LayerRows& rows) const {
    int longest = 1;
    for (int position : rows.position) longest = std::max(longest, chunks_for(position));
    int pieces = 0;
    for (const Span& span : rows.spans) pieces += (span.count + query_rows_ - 1) / query_rows_;
    const bool split = rows.count <= kSplitRows && pieces * model_.kv_heads < 4 * pool_.size();
    rows.slots = split ? longest : 1;
    plan_attention(rows, 0, split, rows.attending);
    if (model_.window) plan_attention(rows, model_.window, split, rows.attending_locally);
}

void Decoder::plan_attention(const LayerRows& all, int window, bool split, std::vector<Attending>& attending) const {
    attending.clear();
    for (int s = 0; s < (int)all.spans.size(); ++s) {
        const Span& span = all.spans[s];
        for (int first = 0; first < span.count; first += query_rows_) {
            const int rows = std::min(query_rows_, span.count - first);
            const int keys = span.start + first + rows, chunks = chunks_for(keys - 1);
            const int begin = first_chunk(span.start + first, window > 0);
            for (int head = 0; head < model_.kv_heads; ++head) {
                if (!split) attending.push_back({s, first, rows, head, begin, chunks, keys});
                for (int c = begin; split && c < chunks; ++c)
                    attending.push_back({s, first, rows, head, c, c + 1, std::min(keys, (c + 1) * kChunk)});
            }
        }
    }
    // The longest first: what is left at the end, when some have nothing to do, is short.
    std::stable_sort(attending.begin(), attending.end(),
                     [](const Attending& a, const Attending& b) { return a.work() > b.work(); });
}

void Decoder::work(int me) {
    const NoDenormals flushed;
    const Tiles shaped;
    embed(me);
    for (int i = 0; i < pass_->layers; ++i) {
        const int l = pass_->run_layers[i];
        const Layer& layer = model_.layer[l];
        const bool narrows = narrows_ && i + 1 == pass_->layers;
        pool_.barrier();
        if (i) copy_taps(pass_->run_layers[i - 1], me);
        copy_sub_blocks(l, me);
        normalise(layer.attn_norm, nullptr, pass_->rows, every_.normed, me);
        if (narrows) {
            normalise(layer.attn_norm, pass_->scored_rows, pass_->scored, scored_.normed, me);
            if (me == 0) rows_ = &scored_;
        }
        pool_.barrier();
        if (narrows && me == 0) keep_scored();
        project_heads(l, me);
        if (narrows && !pass_->scored) break;
        pool_.barrier();
        attend(l, me);
        pool_.barrier();
        join_chunks(layer, me);
        pool_.barrier();
        add_product(layer.o, layer.o_bias, rows_->attended, layer.post_attn_norm, me);
        pool_.barrier();
        if (layer.router) {
            mix_experts(layer, me);
            continue;
        }
        normalise(layer.ffn_norm, nullptr, rows_->count, rows_->normed, me);
        pool_.barrier();
        feed_forward(layer, me);
        pool_.barrier();
        add_product(layer.down, nullptr, rows_->gated, layer.post_ffn_norm, me);
    }
    pool_.barrier();
    copy_taps(pass_->run_layers[pass_->layers - 1], me);
    if (pass_->scored) {
        normalise(model_.norm, narrows_ ? nullptr : pass_->scored_rows, pass_->scored, head_in_, me);
        pool_.barrier();
        score(me);
    }
}

void Decoder::embed(int me) {
    const Share share(pass_->rows, me, pool_.size());
    for (int r = share.begin; r < share.end; ++r) {
        float* row = x_.get() + (size_t)r * width_;
        unpack_row(model_.embed, pass_->tokens[r], row);
        if (model_.embed_scale != 1.0f)
            for (int d = 0; d < width_; d += kLanes) store(row + d, load(row + d) * all(model_.embed_scale));
    }
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

// The residual stream of the scored rows moves to the front: no row lies before its place among them.
void Decoder::keep_scored() {
    for (int i = 0; i < pass_->scored; ++i)
        std::memmove(x_.get() + (size_t)i * width_, x_.get() + (size_t)pass_->scored_rows[i] * width_, width_ * sizeof(float));
}

// By groups, every thread finds the norms of all rows by itself.
void Decoder::normalise(const float* weight, const int32_t* rows, int count, Activations& out, int me) {
    const QuantiseShare mine(count, width_, out, me, pool_.size());
    for (int row = mine.rows.begin; row < mine.rows.end; ++row) {
        const float* x = x_.get() + (size_t)(rows ? rows[row] : row) * width_;
        const Floats by = all(inverse_rms(x, model_.width, width_, model_.norm_eps));
        for (int g = mine.groups.begin; g < mine.groups.end; ++g) {
            const float *from = x + g * kGroup, *w = weight + g * kGroup;
            out.quantise(row, g, load(from) * by * load(w), load(from + kLanes) * by * load(w + kLanes));
        }
    }
}

// A piece is one head of the queries, keys or values: its product, its norm and rotation, its way to the cache.
void Decoder::project_heads(int layer, int me) {
    const Layer& part = model_.layer[layer];
    const int kv = model_.kv_heads, size = model_.head_dim, pairs = size / kUnit;
    float *heads = scratch_[me].get(), *product = heads + (size_t)pass_->rows * size;  // [rows][size], [rows][32]
    int begin, end;
    while (pool_.take((rows_->count ? model_.heads : 0) + 2 * kv, begin, end)) {
        for (int piece = begin; piece < end; ++piece) {
            const bool key = piece < kv, value = !key && piece < 2 * kv;
            const LayerRows& rows = key || value ? every_ : *rows_;
            const Linear& weight = key ? part.k : value ? part.v : part.q;
            const float* bias = key ? part.k_bias : value ? part.v_bias : part.q_bias;
            const int head = key ? piece : value ? piece - kv : piece - 2 * kv;
            for (int pair = 0; pair < pairs; ++pair) {
                linear_pair(weight, head * pairs + pair, rows.normed, product);
                for (int r = 0; r < rows.count; ++r)
                    for (int at = 0, d = pair * kUnit; at < kUnit; at += kLanes, d += kLanes) {
                        const Floats made = load(product + r * kUnit + at);
                        store(heads + r * size + d, bias ? made + load(bias + head * size + d) : made);
                    }
            }
            if (key) finish_key(layer, head, heads);
            else if (value) finish_value(layer, head, heads);
            else finish_query(part, head, heads);
        }
    }
}

void Decoder::finish_query(const Layer& layer, int head, float* heads) {
    const int size = model_.head_dim;
    for (int r = 0; r < rows_->count; ++r, heads += size) {
        if (layer.q_norm) normalise_head(heads, layer.q_norm, size, model_.norm_eps);
        rotate_head(heads, size, cosines_of(row_of(r), layer.local), sines_of(row_of(r), layer.local));
        const size_t query = (size_t)r * model_.heads + head;
        const float scale = dot_scale(heads, size);
        store_codes(heads, size, scale, queries_.get() + query * size);
        query_scales_.get()[query] = scale * (model_.attn_scale * kBinaryLog);
    }
}

void Decoder::finish_key(int layer, int head, float* heads) {
    const int size = model_.head_dim;
    const float* norm = model_.layer[layer].k_norm;
    const bool local = model_.layer[layer].local;
    int16_t* keys = model_.keys + cache_at(layer, head);
    alignas(64) int16_t codes[kMaxHeadDim];
    for (int r = 0; r < pass_->rows; ++r, heads += size) {
        if (norm) normalise_head(heads, norm, size, model_.norm_eps);
        rotate_head(heads, size, cosines_of(r, local), sines_of(r, local));
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
    const std::vector<Attending>& pieces = model_.layer[layer].local ? rows_->attending_locally : rows_->attending;
    const int total = (int)pieces.size();
    Prefetcher prefetcher;
    int piece = pool_.take_one(total), next;
    if (piece < total) prefetcher.add(walk_of(layer, pieces[piece]));
    for (; piece < total; piece = next) {
        next = pool_.take_one(total);
        if (next < total) prefetcher.add(walk_of(layer, pieces[next]));
        attend_piece(layer, pieces[piece], prefetcher, scratch_[me].get());
    }
}

Walk Decoder::walk_of(int layer, const Attending& piece) const {
    const int64_t at = cache_at(layer, piece.kv_head);
    const int32_t* table = pass_->tables + rows_->spans[piece.span].table;
    const HeadCache cache{model_.keys + at, model_.values + at, table, model_.head_dim};
    return {cache, piece.chunk, piece.end, (piece.keys + kSubBlock - 1) / kSubBlock};
}

void Decoder::attend_piece(int layer, const Attending& piece, Prefetcher& prefetcher, float* scratch) {
    const int group = model_.heads / model_.kv_heads, size = model_.head_dim, queries = piece.rows * group;
    const Span& span = rows_->spans[piece.span];
    const HeadCache cache = walk_of(layer, piece).cache;
    const int window = model_.layer[layer].local ? model_.window : 0;
    for (int z = 0; z < queries; z += kTileQueries) {
        QueryTile tile(std::min(kTileQueries, queries - z), scratch);
        tile.cap = model_.attn_softcap * kBinaryLog;
        int seen[kTileQueries], before[kTileQueries];  // keys, and those before the window
        for (int i = 0; i < tile.count; ++i) {
            const int index = piece.first + (z + i) / group, row = rows_->span_rows[span.first + index];
            const size_t query = (size_t)row * model_.heads + piece.kv_head * group + (z + i) % group;
            const size_t slot = query * rows_->slots + (rows_->slots == 1 ? 0 : piece.chunk);
            std::memcpy(tile.codes + i * size, queries_.get() + query * size, size * sizeof(int16_t));
            tile.scale[i] = query_scales_.get()[query];
            tile.partial[i] = &partials_[slot];
            tile.sums[i] = sums_.get() + slot * size;
            seen[i] = span.start + index + 1;
            before[i] = window ? std::max(0, seen[i] - window) : 0;
        }
        for (int chunk = piece.chunk; chunk < piece.end; ++chunk) {
            for (int i = 0; i < tile.count; ++i) {
                tile.visible[i] = std::min(kChunk, seen[i] - chunk * kChunk);
                tile.hidden[i] = std::clamp(before[i] - chunk * kChunk, 0, kChunk);
            }
            attend_chunk(cache, z ? nullptr : &prefetcher, chunk, tile, chunk > piece.chunk);
        }
    }
}

// A sink is joined last, as a chunk of one key whose value is zero.
void Decoder::join_chunks(const Layer& layer, int me) {
    const int size = model_.head_dim, slots = rows_->slots, count = rows_->count;
    const Share share(count * model_.heads, me, pool_.size());
    const bool by_heads = shared_by_groups(count, rows_->attended, pool_.size());
    for (int i = share.begin; i < share.end; ++i) {
        const int row = by_heads ? i % count : i / model_.heads, head = by_heads ? i / count : i % model_.heads;
        const int first = slots == 1 ? 0 : first_chunk(rows_->position[row], layer.local);
        const int chunks = slots == 1 ? 1 : chunks_for(rows_->position[row]);
        const Partial* partials = &partials_[((size_t)row * model_.heads + head) * slots];
        Partial all_keys = partials[first];
        float* sums = sums_of(row, head, first);
        for (int c = first + 1; c < chunks; ++c)
            join<exponential2>(all_keys, sums, partials[c], sums_of(row, head, c), size);
        float kept = 1.0f;
        if (layer.sinks) kept = join_totals<exponential2>(all_keys, {layer.sinks[head] * kBinaryLog, 1.0f}).before;
        const Floats share_of_one = all(kept / all_keys.total);
        for (int d = 0; d < size; d += kGroup)
            rows_->attended.quantise(row, (head * size + d) / kGroup, load(sums + d) * share_of_one,
                               load(sums + d + kLanes) * share_of_one);
    }
}

// x += weight * in (+ bias), normed beforehand where there is a norm.
void Decoder::add_product(const Linear& weight, const float* bias, const Activations& in, const float* norm, int me) {
    float* product = scratch_[me].get();  // [rows][wide]
    const int tiles = tiles_at_once(in.strips().size()), wide = tiles * kTile;
    int begin, end;
    while (pool_.take(weight.outputs / wide, begin, end)) {
        for (int piece = begin; piece < end; ++piece) {
            if (tiles == 2) linear_pair(weight, piece, in, product);
            else linear_tile(weight, piece, in, product, kTile);
            const float* made = product;
            float* x = (norm ? added_ : x_).get() + piece * wide;
            for (int r = 0; r < rows_->count; ++r, x += width_ - wide)
                for (int at = 0; at < wide; at += kLanes, x += kLanes, made += kLanes) {
                    const Floats sum = norm ? load(made) : load(x) + load(made);
                    store(x, bias ? sum + load(bias + piece * wide + at) : sum);
                }
        }
    }
    if (norm) {
        pool_.barrier();
        add_normed(norm, me);
    }
}

void Decoder::add_normed(const float* norm, int me) {
    const Share share(rows_->count, me, pool_.size());
    for (int r = share.begin; r < share.end; ++r) {
        float* x = x_.get() + (size_t)r * width_;
        const float* more = added_.get() + (size_t)r * width_;
        const Floats by = all(inverse_rms(more, model_.width, width_, model_.norm_eps));
        for (int d = 0; d < width_; d += kLanes) store(x + d, load(x + d) + load(more + d) * by * load(norm + d));
    }
}

// A piece is 32 outputs of gate and up, which together are one group of inputs for the way down.
void Decoder::feed_forward(const Layer& layer, int me) {
    float *gates = scratch_[me].get(), *ups = gates + (size_t)rows_->count * kUnit;  // [rows][32] each
    int begin, end;
    while (pool_.take(layer.gate.outputs / kUnit, begin, end)) {
        for (int unit = begin; unit < end; ++unit) {
            linear_pair(layer.gate, unit, rows_->normed, gates);
            linear_pair(layer.up, unit, rows_->normed, ups);
            for (int r = 0; r < rows_->count; ++r) {
                const float *gate = gates + (size_t)r * kUnit, *up = ups + (size_t)r * kUnit;
                rows_->gated.quantise(r, unit, gated(load(gate), load(up)), gated(load(gate + kLanes), load(up + kLanes)));
            }
        }
    }
}

// Each row goes through the experts that its router scores highest, and adds their outputs in the order of experts.
void Decoder::mix_experts(const Layer& layer, int me) {
    route(layer, me);
    pool_.barrier();
    if (me == 0) sort_by_expert();
    pool_.barrier();
    normalise_slots(layer.ffn_norm, me);
    pool_.barrier();
    expert_gates(layer, me);
    pool_.barrier();
    expert_downs(layer, me);
    pool_.barrier();
    add_experts(me);
}

void Decoder::route(const Layer& layer, int me) {
    const int experts = model_.experts, used = model_.experts_used;
    float* shares = scratch_[me].get();
    const Share share(rows_->count, me, pool_.size());
    for (int r = share.begin; r < share.end; ++r) {
        const float* x = x_.get() + (size_t)r * width_;
        const Floats by = all(inverse_rms(x, model_.width, width_, model_.norm_eps));
        for (int e = 0; e < experts; ++e) {
            const float* weight = layer.router + (size_t)e * model_.width;
            Floats dot = zeros();
            for (int d = 0; d < model_.width; d += kLanes)
                dot = fma(load(x + d) * by * load(layer.ffn_norm + d), load(weight + d), dot);
            shares[e] = layer.router_bias ? sum(dot) + layer.router_bias[e] : sum(dot);
        }
        const float top = *std::max_element(shares, shares + experts);
        float total = 0.0f, kept = 0.0f;
        for (int e = 0; e < experts; e += kLanes) store(shares + e, exponential(load(shares + e) - all(top)));
        for (int e = 0; e < experts; ++e) total += shares[e];
        int* chosen = &chosen_[(size_t)r * used];
        float* weights = &chosen_weights_[(size_t)r * used];
        for (int k = 0; k < used; ++k) {
            int best = -1;
            for (int e = 0; e < experts; ++e)
                if (std::find(chosen, chosen + k, e) == chosen + k && (best < 0 || shares[e] > shares[best])) best = e;
            chosen[k] = best;
        }
        std::sort(chosen, chosen + used);
        for (int k = 0; k < used; ++k) kept += shares[chosen[k]];
        for (int k = 0; k < used; ++k) weights[k] = shares[chosen[k]] / (model_.renormalise ? kept : total);
    }
}

void Decoder::sort_by_expert() {
    const int slots = rows_->count * model_.experts_used;
    std::fill(next_slot_.begin(), next_slot_.end(), 0);
    for (int i = 0; i < slots; ++i) ++next_slot_[chosen_[i]];
    active_.clear();
    active_rows_.clear();
    active_first_.clear();
    for (int e = 0, first = 0; e < model_.experts; ++e) {
        const int rows = next_slot_[e];
        next_slot_[e] = first;
        if (!rows) continue;
        active_.push_back(e);
        active_rows_.push_back(rows);
        active_first_.push_back(first);
        first += rows;
    }
    for (int i = 0; i < slots; ++i) {
        slot_of_[i] = next_slot_[chosen_[i]]++;
        row_of_slot_[slot_of_[i]] = i / model_.experts_used;
    }
    slots_in_.split(active_rows_);
    slots_gated_.split(active_rows_);
}

void Decoder::normalise_slots(const float* weight, int me) {
    const Share share(rows_->count * model_.experts_used, me, pool_.size());
    for (int slot = share.begin; slot < share.end; ++slot) {
        const float* x = x_.get() + (size_t)row_of_slot_[slot] * width_;
        const Floats by = all(inverse_rms(x, model_.width, width_, model_.norm_eps));
        for (int g = 0; g < width_ / kGroup; ++g) {
            const float *from = x + g * kGroup, *w = weight + g * kGroup;
            slots_in_.quantise(slot, g, load(from) * by * load(w), load(from + kLanes) * by * load(w + kLanes));
        }
    }
}

// As feed_forward, for the rows of each expert.
void Decoder::expert_gates(const Layer& layer, int me) {
    float *gates = scratch_[me].get(), *ups = gates + (size_t)rows_->count * kUnit;  // [rows][32] each
    const int units = layer.experts[0].outputs / kUnit;
    int begin, end;
    while (pool_.take((int)active_.size() * units, begin, end)) {
        for (int piece = begin; piece < end; ++piece) {
            const int part = piece / units, unit = piece % units;
            const Linear* expert = layer.experts + 3 * active_[part];
            const Strip *first = slots_in_.part_begin(part), *last = slots_in_.part_end(part);
            linear_pair(expert[0], unit, slots_in_, first, last, gates);
            linear_pair(expert[1], unit, slots_in_, first, last, ups);
            const float* const* bias = layer.expert_biases ? layer.expert_biases + 3 * active_[part] : nullptr;
            for (int r = 0; r < active_rows_[part]; ++r) {
                float *gate = gates + (size_t)r * kUnit, *up = ups + (size_t)r * kUnit;
                for (int at = 0; bias && at < kUnit; at += kLanes) {
                    store(gate + at, load(gate + at) + load(bias[0] + unit * kUnit + at));
                    store(up + at, load(up + at) + load(bias[1] + unit * kUnit + at));
                }
                slots_gated_.quantise(active_first_[part] + r, unit, gated(load(gate), load(up)),
                                      gated(load(gate + kLanes), load(up + kLanes)));
            }
        }
    }
}

void Decoder::expert_downs(const Layer& layer, int me) {
    float* product = scratch_[me].get();  // [rows][32]
    const int units = layer.experts[2].outputs / kUnit;
    int begin, end;
    while (pool_.take((int)active_.size() * units, begin, end)) {
        for (int piece = begin; piece < end; ++piece) {
            const int part = piece / units, unit = piece % units;
            linear_pair(layer.experts[3 * active_[part] + 2], unit, slots_gated_, slots_gated_.part_begin(part),
                        slots_gated_.part_end(part), product);
            float* out = slots_out_.get() + (size_t)active_first_[part] * width_ + unit * kUnit;
            const float* bias = layer.expert_biases ? layer.expert_biases[3 * active_[part] + 2] + unit * kUnit : nullptr;
            for (int r = 0; r < active_rows_[part]; ++r, out += width_)
                for (int at = 0; at < kUnit; at += kLanes) {
                    const Floats sum = load(product + r * kUnit + at);
                    store(out + at, bias ? sum + load(bias + at) : sum);
                }
        }
    }
}

void Decoder::add_experts(int me) {
    const int tiles = width_ / kLanes, used = model_.experts_used;
    const Share share(rows_->count * tiles, me, pool_.size());
    for (int i = share.begin; i < share.end; ++i) {
        const int row = i / tiles, at = i % tiles * kLanes;
        Floats all_experts = zeros();
        for (int k = row * used; k < (row + 1) * used; ++k)
            all_experts = fma(load(slots_out_.get() + (size_t)slot_of_[k] * width_ + at), all(chosen_weights_[k]), all_experts);
        float* x = x_.get() + (size_t)row * width_ + at;
        store(x, load(x) + all_experts);
    }
}

// One tile of every scored row.
void Decoder::cap_logits(float* logits, int64_t stride) const {
    if (model_.logit_softcap == 0) return;
    for (int r = 0; r < pass_->scored; ++r)
        store(logits + r * stride, softcap(load(logits + r * stride), model_.logit_softcap));
}

void Decoder::score(int me) {
    float* edge = scratch_[me].get();
    int begin, end;
    while (pool_.take(model_.head.outputs / kTile, begin, end)) {
        for (int tile = begin; tile < end; ++tile) {
            float* out = pass_->logits + tile * kTile;
            const int inside = std::min(kTile, model_.vocab - tile * kTile);
            if (inside == kTile) {
                linear_tile(model_.head, tile, head_in_, out, model_.vocab);
                cap_logits(out, model_.vocab);
            } else if (inside > 0) {
                linear_tile(model_.head, tile, head_in_, edge, kTile);
                cap_logits(edge, kTile);
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
    const Tiles shaped;
    for (int r = 0; r < rows; ++r)
        for (int g = 0; g < weight->groups(); ++g) {
            const float* from = x + (size_t)r * weight->inputs + g * kGroup;
            in.quantise(r, g, load(from), load(from + kLanes));
        }
    Buffer<float> product;  // [rows][32]
    product.need((size_t)rows * kUnit);
    for (int pair = 0; pair < weight->outputs / kUnit; ++pair) {
        linear_pair(*weight, pair, in, product.get());
        for (int r = 0; r < rows; ++r)
            std::memcpy(y + (size_t)r * weight->outputs + pair * kUnit, product.get() + r * kUnit, kUnit * sizeof(float));
    }
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
