// Decode attention of one row over one span of its tokens, once for all instruction sets: included after a
// vec_<isa>.h. One pass over K and V in tiles of a few tokens (online softmax); fp32 throughout; every byte
// of K and V is read once for all query heads of its KV head.
#pragma once

#include <math.h>
#include <string.h>

#include "attention_tile.inl.h"
#include "convert.inl.h"

namespace {

using fastdecode::AttendArgs;
using fastdecode::Span;

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

// Scores of one tile for all query heads, into workspace.weights.
template <class T>
void score_tile(const AttendArgs& args, const Workspace& workspace, const T* const* keys, int count) {
  const auto& layer = args.layer;
  for_head_runs(args.group_size, [&](auto heads, int head) {
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
  for_head_runs(args.group_size, [&](auto heads, int head) {
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
