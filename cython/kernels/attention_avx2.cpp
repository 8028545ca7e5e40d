// The kernels for one instruction set; everything but the table has internal linkage.
#include "kernels.h"
#include "vec_avx2.h"

#include "decode_attention.inl.h"

namespace fastdecode {

extern const Kernels avx2_kernels;
constexpr Kernels avx2_kernels = make_kernels("avx2");

}  // namespace fastdecode
