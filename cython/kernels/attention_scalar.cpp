// The kernels for one instruction set; everything but the table has internal linkage.
#include "kernels.h"
#include "vec_scalar.h"

#include "decode_attention.inl.h"

namespace fastdecode {

extern const Kernels scalar_kernels;
constexpr Kernels scalar_kernels = make_kernels("scalar");

}  // namespace fastdecode
