// The arithmetic of one tile of tokens: scores, softmax weights, weighted sum of V. Included after a vec_<isa>.h.
// Loops over heads and vectors have constant bounds, so that all sums live in registers.
#pragma once

#include "cache.inl.h"
#include "exponential.inl.h"

namespace {

constexpr float kNegInf = -__builtin_inff();

// exp(x) for x <= 0, to 1.02 units in the last place; exactly 0 below -87.3365, NaN stays NaN.
Vec exp_nonpositive(Vec x) {
  constexpr float lowest = -87.3365f;  // ln of the smallest normal float
  const Exponential e = exponential(x, [](Vec a, Vec b, Vec c) { return fma(a, b, c); });
  return zero_below(x, lowest, mul(e.mantissa, exp2_from_magic(e.magic)));
}

float exp_nonpositive(float x) { return reduce_max(exp_nonpositive(broadcast(x))); }

// What exponents are taken relative to: the largest score, or 0 where all scores are -inf.
float exp_base(float largest) { return largest == kNegInf ? 0.0f : largest; }

template <int count>
struct Count {
  static constexpr int value = count;
};

// Vectors at once for `heads` heads: their sums, one weight or query a head and the vector itself stay in registers,
// and `words` more of each vector.
constexpr int vecs_at_once(int heads, int most, int words = 0) {
  int vecs = 1;
  while (2 * vecs <= most && (heads + words) * 2 * vecs + heads + 1 <= Vec::registers) vecs *= 2;
  return vecs;
}

// Of tokens whose scores are computed at once. Int4 keeps the words of each, too.
template <class K>
constexpr int columns_at_once(int heads) {
  return vecs_at_once(heads, kTileVecs, Format<K>::has_minimum ? 1 : 0);
}

// Of V along head_dim. A strip of int4 lies within one group.
template <class V>
constexpr int strip_at_once(int heads) {
  return vecs_at_once(heads, Format<V>::has_minimum ? kGroupDim / Vec::width : 8);
}

// Calls f(Count<n>, first) for runs of n <= 4 query heads, which share their loads of K and V.
template <class F>
void for_head_runs(int num_heads, F f) {
  int head = 0;
  for (; num_heads - head >= 4; head += 4) f(Count<4>{}, head);
  if (num_heads - head == 3) f(Count<3>{}, head);
  if (num_heads - head == 2) f(Count<2>{}, head);
  if (num_heads - head == 1) f(Count<1>{}, head);
}

// Calls f(Count<vecs>{}, first) for `num_vecs` vectors, `most` at once where so many are left.
template <int most, class F>
void for_vecs(int num_vecs, F f) {
  int vec = 0;
  for (; vec + most <= num_vecs; vec += most) f(Count<most>{}, vec);
  for (; vec < num_vecs; ++vec) f(Count<1>{}, vec);
}

// Asks for the memory of what comes next a few lines at a time, so that it arrives while this is computed: V while K is
// scored, K of the next tile while V is added.
class Fetcher {
 public:
  // Plans `num_calls` calls; without a tile they do nothing.
  Fetcher(const Tile* tile, std::int64_t part_bytes, std::int32_t dtype, int head_dim, int num_calls) {
    if (tile == nullptr) return;
    const Panels panels(*tile, part_bytes, dtype, head_dim);
    for (int p = 0; p < tile->num_panels; ++p) add(panels.codes[p], panels.token_bytes * kPanelTokens);
    std::int64_t lines = 0;
    for (int r = 0; r < num_runs_; ++r) lines += (runs_[r].stop - runs_[r].first + kLineBytes - 1) / kLineBytes;
    next_run();
    lines_ = static_cast<int>((lines + num_calls - 1) / num_calls);
  }

  __attribute__((always_inline)) void operator()() {
    const char *at = at_, *stop = stop_;
    for (int i = lines_; i > 0; --i) {
      __builtin_prefetch(at);
      at += kLineBytes;
      if (__builtin_expect(at >= stop, 0)) {
        next_run();
        at = at_;
        stop = stop_;
      }
    }
    at_ = at;
  }

 private:
  static constexpr int kNear = 1024;
  struct Run {
    const char *first, *stop;
  };

  // Panels that follow each other closely become one run, with the scales in between.
  void add(const char* first, std::int64_t bytes) {
    if (num_runs_ && first >= runs_[num_runs_ - 1].stop && first - runs_[num_runs_ - 1].stop <= kNear) {
      runs_[num_runs_ - 1].stop = first + bytes;
    } else {
      runs_[num_runs_++] = {first, first + bytes};
    }
  }

  __attribute__((noinline)) void next_run() {
    if (run_ < num_runs_) {
      at_ = runs_[run_].first;
      stop_ = runs_[run_++].stop;
    } else {
      lines_ = 0;  // all has been asked for
    }
  }

  Run runs_[kTilePanels];
  const char *at_ = nullptr, *stop_ = nullptr;
  int num_runs_ = 0, run_ = 0, lines_ = 0;
};

// Calls of `fetch` for 8 values of d or 8 tokens: memory is asked evenly where it, not arithmetic, sets the pace.
template <class T>
constexpr int fetches_in_eight(int heads, int vecs) {
  if (Format<T>::is_quantised) return heads == 1 && vecs > 4 ? 2 : 1;
  return heads > 2 || vecs < 4 ? 1 : heads == 1 && vecs > 4 ? 4 : 2;
}

// Two chains of additions where one for each sum is too few to keep the processor busy.
constexpr int num_ways(int sums, int heads) { return sums < 8 && 2 * sums + heads < Vec::registers ? 2 : 1; }

template <int heads, int vecs>
struct Sums {
  static constexpr int ways = num_ways(heads * vecs, heads);
  Vec at[ways][heads][vecs];

  Sums() {
#pragma GCC unroll 2
    for (int w = 0; w < ways; ++w) {
#pragma GCC unroll 4
      for (int h = 0; h < heads; ++h) {
#pragma GCC unroll 8
        for (int v = 0; v < vecs; ++v) at[w][h][v] = broadcast(0.0f);
      }
    }
  }
  void add_product(int step, int h, int v, Vec a, Vec b) {
    Vec& sum = at[step % ways][h][v];
    sum = fma(a, b, sum);
  }
  Vec total(int h, int v) const {
    if constexpr (ways == 2) return add(at[0][h][v], at[1][h][v]);
    return at[0][h][v];
  }
};

// The scores of `vecs` vectors of tokens for `heads` query heads. `fetch` runs for every 8 values of d.
template <int heads, int vecs, class T>
void score_columns(const float* queries, int head_dim, const Column<T>* columns, float* scores, Fetcher& fetch) {
  Sums<heads, vecs> sums;
  for (int d = 0; d < head_dim; d += 8) {
#pragma GCC unroll 8
    for (int e = 0; e < 8; ++e) {
      if (e % (8 / fetches_in_eight<T>(heads, vecs)) == 0) fetch();
#pragma GCC unroll 8
      for (int v = 0; v < vecs; ++v) {
        const Vec key = load_column(columns[v], d + e);
#pragma GCC unroll 4
        for (int h = 0; h < heads; ++h) sums.add_product(e, h, v, broadcast(queries[h * head_dim + d + e]), key);
      }
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < heads; ++h) {
#pragma GCC unroll 8
    for (int v = 0; v < vecs; ++v) store(scores + h * kTileTokens + v * Vec::width, sums.total(h, v));
  }
}

// Caps one head's scores of a tile, of unused tokens too: cap * tanh(score / cap). tanh of small values is Cephes'
// polynomial, of others (1 - p) / (1 + p) with p = exp(-2 |x|). Infinite scores become NaN: they must not be hidden.
void cap_scores(float* scores, float cap) {
  alignas(64) float powers[kTileTokens];
  const Vec factor = broadcast(-2.0f / cap);
  for (int t = 0; t < kTileTokens; t += Vec::width) {
    store(powers + t, exp_nonpositive(mul(abs(load(scores + t)), factor)));
  }
  for (int t = 0; t < kTileTokens; ++t) {
    const float x = scores[t] / cap, z = x * x;
    float p = -5.70498872745e-3f;
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    const float large = (1.0f - powers[t]) / (1.0f + powers[t]);
    const float capped = cap * (fabsf(x) < 0.625f ? p * z * x + x : copysignf(large, x));
    scores[t] = capped + (x - x);
  }
}

// Turns one head's scores of a tile into weights exp(score - m), 0 for tokens not in use, updating m and s.
// Returns the factor that brings what was summed before to the new m.
float weigh_tile(const Tile& tile, float* scores, float* m, float* s) {
  for (int t = 0; t < tile.first; ++t) scores[t] = kNegInf;
  for (int t = tile.stop; t < kTileTokens; ++t) scores[t] = kNegInf;
  Vec largest = broadcast(kNegInf);
#pragma GCC unroll 8
  for (int v = 0; v < kTileVecs; ++v) largest = max(load(scores + v * Vec::width), largest);
  const float tile_max = reduce_max(largest), new_m = tile_max > *m ? tile_max : *m;
  const Vec base = broadcast(exp_base(new_m));
  Vec sum = broadcast(0.0f);
#pragma GCC unroll 8
  for (int v = 0; v < kTileVecs; ++v) {
    const Vec weight = exp_nonpositive(sub(load(scores + v * Vec::width), base));
    store(scores + v * Vec::width, weight);
    sum = add(sum, weight);
  }
  const float factor = exp_nonpositive(*m - exp_base(new_m));
  *s = *s * factor + reduce_add(sum);
  *m = new_m;
  return factor;
}

// sums[h, :] += weights[h, :] . values for `num_tokens` rows of V.
template <int heads, int vecs, class T>
__attribute__((always_inline)) inline void add_rows(Sums<heads, vecs>& sums, const float* weights, const T* values,
                                                    int head_dim, int num_tokens, int count, Fetcher& fetch) {
#pragma GCC unroll 8
  for (int t = 0; t < num_tokens; ++t) {
    if (t % (8 / fetches_in_eight<T>(heads, vecs)) == 0) fetch();
    const T* row = values + std::int64_t{t} * head_dim;
    // Whichever is fewer stays in registers: the row's vectors or the heads' weights.
    if constexpr (heads > vecs) {
      Vec x[vecs];
#pragma GCC unroll 8
      for (int i = 0; i < vecs; ++i) x[i] = load_upto(row + i * Vec::width, count);
#pragma GCC unroll 4
      for (int h = 0; h < heads; ++h) {
        const Vec weight = broadcast(weights[h * kTileTokens + t]);
#pragma GCC unroll 8
        for (int i = 0; i < vecs; ++i) sums.add_product(t, h, i, weight, x[i]);
      }
    } else {
      Vec weight[heads];
#pragma GCC unroll 4
      for (int h = 0; h < heads; ++h) weight[h] = broadcast(weights[h * kTileTokens + t]);
#pragma GCC unroll 8
      for (int i = 0; i < vecs; ++i) {
        const Vec x = load_upto(row + i * Vec::width, count);
#pragma GCC unroll 4
        for (int h = 0; h < heads; ++h) sums.add_product(t, h, i, weight[h], x);
      }
    }
  }
}

// acc[h, d:d+n] = acc[h, d:d+n] * factors[h] + weights[h] . values[:, d:d+n] for a strip of n = `vecs` vectors;
// acc has `head_dim` floats a head. `fetch` runs for every panel.
template <int heads, int vecs, class T>
void add_strip(const Tile& tile, const Panels& values, const float* weights, const float* factors, int d, int count,
               int head_dim, float* acc, Fetcher& fetch) {
  Sums<heads, vecs> sums;
#pragma GCC unroll 4
  for (int h = 0; h < heads; ++h) {
#pragma GCC unroll 8
    for (int i = 0; i < vecs; ++i) {
      sums.at[0][h][i] = mul(load_upto(acc + h * head_dim + d + i * Vec::width, count), broadcast(factors[h]));
    }
  }
  for (int p = 0; p < tile.num_panels; ++p) {
    const int first = p == 0 ? tile.first : 0, left = tile.stop - p * kPanelTokens;
    const T* rows = reinterpret_cast<const T*>(values.codes[p]) + d + first * head_dim;
    const float* token_weights = weights + p * kPanelTokens + first;
    if (first == 0 && left >= kPanelTokens) {
      add_rows<heads, vecs>(sums, token_weights, rows, head_dim, kPanelTokens, count, fetch);
    } else {
      const int stop = left < kPanelTokens ? left : kPanelTokens;
      for (int t = first; t < stop; ++t, rows += head_dim, ++token_weights) {
        add_rows<heads, vecs>(sums, token_weights, rows, head_dim, 1, count, fetch);
      }
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < heads; ++h) {
#pragma GCC unroll 8
    for (int i = 0; i < vecs; ++i) store_upto(acc + h * head_dim + d + i * Vec::width, sums.total(h, i), count);
  }
}

}  // namespace
