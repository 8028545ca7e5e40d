// The kernels for one instruction set; everything but the table has internal linkage.
#include "kernels.h"
#include "vec_neon.h"

#include "decode_attention.inl.h"

namespace fastdecode {

extern const Kernels neon_kernels;
constexpr Kernels neon_kernels = make_kernels("neon");

}  // namespace fastdecode
