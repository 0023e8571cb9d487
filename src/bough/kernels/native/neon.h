// The AVX2 operations that the sources use, for ARM with NEON and dot products: two vectors of 128 bits for one of 256.
//
// Each gives the bits that AVX2 gives: the same lanes, the same order of additions, fused where AVX2 is fused.
#pragma once
#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#define OP static inline __attribute__((always_inline))

typedef float32x4_t __m128;
typedef int32x4_t __m128i;
typedef struct { float32x4_t low, high; } __m256;
typedef struct { int32x4_t low, high; } __m256i;

enum { _MM_FROUND_TO_NEAREST_INT, _MM_FROUND_TO_ZERO = 3, _MM_FROUND_NO_EXC = 8 };
enum { _CMP_UNORD_Q, _CMP_GE_OQ, _CMP_GT_OQ };
#define _MM_HINT_T0 3
#define _mm_prefetch(p, hint) __builtin_prefetch(p, 0, hint)
#define _mm_pause() __asm__ volatile("yield")

// One operation on both halves.
#define BOTH_FLOATS(name, call) \
  OP __m256 _mm256_##name(__m256 a, __m256 b) { return (__m256){call(a.low, b.low), call(a.high, b.high)}; }
#define BOTH_INTS(name, kind, call)                                                                           \
  OP __m256i _mm256_##name(__m256i a, __m256i b) {                                                             \
    return (__m256i){vreinterpretq_s32_##kind(call(vreinterpretq_##kind##_s32(a.low), vreinterpretq_##kind##_s32(b.low))),   \
                     vreinterpretq_s32_##kind(call(vreinterpretq_##kind##_s32(a.high), vreinterpretq_##kind##_s32(b.high)))}; \
  }
#define SHIFT(name, kind, count)                                                                               \
  OP __m256i _mm256_##name(__m256i a, int n) {                                                                 \
    return (__m256i){vreinterpretq_s32_##kind(vshlq_##kind(vreinterpretq_##kind##_s32(a.low), count)),         \
                     vreinterpretq_s32_##kind(vshlq_##kind(vreinterpretq_##kind##_s32(a.high), count))};       \
  }
#define SAME_S32(x) (x)
#define vreinterpretq_s32_s32 SAME_S32

// Floats.
OP __m256 _mm256_loadu_ps(const float *p) { return (__m256){vld1q_f32(p), vld1q_f32(p + 4)}; }
OP void _mm256_storeu_ps(float *p, __m256 a) { vst1q_f32(p, a.low), vst1q_f32(p + 4, a.high); }
OP __m256 _mm256_set1_ps(float x) { return (__m256){vdupq_n_f32(x), vdupq_n_f32(x)}; }
OP __m256 _mm256_broadcast_ss(const float *p) { return _mm256_set1_ps(*p); }
OP __m256 _mm256_setzero_ps(void) { return _mm256_set1_ps(0); }
BOTH_FLOATS(add_ps, vaddq_f32)
BOTH_FLOATS(sub_ps, vsubq_f32)
BOTH_FLOATS(mul_ps, vmulq_f32)
BOTH_FLOATS(div_ps, vdivq_f32)
BOTH_FLOATS(max_ps, vmaxq_f32)
BOTH_FLOATS(min_ps, vminq_f32)
OP __m256 _mm256_fmadd_ps(__m256 a, __m256 b, __m256 c) {
  return (__m256){vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}
OP __m256 _mm256_fnmadd_ps(__m256 a, __m256 b, __m256 c) {
  return (__m256){vfmsq_f32(c.low, a.low, b.low), vfmsq_f32(c.high, a.high, b.high)};
}
OP __m256 _mm256_castsi256_ps(__m256i a) { return (__m256){vreinterpretq_f32_s32(a.low), vreinterpretq_f32_s32(a.high)}; }
OP __m256i bits256(__m256 a) { return (__m256i){vreinterpretq_s32_f32(a.low), vreinterpretq_s32_f32(a.high)}; }
OP __m128 _mm256_castps256_ps128(__m256 a) { return a.low; }
#define _mm256_extractf128_ps(a, half) ((half) ? (a).high : (a).low)
OP __m256 _mm256_round_ps(__m256 a, int mode) {
  if ((mode & 3) == _MM_FROUND_TO_ZERO) return (__m256){vrndq_f32(a.low), vrndq_f32(a.high)};
  return (__m256){vrndnq_f32(a.low), vrndnq_f32(a.high)};
}
OP uint32x4_t compared(float32x4_t a, float32x4_t b, int how) {
  if (how == _CMP_UNORD_Q) return vmvnq_u32(vandq_u32(vceqq_f32(a, a), vceqq_f32(b, b)));
  return how == _CMP_GE_OQ ? vcgeq_f32(a, b) : vcgtq_f32(a, b);
}
OP __m256 _mm256_cmp_ps(__m256 a, __m256 b, int how) {
  return (__m256){vreinterpretq_f32_u32(compared(a.low, b.low, how)), vreinterpretq_f32_u32(compared(a.high, b.high, how))};
}
OP int _mm256_movemask_ps(__m256 a) {
  const int32_t places[4] = {0, 1, 2, 3};
  uint32x4_t low = vshrq_n_u32(vreinterpretq_u32_f32(a.low), 31), high = vshrq_n_u32(vreinterpretq_u32_f32(a.high), 31);
  int32x4_t at = vld1q_s32(places);
  return (int)(vaddvq_u32(vshlq_u32(low, at)) | vaddvq_u32(vshlq_u32(high, at)) << 4);
}

// Integers.
OP __m256i _mm256_loadu_si256(const __m256i *p) { return (__m256i){vld1q_s32((const int32_t *)p), vld1q_s32((const int32_t *)p + 4)}; }
OP void _mm256_storeu_si256(__m256i *p, __m256i a) { vst1q_s32((int32_t *)p, a.low), vst1q_s32((int32_t *)p + 4, a.high); }
OP __m256i _mm256_set1_epi32(int32_t x) { return (__m256i){vdupq_n_s32(x), vdupq_n_s32(x)}; }
OP __m256i _mm256_set1_epi16(int16_t x) { return _mm256_set1_epi32((int32_t)((uint32_t)(uint16_t)x * 0x10001u)); }
OP __m256i _mm256_set1_epi8(char x) { return _mm256_set1_epi32((int32_t)((uint32_t)(uint8_t)x * 0x1010101u)); }
OP __m256i _mm256_setzero_si256(void) { return _mm256_set1_epi32(0); }
BOTH_INTS(and_si256, s32, vandq_s32)
BOTH_INTS(or_si256, s32, vorrq_s32)
BOTH_INTS(xor_si256, s32, veorq_s32)
BOTH_INTS(add_epi32, s32, vaddq_s32)
BOTH_INTS(sub_epi32, s32, vsubq_s32)
BOTH_INTS(sub_epi16, s16, vsubq_s16)
BOTH_INTS(shuffle_epi8, u8, vqtbl1q_u8)
SHIFT(slli_epi32, s32, vdupq_n_s32(n))
SHIFT(slli_epi16, s16, vdupq_n_s16((int16_t)n))
SHIFT(srai_epi16, s16, vdupq_n_s16((int16_t)-n))
SHIFT(srli_epi16, u16, vdupq_n_s16((int16_t)-n))
OP __m256 _mm256_and_ps(__m256 a, __m256 b) { return _mm256_castsi256_ps(_mm256_and_si256(bits256(a), bits256(b))); }
OP __m256 _mm256_or_ps(__m256 a, __m256 b) { return _mm256_castsi256_ps(_mm256_or_si256(bits256(a), bits256(b))); }
OP __m256 _mm256_andnot_ps(__m256 a, __m256 b) {
  return (__m256){vreinterpretq_f32_s32(vbicq_s32(vreinterpretq_s32_f32(b.low), vreinterpretq_s32_f32(a.low))),
                  vreinterpretq_f32_s32(vbicq_s32(vreinterpretq_s32_f32(b.high), vreinterpretq_s32_f32(a.high)))};
}
OP __m256i _mm256_packs_epi32(__m256i a, __m256i b) {
  return (__m256i){vreinterpretq_s32_s16(vcombine_s16(vqmovn_s32(a.low), vqmovn_s32(b.low))),
                   vreinterpretq_s32_s16(vcombine_s16(vqmovn_s32(a.high), vqmovn_s32(b.high)))};
}
OP int32x4_t packed16(int32x4_t a, int32x4_t b) {
  return vreinterpretq_s32_s8(vcombine_s8(vqmovn_s16(vreinterpretq_s16_s32(a)), vqmovn_s16(vreinterpretq_s16_s32(b))));
}
OP __m256i _mm256_packs_epi16(__m256i a, __m256i b) { return (__m256i){packed16(a.low, b.low), packed16(a.high, b.high)}; }
// The order 0, 2, 1, 3 of 64-bit words alone, which follows every pack.
#define _mm256_permute4x64_epi64(a, order) words_0213(a)
OP __m256i words_0213(__m256i a) {
  int64x2_t low = vreinterpretq_s64_s32(a.low), high = vreinterpretq_s64_s32(a.high);
  return (__m256i){vreinterpretq_s32_s64(vzip1q_s64(low, high)), vreinterpretq_s32_s64(vzip2q_s64(low, high))};
}
OP __m128i _mm256_castsi256_si128(__m256i a) { return a.low; }
#define _mm256_extracti128_si256(a, half) ((half) ? (a).high : (a).low)
OP __m256i _mm256_broadcastsi128_si256(__m128i a) { return (__m256i){a, a}; }
OP __m256i _mm256_cvtps_epi32(__m256 a) { return (__m256i){vcvtnq_s32_f32(a.low), vcvtnq_s32_f32(a.high)}; }
OP __m256i _mm256_cvttps_epi32(__m256 a) { return (__m256i){vcvtq_s32_f32(a.low), vcvtq_s32_f32(a.high)}; }
OP __m256 _mm256_cvtepi32_ps(__m256i a) { return (__m256){vcvtq_f32_s32(a.low), vcvtq_f32_s32(a.high)}; }

// 128 bits.
OP __m128i _mm_loadu_si128(const __m128i *p) { return vld1q_s32((const int32_t *)p); }
OP void _mm_storeu_si128(__m128i *p, __m128i a) { vst1q_s32((int32_t *)p, a); }
OP __m128i _mm_loadl_epi64(const __m128i *p) { return vcombine_s32(vld1_s32((const int32_t *)p), vdup_n_s32(0)); }
OP __m128i _mm_add_epi32(__m128i a, __m128i b) { return vaddq_s32(a, b); }
OP __m128i _mm_hadd_epi32(__m128i a, __m128i b) { return vpaddq_s32(a, b); }
OP int _mm_cvtsi128_si32(__m128i a) { return vgetq_lane_s32(a, 0); }
OP __m128 _mm_set1_ps(float x) { return vdupq_n_f32(x); }
OP void _mm_storeu_ps(float *p, __m128 a) { vst1q_f32(p, a); }
OP __m128 _mm_add_ps(__m128 a, __m128 b) { return vaddq_f32(a, b); }
OP __m128 _mm_mul_ps(__m128 a, __m128 b) { return vmulq_f32(a, b); }
OP __m128 _mm_max_ps(__m128 a, __m128 b) { return vmaxq_f32(a, b); }
OP __m128 _mm_hadd_ps(__m128 a, __m128 b) { return vpaddq_f32(a, b); }
OP float _mm_cvtss_f32(__m128 a) { return vgetq_lane_f32(a, 0); }
OP float max4(__m128 a) { return vmaxvq_f32(a); }
OP __m256i _mm256_cvtepu16_epi32(__m128i a) {
  uint16x8_t all = vreinterpretq_u16_s32(a);
  return (__m256i){vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(all))), vreinterpretq_s32_u32(vmovl_high_u16(all))};
}
OP __m256i _mm256_cvtepu8_epi32(__m128i a) {
  return _mm256_cvtepu16_epi32(vreinterpretq_s32_u16(vmovl_u8(vget_low_u8(vreinterpretq_u8_s32(a)))));
}
OP __m256i _mm256_cvtepi8_epi32(__m128i a) {
  int16x8_t all = vmovl_s8(vget_low_s8(vreinterpretq_s8_s32(a)));
  return (__m256i){vmovl_s16(vget_low_s16(all)), vmovl_high_s16(all)};
}
OP __m256 _mm256_cvtph_ps(__m128i a) {
  float16x8_t all = vreinterpretq_f16_s32(a);
  return (__m256){vcvt_f32_f16(vget_low_f16(all)), vcvt_high_f32_f16(all)};
}
#define _mm256_cvtps_ph(a, mode) halves_of(a)
OP __m128i halves_of(__m256 a) { return vreinterpretq_s32_f16(vcvt_high_f16_f32(vcvt_f16_f32(a.low), a.high)); }
OP float _cvtsh_ss(uint16_t h) { return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(h))), 0); }
#define _cvtss_sh(x, mode) half_of(x)
OP uint16_t half_of(float x) { return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(x))), 0); }

// Sums of 4 products of signed bytes are added to each lane.
OP __m256i dot_i8_i8(__m256i sum, __m256i w, __m256i a) {
  return (__m256i){vdotq_s32(sum.low, vreinterpretq_s8_s32(w.low), vreinterpretq_s8_s32(a.low)),
                   vdotq_s32(sum.high, vreinterpretq_s8_s32(w.high), vreinterpretq_s8_s32(a.high))};
}
