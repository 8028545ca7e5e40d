// Random cases through every instruction set that runs here, against plain arithmetic (check_plain.h). It is what
// sanitizers and other processors run; the tests in Python look at threads, memory management and whole steps.
//
//   kernel_check [COUNT | SECONDSs] [SEED]      e.g. kernel_check 500, kernel_check 60s 7; default 200 cases, seed 1
//
// Case i has the seed SEED + i: a case that fails is run alone by `kernel_check 1 THAT_SEED`.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "check_plain.h"

namespace {

using namespace fastdecode;
using plain::Numbers;
using plain::Row;

constexpr const char* kNames[] = {"fp32", "fp16", "bf16", "int8", "int4"};

// The same numbers on every platform, which <random>'s distributions do not promise.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t bits() {  // splitmix64
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  int upto(int most) { return static_cast<int>(bits() % (static_cast<std::uint64_t>(most) + 1)); }  // 0 ... most
  int between(int least, int most) { return least + upto(most - least); }
  bool one_in(int n) { return upto(n - 1) == 0; }
  float bell() {  // about normal
    const std::uint64_t z = bits();
    const int sum = static_cast<int>((z & 0xffff) + (z >> 16 & 0xffff) + (z >> 32 & 0xffff) + (z >> 48));
    return static_cast<float>(sum - 0x1fffe) * 0x1.bb67aep-16f;  // times sqrt(3): a variance of 1
  }

 private:
  std::uint64_t state_;
};

struct Case {
  int num_rows, num_kv_heads, group_size, head_dim, block_size, recent_block_size, window, span;
  bool has_recent;
  std::int32_t key_dtype, value_dtype, recent_key_dtype, recent_value_dtype, wire_dtype;
  int special;     // of how many values one is unusual; 0: none
  bool has_sinks;
  bool can_break;  // unusual values include infinities and NaN
};

Case random_case(Random& random) {
  Case c = {};
  c.num_rows = random.between(1, 3);
  c.num_kv_heads = random.between(1, 3);
  c.group_size = random.between(1, random.one_in(3) ? 16 : 4);
  c.head_dim = 8 * random.between(1, random.one_in(3) ? 32 : 10);
  c.block_size = 8 * random.between(1, 8);
  c.recent_block_size = 8 * random.between(1, 8);
  c.window = random.one_in(2) ? random.between(1, 200) : 0;
  c.span = random.one_in(4) ? random.between(1, 70) : 32 * random.between(1, 16);
  c.key_dtype = random.upto(4);
  c.value_dtype = random.upto(4);
  c.has_recent = random.one_in(2);
  c.recent_key_dtype = random.upto(2);
  c.recent_value_dtype = random.upto(2);
  c.wire_dtype = random.upto(2);
  c.special = random.one_in(2) ? 0 : 1 << random.between(2, 12);
  c.can_break = random.one_in(2);
  c.has_sinks = random.one_in(3);
  return c;
}

std::string describe(const Case& c) {
  char text[400];
  std::snprintf(text, sizeof text,
                "rows %d, KV heads %d, group %d, head_dim %d, block %d, recent %s (block %d, K %s, V %s), window %d, "
                "span %d, K %s, V %s, wire %s, %s one value in %d is special%s",
                c.num_rows, c.num_kv_heads, c.group_size, c.head_dim, c.block_size, c.has_recent ? "yes" : "no",
                c.recent_block_size, kNames[c.recent_key_dtype], kNames[c.recent_value_dtype], c.window, c.span,
                kNames[c.key_dtype], kNames[c.value_dtype], kNames[c.wire_dtype],
                c.has_sinks ? "sinks," : "no sinks,", c.special,
                c.can_break ? ", perhaps infinite or NaN" : "");
  return text;
}

// Zeros, halves' largest and subnormal values, floats' subnormal ones; then those that break a result. Products of
// the largest stay far below fp32's limit: where fp32 overflows, double says nothing about it.
float special_value(Random& random, const Case& c, bool is_query) {
  constexpr float kValues[] = {0.0f, -0.0f, 65504.0f, -65504.0f, 3e-6f, -6e-8f, 1e5f, -1e6f, 1e-30f, 1e-41f};
  constexpr float kBreaking[] = {INFINITY, -INFINITY, NAN};
  // All scores of an infinite query may be -infinity, beside a sink no error, or NaN as integers have none.
  const bool can_break = c.can_break && !(is_query && c.has_sinks);
  if (can_break && random.one_in(4)) return kBreaking[random.upto(2)];
  return kValues[random.upto(is_query ? 8 : 9)];  // 1e-41 times the scale could vanish beside an infinite K
}

// A value that the wire's type can hold.
float wire_value(Random& random, const Case& c, float size, bool is_query) {
  const bool is_special = c.special && random.one_in(is_query ? 4 * c.special : c.special);
  const float x = is_special ? special_value(random, c, is_query) : size * random.bell();
  return static_cast<float>(plain::rounded(x, c.wire_dtype));
}

// Of the values of one token: sometimes too small for a scale, or for all 16-bit types.
float token_size(Random& random, const Case& c) {
  constexpr float kSizes[] = {0.0f, 1e-6f, 1e-20f, 1e-29f, 1e-40f, 300.0f};
  return c.special && random.one_in(8) ? kSizes[random.upto(5)] : 1.0f;
}

std::int64_t wire_bytes(std::int32_t dtype) { return dtype == kFloat32 ? 4 : 2; }

// Values of the wire as bytes, exactly as many as there are.
std::vector<char> on_wire(const std::vector<float>& values, std::int32_t dtype) {
  const std::int64_t size = wire_bytes(dtype);
  std::vector<char> bytes(values.size() * size);
  for (std::size_t i = 0; i < values.size(); ++i) {
    std::uint32_t bits;
    std::memcpy(&bits, &values[i], sizeof bits);
    std::uint16_t half = static_cast<std::uint16_t>(bits >> 16);
    if (dtype == kFloat16) half = plain::half_bits(values[i]);
    std::memcpy(bytes.data() + i * size, dtype == kFloat32 ? static_cast<void*>(&bits) : &half, size);
  }
  return bytes;
}

// Memory on a cache line, exactly as large as asked for: a sanitizer sees every step beyond it.
struct FreeAligned {
  void operator()(float* p) const { std::free(p); }
};
using Floats = std::unique_ptr<float[], FreeAligned>;
Floats make_floats(std::int64_t count) {
  return Floats(static_cast<float*>(std::aligned_alloc(64, count * sizeof(float))));
}

// Tokens [firsts[r], positions[r]] of all rows, in shuffled blocks; all other memory is NaN.
struct Store {
  LayerView layer = {};
  std::vector<char> arena;
  std::vector<std::int32_t> blocks;
  std::vector<std::int64_t> table_base;

  Store(const Case& c, std::int32_t key_dtype, std::int32_t value_dtype, int block_size, const std::vector<int>& firsts,
        const std::vector<int>& positions, Random& random) {
    for (int r = 0; r < c.num_rows; ++r) {
      const int first_block = firsts[r] / block_size, num_blocks = positions[r] / block_size - first_block + 1;
      table_base.push_back(static_cast<std::int64_t>(blocks.size()) - first_block);
      for (int i = 0; i < num_blocks; ++i) blocks.push_back(static_cast<std::int32_t>(blocks.size()));
    }
    for (int i = static_cast<int>(blocks.size()) - 1; i > 0; --i) std::swap(blocks[i], blocks[random.upto(i)]);
    layer.block_size = block_size;
    layer.head_dim = c.head_dim;
    layer.key_dtype = key_dtype;
    layer.value_dtype = value_dtype;
    layer.value_bytes = block_size * token_bytes(key_dtype, c.head_dim);
    layer.head_bytes = layer.value_bytes + block_size * token_bytes(value_dtype, c.head_dim);
    layer.block_bytes = c.num_kv_heads * layer.head_bytes;
    arena.assign(blocks.size() * layer.block_bytes, '\xff');
    layer.keys = arena.data();
  }

  std::int64_t block_of(int row, int token) const { return blocks[table_base[row] + token / layer.block_size]; }
  std::int64_t place(int row, int token) const {
    return block_of(row, token) * layer.block_size + token % layer.block_size;
  }
  Row read(int row, int token, int head, bool is_key) const {
    return plain::read_row(layer, block_of(row, token), token % layer.block_size, head, is_key);
  }
  Cache cache() const { return {layer, blocks.data(), table_base.data()}; }
};

// What all instruction sets are given.
struct Problem {
  Case c;
  std::vector<int> positions, firsts, borders;  // of each row: newest token, oldest visible, oldest in the recent copy
  std::vector<std::vector<float>> tokens;       // of each row: [position - first + 1, (K, V), num_kv_heads, head_dim]
  std::vector<float> queries;                   // [num_rows, num_heads, head_dim]
  std::vector<float> sinks;                     // [num_heads], or none
  float scale, softcap;

  Problem(const Case& config, Random& random) : c(config) {
    const int width = 2 * c.num_kv_heads * c.head_dim;
    for (int r = 0; r < c.num_rows; ++r) {
      const int position = random.one_in(6) ? 0 : random.upto(random.one_in(4) ? 700 : 120);
      const int first = c.window ? std::max(0, position + 1 - c.window) : 0;
      positions.push_back(position);
      firsts.push_back(first);
      borders.push_back(random.between(first, position));
      tokens.emplace_back();
      for (int t = first; t <= position; ++t) {
        const float size = token_size(random, c);
        for (int i = 0; i < width; ++i) tokens.back().push_back(wire_value(random, c, size, false));
      }
    }
    for (int i = 0; i < c.num_rows * num_heads() * c.head_dim; ++i) {
      queries.push_back(wire_value(random, c, 1.0f, true));
    }
    scale = random.one_in(2) ? 1.0f / std::sqrt(static_cast<float>(c.head_dim)) : 0.3f;
    softcap = random.one_in(3) ? random.one_in(2) ? 50.0f : 0.7f : 0.0f;
    for (int h = 0; c.has_sinks && h < num_heads(); ++h) sinks.push_back(3.0f * random.bell());
  }

  int num_heads() const { return c.num_kv_heads * c.group_size; }
  const float* token(int row, int token, int part, int head) const {
    const std::int64_t index = (std::int64_t{token - firsts[row]} * 2 + part) * c.num_kv_heads + head;
    return tokens[row].data() + index * c.head_dim;
  }
};

double within_wire(double x, std::int32_t dtype) {
  return dtype == kFloat16 ? std::fmax(-65504.0, std::fmin(65504.0, x)) : x;
}

// Half a unit in the last place of the output's type.
double wire_error(double x, std::int32_t dtype) {
  if (dtype == kFloat32) return 0;
  return dtype == kFloat16 ? std::fabs(x) * 0x1p-11 + 0x1p-25 : std::fabs(x) * 0x1p-8 + 0x1p-134;
}

// fp32 may turn what is infinite in double into NaN (a weight that has become 0), never into a number.
std::string compare(double got, double expected, double tolerance) {
  const bool good = std::isfinite(expected) ? std::fabs(got - expected) <= tolerance : !std::isfinite(got);
  if (good) return "";
  char text[120];
  std::snprintf(text, sizeof text, ": %.9g instead of %.9g, off by %.2g, allowed %.2g", got, expected,
                std::fabs(got - expected), tolerance);
  return text;
}

// Outputs of one query head from item `first` on.
std::string check_outputs(const std::vector<char>& out, std::int64_t first, std::int32_t dtype,
                          const plain::Attention& expected) {
  for (std::size_t d = 0; d < expected.out.size(); ++d) {
    const double got = plain::float_item(out.data(), first + static_cast<std::int64_t>(d), dtype);
    const double exact = std::isfinite(expected.out[d]) ? within_wire(expected.out[d], dtype) : expected.out[d];
    const double rounding = std::fmax(wire_error(exact, dtype), wire_error(got, dtype));
    const std::string wrong = compare(got, exact, expected.tolerance[d] + rounding);
    if (!wrong.empty()) return ", output " + std::to_string(d) + wrong;
  }
  return "";
}

// One problem on one instruction set. Functions return what is wrong, or an empty text.
class Check {
 public:
  Check(const Kernels& kernels, const Problem& problem, Random random)
      : kernels_(kernels), problem_(problem), c_(problem.c), random_(random) {
    stores_.emplace_back(c_, c_.key_dtype, c_.value_dtype, c_.block_size, problem.firsts, problem.positions, random_);
    if (c_.has_recent) {
      stores_.emplace_back(c_, c_.recent_key_dtype, c_.recent_value_dtype, c_.recent_block_size, problem.borders,
                           problem.positions, random_);
    }
  }

  std::string run() {
    store();
    std::string wrong = check_stored();
    if (!wrong.empty()) return wrong;
    attend();
    for (int r = 0; r < c_.num_rows && wrong.empty(); ++r) {
      for (int head = 0; head < c_.num_kv_heads && wrong.empty(); ++head) wrong = check_pair(r, head);
    }
    return wrong;
  }

 private:
  // The first token of a row that the store holds, and the first that it does not. With a recent copy the cache is
  // left without the tokens that are read there.
  int stored_first(int cache, int row) const { return cache ? problem_.borders[row] : problem_.firsts[row]; }
  int stored_stop(int cache, int row) const {
    return cache || !c_.has_recent ? problem_.positions[row] + 1 : problem_.borders[row];
  }

  void store() {
    for (int cache = 0; cache < static_cast<int>(stores_.size()); ++cache) {
      for (int r = 0; r < c_.num_rows; ++r) {
        const int first = stored_first(cache, r);
        std::vector<std::int64_t> places;
        for (int t = first; t < stored_stop(cache, r); ++t) places.push_back(stores_[cache].place(r, t));
        const std::vector<float>& all = problem_.tokens[r];
        const std::int64_t width = 2 * c_.num_kv_heads * c_.head_dim, begin = (first - problem_.firsts[r]) * width;
        const std::vector<float> rows(all.begin() + begin, all.begin() + begin + width * places.size());
        const std::vector<char> wire = on_wire(rows, c_.wire_dtype);
        const StoreArgs args = {stores_[cache].layer, places.data(), wire.data(), width * wire_bytes(c_.wire_dtype),
                                c_.num_kv_heads,      c_.wire_dtype};
        for (std::size_t i = 0; i < places.size(); ++i) kernels_.store_row(args, i);
      }
    }
  }

  // Every token that was stored is what plain arithmetic makes of it, every other one still NaN.
  std::string check_stored() {
    for (const Store& store : stores_) {
      const int cache = static_cast<int>(&store - stores_.data());
      for (int r = 0; r < c_.num_rows; ++r) {
        const int size = store.layer.block_size;
        const int begin = stored_first(cache, r) / size * size, end = (problem_.positions[r] / size + 1) * size;
        for (int t = begin; t < end; ++t) {
          for (int i = 0; i < 2 * c_.num_kv_heads; ++i) {
            const std::string wrong = check_token(cache, r, t, i % c_.num_kv_heads, i < c_.num_kv_heads);
            if (!wrong.empty()) return wrong;
          }
        }
      }
    }
    return "";
  }

  std::string check_token(int cache, int row, int token, int head, bool is_key) {
    const Store& store = stores_[cache];
    const Row got = store.read(row, token, head, is_key);
    bool good = true;
    if (token >= stored_first(cache, row) && token < stored_stop(cache, row)) {
      const std::int32_t dtype = is_key ? store.layer.key_dtype : store.layer.value_dtype;
      good = plain::same(plain::stored_row(problem_.token(row, token, is_key ? 0 : 1, head), c_.head_dim, dtype), got);
    } else {
      for (const plain::Number& number : got.numbers()) good = good && std::isnan(number.value);
    }
    if (good) return "";
    return std::string(is_key ? "K" : "V") + " as stored, cache " + std::to_string(cache) + ", row " +
           std::to_string(row) + ", token " + std::to_string(token) + ", KV head " + std::to_string(head);
  }

  // The spans of one row and KV head, in order, the newest token left out.
  std::vector<Span> spans(int row, int head) const {
    const int newest = problem_.positions[row], border = c_.has_recent ? problem_.borders[row] : newest;
    std::vector<Span> result;
    for (int start = problem_.firsts[row]; start < newest;) {
      const int cache = c_.has_recent && start >= border;
      const int stop = std::min((start / c_.span + 1) * c_.span, cache ? newest : border);
      result.push_back({row, head, start, stop, cache});
      start = stop;
    }
    return result;
  }

  void attend() {
    const std::vector<char> queries = on_wire(problem_.queries, c_.wire_dtype);
    const std::int64_t row_items = std::int64_t{problem_.num_heads()} * c_.head_dim;
    const std::int64_t row_bytes = row_items * wire_bytes(c_.wire_dtype);
    out_.assign(c_.num_rows * row_bytes, '\xff');
    lse_.assign(c_.num_rows * problem_.num_heads(), NAN);
    AttendArgs args = {};
    args.caches[0] = stores_.front().cache();
    args.caches[1] = stores_.back().cache();
    args.positions = problem_.positions.data();
    args.queries = queries.data();
    args.out = out_.data();
    args.query_row_bytes = args.out_row_bytes = row_bytes;
    args.lse = lse_.data();
    args.newest_cache = c_.has_recent;
    args.head_dim = c_.head_dim;
    args.group_size = c_.group_size;
    args.num_heads = problem_.num_heads();
    args.wire_dtype = c_.wire_dtype;
    args.scale = problem_.scale;
    args.softcap = problem_.softcap;
    args.sinks = c_.has_sinks ? problem_.sinks.data() : nullptr;
    for (int r = 0; r < c_.num_rows; ++r) {
      for (int head = 0; head < c_.num_kv_heads; ++head) attend_pair(args, r, head);
    }
  }

  void attend_pair(const AttendArgs& args, int row, int head) {
    const std::vector<Span> all = spans(row, head);
    const std::int64_t stride = partial_floats(c_.group_size, c_.head_dim);
    const Floats partials = make_floats(static_cast<std::int64_t>(all.size()) * stride);
    const Floats workspace = make_floats(workspace_floats(c_.group_size, c_.head_dim));
    // The next span is only asked for early: it may be any, or none.
    const std::vector<Span> others = spans(random_.upto(c_.num_rows - 1), random_.upto(c_.num_kv_heads - 1));
    for (std::size_t i = 0; i < all.size(); ++i) {
      const Span* next = i + 1 < all.size() ? &all[i + 1] : others.empty() ? nullptr : &others.front();
      if (random_.one_in(3)) next = nullptr;
      kernels_.attend_span(args, all[i], next, partials.get() + i * stride, workspace.get());
    }
    kernels_.finish_row(args, row, head, partials.get(), static_cast<std::int64_t>(all.size()), workspace.get());
  }

  // K or V of a KV head at all tokens that a row sees, as they were read.
  std::vector<Numbers> rows_of(int row, int head, bool is_key) const {
    std::vector<Numbers> rows;
    for (int t = problem_.firsts[row]; t <= problem_.positions[row]; ++t) {
      rows.push_back(stores_[c_.has_recent && t >= problem_.borders[row]].read(row, t, head, is_key).numbers());
    }
    return rows;
  }

  std::string check_pair(int row, int head) {
    const std::vector<Numbers> keys = rows_of(row, head, true), values = rows_of(row, head, false);
    for (int h = head * c_.group_size; h < (head + 1) * c_.group_size; ++h) {
      const float* query = problem_.queries.data() + (std::int64_t{row} * problem_.num_heads() + h) * c_.head_dim;
      const std::vector<double> wide(query, query + c_.head_dim);
      const double* sink = nullptr;
      const double value = c_.has_sinks ? problem_.sinks[h] : 0;
      if (c_.has_sinks) sink = &value;
      const std::string wrong =
          check_head(row, h, plain::attend(wide, keys, values, problem_.scale, problem_.softcap, sink));
      if (!wrong.empty()) return "row " + std::to_string(row) + ", query head " + std::to_string(h) + wrong;
    }
    return "";
  }

  std::string check_head(int row, int query_head, const plain::Attention& expected) const {
    const std::int64_t index = std::int64_t{row} * problem_.num_heads() + query_head;
    const std::string wrong_output = check_outputs(out_, index * c_.head_dim, c_.wire_dtype, expected);
    if (!wrong_output.empty()) return wrong_output;
    const std::string wrong = compare(lse_[index], expected.lse, expected.lse_tolerance);
    return wrong.empty() ? wrong : ", lse" + wrong;
  }

  const Kernels& kernels_;
  const Problem& problem_;
  const Case& c_;
  Random random_;
  std::vector<Store> stores_;
  std::vector<char> out_;
  std::vector<float> lse_;
};

// Causal attention of a prompt's queries, of the shapes of a case but for those here.
class PromptCheck {
 public:
  PromptCheck(const Case& config, Random& random) : c_(config) {
    c_.head_dim = random.one_in(2) ? random.between(1, 70) : 16 * random.between(1, 16);
    num_queries_ = random.one_in(4) ? random.between(1, 90) : random.between(1, 20);
    start_ = random.one_in(3) ? 0 : random.upto(150);
    scale_ = 1.0f / std::sqrt(static_cast<float>(c_.head_dim));
    softcap_ = random.one_in(4) ? 5.0f : 0.0f;
    for (std::int64_t i = 0; i < num_queries_ * query_items(); ++i) queries_.push_back(wire_value(random, c_, 1, true));
    for (int h = 0; c_.has_sinks && h < num_heads(); ++h)
      sinks_.push_back(random.one_in(9) ? -INFINITY : 3.0f * random.bell());
    for (std::int64_t i = 0; i < (start_ + num_queries_) * 2 * key_items(); ++i) {
      rows_.push_back(wire_value(random, c_, 1, false));
    }
    for (int i = 0; i < 4; ++i) checked_.push_back(random.upto(num_queries_ - 1));
    for (const int query : checked_) {
      for (int h = 0; h < num_heads(); ++h) expected_.push_back(exact(query, h));
    }
  }

  std::string describe() const {
    return "prompt: queries " + std::to_string(num_queries_) + " from " + std::to_string(start_) + " on, head_dim " +
           std::to_string(c_.head_dim) + ", soft-cap " + std::to_string(softcap_);
  }

  // All queries at once are right, and have the same bits one by one.
  std::string run(const Kernels& kernels) const {
    const std::vector<char> all = attend(kernels, num_queries_), one = attend(kernels, 1);
    for (std::size_t i = 0; i < expected_.size(); ++i) {
      const int query = checked_[i / num_heads()], head = static_cast<int>(i % num_heads());
      const std::string wrong =
          check_outputs(all, query * query_items() + std::int64_t{head} * c_.head_dim, c_.wire_dtype, expected_[i]);
      if (!wrong.empty()) return "prompt's query " + std::to_string(query) + ", head " + std::to_string(head) + wrong;
    }
    // Which NaN an operation keeps is the compiler's choice.
    for (std::int64_t i = 0; i < num_queries_ * query_items(); ++i) {
      const double a = plain::float_item(all.data(), i, c_.wire_dtype);
      const double b = plain::float_item(one.data(), i, c_.wire_dtype);
      if (!plain::same(a, b)) return "prompt: other bits for query " + std::to_string(i / query_items()) + " alone";
    }
    return "";
  }

 private:
  int num_heads() const { return c_.num_kv_heads * c_.group_size; }
  std::int64_t query_items() const { return std::int64_t{num_heads()} * c_.head_dim; }
  std::int64_t key_items() const { return std::int64_t{c_.num_kv_heads} * c_.head_dim; }

  std::vector<char> attend(const Kernels& kernels, int task) const {
    const std::int64_t item = wire_bytes(c_.wire_dtype);
    const std::vector<char> queries = on_wire(queries_, c_.wire_dtype), rows = on_wire(rows_, c_.wire_dtype);
    std::vector<char> out(queries.size(), '\xff');
    PromptArgs args = {};
    args.queries = queries.data();
    args.keys = rows.data();
    args.values = rows.data() + key_items() * item;
    args.out = out.data();
    args.query_row_bytes = args.out_row_bytes = query_items() * item;
    args.key_row_bytes = args.value_row_bytes = 2 * key_items() * item;
    args.start = start_;
    args.window = c_.window;
    args.group_size = c_.group_size;
    args.head_dim = c_.head_dim;
    args.dtype = c_.wire_dtype;
    args.scale = scale_;
    args.softcap = softcap_;
    args.sinks = c_.has_sinks ? sinks_.data() : nullptr;
    const Floats workspace = make_floats(prompt_workspace_floats(task, c_.group_size, c_.head_dim));
    for (int first = 0; first < num_queries_; first += task) {
      const int stop = std::min(first + task, num_queries_);
      for (int h = 0; h < c_.num_kv_heads; ++h) kernels.attend_prompt(args, h, first, stop, workspace.get());
    }
    return out;
  }

  // K or V of a head at the tokens that a query sees.
  std::vector<Numbers> seen(int query, int head, int part) const {
    const int position = start_ + query, first = c_.window ? std::max(0, position + 1 - c_.window) : 0;
    std::vector<Numbers> result;
    for (int t = first; t <= position; ++t) {
      const float* x = rows_.data() + (t * 2 + part) * key_items() + std::int64_t{head} * c_.head_dim;
      Numbers numbers;
      for (int d = 0; d < c_.head_dim; ++d) numbers.push_back({x[d], std::fabs(x[d]), 0});
      result.push_back(numbers);
    }
    return result;
  }

  plain::Attention exact(int query, int head) const {
    const float* x = queries_.data() + query * query_items() + std::int64_t{head} * c_.head_dim;
    const int kv_head = head / c_.group_size;
    const double sink = c_.has_sinks ? sinks_[head] : 0;
    const double weight_step = c_.wire_dtype == kBFloat16 ? 0x1p-9 : 0.0;  // they may become bfloat16, too
    return plain::attend(std::vector<double>(x, x + c_.head_dim), seen(query, kv_head, 0), seen(query, kv_head, 1),
                         scale_, softcap_, c_.has_sinks ? &sink : nullptr, weight_step);
  }

  Case c_;
  int num_queries_, start_;
  float scale_, softcap_;
  std::vector<float> sinks_;
  std::vector<float> queries_, rows_;  // rows: [start + num_queries, (K, V), num_kv_heads, head_dim]
  std::vector<int> checked_;           // queries
  std::vector<plain::Attention> expected_;
};

// Empty, or the instruction set and what is wrong.
std::string run_case(std::uint64_t seed, std::string& description) {
  Random random(seed);
  const Case c = random_case(random);
  description = describe(c);
  const Problem problem(c, random);
  const PromptCheck prompt(c, random);
  description += "\n  " + prompt.describe();
  for (int i = 0; i < num_available(); ++i) {
    std::string wrong = Check(*available(i), problem, random).run();
    if (wrong.empty()) wrong = prompt.run(*available(i));
    if (!wrong.empty()) return std::string(available(i)->name) + ": " + wrong;
  }
  return "";
}

std::string text_of(float x) {
  char text[40];
  std::snprintf(text, sizeof text, "%.9g", static_cast<double>(x));
  return text;
}

// All halves and bfloat16 as floats and back, and values around each of them as the nearest.
std::string check_conversions(const Kernels& kernels) {
  for (const std::int32_t dtype : {kFloat16, kBFloat16}) {
    std::vector<std::uint16_t> all(65536), back(65536);
    std::vector<float> wide(65536), near(65536);
    for (int i = 0; i < 65536; ++i) all[i] = static_cast<std::uint16_t>(i);
    kernels.convert(all.data(), dtype, wide.data(), kFloat32, 65536);
    Random random(dtype);
    for (int i = 0; i < 65536; ++i) {
      const double exact = plain::float_item(reinterpret_cast<char*>(all.data()), i, dtype);
      if (!plain::same(wide[i], exact)) return "conversion of " + std::string(kNames[dtype]) + " " + std::to_string(i);
      near[i] = random.one_in(4) ? wide[i] : static_cast<float>(exact * (1 + random.bell() * 0x1p-9));
    }
    kernels.convert(near.data(), kFloat32, back.data(), dtype, 65536);
    for (int i = 0; i < 65536; ++i) {
      const double got = plain::float_item(reinterpret_cast<char*>(back.data()), i, dtype);
      if (!plain::same(got, plain::rounded(near[i], dtype))) {
        return "conversion to " + std::string(kNames[dtype]) + " of " + text_of(near[i]);
      }
    }
  }
  return "";
}

// Within 1.02 units in the last place (tests/kernels/test_kernel_exp.py looks closer).
std::string check_exp(const Kernels& kernels) {
  Random random(2);
  std::vector<float> x(1 << 16), got(x.size());
  for (float& each : x) each = -std::fabs(random.bell()) * std::ldexp(1.0f, random.between(-20, 5));
  const float edges[] = {0.0f, -87.3365f, -87.34f, -1e30f, -INFINITY, NAN};
  std::copy(edges, edges + 6, x.begin());
  kernels.exp_nonpositive(x.data(), got.data(), static_cast<std::int64_t>(x.size()));
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double exact = x[i] < -87.3365f ? 0.0 : std::exp(static_cast<double>(x[i]));
    const double unit = exact > 0 ? std::ldexp(1.0, std::ilogb(exact) - 23) : 0;
    if (std::isnan(x[i]) ? !std::isnan(got[i]) : !(std::fabs(got[i] - exact) <= 1.02 * unit)) {
      return "exp of " + text_of(x[i]);
    }
  }
  return "";
}

// A row of a float type, in memory that is exactly as large.
struct FloatRow {
  FloatRow(std::int32_t dtype_, int count) : dtype(dtype_), bytes((dtype_ == kFloat32 ? 4 : 2) * std::size_t(count)) {}
  double operator[](int i) const { return plain::float_item(bytes.data(), i, dtype); }
  char* data() { return bytes.data(); }
  std::int32_t dtype;
  std::vector<char> bytes;
};

// One row through the S-Part's kernels of one instruction set.
struct RowResults {
  RowResults(const Kernels& kernels, FloatRow& x, FloatRow& weights, std::vector<float>& angles, int count)
      : normed(x.dtype, count), gated(x.dtype, count), rotated(x) {
    kernels.rms_norm(x.data(), weights.data(), normed.data(), x.dtype, count, 1e-5f);
    kernels.swiglu(x.data(), gated.data(), x.dtype, count);
    kernels.rotate(rotated.data(), angles.data(), x.dtype, 1, 2 * count, count);
    for (const std::int32_t dtype : {kFloat32, kFloat16, kBFloat16}) {
      wire.emplace_back(dtype, count);
      num_saturated += kernels.to_wire(x.data(), x.dtype, wire.back().data(), dtype, count);
    }
  }
  bool operator==(const RowResults& other) const {
    for (std::size_t i = 0; i < wire.size(); ++i) {
      if (wire[i].bytes != other.wire[i].bytes) return false;
    }
    return normed.bytes == other.normed.bytes && gated.bytes == other.gated.bytes &&
           rotated.bytes == other.rotated.bytes && num_saturated == other.num_saturated;
  }
  FloatRow normed, gated, rotated;
  std::vector<FloatRow> wire;
  std::int64_t num_saturated = 0;
};

// Within two steps of the type, relative to what is added up; tests/kernels/test_row_kernels.py looks closer.
std::string check_row(const RowResults& got, const FloatRow& x, const FloatRow& weights,
                      const std::vector<float>& angles, int count) {
  const double step = std::ldexp(1.0, x.dtype == kFloat32 ? -22 : x.dtype == kFloat16 ? -9 : -6);
  const auto near = [&](double value, double exact, double size) {
    return std::fabs(value - exact) <= step * size + 0x1p-23;
  };
  double squares = 0;
  for (int i = 0; i < count; ++i) squares += x[i] * x[i];
  const double scale = 1 / std::sqrt(squares / count + 1e-5);
  for (int i = 0; i < count; ++i) {
    const double normed = x[i] * scale * weights[i], gated = x[i] / (1 + std::exp(-x[i])) * x[count + i];
    if (!near(got.normed[i], normed, std::fabs(normed))) return "norm";
    if (!near(got.gated[i], gated, std::fabs(gated))) return "swiglu";
    const double a = x[i], b = x[count + i], cos = angles[i], sin = angles[count + i];
    const double size = std::fabs(a) + std::fabs(b);
    if (!near(got.rotated[i], a * cos - b * sin, size)) return "rotation";
    if (!near(got.rotated[count + i], b * cos + a * sin, size)) return "rotation";
    for (const FloatRow& wire : got.wire) {
      if (!plain::same(wire[i], plain::rounded(x[i], wire.dtype))) return "wire";
    }
  }
  return "";
}

// Rows of all lengths up to some vectors; the first instruction set is right if all agree and each is near.
std::string check_rows(const Kernels& kernels) {
  Random random(3);
  for (const std::int32_t dtype : {kFloat32, kFloat16, kBFloat16}) {
    for (int count = 1; count <= 100; ++count) {
      const auto draw = [&](int size, float most) {
        std::vector<float> wide(static_cast<std::size_t>(size));
        for (float& each : wide) each = most * random.bell();
        FloatRow row(dtype, size);
        kernels.to_wire(wide.data(), kFloat32, row.data(), dtype, size);
        return row;
      };
      const bool large = dtype != kFloat16 && random.one_in(4);  // beyond a half
      FloatRow x = draw(2 * count, large ? 1e5f : 3.0f), weights = draw(count, 1.0f);
      std::vector<float> angles(static_cast<std::size_t>(2 * count));
      for (float& each : angles) each = static_cast<float>(random.between(-1000, 1000)) / 1000.0f;
      const RowResults got(kernels, x, weights, angles, count);
      const std::string row = " of " + std::to_string(count) + " " + kNames[dtype];
      if (!(got == RowResults(*available(0), x, weights, angles, count))) return "other bits than scalar" + row;
      const std::string wrong = check_row(got, x, weights, angles, count);
      if (!wrong.empty()) return wrong + row;
    }
  }
  return "";
}

// Rows of a few different values, so that the largest comes often; some with one that is not finite.
std::string check_pick(const Kernels& kernels) {
  Random random(6);
  for (int i = 0; i < 300; ++i) {
    const int count = random.between(1, random.one_in(4) ? 3000 : 100), different = random.between(1, 200);
    std::vector<float> row(static_cast<std::size_t>(count));
    for (float& each : row) each = static_cast<float>(random.between(-different, different));
    std::int64_t wanted = std::max_element(row.begin(), row.end()) - row.begin();
    if (random.one_in(4)) {
      row[random.upto(count - 1)] = random.one_in(3) ? NAN : random.one_in(2) ? INFINITY : -INFINITY;
      wanted = -1;
    }
    if (kernels.pick(row.data(), count) != wanted) return "pick of " + std::to_string(count);
  }
  return "";
}

// Products with weights of 8 bits, of some panels and then the others, in memory that is exactly as large.
std::string check_product(const Kernels& kernels) {
  Random random(4);
  const Floats workspace = make_floats(product_floats());
  for (int i = 0; i < 100; ++i) {
    const int num_rows = random.one_in(10) ? kRowBlock + random.between(1, 20) : random.between(1, 30);
    const int num_in = random.between(1, random.one_in(3) ? 400 : 40), stride = num_in + random.upto(5);
    const int num_panels = random.between(1, 3), outputs = num_panels * kPanelOut;
    std::vector<float> rows((num_rows - 1) * stride + num_in), scales((num_in + kScaleIn - 1) / kScaleIn * outputs);
    std::vector<float> out(num_rows * outputs, NAN);
    std::vector<std::int8_t> codes(num_in * outputs);
    std::vector<float> offsets(scales.size());
    for (float& each : rows) each = random.bell();
    for (float& each : scales) each = random.one_in(9) ? 0.0f : std::fabs(random.bell());
    for (float& each : offsets) each = random.one_in(2) ? 0.0f : 50.0f * random.bell();
    for (std::int8_t& each : codes) each = static_cast<std::int8_t>(random.between(-128, 127));
    const Int8Product product = {rows.data(),  stride,        num_rows,       num_in,    num_panels,
                                 codes.data(), scales.data(), offsets.data(), out.data()};
    const int cut = random.upto(num_panels);
    kernels.multiply_int8(product, cut, num_panels, workspace.get());
    kernels.multiply_int8(product, 0, cut, workspace.get());
    for (int r = 0; r < num_rows; ++r) {
      for (int o = 0; o < outputs; ++o) {
        double sum = 0, size = 0;
        for (int k = 0; k < num_in; ++k) {
          const int group = k / kGroupIn, first = group * kGroupIn, count = std::min(kGroupIn, num_in - first);
          const int place = (first * num_panels + o / kPanelOut * count + k - first) * kPanelOut + o % kPanelOut;
          const int scale = k / kScaleIn * outputs + o;
          const double x = rows[r * stride + k], product = double{scales[scale]} * codes[place];
          sum += x * (offsets[scale] + product);
          size += std::fabs(x) * (std::fabs(offsets[scale]) + std::fabs(product));
        }
        if (!(std::fabs(out[r * outputs + o] - sum) <= (kGroupIn + 8) * 0x1p-24 * size)) {
          return "product of " + std::to_string(num_rows) + " rows of " + std::to_string(num_in);
        }
      }
    }
  }
  return "";
}

// Products with weights of floats, of some units and then the others, in memory that is exactly as large.
std::string check_float_product(const Kernels& kernels) {
  Random random(5);
  for (int i = 0; i < 100; ++i) {
    const std::int32_t dtype = random.one_in(2) ? kFloat32 : kBFloat16;
    const int pairs = dtype == kFloat32 ? 1 : 2;
    const int num_rows = random.one_in(10) ? kProductRows + random.between(1, 20) : random.between(1, 30);
    const int num_in = random.between(1, random.one_in(3) ? 900 : 20) * pairs;
    const int stride = num_in + random.upto(5), num_out = random.between(1, 3 * kPanelOut);
    const int panels = (num_out + kPanelOut - 1) / kPanelOut;
    const auto draw = [&](int size) {
      std::vector<float> wide(static_cast<std::size_t>(size));
      for (float& each : wide) each = random.bell();
      FloatRow row(dtype, size);
      kernels.to_wire(wide.data(), kFloat32, row.data(), dtype, size);
      return row;
    };
    FloatRow x = draw((num_rows - 1) * stride + num_in), weights = draw(panels * num_in * kPanelOut);
    FloatRow out(dtype, num_rows * num_out);
    std::vector<float> wide(static_cast<std::size_t>((num_rows - 1) * stride + num_in));
    std::vector<float> bias(static_cast<std::size_t>(num_out));
    for (std::size_t k = 0; k < wide.size(); ++k) wide[k] = static_cast<float>(x[static_cast<int>(k)]);
    for (float& each : bias) each = random.bell();
    const bool has_bias = random.one_in(2), is_wide = dtype == kFloat32 || !kernels.has_pair_products;
    const void* rows = is_wide ? static_cast<const void*>(wide.data()) : x.data();
    const float* added = has_bias ? bias.data() : nullptr;
    const int block_rows = random.one_in(2) ? kProductRows : random.between(1, kProductRows);
    const Product product = {rows,    stride,         num_rows, block_rows, num_in,
                             num_out, weights.data(), added,    out.data(), is_wide ? kFloat32 : dtype,
                             dtype,   dtype};
    const int units = (num_rows + block_rows - 1) / block_rows * panels, cut = random.upto(units);
    kernels.multiply(product, cut, units);
    kernels.multiply(product, 0, cut);
    for (int r = 0; r < num_rows; ++r) {
      for (int o = 0; o < num_out; ++o) {
        double sum = has_bias ? bias[o] : 0.0, size = std::fabs(sum);
        for (int k = 0; k < num_in; ++k) {
          const int place = ((o / kPanelOut * num_in + k - k % pairs) * kPanelOut + o % kPanelOut * pairs) + k % pairs;
          const double term = double{x[r * stride + k]} * weights[place];
          sum += term;
          size += std::fabs(term);
        }
        const double rounding = dtype == kFloat32 ? 0.0 : 0x1p-8 * std::fabs(sum);
        if (!(std::fabs(out[r * num_out + o] - sum) <= kProductIn * 0x1p-24 * size + rounding)) {
          return "product of " + std::to_string(num_rows) + " rows of " + std::to_string(num_in) + " " + kNames[dtype];
        }
      }
    }
  }
  return "";
}

// Cases until `count` or `seconds` are over.
int run_cases(long count, double seconds, std::uint64_t seed) {
  const auto started = std::chrono::steady_clock::now();
  long done = 0;
  const auto over = [&] {
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - started;
    return count ? done >= count : passed.count() >= seconds;
  };
  for (; !over(); ++done) {
    std::string description;
    const std::string wrong = run_case(seed + done, description);
    if (!wrong.empty()) {
      std::printf("seed %llu: %s\n  %s\n", static_cast<unsigned long long>(seed + done), wrong.c_str(),
                  description.c_str());
      return 1;
    }
  }
  std::printf("%ld cases hold from seed %llu on:", done, static_cast<unsigned long long>(seed));
  for (int i = 0; i < num_available(); ++i) std::printf(" %s", available(i)->name);
  std::printf("\n");
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::string limit = argc > 1 ? argv[1] : "200";
  const bool in_seconds = !limit.empty() && limit.back() == 's';
  if (in_seconds) limit.pop_back();
  char* end = nullptr;
  const double amount = std::strtod(limit.c_str(), &end);
  const std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  if (argc > 3 || limit.empty() || *end || !(amount >= 1)) {
    std::fprintf(stderr, "usage: kernel_check [COUNT | SECONDSs] [SEED]\n");
    return 2;
  }
  for (int i = 0; i < num_available(); ++i) {
    std::string wrong = check_conversions(*available(i));
    if (wrong.empty()) wrong = check_exp(*available(i));
    if (wrong.empty()) wrong = check_rows(*available(i));
    if (wrong.empty()) wrong = check_pick(*available(i));
    if (wrong.empty()) wrong = check_product(*available(i));
    if (wrong.empty()) wrong = check_float_product(*available(i));
    if (!wrong.empty()) {
      std::printf("%s: %s\n", available(i)->name, wrong.c_str());
      return 1;
    }
  }
  return run_cases(in_seconds ? 0 : static_cast<long>(amount), in_seconds ? amount : 0, seed);
}
