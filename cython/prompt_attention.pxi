# Causal attention of a prompt's queries; a part of _kernels.pyx.
#
# Memory comes as addresses, as in row_ops.pxi: `s_part.prompt_attention`, its only caller, checks shapes and types.

cdef int64_t MIN_PARALLEL_PRODUCTS = 1 << 20  # of queries and keys; for fewer, starting threads costs more


def attend_prompt(Scratch scratch not None, uintptr_t queries, int64_t query_row_bytes, int64_t num_queries,
                  uintptr_t keys, int64_t key_row_bytes, uintptr_t values, int64_t value_row_bytes,
                  uintptr_t out, int64_t out_row_bytes, int64_t start, int32_t num_kv_heads, int32_t group_size,
                  int32_t head_dim, int32_t dtype, int64_t window, float scale, float softcap, uintptr_t sinks,
                  int64_t task_queries, int num_threads):
    """Attention of queries [num_queries, num_kv_heads * group_size, head_dim] at positions from `start` on.

    A task is one KV head and up to `task_queries` queries.
    """
    cdef PromptArgs args
    args.queries, args.query_row_bytes = <const char*> queries, query_row_bytes
    args.keys, args.key_row_bytes = <const char*> keys, key_row_bytes
    args.values, args.value_row_bytes = <const char*> values, value_row_bytes
    args.out, args.out_row_bytes = <char*> out, out_row_bytes
    args.start, args.window, args.group_size, args.head_dim = start, window, group_size, head_dim
    args.dtype, args.scale, args.softcap, args.sinks = dtype, scale, softcap, <const float*> sinks
    cdef int64_t num_runs = (num_queries + task_queries - 1) // task_queries
    cdef int64_t keys_seen = min(start + num_queries, window) if window else start + num_queries
    cdef int threads = team(num_queries * keys_seen * num_kv_heads * group_size * head_dim, MIN_PARALLEL_PRODUCTS,
                            num_threads)
    cdef int64_t stride = prompt_workspace_floats(task_queries, group_size, head_dim)
    cdef float* workspaces = scratch.lend(threads * stride)
    cdef const Kernels* kernels = active
    cdef int64_t task, first
    with nogil, parallel(num_threads=threads):
        for task in prange(num_runs * num_kv_heads, schedule="dynamic", chunksize=1):
            first = (num_runs - 1 - task // num_kv_heads) * task_queries  # the last queries see most keys
            kernels.attend_prompt(args, task % num_kv_heads, first, min(first + task_queries, num_queries),
                                  workspaces + threadid() * stride)
