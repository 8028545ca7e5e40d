// The kernels for one instruction set; everything but the table has internal linkage.
#include "kernels.h"
#include "vec_avx512.h"

#include "decode_attention.inl.h"

namespace fastdecode {

extern const Kernels avx512bf16_kernels;
constexpr Kernels avx512bf16_kernels = make_kernels("avx512bf16");

}  // namespace fastdecode
