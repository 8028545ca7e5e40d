// What the kernels must compute, in plain arithmetic: storage types, the layout of a block, attention in double.
// Written from kernels.h alone; shares no code with the kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels.h"

namespace plain {

using namespace fastdecode;

// A number as the cache holds it, what the rounding errors of sums over it are relative to, and the largest that a code
// could make it, less the minimum (0 where there are no codes).
struct Number {
  double value, size, reach;
};
using Numbers = std::vector<Number>;

// To nearest even with `bits` significant bits; finite values beyond `largest` become it.
inline double round_to(double x, int bits, int lowest_exponent, double largest) {
  if (x == 0.0 || !std::isfinite(x)) return x;
  const int unit = std::max(std::ilogb(x), lowest_exponent) - (bits - 1);
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(x, -unit)), unit);
  return std::fabs(rounded) > largest ? std::copysign(largest, x) : rounded;
}

inline double round_half(double x) { return round_to(x, 11, -14, 65504.0); }

// A value after it has been stored as a float type.
inline double rounded(double x, std::int32_t dtype) {
  if (dtype == kFloat16) return round_half(x);
  return dtype == kBFloat16 ? round_to(x, 8, -126, 0x1.fep127) : static_cast<double>(static_cast<float>(x));
}

inline double half_value(std::uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const double sign = bits >> 15 ? -1.0 : 1.0;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  return sign * (exponent ? std::ldexp(1024 + mantissa, exponent - 25) : std::ldexp(mantissa, -24));
}

inline double bfloat16_value(std::uint16_t bits) {
  const std::uint32_t wide = std::uint32_t{bits} << 16;
  float x;
  std::memcpy(&x, &wide, sizeof x);
  return x;
}

// Bits of a value that the type can hold.
inline std::uint16_t half_bits(double x) {
  const unsigned sign = std::signbit(x) ? 0x8000u : 0u;
  if (!std::isfinite(x)) return static_cast<std::uint16_t>(sign | (std::isnan(x) ? 0x7e00u : 0x7c00u));
  const int exponent = x == 0.0 ? -14 : std::max(std::ilogb(x), -14);
  const int mantissa = static_cast<int>(std::ldexp(std::fabs(x), 10 - exponent));  // its top bit counts as exponent
  return static_cast<std::uint16_t>(sign | static_cast<unsigned>(((exponent + 14) << 10) + mantissa));
}

inline int groups_of(std::int32_t dtype, int head_dim) {
  return dtype == kInt4 ? (head_dim + kGroupDim - 1) / kGroupDim : dtype == kInt8 ? 1 : 0;
}

// One token's K or V of one KV head. Types without scales have their values as codes.
struct Row {
  std::vector<double> codes;
  std::vector<double> scales, minimums;  // of each group

  std::size_t group_of(std::size_t d) const { return scales.size() > 1 ? d / kGroupDim : 0; }
  Numbers numbers() const {
    Numbers result;
    for (std::size_t d = 0; d < codes.size(); ++d) {
      const double product = scales.empty() ? codes[d] : codes[d] * scales[group_of(d)];
      const double minimum = minimums.empty() ? 0.0 : minimums[group_of(d)];
      const double largest = scales.empty() ? 0.0 : std::fabs(scales[group_of(d)]) * (minimums.empty() ? 127 : 15);
      result.push_back({minimum + product, std::fabs(minimum) + std::fabs(product), largest});
    }
    return result;
  }
};

inline float inverse(float scale) { return scale > 1e-30f ? 1.0f / scale : 0.0f; }

inline void quantise_int8(const float* x, int head_dim, Row& row) {
  float largest = 0.0f;
  for (int d = 0; d < head_dim; ++d) largest = std::fmax(largest, std::fabs(x[d]));
  const float scale = largest / 127.0f, factor = inverse(scale);
  for (int d = 0; d < head_dim; ++d) row.codes.push_back(std::nearbyint(x[d] * factor));
  row.scales.push_back(factor > 0.0f ? scale : 0.0f);
}

inline void quantise_int4(const float* x, int count, Row& row) {
  float lowest = 65504.0f, highest = -65504.0f;
  for (int d = 0; d < count; ++d) {
    lowest = std::fmin(lowest, x[d]);
    highest = std::fmax(highest, x[d]);
  }
  const float minimum = static_cast<float>(round_half(lowest));
  const float scale = static_cast<float>(round_half((highest - minimum) / 15.0f)), factor = inverse(scale);
  for (int d = 0; d < count; ++d) {
    row.codes.push_back(std::nearbyint(std::fmin(std::fmax((x[d] - minimum) * factor, 0.0f), 15.0f)));
  }
  row.scales.push_back(scale);
  row.minimums.push_back(minimum);
}

// What the cache makes of one row; a group with an infinite or NaN value has a NaN scale.
inline Row stored_row(const float* x, int head_dim, std::int32_t dtype) {
  Row row;
  const int groups = groups_of(dtype, head_dim), size = groups > 1 ? kGroupDim : head_dim;
  if (groups == 0) {
    for (int d = 0; d < head_dim; ++d) row.codes.push_back(rounded(x[d], dtype));
  }
  for (int g = 0; g < groups; ++g) {
    const int first = g * size, count = std::min(size, head_dim - first);
    dtype == kInt8 ? quantise_int8(x, head_dim, row) : quantise_int4(x + first, count, row);
    for (int d = first; d < first + count; ++d) {
      if (!std::isfinite(x[d])) row.scales.back() = NAN;
    }
  }
  return row;
}

template <class T>
T item(const char* memory, std::int64_t index) {
  T x;
  std::memcpy(&x, memory + index * std::int64_t{sizeof(T)}, sizeof x);
  return x;
}

inline double float_item(const char* memory, std::int64_t index, std::int32_t dtype) {
  if (dtype == kFloat32) return item<float>(memory, index);
  const auto bits = item<std::uint16_t>(memory, index);
  return dtype == kFloat16 ? half_value(bits) : bfloat16_value(bits);
}

// Reads one row back from a block, by the layout in kernels.h.
inline Row read_row(const LayerView& layer, std::int64_t block, int token, int head, bool is_key) {
  const std::int32_t dtype = is_key ? layer.key_dtype : layer.value_dtype;
  const char* part = layer.keys + block * layer.block_bytes + head * layer.head_bytes;
  if (!is_key) part += layer.value_bytes;
  const int head_dim = layer.head_dim, groups = groups_of(dtype, head_dim);
  const std::int64_t panel = token / kPanelTokens, lane = token % kPanelTokens;
  const bool in_pairs = groups > 0;
  const auto at = [&](std::int64_t items, std::int64_t i) {  // item i of a token that has `items`
    if (in_pairs && is_key) return panel * items * kPanelTokens + (i / 2 * kPanelTokens + lane) * 2 + i % 2;
    if (in_pairs) return (token / 2 * items + i) * 2 + token % 2;
    return is_key ? (panel * items + i) * kPanelTokens + lane : token * items + i;
  };
  Row row;
  for (int d = 0; d < head_dim; ++d) {
    if (dtype == kInt4) {
      const int word = is_key ? d / 4 : d / kGroupDim * 8 + d % 8, nibble = is_key ? d % 4 : d % kGroupDim / 8;
      row.codes.push_back(item<std::uint16_t>(part, at(groups * 8, word)) >> 4 * nibble & 15);
    } else if (dtype == kInt8) {
      row.codes.push_back(item<std::int8_t>(part, at(head_dim, d)));
    } else {
      row.codes.push_back(float_item(part, at(head_dim, d), dtype));
    }
  }
  const std::int64_t code_bytes = std::int64_t{layer.block_size} * (dtype == kInt4 ? 16 * groups : head_dim);
  for (int g = 0; g < groups; ++g) {
    const auto place = std::int64_t{g} * layer.block_size + token;
    const auto minimum = std::int64_t{groups} * layer.block_size + place;
    row.scales.push_back(float_item(part + code_bytes, place, dtype == kInt8 ? kFloat32 : kFloat16));
    if (dtype == kInt4) row.minimums.push_back(float_item(part + code_bytes, minimum, kFloat16));
  }
  return row;
}

inline bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// Codes of a group without a finite scale mean nothing.
inline bool same(const Row& a, const Row& b) {
  if (a.codes.size() != b.codes.size() || a.scales.size() != b.scales.size()) return false;
  for (std::size_t g = 0; g < a.scales.size(); ++g) {
    if (!same(a.scales[g], b.scales[g])) return false;
    if (std::isfinite(a.scales[g]) && !a.minimums.empty() && !same(a.minimums[g], b.minimums[g])) return false;
  }
  for (std::size_t d = 0; d < a.codes.size(); ++d) {
    const bool means = a.scales.empty() || std::isfinite(a.scales[a.group_of(d)]);
    if (means && !same(a.codes[d], b.codes[d])) return false;
  }
  return true;
}

// Attention of one query head over the tokens it sees, with how far fp32 may be from it. A sink is a score whose value
// is 0.
struct Attention {
  std::vector<double> out, tolerance;
  double lse = 0, lse_tolerance = 0;
};

// Tolerances are bounds, not guesses. With u = 2^-24, a sum of n products in fp32, in any order, is off by at most
// n u times the sum of its terms' sizes (a few more for what scales, minimums and merging add). So a score s of
// head_dim terms is off by at most `delta`, which grows with the distance to the largest score, as that is subtracted
// in fp32 before exp (itself good to about one unit). Weights are then off by a factor e^(+-delta), so with
// a = sum over tokens of weight (e^delta - 1), the output moves by at most 2 a times the range of V if a < 1/2, and
// stays in the range in any case; the log of the sum moves by at most 2 a, or the largest delta.
// Where K is quantised, queries are rounded to 2^-16 of the largest |query| (half a unit of 16 bits with a sign), and
// where V is, weight times scale to 2^-16 of the largest of a tile; values below 2^15 2^-126 may count as 0.
// Weights that are rounded, to `weight_step` of themselves at most, move the output by twice that of V's range.
inline Attention attend(const std::vector<double>& query, const std::vector<Numbers>& keys,
                        const std::vector<Numbers>& values, double scale, double softcap,
                        const double* sink = nullptr, double weight_step = 0) {
  constexpr double u = 0x1p-24, fixed_step = 0.501 / 32767;
  const std::size_t head_dim = query.size(), num_tokens = keys.size();
  std::vector<double> scores(num_tokens), sizes(num_tokens), reaches(num_tokens);
  std::vector<double> weights(num_tokens), deltas(num_tokens);
  double largest_query = 0;
  for (const double x : query) largest_query = std::fmax(largest_query, std::fabs(x) * scale);
  double m = sink ? *sink : -INFINITY;
  for (std::size_t t = 0; t < num_tokens; ++t) {
    for (std::size_t d = 0; d < head_dim; ++d) {
      const Number key = keys[t][d];
      scores[t] += query[d] * key.value * scale;
      sizes[t] += std::fabs(query[d]) * key.size * scale;
      reaches[t] += key.reach;
    }
    if (softcap > 0) scores[t] = std::isfinite(scores[t]) ? softcap * std::tanh(scores[t] / softcap) : NAN;
    m = std::fmax(m, scores[t]);
  }
  if (m == -INFINITY) m = 0;
  double total = sink ? std::exp(*sink - m) : 0, a = 0, largest_delta = 0;
  for (std::size_t t = 0; t < num_tokens; ++t) {
    weights[t] = std::exp(scores[t] - m);
    total += weights[t];
    const double distance = std::isfinite(scores[t]) ? m - scores[t] : 0;
    deltas[t] = u * ((static_cast<double>(head_dim) + 8) * sizes[t] + 2 * distance + 8);
    deltas[t] += 8 * u * softcap;  // of tanh, which makes no other error larger
    deltas[t] += (largest_query * fixed_step + 0x1p-111) * reaches[t];
  }
  for (std::size_t t = 0; t < num_tokens; ++t) {
    // A weight that is 0 here may be none for a score that is off by more than its distance.
    a += weights[t] > 0 ? weights[t] / total * std::expm1(std::min(deltas[t], 700.0))
                        : std::exp(std::min(scores[t] - m + deltas[t], 700.0)) / total;
    largest_delta = std::fmax(largest_delta, deltas[t]);
  }
  Attention result;
  const double n = static_cast<double>(num_tokens), sums = u * (2 * n + 64);  // of weights, and of weights times V
  result.lse = m + std::log(total);
  result.lse_tolerance = (a < 0.5 ? 2 * a : largest_delta) + sums + 4 * u * (1 + std::fabs(m) + std::fabs(result.lse));
  for (std::size_t d = 0; d < head_dim; ++d) {
    double sum = 0, size = 0, reach = 0, largest_reach = 0, low = sink ? 0 : INFINITY, high = sink ? 0 : -INFINITY;
    for (std::size_t t = 0; t < num_tokens; ++t) {
      const Number value = values[t][d];
      sum += weights[t] / total * value.value;
      size = std::fmax(size, value.size);
      reach = std::fmax(reach, weights[t] / total * value.reach);
      largest_reach = std::fmax(largest_reach, value.reach);
      low = std::fmin(low, value.value);
      high = std::fmax(high, value.value);
    }
    const double underflow = n * (0x1p-126 * size + 0x1p-149);  // weights below 2^-126 are 0
    const double fixed = largest_reach > 0 ? n * (reach * fixed_step + 0x1p-111 * 127) : 0;
    result.out.push_back(sum);
    result.tolerance.push_back((std::fmin(1.0, 2 * a) + 2 * weight_step) * (high - low) + sums * size + underflow +
                               fixed);
  }
  return result;
}

}  // namespace plain
