// Plain loops that read memory and do nothing else, to measure what the machine gives; included after a vec_<isa>.h.
// All read kStepVecs vectors a step; they differ in how many sums the additions form chains of, and in whether the
// lines to come are prefetched. The sum is returned so that no compiler may leave a read out.
#pragma once

#include <stdint.h>

namespace {

constexpr int kStepVecs = 8;
constexpr std::int64_t kPrefetchBytes = 2048;  // how far ahead

template <int num_sums, bool prefetches>
float read_with(const float* data, std::int64_t count) {
  constexpr int step = kStepVecs * Vec::width;
  Vec sums[num_sums];
#pragma GCC unroll 8
  for (int i = 0; i < num_sums; ++i) sums[i] = broadcast(0.0f);
  std::int64_t at = 0;
  for (; at + step <= count; at += step) {
    if constexpr (prefetches) {
      const char* ahead = reinterpret_cast<const char*>(data + at) + kPrefetchBytes;
#pragma GCC unroll 8
      for (int byte = 0; byte < step * static_cast<int>(sizeof(float)); byte += 64) __builtin_prefetch(ahead + byte);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kStepVecs; ++i) {
      sums[i % num_sums] = add(sums[i % num_sums], load(data + at + i * Vec::width));
    }
  }
  float total = 0.0f;
#pragma GCC unroll 8
  for (int i = 0; i < num_sums; ++i) total += reduce_add(sums[i]);
  for (; at < count; ++at) total += data[at];
  return total;
}

// Sum of `count` floats, by one of the loops in the order of kernels.h.
float read_loop(const float* data, std::int64_t count, int variant) {
  switch (variant) {
    case 0:
      return read_with<1, false>(data, count);
    case 1:
      return read_with<4, false>(data, count);
    case 2:
      return read_with<8, false>(data, count);
    case 3:
      return read_with<1, true>(data, count);
    case 4:
      return read_with<4, true>(data, count);
    default:
      return read_with<8, true>(data, count);
  }
}

}  // namespace
