// The sixteen lanes in AVX2: two registers each. AVX-VNNI is used where it is compiled in.
#pragma once

namespace PACELINE_PATH {

constexpr int kStripRows = 4;
constexpr int kQueryBlock = 3;
constexpr int kWide = 2;
constexpr bool kSignedDots = false;

struct Floats { __m256 lo, hi; };
struct Ints { __m256i lo, hi; };
struct Codes { __m256i lo, hi; };
struct Pairs { __m256i lo, hi; };
using OnePair = Pairs;

PL_INLINE Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
PL_INLINE Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
PL_INLINE Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
PL_INLINE void store(float* p, Floats a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
PL_INLINE Floats operator+(Floats a, Floats b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
PL_INLINE Floats operator-(Floats a, Floats b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
PL_INLINE Floats operator*(Floats a, Floats b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
PL_INLINE Floats operator/(Floats a, Floats b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
PL_INLINE Floats fma(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
PL_INLINE Floats max(Floats a, Floats b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
PL_INLINE Floats min(Floats a, Floats b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
PL_INLINE Floats magnitude(Floats a) {
    __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
PL_INLINE Floats to_floats(Ints a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
PL_INLINE Ints to_ints(Floats a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
PL_INLINE __m256 add_exponent(__m256 x, __m256 shifted) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), exponent));
}
PL_INLINE Floats times_power_of_two(Floats x, Floats shifted) {
    return {add_exponent(x.lo, shifted.lo), add_exponent(x.hi, shifted.hi)};
}
PL_INLINE Floats first_lanes(int count, Floats a, Floats b) {
    __m256i n = _mm256_set1_epi32(count), lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i lo = _mm256_cmpgt_epi32(n, lane);
    __m256i hi = _mm256_cmpgt_epi32(n, _mm256_add_epi32(lane, _mm256_set1_epi32(8)));
    return {_mm256_blendv_ps(b.lo, a.lo, _mm256_castsi256_ps(lo)),
            _mm256_blendv_ps(b.hi, a.hi, _mm256_castsi256_ps(hi))};
}
PL_INLINE Floats load_halves(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
PL_INLINE void store_halves(uint16_t* p, Floats a) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
PL_INLINE Floats load_unsigned_bytes(const uint8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))),
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
PL_INLINE Floats load_signed_bytes(const int8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))),
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
PL_INLINE void store_signed_bytes(int8_t* p, Ints a) {
    alignas(32) int32_t lanes[16];
    _mm256_store_si256((__m256i*)lanes, a.lo);
    _mm256_store_si256((__m256i*)(lanes + 8), a.hi);
    for (int i = 0; i < 16; ++i) p[i] = (int8_t)lanes[i];
}
PL_INLINE int sum(Ints a) {
    __m256i eight = _mm256_add_epi32(a.lo, a.hi);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
PL_INLINE float sum(Floats a) {
    __m256 eight = _mm256_add_ps(a.lo, a.hi);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}
PL_INLINE float highest(Floats a) {
    __m256 eight = _mm256_max_ps(a.lo, a.hi);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

template <int bits>
PL_INLINE Ints all_shifted(int32_t x) {
    __m256i v = _mm256_set1_epi32((int32_t)((uint32_t)x << bits));
    return {v, v};
}
PL_INLINE Ints no_ints() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
PL_INLINE Codes load_codes(const uint8_t* p) {
    return {_mm256_load_si256((const __m256i*)p), _mm256_load_si256((const __m256i*)(p + 32))};
}
PL_INLINE Codes low_nibbles(Codes w) {
    __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(w.lo, mask), _mm256_and_si256(w.hi, mask)};
}
PL_INLINE Codes high_nibbles(Codes w) {
    __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(_mm256_srli_epi16(w.lo, 4), mask), _mm256_and_si256(_mm256_srli_epi16(w.hi, 4), mask)};
}
PL_INLINE Codes look_up(Codes nibbles, const uint8_t* table) {
    __m256i both = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table));
    return {_mm256_shuffle_epi8(both, nibbles.lo), _mm256_shuffle_epi8(both, nibbles.hi)};
}
template <int pair>
PL_INLINE __m256i crumbs_above(__m256i nibbles, __m256i crumbs) {
    __m256i two = pair < 2 ? _mm256_slli_epi16(crumbs, 4 - 2 * pair) : _mm256_srli_epi16(crumbs, 2 * pair - 4);
    return _mm256_or_si256(nibbles, _mm256_and_si256(two, _mm256_set1_epi8(0x30)));
}
template <int pair>
PL_INLINE Codes with_crumbs(Codes nibbles, Codes crumbs) {
    return {crumbs_above<pair>(nibbles.lo, crumbs.lo), crumbs_above<pair>(nibbles.hi, crumbs.hi)};
}
PL_INLINE Pairs load_pairs(const int16_t* p) {
    return {_mm256_load_si256((const __m256i*)p), _mm256_load_si256((const __m256i*)(p + 16))};
}
PL_INLINE OnePair all_pairs(const int16_t* p) {
    __m256i v = _mm256_set1_epi32(two_shorts(p));
    return {v, v};
}
PL_INLINE __m256i dot_pairs(__m256i sum, __m256i a, __m256i b) {
#if defined(__AVXVNNI__)
    return _mm256_dpwssd_avx_epi32(sum, a, b);
#else
    return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
#endif
}
PL_INLINE Ints dot(Ints sum, Pairs a, OnePair b) {
    return {dot_pairs(sum.lo, a.lo, b.lo), dot_pairs(sum.hi, a.hi, b.hi)};
}
PL_INLINE void store_shorts(int16_t* p, Ints a) {
    __m256i mixed = _mm256_packs_epi32(a.lo, a.hi);  // of each, the lower four, then the upper four
    _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(mixed, 0xd8));
}
template <int bits>
PL_INLINE __m256i dot_half(__m256i sum, __m256i w, __m256i x) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sum, w, x);
#else
    if constexpr (bits < 8) {  // two products of at most 63 * 127 fit into 16 bits
        __m256i pairs = _mm256_maddubs_epi16(w, x);
        return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    __m256i even = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)),
                                     _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(x, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
#endif
}
template <int bits, int four>
PL_INLINE Ints dot(Ints sum, Codes w, const int8_t* row) {
    int32_t bytes;
    std::memcpy(&bytes, row + 4 * four, 4);
    __m256i v = _mm256_set1_epi32(bytes);
    return {dot_half<bits>(sum.lo, w.lo, v), dot_half<bits>(sum.hi, w.hi, v)};
}

}  // namespace PACELINE_PATH
