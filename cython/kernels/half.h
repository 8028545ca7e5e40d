// Storage types of the KV cache and the wire, and limits that all instruction sets share.
#pragma once

#include <cstdint>

namespace {

struct Half {
  std::uint16_t bits;  // IEEE binary16
};

struct BFloat16 {
  std::uint16_t bits;  // the upper half of a float
};

struct Int8 {
  std::int8_t code;  // value = scale * code
};

struct Int4 {
  std::uint16_t codes;  // four unsigned codes, the first in the low bits; value = minimum + scale * code
};

constexpr float kHalfMax = 65504.0f;
constexpr float kBFloat16Max = 0x1.fep127f;

// Adding this to a small float leaves its nearest integer in the low bits of the sum.
constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2^23; exp2_from_magic needs its low 9 bits to be 0

}  // namespace
