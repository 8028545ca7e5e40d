// Stand-alone check of every instruction set that runs here against plain double arithmetic. It is what
// sanitizers and other processors run; the full tests are in Python.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "kernels.h"

namespace {

using namespace fastdecode;

struct Case {
  int num_kv_heads, group_size, head_dim, block_size;
  int position;        // of the newest token
  int first;           // oldest visible token
  std::int32_t dtype;  // of the cache; the wire is fp32
};

constexpr int kSpan = 64;

std::int64_t item_bytes(std::int32_t dtype) { return dtype == kFloat32 ? 4 : 2; }

// Memory of one case: exactly as large as needed, so that an address sanitizer sees every step beyond it.
struct Setup {
  Case c;
  std::int64_t width;                // of a row of q
  std::vector<std::int32_t> blocks;  // shuffled
  std::vector<char> arena;
  std::vector<float> rows;  // [position + 1, (K, V), num_kv_heads, head_dim]
  std::vector<float> queries, out, lse;
  std::int64_t table_base = 0;

  explicit Setup(const Case& config) : c(config), width(std::int64_t{c.num_kv_heads} * c.group_size * c.head_dim) {
    const int num_blocks = c.position / c.block_size + 1;
    for (int i = 0; i < num_blocks; ++i) blocks.push_back((i * 7 + 3) % num_blocks);
    if (num_blocks % 7 == 0)
      for (int i = 0; i < num_blocks; ++i) blocks[i] = num_blocks - 1 - i;
    arena.assign(num_blocks * view(nullptr).block_bytes, '\xff');  // NaN wherever nothing is stored
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    rows.resize(std::int64_t{c.position + 1} * 2 * c.num_kv_heads * c.head_dim);
    queries.resize(width);
    for (float& x : rows) x = normal(random);
    for (float& x : queries) x = normal(random);
    out.resize(width);
    lse.resize(c.num_kv_heads * c.group_size);
  }

  LayerView view(char* keys) const {
    const std::int64_t head = std::int64_t{c.block_size} * c.head_dim * item_bytes(c.dtype);
    return {keys, 2 * head * c.num_kv_heads, head * c.num_kv_heads, head, c.block_size, c.head_dim, c.dtype};
  }

  AttendArgs args() {
    const std::int64_t bytes = width * 4;
    return {view(arena.data()),
            blocks.data(),
            &table_base,
            &c.position,
            reinterpret_cast<char*>(queries.data()),
            bytes,
            reinterpret_cast<char*>(out.data()),
            bytes,
            lse.data(),
            c.group_size,
            c.num_kv_heads * c.group_size,
            kFloat32,
            1.0f / std::sqrt(static_cast<float>(c.head_dim))};
  }
};

void store_all(const Kernels& kernels, Setup& setup) {
  const Case& c = setup.c;
  const LayerView view = setup.view(setup.arena.data());
  std::vector<std::int64_t> token_bytes;
  for (int t = 0; t <= c.position; ++t) {
    const std::int64_t within = std::int64_t{t % c.block_size} * c.head_dim * item_bytes(c.dtype);
    token_bytes.push_back(setup.blocks[t / c.block_size] * view.block_bytes + within);
  }
  const std::int64_t row_bytes = std::int64_t{2} * c.num_kv_heads * c.head_dim * 4;
  const StoreArgs args = {view,      token_bytes.data(), reinterpret_cast<char*>(setup.rows.data()),
                          row_bytes, c.num_kv_heads,     kFloat32};
  // Tokens before the window are never stored: their memory stays NaN.
  for (int t = c.first; t <= c.position; ++t) kernels.store_row(args, t);
}

void attend_all(const Kernels& kernels, Setup& setup) {
  const Case& c = setup.c;
  const AttendArgs args = setup.args();
  const std::int64_t stride = partial_floats(c.group_size, c.head_dim);
  std::vector<float> workspace(workspace_floats(c.group_size, c.head_dim));
  for (int head = 0; head < c.num_kv_heads; ++head) {
    std::vector<float> partials;
    for (int start = c.first; start < c.position;) {
      const int stop = std::min((start / kSpan + 1) * kSpan, c.position);
      partials.resize(partials.size() + stride);
      kernels.attend_span(args, {0, head, start, stop}, partials.data() + partials.size() - stride, workspace.data());
      start = stop;
    }
    kernels.finish_row(args, 0, head, partials.data(), partials.size() / stride, workspace.data());
  }
}

// The value of a cached item after the cache's rounding.
float rounded(const Kernels& kernels, float x, std::int32_t dtype) {
  float values[8] = {x}, back[8];
  std::uint32_t stored[8];
  kernels.convert(values, kFloat32, stored, dtype, 8);
  kernels.convert(stored, dtype, back, kFloat32, 8);
  return back[0];
}

double largest_error(const Kernels& kernels, const Setup& setup) {
  const Case& c = setup.c;
  const auto kv = [&](int token, int part, int head, int d) {
    const std::int64_t row = (std::int64_t{token} * 2 + part) * c.num_kv_heads + head;
    return static_cast<double>(rounded(kernels, setup.rows[row * c.head_dim + d], c.dtype));
  };
  double worst = 0;
  for (int h = 0; h < c.num_kv_heads * c.group_size; ++h) {
    std::vector<double> sum(c.head_dim);
    double total = 0;
    for (int t = c.first; t <= c.position; ++t) {
      double score = 0;
      for (int d = 0; d < c.head_dim; ++d) score += setup.queries[h * c.head_dim + d] * kv(t, 0, h / c.group_size, d);
      const double weight = std::exp(score / std::sqrt(static_cast<double>(c.head_dim)));
      total += weight;
      for (int d = 0; d < c.head_dim; ++d) sum[d] += weight * kv(t, 1, h / c.group_size, d);
    }
    for (int d = 0; d < c.head_dim; ++d) {
      const double error = std::fabs(setup.out[h * c.head_dim + d] - sum[d] / total);
      if (!(error <= worst)) worst = error;  // NaN counts
    }
    const double error = std::fabs(setup.lse[h] - std::log(total));
    if (!(error <= worst)) worst = error;
  }
  return worst;
}

// All halves survive a round trip through fp32 (NaN stays NaN), and so do all bfloat16.
bool conversions_hold(const Kernels& kernels) {
  for (std::int32_t dtype : {kFloat16, kBFloat16}) {
    std::vector<std::uint16_t> all(65536), back(65536);
    std::vector<float> wide(65536);
    for (int i = 0; i < 65536; ++i) all[i] = static_cast<std::uint16_t>(i);
    kernels.convert(all.data(), dtype, wide.data(), kFloat32, 65536);
    kernels.convert(wide.data(), kFloat32, back.data(), dtype, 65536);
    for (int i = 0; i < 65536; ++i) {
      if (std::isnan(wide[i]) ? back[i] == 0 : back[i] != all[i]) return false;
    }
  }
  return rounded(kernels, 1e6f, kFloat16) == 65504.0f && rounded(kernels, -3.4e38f, kBFloat16) == -0x1.fep127f;
}

}  // namespace

int main() {
  bool ok = true;
  for (int i = 0; i < num_available(); ++i) {
    const Kernels& kernels = *available(i);
    double worst = 0;
    for (const Case& c : {Case{2, 3, 64, 16, 200, 0, kFloat16}, Case{1, 8, 80, 8, 65, 0, kFloat32},
                          Case{2, 1, 128, 32, 130, 99, kBFloat16}, Case{1, 7, 8, 8, 0, 0, kFloat16},
                          Case{1, 4, 256, 24, 64, 1, kFloat32}, Case{3, 2, 24, 8, 63, 60, kFloat16}}) {
      Setup setup(c);
      store_all(kernels, setup);
      attend_all(kernels, setup);
      const double error = largest_error(kernels, setup);
      if (!(error <= worst)) worst = error;
    }
    const bool good = worst < 4e-6 && conversions_hold(kernels);
    std::printf("%s: largest error %.2g, conversions %s\n", kernels.name, worst, good ? "hold" : "or errors BAD");
    ok = ok && good;
  }
  return ok ? 0 : 1;
}
