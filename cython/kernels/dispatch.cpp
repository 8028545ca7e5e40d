// Which instruction sets can run here. Compiled with baseline flags only.
#include "kernels.h"

namespace fastdecode {

extern const Kernels scalar_kernels;
#ifdef FD_HAVE_AVX2
extern const Kernels avx2_kernels;
#endif
#ifdef FD_HAVE_AVX512
extern const Kernels avx512_kernels;
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

std::int64_t round_to_line(std::int64_t floats) { return (floats + 15) / 16 * 16; }

}  // namespace

// Whole cache lines, so that two threads never write to the same one.
std::int64_t partial_floats(std::int32_t group_size, std::int32_t head_dim) {
  return round_to_line(std::int64_t{group_size} * (head_dim + 2));
}

std::int64_t workspace_floats(std::int32_t group_size, std::int32_t head_dim) {
  const std::int64_t queries = std::int64_t{group_size} * head_dim;
  const std::int64_t scores = std::int64_t{group_size} * kTileTokens;
  return round_to_line(queries + scores + head_dim) + partial_floats(group_size, head_dim);
}

int num_available() { return table().count; }

const Kernels* available(int index) { return table().entries[index]; }

}  // namespace fastdecode
