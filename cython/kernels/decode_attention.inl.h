// Decode attention of one row over one span of its tokens, once for all instruction sets: included after a
// vec_<isa>.h. One pass over K and V in tiles of a few tokens (online softmax), summed in fp32, within a tile of
// quantised K or V in integers; every byte of K and V is read from memory once for all query heads of its KV head.
#pragma once

#include <math.h>
#include <string.h>

#include "product.inl.h"
#include "prompt_attention.inl.h"
#include "quantised_tile.inl.h"
#include "read_loops.inl.h"
#include "row_ops.inl.h"
#include "store.inl.h"

namespace {

using fastdecode::AttendArgs;
using fastdecode::Cache;
using fastdecode::Span;

// A span's result so far, in the layout of kernels.h.
struct Partial {
  float* acc;  // [group_size, head_dim]
  float* m;    // [group_size]
  float* s;    // [group_size]

  Partial(const AttendArgs& args, float* floats)
      : acc(floats), m(acc + args.group_size * args.head_dim), s(m + args.group_size) {}
};

// One thread's memory, of `workspace_floats`. groups: of int4 along head_dim.
struct Workspace {
  float* queries;              // [group_size, head_dim] in fp32, times the scale of the scores
  float* query_sums;           // [group_size, groups] sums of queries over groups
  float* query_units;          // [group_size]
  std::int16_t* query_codes;   // [group_size, head_dim] queries as multiples of their units
  float* weights;              // [group_size, kTileTokens] scores, then exp(score - m)
  float* weight_units;         // [groups, group_size]
  std::int16_t* weight_codes;  // [groups, group_size, kTileTokens] weights times the scales of V, in units
  float* key_scales;           // [groups, kTileTokens] of the tile, and so on
  float* key_minimums;         //
  float* value_scales;         //
  float* value_minimums;       //
  float* minimum_sums;         // [group_size, groups] weighted sums of V's minimums
  float* row;                  // [head_dim]
  float* partial;              // of the newest token

  Workspace(const AttendArgs& args, float* floats) {
    const int group_size = args.group_size, head_dim = args.head_dim, groups = num_groups(head_dim);
    const auto take = [&](int count) {
      float* taken = floats;
      floats += round_to_line(count);
      return taken;
    };
    const auto take_codes = [&](int count) { return reinterpret_cast<std::int16_t*>(take((count + 1) / 2)); };
    queries = take(group_size * head_dim);
    query_sums = take(group_size * groups);
    query_units = take(group_size);
    query_codes = take_codes(group_size * head_dim + 8);
    weights = take(group_size * kTileTokens);
    weight_units = take(groups * group_size);
    weight_codes = take_codes(groups * group_size * kTileTokens);
    key_scales = take(groups * kTileTokens);
    key_minimums = take(groups * kTileTokens);
    value_scales = take(groups * kTileTokens);
    value_minimums = take(groups * kTileTokens);
    minimum_sums = take(group_size * groups);
    row = take(head_dim);
    partial = floats;
  }
};

// The panels with the tokens [start, stop) of a span, stop - start <= kTileTokens. No other block is read.
Tile find_tile(const AttendArgs& args, const Span& span, int start, int stop) {
  const Cache& cache = args.caches[span.cache];
  const LayerView& layer = cache.layer;
  const std::int32_t* table = cache.blocks + cache.table_base[span.row];
  const int first_panel = start / kPanelTokens, stop_panel = (stop - 1) / kPanelTokens + 1;
  const int panels_per_block = layer.block_size / kPanelTokens;
  Tile tile;
  tile.num_panels = stop_panel - first_panel;
  tile.first = start - first_panel * kPanelTokens;
  tile.stop = stop - first_panel * kPanelTokens;
  int block = first_panel / panels_per_block, within = first_panel % panels_per_block;
  for (int p = 0; p < kTilePanels; ++p) {
    if (p >= tile.num_panels) {
      tile.heads[p] = tile.heads[p - 1];
      tile.panels[p] = tile.panels[p - 1];
      continue;
    }
    tile.heads[p] = layer.keys + table[block] * layer.block_bytes + span.head * layer.head_bytes;
    tile.panels[p] = within;
    if (++within == panels_per_block) {
      within = 0;
      ++block;
    }
  }
  return tile;
}

// The scales and minimums of K (part_bytes 0) or V of a tile, in fp32.
template <class T>
TileScales load_tile_scales(const Tile& tile, const LayerView& layer, std::int64_t part_bytes, float* scales,
                            float* minimums) {
  if constexpr (Format<T>::is_quantised) {
    using Scale = typename Format<T>::Scale;
    const int groups = Format<T>::has_minimum ? num_groups(layer.head_dim) : 1;
    const std::int64_t codes = part_bytes + layer.block_size * code_bytes(dtype_of<T>, layer.head_dim);
    for (int p = 0; p < tile.num_panels;) {
      const Scale* source = reinterpret_cast<const Scale*>(tile.heads[p] + codes) + tile.panels[p] * kPanelTokens;
      const int token = p * kPanelTokens, panels = panels_of_block(tile, p);
      p += panels;
      for (int g = 0; g < groups; ++g, source += layer.block_size) {
        widen_scales(source, scales + g * kTileTokens + token, panels);
      }
      if constexpr (!Format<T>::has_minimum) continue;
      for (int g = 0; g < groups; ++g, source += layer.block_size) {
        widen_scales(source, minimums + g * kTileTokens + token, panels);
      }
    }
    if (tile.first > 0 || tile.stop < kTileTokens) {
      for (int g = 0; g < groups; ++g) {
        clear_unused(tile, scales + g * kTileTokens);
        if constexpr (Format<T>::has_minimum) clear_unused(tile, minimums + g * kTileTokens);
      }
    }
  }
  return {scales, minimums};
}

// Scores of one tile for all query heads, into workspace.weights.
template <class K>
void score_tile(const AttendArgs& args, const LayerView& layer, const Workspace& workspace, const Tile& tile,
                Fetcher& fetch) {
  const int head_dim = layer.head_dim;
  const TileScales scales = load_tile_scales<K>(tile, layer, 0, workspace.key_scales, workspace.key_minimums);
  const Panels keys(tile, 0, layer.key_dtype, head_dim);
  const QuantisedQueries queries = {workspace.query_codes, workspace.query_units, workspace.query_sums};
  const int num_vecs = (tile.num_tokens() + Vec::width - 1) / Vec::width;
  for_head_runs(args.group_size, [&](auto heads_constant, int head) {
    constexpr int heads = decltype(heads_constant)::value;
    for_vecs<columns_at_once<K>(heads)>(num_vecs, [&](auto vecs_constant, int vec) {
      constexpr int vecs = decltype(vecs_constant)::value;
      const int token = vec * Vec::width;
      float* scores = workspace.weights + head * kTileTokens + token;
      Column<K> columns[vecs];
      for (int v = 0; v < vecs; ++v) columns[v] = column_of<K>(keys, vec + v);
      if constexpr (Format<K>::is_quantised) {
        const TileScales column_scales = {scales.scales + token, scales.minimums + token};
        score_columns<heads, vecs>(queries.from(head, head_dim), head_dim, columns, column_scales, scores, fetch);
      } else {
        score_columns<heads, vecs>(workspace.queries + head * head_dim, head_dim, columns, scores, fetch);
      }
    });
  });
}

// One head's weights of a tile for quantised V, and what the minimums of V add: its running sums, times `factor` for
// what came before.
template <class V>
void quantise_weights(const AttendArgs& args, const Workspace& workspace, TileScales scales, int head, float factor) {
  const float* weights = workspace.weights + head * kTileTokens;
  const int groups = Format<V>::has_minimum ? num_groups(args.head_dim) : 1;
  for (int g = 0; g < groups; ++g) {
    const int index = g * args.group_size + head;
    workspace.weight_units[index] = round_weights(weights, scales.scales + g * kTileTokens,
                                                  workspace.weight_codes + std::int64_t{index} * kTileTokens);
    if constexpr (Format<V>::has_minimum) {
      Vec sum = broadcast(0.0f);
#pragma GCC unroll 8
      for (int v = 0; v < kTileVecs; ++v) {
        const int t = v * Vec::width;
        sum = fma(load(weights + t), load(scales.minimums + g * kTileTokens + t), sum);
      }
      float& total = workspace.minimum_sums[head * groups + g];
      total = total * factor + reduce_add(sum);
    }
  }
}

// Softmax weights and weighted sum of one tile, for all query heads.
template <class V>
void add_tile(const AttendArgs& args, const LayerView& layer, const Workspace& workspace, const Tile& tile,
              const Partial& partial, Fetcher& fetch) {
  const int head_dim = layer.head_dim;
  const TileScales scales =
      load_tile_scales<V>(tile, layer, layer.value_bytes, workspace.value_scales, workspace.value_minimums);
  const Panels values(tile, layer.value_bytes, layer.value_dtype, head_dim);
  for_head_runs(args.group_size, [&](auto heads_constant, int head) {
    constexpr int heads = decltype(heads_constant)::value;
    float factors[heads];
    for (int h = 0; h < heads; ++h) {
      if (args.softcap > 0) cap_scores(workspace.weights + (head + h) * kTileTokens, args.softcap);
      factors[h] =
          weigh_tile(tile, workspace.weights + (head + h) * kTileTokens, partial.m + head + h, partial.s + head + h);
      if constexpr (Format<V>::is_quantised) quantise_weights<V>(args, workspace, scales, head + h, factors[h]);
    }
    float* acc = partial.acc + head * head_dim;
    const auto add = [&](auto vecs_constant, int d, int count) {
      constexpr int vecs = decltype(vecs_constant)::value;
      if constexpr (Format<V>::is_quantised) {
        const int first = (Format<V>::has_minimum ? d / kGroupDim : 0) * args.group_size + head;
        add_strip<heads, vecs, V>(tile, values, workspace.weight_codes + std::int64_t{first} * kTileTokens,
                                  workspace.weight_units + first, factors, d, count, head_dim, acc, fetch);
      } else {
        add_strip<heads, vecs, V>(tile, values, workspace.weights + head * kTileTokens, factors, d, count, head_dim,
                                  acc, fetch);
      }
    };
    const int num_vecs = head_dim / Vec::width, rest = head_dim % Vec::width;
    for_vecs<strip_at_once<V>(heads)>(num_vecs, [&](auto vecs, int vec) { add(vecs, vec * Vec::width, Vec::width); });
    if constexpr (Vec::width > 8) {
      if (rest) add(Count<1>{}, head_dim - rest, rest);
    }
  });
}

// How often they call `fetch` for a whole tile.
template <class K>
int fetches_of_scores(const AttendArgs& args) {
  int calls = 0;
  for_head_runs(args.group_size, [&](auto heads_constant, int) {
    constexpr int heads = decltype(heads_constant)::value, vecs = columns_at_once<K>(heads);
    calls += kTileVecs / vecs * (args.head_dim / 8) * fetches_in_eight<K>(heads, vecs);
  });
  return calls;
}
template <class V>
int fetches_of_values(const AttendArgs& args) {
  int calls = 0;
  for_head_runs(args.group_size, [&](auto heads_constant, int) {
    constexpr int heads = decltype(heads_constant)::value, vecs = strip_at_once<V>(heads);
    const int strips = args.head_dim / (vecs * Vec::width), rest = args.head_dim - strips * vecs * Vec::width;
    calls += strips * kTilePanels * fetches_in_eight<V>(heads, vecs);
    calls += (rest + Vec::width - 1) / Vec::width * kTilePanels * fetches_in_eight<V>(heads, 1);
  });
  return calls;
}

// What is done with K, or with V, of one type.
struct KeyKernel {
  void (*score)(const AttendArgs&, const LayerView&, const Workspace&, const Tile&, Fetcher&);
  int (*num_fetches)(const AttendArgs&);
};
struct ValueKernel {
  void (*add)(const AttendArgs&, const LayerView&, const Workspace&, const Tile&, const Partial&, Fetcher&);
  int (*num_fetches)(const AttendArgs&);
};

template <class K>
constexpr KeyKernel key_kernel = {score_tile<K>, fetches_of_scores<K>};
template <class V>
constexpr ValueKernel value_kernel = {add_tile<V>, fetches_of_values<V>};

// In the order of DType.
constexpr KeyKernel kKeyKernels[5] = {key_kernel<float>, key_kernel<Half>, key_kernel<BFloat16>, key_kernel<Int8>,
                                      key_kernel<Int4>};
constexpr ValueKernel kValueKernels[5] = {value_kernel<float>, value_kernel<Half>, value_kernel<BFloat16>,
                                          value_kernel<Int8>, value_kernel<Int4>};

// Puts V's minimums into the sums of codes.
void add_minimums(const AttendArgs& args, const Workspace& workspace, const Partial& partial) {
  const int head_dim = args.head_dim, groups = num_groups(head_dim);
  for (int h = 0; h < args.group_size; ++h) {
    float* acc = partial.acc + h * head_dim;
    for (int d = 0; d < head_dim; ++d) acc[d] += workspace.minimum_sums[h * groups + d / kGroupDim];
  }
}

void attend_tiles(const AttendArgs& args, const Span& span, const Span* next_span, const Partial& partial,
                  const Workspace& workspace) {
  const LayerView& layer = args.caches[span.cache].layer;
  const KeyKernel& keys = kKeyKernels[layer.key_dtype];
  const ValueKernel& values = kValueKernels[layer.value_dtype];
  const int key_fetches = keys.num_fetches(args), value_fetches = values.num_fetches(args);
  // Tiles end at multiples of their size, wherever the span begins.
  const auto stop_of = [](const Span& of, int start) {
    const int stop = (start / kTileTokens + 1) * kTileTokens;
    return of.stop < stop ? of.stop : stop;
  };
  int start = span.start, stop = stop_of(span, start);
  Tile tile = find_tile(args, span, start, stop);
  while (true) {
    const bool is_last = stop == span.stop;
    const Span* next_of = is_last ? next_span : &span;
    Tile next_tile;
    if (next_of) {
      start = is_last ? next_of->start : stop;
      stop = stop_of(*next_of, start);
      next_tile = find_tile(args, *next_of, start, stop);
    }
    Fetcher fetch_values(&tile, layer.value_bytes, layer.value_dtype, args.head_dim, key_fetches);
    keys.score(args, layer, workspace, tile, fetch_values);
    const LayerView& next_layer = args.caches[next_of ? next_of->cache : 0].layer;
    Fetcher fetch_keys(next_of ? &next_tile : nullptr, 0, next_layer.key_dtype, args.head_dim, value_fetches);
    values.add(args, layer, workspace, tile, partial, fetch_keys);
    if (is_last) break;
    tile = next_tile;
  }
  if (layer.value_dtype == fastdecode::kInt4) add_minimums(args, workspace, partial);
}

// One head's query as integers, and for int4 its sums over groups.
void quantise_query(const float* query, int head_dim, bool is_int4, std::int16_t* codes, float* unit, float* sums) {
  alignas(64) float ordered[fastdecode::kMaxHeadDim + 8] = {};
  for (int d = 0; d < head_dim; d += 8) {
    for (int i = 0; i < 4; ++i) {
      ordered[d + 2 * i] = query[d + (is_int4 ? i : 2 * i)];
      ordered[d + 2 * i + 1] = query[d + (is_int4 ? 4 + i : 2 * i + 1)];
    }
  }
  Vec largest = broadcast(0.0f), invalid = largest;
  for (int d = 0; d < head_dim; d += Vec::width) {
    largest = max(abs(load(ordered + d)), largest);
    invalid = fma(load(ordered + d), broadcast(0.0f), invalid);
  }
  const Unit scale = unit_for(reduce_max(largest), reduce_add(invalid));
  *unit = scale.unit;
  for (int d = 0; d < head_dim; d += Vec::width) {  // up to 8 zeros are written behind the last head
    store_rounded(codes + d, mul(load(ordered + d), broadcast(scale.inverse)));
  }
  for (int d = 0; is_int4 && d < head_dim; d += kGroupDim) {
    Vec sum = broadcast(0.0f);
    const int stop = head_dim - d < kGroupDim ? head_dim : d + kGroupDim;
    for (int i = d; i < stop; i += Vec::width) sum = add(sum, load_upto(query + i, stop - i));
    sums[d / kGroupDim] = reduce_add(sum);
  }
}

// Queries in fp32, times the scale of the scores; for K of a quantised type as integers, too.
void load_queries(const AttendArgs& args, const Span& span, const Workspace& workspace) {
  const int head_dim = args.head_dim;
  const std::int32_t dtype = args.caches[span.cache].layer.key_dtype;
  const bool is_int4 = dtype == fastdecode::kInt4, is_quantised = is_int4 || dtype == fastdecode::kInt8;
  const std::int64_t head_bytes = head_dim * wire_bytes(args.wire_dtype);
  const char* row = args.queries + span.row * args.query_row_bytes + span.head * args.group_size * head_bytes;
  for (int h = 0; h < args.group_size; ++h) {
    float* query = workspace.queries + h * head_dim;
    convert(row + h * head_bytes, args.wire_dtype, query, fastdecode::kFloat32, head_dim);
    for (int d = 0; d < head_dim; ++d) query[d] *= args.scale;
    if (is_quantised) {
      quantise_query(query, head_dim, is_int4, workspace.query_codes + h * head_dim, workspace.query_units + h,
                     workspace.query_sums + h * num_groups(head_dim));
    }
  }
}

void attend_span(const AttendArgs& args, const Span& span, const Span* next, float* partial_memory,
                 float* workspace_memory) {
  const Workspace workspace(args, workspace_memory);
  const Partial partial(args, partial_memory);
  load_queries(args, span, workspace);
  memset(partial.acc, 0, sizeof(float) * args.group_size * args.head_dim);
  memset(workspace.minimum_sums, 0, sizeof(float) * args.group_size * num_groups(args.head_dim));
  for (int h = 0; h < args.group_size; ++h) {
    partial.m[h] = kNegInf;
    partial.s[h] = 0.0f;
  }
  attend_tiles(args, span, next, partial, workspace);
}

// row += weight * acc
void add_scaled(float* row, const float* acc, float weight, int head_dim) {
  for (int d = 0; d < head_dim; d += Vec::width) {
    const int count = head_dim - d;
    store_upto(row + d, fma(load_upto(acc + d, count), broadcast(weight), load_upto(row + d, count)), count);
  }
}

// Merges the partials of one query head in their order, its sink's weight first, the newest token's last, into
// workspace.row. Returns log(sum exp(score)), the sink's with it.
float merge_head(const AttendArgs& args, const float* partials, std::int64_t num_partials, int h, const float* sink,
                 const Workspace& workspace) {
  const int head_dim = args.head_dim;
  const std::int64_t stride = fastdecode::partial_floats(args.group_size, head_dim);
  const auto partial_at = [&](std::int64_t i) {
    return Partial(args, i < num_partials ? const_cast<float*>(partials) + i * stride : workspace.partial);
  };
  float m = sink ? *sink : kNegInf;
  for (std::int64_t i = 0; i <= num_partials; ++i) {
    const float span_m = partial_at(i).m[h];
    if (span_m > m) m = span_m;
  }
  float s = sink ? exp_nonpositive(*sink - exp_base(m)) : 0.0f;
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
  attend_span(args, {row, head, newest, newest + 1, args.newest_cache}, nullptr, workspace.partial, workspace_memory);
  char* out = args.out + row * args.out_row_bytes;
  const std::int64_t head_bytes = args.head_dim * wire_bytes(args.wire_dtype);
  for (int h = 0; h < args.group_size; ++h) {
    const std::int64_t query_head = std::int64_t{head} * args.group_size + h;
    const float* sink = args.sinks ? args.sinks + query_head : nullptr;
    const float lse = merge_head(args, partials, num_partials, h, sink, workspace);
    convert(workspace.row, fastdecode::kFloat32, out + query_head * head_bytes, args.wire_dtype, args.head_dim);
    if (args.lse) args.lse[std::int64_t{row} * args.num_heads + query_head] = lse;
  }
}

void exp_values(const float* source, float* target, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += Vec::width) store(target + i, exp_nonpositive(load(source + i)));
}

constexpr fastdecode::Kernels make_kernels(const char* name) {
  return {name, attend_span, finish_row, store_row, convert, exp_values, read_loop, rms_norm, swiglu,
          rotate, to_wire, attend_prompt, multiply_int8, multiply, kHasPairProducts, pick};
}

}  // namespace
