// Sixteen floats with AVX-512 (F, BW, DQ, VL). The names are explained in vec_scalar.h.
#pragma once

#include <immintrin.h>

#include "half.h"

namespace {

struct Vec {
  static constexpr int width = 16;
  static constexpr int registers = 32;
  __m512 v;
};

__mmask16 first(int count) { return static_cast<__mmask16>((1u << count) - 1u); }

__m512 half_to_float(__m256i bits) { return _mm512_cvtph_ps(bits); }
__m512 bfloat16_to_float(__m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
Vec load(const Half* p) { return {half_to_float(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
Vec load(const BFloat16* p) { return {bfloat16_to_float(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }

Vec load(const Int8* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}

Vec load_part(const float* p, int count) { return {_mm512_maskz_loadu_ps(first(count), p)}; }
Vec load_part(const Half* p, int count) { return {half_to_float(_mm256_maskz_loadu_epi16(first(count), p))}; }
Vec load_part(const BFloat16* p, int count) { return {bfloat16_to_float(_mm256_maskz_loadu_epi16(first(count), p))}; }

__m256i join_words(const void* low, const void* high) {
  const __m128i bits = _mm_loadu_si128(static_cast<const __m128i*>(low));
  return _mm256_inserti128_si256(_mm256_castsi128_si256(bits), _mm_loadu_si128(static_cast<const __m128i*>(high)), 1);
}

Vec load_halves(const float* low, const float* high) {
  return {_mm512_insertf32x8(_mm512_castps256_ps512(_mm256_loadu_ps(low)), _mm256_loadu_ps(high), 1)};
}
Vec load_halves(const Half* low, const Half* high) { return {half_to_float(join_words(low, high))}; }
Vec load_halves(const BFloat16* low, const BFloat16* high) { return {bfloat16_to_float(join_words(low, high))}; }

struct Pairs {
  __m512i v;
};
__m256i load_bits(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
Pairs load_pairs(const Int8* p) { return {_mm512_cvtepi8_epi16(load_bits(p))}; }
Pairs load_pairs_part(const Int8* p, int count) {
  const __mmask32 codes = static_cast<__mmask32>((std::uint64_t{1} << 2 * count) - 1u);
  return {_mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(codes, p))};
}
Pairs load_pair_halves(const Int8* low, const Int8* high) { return {_mm512_cvtepi8_epi16(join_words(low, high))}; }
Pairs load_pair_halves(const Int4* low, const Int4* high) {
  return {_mm512_inserti64x4(_mm512_castsi256_si512(load_bits(low)), load_bits(high), 1)};
}
Pairs broadcast_pair(const std::int16_t* p) {
  std::int32_t pair;
  __builtin_memcpy(&pair, p, sizeof pair);
  return {_mm512_set1_epi32(pair)};
}
Pairs nibbles(Pairs words, int index) {
  return {_mm512_and_si512(_mm512_srli_epi16(words.v, static_cast<unsigned>(4 * index)), _mm512_set1_epi16(15))};
}
Pairs nibbles_twice(const Int4* p, int index) {
  const __m512i words = _mm512_broadcast_i64x4(load_bits(p));
  const __m512i low = _mm512_srli_epi16(words, static_cast<unsigned>(8 * index));
  const __m512i both = _mm512_mask_srli_epi16(low, 0xffff0000u, low, 4);
  return {_mm512_and_si512(both, _mm512_set1_epi16(15))};
}

struct Sum {
  __m512i v;
};
Sum zero_sum() { return {_mm512_setzero_si512()}; }
Sum add_dot(Sum sum, Pairs a, Pairs b) {
  sum.v = _mm512_add_epi32(sum.v, _mm512_madd_epi16(a.v, b.v));
#ifdef __AVX512F__        // not where tests emulate it
  asm("" : "+v"(sum.v));  // else GCC adds the products up in another order, for which registers are too few
#endif
  return sum;
}
Vec to_float(Sum sum) { return {_mm512_cvtepi32_ps(sum.v)}; }

__m256i half_bits(__m512 x) { return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT); }

// Integer rounding to nearest even; NaN is made quiet instead, as rounding could turn it into infinity.
__m256i bfloat16_bits(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i words = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(words, 16));
}

void store(float* p, Vec x) { _mm512_storeu_ps(p, x.v); }
void store(Half* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half_bits(x.v)); }
void store(BFloat16* p, Vec x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bfloat16_bits(x.v)); }

void store_rounded(std::int16_t* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x.v)));
}

void store_part(float* p, Vec x, int count) { _mm512_mask_storeu_ps(p, first(count), x.v); }
void store_part(Half* p, Vec x, int count) { _mm256_mask_storeu_epi16(p, first(count), half_bits(x.v)); }
void store_part(BFloat16* p, Vec x, int count) { _mm256_mask_storeu_epi16(p, first(count), bfloat16_bits(x.v)); }

Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
Vec fused(Vec a, Vec b, Vec c) { return fma(a, b, c); }
Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
Vec abs(Vec a) { return {_mm512_abs_ps(a.v)}; }

__m256 fold_add(__m512 x) { return _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)); }

float reduce_add(Vec x) {
  const __m256 half = fold_add(x.v);
  __m128 sum = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  return _mm_cvtss_f32(_mm_add_ss(sum, _mm_shuffle_ps(sum, sum, 1)));
}

float reduce_max(Vec x) {
  const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}

Vec saturate(Vec x, float limit) {
  const __mmask16 is_inf = _mm512_cmp_ps_mask(_mm512_abs_ps(x.v), _mm512_set1_ps(__builtin_inff()), _CMP_EQ_OQ);
  // The limit is the first operand: where x is NaN, min and max return the second.
  const __m512 low = _mm512_min_ps(_mm512_set1_ps(limit), x.v);
  const __m512 clamped = _mm512_max_ps(_mm512_set1_ps(-limit), low);
  return {_mm512_mask_blend_ps(is_inf, clamped, x.v)};
}

int count_between(Vec x, float low, float high) {
  const __mmask16 above = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(low), _CMP_GT_OQ);
  const __mmask16 below = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(high), _CMP_LT_OQ);
  return __builtin_popcount(static_cast<unsigned>(above) & static_cast<unsigned>(below));
}

Vec exp2_from_magic(Vec t) {
  const __m512i biased = _mm512_add_epi32(_mm512_castps_si512(t.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(biased, 23))};
}

Vec zero_below(Vec x, float limit, Vec value) {
  const __mmask16 keep = _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_NLT_UQ);
  return {_mm512_maskz_mov_ps(keep, value.v)};
}

Vec choose_below(Vec x, float limit, Vec a, Vec b) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_LT_OQ), b.v, a.v)};
}

// A lane of 32 bits as two bfloat16.
Vec low_of_pair(Vec x) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x.v), 16))}; }
Vec high_of_pair(Vec x) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x.v), _mm512_set1_epi32(-65536)))};
}

#ifdef __AVX512BF16__
Vec add_pair_product(Vec sum, Vec a, Vec b) { return {_mm512_dpbf16_ps(sum.v, (__m512bh)a.v, (__m512bh)b.v)}; }
// Of values that are bfloat16 already.
Vec join_pair(Vec low, Vec high) {
  const __m512i low_bits = _mm512_srli_epi32(_mm512_castps_si512(low.v), 16);
  return {_mm512_castsi512_ps(_mm512_or_si512(low_bits, _mm512_castps_si512(high.v)))};
}
// To nearest even.
Vec round_pair(Vec low, Vec high) {
  const __m512i order =
      _mm512_setr_epi32(0x100000, 0x110001, 0x120002, 0x130003, 0x140004, 0x150005, 0x160006, 0x170007, 0x180008,
                        0x190009, 0x1a000a, 0x1b000b, 0x1c000c, 0x1d000d, 0x1e000e, 0x1f000f);
  const __m512i apart = (__m512i)_mm512_cvtne2ps_pbh(high.v, low.v);  // all of low, then all of high
  return {_mm512_castsi512_ps(_mm512_permutexvar_epi16(order, apart))};
}
#endif

}  // namespace
