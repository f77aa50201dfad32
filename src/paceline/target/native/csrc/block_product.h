// Products of the drafter's weights, which are all of one format.
#pragma once

#include "linear.h"

namespace PACELINE_PATH {

PL_INLINE void product(const Linear& w, int tile, const Activations& x, float* out, int64_t stride) {
    linear_tile_of<O8>(w, tile, x, out, stride);
}

}  // namespace PACELINE_PATH
