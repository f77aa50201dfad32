// XXH64 (Yann Collet's xxHash, 64 bits): each step is a bijection of the state for a fixed input and of the input for
// a fixed state, so a change within one 8-byte word always changes the hash.
#include <cstdint>
#include <cstring>

namespace {

constexpr uint64_t kP1 = 0x9E3779B185EBCA87, kP2 = 0xC2B2AE3D27D4EB4F, kP3 = 0x165667B19E3779F9,
                   kP4 = 0x85EBCA77C2B2AE63, kP5 = 0x27D4EB2F165667C5;

uint64_t rotate(uint64_t x, int by) { return x << by | x >> (64 - by); }

template <class T>
T load(const uint8_t* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

uint64_t mix(uint64_t lane, uint64_t input) { return rotate(lane + input * kP2, 31) * kP1; }

uint64_t merge(uint64_t hash, uint64_t lane) { return (hash ^ mix(0, lane)) * kP1 + kP4; }

}  // namespace

extern "C" uint64_t paceline_xxh64(const uint8_t* at, int64_t count, uint64_t seed) {
    const uint8_t* const end = at + count;
    uint64_t hash = seed + kP5;
    if (count >= 32) {
        uint64_t a = seed + kP1 + kP2, b = seed + kP2, c = seed, d = seed - kP1;
        for (; end - at >= 32; at += 32) {
            a = mix(a, load<uint64_t>(at));
            b = mix(b, load<uint64_t>(at + 8));
            c = mix(c, load<uint64_t>(at + 16));
            d = mix(d, load<uint64_t>(at + 24));
        }
        hash = rotate(a, 1) + rotate(b, 7) + rotate(c, 12) + rotate(d, 18);
        hash = merge(merge(merge(merge(hash, a), b), c), d);
    }
    hash += (uint64_t)count;
    for (; end - at >= 8; at += 8) hash = rotate(hash ^ mix(0, load<uint64_t>(at)), 27) * kP1 + kP4;
    for (; end - at >= 4; at += 4) hash = rotate(hash ^ load<uint32_t>(at) * kP1, 23) * kP2 + kP3;
    for (; at < end; ++at) hash = rotate(hash ^ *at * kP5, 11) * kP1;
    hash = (hash ^ hash >> 33) * kP2;
    hash = (hash ^ hash >> 29) * kP3;
    return hash ^ hash >> 32;
}
