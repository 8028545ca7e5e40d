// The arithmetic of one tile whose K or V is quantised: codes times queries, and weights times codes, in integers.
// Queries and weights are rounded to 16 bits (fixed point, relative to the largest of them); a product of codes is two
// multiplications and an addition in one instruction, and no code is ever made a float. Included after a vec_<isa>.h.
#pragma once

#include "attention_tile.inl.h"

namespace {

constexpr float kFixedMax = 32767.0f;

// 16-bit integers in units of `unit`, which is NaN where a value is infinite or NaN.
struct Unit {
  float unit, inverse;
};

// For values up to `largest`; `invalid` is 0 or NaN. Values of a largest that no float divides are 0.
Unit unit_for(float largest, float invalid) {
  const float unit = largest / kFixedMax;
  const bool is_normal = unit >= __FLT_MIN__;
  return {(is_normal ? unit : 0.0f) + invalid, is_normal ? 1.0f / unit : 0.0f};
}

// The queries of a run of heads, for K of a quantised type.
struct QuantisedQueries {
  const std::int16_t* codes;  // [heads, head_dim] in the order in which pairs are multiplied
  const float* units;         // [heads]
  const float* sums;          // [heads, groups] of the queries over groups, for int4

  QuantisedQueries from(int head, int head_dim) const {
    return {codes + head * head_dim, units + head, sums + head * num_groups(head_dim)};
  }
};

// fp32 copies of the scales and minimums of one tile, [num_groups, kTileTokens] each.
struct TileScales {
  const float *scales, *minimums;
};

template <int heads, int vecs>
struct IntegerSums {
  Sum at[heads][vecs];

  IntegerSums() {
#pragma GCC unroll 4
    for (int h = 0; h < heads; ++h) {
#pragma GCC unroll 8
      for (int v = 0; v < vecs; ++v) at[h][v] = zero_sum();
    }
  }
  // Adds the products of vectors of pairs with a pair of each head's, `stride` apart.
  __attribute__((always_inline)) void add_products(const Pairs (&x)[vecs], const std::int16_t* pair, int stride) {
#pragma GCC unroll 4
    for (int h = 0; h < heads; ++h) {
      const Pairs y = broadcast_pair(pair + h * stride);
#pragma GCC unroll 8
      for (int v = 0; v < vecs; ++v) at[h][v] = add_dot(at[h][v], x[v], y);
    }
  }
};

template <int heads, int vecs>
void score_columns(const QuantisedQueries& queries, int head_dim, const Column<Int8>* columns, TileScales scales,
                   float* scores, Fetcher& fetch) {
  IntegerSums<heads, vecs> sums;
  for (std::int64_t row = 0; row < head_dim / 2; row += 4) {
    for (int i = 0; i < fetches_in_eight<Int8>(heads, vecs); ++i) fetch();
#pragma GCC unroll 4
    for (int e = 0; e < 4; ++e) {
      Pairs keys[vecs];
#pragma GCC unroll 8
      for (int v = 0; v < vecs; ++v) keys[v] = load_column(columns[v], row + e);
      sums.add_products(keys, queries.codes + 2 * (row + e), head_dim);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < heads; ++h) {
#pragma GCC unroll 8
    for (int v = 0; v < vecs; ++v) {
      const Vec unit = mul(load(scales.scales + v * Vec::width), broadcast(queries.units[h]));
      store(scores + h * kTileTokens + v * Vec::width, mul(to_float(sums.at[h][v]), unit));
    }
  }
}

// Each group's sum of codes gets its scale, and its minimum the sum of the query over the group.
template <int heads, int vecs>
void score_columns(const QuantisedQueries& queries, int head_dim, const Column<Int4>* columns, TileScales scales,
                   float* scores, Fetcher& fetch) {
  const int groups = num_groups(head_dim);
  for (int g = 0; g < groups; ++g) {
    IntegerSums<heads, vecs> sums;
    const std::int64_t first = g * kGroupDim / 8, rows = head_dim / 8 - first;
    for (std::int64_t row = first; row < first + (rows < kGroupDim / 8 ? rows : kGroupDim / 8); ++row) {
      for (int i = 0; i < fetches_in_eight<Int4>(heads, vecs); ++i) fetch();
      Pairs words[vecs];
#pragma GCC unroll 8
      for (int v = 0; v < vecs; ++v) words[v] = load_column(columns[v], row);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        Pairs keys[vecs];
#pragma GCC unroll 8
        for (int v = 0; v < vecs; ++v) keys[v] = nibbles(words[v], i);
        sums.add_products(keys, queries.codes + 8 * row + 2 * i, head_dim);
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < heads; ++h) {
      const Vec query_sum = broadcast(queries.sums[h * groups + g]), unit = broadcast(queries.units[h]);
#pragma GCC unroll 8
      for (int v = 0; v < vecs; ++v) {
        float* score = scores + h * kTileTokens + v * Vec::width;
        const int at = g * kTileTokens + v * Vec::width;
        const Vec least = mul(query_sum, load(scales.minimums + at));
        const Vec codes = mul(to_float(sums.at[h][v]), unit);
        const Vec group_score = fma(codes, load(scales.scales + at), least);
        store(score, g ? add(load(score), group_score) : group_score);
      }
    }
  }
}

// Rounds one head's weights of a tile times the scales of V to 16 bits; 0 where tokens are not in use.
// Returns their unit.
float round_weights(const float* weights, const float* scales, std::int16_t* codes) {
  Vec products[kTileVecs], largest = broadcast(0.0f), invalid = broadcast(0.0f);
#pragma GCC unroll 8
  for (int v = 0; v < kTileVecs; ++v) {
    products[v] = mul(load(weights + v * Vec::width), load(scales + v * Vec::width));
    largest = max(products[v], largest);
    invalid = fma(products[v], broadcast(0.0f), invalid);
  }
  const Unit unit = unit_for(reduce_max(largest), reduce_add(invalid));
#pragma GCC unroll 8
  for (int v = 0; v < kTileVecs; ++v) {
    store_rounded(codes + v * Vec::width, mul(products[v], broadcast(unit.inverse)));
  }
  return unit.unit;
}

// acc[h, d:d+n] = acc[h, d:d+n] * factors[h] + units[h] * weights[h] . codes[:, d:d+n] for a strip of n = `vecs`
// vectors; weights are kTileTokens a head. `fetch` runs for every panel.
template <int heads, int vecs, class T>
void add_strip(const Tile& tile, const Panels& values, const std::int16_t* weights, const float* units,
               const float* factors, int d, int count, int head_dim, float* acc, Fetcher& fetch) {
  IntegerSums<heads, vecs> sums;
  const std::int64_t pair_items = 2 * values.token_bytes / std::int64_t{sizeof(T)};
  const std::int64_t first_item = Format<T>::has_minimum ? 2 * (d / kGroupDim) * kGroupWords : 2 * d;
  const int first_vec = Format<T>::has_minimum ? d % kGroupDim / Vec::width : 0;
  for (int p = 0; p < tile.num_panels; ++p) {
    const T* codes = reinterpret_cast<const T*>(values.codes[p]) + first_item;
#pragma GCC unroll 4
    for (int pair = 0; pair < kPanelTokens / 2; ++pair) {
      if (2 * pair % (8 / fetches_in_eight<T>(heads, vecs)) == 0) fetch();
      Pairs x[vecs];
#pragma GCC unroll 8
      for (int i = 0; i < vecs; ++i) x[i] = load_value_pairs(codes + pair * pair_items, first_vec + i, count);
      sums.add_products(x, weights + p * kPanelTokens + 2 * pair, kTileTokens);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < heads; ++h) {
    const Vec factor = broadcast(factors[h]), unit = broadcast(units[h]);
#pragma GCC unroll 8
    for (int i = 0; i < vecs; ++i) {
      float* target = acc + h * head_dim + d + i * Vec::width;
      const Vec before = mul(load_upto(target, count), factor);
      store_upto(target, fma(to_float(sums.at[h][i]), unit, before), count);
    }
  }
}

}  // namespace
