// Sizes of the storage types; no vectors. The layout itself is described in kernels.h.
#pragma once

#include "half.h"
#include "kernels.h"

namespace {

using fastdecode::kGroupDim;

constexpr int kLineBytes = 64;  // of a cache line
constexpr int kGroupWords = 8;  // words of four codes that hold one group of int4

template <class T>
constexpr std::int32_t dtype_of = fastdecode::kFloat32;
template <>
constexpr std::int32_t dtype_of<Half> = fastdecode::kFloat16;
template <>
constexpr std::int32_t dtype_of<BFloat16> = fastdecode::kBFloat16;
template <>
constexpr std::int32_t dtype_of<Int8> = fastdecode::kInt8;
template <>
constexpr std::int32_t dtype_of<Int4> = fastdecode::kInt4;

// Groups of int4 along head_dim; the last may be shorter.
constexpr int num_groups(int head_dim) { return (head_dim + kGroupDim - 1) / kGroupDim; }

// Bytes of the codes of one token, K or V.
constexpr std::int64_t code_bytes(std::int32_t dtype, int head_dim) {
  switch (dtype) {
    case fastdecode::kFloat32:
      return std::int64_t{4} * head_dim;
    case fastdecode::kInt8:
      return head_dim;
    case fastdecode::kInt4:
      return std::int64_t{2} * kGroupWords * num_groups(head_dim);
    default:
      return std::int64_t{2} * head_dim;
  }
}

// Bytes of the scales of one token, K or V.
constexpr std::int64_t scale_bytes(std::int32_t dtype, int head_dim) {
  return dtype == fastdecode::kInt8 ? 4 : dtype == fastdecode::kInt4 ? 4 * num_groups(head_dim) : 0;
}

// Floats from row to row of a product's copy of a group: rows then lie in different sets of a cache.
constexpr int kPackedStride = fastdecode::kGroupIn + 16;

// Whole cache lines, so that two threads never write to the same one.
constexpr std::int64_t round_to_line(std::int64_t floats) {
  constexpr int line = kLineBytes / sizeof(float);
  return (floats + line - 1) / line * line;
}

}  // namespace
