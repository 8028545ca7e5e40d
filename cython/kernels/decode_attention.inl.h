// Decode attention of one row over one span of its tokens, once for all instruction sets: included after a
// vec_<isa>.h. One pass over K and V in tiles of a few tokens (online softmax); fp32 throughout; every byte
// of K and V is read once for all query heads of its KV head.
#pragma once

#include <math.h>
#include <string.h>

#include "convert.inl.h"

namespace {

using fastdecode::AttendArgs;
using fastdecode::kTileTokens;
using fastdecode::Span;

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

// A span's result so far, in the layout of kernels.h.
struct Partial {
  float* acc;  // [group_size, head_dim]
  float* m;    // [group_size]
  float* s;    // [group_size]

  Partial(const AttendArgs& args, float* floats)
      : acc(floats), m(acc + args.group_size * args.layer.head_dim), s(m + args.group_size) {}
};

// One thread's memory, in the layout of `workspace_floats`.
struct Workspace {
  float* queries;  // [group_size, head_dim] in fp32
  float* weights;  // [group_size, kTileTokens] scores, then exp(score - m)
  float* row;      // [head_dim]
  float* partial;  // of the newest token

  Workspace(const AttendArgs& args, float* floats)
      : queries(floats),
        weights(queries + args.group_size * args.layer.head_dim),
        row(weights + args.group_size * kTileTokens),
        partial(floats + fastdecode::workspace_floats(args.group_size, args.layer.head_dim) -
                fastdecode::partial_floats(args.group_size, args.layer.head_dim)) {}
};

template <int count>
struct Count {
  static constexpr int value = count;
};

// Query heads that share one load of K or V, at most.
constexpr int kHeadTile = 4;

// Whether `heads` x 4 sums leave registers for what is added to them.
constexpr bool four_fit(int heads) { return heads * 4 + 4 <= Vec::registers; }

// Calls f(Count<n>, first) for runs of n <= kHeadTile heads, of about equal size.
template <class F>
void for_head_tiles(int num_heads, F f) {
  for (int head = 0; head < num_heads;) {
    const int left = num_heads - head, tiles = (left + kHeadTile - 1) / kHeadTile, size = (left + tiles - 1) / tiles;
    if (size == 4) f(Count<4>{}, head);
    if (size == 3) f(Count<3>{}, head);
    if (size == 2) f(Count<2>{}, head);
    if (size == 1) f(Count<1>{}, head);
    head += size;
  }
}

void prefetch(const void* row, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(row) + i);
}

// K of the tokens [start, stop), filled up to a multiple of 4 with the last one. No other token is read.
template <class T>
void find_keys(const AttendArgs& args, const Span& span, int start, int stop, const T** keys) {
  const auto& layer = args.layer;
  const std::int32_t* table = args.blocks;
  const std::int64_t base = args.table_base[span.row];
  int count = 0;
  for (int token = start; token < stop;) {
    const int block = token / layer.block_size, within = token % layer.block_size;
    const int run = stop - token < layer.block_size - within ? stop - token : layer.block_size - within;
    const char* head = layer.keys + table[base + block] * layer.block_bytes + span.head * layer.head_bytes;
    const T* first = reinterpret_cast<const T*>(head) + std::int64_t{within} * layer.head_dim;
    for (int i = 0; i < run; ++i) keys[count++] = first + std::int64_t{i} * layer.head_dim;
    token += run;
  }
  for (; count % 4 != 0; ++count) keys[count] = keys[count - 1];
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
  if (Vec::width > 8 && d < head_dim) step(d, head_dim - d);
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
  for (int t = count; t < kTileTokens; ++t) scores[t] = kNegInf;
  Vec largest = broadcast(kNegInf);
  for (int t = 0; t < kTileTokens; t += Vec::width) {
    const Vec score = mul(load(scores + t), broadcast(scale));
    store(scores + t, score);
    largest = max(score, largest);
  }
  const float tile_max = reduce_max(largest), new_m = tile_max > *m ? tile_max : *m;
  const Vec base = broadcast(exp_base(new_m));
  Vec sum = broadcast(0.0f);
  for (int t = 0; t < kTileTokens; t += Vec::width) {
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
  const auto value_at = [&](int t) { return value_of(keys[t], layer.value_bytes); };
  const auto fetching = [&](int t) {
    if (t < num_next) prefetch(next_keys[t], std::int64_t{head_dim} * sizeof(T));
    return value_at(t);
  };
  int d = 0;
  if (num_next > 0 && head_dim >= wide * Vec::width) {
    add_strip<heads, wide, T>(weights, factors, num_tokens, d, head_dim, Vec::width, acc, fetching);
    d += wide * Vec::width;
  }
  for (; d + wide * Vec::width <= head_dim; d += wide * Vec::width) {
    add_strip<heads, wide, T>(weights, factors, num_tokens, d, head_dim, Vec::width, acc, value_at);
  }
  for (; d + Vec::width <= head_dim; d += Vec::width) {
    add_strip<heads, 1, T>(weights, factors, num_tokens, d, head_dim, Vec::width, acc, value_at);
  }
  if (Vec::width > 8 && d < head_dim) {
    add_strip<heads, 1, T>(weights, factors, num_tokens, d, head_dim, head_dim - d, acc, value_at);
  }
}

// Scores of one tile for all query heads, into workspace.weights.
template <class T>
void score_tile(const AttendArgs& args, const Workspace& workspace, const T* const* keys, int count) {
  const auto& layer = args.layer;
  for_head_tiles(args.group_size, [&](auto heads, int head) {
    const float* queries = workspace.queries + head * layer.head_dim;
    float* scores = workspace.weights + head * kTileTokens;
    constexpr int num_heads = decltype(heads)::value, tokens = four_fit(num_heads) ? 4 : 2;
    for (int t = 0; t < count; t += tokens) {
      score_tokens<num_heads, tokens>(queries, keys + t, layer.head_dim, scores + t);
      if (head > 0) continue;
      for (int i = t; i < t + tokens; ++i) {
        prefetch(value_of(keys[i], layer.value_bytes), std::int64_t{layer.head_dim} * sizeof(T));
      }
    }
  });
}

// Softmax weights and weighted sum of one tile, for all query heads.
template <class T>
void add_tile(const AttendArgs& args, const Workspace& workspace, const T* const* keys, const T* const* next_keys,
              int count, int num_next, const Partial& partial) {
  for_head_tiles(args.group_size, [&](auto heads, int head) {
    constexpr int num_heads = decltype(heads)::value;
    float* weights = workspace.weights + head * kTileTokens;
    float factors[num_heads];
    for (int h = 0; h < num_heads; ++h) {
      factors[h] = weigh_tile(weights + h * kTileTokens, count, args.scale, partial.m + head + h, partial.s + head + h);
    }
    add_values<num_heads>(weights, factors, keys, next_keys, count, head == 0 ? num_next : 0, args.layer,
                          partial.acc + head * args.layer.head_dim);
  });
}

template <class T>
void attend_typed(const AttendArgs& args, const Span& span, const Partial& partial, const Workspace& workspace) {
  const T* keys[2][kTileTokens];  // this tile's and the next one's
  const auto stop_of = [&](int start) { return span.stop - start < kTileTokens ? span.stop : start + kTileTokens; };
  int stop = stop_of(span.start), current = 0;
  find_keys(args, span, span.start, stop, keys[current]);
  for (int start = span.start; start < span.stop; current = 1 - current) {
    const int next_stop = stop_of(stop), count = stop - start;
    find_keys(args, span, stop, next_stop, keys[1 - current]);
    score_tile(args, workspace, keys[current], count);
    add_tile(args, workspace, keys[current], keys[1 - current], count, next_stop - stop, partial);
    start = stop;
    stop = next_stop;
  }
}

void load_queries(const AttendArgs& args, const Span& span, float* queries) {
  const std::int64_t count = std::int64_t{args.group_size} * args.layer.head_dim;
  const char* row = args.queries + span.row * args.query_row_bytes;
  convert(row + span.head * count * dtype_bytes(args.wire_dtype), args.wire_dtype, queries, fastdecode::kFloat32,
          count);
}

void attend_span(const AttendArgs& args, const Span& span, float* partial_memory, float* workspace_memory) {
  const Partial partial(args, partial_memory);
  const Workspace workspace(args, workspace_memory);
  load_queries(args, span, workspace.queries);
  memset(partial.acc, 0, sizeof(float) * args.group_size * args.layer.head_dim);
  for (int h = 0; h < args.group_size; ++h) {
    partial.m[h] = kNegInf;
    partial.s[h] = 0.0f;
  }
  switch (args.layer.dtype) {
    case fastdecode::kFloat16:
      return attend_typed<Half>(args, span, partial, workspace);
    case fastdecode::kBFloat16:
      return attend_typed<BFloat16>(args, span, partial, workspace);
    default:
      return attend_typed<float>(args, span, partial, workspace);
  }
}

// row += weight * acc
void add_scaled(float* row, const float* acc, float weight, int head_dim) {
  for (int d = 0; d < head_dim; d += Vec::width) {
    const int count = head_dim - d;
    store_upto(row + d, fma(load_upto(acc + d, count), broadcast(weight), load_upto(row + d, count)), count);
  }
}

// Merges the partials of one query head in their order, the newest token's last, into workspace.row.
// Returns log(sum exp(score)).
float merge_head(const AttendArgs& args, const float* partials, std::int64_t num_partials, int h,
                 const Workspace& workspace) {
  const int head_dim = args.layer.head_dim;
  const std::int64_t stride = fastdecode::partial_floats(args.group_size, head_dim);
  const auto partial_at = [&](std::int64_t i) {
    return Partial(args, i < num_partials ? const_cast<float*>(partials) + i * stride : workspace.partial);
  };
  float m = kNegInf, s = 0.0f;
  for (std::int64_t i = 0; i <= num_partials; ++i) {
    const float span_m = partial_at(i).m[h];
    if (span_m > m) m = span_m;
  }
  memset(workspace.row, 0, sizeof(float) * head_dim);
  for (std::int64_t i = 0; i <= num_partials; ++i) {
    const Partial span = partial_at(i);
    const float weight = exp_nonpositive(span.m[h] - exp_base(m));
    s += weight * span.s[h];
    add_scaled(workspace.row, span.acc + std::int64_t{h} * head_dim, weight, head_dim);
  }
  const float inverse = 1.0f / s;
  for (int d = 0; d < head_dim; d += Vec::width) {
    const int count = head_dim - d;
    store_upto(workspace.row + d, mul(load_upto(workspace.row + d, count), broadcast(inverse)), count);
  }
  return m + logf(s);
}

void finish_row(const AttendArgs& args, std::int32_t row, std::int32_t head, const float* partials,
                std::int64_t num_partials, float* workspace_memory) {
  const Workspace workspace(args, workspace_memory);
  const std::int32_t newest = args.positions[row];
  attend_span(args, {row, head, newest, newest + 1}, workspace.partial, workspace_memory);
  char* out = args.out + row * args.out_row_bytes;
  for (int h = 0; h < args.group_size; ++h) {
    const std::int64_t query_head = std::int64_t{head} * args.group_size + h;
    const float lse = merge_head(args, partials, num_partials, h, workspace);
    convert(workspace.row, fastdecode::kFloat32, out + query_head * args.layer.head_dim * dtype_bytes(args.wire_dtype),
            args.wire_dtype, args.layer.head_dim);
    if (args.lse) args.lse[std::int64_t{row} * args.num_heads + query_head] = lse;
  }
}

constexpr fastdecode::Kernels make_kernels(const char* name) {
  return {name, attend_span, finish_row, store_row, convert};
}

}  // namespace
