// The store of K and V into the cache, quantised on the way where the cache's type says so: included after a
// vec_<isa>.h. Codes and scales are the same bits on every instruction set.
#pragma once

#include <string.h>

#include "cache.inl.h"

namespace {

using fastdecode::kMaxHeadDim;
using fastdecode::StoreArgs;

// Where one token goes, in one part of one KV head's block.
struct Place {
  int panel, lane;  // lane: of the token in its panel
};

// In what follows x may be read up to a whole number of vectors: `pad_row` repeats the last value there.

// The largest of |x|, by d.
Vec largest_magnitude(const float* x, int count) {
  Vec largest = broadcast(0.0f);
  for (int d = 0; d < count; d += Vec::width) largest = max(abs(load(x + d)), largest);
  return largest;
}

// 0, or NaN where any of the values is infinite or NaN: added to a scale, it makes the whole group NaN.
float poison(const float* x, int count) {
  Vec sum = broadcast(0.0f);
  for (int d = 0; d < count; d += Vec::width) sum = fma(load(x + d), broadcast(0.0f), sum);
  return reduce_add(sum);
}

// 1 / scale; 0 where the scale is too small for it, as all codes are 0 then.
float inverse_of(float scale) { return scale > 1e-30f ? 1.0f / scale : 0.0f; }

// Codes of `count` values: (x - least) * inverse, from `lowest` to `highest`, to the nearest integer, to even; 0 up to
// a whole number of vectors.
void round_codes(const float* x, int count, float least, float inverse, float lowest, float highest,
                 std::int16_t* codes) {
  const Vec zero = broadcast(0.0f);
  for (int d = 0; d < count; d += Vec::width) {
    const Vec exact = mul(sub(load(x + d), broadcast(least)), broadcast(inverse));
    const Vec negated = sub(zero, max(exact, broadcast(lowest)));
    store_rounded(codes + d, sub(zero, max(negated, broadcast(-highest))));
  }
  for (int d = count; d % Vec::width != 0; ++d) codes[d] = 0;
}

// Symmetric, one scale for the row.
float quantise(const float* x, int head_dim, std::int16_t* codes) {
  const float scale = reduce_max(largest_magnitude(x, head_dim)) / 127.0f, inverse = inverse_of(scale);
  round_codes(x, head_dim, 0.0f, inverse, -127.0f, 127.0f, codes);
  return (inverse == 0.0f ? 0.0f : scale) + poison(x, head_dim);
}

struct GroupScale {
  Half scale, minimum;
};

// The 16-bit form of a float, and back, as the cache rounds it.
Half round_half(float x) {
  float wide[8] = {x};
  Half halves[8];
  convert(wide, fastdecode::kFloat32, halves, fastdecode::kFloat16, 8);
  return halves[0];
}
float widen(Half x) {
  Half halves[8] = {x};
  float wide[8];
  convert(halves, fastdecode::kFloat16, wide, fastdecode::kFloat32, 8);
  return wide[0];
}

// From minimum to maximum in 15 steps.
GroupScale quantise_group(const float* x, int count, std::int16_t* codes) {
  Vec highest = broadcast(kHalfMax * -1.0f), lowest = highest;
  for (int d = 0; d < count; d += Vec::width) {
    const Vec value = load(x + d);
    highest = max(value, highest);
    lowest = max(sub(broadcast(0.0f), value), lowest);
  }
  const Half minimum = round_half(-reduce_max(lowest));
  const float least = widen(minimum), invalid = poison(x, count);
  const Half scale = round_half((reduce_max(highest) - least) / 15.0f + invalid);
  round_codes(x, count, least, inverse_of(widen(scale)), 0.0f, 15.0f, codes);
  return {scale, minimum};
}

template <class T>
void write_codes(T* panel, const T* codes, int head_dim, int lane, bool is_key) {
  if (!is_key) {
    memcpy(panel + std::int64_t{lane} * head_dim, codes, sizeof(T) * head_dim);
    return;
  }
  for (int d = 0; d < head_dim; ++d) panel[d * kPanelTokens + lane] = codes[d];
}

// Quantised items of one token, into its panel: of K in pairs of items, of V in pairs of tokens.
template <class T>
void write_items(T* panel, const T* items, int count, int lane, bool is_key) {
  if (is_key) {
    T* target = panel + 2 * lane;
    for (int i = 0; i < count; i += 2, target += 2 * kPanelTokens) memcpy(target, items + i, 2 * sizeof(T));
  } else {
    T* target = panel + std::int64_t{lane / 2} * count * 2 + lane % 2;
    for (int i = 0; i < count; ++i) target[2 * i] = items[i];
  }
}

void write_codes(Int8* panel, const std::int16_t* codes, int head_dim, int lane, bool is_key) {
  Int8 items[kMaxHeadDim];
  for (int d = 0; d < head_dim; ++d) items[d].code = static_cast<std::int8_t>(codes[d]);
  write_items(panel, items, head_dim, lane, is_key);
}

void write_codes(Int4* panel, const std::int16_t* codes, int head_dim, int lane, bool is_key) {
  Int4 words[kMaxHeadDim / 4];
  const int num_words = num_groups(head_dim) * kGroupWords;
  const auto join = [&](Int4& word, const std::int16_t* first, int step) {
    word.codes = static_cast<std::uint16_t>(first[0] | first[step] << 4 | first[2 * step] << 8 | first[3 * step] << 12);
  };
  if (is_key) {
    for (int i = 0; i < num_words; ++i) join(words[i], codes + 4 * i, 1);
  } else {
    for (int g = 0; g < num_words; g += kGroupWords) {
      for (int i = 0; i < kGroupWords; ++i) join(words[g + i], codes + 4 * g + i, kGroupWords);
    }
  }
  write_items(panel, words, num_words, lane, is_key);
}

void pad_row(float* values, int head_dim) {
  for (int d = head_dim; d % Vec::width != 0; ++d) values[d] = values[head_dim - 1];
}

// One token's K or V of one KV head, from the wire's type.
template <class T>
void store_head(char* part, const LayerView& layer, Place place, const char* source, std::int32_t wire_dtype,
                bool is_key) {
  const int head_dim = layer.head_dim;
  const std::int64_t token_bytes = code_bytes(dtype_of<T>, head_dim);
  T* panel = reinterpret_cast<T*>(part + place.panel * kPanelTokens * token_bytes);
  if constexpr (!Format<T>::is_quantised) {
    T codes[kMaxHeadDim];
    convert(source, wire_dtype, codes, dtype_of<T>, head_dim);
    write_codes(panel, codes, head_dim, place.lane, is_key);
  } else {
    float values[kMaxHeadDim];
    convert(source, wire_dtype, values, fastdecode::kFloat32, head_dim);
    pad_row(values, head_dim);
    using Scale = typename Format<T>::Scale;
    Scale* scales =
        reinterpret_cast<Scale*>(part + layer.block_size * token_bytes) + place.panel * kPanelTokens + place.lane;
    std::int16_t codes[kMaxHeadDim + Vec::width] = {};  // 0 beyond head_dim
    if constexpr (Format<T>::has_minimum) {
      const int groups = num_groups(head_dim);
      for (int g = 0; g < groups; ++g) {
        const int d = g * kGroupDim, count = head_dim - d < kGroupDim ? head_dim - d : kGroupDim;
        const GroupScale group = quantise_group(values + d, count, codes + d);
        scales[g * layer.block_size] = group.scale;
        scales[(groups + g) * layer.block_size] = group.minimum;
      }
    } else {
      *scales = quantise(values, head_dim, codes);
    }
    write_codes(panel, codes, head_dim, place.lane, is_key);
  }
}

using StoreHead = void (*)(char*, const LayerView&, Place, const char*, std::int32_t, bool);

// In the order of DType.
constexpr StoreHead kStores[5] = {store_head<float>, store_head<Half>, store_head<BFloat16>, store_head<Int8>,
                                  store_head<Int4>};

// Asks for the lines that one token's K or V goes to. A token of K has items in every line of its panel.
void fetch_target(const char* part, const LayerView& layer, Place place, std::int32_t dtype, bool is_key) {
  const std::int64_t codes = code_bytes(dtype, layer.head_dim), scales = scale_bytes(dtype, layer.head_dim);
  const int lanes = is_key ? kPanelTokens : scales ? 2 : 1;  // tokens that lie together
  const char* first = part + (place.panel * kPanelTokens + place.lane / lanes * lanes) * codes;
  for (std::int64_t i = 0; i < lanes * codes; i += kLineBytes) __builtin_prefetch(first + i, 1);
  const char* first_scale = part + layer.block_size * codes;
  for (std::int64_t i = 0; i < layer.block_size * scales; i += kLineBytes) __builtin_prefetch(first_scale + i, 1);
}

void store_row(const StoreArgs& args, std::int64_t row) {
  const auto& layer = args.layer;
  const std::int64_t block = args.places[row] / layer.block_size;
  const int token = static_cast<int>(args.places[row] % layer.block_size);
  const Place place = {token / kPanelTokens, token % kPanelTokens};
  const std::int64_t head_bytes = layer.head_dim * wire_bytes(args.wire_dtype);
  const char* source = args.rows + row * args.row_bytes;
  char* block_keys = layer.keys + block * layer.block_bytes;
  for (int part = 0; part < 2; ++part) {  // K, V
    const std::int32_t dtype = part ? layer.value_dtype : layer.key_dtype;
    char* target = block_keys + part * layer.value_bytes;
    for (int head = 0; head < args.num_kv_heads; ++head, target += layer.head_bytes, source += head_bytes) {
      if (head + 1 < args.num_kv_heads) fetch_target(target + layer.head_bytes, layer, place, dtype, part == 0);
      kStores[dtype](target, layer, place, source, args.wire_dtype, part == 0);
    }
  }
}

}  // namespace
