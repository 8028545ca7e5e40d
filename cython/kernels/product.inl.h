// Products of the S-Part's rows with weights, which are floats or codes of 8 bits. Included after a vec_<isa>.h.
//
// Tiles of a few rows are multiplied with a panel of weights, their sums in registers, a group of inputs at a time;
// codes become values once for all rows of a block. Each output is the sum, over groups in their order, of sums over a
// group's inputs in their order, each product and sum rounded at once: its bits depend on its row and column alone, not
// on the other rows, on who computes what, or on the instruction set. Where the processor multiplies pairs of bfloat16
// (`kHasPairProducts`), products of such rows round as it does.
#pragma once

#include <string.h>

#include "convert.inl.h"
#include "layout.inl.h"

namespace {

constexpr int kOutVecs = 2;  // vectors of outputs of a tile
constexpr int kTileOut = kOutVecs * Vec::width;
constexpr int kTileRows = Vec::registers >= 32 ? 12 : Vec::registers >= 16 ? 6 : 2;
constexpr int kWideTileRows = Vec::registers >= 32 ? 12 : Vec::registers >= 16 ? 4 : 2;  // beside twice the weights
constexpr int kAhead = 16;  // steps between what is multiplied and what is fetched into the cache

#ifdef __AVX512BF16__
constexpr bool kHasPairProducts = true;
#else
constexpr bool kHasPairProducts = false;
#endif

// A step of a tile: what rows and weights are, how many rows' sums fit in the registers, and how one or two inputs of
// all rows are multiplied with kTileOut outputs and added.
struct FloatStep {
  using Row = float;
  using Weight = float;
  static constexpr int inputs = 1, tile_rows = kTileRows;

  template <int R>
  static void add_to(Vec (&sums)[R][kOutVecs], const float* rows, std::int64_t stride, const float* weights) {
    Vec w[kOutVecs];
#pragma GCC unroll 2
    for (int v = 0; v < kOutVecs; ++v) w[v] = load(weights + v * Vec::width);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec x = broadcast(rows[r * stride]);
#pragma GCC unroll 2
      for (int v = 0; v < kOutVecs; ++v) sums[r][v] = fused(x, w[v], sums[r][v]);
    }
  }
};

// Two bfloat16 weights of each output, with rows of float.
struct WidePairStep {
  using Row = float;
  using Weight = BFloat16;
  static constexpr int inputs = 2, tile_rows = kWideTileRows;

  template <int R>
  static void add_to(Vec (&sums)[R][kOutVecs], const float* rows, std::int64_t stride, const BFloat16* weights) {
    Vec low[kOutVecs], high[kOutVecs];
#pragma GCC unroll 2
    for (int v = 0; v < kOutVecs; ++v) {
      const Vec pairs = load(reinterpret_cast<const float*>(weights) + v * Vec::width);
      low[v] = low_of_pair(pairs);
      high[v] = high_of_pair(pairs);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec first = broadcast(rows[r * stride]), second = broadcast(rows[r * stride + 1]);
#pragma GCC unroll 2
      for (int v = 0; v < kOutVecs; ++v) sums[r][v] = fused(second, high[v], fused(first, low[v], sums[r][v]));
    }
  }
};

#ifdef __AVX512BF16__
// 32 bits as they are.
float read_lane(const void* p) {
  float lane;
  memcpy(&lane, p, sizeof lane);
  return lane;
}

struct PairStep {
  using Row = BFloat16;
  using Weight = BFloat16;
  static constexpr int inputs = 2, tile_rows = kTileRows;

  template <int R>
  static void add_to(Vec (&sums)[R][kOutVecs], const BFloat16* rows, std::int64_t stride, const BFloat16* weights) {
    Vec w[kOutVecs];
#pragma GCC unroll 2
    for (int v = 0; v < kOutVecs; ++v) w[v] = load(reinterpret_cast<const float*>(weights) + v * Vec::width);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec x = broadcast(read_lane(rows + r * stride));
#pragma GCC unroll 2
      for (int v = 0; v < kOutVecs; ++v) sums[r][v] = add_pair_product(sums[r][v], w[v], x);
    }
  }
};
#endif

// `count` inputs of R rows, added to `out` [R][kTileOut], or stored there for the first group. The weights of an input
// lie next to each other, kPanelOut of them.
template <class Step, int R>
void multiply_tile(const typename Step::Row* rows, std::int64_t stride, const typename Step::Weight* weights,
                   std::int64_t count, float* out, std::int64_t out_stride, bool is_first) {
  Vec sums[R][kOutVecs];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kOutVecs; ++v) sums[r][v] = broadcast(0.0f);
  }
  for (std::int64_t k = 0; k < count; k += Step::inputs) {
    const typename Step::Weight* at = weights + k * fastdecode::kPanelOut;
    const char* later = reinterpret_cast<const char*>(at + kAhead * Step::inputs * fastdecode::kPanelOut);
    for (int line = 0; line < kTileOut * 4; line += kLineBytes) __builtin_prefetch(later + line);
    Step::template add_to<R>(sums, rows + k, stride, at);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kOutVecs; ++v) {
      float* target = out + r * out_stride + v * Vec::width;
      store(target, is_first ? sums[r][v] : add(load(target), sums[r][v]));
    }
  }
}

// The rows that are left over, fewer than R + 1.
template <class Step, int R>
void multiply_rest(std::int64_t num_rows, const typename Step::Row* rows, std::int64_t stride,
                   const typename Step::Weight* weights, std::int64_t count, float* out, std::int64_t out_stride,
                   bool is_first) {
  if (num_rows == R) return multiply_tile<Step, R>(rows, stride, weights, count, out, out_stride, is_first);
  if constexpr (R > 1) {
    multiply_rest<Step, R - 1>(num_rows, rows, stride, weights, count, out, out_stride, is_first);
  }
}

// One panel of one group, for all rows of a block.
template <class Step>
void multiply_panel(const typename Step::Row* rows, std::int64_t stride, std::int64_t num_rows,
                    const typename Step::Weight* weights, std::int64_t count, float* out, std::int64_t out_stride,
                    bool is_first) {
  constexpr int kRows = Step::tile_rows;
  for (int first = 0; first < fastdecode::kPanelOut; first += kTileOut) {
    const typename Step::Weight* w = weights + first * Step::inputs;
    std::int64_t r = 0;
    for (; r + kRows <= num_rows; r += kRows) {
      multiply_tile<Step, kRows>(rows + r * stride, stride, w, count, out + r * out_stride + first, out_stride,
                                 is_first);
    }
    multiply_rest<Step, kRows - 1>(num_rows - r, rows + r * stride, stride, w, count, out + r * out_stride + first,
                                   out_stride, is_first);
  }
}

// Sums of a panel [num_rows][kPanelOut], with the bias of its outputs, to the first `columns` columns of `out`.
template <class T>
void store_panel(const float* sums, std::int64_t num_rows, const float* bias, T* out, std::int64_t out_stride,
                 std::int64_t columns) {
  constexpr int kOut = fastdecode::kPanelOut;
  const bool is_full = columns >= kOut;
  float added[kOut] = {};
  if (bias) memcpy(added, bias, static_cast<size_t>(is_full ? kOut : columns) * sizeof(float));
  for (std::int64_t r = 0; r < num_rows; ++r, sums += kOut, out += out_stride) {
    T part[kOut];
    T* target = is_full ? out : part;
    for (int i = 0; i < kOut; i += Vec::width) {
      const Vec x = load(sums + i);
      store(target + i, bias ? add(x, load(added + i)) : x);
    }
    if (!is_full) memcpy(out, part, static_cast<size_t>(columns) * sizeof(T));
  }
}

// Where unit u lies: kProductBlocks blocks of rows follow each other with one panel, which a cache then holds.
struct UnitPlace {
  std::int64_t block, panel;

  UnitPlace(std::int64_t unit, std::int64_t num_blocks, std::int64_t num_panels) {
    const std::int64_t first = unit / (kBlocks * num_panels) * kBlocks;
    const std::int64_t blocks = num_blocks - first < kBlocks ? num_blocks - first : kBlocks;
    const std::int64_t place = unit - first * num_panels;
    block = first + place % blocks;
    panel = place / blocks;
  }

  static constexpr std::int64_t kBlocks = fastdecode::kProductBlocks;
};

template <class Step, class T>
void multiply_units(const fastdecode::Product& p, std::int64_t first_unit, std::int64_t last_unit) {
  constexpr std::int64_t kOut = fastdecode::kPanelOut, kIn = fastdecode::kProductIn;
  const std::int64_t num_blocks = (p.num_rows + p.block_rows - 1) / p.block_rows;
  const std::int64_t num_panels = (p.num_out + kOut - 1) / kOut;
  alignas(64) float sums[fastdecode::kProductRows * kOut];
  for (std::int64_t unit = first_unit; unit < last_unit; ++unit) {
    const UnitPlace at(unit, num_blocks, num_panels);
    const std::int64_t row = at.block * p.block_rows, out = at.panel * kOut;
    const std::int64_t num_rows = p.num_rows - row < p.block_rows ? p.num_rows - row : p.block_rows;
    const auto* rows = static_cast<const typename Step::Row*>(p.rows) + row * p.row_stride;
    const auto* weights = static_cast<const typename Step::Weight*>(p.weights) + out * p.num_in;
    for (std::int64_t k = 0; k < p.num_in; k += kIn) {
      const std::int64_t count = p.num_in - k < kIn ? p.num_in - k : kIn;
      multiply_panel<Step>(rows + k, p.row_stride, num_rows, weights + k * kOut, count, sums, kOut, k == 0);
    }
    store_panel(sums, num_rows, p.bias ? p.bias + out : nullptr, static_cast<T*>(p.out) + row * p.num_out + out,
                p.num_out, p.num_out - out);
  }
}

template <class Step>
void multiply_by(const fastdecode::Product& p, std::int64_t first_unit, std::int64_t last_unit) {
  if (p.out_dtype == fastdecode::kFloat32) return multiply_units<Step, float>(p, first_unit, last_unit);
  multiply_units<Step, BFloat16>(p, first_unit, last_unit);
}

void multiply(const fastdecode::Product& p, std::int64_t first_unit, std::int64_t last_unit) {
  if (p.weight_dtype == fastdecode::kFloat32) return multiply_by<FloatStep>(p, first_unit, last_unit);
#ifdef __AVX512BF16__
  if (p.row_dtype == fastdecode::kBFloat16) return multiply_by<PairStep>(p, first_unit, last_unit);
#endif
  multiply_by<WidePairStep>(p, first_unit, last_unit);
}

// Values of one panel of one group, [count][kPanelOut]; scales and offsets lie `stride` apart.
void widen_codes(const std::int8_t* codes, const float* scales, const float* offsets, std::int64_t stride,
                 std::int64_t count, float* weights) {
  constexpr int kVecs = fastdecode::kPanelOut / Vec::width;
  const Int8* from = reinterpret_cast<const Int8*>(codes);
  for (std::int64_t first = 0; first < count; first += fastdecode::kScaleIn, scales += stride, offsets += stride) {
    Vec scale[kVecs], offset[kVecs];
    for (int v = 0; v < kVecs; ++v) {
      scale[v] = load(scales + v * Vec::width);
      offset[v] = load(offsets + v * Vec::width);
    }
    const std::int64_t stop = first + fastdecode::kScaleIn < count ? first + fastdecode::kScaleIn : count;
    for (std::int64_t k = first; k < stop; ++k) {
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) {
        const std::int64_t at = k * fastdecode::kPanelOut + v * Vec::width;
        store(weights + at, add(mul(load(from + at), scale[v]), offset[v]));
      }
    }
  }
}

void multiply_int8(const fastdecode::Int8Product& p, std::int64_t first_panel, std::int64_t last_panel,
                   float* workspace) {
  constexpr std::int64_t kOut = fastdecode::kPanelOut, kIn = fastdecode::kGroupIn, kRows = fastdecode::kRowBlock;
  float* rows = workspace + kIn * kOut;
  const std::int64_t out_stride = p.num_panels * kOut;
  for (std::int64_t row = 0; row < p.num_rows; row += kRows) {
    const std::int64_t num_rows = p.num_rows - row < kRows ? p.num_rows - row : kRows;
    for (std::int64_t k = 0; k < p.num_in; k += kIn) {
      const std::int64_t count = p.num_in - k < kIn ? p.num_in - k : kIn;
      for (std::int64_t r = 0; r < num_rows; ++r) {
        memcpy(rows + r * kPackedStride, p.rows + (row + r) * p.row_stride + k,
               static_cast<size_t>(count) * sizeof(float));
      }
      for (std::int64_t panel = first_panel; panel < last_panel; ++panel) {
        const std::int64_t scale = (k / fastdecode::kScaleIn * p.num_panels + panel) * kOut;
        widen_codes(p.codes + (k * p.num_panels + panel * count) * kOut, p.scales + scale, p.offsets + scale,
                    out_stride, count, workspace);
        multiply_panel<FloatStep>(rows, kPackedStride, num_rows, workspace, count,
                                  p.out + row * out_stride + panel * kOut, out_stride, k == 0);
      }
    }
  }
}

}  // namespace
