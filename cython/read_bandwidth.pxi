# Reading as fast as memory allows, to compare the kernels with; a part of _kernels.pyx.

# Variants of `Kernels.read_loop`, in its order.
READ_LOOPS = ("1 sum", "4 sums", "8 sums", "1 sum, prefetch", "4 sums, prefetch", "8 sums, prefetch")


def touch_parts(float[::1] buffer not None, int num_threads):
    """Write zeros from all threads, each into the part that `read_sums` lets it read."""
    cdef int share
    cdef int64_t count = buffer.shape[0]
    cdef int64_t start, stop
    cdef float* data = &buffer[0] if count else NULL
    if num_threads < 1:
        raise ValueError(f"{num_threads} threads; there must be at least 1")
    for share in prange(num_threads, nogil=True, schedule="static", chunksize=1, num_threads=num_threads):
        start, stop = part_start(count, share, num_threads), part_start(count, share + 1, num_threads)
        memset(data + start, 0, (stop - start) * sizeof(float))


def read_sums(const float[::1] buffer not None, int variant, int num_threads):
    """Sum of the buffer by one of `READ_LOOPS`; each thread reads one contiguous part."""
    cdef int share
    cdef int64_t count = buffer.shape[0]
    cdef int64_t start, stop
    cdef double total = 0.0
    cdef const float* data = &buffer[0] if count else NULL
    cdef const Kernels* kernels = active
    if not 0 <= variant < len(READ_LOOPS):
        raise ValueError(f"there is no read loop {variant}; they are 0 to {len(READ_LOOPS) - 1}")
    if num_threads < 1:
        raise ValueError(f"{num_threads} threads; there must be at least 1")
    for share in prange(num_threads, nogil=True, schedule="static", chunksize=1, num_threads=num_threads):
        start, stop = part_start(count, share, num_threads), part_start(count, share + 1, num_threads)
        total += kernels.read_loop(data + start, stop - start, variant)
    return total


cdef int64_t part_start(int64_t count, int share, int num_threads) noexcept nogil:
    """Where the part of a thread begins: at a whole cache line."""
    return count if share == num_threads else count * share // num_threads // 16 * 16
