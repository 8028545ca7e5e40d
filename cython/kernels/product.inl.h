// Products of the S-Part's rows with weights of 8 bits. Included after a vec_<isa>.h.
//
// The codes of a panel and group become values once for all rows of a block; then tiles of a few rows are multiplied,
// their sums in registers. Each output is the sum, over groups in their order, of sums over a group's
// inputs in their order, each product and sum rounded at once: its bits depend on its row and column alone, not on the
// other rows, on who computes what, or on the instruction set.
#pragma once

#include <string.h>

#include "layout.inl.h"

namespace {

constexpr int kOutVecs = 2;  // vectors of outputs of a tile
constexpr int kTileOut = kOutVecs * Vec::width;
constexpr int kTileRows = Vec::registers >= 32 ? 12 : Vec::registers >= 16 ? 6 : 2;

// `rows` [R][kPackedStride] times `weights` [count][kPanelOut], added to `out`; stored there for the first group.
template <int R>
void multiply_tile(const float* rows, const float* weights, std::int64_t count, float* out, std::int64_t out_stride,
                   bool is_first) {
  Vec sums[R][kOutVecs];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kOutVecs; ++v) sums[r][v] = broadcast(0.0f);
  }
  for (std::int64_t k = 0; k < count; ++k) {
    Vec w[kOutVecs];
#pragma GCC unroll 2
    for (int v = 0; v < kOutVecs; ++v) w[v] = load(weights + k * fastdecode::kPanelOut + v * Vec::width);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec x = broadcast(rows[r * kPackedStride + k]);
#pragma GCC unroll 2
      for (int v = 0; v < kOutVecs; ++v) sums[r][v] = fused(x, w[v], sums[r][v]);
    }
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
template <int R>
void multiply_rest(std::int64_t num_rows, const float* rows, const float* weights, std::int64_t count, float* out,
                   std::int64_t out_stride, bool is_first) {
  if (num_rows == R) return multiply_tile<R>(rows, weights, count, out, out_stride, is_first);
  if constexpr (R > 1) multiply_rest<R - 1>(num_rows, rows, weights, count, out, out_stride, is_first);
}

// One panel of one group, for all rows of a block.
void multiply_panel(const float* rows, std::int64_t num_rows, const float* weights, std::int64_t count, float* out,
                    std::int64_t out_stride, bool is_first) {
  for (int first = 0; first < fastdecode::kPanelOut; first += kTileOut) {
    std::int64_t r = 0;
    for (; r + kTileRows <= num_rows; r += kTileRows) {
      multiply_tile<kTileRows>(rows + r * kPackedStride, weights + first, count, out + r * out_stride + first,
                               out_stride, is_first);
    }
    multiply_rest<kTileRows - 1>(num_rows - r, rows + r * kPackedStride, weights + first, count,
                                 out + r * out_stride + first, out_stride, is_first);
  }
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
        multiply_panel(rows, num_rows, workspace, count, p.out + row * out_stride + panel * kOut, out_stride, k == 0);
      }
    }
  }
}

}  // namespace
