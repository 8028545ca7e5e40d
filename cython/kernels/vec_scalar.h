// Four floats with no instruction set in mind: the Vec layer for processors that no other file fits, and the one to
// read first. The compiler's own vectors (of GCC and Clang) become whatever vectors the processor has, or scalars.
//
// Every vec_<isa>.h has the same names. T is float, Half or BFloat16.
//   load(const T*), store(T*, Vec)          Vec::width values; Half and BFloat16 are converted, to nearest even
//   load(const Int8*)                       Vec::width codes
//   store_rounded(int16_t*, Vec)            to the nearest integer, to even; values within +-32767
//   Pairs                                   Vec::width lanes of two 16-bit integers
//   load_pairs(const Int8*)                 2 Vec::width codes
//   load_pairs(const Int4*)                 2 Vec::width words of four codes
//   nibbles(words, i)                       code i of each word
//   broadcast_pair(const int16_t*)          the same two in all lanes
//   Sum, zero_sum(), to_float(Sum)          Vec::width 32-bit integers; all 0; as floats
//   add_dot(sum, a, b)                      sum + a[0] b[0] + a[1] b[1] in each lane
//   Only where width is 16, of which 8 are sometimes needed or two runs of 8 are joined:
//   load_part, store_part, load_pairs_part  the first `count` values or lanes
//   load_halves, load_pair_halves           two runs of 8
//   nibbles_twice(p, i)                     of 8 lanes of words: codes 2 i in the lower, 2 i + 1 in the upper lanes
//   fma(a, b, c) = a * b + c, in one rounding where the processor has it; fused(a, b, c): in one everywhere
//   max(a, b): b where a or b is NaN
//   count_between(x, low, high): how many lanes have low < x < high
//   saturate(x, limit): finite x clamped to +-limit, infinities and NaN kept
//   exp2_from_magic(t): 2^n for t = n + kRoundMagic
//   zero_below(x, limit, value): 0 where x < limit, else value
//   choose_below(x, limit, a, b): a where x < limit, else b
//   low_of_pair(x), high_of_pair(x): of lanes that hold two bfloat16, as floats
#pragma once

#include <cstdint>
#include <cstring>

#include "half.h"

namespace {

typedef float Floats __attribute__((vector_size(16)));
typedef std::uint32_t Bits __attribute__((vector_size(16)));
typedef std::int32_t Ints __attribute__((vector_size(16)));
typedef std::uint16_t Shorts __attribute__((vector_size(8)));
typedef std::int16_t Halves __attribute__((vector_size(16)));
typedef std::int8_t Bytes __attribute__((vector_size(8)));
typedef std::int8_t FourBytes __attribute__((vector_size(4)));

struct Vec {
  static constexpr int width = 4;
  static constexpr int registers = 8;
  Floats v;
};

template <class V>
V read_memory(const void* p) {
  V x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

Bits all(std::uint32_t x) { return Bits{x, x, x, x}; }
Vec broadcast(float x) { return {Floats{x, x, x, x}}; }

// Casts between vectors keep the bits.
Bits magnitude_bits(Floats x) { return (Bits)x & 0x7fffffffu; }

// Rebiases exponent and mantissa; a subnormal is mantissa * 2^-24, exact in a float.
Floats half_to_float(Bits half) {
  const Bits sign = (half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  const Bits normal = (magnitude << 13) + (112u << 23);
  const Bits subnormal = (Bits)(__builtin_convertvector((Ints)magnitude, Floats) * 0x1p-24f);
  const Bits quiet = (Bits)(magnitude > 0x7c00u) & 0x400000u;
  const Bits not_finite = magnitude << 13 | 0x7f800000u | quiet;
  return (Floats)(sign | (magnitude < 0x400u ? subnormal : magnitude < 0x7c00u ? normal : not_finite));
}

Bits float_to_half(Floats x) {
  const Bits sign = (Bits)x >> 16 & 0x8000u, magnitude = magnitude_bits(x);
  const Bits normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  const Bits subnormal = (Bits)((Floats)magnitude + 0.5f) - 0x3f000000u;  // leaves multiples of 2^-24, to even
  const Bits nan = 0x7e00u | (magnitude >> 13 & 0x3ffu);
  const Bits finite = magnitude < 0x38800000u ? subnormal : normal;  // below 2^-14
  // 65520 and more round to infinity.
  return sign | (magnitude > 0x7f800000u ? nan : magnitude >= 0x477ff000u ? all(0x7c00u) : finite);
}

// Integer rounding to nearest even; NaN is made quiet instead, as rounding could turn it into infinity.
Bits float_to_bfloat16(Floats x) {
  const Bits bits = (Bits)x, rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  return (x == x ? rounded : bits | 0x400000u) >> 16;
}

Vec load(const float* p) { return {read_memory<Floats>(p)}; }
Vec load(const Half* p) { return {half_to_float(__builtin_convertvector(read_memory<Shorts>(p), Bits))}; }
Vec load(const BFloat16* p) { return {(Floats)(__builtin_convertvector(read_memory<Shorts>(p), Bits) << 16)}; }

Vec load(const Int8* p) { return {__builtin_convertvector(read_memory<FourBytes>(p), Floats)}; }

struct Pairs {
  Bits v;
};
Pairs load_pairs(const Int8* p) { return {(Bits) __builtin_convertvector(read_memory<Bytes>(p), Halves)}; }
Pairs load_pairs(const Int4* p) { return {read_memory<Bits>(p)}; }
Pairs broadcast_pair(const std::int16_t* p) { return {all(read_memory<std::uint32_t>(p))}; }
Pairs nibbles(Pairs words, int index) { return {words.v >> 4 * index & 0x000f000fu}; }

struct Sum {
  Ints v;
};
Sum zero_sum() { return {Ints{0, 0, 0, 0}}; }
Sum add_dot(Sum sum, Pairs a, Pairs b) {
  const auto low = [](Pairs x) { return (Ints)(x.v << 16) >> 16; };
  const auto high = [](Pairs x) { return (Ints)x.v >> 16; };
  return {sum.v + low(a) * low(b) + high(a) * high(b)};
}
Vec to_float(Sum sum) { return {__builtin_convertvector(sum.v, Floats)}; }

void store_bits(void* p, Bits bits) {
  const Shorts halves = __builtin_convertvector(bits, Shorts);
  std::memcpy(p, &halves, sizeof halves);
}
void store(float* p, Vec x) { std::memcpy(p, &x.v, sizeof x.v); }
void store(Half* p, Vec x) { store_bits(p, float_to_half(x.v)); }
void store(BFloat16* p, Vec x) { store_bits(p, float_to_bfloat16(x.v)); }
void store_rounded(std::int16_t* p, Vec x) { store_bits(p, (Bits)(x.v + kRoundMagic) & 0xffffu); }

Vec add(Vec a, Vec b) { return {a.v + b.v}; }
Vec sub(Vec a, Vec b) { return {a.v - b.v}; }
Vec mul(Vec a, Vec b) { return {a.v * b.v}; }
Vec div(Vec a, Vec b) { return {a.v / b.v}; }
Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
Vec fused(Vec a, Vec b, Vec c) {
  for (int i = 0; i < Vec::width; ++i) c.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
  return c;
}
Vec max(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }
Vec abs(Vec a) { return {(Floats)magnitude_bits(a.v)}; }

float reduce_add(Vec x) { return (x.v[0] + x.v[1]) + (x.v[2] + x.v[3]); }

float reduce_max(Vec x) {
  const float a = x.v[0] > x.v[1] ? x.v[0] : x.v[1];
  const float b = x.v[2] > x.v[3] ? x.v[2] : x.v[3];
  return a > b ? a : b;
}

Vec saturate(Vec x, float limit) {
  const Floats high = broadcast(limit).v, low = -high;
  const Floats clamped = x.v > high ? high : x.v < low ? low : x.v;
  return {magnitude_bits(x.v) == 0x7f800000u ? x.v : clamped};
}

int count_between(Vec x, float low, float high) {
  const Ints is_between = (x.v > broadcast(low).v) & (x.v < broadcast(high).v);  // -1 or 0
  return -(is_between[0] + is_between[1] + is_between[2] + is_between[3]);
}

Vec exp2_from_magic(Vec t) { return {(Floats)(((Bits)t.v + 127u) << 23)}; }

Vec zero_below(Vec x, float limit, Vec value) { return {(Floats)((Bits)value.v & ~(Bits)(x.v < limit))}; }

Vec choose_below(Vec x, float limit, Vec a, Vec b) { return {x.v < limit ? a.v : b.v}; }

Vec low_of_pair(Vec x) { return {(Floats)((Bits)x.v << 16)}; }
Vec high_of_pair(Vec x) { return {(Floats)((Bits)x.v & 0xffff0000u)}; }

}  // namespace
