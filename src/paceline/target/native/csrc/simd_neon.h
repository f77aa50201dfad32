// The sixteen lanes in NEON: four registers each. The dot product and matrix product instructions (FEAT_DotProd,
// FEAT_I8MM) are used where they are compiled in.
#pragma once

#include <arm_neon.h>

namespace PACELINE_PATH {

constexpr int kStripRows = 4;    // four accumulators a row, and the weights, in 32 registers
constexpr int kQueryBlock = 6;
constexpr int kWide = 1;
#if defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool kSignedDots = false;
#else
constexpr bool kSignedDots = true;
#endif

struct Floats { float32x4_t v[4]; };
struct Ints { int32x4_t v[4]; };
struct Codes { uint8x16_t v[4]; };
struct Pairs { int16x8_t even[2], odd[2]; };  // the first of each lane's two numbers, and the second
struct OnePair { int16x4_t v; };              // two numbers for every lane, and two that are not used

#define PL_QUARTERS _Pragma("GCC unroll 4") for (int q = 0; q < 4; ++q)

PL_INLINE Floats all(float x) { Floats r; PL_QUARTERS r.v[q] = vdupq_n_f32(x); return r; }
PL_INLINE Floats zeros() { return all(0.0f); }
PL_INLINE Floats load(const float* p) { Floats r; PL_QUARTERS r.v[q] = vld1q_f32(p + 4 * q); return r; }
PL_INLINE void store(float* p, Floats a) { PL_QUARTERS vst1q_f32(p + 4 * q, a.v[q]); }
PL_INLINE Floats operator+(Floats a, Floats b) { PL_QUARTERS a.v[q] = vaddq_f32(a.v[q], b.v[q]); return a; }
PL_INLINE Floats operator-(Floats a, Floats b) { PL_QUARTERS a.v[q] = vsubq_f32(a.v[q], b.v[q]); return a; }
PL_INLINE Floats operator*(Floats a, Floats b) { PL_QUARTERS a.v[q] = vmulq_f32(a.v[q], b.v[q]); return a; }
PL_INLINE Floats operator/(Floats a, Floats b) { PL_QUARTERS a.v[q] = vdivq_f32(a.v[q], b.v[q]); return a; }
PL_INLINE Floats fma(Floats a, Floats b, Floats c) { PL_QUARTERS c.v[q] = vfmaq_f32(c.v[q], a.v[q], b.v[q]); return c; }
// Of what is no number the second operand is taken, as on x86, so not vmaxq and vminq.
PL_INLINE float32x4_t higher(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
PL_INLINE Floats max(Floats a, Floats b) { PL_QUARTERS a.v[q] = higher(a.v[q], b.v[q]); return a; }
PL_INLINE Floats min(Floats a, Floats b) {
    PL_QUARTERS a.v[q] = vbslq_f32(vcltq_f32(a.v[q], b.v[q]), a.v[q], b.v[q]);
    return a;
}
PL_INLINE Floats magnitude(Floats a) { PL_QUARTERS a.v[q] = vabsq_f32(a.v[q]); return a; }
PL_INLINE Floats to_floats(Ints a) { Floats r; PL_QUARTERS r.v[q] = vcvtq_f32_s32(a.v[q]); return r; }
// What is no number, or too large for one, becomes the lowest integer, as on x86.
PL_INLINE Ints to_ints(Floats a) {
    Ints r;
    PL_QUARTERS {
        const uint32x4_t fits = vcaltq_f32(a.v[q], vdupq_n_f32(2147483648.0f));
        r.v[q] = vbslq_s32(fits, vcvtnq_s32_f32(a.v[q]), vdupq_n_s32(INT32_MIN));
    }
    return r;
}
PL_INLINE Floats times_power_of_two(Floats x, Floats shifted) {
    PL_QUARTERS {
        const int32x4_t exponent = vshlq_n_s32(vreinterpretq_s32_f32(shifted.v[q]), 23);
        x.v[q] = vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(x.v[q]), exponent));
    }
    return x;
}
PL_INLINE Floats first_lanes(int count, Floats a, Floats b) {
    const int32_t lanes[4] = {0, 1, 2, 3};
    const int32x4_t lane = vld1q_s32(lanes);
    PL_QUARTERS a.v[q] = vbslq_f32(vcgtq_s32(vdupq_n_s32(count - 4 * q), lane), a.v[q], b.v[q]);
    return a;
}
PL_INLINE Floats load_halves(const uint16_t* p) {
    Floats r;
    PL_QUARTERS r.v[q] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * q)));
    return r;
}
PL_INLINE void store_halves(uint16_t* p, Floats a) {
    PL_QUARTERS vst1_u16(p + 4 * q, vreinterpret_u16_f16(vcvt_f16_f32(a.v[q])));
}
PL_INLINE Floats load_unsigned_bytes(const uint8_t* p) {
    const uint8x16_t bytes = vld1q_u8(p);
    const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_high_u8(bytes);
    return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_high_u16(low)),
             vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))), vcvtq_f32_u32(vmovl_high_u16(high))}};
}
PL_INLINE Floats load_signed_bytes(const int8_t* p) {
    const int8x16_t bytes = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
             vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))}};
}
PL_INLINE int16x8_t narrow(int32x4_t low, int32x4_t high) { return vmovn_high_s32(vmovn_s32(low), high); }
PL_INLINE void store_shorts(int16_t* p, Ints a) {
    vst1q_s16(p, narrow(a.v[0], a.v[1]));
    vst1q_s16(p + 8, narrow(a.v[2], a.v[3]));
}
PL_INLINE void store_signed_bytes(int8_t* p, Ints a) {
    vst1q_s8(p, vmovn_high_s16(vmovn_s16(narrow(a.v[0], a.v[1])), narrow(a.v[2], a.v[3])));
}
PL_INLINE int sum(Ints a) {
    return vaddvq_s32(vaddq_s32(vaddq_s32(a.v[0], a.v[1]), vaddq_s32(a.v[2], a.v[3])));
}
PL_INLINE float sum(Floats a) {
    const float32x4_t four = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
PL_INLINE float highest(Floats a) {
    const float32x4_t four = higher(higher(a.v[0], a.v[2]), higher(a.v[1], a.v[3]));
    const float32x4_t two = higher(four, vextq_f32(four, four, 2));
    return vgetq_lane_f32(higher(two, vextq_f32(two, two, 1)), 0);
}

template <int bits>
PL_INLINE Ints all_shifted(int32_t x) {
    Ints r;
    PL_QUARTERS r.v[q] = vshlq_n_s32(vdupq_n_s32(x), bits);
    return r;
}
PL_INLINE Ints no_ints() { Ints r; PL_QUARTERS r.v[q] = vdupq_n_s32(0); return r; }
PL_INLINE Codes load_codes(const uint8_t* p) { Codes r; PL_QUARTERS r.v[q] = vld1q_u8(p + 16 * q); return r; }
PL_INLINE Codes low_nibbles(Codes w) { PL_QUARTERS w.v[q] = vandq_u8(w.v[q], vdupq_n_u8(15)); return w; }
PL_INLINE Codes high_nibbles(Codes w) { PL_QUARTERS w.v[q] = vshrq_n_u8(w.v[q], 4); return w; }
PL_INLINE Codes look_up(Codes nibbles, const uint8_t* table) {
    PL_QUARTERS nibbles.v[q] = vqtbl1q_u8(vld1q_u8(table), nibbles.v[q]);
    return nibbles;
}
template <int pair>
PL_INLINE Codes with_crumbs(Codes nibbles, Codes crumbs) {
    PL_QUARTERS {
        const uint8x16_t c = crumbs.v[q];
        const uint8x16_t two = pair < 3 ? vshlq_n_u8(c, pair < 3 ? 4 - 2 * pair : 0) : vshrq_n_u8(c, 2);
        nibbles.v[q] = vorrq_u8(nibbles.v[q], vandq_u8(two, vdupq_n_u8(0x30)));
    }
    return nibbles;
}

PL_INLINE Pairs load_pairs(const int16_t* p) {
    const int16x8x2_t first = vld2q_s16(p), last = vld2q_s16(p + 16);
    return {{first.val[0], last.val[0]}, {first.val[1], last.val[1]}};
}
PL_INLINE OnePair all_pairs(const int16_t* p) { return {vcreate_s16((uint32_t)two_shorts(p))}; }
PL_INLINE Ints dot(Ints sum, Pairs a, OnePair b) {
    _Pragma("GCC unroll 2") for (int half = 0; half < 2; ++half) {
        int32x4_t &low = sum.v[2 * half], &high = sum.v[2 * half + 1];
        low = vmlal_lane_s16(low, vget_low_s16(a.even[half]), b.v, 0);
        high = vmlal_high_lane_s16(high, a.even[half], b.v, 0);
        low = vmlal_lane_s16(low, vget_low_s16(a.odd[half]), b.v, 1);
        high = vmlal_high_lane_s16(high, a.odd[half], b.v, 1);
    }
    return sum;
}

// lane: which four of the sixteen bytes.
template <int lane>
PL_INLINE int32x4_t dot_quarter(int32x4_t sum, uint8x16_t w, int8x16_t x) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return vusdotq_laneq_s32(sum, w, x, lane);
#elif defined(__ARM_FEATURE_DOTPROD)
    return vdotq_laneq_s32(sum, vreinterpretq_s8_u8(w), x, lane);
#else
    const int8x16_t codes = vreinterpretq_s8_u8(w);
    const int8x16_t four = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(x), lane));
    const int16x8_t low = vmull_s8(vget_low_s8(codes), vget_low_s8(four)), high = vmull_high_s8(codes, four);
    return vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
}
template <int bits, int four>
PL_INLINE Ints dot(Ints sum, Codes w, const int8_t* row) {
    const int8x16_t x = vld1q_s8(row + four / 4 * 16);
    PL_QUARTERS {
        if constexpr (kSignedDots && bits == 8) w.v[q] = veorq_u8(w.v[q], vdupq_n_u8(128));
        sum.v[q] = dot_quarter<four % 4>(sum.v[q], w.v[q], x);
    }
    return sum;
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
#define PACELINE_ROW_PAIRS  // a matrix product takes two rows at once

// The sums of two rows: register i holds outputs 2i and 2i + 1, of each both rows.
struct RowPair { int32x4_t v[8]; };
// Codes of eight inputs: register i holds those of outputs 2i and 2i + 1.
struct Eights { uint8x16_t v[8]; };

PL_INLINE RowPair no_pair() {
    RowPair r;
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; ++i) r.v[i] = vdupq_n_s32(0);
    return r;
}
template <int bits>
PL_INLINE RowPair pair_shifted(const int32_t* two) {
    const int32x2_t both = vld1_s32(two);
    RowPair r;
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; ++i) r.v[i] = vshlq_n_s32(vcombine_s32(both, both), bits);
    return r;
}
PL_INLINE Eights eights(Codes first, Codes second) {
    Eights r;
    PL_QUARTERS {
        const uint32x4_t a = vreinterpretq_u32_u8(first.v[q]), b = vreinterpretq_u32_u8(second.v[q]);
        r.v[2 * q] = vreinterpretq_u8_u32(vzip1q_u32(a, b));
        r.v[2 * q + 1] = vreinterpretq_u8_u32(vzip2q_u32(a, b));
    }
    return r;
}
// The dot products with eight signed bytes of each row, from 4 * four on.
template <int four>
PL_INLINE RowPair dot(RowPair sum, Eights w, const int8_t* row, const int8_t* next) {
    const int8x16_t rows = vcombine_s8(vld1_s8(row + 4 * four), vld1_s8(next + 4 * four));
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; ++i) sum.v[i] = vusmmlaq_s32(sum.v[i], w.v[i], rows);
    return sum;
}
PL_INLINE Ints row_of(RowPair a, int which) {
    Ints r;
    PL_QUARTERS r.v[q] = which ? vuzp2q_s32(a.v[2 * q], a.v[2 * q + 1]) : vuzp1q_s32(a.v[2 * q], a.v[2 * q + 1]);
    return r;
}
#endif

#undef PL_QUARTERS

}  // namespace PACELINE_PATH
