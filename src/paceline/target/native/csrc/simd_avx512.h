// The sixteen lanes in AVX-512 with VNNI: one register each.
#pragma once

namespace PACELINE_PATH {

#if defined(__AMX_INT8__)
constexpr int kStripRows = 16;    // the rows of a tile
constexpr int kTiledRows = 6;     // from how many on tiles are used
#else
constexpr int kStripRows = 10;    // two or three accumulators a row, and the weights, in 32 registers
#define PACELINE_PAIRS            // two tiles at once for many rows: see linear_pair.h
constexpr int kPairStrips = 6;    // from how many strips on: below, unpacking apart costs more than it saves
constexpr int kPairRows = 5;      // two or three accumulators for each of two tiles
#endif
constexpr int kQueryBlock = 6;   // times kWide accumulators
constexpr int kWide = 4;
constexpr bool kSignedDots = false;  // whether dot<8> takes 128 off each code, for want of unsigned ones

struct Floats { __m512 v; };
struct Ints { __m512i v; };
struct Codes { __m512i v; };      // 64 unsigned bytes: four for each of 16 outputs
struct Pairs { __m512i v; };      // 32 signed 16-bit numbers: two for each lane
using OnePair = Pairs;           // two of them for every lane

PL_INLINE Floats zeros() { return {_mm512_setzero_ps()}; }
PL_INLINE Floats all(float x) { return {_mm512_set1_ps(x)}; }
PL_INLINE Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
PL_INLINE void store(float* p, Floats a) { _mm512_storeu_ps(p, a.v); }
PL_INLINE Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
PL_INLINE Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
PL_INLINE Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
PL_INLINE Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
PL_INLINE Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
PL_INLINE Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
PL_INLINE Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
PL_INLINE Floats magnitude(Floats a) { return {_mm512_abs_ps(a.v)}; }
PL_INLINE Floats to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
PL_INLINE Ints to_ints(Floats a) { return {_mm512_cvtps_epi32(a.v)}; }
// x * 2 ** n for n in the lowest bits of `shifted`, where x and the product are normal.
PL_INLINE Floats times_power_of_two(Floats x, Floats shifted) {
    const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23);
    return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x.v), exponent))};
}
// Lane i of a where i < count, else of b.
PL_INLINE Floats first_lanes(int count, Floats a, Floats b) {
    __mmask16 mask = count >= 16 ? 0xffff : count <= 0 ? 0 : (1u << count) - 1;
    return {_mm512_mask_mov_ps(b.v, mask, a.v)};
}
PL_INLINE Floats load_halves(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))};
}
PL_INLINE void store_halves(uint16_t* p, Floats a) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
PL_INLINE Floats load_unsigned_bytes(const uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
PL_INLINE Floats load_signed_bytes(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
PL_INLINE void store_signed_bytes(int8_t* p, Ints a) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v));
}
PL_INLINE void sum_both(Ints a, Ints b, int& first, int& second) {
    const __m512i four = _mm512_add_epi32(_mm512_shuffle_i32x4(a.v, b.v, 0x44), _mm512_shuffle_i32x4(a.v, b.v, 0xee));
    const __m512i two = _mm512_add_epi32(four, _mm512_shuffle_epi32(four, _MM_PERM_BADC));
    const __m512i one = _mm512_add_epi32(two, _mm512_shuffle_epi32(two, _MM_PERM_CDAB));
    const __m512i each = _mm512_add_epi32(one, _mm512_shuffle_i32x4(one, one, 0xb1));
    first = _mm_cvtsi128_si32(_mm512_castsi512_si128(each));
    second = _mm_cvtsi128_si32(_mm512_extracti32x4_epi32(each, 2));
}
PL_INLINE float sum(Floats a) {
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
PL_INLINE float highest(Floats a) { return _mm512_reduce_max_ps(a.v); }

#define PACELINE_FOLDS  // several vectors are folded at once
// Lane i: row i's lanes joined, as `sum` and `highest` join them. Each step joins two vectors into one of both.
template <__m512 (*join)(__m512, __m512)>
PL_INLINE Floats fold_rows(const float* rows) {
    __m512 quad[4];  // of rows i, i + 4, i + 8 and i + 12: a lane of 128 bits each
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) {
        __m512 pair[2];
        _Pragma("GCC unroll 2") for (int p = 0; p < 2; ++p) {
            const __m512 a = load(rows + (i + 8 * p) * kLanes).v, b = load(rows + (i + 8 * p + 4) * kLanes).v;
            pair[p] = join(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
        }
        quad[i] = join(_mm512_shuffle_f32x4(pair[0], pair[1], 0x88), _mm512_shuffle_f32x4(pair[0], pair[1], 0xdd));
    }
    const __m512 first = join(_mm512_shuffle_ps(quad[0], quad[1], 0x44), _mm512_shuffle_ps(quad[0], quad[1], 0xee));
    const __m512 last = join(_mm512_shuffle_ps(quad[2], quad[3], 0x44), _mm512_shuffle_ps(quad[2], quad[3], 0xee));
    return {join(_mm512_shuffle_ps(first, last, 0x88), _mm512_shuffle_ps(first, last, 0xdd))};
}
PL_INLINE __m512 add_lanes(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
PL_INLINE __m512 higher_lanes(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }
PL_INLINE Floats row_sums(const float* rows) { return fold_rows<add_lanes>(rows); }
PL_INLINE Floats row_peaks(const float* rows) { return fold_rows<higher_lanes>(rows); }

template <int bits>
PL_INLINE Ints all_shifted(int32_t x) {
    __m512i all = _mm512_set1_epi32(x);
    return {bits ? _mm512_slli_epi32(all, bits) : all};
}
PL_INLINE Ints no_ints() { return {_mm512_setzero_si512()}; }
PL_INLINE Codes load_codes(const uint8_t* p) { return {_mm512_load_si512(p)}; }
PL_INLINE void store_codes(uint8_t* p, Codes w) { _mm512_store_si512(p, w.v); }
PL_INLINE Ints load_ints(const int32_t* p) { return {_mm512_load_si512(p)}; }
PL_INLINE Ints operator+(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
PL_INLINE Codes low_nibbles(Codes w) { return {_mm512_and_si512(w.v, _mm512_set1_epi8(15))}; }
PL_INLINE Codes high_nibbles(Codes w) {
    return {_mm512_and_si512(_mm512_srli_epi16(w.v, 4), _mm512_set1_epi8(15))};
}
// table: 16 bytes, aligned
PL_INLINE Codes look_up(Codes nibbles, const uint8_t* table) {
    return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table)), nibbles.v)};
}
// Two bits of each byte of `crumbs`, moved to bits 4 and 5 above a nibble. pair: which two, 0 for the lowest.
template <int pair>
PL_INLINE Codes with_crumbs(Codes nibbles, Codes crumbs) {
    __m512i two = pair < 2 ? _mm512_slli_epi16(crumbs.v, 4 - 2 * pair)
                            : _mm512_srli_epi16(crumbs.v, 2 * pair - 4);
    return {_mm512_or_si512(nibbles.v, _mm512_and_si512(two, _mm512_set1_epi8(0x30)))};
}
PL_INLINE Pairs load_pairs(const int16_t* p) { return {_mm512_load_si512(p)}; }
PL_INLINE OnePair all_pairs(const int16_t* p) { return {_mm512_set1_epi32(two_shorts(p))}; }
PL_INLINE Ints dot(Ints sum, Pairs a, OnePair b) {
    asm("vpdpwssd %2,%1,%0" : "+v"(sum.v) : "v"(a.v), "v"(b.v));  // compilers copy and spill the sums of the intrinsic
    return sum;
}
PL_INLINE void store_shorts(int16_t* p, Ints a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(a.v)); }
typedef int32_t __attribute__((may_alias)) FourBytes;
struct Fours { __m512i v; };      // four signed bytes of a row for every lane
PL_INLINE Fours all_fours(const int8_t* p) { return {_mm512_set1_epi32(*(const FourBytes*)p)}; }
PL_INLINE Ints dot(Ints sum, Codes w, Fours x) {
    asm("vpdpbusd %2,%1,%0" : "+v"(sum.v) : "v"(w.v), "v"(x.v));
    return sum;
}
// Lane i: sum + the dot product of its four codes with signed bytes of a row, from 4 * four on. bits: how large codes
// are.
template <int bits, int four>
PL_INLINE Ints dot(Ints sum, Codes w, const int8_t* row) {
    // Written out because compilers load the broadcast apart, which takes a second issue slot.
    asm("vpdpbusd %2%{1to16%},%1,%0" : "+v"(sum.v) : "v"(w.v), "m"(*(const FourBytes*)(row + 4 * four)));
    return sum;
}

}  // namespace PACELINE_PATH
