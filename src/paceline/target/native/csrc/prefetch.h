// Keys and values on their way to the processor's cache before they are read.
//
// Few queries take about as long to compute as their keys take to arrive, so neither may wait for the other:
// for every sub-block that is read, the one that comes sixteen later is fetched.
#pragma once

#include <algorithm>

#include "model.h"
#include "simd.h"

namespace PACELINE_PATH {

// Where keys and values of one layer and KV head lie.
struct HeadCache {
    const uint16_t *keys, *values;
    const int32_t* table;
    int head_dim;

    const uint16_t* keys_of(int sub) const { return keys + (int64_t)table[sub] * kSubBlock * head_dim; }
    const uint16_t* values_of(int sub) const { return values + (int64_t)table[sub] * kSubBlock * head_dim; }
};

// Chunks that are read in turn, of each the keys and then the values.
struct Walk {
    HeadCache cache;
    int chunk, end;  // the first one, and the one behind the last
    int subs;        // sub-blocks of all chunks up to the end
};

// Runs ahead of one member of the team, over the walk that it is on and the next one.
class Ahead {
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

    // The sub-block to fetch while another one is read: that one itself where nothing is left.
    const uint16_t* while_reading(const uint16_t* read) {
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
        return true;
    }

    Walk walk_{}, next_{};
    bool waiting_ = false, values_ = true;  // as at the end of a walk
    int chunk_ = 0, sub_ = 0, stop_ = 0;
    int owed_ = kDistance;  // sub-blocks that the lead is short of
    const uint16_t* at_ = nullptr;
};

}  // namespace PACELINE_PATH
