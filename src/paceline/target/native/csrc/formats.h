// How weights are packed.
//
// A matrix [outputs, inputs] is cut into tiles of 16 outputs, a tile into groups of 32 inputs. A group's codes
// lie together, 64 bytes for 4 inputs of all 16 outputs (byte 4 * output + input), which is what one dot
// instruction takes; its scales lie in a second stream, so that both are read front to back.
//
//   name    codes of a group                 scales                                       holds exactly
//   K4      4 bit, 256 bytes                 per 8 groups: half d[16], half min[16],      Q4_K
//                                            per group: byte scale[16], byte minimum[16]
//   K8      8 bit, 512 bytes                 the same                                     Q5_K
//   H4      4 bit, 256 bytes                 per group: half scale[16], half base[16]     Q4_1
//   H8      8 bit, 512 bytes                 the same                                     Q5_1
//   O4      4 bit, 256 bytes, less 8         per group: half scale[16]                    Q4_0
//   O8      8 bit, 512 bytes, less 128       the same                                     Q8_0, Q5_0
//   K6      6 bit, 384 bytes, less 32        per 8 groups: half d[16],                    Q6_K, Q3_K
//                                            per 16 inputs: signed byte scale[16]
//   F4      4-bit floats, 256 bytes          per group: half scale[16]                    MXFP4, scales within halves
//
// 4-bit codes: byte block j of a group holds inputs 8j..8j+3 in its low nibbles, 8j+4..8j+7 in the high ones.
// 6-bit codes: 192 bytes for each 16 inputs: two blocks of nibbles as above, then one of the upper two bits,
// bits 2c and 2c+1 for inputs 4c..4c+3.
#pragma once

#include <cstddef>
#include <cstdint>

constexpr int kTile = 16;       // outputs
constexpr int kGroup = 32;      // inputs that share an activation scale
constexpr int kSuper = 8;       // groups that share a second-level scale
constexpr int kUnit = 32;       // outputs are padded to a multiple of this, with zero weights

enum Format : int32_t { K4, K8, H4, H8, O4, O8, K6, F4, kFormats };

constexpr int kCodeBytes[kFormats] = {256, 512, 256, 512, 256, 512, 384, 256};     // of a group
constexpr int kScaleBytes[kFormats] = {320, 320, 64, 64, 32, 32, 288, 32};        // of kScaleGroups groups
constexpr int kScaleGroups[kFormats] = {kSuper, kSuper, 1, 1, 1, 1, kSuper, 1};

// What the codes of 4-bit floats stand for, doubled to be whole and 16 above it to be unsigned.
alignas(16) constexpr uint8_t kFloatCodes[16] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

// One packed matrix. Tiles come in pairs, since 32 outputs of one matrix are 1 group of inputs of the next.
struct Linear {
    int32_t format;
    int32_t outputs;  // padded to kUnit
    int32_t inputs;   // padded to kGroup
    int32_t reserved;
    const uint8_t* codes;
    const uint8_t* scales;
    int64_t codes_pair;   // bytes from one pair of tiles to the next
    int64_t scales_pair;

    int groups() const { return inputs / kGroup; }
    int64_t tile_codes() const { return (int64_t)groups() * kCodeBytes[format]; }
    int64_t tile_scales() const { return (int64_t)(groups() / kScaleGroups[format]) * kScaleBytes[format]; }
    const uint8_t* codes_of(int tile) const { return codes + tile / 2 * codes_pair + tile % 2 * tile_codes(); }
    const uint8_t* scales_of(int tile) const { return scales + tile / 2 * scales_pair + tile % 2 * tile_scales(); }
};
