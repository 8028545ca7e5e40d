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
  std::int32_t codes;
  __builtin_memcpy(&codes, p, sizeof codes);
  const int16x8_t wide = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(codes)));
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)))};
}

struct Pairs {
  int16x8_t v;
};
Pairs load_pairs(const Int8* p) { return {vmovl_s8(vld1_s8(&p->code))}; }
Pairs load_pairs(const Int4* p) { return {vreinterpretq_s16_u16(vld1q_u16(&p->codes))}; }
Pairs broadcast_pair(const std::int16_t* p) {
  std::int32_t pair;
  __builtin_memcpy(&pair, p, sizeof pair);
  return {vreinterpretq_s16_s32(vdupq_n_s32(pair))};
}
Pairs nibbles(Pairs words, int index) {
  const uint16x8_t shifted =
      vshlq_u16(vreinterpretq_u16_s16(words.v), vdupq_n_s16(static_cast<std::int16_t>(-4 * index)));
  return {vreinterpretq_s16_u16(vandq_u16(shifted, vdupq_n_u16(15)))};
}

struct Sum {
  int32x4_t v;
};
Sum zero_sum() { return {vdupq_n_s32(0)}; }
Sum add_dot(Sum sum, Pairs a, Pairs b) {
  const int32x4_t low = vmull_s16(vget_low_s16(a.v), vget_low_s16(b.v)), high = vmull_high_s16(a.v, b.v);
  sum.v = vaddq_s32(sum.v, vpaddq_s32(low, high));
  asm("" : "+w"(sum.v));  // else GCC adds the products up in another order, for which registers are too few
  return sum;
}
Vec to_float(Sum sum) { return {vcvtq_f32_s32(sum.v)}; }

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
void store_rounded(std::int16_t* p, Vec x) { vst1_s16(p, vmovn_s32(vcvtnq_s32_f32(x.v))); }

Vec broadcast(float x) { return {vdupq_n_f32(x)}; }
Vec add(Vec a, Vec b) { return {vaddq_f32(a.v, b.v)}; }
Vec sub(Vec a, Vec b) { return {vsubq_f32(a.v, b.v)}; }
Vec mul(Vec a, Vec b) { return {vmulq_f32(a.v, b.v)}; }
Vec div(Vec a, Vec b) { return {vdivq_f32(a.v, b.v)}; }
Vec fma(Vec a, Vec b, Vec c) { return {vfmaq_f32(c.v, a.v, b.v)}; }
Vec fused(Vec a, Vec b, Vec c) { return fma(a, b, c); }
Vec max(Vec a, Vec b) { return {vbslq_f32(vcgtq_f32(a.v, b.v), a.v, b.v)}; }

Vec abs(Vec a) { return {vabsq_f32(a.v)}; }

float reduce_add(Vec x) { return vaddvq_f32(x.v); }
float reduce_max(Vec x) { return vmaxvq_f32(x.v); }

Vec saturate(Vec x, float limit) {
  const uint32x4_t is_inf = vceqq_f32(vabsq_f32(x.v), vdupq_n_f32(__builtin_inff()));
  const float32x4_t clamped = vmaxq_f32(vdupq_n_f32(-limit), vminq_f32(vdupq_n_f32(limit), x.v));
  return {vbslq_f32(is_inf, x.v, clamped)};
}

int count_between(Vec x, float low, float high) {
  const uint32x4_t is_between = vandq_u32(vcgtq_f32(x.v, vdupq_n_f32(low)), vcltq_f32(x.v, vdupq_n_f32(high)));
  return static_cast<int>(vaddvq_u32(vshrq_n_u32(is_between, 31)));
}

Vec exp2_from_magic(Vec t) {
  const uint32x4_t biased = vaddq_u32(vreinterpretq_u32_f32(t.v), vdupq_n_u32(127));
  return {vreinterpretq_f32_u32(vshlq_n_u32(biased, 23))};
}

Vec zero_below(Vec x, float limit, Vec value) {
  const uint32x4_t below = vcltq_f32(x.v, vdupq_n_f32(limit));
  return {vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value.v), below))};
}

Vec choose_below(Vec x, float limit, Vec a, Vec b) { return {vbslq_f32(vcltq_f32(x.v, vdupq_n_f32(limit)), a.v, b.v)}; }

Vec low_of_pair(Vec x) { return {vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(x.v), 16))}; }
Vec high_of_pair(Vec x) {
  return {vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x.v), vdupq_n_u32(0xffff0000u)))};
}

}  // namespace
