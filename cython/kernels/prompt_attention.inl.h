// Causal attention of a prompt's queries, once for all instruction sets: included after a vec_<isa>.h.
// A row is one query head of one query; the lanes of a vector are rows. So K and V are read one value at a time, just
// as they come, and the softmax needs no sums across lanes. Keys are taken in blocks of kTileTokens at absolute
// positions (online softmax): a row's bits depend on its query and the K and V that it sees, on nothing else.
#pragma once

#include "attention_tile.inl.h"
#include "row_ops.inl.h"

namespace {

using fastdecode::kMaxPanelRows;
using fastdecode::PromptArgs;

// What a product computes at once: so many tokens, or values along head_dim, of so many vectors of rows.
constexpr int kDeep = Vec::registers >= 32 ? 8 : 4;
constexpr int kWide = Vec::registers >= 16 ? 3 : 1;
constexpr int kPanelRows = kWide * Vec::width;  // rows that lie together
static_assert(kPanelRows <= kMaxPanelRows && kMaxPanelRows % kPanelRows == 0, "workspaces hold whole panels");

// Where a task's numbers are; of one panel after the other, a panel's [.., kPanelRows].
struct PromptWorkspace {
  float* queries;  // [head_dim] times the scale of the scores
  float* sums;     // [head_dim] of weights times V, so far
  float* indices;  // which of the task's queries a row belongs to
  float* largest;  // score so far
  float* totals;   // of weights so far
  float* scores;   // [kTileTokens] of one panel, then its weights
  float* keys;     // [kTileTokens, head_dim] of the block of keys
  float* values;   // [kTileTokens, head_dim]

  PromptWorkspace(std::int64_t num_panels, std::int64_t head_dim, float* floats) {
    const std::int64_t rows = num_panels * kPanelRows;
    const auto take = [&](std::int64_t count) {
      float* taken = floats;
      floats += round_to_line(count);
      return taken;
    };
    queries = take(rows * head_dim);
    sums = take(rows * head_dim);
    indices = take(rows);
    largest = take(rows);
    totals = take(rows);
    scores = take(kTileTokens * kPanelRows);
    keys = take(kTileTokens * head_dim);
    values = take(kTileTokens * head_dim);
  }
  // The part of one panel.
  PromptWorkspace of(std::int64_t panel, std::int64_t head_dim) const {
    PromptWorkspace part = *this;
    const std::int64_t rows = panel * kPanelRows;
    part.queries += rows * head_dim;
    part.sums += rows * head_dim;
    part.indices += rows;
    part.largest += rows;
    part.totals += rows;
    return part;
  }
};

// One KV head's part of a call: queries [first, first + num_queries) of `args`.
struct PromptTask {
  const PromptArgs& args;
  std::int64_t head, first, num_queries;

  std::int64_t num_rows() const { return num_queries * args.group_size; }
  std::int64_t num_panels() const { return (num_rows() + kPanelRows - 1) / kPanelRows; }
  std::int64_t position() const { return args.start + first; }  // of its first query
  std::int64_t query_of(std::int64_t row) const { return (row < num_rows() ? row : num_rows() - 1) / args.group_size; }
  // The first key that a query of the task sees.
  std::int64_t first_key(std::int64_t query) const {
    const std::int64_t key = args.window ? position() + query - args.window + 1 : 0;
    return key > 0 ? key : 0;
  }
  std::int64_t head_bytes() const { return args.head_dim * wire_bytes(args.dtype); }
  // Offset of a row's query or output, but for the query's row in memory.
  std::int64_t head_offset(std::int64_t row) const {
    return (head * args.group_size + row % args.group_size) * head_bytes();
  }
};

// Tokens [first, stop) of a block.
struct Tokens {
  int first, stop;
};

// Which rows of a panel see a token of a block.
struct Sight {
  const float* indices;
  std::int64_t ahead;   // of the block's first token before the task's first query; negative: it is older
  std::int64_t window;  // 0: none

  // `seen` for rows that see token t, `unseen` for the others.
  Vec choose(int t, int vec, Vec seen, Vec unseen) const {
    const Vec index = load(indices + vec * Vec::width);
    const Vec chosen = choose_below(index, static_cast<float>(ahead + t), unseen, seen);
    return window ? choose_below(index, static_cast<float>(ahead + t + window), chosen, unseen) : chosen;
  }
};

// sums[i] += a[i * stride + k * step] * b[k] over k in `range`, where sums and b are [.., kPanelRows] and only `wide`
// vectors of these are computed. `keep(k, v, sum, old)` is the new sum.
template <int deep, int wide, class Keep>
__attribute__((always_inline)) inline void add_products(const float* a, std::int64_t stride, std::int64_t step,
                                                        const float* b, Tokens range, float* sums, Keep keep) {
  Vec sum[deep][wide];
#pragma GCC unroll 8
  for (int i = 0; i < deep; ++i) {
#pragma GCC unroll 3
    for (int v = 0; v < wide; ++v) sum[i][v] = load(sums + i * kPanelRows + v * Vec::width);
  }
#pragma GCC unroll 2
  for (int k = range.first; k < range.stop; ++k) {
    Vec x[wide];
#pragma GCC unroll 3
    for (int v = 0; v < wide; ++v) x[v] = load(b + std::int64_t{k} * kPanelRows + v * Vec::width);
#pragma GCC unroll 8
    for (int i = 0; i < deep; ++i) {
      const Vec factor = broadcast(a[i * stride + k * step]);
#pragma GCC unroll 3
      for (int v = 0; v < wide; ++v) sum[i][v] = keep(k, v, fma(factor, x[v], sum[i][v]), sum[i][v]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < deep; ++i) {
#pragma GCC unroll 3
    for (int v = 0; v < wide; ++v) store(sums + i * kPanelRows + v * Vec::width, sum[i][v]);
  }
}

constexpr auto keep_all = [](int, int, Vec sum, Vec) { return sum; };

// Scores of a panel's first `wide` vectors with some tokens and a few after them.
template <int wide>
void score_panel(const PromptWorkspace& panel, int head_dim, Tokens tokens) {
  for (int t = tokens.first / kDeep * kDeep; t < tokens.stop; t += kDeep) {
    float* scores = panel.scores + t * kPanelRows;
    memset(scores, 0, sizeof(float) * kDeep * kPanelRows);
    add_products<kDeep, wide>(panel.keys + std::int64_t{t} * head_dim, head_dim, 1, panel.queries, {0, head_dim},
                              scores, keep_all);
  }
}

// Adds some tokens' V, times the weights in `scores`.
template <int wide, class Keep>
void add_values(const PromptWorkspace& panel, int head_dim, Tokens tokens, Keep keep) {
  if (tokens.first >= tokens.stop) return;
  for_vecs<kDeep>(head_dim, [&](auto deep, int d) {
    add_products<decltype(deep)::value, wide>(panel.values + d, 1, head_dim, panel.scores, tokens,
                                              panel.sums + std::int64_t{d} * kPanelRows, keep);
  });
}

// Scores -inf where a row does not see a token: of these, `tokens` may be any.
template <int wide>
void hide(const PromptWorkspace& panel, const Sight& sight, Tokens tokens) {
  for (int t = tokens.first; t < tokens.stop; ++t) {
    for (int v = 0; v < wide; ++v) {
      float* score = panel.scores + t * kPanelRows + v * Vec::width;
      store(score, sight.choose(t, v, load(score), broadcast(kNegInf)));
    }
  }
}

// Turns scores into weights exp(score - largest) and brings sums and totals to the new largest.
template <int wide>
void weigh_panel(const PromptWorkspace& panel, int head_dim, Tokens tokens) {
  constexpr float lowest = -0x1.fffffep127f;
  for (int v = 0; v < wide; ++v) {
    float* scores = panel.scores + v * Vec::width;
    float *largest_at = panel.largest + v * Vec::width, *total_at = panel.totals + v * Vec::width;
    const Vec before = load(largest_at);
    Vec largest = before;
    for (int t = tokens.first; t < tokens.stop; ++t) largest = max(load(scores + t * kPanelRows), largest);
    const Vec base = choose_below(largest, lowest, broadcast(0.0f), largest);  // `exp_base`
    Vec sum = broadcast(0.0f);
    for (int t = tokens.first; t < tokens.stop; ++t) {
      const Vec weight = exp_nonpositive(sub(load(scores + t * kPanelRows), base));
      store(scores + t * kPanelRows, weight);
      sum = add(sum, weight);
    }
    const Vec factor = exp_nonpositive(sub(before, base));
    store(total_at, add(mul(load(total_at), factor), sum));
    store(largest_at, largest);
    if (reduce_max(abs(sub(factor, broadcast(1.0f)))) == 0.0f) continue;
    float* sums = panel.sums + v * Vec::width;
    for (int d = 0; d < head_dim; ++d) store(sums + d * kPanelRows, mul(load(sums + d * kPanelRows), factor));
  }
}

int clamp(std::int64_t x, std::int64_t low, std::int64_t high) {
  return static_cast<int>(x < low ? low : x > high ? high : x);
}

// A panel's rows, from `row` on, with the block of keys that begins at token `block`.
template <int wide>
void attend_block(const PromptTask& task, const PromptWorkspace& panel, std::int64_t row, std::int64_t block) {
  const int head_dim = task.args.head_dim;
  const std::int64_t first = task.query_of(row), last = task.query_of(row + wide * Vec::width - 1);
  const std::int64_t newest = task.position() - block;  // of the task's first query, counted in the block
  const Tokens seen = {clamp(task.first_key(first) - block, 0, kTileTokens), clamp(newest + last + 1, 0, kTileTokens)};
  if (seen.first >= seen.stop) return;
  const int full_first = clamp(task.first_key(last) - block, seen.first, seen.stop);  // seen by all rows from here
  const int full_stop = clamp(newest + first + 1, full_first, seen.stop);             // to here
  const Tokens older = {seen.first, full_first}, newer = {full_stop, seen.stop};
  const Sight sight = {panel.indices, block - task.position(), task.args.window};
  score_panel<wide>(panel, head_dim, seen);
  if (task.args.softcap > 0) {
    for (int i = 0; i < kPanelRows; ++i) cap_scores(panel.scores + i * kTileTokens, task.args.softcap);
  }
  hide<wide>(panel, sight, older);
  hide<wide>(panel, sight, newer);
  weigh_panel<wide>(panel, head_dim, seen);
  // A weight of 0 would not keep an infinite V from a row that does not see it.
  const auto keep_seen = [&](int t, int v, Vec sum, Vec old) { return sight.choose(t, v, sum, old); };
  add_values<wide>(panel, head_dim, older, keep_seen);
  add_values<wide>(panel, head_dim, {full_first, full_stop}, keep_all);
  add_values<wide>(panel, head_dim, newer, keep_seen);
}

template <class T>
void load_row(const char* source, float* target, int head_dim, float scale) {
  const T* from = reinterpret_cast<const T*>(source);
  over_vectors(head_dim, [=](std::int64_t d, std::int64_t left) {
    store_some(target + d, mul(load_some(from + d, left), broadcast(scale)), left);
  });
}

// K or V of one KV head at tokens [first, stop), as floats.
template <class T>
void load_block(const char* source, std::int64_t row_bytes, std::int64_t block, Tokens tokens, int head_dim,
                float* target) {
  for (int t = tokens.first; t < tokens.stop; ++t) {
    load_row<T>(source + (block + t) * row_bytes, target + std::int64_t{t} * head_dim, head_dim, 1.0f);
  }
}

// Queries into panels; beyond the last row zeros, whose results nobody reads.
template <class T>
void begin_task(const PromptTask& task, const PromptWorkspace& workspace) {
  const PromptArgs& args = task.args;
  const std::int64_t all_rows = task.num_panels() * kPanelRows;
  memset(workspace.queries, 0, sizeof(float) * static_cast<size_t>(all_rows * args.head_dim));
  memset(workspace.sums, 0, sizeof(float) * static_cast<size_t>(all_rows * args.head_dim));
  memset(workspace.totals, 0, sizeof(float) * static_cast<size_t>(all_rows));
  memset(workspace.scores, 0, sizeof(float) * kTileTokens * kPanelRows);
  for (std::int64_t row = 0; row < all_rows; ++row) {
    workspace.largest[row] = kNegInf;
    workspace.indices[row] = static_cast<float>(task.query_of(row));
  }
  float* wide = workspace.keys;  // not in use yet
  for (std::int64_t row = 0; row < task.num_rows(); ++row) {
    const std::int64_t query = task.first + task.query_of(row);
    load_row<T>(args.queries + query * args.query_row_bytes + task.head_offset(row), wide, args.head_dim, args.scale);
    float* column = workspace.of(row / kPanelRows, args.head_dim).queries + row % kPanelRows;
    for (int d = 0; d < args.head_dim; ++d) column[std::int64_t{d} * kPanelRows] = wide[d];
  }
}

template <class T>
void end_task(const PromptTask& task, const PromptWorkspace& workspace) {
  const PromptArgs& args = task.args;
  float* wide = workspace.keys;  // not in use any more
  for (std::int64_t row = 0; row < task.num_rows(); ++row) {
    const PromptWorkspace panel = workspace.of(row / kPanelRows, args.head_dim);
    const float* column = panel.sums + row % kPanelRows;
    for (int d = 0; d < args.head_dim; ++d) wide[d] = column[std::int64_t{d} * kPanelRows];
    const Vec inverse = broadcast(1.0f / panel.totals[row % kPanelRows]);
    const std::int64_t query = task.first + task.query_of(row);
    T* out = reinterpret_cast<T*>(args.out + query * args.out_row_bytes + task.head_offset(row));
    over_vectors(args.head_dim, [=](std::int64_t d, std::int64_t left) {
      store_some(out + d, fit(mul(load_some(wide + d, left), inverse), out), left);
    });
  }
}

template <class T>
void attend_task(const PromptTask& task, float* floats) {
  const PromptArgs& args = task.args;
  const PromptWorkspace workspace(task.num_panels(), args.head_dim, floats);
  begin_task<T>(task, workspace);
  const std::int64_t first_key = task.first_key(0), stop_key = task.position() + task.num_queries;
  for (std::int64_t block = first_key / kTileTokens * kTileTokens; block < stop_key; block += kTileTokens) {
    const Tokens tokens = {clamp(first_key - block, 0, kTileTokens), clamp(stop_key - block, 0, kTileTokens)};
    const std::int64_t offset = task.head * task.head_bytes();
    load_block<T>(args.keys + offset, args.key_row_bytes, block, tokens, args.head_dim, workspace.keys);
    load_block<T>(args.values + offset, args.value_row_bytes, block, tokens, args.head_dim, workspace.values);
    for (std::int64_t p = 0; p < task.num_panels(); ++p) {
      const std::int64_t row = p * kPanelRows, vecs = (task.num_rows() - row + Vec::width - 1) / Vec::width;
      const PromptWorkspace panel = workspace.of(p, args.head_dim);
      if (vecs >= kWide) {
        attend_block<kWide>(task, panel, row, block);
      } else if (vecs == 2) {
        attend_block<2>(task, panel, row, block);
      } else {
        attend_block<1>(task, panel, row, block);
      }
    }
  }
  end_task<T>(task, workspace);
}

constexpr void (*kAttendTask[3])(const PromptTask&, float*) = {attend_task<float>, attend_task<Half>,
                                                               attend_task<BFloat16>};

void attend_prompt(const PromptArgs& args, std::int64_t head, std::int64_t first, std::int64_t stop, float* workspace) {
  kAttendTask[args.dtype]({args, head, first, stop - first}, workspace);
}

}  // namespace
