// Vectors of 8 floats (AVX2, FMA, F16C; NEON), and those of a matmul's tile, which AVX-512 makes twice as wide, with the
// integer dot products that newer CPUs have as one instruction.
#pragma once
#include "native.h"

#if defined(__aarch64__)
#include "neon.h"
#else
#include <immintrin.h>
#endif
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

// gcc would add all products of a block in a tree, keep them on the stack until then, and take 25% longer.
#define IN_ORDER(vector) __asm__("" : "+x"(vector))

// Whether dot products take signed codes, so that those of a signed type need no offset.
#if defined(__aarch64__)
#define SIGNED_DOT 1
#else
#define SIGNED_DOT 0
INLINE float max4(__m128 t) {
  t = _mm_max_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_max_ss(t, _mm_shuffle_ps(t, t, 1)));
}
#endif

INLINE __m256 halves_ps(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }

#if defined(__AVX512VNNI__)
#define V(name) _mm512_##name
typedef __m512i Ints;
typedef __m512 Floats;
INLINE Ints load_ints(const void *p) { return _mm512_loadu_si512(p); }
INLINE Ints zero_ints(void) { return _mm512_setzero_si512(); }
INLINE Ints and_ints(Ints a, Ints b) { return _mm512_and_si512(a, b); }
INLINE Ints or_ints(Ints a, Ints b) { return _mm512_or_si512(a, b); }
INLINE Ints xor_ints(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
INLINE Ints table_bytes(const void *p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p)); }
INLINE Ints widened_halves(const void *p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)); }
INLINE Floats tile_halves(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE Floats tile_bytes(const void *p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p))); }
INLINE Floats tile_signed_bytes(const void *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p))); }
INLINE Floats as_floats(Ints a) { return _mm512_castsi512_ps(a); }
#else
#define V(name) _mm256_##name
typedef __m256i Ints;
typedef __m256 Floats;
INLINE Ints load_ints(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE Ints zero_ints(void) { return _mm256_setzero_si256(); }
INLINE Ints and_ints(Ints a, Ints b) { return _mm256_and_si256(a, b); }
INLINE Ints or_ints(Ints a, Ints b) { return _mm256_or_si256(a, b); }
INLINE Ints xor_ints(Ints a, Ints b) { return _mm256_xor_si256(a, b); }
INLINE Ints table_bytes(const void *p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p)); }
INLINE Ints widened_halves(const void *p) { return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)); }
INLINE Floats tile_halves(const void *p) { return halves_ps(p); }
INLINE Floats tile_bytes(const void *p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p))); }
INLINE Floats tile_signed_bytes(const void *p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))); }
INLINE Floats as_floats(Ints a) { return _mm256_castsi256_ps(a); }
#endif
INLINE Floats tile_bfloats(const void *p) { return as_floats(V(slli_epi32)(widened_halves(p), 16)); }

#if defined(__aarch64__)
#define HAS_DOT 1
#define DOT_BYTES(sum, w, a) dot_i8_i8(sum, w, a)
#elif defined(__AVX512VNNI__)
#define HAS_DOT 1
#define DOT_BYTES(sum, w, a) _mm512_dpbusd_epi32(sum, w, a)
#elif defined(__AVXVNNI__)
#define HAS_DOT 1
#define DOT_BYTES(sum, w, a) _mm256_dpbusd_avx_epi32(sum, w, a)
#elif defined(EMULATE_VNNI)  // for tests on CPUs without it: the same integers
#define HAS_DOT 1
INLINE __m256i DOT_BYTES(__m256i sum, __m256i w, __m256i a) {
  __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8), odd = _mm256_srai_epi16(a, 8);
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)), even));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_srli_epi16(w, 8), odd));
}
#else
#define HAS_DOT 0
#endif

INLINE float sum8(__m256 s) {
  __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_hadd_ps(t, t);
  return _mm_cvtss_f32(_mm_hadd_ps(t, t));
}

// e^x, with a relative error of about 1e-7.
INLINE __m256 exp8(__m256 x) {
  x = _mm256_min_ps(_mm256_set1_ps(88.f), _mm256_max_ps(_mm256_set1_ps(-87.3f), x));  // keeps a NaN
  __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 p = _mm256_set1_ps(1.9875691500e-4f);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
  p = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1));
  __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(p, _mm256_castsi256_ps(power));
}

INLINE __m256 sigmoid8(__m256 x) {
  const __m256 one = _mm256_set1_ps(1);
  return _mm256_div_ps(one, _mm256_add_ps(one, exp8(_mm256_sub_ps(_mm256_setzero_ps(), x))));
}

// n is a multiple of 8. The order of additions depends on n alone, and is the same in `dot` and `dots4`.
INLINE float dot(const float *a, const float *b, int n) {
  __m256 even = _mm256_setzero_ps(), odd = _mm256_setzero_ps();
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    even = _mm256_fmadd_ps(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + i), even);
    odd = _mm256_fmadd_ps(_mm256_loadu_ps(a + i + 8), _mm256_loadu_ps(b + i + 8), odd);
  }
  if (i < n) even = _mm256_fmadd_ps(_mm256_loadu_ps(a + i), _mm256_loadu_ps(b + i), even);
  return sum8(_mm256_add_ps(even, odd));
}

// The dot products of a with 4 rows, `stride` floats apart.
INLINE __m128 dots4(const float *a, const float *rows, size_t stride, int n) {
  __m256 even[4], odd[4];
  __m128 half[4];
#pragma GCC unroll 4
  for (int r = 0; r < 4; r++) even[r] = odd[r] = _mm256_setzero_ps();
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    __m256 x = _mm256_loadu_ps(a + i), y = _mm256_loadu_ps(a + i + 8);
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
      even[r] = _mm256_fmadd_ps(x, _mm256_loadu_ps(rows + r * stride + i), even[r]);
      odd[r] = _mm256_fmadd_ps(y, _mm256_loadu_ps(rows + r * stride + i + 8), odd[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < 4; r++) {
    if (i < n) even[r] = _mm256_fmadd_ps(_mm256_loadu_ps(a + i), _mm256_loadu_ps(rows + r * stride + i), even[r]);
    __m256 s = _mm256_add_ps(even[r], odd[r]);
    half[r] = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  }
  return _mm_hadd_ps(_mm_hadd_ps(half[0], half[1]), _mm_hadd_ps(half[2], half[3]));
}

// out may be x.
INLINE void rms_norm(const float *x, const float *weight, float *out, int n, float eps) {
  __m256 scale = _mm256_set1_ps(1 / sqrtf(dot(x, x, n) / (float)n + eps));
  for (int i = 0; i < n; i += 8)
    _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x + i), scale), _mm256_loadu_ps(weight + i)));
}
