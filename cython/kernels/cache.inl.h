// Where things lie in a block of the KV cache (described in kernels.h), and how vectors of them are loaded.
// Included after a vec_<isa>.h.
#pragma once

#include "layout.inl.h"
#include "convert.inl.h"

namespace {

using fastdecode::kPanelTokens;
using fastdecode::kTileTokens;
using fastdecode::LayerView;

constexpr int kTilePanels = kTileTokens / kPanelTokens;
constexpr int kTileVecs = kTileTokens / Vec::width;

// Scales and minimums, by what they belong to.
template <class T>
struct Format {
  static constexpr bool has_scale = false, has_minimum = false;
};
template <>
struct Format<Int8> {
  static constexpr bool has_scale = true, has_minimum = false;
  using Scale = float;
};
template <>
struct Format<Int4> {
  static constexpr bool has_scale = true, has_minimum = true;
  using Scale = Half;
};

// Panels that hold the next tokens of a span. Unused ones repeat the last, so that they can be read.
struct Tile {
  int num_panels;
  int first, stop;                 // tokens in use, counted from the first panel's first
  const char* heads[kTilePanels];  // K of the KV head in the panel's block
  int panels[kTilePanels];         // index in the block

  int num_tokens() const { return num_panels * kPanelTokens; }
};

// Where the codes of a tile's panels lie; `part_bytes` is 0 for K.
struct Panels {
  const char* codes[kTilePanels];
  std::int64_t token_bytes;  // codes of one token

  Panels(const Tile& tile, std::int64_t part_bytes, std::int32_t dtype, int head_dim)
      : token_bytes(code_bytes(dtype, head_dim)) {
    for (int p = 0; p < kTilePanels; ++p) {
      codes[p] = tile.heads[p] + part_bytes + tile.panels[p] * kPanelTokens * token_bytes;
    }
  }
};

// K codes of Vec::width tokens: one run, or two of 8 where the vector has 16 lanes.
template <class T>
struct Column {
  const T *low, *high;
};

template <class T>
Column<T> column_of(const Panels& keys, int vec) {
  const auto panel = [&](int p) { return reinterpret_cast<const T*>(keys.codes[p]); };
  if constexpr (Vec::width > kPanelTokens) {
    return {panel(2 * vec), panel(2 * vec + 1)};
  } else {
    const T* tokens = panel(vec * Vec::width / kPanelTokens) + vec * Vec::width % kPanelTokens;
    return {tokens, tokens};
  }
}

template <class T>
Vec load_column(const Column<T>& column, std::int64_t offset) {
  if constexpr (Vec::width > kPanelTokens) {
    return load_halves(column.low + offset, column.high + offset);
  } else {
    return load(column.low + offset);
  }
}

template <class T>
Words load_column_words(const Column<T>& column, std::int64_t offset) {
  if constexpr (Vec::width > kPanelTokens) {
    return load_word_halves(column.low + offset, column.high + offset);
  } else {
    return load_words(column.low + offset);
  }
}

// Where the codes of [d, ...) begin in a row of V; for int4 those of d's group.
template <class T>
const T* codes_at(const T* row, int d) {
  return Format<T>::has_minimum ? row + d / kGroupDim * kGroupWords : row + d;
}

// Vector `index` after `codes_at`, of which `count` values are wanted; for int4 vector `index` of the group.
// Int4 codes come multiplied by `nibble_factor`.
template <class T>
Vec load_values(const T* codes, int index, int count) {
  if constexpr (!Format<T>::has_minimum) {
    return load_upto(codes + index * Vec::width, count);
  } else if constexpr (Vec::width > kGroupWords) {
    return nibble_pair(load_word_halves(codes, codes), index);
  } else {
    const int word = index * Vec::width % kGroupWords;
    return nibble(load_words(codes + word), index * Vec::width / kGroupWords);
  }
}

// By what `nibble` multiplies the code at `index` of a word.
constexpr float nibble_factor(int index) { return static_cast<float>(1 << 4 * index); }

// Copies eight scales into fp32.
template <class Scale>
void widen_scales(const Scale* source, float* target) {
  for (int t = 0; t < kPanelTokens; t += Vec::width) {
    store_upto(target + t, load_upto(source + t, kPanelTokens - t), kPanelTokens - t);
  }
}

// Puts 0 where a row [kTileTokens] has tokens that are not in use: their scales may be anything.
void clear_unused(const Tile& tile, float* row) {
  for (int t = 0; t < tile.first; ++t) row[t] = 0.0f;
  for (int t = tile.stop; t < kTileTokens; ++t) row[t] = 0.0f;
}

}  // namespace
