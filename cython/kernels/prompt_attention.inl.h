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

// How numbers lie that a product reads: a word of 32 bits is one float, or two bfloat16 where the processor multiplies
// and adds up two at once. Two are neighbours along head_dim (q, K), or of two tokens (V, weights).
struct Single {
  static constexpr int together = 1;

  static Vec add_product(float word, Vec x, Vec sum) { return fma(broadcast(word), x, sum); }
  // The same for token t where a row sees it.
  static Vec add_seen(float word, Vec x, Vec sum, const Sight& sight, int t, int vec) {
    return sight.choose(t, vec, add_product(word, x, sum), sum);
  }
  // A token's q or K of one head as words.
  template <class T>
  static void load_row(const char* source, int head_dim, float* words) {
    const T* from = reinterpret_cast<const T*>(source);
    over_vectors(head_dim,
                 [=](std::int64_t d, std::int64_t left) { store_some(words + d, load_some(from + d, left), left); });
  }
  // V of one head at some tokens of a block whose first token is at `source`.
  template <class T>
  static void load_values(const char* source, std::int64_t row_bytes, Tokens tokens, int head_dim, float* words) {
    for (int t = tokens.first; t < tokens.stop; ++t) {
      load_row<T>(source + t * row_bytes, head_dim, words + std::int64_t{t} * head_dim);
    }
  }
  // Weights exp(score - base) of one word, from the block's scores into its place among the words; adds them to `sum`.
  static Vec weigh(float* scores, int word, Vec base, Vec sum) {
    const Vec weight = exp_nonpositive(sub(load(scores + word * kPanelRows), base));
    store(scores + word * kPanelRows, weight);
    return add(sum, weight);
  }
  // 0 times each number of some words, added to `sum`: NaN if one is not finite.
  static Vec add_zeros(Vec words, Vec sum) { return fma(words, broadcast(0.0f), sum); }
};

#ifdef __AVX512BF16__
struct Pair {
  static constexpr int together = 2;

  static Vec add_product(float word, Vec x, Vec sum) { return add_pair_product(sum, broadcast(word), x); }
  // Of a pair that a row sees half of, the other half of V counts as 0: it may be infinite.
  static Vec add_seen(float word, Vec x, Vec sum, const Sight& sight, int pair, int vec) {
    std::uint32_t bits;
    memcpy(&bits, &word, sizeof bits);
    const auto part = [&](std::uint32_t mask) {
      const std::uint32_t left = bits & mask;
      float one;
      memcpy(&one, &left, sizeof one);
      return add_product(one, x, sum);
    };
    const int t = 2 * pair;
    const Vec with_first = sight.choose(t + 1, vec, add_product(word, x, sum), part(0xffffu));
    return sight.choose(t, vec, with_first, sight.choose(t + 1, vec, part(0xffff0000u), sum));
  }
  template <class T>
  static void load_row(const char* source, int head_dim, float* words) {
    if (head_dim % 2) words[head_dim / 2] = 0.0f;
    memcpy(words, source, sizeof(T) * static_cast<size_t>(head_dim));
  }
  template <class T>
  static void load_values(const char* source, std::int64_t row_bytes, Tokens tokens, int head_dim, float* words) {
    const auto row = [&](int t) { return reinterpret_cast<const T*>(source + t * row_bytes); };
    for (int t = tokens.first / 2 * 2; t < tokens.stop; t += 2) {
      const T* low = row(t < tokens.first ? t + 1 : t);  // no row sees what is beside the tokens
      const T* high = row(t + 1 < tokens.stop ? t + 1 : t);
      float* target = words + std::int64_t{t / 2} * head_dim;
      over_vectors(head_dim, [=](std::int64_t d, std::int64_t left) {
        store_some(target + d, join_pair(load_some(low + d, left), load_some(high + d, left)), left);
      });
    }
  }
  static Vec weigh(float* scores, int word, Vec base, Vec sum) {
    const float* pair = scores + 2 * word * kPanelRows;
    const Vec low = exp_nonpositive(sub(load(pair), base)), high = exp_nonpositive(sub(load(pair + kPanelRows), base));
    const Vec weights = round_pair(low, high);
    store(scores + word * kPanelRows, weights);
    return add(sum, add(low_of_pair(weights), high_of_pair(weights)));
  }
  static Vec add_zeros(Vec words, Vec sum) {
    return Single::add_zeros(low_of_pair(words), Single::add_zeros(high_of_pair(words), sum));
  }
};
#endif

template <class T>
struct NumbersOf {
  using Type = Single;
};
#ifdef __AVX512BF16__
template <>
struct NumbersOf<BFloat16> {
  using Type = Pair;
};
#endif

template <class N>
constexpr int words_of(int head_dim) {
  return (head_dim + N::together - 1) / N::together;
}

// Where a task's numbers are; of one panel after the other, a panel's [.., kPanelRows].
struct PromptWorkspace {
  float* queries;  // [head_dim] words
  float* sums;     // [head_dim] of weights times V, so far
  float* indices;  // which of the task's queries a row belongs to
  float* largest;  // score so far
  float* totals;   // of weights so far
  float* scores;   // [kTileTokens] of one panel, then words of its weights
  float* keys;     // [kTileTokens, head_dim] words of the block of keys
  float* values;   // [kTileTokens, head_dim] words

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
  float sink(std::int64_t row) const {
    return args.sinks && row < num_rows() ? args.sinks[head * args.group_size + row % args.group_size] : kNegInf;
  }
  // Offset of a row's query or output, but for the query's row in memory.
  std::int64_t head_offset(std::int64_t row) const {
    return (head * args.group_size + row % args.group_size) * head_bytes();
  }
};

// Sums of products that live in registers: `deep` results for `wide` vectors of rows.
template <int deep, int wide>
struct PanelSums {
  Vec at[deep][wide];

  // step(at, sum) is the new sum, `at` where it lies among [deep, kPanelRows].
  template <class Step>
  __attribute__((always_inline)) void each(Step step) {
#pragma GCC unroll 8
    for (int i = 0; i < deep; ++i) {
#pragma GCC unroll 3
      for (int v = 0; v < wide; ++v) at[i][v] = step(i * kPanelRows + v * Vec::width, at[i][v]);
    }
  }
};

// sum[i] += a[i * stride + k * step] * b[k] over words k in `range`, where b is [.., kPanelRows]. `add(word, x, sum, k,
// v)` is the new sum.
template <int deep, int wide, class Add>
__attribute__((always_inline)) inline void add_products(PanelSums<deep, wide>& sums, const float* a,
                                                        std::int64_t stride, std::int64_t step, const float* b,
                                                        Tokens range, Add add) {
#pragma GCC unroll 2
  for (int k = range.first; k < range.stop; ++k) {
    Vec x[wide];
#pragma GCC unroll 3
    for (int v = 0; v < wide; ++v) x[v] = load(b + std::int64_t{k} * kPanelRows + v * Vec::width);
#pragma GCC unroll 8
    for (int i = 0; i < deep; ++i) {
      const float word = a[i * stride + k * step];
#pragma GCC unroll 3
      for (int v = 0; v < wide; ++v) sums.at[i][v] = add(word, x[v], sums.at[i][v], k, v);
    }
  }
}

// Scores of a panel's first `wide` vectors with some tokens and a few beside them.
template <class N, int wide>
void score_panel(const PromptWorkspace& panel, int head_dim, float scale, Tokens tokens) {
  const int num_words = words_of<N>(head_dim);
  for (int t = tokens.first / kDeep * kDeep; t < tokens.stop; t += kDeep) {
    PanelSums<kDeep, wide> sums;
    sums.each([](int, Vec) { return broadcast(0.0f); });
    add_products(sums, panel.keys + std::int64_t{t} * num_words, num_words, 1, panel.queries, {0, num_words},
                 [](float word, Vec x, Vec sum, int, int) { return N::add_product(word, x, sum); });
    float* scores = panel.scores + t * kPanelRows;
    sums.each([=](int at, Vec sum) {
      store(scores + at, mul(sum, broadcast(scale)));
      return sum;
    });
  }
}

// Adds some tokens' V, times the weights in `scores`.
template <class N, int wide, class Add>
void add_values(const PromptWorkspace& panel, int head_dim, Tokens tokens, Add add) {
  const Tokens words = {tokens.first / N::together, (tokens.stop + N::together - 1) / N::together};
  if (words.first >= words.stop) return;
  for_vecs<kDeep>(head_dim, [&](auto deep, int d) {
    float* target = panel.sums + std::int64_t{d} * kPanelRows;
    PanelSums<decltype(deep)::value, wide> sums;
    sums.each([=](int at, Vec) { return load(target + at); });
    add_products(sums, panel.values + d, 1, head_dim, panel.scores, words, add);
    sums.each([=](int at, Vec sum) {
      store(target + at, sum);
      return sum;
    });
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
template <class N, int wide>
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
    for (int k = tokens.first / N::together; k < tokens.stop / N::together; ++k) sum = N::weigh(scores, k, base, sum);
    const Vec factor = exp_nonpositive(sub(before, base));
    store(total_at, add(mul(load(total_at), factor), sum));
    store(largest_at, largest);
    if (reduce_add(sub(factor, broadcast(1.0f))) == 0.0f) continue;  // all are 1: none is above it, and NaN stays
    float* sums = panel.sums + v * Vec::width;
    for (int d = 0; d < head_dim; ++d) store(sums + d * kPanelRows, mul(load(sums + d * kPanelRows), factor));
  }
}

int clamp(std::int64_t x, std::int64_t low, std::int64_t high) {
  return static_cast<int>(x < low ? low : x > high ? high : x);
}

// A panel's rows, from `row` on, with the block of keys that begins at token `block`. Where V `is_finite`, what a row
// does not see adds its weight of 0; else it has to be left out.
template <class N, int wide>
void attend_block(const PromptTask& task, const PromptWorkspace& panel, std::int64_t row, std::int64_t block,
                  bool is_finite) {
  const PromptArgs& args = task.args;
  const std::int64_t first = task.query_of(row), last = task.query_of(row + wide * Vec::width - 1);
  const std::int64_t newest = task.position() - block;  // of the task's first query, counted in the block
  Tokens seen = {clamp(task.first_key(first) - block, 0, kTileTokens), clamp(newest + last + 1, 0, kTileTokens)};
  if (seen.first >= seen.stop) return;
  seen.first = seen.first / N::together * N::together;
  seen.stop = (seen.stop + N::together - 1) / N::together * N::together;
  const int whole = N::together - 1;  // words that all rows see lie between here
  const int full_first = clamp(task.first_key(last) - block + whole, seen.first, seen.stop) / N::together * N::together;
  const int full_stop = clamp(newest + first + 1, full_first, seen.stop) / N::together * N::together;
  const Tokens older = {seen.first, full_first}, newer = {full_stop, seen.stop};
  const Sight sight = {panel.indices, block - task.position(), args.window};
  score_panel<N, wide>(panel, args.head_dim, args.scale, seen);
  if (args.softcap > 0) {
    for (int i = 0; i < kPanelRows; ++i) cap_scores(panel.scores + i * kTileTokens, args.softcap);
  }
  hide<wide>(panel, sight, older);
  hide<wide>(panel, sight, newer);
  weigh_panel<N, wide>(panel, args.head_dim, seen);
  const auto add_seen = [&](float word, Vec x, Vec sum, int k, int v) {
    return N::add_seen(word, x, sum, sight, k, v);
  };
  const auto add_all = [](float word, Vec x, Vec sum, int, int) { return N::add_product(word, x, sum); };
  if (is_finite) return add_values<N, wide>(panel, args.head_dim, seen, add_all);
  add_values<N, wide>(panel, args.head_dim, older, add_seen);
  add_values<N, wide>(panel, args.head_dim, {full_first, full_stop}, add_all);
  add_values<N, wide>(panel, args.head_dim, newer, add_seen);
}

// Queries into panels; beyond the last row zeros, whose results nobody reads.
template <class T, class N>
void begin_task(const PromptTask& task, const PromptWorkspace& workspace) {
  const PromptArgs& args = task.args;
  const std::int64_t all_rows = task.num_panels() * kPanelRows;
  memset(workspace.queries, 0, sizeof(float) * static_cast<size_t>(all_rows * args.head_dim));
  memset(workspace.sums, 0, sizeof(float) * static_cast<size_t>(all_rows * args.head_dim));
  memset(workspace.scores, 0, sizeof(float) * kTileTokens * kPanelRows);
  for (std::int64_t row = 0; row < all_rows; ++row) {
    const float sink = task.sink(row);  // a score that is there first, with no value
    workspace.largest[row] = sink;
    workspace.totals[row] = sink > kNegInf ? 1.0f : 0.0f;
    workspace.indices[row] = static_cast<float>(task.query_of(row));
  }
  float* words = workspace.keys;  // not in use yet
  for (std::int64_t row = 0; row < task.num_rows(); ++row) {
    const std::int64_t query = task.first + task.query_of(row);
    N::template load_row<T>(args.queries + query * args.query_row_bytes + task.head_offset(row), args.head_dim, words);
    float* column = workspace.of(row / kPanelRows, args.head_dim).queries + row % kPanelRows;
    for (int i = 0; i < words_of<N>(args.head_dim); ++i) column[std::int64_t{i} * kPanelRows] = words[i];
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

// Whether V of some tokens of a block has neither infinite values nor NaN.
template <class N>
bool are_finite(const float* values, Tokens tokens, int head_dim) {
  const float* first = values + std::int64_t{tokens.first / N::together} * head_dim;
  const float* stop = values + std::int64_t{(tokens.stop + N::together - 1) / N::together} * head_dim;
  Vec sum = broadcast(0.0f);
  over_vectors(stop - first,
               [&](std::int64_t i, std::int64_t left) { sum = N::add_zeros(load_some(first + i, left), sum); });
  return reduce_add(sum) == 0.0f;
}

template <class T>
void attend_task(const PromptTask& task, float* floats) {
  using N = typename NumbersOf<T>::Type;
  const PromptArgs& args = task.args;
  const PromptWorkspace workspace(task.num_panels(), args.head_dim, floats);
  begin_task<T, N>(task, workspace);
  const std::int64_t first_key = task.first_key(0), stop_key = task.position() + task.num_queries;
  for (std::int64_t block = first_key / kTileTokens * kTileTokens; block < stop_key; block += kTileTokens) {
    const Tokens tokens = {clamp(first_key - block, 0, kTileTokens), clamp(stop_key - block, 0, kTileTokens)};
    const std::int64_t offset = task.head * task.head_bytes();
    const char* keys = args.keys + offset + block * args.key_row_bytes;
    for (int t = tokens.first; t < tokens.stop; ++t) {
      float* words = workspace.keys + std::int64_t{t} * words_of<N>(args.head_dim);
      N::template load_row<T>(keys + t * args.key_row_bytes, args.head_dim, words);
    }
    N::template load_values<T>(args.values + offset + block * args.value_row_bytes, args.value_row_bytes, tokens,
                               args.head_dim, workspace.values);
    const bool is_finite = are_finite<N>(workspace.values, tokens, args.head_dim);
    for (std::int64_t p = 0; p < task.num_panels(); ++p) {
      const std::int64_t row = p * kPanelRows, vecs = (task.num_rows() - row + Vec::width - 1) / Vec::width;
      const PromptWorkspace panel = workspace.of(p, args.head_dim);
      if (vecs >= kWide) {
        attend_block<N, kWide>(task, panel, row, block, is_finite);
      } else if (vecs == 2) {
        attend_block<N, 2>(task, panel, row, block, is_finite);
      } else {
        attend_block<N, 1>(task, panel, row, block, is_finite);
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
