// Four floats with the NEON of every AArch64 processor. The names are explained in vec_scalar.h.
#pragma once

#include <arm_neon.h>

#include "half.h"

namespace {

struct Vec {
  static constexpr int width = 4;
  static constexpr int registers = 32;
  float32x4_t v;
};

Vec load(const float* p) { return {vld1q_f32(p)}; }
Vec load(const Half* p) { return {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)))}; }
Vec load(const BFloat16* p) { return {vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(&p->bits)), 16))}; }

Vec load(const Int8* p) {
  std::int32_t four;
  __builtin_memcpy(&four, p, sizeof four);
  const int16x8_t codes = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(codes)))};
}

struct Words {
  uint32x4_t v;
};
Words load_words(const Int4* p) { return {vmovl_u16(vld1_u16(&p->codes))}; }
Vec nibble(Words words, int index) { return {vcvtq_f32_u32(vandq_u32(words.v, vdupq_n_u32(15u << 4 * index)))}; }

// Integer rounding to nearest even; NaN is made quiet instead, as rounding could turn it into infinity.
uint16x4_t bfloat16_bits(float32x4_t x) {
  const uint32x4_t bits = vreinterpretq_u32_f32(x);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, quiet), 16);
}

void store(float* p, Vec x) { vst1q_f32(p, x.v); }
void store(Half* p, Vec x) { vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(x.v))); }
void store(BFloat16* p, Vec x) { vst1_u16(&p->bits, bfloat16_bits(x.v)); }

Vec broadcast(float x) { return {vdupq_n_f32(x)}; }
Vec add(Vec a, Vec b) { return {vaddq_f32(a.v, b.v)}; }
Vec sub(Vec a, Vec b) { return {vsubq_f32(a.v, b.v)}; }
Vec mul(Vec a, Vec b) { return {vmulq_f32(a.v, b.v)}; }
Vec fma(Vec a, Vec b, Vec c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
Vec max(Vec a, Vec b) { return {vbslq_f32(vcgtq_f32(a.v, b.v), a.v, b.v)}; }

Vec abs(Vec a) { return {vabsq_f32(a.v)}; }

float reduce_add(Vec x) { return vaddvq_f32(x.v); }
float reduce_max(Vec x) { return vmaxvq_f32(x.v); }

Vec saturate(Vec x, float limit) {
  const uint32x4_t is_inf = vceqq_f32(vabsq_f32(x.v), vdupq_n_f32(__builtin_inff()));
  const float32x4_t clamped = vmaxq_f32(vdupq_n_f32(-limit), vminq_f32(vdupq_n_f32(limit), x.v));
  return {vbslq_f32(is_inf, x.v, clamped)};
}

Vec exp2_from_magic(Vec t) {
  const uint32x4_t biased = vaddq_u32(vreinterpretq_u32_f32(t.v), vdupq_n_u32(127));
  return {vreinterpretq_f32_u32(vshlq_n_u32(biased, 23))};
}

Vec zero_below(Vec x, float limit, Vec value) {
  const uint32x4_t below = vcltq_f32(x.v, vdupq_n_f32(limit));
  return {vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value.v), below))};
}

}  // namespace
