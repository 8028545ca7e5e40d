// What the S-Part does to a row beside matrix products: norm, activation, rotation, conversion to the wire type.
// Included after a vec_<isa>.h. Every product and sum is rounded on its own and sums have a fixed order, so that all
// instruction sets give the same bits; the last values of a row go through the same vectors as the others.
#pragma once

#include <math.h>
#include <string.h>

#include "convert.inl.h"
#include "exponential.inl.h"

namespace {

constexpr int kSumLanes = 32;  // running sums of a row, however wide a vector is

// The first `count` values and zeros where fewer than Vec::width are left, else all.
template <class T>
Vec load_some(const T* p, std::int64_t count) {
  if (count >= Vec::width) return load(p);
  T padded[Vec::width] = {};
  memcpy(padded, p, static_cast<size_t>(count) * sizeof(T));
  return load(padded);
}

template <class T>
void store_some(T* p, Vec x, std::int64_t count) {
  if (count >= Vec::width) return store(p, x);
  T padded[Vec::width];
  store(padded, x);
  memcpy(p, padded, static_cast<size_t>(count) * sizeof(T));
}

// step(i, values left from i on) for each vector of a row; whole ones see a constant.
template <class Step>
__attribute__((always_inline)) inline void over_vectors(std::int64_t count, Step step) {
  std::int64_t i = 0;
  for (; i + Vec::width <= count; i += Vec::width) step(i, std::int64_t{Vec::width});
  if (i < count) step(i, count - i);
}

// As if stored as T and read back.
Vec rounded(Vec x, const float*) { return x; }
template <class T>
Vec rounded(Vec x, const T*) {
  T values[Vec::width];
  store(values, x);
  return load(values);
}

template <class T>
__attribute__((always_inline)) inline void add_squares(Vec* sums, const T* p) {
#pragma GCC unroll 8
  for (int v = 0; v < kSumLanes / Vec::width; ++v) {
    const Vec x = load(p + v * Vec::width);
    sums[v] = add(sums[v], mul(x, x));
  }
}

template <class T>
float sum_of_squares(const T* p, std::int64_t count) {
  Vec sums[kSumLanes / Vec::width];
  for (Vec& sum : sums) sum = broadcast(0.0f);
  std::int64_t at = 0;
  for (; at + kSumLanes <= count; at += kSumLanes) add_squares(sums, p + at);
  if (at < count) {
    T padded[kSumLanes] = {};
    memcpy(padded, p + at, static_cast<size_t>(count - at) * sizeof(T));
    add_squares(sums, padded);
  }
  float lanes[kSumLanes];
  for (int v = 0; v < kSumLanes / Vec::width; ++v) store(lanes + v * Vec::width, sums[v]);
  for (int half = kSumLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

template <class T>
void normalise(const void* source, const void* weights, void* target, std::int64_t count, float eps) {
  const T* from = static_cast<const T*>(source);
  const T* weight = static_cast<const T*>(weights);
  T* to = static_cast<T*>(target);
  const float scale = 1.0f / sqrtf(sum_of_squares(from, count) / static_cast<float>(count) + eps);
  over_vectors(count, [=](std::int64_t i, std::int64_t left) {
    const Vec normed = rounded(mul(load_some(from + i, left), broadcast(scale)), from);
    store_some(to + i, mul(load_some(weight + i, left), normed), left);
  });
}

// x / (1 + exp(-x)). exp is infinite from -88.73 on, where the result becomes -0, and NaN at -infinity, as torch's are.
Vec silu(Vec x) {
  const Vec y = sub(broadcast(0.0f), max(broadcast(-89.0f), x));
  const Exponential e = exponential(y, [](Vec a, Vec b, Vec c) { return add(mul(a, b), c); });
  const Vec half = mul(e.mantissa, exp2_from_magic(sub(e.magic, broadcast(1.0f))));  // 2^n may be beyond a float
  return div(x, add(zero_below(y, -80.0f, add(half, half)), broadcast(1.0f)));       // beside 1 that is nothing
}

template <class T>
void gate(const void* gate_up, void* target, std::int64_t count) {
  const T* gates = static_cast<const T*>(gate_up);
  T* to = static_cast<T*>(target);
  over_vectors(count, [=](std::int64_t i, std::int64_t left) {
    const Vec activated = rounded(silu(load_some(gates + i, left)), gates);
    store_some(to + i, mul(activated, load_some(gates + count + i, left)), left);
  });
}

template <class T>
void rotate_head(T* first, const float* angles, std::int64_t pairs) {
  T* second = first + pairs;
  over_vectors(pairs, [=](std::int64_t i, std::int64_t left) {
    const Vec cos = load_some(angles + i, left), sin = load_some(angles + pairs + i, left);
    const Vec a = load_some(first + i, left), b = load_some(second + i, left);
    store_some(first + i, sub(mul(a, cos), mul(b, sin)), left);
    store_some(second + i, add(mul(b, cos), mul(a, sin)), left);
  });
}

template <class T>
void rotate_heads(void* heads, const float* angles, std::int64_t num_heads, std::int64_t head_stride,
                  std::int64_t pairs) {
  for (std::int64_t h = 0; h < num_heads; ++h) rotate_head(static_cast<T*>(heads) + h * head_stride, angles, pairs);
}

// Largest finite value of a type.
constexpr float largest(const float*) { return __builtin_inff(); }  // nothing is beyond it
constexpr float largest(const Half*) { return kHalfMax; }
constexpr float largest(const BFloat16*) { return kBFloat16Max; }

template <class S, class T>
std::int64_t convert_counting(const void* source, void* target, std::int64_t count) {
  const S* from = static_cast<const S*>(source);
  T* to = static_cast<T*>(target);
  std::int64_t num_saturated = 0;
  over_vectors(count, [&](std::int64_t i, std::int64_t left) {
    const Vec x = load_some(from + i, left);
    if constexpr (largest(static_cast<const T*>(nullptr)) < largest(static_cast<const S*>(nullptr))) {
      num_saturated += count_between(abs(x), largest(to), __builtin_inff());
    }
    store_some(to + i, fit(x, to), left);
  });
  return num_saturated;
}

template <class T>
std::int64_t copy_counting(const void* source, void* target, std::int64_t count) {
  copy_values<T>(source, target, count);
  return 0;
}

// All in the order of DType.
constexpr void (*kNormalise[3])(const void*, const void*, void*, std::int64_t, float) = {
    normalise<float>, normalise<Half>, normalise<BFloat16>};
constexpr void (*kGate[3])(const void*, void*, std::int64_t) = {gate<float>, gate<Half>, gate<BFloat16>};
constexpr void (*kRotate[3])(void*, const float*, std::int64_t, std::int64_t, std::int64_t) = {
    rotate_heads<float>, rotate_heads<Half>, rotate_heads<BFloat16>};
constexpr std::int64_t (*kConvertCounting[3][3])(const void*, void*, std::int64_t) = {
    {copy_counting<float>, convert_counting<float, Half>, convert_counting<float, BFloat16>},
    {convert_counting<Half, float>, copy_counting<Half>, convert_counting<Half, BFloat16>},
    {convert_counting<BFloat16, float>, convert_counting<BFloat16, Half>, copy_counting<BFloat16>},
};

void rms_norm(const void* row, const void* weights, void* target, std::int32_t dtype, std::int64_t count, float eps) {
  kNormalise[dtype](row, weights, target, count, eps);
}

void swiglu(const void* gate_up, void* target, std::int32_t dtype, std::int64_t count) {
  kGate[dtype](gate_up, target, count);
}

void rotate(void* heads, const float* angles, std::int32_t dtype, std::int64_t num_heads, std::int64_t head_stride,
            std::int64_t pairs) {
  kRotate[dtype](heads, angles, num_heads, head_stride, pairs);
}

std::int64_t to_wire(const void* source, std::int32_t source_dtype, void* target, std::int32_t target_dtype,
                     std::int64_t count) {
  return kConvertCounting[source_dtype][target_dtype](source, target, count);
}

constexpr std::int64_t kPickBlock = 1024;

// Blocks of a row are looked at once for their largest value, and the first that has the row's once more for its place.
std::int64_t pick(const float* row, std::int64_t count) {
  constexpr int kVecs = 4;
  const Vec zero = broadcast(0.0f), lowest = broadcast(-INFINITY);
  float best = -INFINITY, spoilt = 0.0f;  // x * 0 is NaN where x is not finite
  std::int64_t best_block = 0;
  Vec spoilt_lanes[kVecs] = {zero, zero, zero, zero};
  for (std::int64_t first = 0; first < count; first += kPickBlock) {
    const std::int64_t size = count - first < kPickBlock ? count - first : kPickBlock;
    Vec most[kVecs] = {lowest, lowest, lowest, lowest};
    std::int64_t i = 0;
    for (; i + kVecs * Vec::width <= size; i += kVecs * Vec::width) {
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        const Vec x = load(row + first + i + v * Vec::width);
        most[v] = max(x, most[v]);
        spoilt_lanes[v] = fma(x, zero, spoilt_lanes[v]);
      }
    }
    float largest = reduce_max(max(max(most[0], most[1]), max(most[2], most[3])));
    for (; i < size; ++i) {
      const float x = row[first + i];
      largest = x > largest ? x : largest;
      spoilt += x * 0.0f;
    }
    if (largest > best) {
      best = largest;
      best_block = first;
    }
  }
  for (const Vec& lanes : spoilt_lanes) spoilt += reduce_add(lanes);
  if (!(spoilt == 0.0f)) return -1;
  for (std::int64_t i = best_block; i < count; ++i) {
    if (row[i] == best) return i;
  }
  return -1;
}

}  // namespace
