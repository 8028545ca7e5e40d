// Which instruction sets can run here. Compiled with baseline flags only.
#include "kernels.h"

#include "layout.inl.h"

namespace fastdecode {

extern const Kernels scalar_kernels;
#ifdef FD_HAVE_AVX2
extern const Kernels avx2_kernels;
#endif
#ifdef FD_HAVE_AVX512
extern const Kernels avx512_kernels;
#endif
#ifdef FD_HAVE_AVX512BF16
extern const Kernels avx512bf16_kernels;
#endif
#ifdef FD_HAVE_NEON
extern const Kernels neon_kernels;
#endif

namespace {

constexpr int kMaxIsas = 4;

struct Table {
  const Kernels* entries[kMaxIsas];
  int count;
};

// __builtin_cpu_supports asks the processor and, for the wide registers, the operating system. Every
// feature that the file's compiler flags allow is asked for.
Table probe() {
  Table table = {{&scalar_kernels}, 1};
#if defined(FD_HAVE_AVX2) || defined(FD_HAVE_AVX512)
  __builtin_cpu_init();
#endif
#ifdef FD_HAVE_AVX2
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (has_avx2) table.entries[table.count++] = &avx2_kernels;
#endif
#ifdef FD_HAVE_AVX512
  if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    table.entries[table.count++] = &avx512_kernels;
#ifdef FD_HAVE_AVX512BF16
    if (__builtin_cpu_supports("avx512bf16")) table.entries[table.count++] = &avx512bf16_kernels;
#endif
  }
#endif
#ifdef FD_HAVE_NEON
  table.entries[table.count++] = &neon_kernels;
#endif
  return table;
}

const Table& table() {
  static const Table probed = probe();
  return probed;
}

}  // namespace

std::int64_t token_bytes(std::int32_t dtype, std::int32_t head_dim) {
  return code_bytes(dtype, head_dim) + scale_bytes(dtype, head_dim);
}

std::int64_t partial_floats(std::int32_t group_size, std::int32_t head_dim) {
  return round_to_line(std::int64_t{group_size} * (head_dim + 2));
}

// As `Workspace` takes it: each of its arrays begins on a cache line.
std::int64_t workspace_floats(std::int32_t group_size, std::int32_t head_dim) {
  const std::int64_t groups = num_groups(head_dim), heads = group_size;
  const std::int64_t queries = round_to_line(heads * head_dim) + round_to_line(heads * groups) + round_to_line(heads) +
                               round_to_line((heads * head_dim + 8) / 2);
  const std::int64_t weights = round_to_line(heads * kTileTokens) + round_to_line(groups * heads) +
                               round_to_line(groups * heads * kTileTokens / 2);
  const std::int64_t scales = 4 * round_to_line(groups * kTileTokens) + round_to_line(heads * groups);
  return queries + weights + scales + round_to_line(head_dim) + partial_floats(group_size, head_dim);
}

// As `PromptWorkspace` takes it.
std::int64_t prompt_workspace_floats(std::int64_t num_queries, std::int32_t group_size, std::int32_t head_dim) {
  const std::int64_t rows = (num_queries * group_size + kMaxPanelRows - 1) / kMaxPanelRows * kMaxPanelRows;
  return 2 * round_to_line(rows * head_dim) + 3 * round_to_line(rows) + round_to_line(kTileTokens * kMaxPanelRows) +
         2 * round_to_line(std::int64_t{kTileTokens} * head_dim);
}

std::int64_t product_floats() { return std::int64_t{kGroupIn} * kPanelOut + std::int64_t{kRowBlock} * kPackedStride; }

int num_available() { return table().count; }

const Kernels* available(int index) { return table().entries[index]; }

}  // namespace fastdecode
