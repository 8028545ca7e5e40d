// Stands in for the compiler's immintrin.h so that vec_avx512.h runs on processors without AVX-512: SIMDe computes each
// intrinsic with what there is, and what SIMDe lacks is here, element by element. Masked loads and stores touch only
// the memory of their lanes, as the real ones do.
#pragma once
#include_next <immintrin.h>

#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulated {

template <class T>
struct Lanes {
  T at[64 / sizeof(T)] = {};
};

template <class T, class V>
Lanes<T> lanes_of(const V& x) {
  Lanes<T> lanes;
  std::memcpy(lanes.at, &x, sizeof x);
  return lanes;
}

template <class V, class T>
V vector_of(const Lanes<T>& lanes) {
  V x;
  std::memcpy(&x, lanes.at, sizeof x);
  return x;
}

template <class V, class T>
V load_masked(unsigned mask, const void* p) {
  Lanes<T> lanes;
  for (int i = 0; i < static_cast<int>(sizeof(V) / sizeof(T)); ++i)
    if (mask >> i & 1) std::memcpy(&lanes.at[i], static_cast<const T*>(p) + i, sizeof(T));
  return vector_of<V>(lanes);
}

template <class T, class V>
void store_masked(void* p, unsigned mask, const V& x) {
  const Lanes<T> lanes = lanes_of<T>(x);
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) std::memcpy(static_cast<T*>(p) + i, &lanes.at[i], sizeof(T));
}

// Each element of one type as another.
template <class W, class To, class From, class V>
W converted(const V& x) {
  const Lanes<From> from = lanes_of<From>(x);
  Lanes<To> to;
  constexpr int narrow = sizeof(V) / sizeof(From), wide = sizeof(W) / sizeof(To);
  for (int i = 0; i < (narrow < wide ? narrow : wide); ++i) to.at[i] = static_cast<To>(from.at[i]);
  return vector_of<W>(to);
}

// Words shifted to the right; those out of the mask are `kept`.
inline simde__m512i shifted(simde__m512i kept, unsigned mask, simde__m512i x, unsigned count) {
  Lanes<std::uint16_t> result = lanes_of<std::uint16_t>(kept);
  const Lanes<std::uint16_t> from = lanes_of<std::uint16_t>(x);
  for (int i = 0; i < 32; ++i)
    if (mask >> i & 1) result.at[i] = static_cast<std::uint16_t>(from.at[i] >> count);
  return vector_of<simde__m512i>(result);
}

// To the nearest integers, to even, within 16 bits.
inline simde__m512i rounded(simde__m512 x) {
  const Lanes<float> from = lanes_of<float>(x);
  Lanes<std::int32_t> to;
  for (int i = 0; i < 16; ++i) to.at[i] = from.at[i] == from.at[i] ? static_cast<std::int32_t>(std::nearbyint(from.at[i])) : INT32_MIN;
  return vector_of<simde__m512i>(to);
}

inline simde__m512i dot_pairs(simde__m512i a, simde__m512i b) {
  const Lanes<std::int16_t> x = lanes_of<std::int16_t>(a), y = lanes_of<std::int16_t>(b);
  Lanes<std::int32_t> sums;
  for (int i = 0; i < 16; ++i) sums.at[i] = x.at[2 * i] * y.at[2 * i] + x.at[2 * i + 1] * y.at[2 * i + 1];
  return vector_of<simde__m512i>(sums);
}

inline simde__m512i joined(simde__m256i low, simde__m256i high) {
  const simde__m256i both[2] = {low, high};
  simde__m512i x;
  std::memcpy(&x, both, sizeof x);
  return x;
}
inline simde__m256i lower_half(simde__m512i x) {
  simde__m256i low;
  std::memcpy(&low, &x, sizeof low);
  return low;
}

inline simde__m512 floats_of(simde__m256i halves) {
  simde__m128i from[2];
  std::memcpy(from, &halves, sizeof from);
  const simde__m256 to[2] = {simde_mm256_cvtph_ps(from[0]), simde_mm256_cvtph_ps(from[1])};
  simde__m512 x;
  std::memcpy(&x, to, sizeof x);
  return x;
}

inline simde__m256 half_of(simde__m512 x, int index) {
  simde__m256 halves[2];
  std::memcpy(halves, &x, sizeof halves);
  return halves[index];
}

inline simde__m256i halves_of(simde__m512 x) {
  const simde__m128i to[2] = {simde_mm256_cvtps_ph(half_of(x, 0), 0), simde_mm256_cvtps_ph(half_of(x, 1), 0)};
  simde__m256i halves;
  std::memcpy(&halves, to, sizeof halves);
  return halves;
}

}  // namespace emulated

#undef _mm256_maskz_loadu_epi8
#undef _mm256_maskz_loadu_epi16
#undef _mm512_maskz_loadu_ps
#undef _mm256_mask_storeu_epi16
#undef _mm512_mask_storeu_ps
#undef _mm512_cvtepi8_epi16
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtepi32_epi16
#undef _mm512_cvtsepi32_epi16
#undef _mm512_cvtepi32_ps
#undef _mm512_cvtps_epi32
#undef _mm512_cvtph_ps
#undef _mm512_cvtps_ph
#undef _mm512_extractf32x8_ps
#undef _mm512_srli_epi16
#undef _mm512_mask_srli_epi16
#undef _mm512_madd_epi16
#undef _mm512_inserti64x4
#undef _mm512_broadcast_i64x4
#define _mm256_maskz_loadu_epi8(mask, p) emulated::load_masked<simde__m256i, std::int8_t>(mask, p)
#define _mm256_maskz_loadu_epi16(mask, p) emulated::load_masked<simde__m256i, std::uint16_t>(mask, p)
#define _mm512_maskz_loadu_ps(mask, p) emulated::load_masked<simde__m512, float>(mask, p)
#define _mm256_mask_storeu_epi16(p, mask, x) emulated::store_masked<std::uint16_t>(p, mask, x)
#define _mm512_mask_storeu_ps(p, mask, x) emulated::store_masked<float>(p, mask, x)
#define _mm512_cvtepi8_epi16(x) emulated::converted<simde__m512i, std::int16_t, std::int8_t>(x)
#define _mm512_cvtepu16_epi32(x) emulated::converted<simde__m512i, std::int32_t, std::uint16_t>(x)
#define _mm512_cvtepi32_epi16(x) emulated::converted<simde__m256i, std::uint16_t, std::uint32_t>(x)
#define _mm512_cvtsepi32_epi16(x) emulated::converted<simde__m256i, std::int16_t, std::int32_t>(x)
#define _mm512_cvtepi32_ps(x) emulated::converted<simde__m512, float, std::int32_t>(x)
#define _mm512_cvtps_epi32(x) emulated::rounded(x)
#define _mm512_cvtph_ps(x) emulated::floats_of(x)
#define _mm512_cvtps_ph(x, rounding) emulated::halves_of(x)
#define _mm512_extractf32x8_ps(x, index) emulated::half_of(x, index)
#define _mm512_srli_epi16(x, count) emulated::shifted(x, ~0u, x, count)
#define _mm512_mask_srli_epi16(kept, mask, x, count) emulated::shifted(kept, mask, x, count)
#define _mm512_madd_epi16(a, b) emulated::dot_pairs(a, b)
#define _mm512_inserti64x4(x, high, index) emulated::joined(emulated::lower_half(x), high)
#define _mm512_broadcast_i64x4(x) emulated::joined(x, x)
