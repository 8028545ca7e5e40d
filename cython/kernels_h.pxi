# kernels/kernels.h as Cython sees it; comments are there.

cdef extern from "kernels/kernels.h" namespace "fastdecode" nogil:
    const int kPanelOut
    const int kGroupIn
    const int kScaleIn
    const int kProductRows

    cdef struct LayerView:
        char* keys
        int64_t block_bytes
        int64_t head_bytes
        int64_t value_bytes
        int32_t block_size
        int32_t head_dim
        int32_t key_dtype
        int32_t value_dtype

    cdef struct Cache:
        LayerView layer
        const int32_t* blocks
        const int64_t* table_base

    cdef struct AttendArgs:
        Cache[2] caches
        const int32_t* positions
        const char* queries
        int64_t query_row_bytes
        char* out
        int64_t out_row_bytes
        float* lse
        int32_t newest_cache
        int32_t head_dim
        int32_t group_size
        int32_t num_heads
        int32_t wire_dtype
        float scale
        float softcap
        const float* sinks

    cdef struct Span:
        int32_t row
        int32_t head
        int32_t start
        int32_t stop
        int32_t cache

    cdef struct StoreArgs:
        LayerView layer
        const int64_t* places
        const char* rows
        int64_t row_bytes
        int32_t num_kv_heads
        int32_t wire_dtype

    cdef struct PromptArgs:
        const char* queries
        const char* keys
        const char* values
        char* out
        int64_t query_row_bytes
        int64_t key_row_bytes
        int64_t value_row_bytes
        int64_t out_row_bytes
        int64_t start
        int64_t window
        int32_t group_size
        int32_t head_dim
        int32_t dtype
        float scale
        float softcap
        const float* sinks

    cdef struct Product:
        const void* rows
        int64_t row_stride
        int64_t num_rows
        int64_t block_rows
        int64_t num_in
        int64_t num_out
        const void* weights
        const float* bias
        void* out
        int32_t row_dtype
        int32_t weight_dtype
        int32_t out_dtype

    cdef struct Int8Product:
        const float* rows
        int64_t row_stride
        int64_t num_rows
        int64_t num_in
        int64_t num_panels
        const int8_t* codes
        const float* scales
        const float* offsets
        float* out

    cdef struct Kernels:
        const char* name
        void (*attend_span)(const AttendArgs&, const Span&, const Span*, float*, float*) noexcept nogil
        void (*finish_row)(const AttendArgs&, int32_t, int32_t, const float*, int64_t, float*) noexcept nogil
        void (*store_row)(const StoreArgs&, int64_t) noexcept nogil
        void (*convert)(const void*, int32_t, void*, int32_t, int64_t) noexcept nogil
        void (*exp_nonpositive)(const float*, float*, int64_t) noexcept nogil
        float (*read_loop)(const float*, int64_t, int) noexcept nogil
        void (*rms_norm)(const void*, const void*, void*, int32_t, int64_t, float) noexcept nogil
        void (*swiglu)(const void*, void*, int32_t, int64_t) noexcept nogil
        void (*rotate)(void*, const float*, int32_t, int64_t, int64_t, int64_t) noexcept nogil
        int64_t (*to_wire)(const void*, int32_t, void*, int32_t, int64_t) noexcept nogil
        void (*attend_prompt)(const PromptArgs&, int64_t, int64_t, int64_t, float*) noexcept nogil
        void (*multiply_int8)(const Int8Product&, int64_t, int64_t, float*) noexcept nogil
        void (*multiply)(const Product&, int64_t, int64_t) noexcept nogil
        bint has_pair_products
        int64_t (*pick)(const float*, int64_t) noexcept nogil

    int64_t token_bytes(int32_t, int32_t)
    int64_t partial_floats(int32_t, int32_t)
    int64_t workspace_floats(int32_t, int32_t)
    int64_t prompt_workspace_floats(int64_t, int32_t, int32_t)
    int64_t product_floats()
    int num_available()
    const Kernels* available(int)
