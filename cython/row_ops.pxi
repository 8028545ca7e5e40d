# What the S-Part does to rows; a part of _kernels.pyx.
#
# Memory comes as addresses, as tensors have them, and callers answer for shapes and types: `s_part.row_kernels`, their
# only one, checks them. Row r of a tensor lies at address + r // inner * outer_bytes + r % inner * inner_bytes.

cdef int64_t MIN_PARALLEL_BYTES = 1 << 17  # read and written; for fewer, starting threads costs more
cdef int64_t MIN_PARALLEL_GATES = 1 << 14  # an exponential and a division each
cdef int64_t MIN_PARALLEL_CODES = 1 << 15  # read, and multiplied with one row at least
cdef int64_t MIN_PARALLEL_TERMS = 1 << 16  # of products, multiplied and added
cdef int64_t TILE_ROWS = 12  # that the kernels multiply at once, at most
cdef int64_t MIN_BLOCK_ROWS = 2 * TILE_ROWS  # fewer cost less than to read the weights once more for them


def rms_norm(uintptr_t rows, int64_t num_rows, int64_t inner, int64_t outer_bytes, int64_t inner_bytes,
             uintptr_t weights, uintptr_t target, int32_t dtype, int64_t num_columns, float eps, int num_threads):
    """Root-mean-square norm of rows into contiguous rows of the same type."""
    cdef int64_t row
    cdef int64_t target_bytes = num_columns * ITEM_BYTES[dtype]
    cdef const Kernels* kernels = active
    for row in prange(num_rows, nogil=True, schedule="static",
                      num_threads=team(2 * num_rows * target_bytes, MIN_PARALLEL_BYTES, num_threads)):
        kernels.rms_norm(<const void*> (rows + row // inner * outer_bytes + row % inner * inner_bytes),
                         <const void*> weights, <void*> (target + row * target_bytes), dtype, num_columns, eps)


def swiglu(uintptr_t rows, int64_t num_rows, int64_t row_bytes, uintptr_t target, int32_t dtype, int64_t num_columns,
           int num_threads):
    """silu(gate) * up of rows [gate|up], `num_columns` each, into contiguous rows of the same type."""
    cdef int64_t row
    cdef int64_t target_bytes = num_columns * ITEM_BYTES[dtype]
    cdef const Kernels* kernels = active
    for row in prange(num_rows, nogil=True, schedule="static",
                      num_threads=team(num_rows * num_columns, MIN_PARALLEL_GATES, num_threads)):
        kernels.swiglu(<const void*> (rows + row * row_bytes), <void*> (target + row * target_bytes), dtype,
                       num_columns)


def rotate(uintptr_t rows, int64_t num_rows, int64_t row_bytes, int64_t num_heads, int64_t head_stride,
           uintptr_t angles, int64_t pairs, int32_t dtype, int num_threads):
    """Rotate heads in place; angles are contiguous rows of float32."""
    cdef int64_t row
    cdef int64_t head_bytes = 2 * pairs * ITEM_BYTES[dtype]
    cdef const Kernels* kernels = active
    for row in prange(num_rows, nogil=True, schedule="static",
                      num_threads=team(2 * num_rows * num_heads * head_bytes, MIN_PARALLEL_BYTES, num_threads)):
        kernels.rotate(<void*> (rows + row * row_bytes), <const float*> angles + row * 2 * pairs, dtype, num_heads,
                       head_stride, pairs)


def to_wire(uintptr_t rows, int64_t num_rows, int64_t row_bytes, int32_t dtype, uintptr_t target,
            int64_t target_row_bytes, int32_t target_dtype, int64_t num_columns, uintptr_t num_saturated,
            int num_threads):
    """Convert rows; what was beyond the target's range is added to the int64 at `num_saturated`."""
    cdef int64_t row
    cdef int64_t found = 0
    cdef int64_t num_bytes = num_rows * num_columns * (ITEM_BYTES[dtype] + ITEM_BYTES[target_dtype])
    cdef const Kernels* kernels = active
    for row in prange(num_rows, nogil=True, schedule="static",
                      num_threads=team(num_bytes, MIN_PARALLEL_BYTES, num_threads)):
        found += kernels.to_wire(<const void*> (rows + row * row_bytes), dtype,
                                 <void*> (target + row * target_row_bytes), target_dtype, num_columns)
    (<int64_t*> num_saturated)[0] += found


def pick(uintptr_t rows, int64_t num_rows, int64_t row_bytes, int64_t num_columns, uintptr_t target, int num_threads):
    """Of each row of float32 the place of the first of its largest values, to int64; -1 where not all are finite."""
    cdef int64_t row
    cdef const Kernels* kernels = active
    for row in prange(num_rows, nogil=True, schedule="static",
                      num_threads=team(4 * num_rows * num_columns, MIN_PARALLEL_BYTES, num_threads)):
        (<int64_t*> target)[row] = kernels.pick(<const float*> (rows + row * row_bytes), num_columns)


def has_pair_products():
    """Whether the instruction set in use multiplies rows of bf16 as they are."""
    return bool(active.has_pair_products)


def multiply(uintptr_t rows, int64_t num_rows, int64_t row_stride, int32_t row_dtype, int64_t num_in,
             uintptr_t weights, int32_t weight_dtype, int64_t num_out, uintptr_t bias, uintptr_t target,
             int32_t target_dtype, int num_threads):
    """Products of rows with weights in panels, into contiguous rows; `bias` may be 0."""
    cdef Product product
    cdef int64_t part
    cdef int64_t num_panels = (num_out + kPanelOut - 1) // kPanelOut
    cdef int parts = team(num_rows * num_in * num_out, MIN_PARALLEL_TERMS, num_threads)
    cdef int64_t block_rows = rows_of_unit(num_rows, num_panels, parts)
    cdef int64_t units = (num_rows + block_rows - 1) // block_rows * num_panels
    cdef const Kernels* kernels = active
    product.rows, product.row_stride, product.num_rows = <const void*> rows, row_stride, num_rows
    product.block_rows, product.num_in, product.num_out = block_rows, num_in, num_out
    product.weights, product.bias, product.out = <const void*> weights, <const float*> bias, <void*> target
    product.row_dtype, product.weight_dtype, product.out_dtype = row_dtype, weight_dtype, target_dtype
    for part in prange(parts, nogil=True, schedule="static", num_threads=parts):
        kernels.multiply(product, part * units // parts, (part + 1) * units // parts)


def multiply_int8(uintptr_t rows, int64_t num_rows, int64_t row_stride, int64_t num_in, uintptr_t codes,
                  uintptr_t scales, uintptr_t offsets, int64_t num_panels, uintptr_t target, uintptr_t workspace,
                  int num_threads):
    """Products of rows of float32 with weights of 8 bits; the workspace has PRODUCT_FLOATS for each thread."""
    cdef Int8Product product
    cdef int64_t part
    cdef int64_t floats = product_floats()
    cdef int parts = team(num_panels * kPanelOut * num_in, MIN_PARALLEL_CODES, num_threads)
    cdef const Kernels* kernels = active
    product.rows, product.row_stride, product.num_rows = <const float*> rows, row_stride, num_rows
    product.num_in, product.num_panels = num_in, num_panels
    product.codes, product.out = <const int8_t*> codes, <float*> target
    product.scales, product.offsets = <const float*> scales, <const float*> offsets
    for part in prange(parts, nogil=True, schedule="static", num_threads=parts):
        kernels.multiply_int8(product, part * num_panels // parts, (part + 1) * num_panels // parts,
                              <float*> workspace + part * floats)


cdef inline int team(int64_t work, int64_t least, int num_threads) noexcept nogil:
    """All threads or one: a smaller team makes the OpenMP runtime end threads and start them anew."""
    return num_threads if work >= least else 1


cdef inline int64_t rows_of_unit(int64_t num_rows, int64_t num_panels, int num_threads) noexcept nogil:
    """Rows that go through a panel together: fewer where panels are too few to keep all threads busy alike."""
    cdef int64_t wanted = (2 * num_threads + num_panels - 1) // num_panels  # blocks
    if num_threads == 1 or wanted * kProductRows <= num_rows:
        return kProductRows
    cdef int64_t rows = ((num_rows + wanted - 1) // wanted + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    return min(max(rows, MIN_BLOCK_ROWS), <int64_t> kProductRows)
