// The arithmetic of one tile of tokens: scores, softmax weights, weighted sum of V. Included after a vec_<isa>.h.
// Loops over heads, tokens and vectors have constant bounds, so that all sums live in registers.
#pragma once

#include <string.h>

#include "convert.inl.h"

namespace {

using fastdecode::kTileTokens;

constexpr float kNegInf = -__builtin_inff();

// exp(x) for x <= 0, to about 1e-7; exactly 0 below -87.3, NaN stays NaN. Cephes' polynomial.
Vec exp_nonpositive(Vec x) {
  constexpr float lowest = -87.3365f;  // ln of the smallest normal float
  const Vec t = fma(x, broadcast(1.44269504f), broadcast(kRoundMagic));
  const Vec n = sub(t, broadcast(kRoundMagic));
  Vec r = fma(n, broadcast(-0.693359375f), x);  // ln 2 in two parts: n * the first is exact
  r = fma(n, broadcast(2.12194440e-4f), r);
  Vec p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), broadcast(1.0f));
  return zero_below(x, lowest, mul(p, exp2_from_magic(t)));
}

float exp_nonpositive(float x) { return reduce_max(exp_nonpositive(broadcast(x))); }

// What exponents are taken relative to: the largest score, or 0 where all scores are -inf.
float exp_base(float largest) { return largest == kNegInf ? 0.0f : largest; }

template <int count>
struct Count {
  static constexpr int value = count;
};

// Whether `heads` x 4 sums leave registers for what is added to them.
constexpr bool four_fit(int heads) { return heads * 4 + 4 <= Vec::registers; }

// Query heads of the next run that shares its loads of K and V: 4 where registers are plenty. With 16 of them
// runs of 3 are faster, but one of 4 beats 3 + 1.
constexpr int head_run(int left) {
  const int most = four_fit(4) || left == 4 ? 4 : 3;
  return left < most ? left : most;
}

// Calls f(Count<n>, first) for runs of n <= 4 heads.
template <class F>
void for_head_runs(int num_heads, F f) {
  for (int head = 0; head < num_heads; head += head_run(num_heads - head)) {
    switch (head_run(num_heads - head)) {
      case 4:
        f(Count<4>{}, head);
        break;
      case 3:
        f(Count<3>{}, head);
        break;
      case 2:
        f(Count<2>{}, head);
        break;
      default:
        f(Count<1>{}, head);
    }
  }
}

void prefetch(const void* row, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(row) + i);
}

template <class T>
const T* value_of(const T* key, std::int64_t value_bytes) {
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(key) + value_bytes);
}

// scores[h, t] = queries[h] . keys[t] for `heads` heads and `tokens` tokens (2 or 4).
template <int heads, int tokens, class T>
void score_tokens(const float* queries, const T* const* keys, int head_dim, float* scores) {
  Vec sums[heads][tokens];
#pragma GCC unroll 4
  for (int h = 0; h < heads; ++h) {
#pragma GCC unroll 4
    for (int t = 0; t < tokens; ++t) sums[h][t] = broadcast(0.0f);
  }
  const auto step = [&](int d, int count) __attribute__((always_inline)) {
    Vec query[heads];
#pragma GCC unroll 4
    for (int h = 0; h < heads; ++h) query[h] = load_upto(queries + h * head_dim + d, count);
#pragma GCC unroll 4
    for (int t = 0; t < tokens; ++t) {
      const Vec key = load_upto(keys[t] + d, count);
#pragma GCC unroll 4
      for (int h = 0; h < heads; ++h) sums[h][t] = fma(query[h], key, sums[h][t]);
    }
  };
  int d = 0;
  for (; d + Vec::width <= head_dim; d += Vec::width) step(d, Vec::width);
  if constexpr (Vec::width > 8) {
    if (d < head_dim) step(d, head_dim - d);
  }
  // Four horizontal sums at a time: of 4 tokens, or of 2 tokens and 2 heads.
  constexpr int heads_at_once = 4 / tokens;
#pragma GCC unroll 4
  for (int h = 0; h < heads; h += heads_at_once) {
    float four[4];
    const int other = h + heads_at_once - 1;
    reduce_add4(sums[h][0], sums[h][1], sums[other][tokens - 2], sums[other][tokens - 1], four);
    memcpy(scores + h * kTileTokens, four, tokens * sizeof(float));
    if (tokens == 2) memcpy(scores + other * kTileTokens, four + 2, tokens * sizeof(float));
  }
}

// Turns one head's scores of a tile into weights exp(score - m), updating m and s.
// Returns the factor that brings what was summed before to the new m.
float weigh_tile(float* scores, int count, float scale, float* m, float* s) {
  const int padded = (count + Vec::width - 1) / Vec::width * Vec::width;
  for (int t = count; t < padded; ++t) scores[t] = kNegInf;
  Vec largest = broadcast(kNegInf);
  for (int t = 0; t < padded; t += Vec::width) {
    const Vec score = mul(load(scores + t), broadcast(scale));
    store(scores + t, score);
    largest = max(score, largest);
  }
  const float tile_max = reduce_max(largest), new_m = tile_max > *m ? tile_max : *m;
  const Vec base = broadcast(exp_base(new_m));
  Vec sum = broadcast(0.0f);
  for (int t = 0; t < padded; t += Vec::width) {
    const Vec weight = exp_nonpositive(sub(load(scores + t), base));
    store(scores + t, weight);
    sum = add(sum, weight);
  }
  const float factor = exp_nonpositive(*m - exp_base(new_m));
  *s = *s * factor + reduce_add(sum);
  *m = new_m;
  return factor;
}

// acc[h, d:d+n] = acc[h, d:d+n] * factors[h] + weights[h] . values[:, d:d+n] for a strip of n = `vecs` vectors.
template <int heads, int vecs, class T, class F>
void add_strip(const float* weights, const float* factors, int num_tokens, int d, int stride, int count, float* acc,
               F value_at) {
  Vec sums[heads][vecs];
#pragma GCC unroll 8
  for (int h = 0; h < heads; ++h) {
#pragma GCC unroll 8
    for (int i = 0; i < vecs; ++i) {
      const float* before = acc + h * stride + d + i * Vec::width;
      sums[h][i] = mul(load_upto(before, count), broadcast(factors[h]));
    }
  }
  for (int t = 0; t < num_tokens; ++t) {
    const T* value = value_at(t) + d;
    Vec weight[heads];
#pragma GCC unroll 8
    for (int h = 0; h < heads; ++h) weight[h] = broadcast(weights[h * kTileTokens + t]);
#pragma GCC unroll 8
    for (int i = 0; i < vecs; ++i) {
      const Vec x = load_upto(value + i * Vec::width, count);
#pragma GCC unroll 8
      for (int h = 0; h < heads; ++h) sums[h][i] = fma(weight[h], x, sums[h][i]);
    }
  }
#pragma GCC unroll 8
  for (int h = 0; h < heads; ++h) {
#pragma GCC unroll 8
    for (int i = 0; i < vecs; ++i) store_upto(acc + h * stride + d + i * Vec::width, sums[h][i], count);
  }
}

// The weighted sum of V of one tile for `heads` heads, strip by strip. V was prefetched by the scores; the
// first strip prefetches K of the next tile.
template <int heads, class T>
void add_values(const float* weights, const float* factors, const T* const* keys, const T* const* next_keys,
                int num_tokens, int num_next, const fastdecode::LayerView& layer, float* acc) {
  constexpr int wide = heads == 1 ? 8 : four_fit(heads) ? 4 : 2;
  const int head_dim = layer.head_dim;
  const std::int64_t value_bytes = layer.value_bytes, row_bytes = std::int64_t{head_dim} * sizeof(T);
  const auto values_of = [&](int strip) {
    return [=, num_fetch = strip == 0 ? num_next : 0](int t) {
      if (t < num_fetch) prefetch(next_keys[t], row_bytes);
      return value_of(keys[t], value_bytes);
    };
  };
  int d = 0;
  for (; d + wide * Vec::width <= head_dim; d += wide * Vec::width) {
    add_strip<heads, wide, T>(weights, factors, num_tokens, d, head_dim, Vec::width, acc, values_of(d));
  }
  for (; d + Vec::width <= head_dim; d += Vec::width) {
    add_strip<heads, 1, T>(weights, factors, num_tokens, d, head_dim, Vec::width, acc, values_of(d));
  }
  if constexpr (Vec::width > 8) {
    if (d < head_dim)
      add_strip<heads, 1, T>(weights, factors, num_tokens, d, head_dim, head_dim - d, acc, values_of(d));
  }
}

}  // namespace
