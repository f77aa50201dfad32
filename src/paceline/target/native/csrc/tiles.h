// AMX: one instruction multiplies up to sixteen rows with a tile of sixteen outputs.
//
// With PACELINE_TILE_SHIM the instructions are functions in plain C++ that do the same: how the tests run them where no
// processor does.
#pragma once

#include <cstdlib>

#include "formats.h"
#include "simd.h"

#if defined(__AMX_INT8__)
#define PACELINE_TILES

#if defined(PACELINE_TILE_SHIM)
namespace PACELINE_PATH {

struct ShimTile {
    int rows = 0, bytes = 0;  // of a row
    uint8_t v[16][64] = {};
};
inline thread_local ShimTile shim_tiles[8];

// Where the processor would raise an exception.
inline ShimTile& shim_tile(int n) {
    if (shim_tiles[n].rows == 0) std::abort();
    return shim_tiles[n];
}
inline void shim_configure(const void* from) {
    const uint8_t* bytes = static_cast<const uint8_t*>(from);
    if (bytes[0] != 1) std::abort();
    for (int n = 0; n < 8; ++n) {
        uint16_t row_bytes;
        std::memcpy(&row_bytes, bytes + 16 + 2 * n, 2);
        if (row_bytes > 64 || bytes[48 + n] > 16) std::abort();
        shim_tiles[n] = {};
        shim_tiles[n].rows = bytes[48 + n];
        shim_tiles[n].bytes = row_bytes;
    }
}
inline void shim_release() { for (ShimTile& tile : shim_tiles) tile = {}; }
inline void shim_zero(int n) { std::memset(shim_tile(n).v, 0, sizeof shim_tile(n).v); }
inline void shim_load(int n, const void* from, int64_t stride) {
    shim_zero(n);
    for (int r = 0; r < shim_tile(n).rows; ++r)
        std::memcpy(shim_tile(n).v[r], static_cast<const char*>(from) + r * stride, shim_tile(n).bytes);
}
inline void shim_store(int n, void* to, int64_t stride) {
    for (int r = 0; r < shim_tile(n).rows; ++r)
        std::memcpy(static_cast<char*>(to) + r * stride, shim_tile(n).v[r], shim_tile(n).bytes);
}
// TDPBSUD: signed bytes of a with unsigned bytes of b, four at a time.
inline void shim_dot(int to, int left, int right) {
    ShimTile &c = shim_tile(to), &a = shim_tile(left), &b = shim_tile(right);
    if (c.rows != a.rows || c.bytes != b.bytes || a.bytes != 4 * b.rows) std::abort();
    for (int m = 0; m < c.rows; ++m)
        for (int n = 0; n < c.bytes / 4; ++n) {
            int32_t sum;
            std::memcpy(&sum, c.v[m] + 4 * n, 4);
            for (int k = 0; k < b.rows; ++k)
                for (int j = 0; j < 4; ++j) sum += (int8_t)a.v[m][4 * k + j] * b.v[k][4 * n + j];
            std::memcpy(c.v[m] + 4 * n, &sum, 4);
        }
}

}  // namespace PACELINE_PATH
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#define _tile_loadconfig shim_configure
#define _tile_release shim_release
#define _tile_zero shim_zero
#define _tile_loadd shim_load
#define _tile_stored shim_store
#define _tile_dpbsud shim_dot
#endif

namespace PACELINE_PATH {

constexpr int kTileRows = 16;

// The shapes of the tiles that `multiply_tiles` uses, on one thread, while one of these lives.
class Tiles {
public:
    Tiles() {
        alignas(64) uint8_t config[64] = {1};  // the palette
        // Sums; rows and codes of a group; rows and codes of half a group.
        const int rows[] = {kTileRows, kTileRows, kGroup / 4, kTileRows, kGroup / 8}, bytes[] = {64, kGroup, 64, kGroup / 2, 64};
        for (int n = 0; n < 5; ++n) {
            config[16 + 2 * n] = (uint8_t)bytes[n];
            config[48 + n] = (uint8_t)rows[n];
        }
        _tile_loadconfig(config);
    }
    ~Tiles() { _tile_release(); }
};

// sums [kTileRows][16] = rows of a group, `fours` of its fours from the `first` on, with their codes, [8][64] in all.
// Reads kTileRows rows, however many there are.
template <int first, int fours>
PL_INLINE void multiply_tiles(const int8_t* rows, const uint8_t* codes, int32_t* sums) {
    asm volatile("" ::: "memory");  // compilers do not know that a tile is loaded from what was stored
    _tile_zero(0);
    if constexpr (fours == kGroup / 4) {
        _tile_loadd(1, rows, kGroup);
        _tile_loadd(2, codes, 64);
        _tile_dpbsud(0, 1, 2);
    } else {
        static_assert(fours == kGroup / 8);
        _tile_loadd(3, rows + 4 * first, kGroup);
        _tile_loadd(4, codes + 64 * first, 64);
        _tile_dpbsud(0, 3, 4);
    }
    _tile_stored(0, sums, 64);
    asm volatile("" ::: "memory");
}

}  // namespace PACELINE_PATH

#else

namespace PACELINE_PATH {

constexpr int kTileRows = 0;

class Tiles {
public:
    Tiles() {}
    ~Tiles() {}
};

}  // namespace PACELINE_PATH
#endif
