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

// How a type's values come about.
template <class T>
struct Format {
  static constexpr bool is_quantised = false, has_minimum = false;
};
template <>
struct Format<Int8> {
  static constexpr bool is_quantised = true, has_minimum = false;
  using Scale = float;
};
template <>
struct Format<Int4> {
  static constexpr bool is_quantised = true, has_minimum = true;
  using Scale = Half;
};

// Codes, or words of codes, of quantised types lie in pairs.
template <class T>
constexpr int items_together = Format<T>::is_quantised ? 2 : 1;

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

// K of Vec::width tokens: one run, or two of 8 where the vector has 16 lanes.
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
    const T* tokens = panel(vec * Vec::width / kPanelTokens) + vec * Vec::width % kPanelTokens * items_together<T>;
    return {tokens, tokens};
  }
}

// Row `row` of the column: of values, or of pairs.
template <class T>
auto load_column(const Column<T>& column, std::int64_t row) {
  const std::int64_t offset = row * kPanelTokens * items_together<T>;
  if constexpr (Vec::width > kPanelTokens) {
    if constexpr (Format<T>::is_quantised) {
      return load_pair_halves(column.low + offset, column.high + offset);
    } else {
      return load_halves(column.low + offset, column.high + offset);
    }
  } else if constexpr (Format<T>::is_quantised) {
    return load_pairs(column.low + offset);
  } else {
    return load(column.low + offset);
  }
}

// Vector `index` of two tokens' V from `codes` on, of which `count` lanes are wanted; of int4 from the words of one
// group on.
template <class T>
Pairs load_value_pairs(const T* codes, int index, int count) {
  if constexpr (!Format<T>::has_minimum) {
    const T* first = codes + 2 * index * Vec::width;
    if constexpr (Vec::width > 8) {
      if (count < Vec::width) return load_pairs_part(first, count);
    }
    return load_pairs(first);
  } else if constexpr (Vec::width > kGroupWords) {
    return nibbles_twice(codes, index);
  } else {
    const T* words = codes + 2 * (index * Vec::width % kGroupWords);
    return nibbles(load_pairs(words), index * Vec::width / kGroupWords);
  }
}

// How many panels from `first` on follow each other in the same block.
int panels_of_block(const Tile& tile, int first) {
  int stop = first + 1;
  while (stop < tile.num_panels && tile.heads[stop] == tile.heads[first]) ++stop;
  return stop - first;
}

// Copies the scales of some panels' tokens into fp32.
template <class Scale>
void widen_scales(const Scale* source, float* target, int num_panels) {
  const int count = num_panels * kPanelTokens;
  for (int t = 0; t < count; t += Vec::width) store_upto(target + t, load_upto(source + t, count - t), count - t);
}

// Puts 0 where a row [kTileTokens] has tokens that are not in use: their scales may be anything.
void clear_unused(const Tile& tile, float* row) {
  for (int t = 0; t < tile.first; ++t) row[t] = 0.0f;
  for (int t = tile.stop; t < kTileTokens; ++t) row[t] = 0.0f;
}

}  // namespace
