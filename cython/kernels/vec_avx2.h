// Eight floats with AVX2, FMA and F16C. The names are explained in vec_scalar.h.
#pragma once

#include <immintrin.h>

#include "half.h"

namespace {

struct Vec {
  static constexpr int width = 8;
  static constexpr int registers = 16;
  __m256 v;
};

__m128i load_bits(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
void store_bits(void* p, __m128i bits) { _mm_storeu_si128(static_cast<__m128i*>(p), bits); }

Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
Vec load(const Half* p) { return {_mm256_cvtph_ps(load_bits(p))}; }
Vec load(const BFloat16* p) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_bits(p)), 16))};
}

Vec load(const Int8* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}

struct Pairs {
  __m256i v;
};
Pairs load_pairs(const Int8* p) { return {_mm256_cvtepi8_epi16(load_bits(p))}; }
Pairs load_pairs(const Int4* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
Pairs broadcast_pair(const std::int16_t* p) {
  std::int32_t pair;
  __builtin_memcpy(&pair, p, sizeof pair);
  return {_mm256_set1_epi32(pair)};
}
Pairs nibbles(Pairs words, int index) {
  const __m256i shifted = _mm256_srli_epi16(words.v, 4 * index);
  return {index == 3 ? shifted : _mm256_and_si256(shifted, _mm256_set1_epi16(15))};
}

struct Sum {
  __m256i v;
};
Sum zero_sum() { return {_mm256_setzero_si256()}; }
Sum add_dot(Sum sum, Pairs a, Pairs b) {
  sum.v = _mm256_add_epi32(sum.v, _mm256_madd_epi16(a.v, b.v));
  asm("" : "+x"(sum.v));  // else GCC adds the products up in another order, for which registers are too few
  return sum;
}
Vec to_float(Sum sum) { return {_mm256_cvtepi32_ps(sum.v)}; }

// Integer rounding to nearest even; NaN is made quiet instead, as rounding could turn it into infinity.
__m128i bfloat16_bits(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i words = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
  const __m256i packed = _mm256_packus_epi32(words, words);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}

void store(float* p, Vec x) { _mm256_storeu_ps(p, x.v); }
void store(Half* p, Vec x) { store_bits(p, _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT)); }
void store(BFloat16* p, Vec x) { store_bits(p, bfloat16_bits(x.v)); }
void store_rounded(std::int16_t* p, Vec x) {
  const __m256i wide = _mm256_cvtps_epi32(x.v);
  store_bits(p, _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1)));
}

Vec broadcast(float x) { return {_mm256_set1_ps(x)}; }
Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
Vec fused(Vec a, Vec b, Vec c) { return fma(a, b, c); }
Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
Vec abs(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }

float reduce_add(Vec x) {
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_shuffle_ps(sum, sum, 1)));
}

float reduce_max(Vec x) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}

Vec saturate(Vec x, float limit) {
  const __m256 magnitude = abs(x).v;
  const __m256 is_inf = _mm256_cmp_ps(magnitude, _mm256_set1_ps(__builtin_inff()), _CMP_EQ_OQ);
  // The limit is the first operand: where x is NaN, min and max return the second.
  const __m256 low = _mm256_min_ps(_mm256_set1_ps(limit), x.v);
  const __m256 clamped = _mm256_max_ps(_mm256_set1_ps(-limit), low);
  return {_mm256_blendv_ps(clamped, x.v, is_inf)};
}

int count_between(Vec x, float low, float high) {
  const __m256 above = _mm256_cmp_ps(x.v, _mm256_set1_ps(low), _CMP_GT_OQ);
  const __m256 below = _mm256_cmp_ps(x.v, _mm256_set1_ps(high), _CMP_LT_OQ);
  return __builtin_popcount(static_cast<unsigned>(_mm256_movemask_ps(_mm256_and_ps(above, below))));
}

Vec exp2_from_magic(Vec t) {
  const __m256i biased = _mm256_add_epi32(_mm256_castps_si256(t.v), _mm256_set1_epi32(127));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(biased, 23))};
}

Vec zero_below(Vec x, float limit, Vec value) {
  return {_mm256_andnot_ps(_mm256_cmp_ps(x.v, _mm256_set1_ps(limit), _CMP_LT_OQ), value.v)};
}

Vec choose_below(Vec x, float limit, Vec a, Vec b) {
  return {_mm256_blendv_ps(b.v, a.v, _mm256_cmp_ps(x.v, _mm256_set1_ps(limit), _CMP_LT_OQ))};
}

Vec low_of_pair(Vec x) { return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x.v), 16))}; }
Vec high_of_pair(Vec x) {
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(x.v), _mm256_set1_epi32(-65536)))};
}

}  // namespace
