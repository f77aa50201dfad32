// Software prefetch of keys and values into the processor's caches.
//
// Few queries take about as long to compute as their keys take to arrive, so neither may wait for the other:
// for every sub-block that is read, the one sixteen later is prefetched.
#pragma once

#include <algorithm>

#include "model.h"
#include "simd.h"

namespace PACELINE_PATH {

// Keys and values of one layer and KV head.
struct HeadCache {
    const int16_t *keys, *values;
    const int32_t* table;
    int head_dim;

    const int16_t* keys_of(int sub) const { return keys + table[sub] * sub_block_size(head_dim); }
    const int16_t* values_of(int sub) const { return values + table[sub] * sub_block_size(head_dim); }
    // Of the 16 tokens of a sub-block.
    const float* scales_of(const int16_t* sub_block) const {
        return reinterpret_cast<const float*>(sub_block + kSubBlock * head_dim);
    }
};

// Chunks that are read one after the other, of each the keys and then the values.
struct Walk {
    HeadCache cache;
    int chunk, end;  // the first one, and the one behind the last
    int subs;        // sub-blocks of all chunks up to the end
};

// Software prefetch for one thread of the pool: stays ahead of its reads, over its current walk and the next one.
class Prefetcher {
public:
    // The walk that follows the one added before, which begins now.
    void add(const Walk& walk) {
        if (waiting_) {
            enter();
            owed_ = kDistance;
        }
        next_ = walk;
        waiting_ = true;
    }

    // The sub-block to prefetch while another one is read; the latter itself where nothing is left.
    const int16_t* while_reading(const int16_t* read) {
        if (owed_ > 0 && step()) {
            --owed_;
            for (int i = 0; i < walk_.cache.head_dim; i += 2) prefetch_early(at_ + i * kSubBlock);
        }
        if (step()) return at_;
        ++owed_;
        return read;
    }

private:
    static constexpr int kInChunk = kChunk / kSubBlock;
    static constexpr int kDistance = kInChunk;

    void enter() {
        walk_ = next_;
        waiting_ = false;
        chunk_ = walk_.chunk;
        begin(false);
    }

    void begin(bool values) {
        values_ = values;
        sub_ = chunk_ * kInChunk;
        stop_ = std::min(sub_ + kInChunk, walk_.subs);
    }

    bool step() {
        if (sub_ == stop_) {
            if (!values_) {
                begin(true);
            } else if (++chunk_ < walk_.end) {
                begin(false);
            } else if (waiting_) {
                enter();
            } else {
                --chunk_;
                return false;
            }
        }
        at_ = values_ ? walk_.cache.values_of(sub_) : walk_.cache.keys_of(sub_);
        ++sub_;
        prefetch_early(walk_.cache.scales_of(at_));
        return true;
    }

    Walk walk_{}, next_{};
    bool waiting_ = false, values_ = true;  // as at the end of a walk
    int chunk_ = 0, sub_ = 0, stop_ = 0;
    int owed_ = kDistance;  // sub-blocks that the prefetch distance is short of
    const int16_t* at_ = nullptr;
};

}  // namespace PACELINE_PATH
