// Four floats in plain C++: the Vec layer for processors that no other file fits, and the one to read first.
//
// Every vec_<isa>.h has the same names. T is float, Half or BFloat16.
//   load(const T*), store(T*, Vec)          Vec::width values; Half and BFloat16 are converted, to nearest even
//   load_part, store_part                   the first `count` (8 of 16) values; only where width > 8
//   fma(a, b, c) = a * b + c, in one rounding where the processor has it
//   max(a, b): b where a or b is NaN
//   saturate(x, limit): finite x clamped to +-limit, infinities and NaN kept
//   exp2_from_magic(t): 2^n for t = n + kRoundMagic
//   zero_below(x, limit, value): 0 where x < limit, else value
#pragma once

#include <cstdint>
#include <cstring>

#include "half.h"

namespace {

struct Vec {
  static constexpr int width = 4;
  static constexpr int registers = 16;
  float lane[width];
};

template <class F>
Vec make(F value_of) {
  Vec result;
  for (int i = 0; i < Vec::width; ++i) result.lane[i] = value_of(i);
  return result;
}

std::uint32_t float_bits(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

float bits_float(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Rebiases exponent and mantissa; a subnormal is mantissa * 2^-24, exact in a float.
float half_to_float(Half h) {
  const std::uint32_t sign = std::uint32_t{h.bits & 0x8000u} << 16;
  const std::uint32_t exponent = (h.bits >> 10) & 31u, mantissa = h.bits & 0x3ffu;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return bits_float(sign | float_bits(magnitude));
  }
  if (exponent == 31) return bits_float(sign | 0x7f800000u | mantissa << 13 | (mantissa ? 0x400000u : 0u));
  return bits_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

Half float_to_half(float x) {
  const std::uint32_t bits = float_bits(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  std::uint32_t result;
  if (magnitude > 0x7f800000u) {
    result = 0x7e00u | (magnitude >> 13 & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // 65520 and more round to infinity
    result = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: adding 0.5 leaves multiples of 2^-24, rounded to even
    result = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    result = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  return {static_cast<std::uint16_t>(sign | result)};
}

float bfloat16_to_float(BFloat16 b) { return bits_float(std::uint32_t{b.bits} << 16); }

BFloat16 float_to_bfloat16(float x) {
  const std::uint32_t bits = float_bits(x);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const std::uint32_t rounded = is_nan ? bits | 0x400000u : bits + 0x7fffu + (bits >> 16 & 1u);
  return {static_cast<std::uint16_t>(rounded >> 16)};
}

Vec load(const float* p) {
  return make([=](int i) { return p[i]; });
}
Vec load(const Half* p) {
  return make([=](int i) { return half_to_float(p[i]); });
}
Vec load(const BFloat16* p) {
  return make([=](int i) { return bfloat16_to_float(p[i]); });
}

void store(float* p, Vec x) { std::memcpy(p, x.lane, sizeof x.lane); }
void store(Half* p, Vec x) {
  for (int i = 0; i < Vec::width; ++i) p[i] = float_to_half(x.lane[i]);
}
void store(BFloat16* p, Vec x) {
  for (int i = 0; i < Vec::width; ++i) p[i] = float_to_bfloat16(x.lane[i]);
}

Vec broadcast(float x) {
  return make([=](int) { return x; });
}
Vec add(Vec a, Vec b) {
  return make([&](int i) { return a.lane[i] + b.lane[i]; });
}
Vec sub(Vec a, Vec b) {
  return make([&](int i) { return a.lane[i] - b.lane[i]; });
}
Vec mul(Vec a, Vec b) {
  return make([&](int i) { return a.lane[i] * b.lane[i]; });
}
Vec fma(Vec a, Vec b, Vec c) {
  return make([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
}
Vec max(Vec a, Vec b) {
  return make([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}

float reduce_add(Vec x) { return (x.lane[0] + x.lane[1]) + (x.lane[2] + x.lane[3]); }

float reduce_max(Vec x) {
  const float a = x.lane[0] > x.lane[1] ? x.lane[0] : x.lane[1];
  const float b = x.lane[2] > x.lane[3] ? x.lane[2] : x.lane[3];
  return a > b ? a : b;
}

void reduce_add4(Vec a, Vec b, Vec c, Vec d, float* sums) {
  sums[0] = reduce_add(a);
  sums[1] = reduce_add(b);
  sums[2] = reduce_add(c);
  sums[3] = reduce_add(d);
}

Vec saturate(Vec x, float limit) {
  return make([&](int i) {
    const float value = x.lane[i], clamped = value > limit ? limit : value < -limit ? -limit : value;
    return (float_bits(value) & 0x7fffffffu) == 0x7f800000u ? value : clamped;
  });
}

Vec exp2_from_magic(Vec t) {
  return make([&](int i) { return bits_float((float_bits(t.lane[i]) + 127u) << 23); });
}

Vec zero_below(Vec x, float limit, Vec value) {
  return make([&](int i) { return x.lane[i] < limit ? 0.0f : value.lane[i]; });
}

}  // namespace
