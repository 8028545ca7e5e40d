// Conversions between the types of the wire, which are also cache types: included after a vec_<isa>.h.
#pragma once

#include <string.h>

#include "kernels.h"

namespace {

// The first `count` values where fewer than Vec::width are left (8 of 16), else all.
template <class T>
Vec load_upto(const T* p, std::int64_t count) {
  if constexpr (Vec::width > 8) {
    if (count < Vec::width) return load_part(p, static_cast<int>(count));
  }
  return load(p);
}

template <class T>
void store_upto(T* p, Vec x, std::int64_t count) {
  if constexpr (Vec::width > 8) {
    if (count < Vec::width) return store_part(p, x, static_cast<int>(count));
  }
  store(p, x);
}

// Finite values that the target type cannot hold become its largest; infinities and NaN stay.
Vec fit(Vec x, const float*) { return x; }
Vec fit(Vec x, const Half*) { return saturate(x, kHalfMax); }
Vec fit(Vec x, const BFloat16*) { return saturate(x, kBFloat16Max); }

template <class S, class T>
void convert_values(const void* source, void* target, std::int64_t count) {
  const S* from = static_cast<const S*>(source);
  T* to = static_cast<T*>(target);
  for (std::int64_t i = 0; i < count; i += Vec::width) {
    store_upto(to + i, fit(load_upto(from + i, count - i), to), count - i);
  }
}

template <class T>
void copy_values(const void* source, void* target, std::int64_t count) {
  memcpy(target, source, static_cast<size_t>(count) * sizeof(T));
}

using Convert = void (*)(const void*, void*, std::int64_t);

// [source][target], in the order of DType
constexpr Convert kConversions[3][3] = {
    {copy_values<float>, convert_values<float, Half>, convert_values<float, BFloat16>},
    {convert_values<Half, float>, copy_values<Half>, convert_values<Half, BFloat16>},
    {convert_values<BFloat16, float>, convert_values<BFloat16, Half>, copy_values<BFloat16>},
};

void convert(const void* source, std::int32_t source_dtype, void* target, std::int32_t target_dtype,
             std::int64_t count) {
  kConversions[source_dtype][target_dtype](source, target, count);
}

std::int64_t wire_bytes(std::int32_t dtype) { return dtype == fastdecode::kFloat32 ? 4 : 2; }

}  // namespace
