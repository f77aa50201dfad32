// Rows of activations as the dot products take them: signed bytes, with a scale for each group of 32.
#pragma once

#include <algorithm>
#include <vector>

#include "formats.h"
#include "simd.h"
#include "tiles.h"
#include "vector_ops.h"

namespace PACELINE_PATH {

template <class T>
class Buffer {  // aligned to a cache line; grows, never shrinks, keeps no content when it grows
public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    ~Buffer() { ::operator delete[](data_, std::align_val_t(64)); }
    T* get() const { return data_; }
    void need(size_t count) {
        if (count <= count_) return;
        ::operator delete[](data_, std::align_val_t(64));
        data_ = nullptr;
        count_ = 0;
        data_ = static_cast<T*>(::operator new[](count * sizeof(T), std::align_val_t(64)));
        count_ = count;
    }

private:
    T* data_ = nullptr;
    size_t count_ = 0;
};

// Up to kStripRows rows that one kernel call takes together.
struct Strip {
    int first, rows;
};

// Strips of almost equal height for the rows from `first` on.
inline void add_strips(int first, int rows, std::vector<Strip>& strips) {
    int count = (rows + kStripRows - 1) / kStripRows;
    for (int i = 0; i < count; ++i) {
        int height = rows / count + (i < rows % count);
        strips.push_back({first, height});
        first += height;
    }
}

// What a kernel reads of one strip; R: its rows, g: the group.
struct StripView {
    const int8_t* codes;      // [g][R][32]
    const float* scale;       // [g][R]
    const float* total;       // [g][R]: scale * sum of codes
    const int32_t* negative;  // [g][3][R]: -32 * sum of the first 16 codes, of the last 16; -1 * sum of all
};

class Activations {
public:
    void shape(int rows, int groups) {
        groups_ = groups;
        if (rows != rows_) {
            rows_ = -1;  // if there is no memory for what follows
            strips_.clear();
            add_strips(0, rows, strips_);
            strip_of_.resize(rows);
            number_strips();
            rows_ = rows;
        }
        need(rows);
    }

    // Memory for rows in parts of any size, so that `split` needs none.
    void reserve(int rows, int groups) {
        groups_ = groups;
        rows_ = -1;  // `shape` makes its own strips again
        strips_.reserve(rows);
        strip_of_.resize(rows);
        parts_.reserve(rows + 1);
        need(rows);
    }

    // Rows in parts of these sizes, none of them 0. No strip has rows of two parts.
    void split(const std::vector<int>& sizes) {
        strips_.clear();
        parts_.assign(1, 0);
        int first = 0;
        for (int rows : sizes) {
            add_strips(first, rows, strips_);
            parts_.push_back((int)strips_.size());
            first += rows;
        }
        number_strips();
    }

    const std::vector<Strip>& strips() const { return strips_; }
    const Strip* part_begin(int part) const { return strips_.data() + parts_[part]; }
    const Strip* part_end(int part) const { return strips_.data() + parts_[part + 1]; }

    StripView view(const Strip& strip) const {
        size_t at = (size_t)strip.first * groups_;
        return {codes_.get() + at * kGroup, scale_.get() + at, total_.get() + at, negative_.get() + at * 3};
    }

    // One group of one row: 32 floats, given as two vectors.
    PL_INLINE void quantise(int row, int g, Floats a, Floats b) {
        const Strip& strip = strips_[strip_of_[row]];
        size_t start = (size_t)strip.first * groups_, at = start + (size_t)g * strip.rows + (row - strip.first);
        float peak = highest(max(magnitude(a), magnitude(b)));
        float scale = peak / 127.0f;
        Floats inverse = all(peak > 0 ? 127.0f / peak : 0.0f);
        Ints first = to_ints(in_range(a * inverse)), last = to_ints(in_range(b * inverse));
        store_signed_bytes(codes_.get() + at * kGroup, first);
        store_signed_bytes(codes_.get() + at * kGroup + 16, last);
        int s0, s1;
        sum_both(first, last, s0, s1);
        scale_.get()[at] = scale;
        total_.get()[at] = scale * (float)(s0 + s1);
        int32_t* negative = negative_.get() + start * 3 + (size_t)g * 3 * strip.rows + (row - strip.first);
        negative[0] = -32 * s0;  // the only format that asks for halves, K6, has an offset of 32
        negative[strip.rows] = -32 * s1;
        negative[2 * strip.rows] = -(s0 + s1);
    }

private:
    // What is no number becomes one: its row is lost, but sums of codes stay sums of codes.
    static PL_INLINE Floats in_range(Floats x) { return max(min(x, all(127.0f)), all(-127.0f)); }

    void number_strips() {
        for (size_t i = 0; i < strips_.size(); ++i)
            std::fill_n(strip_of_.begin() + strips_[i].first, strips_[i].rows, (int)i);
    }

    void need(int rows) {
        size_t blocks = (size_t)rows * groups_;
        codes_.need(blocks * kGroup + kTileRows * kGroup);  // a tile is loaded whole, whatever rows there are
        scale_.need(blocks);
        total_.need(blocks);
        negative_.need(blocks * 3);
    }

    int rows_ = 0, groups_ = 0;
    std::vector<Strip> strips_;
    std::vector<int> parts_;     // the first strip of each part, and the end
    std::vector<int> strip_of_;  // of each row
    Buffer<int8_t> codes_;
    Buffer<float> scale_, total_;
    Buffer<int32_t> negative_;
};

// Whether threads that quantise rows should share out the groups of each rather than the rows. The numbers of a group, of
// all rows of a strip, lie side by side: two threads with rows of one strip would take every cache line from each other,
// which takes longer than their work where their cores have no cache in common.
inline bool shared_by_groups(int rows, const Activations& out, int threads) {
    constexpr int kMostRows = 64;  // every thread reads them all
    return rows <= kMostRows && (int)out.strips().size() < threads;
}

// What one thread of several quantises: some groups of all rows, or all groups of some.
struct QuantiseShare {
    Share rows, groups;
    QuantiseShare(int count, int width, const Activations& out, int me, int threads)
        : QuantiseShare(count, width / kGroup, me, threads, shared_by_groups(count, out, threads)) {}

private:
    QuantiseShare(int rows, int groups, int me, int threads, bool by_groups)
        : rows(rows, by_groups ? 0 : me, by_groups ? 1 : threads), groups(groups, by_groups ? me : 0, by_groups ? threads : 1) {}
};

}  // namespace PACELINE_PATH
