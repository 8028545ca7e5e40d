# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
# cython: freethreading_compatible=False
"""Binding of the kernels: checks shapes, releases the GIL, spreads work over threads.

The arithmetic is in ``kernels/``, the list of work comes from `r_part.step_work`. The OpenMP loops are here.
"""

from cpython.buffer cimport PyBUF_FORMAT, PyBUF_STRIDES, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cython.parallel cimport parallel, prange, threadid
from libc.errno cimport errno
from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t, uintptr_t
from libc.string cimport memset, strcmp

import numpy as np

include "kernels_h.pxi"


DTYPES = {"fp32": 0, "fp16": 1, "bf16": 2}  # of the wire
CACHE_DTYPES = {**DTYPES, "int8": 3, "int4": 4}
cdef (const char*)[3] FORMATS = [b"f", b"e", b"H"]  # how NumPy arrays of the wire's types describe themselves
cdef int[3] ITEM_BYTES = [4, 2, 2]
cdef int64_t PAGE_BYTES = 4096
cdef int64_t MIN_PARALLEL_VALUES = 1 << 16  # of K and V; to store fewer, starting threads costs more
cdef int64_t LINE_FLOATS = 16  # of a cache line

PANEL, INT8_GROUP, INT8_SCALED = kPanelOut, kGroupIn, kScaleIn  # of weights
PRODUCT_FLOATS = product_floats()  # of one thread's workspace

cdef const Kernels* active = available(num_available() - 1)


def available_isas():
    """Return the instruction sets built in that this processor can run, slowest first."""
    cdef int i
    return tuple([available(i).name.decode() for i in range(num_available())])


def active_isa():
    """Return the instruction set in use."""
    return active.name.decode()


def select_isa(str name not None):
    """Use the named instruction set from now on; ValueError if this processor cannot run it."""
    global active
    cdef int i
    cdef bytes wanted = name.encode()
    for i in range(num_available()):
        if strcmp(available(i).name, wanted) == 0:
            active = available(i)
            return
    raise ValueError(f"instruction set {name!r} is not available; this processor can run {available_isas()}")


def convert(source, str source_dtype not None, target, str target_dtype not None):
    """Convert rows of one type to another as the wire and the cache do: nearest even, saturating.

    Both are [rows, columns]; columns is a multiple of 8.
    """
    cdef Rows from_rows = Rows(source, DTYPES[source_dtype], -1, -1, False, "source")
    cdef Rows to_rows = Rows(target, DTYPES[target_dtype], from_rows.num_rows, from_rows.num_columns, True, "target")
    if from_rows.num_columns % 8:
        raise ValueError(f"source has {from_rows.num_columns} columns; it must be a multiple of 8")
    with nogil:
        active.convert(from_rows.data, from_rows.dtype, to_rows.data, to_rows.dtype,
                       from_rows.num_rows * from_rows.num_columns)


def cache_token_bytes(str dtype not None, int32_t head_dim):
    """Bytes of one token's K (or V) of one KV head, scales included."""
    return token_bytes(CACHE_DTYPES[dtype], head_dim)


def exp_nonpositive(const float[::1] values not None):
    """exp of values that are at most 0, as the softmax computes it; their number is a multiple of 16."""
    if values.shape[0] % 16:
        raise ValueError(f"{values.shape[0]} values; their number must be a multiple of 16")
    result = np.empty(values.shape[0], np.float32)
    cdef float[::1] target = result
    if values.shape[0]:
        active.exp_nonpositive(&values[0], &target[0], values.shape[0])
    return result


cdef class Rows:
    """A checked view of a C-contiguous array [num_rows, num_columns]; holds the buffer while it lives."""

    cdef Py_buffer buffer
    cdef bint is_open
    cdef char* data
    cdef int32_t dtype
    cdef int64_t num_rows, num_columns, row_bytes

    def __cinit__(self, array, int32_t dtype, int64_t num_rows, int64_t num_columns, bint writable, str name):
        # A size of -1 takes whatever the array has.
        self.is_open = False
        PyObject_GetBuffer(array, &self.buffer, PyBUF_FORMAT | PyBUF_STRIDES | (PyBUF_WRITABLE if writable else 0))
        self.is_open = True
        cdef const Py_buffer* buffer = &self.buffer
        if strcmp(buffer.format, FORMATS[dtype]) != 0:
            raise ValueError(f"{name} has items {buffer.format.decode()!r}; they must be {FORMATS[dtype].decode()!r}")
        if buffer.ndim != 2 or num_rows not in (-1, buffer.shape[0]) or num_columns not in (-1, buffer.shape[1]):
            shape = tuple([buffer.shape[i] for i in range(buffer.ndim)])
            raise ValueError(f"{name} has shape {shape}; it must be [{num_rows}, {num_columns}]".replace("-1", "any"))
        self.dtype, self.num_rows, self.num_columns = dtype, buffer.shape[0], buffer.shape[1]
        self.row_bytes = self.num_columns * ITEM_BYTES[dtype]
        if self.num_columns > 1 and buffer.strides[1] != ITEM_BYTES[dtype] or (
            self.num_rows > 1 and buffer.strides[0] != self.row_bytes
        ):
            strides, wanted = (buffer.strides[0], buffer.strides[1]), (self.row_bytes, ITEM_BYTES[dtype])
            raise ValueError(f"{name} has strides {strides}; it must be contiguous: {wanted}")
        self.data = <char*> buffer.buf

    def __dealloc__(self):
        if self.is_open:
            PyBuffer_Release(&self.buffer)


cdef class CacheView:
    """The arena of one layer group, as the kernels address it."""

    cdef uint8_t[::1] arena
    cdef LayerView view  # with `keys` of layer 0
    cdef int64_t layer_bytes
    cdef readonly int32_t num_layers, num_kv_heads

    def __init__(self, uint8_t[::1] arena not None, *, int32_t num_layers, int32_t num_kv_heads, int32_t head_dim,
                 int32_t block_size, str k_dtype, str v_dtype):
        if head_dim % 8 or not 8 <= head_dim <= 256:
            raise ValueError(f"head_dim is {head_dim}; it must be a multiple of 8 up to 256")
        if block_size % 8 or block_size < 8:
            raise ValueError(f"block_size is {block_size}; it must be a multiple of 8")
        self.arena, self.num_layers, self.num_kv_heads = arena, num_layers, num_kv_heads
        self.view.block_size, self.view.head_dim = block_size, head_dim
        self.view.key_dtype, self.view.value_dtype = CACHE_DTYPES[k_dtype], CACHE_DTYPES[v_dtype]
        self.view.value_bytes = block_size * token_bytes(self.view.key_dtype, head_dim)
        self.view.head_bytes = self.view.value_bytes + block_size * token_bytes(self.view.value_dtype, head_dim)
        self.layer_bytes = num_kv_heads * self.view.head_bytes
        self.view.block_bytes = num_layers * self.layer_bytes
        if arena.shape[0] % self.view.block_bytes:
            raise ValueError(f"arena has {arena.shape[0]} bytes; it must be a multiple of {self.view.block_bytes}")
        self.view.keys = <char*> &arena[0] if arena.shape[0] else NULL

    @property
    def block_bytes(self):
        """Bytes of one block."""
        return self.view.block_bytes

    cdef LayerView layer(self, int32_t index) except *:
        """The view of one layer; `index` counts within the group."""
        if not 0 <= index < self.num_layers:
            raise IndexError(f"layer {index} of a group of {self.num_layers}")
        cdef LayerView view = self.view
        view.keys += index * self.layer_bytes
        return view

    def touch(self, int64_t start, int64_t stop, int num_threads):
        """Write to every page of the bytes [start, stop), which must be unused, from all threads."""
        if not 0 <= start <= stop <= self.arena.shape[0]:
            raise IndexError(f"bytes {start} to {stop} of an arena of {self.arena.shape[0]}")
        cdef int64_t page
        cdef int64_t num_pages = (stop - start + PAGE_BYTES - 1) // PAGE_BYTES
        cdef uint8_t* first = <uint8_t*> self.view.keys + start
        for page in prange(num_pages, nogil=True, schedule="static", num_threads=num_threads):
            first[page * PAGE_BYTES] = 0

    def store(self, int32_t layer, const int64_t[::1] places not None, rows, int64_t column, str wire_dtype,
              int num_threads):
        """Store K and V of some tokens.

        rows is [num_rows, ...] of `wire_dtype`; K starts at `column`, V follows. places [num_rows] is where each
        token goes: block * block_size + its place in the block.
        """
        cdef Rows checked = Rows(rows, DTYPES[wire_dtype], places.shape[0], -1, False, "rows")
        cdef int64_t width = 2 * self.num_kv_heads * self.view.head_dim
        if not 0 <= column <= checked.num_columns - width:
            raise ValueError(f"rows have {checked.num_columns} columns; [k|v] needs {width} from {column} on")
        cdef StoreArgs args
        args.layer = self.layer(layer)
        args.places = &places[0] if checked.num_rows else NULL
        args.rows = checked.data + column * ITEM_BYTES[checked.dtype]
        args.row_bytes = checked.row_bytes
        args.num_kv_heads, args.wire_dtype = self.num_kv_heads, checked.dtype
        cdef int64_t row
        cdef int64_t num_rows = checked.num_rows
        # All threads or one: a smaller team makes the OpenMP runtime end threads and start them anew.
        cdef int threads = num_threads if num_rows * width >= MIN_PARALLEL_VALUES else 1
        cdef const Kernels* kernels = active
        for row in prange(num_rows, nogil=True, schedule="static", num_threads=threads):
            kernels.store_row(args, row)


cdef struct Chunk:  # what one thread does without a break; see `r_part.step_work.CHUNK`
    int64_t first_pair, stop_pair, first_item, stop_item, slot


cdef struct Split:  # a pair whose items were spread over chunks
    int64_t pair, slot


cdef struct Piece:  # what the threads of one call share
    const int32_t* item_pair
    const int32_t* item_start
    const int32_t* item_stop
    const int32_t* item_cache
    const int64_t* pair_items   # pair |-> its first item
    const Chunk* chunks
    const Split* splits
    int64_t num_chunks, num_splits
    int32_t num_kv_heads
    int num_threads
    float* partials             # of split pairs, by slot
    int64_t partial_stride
    float* workspaces           # of thread 0: partials of one pair, then the kernels' own
    int64_t workspace_stride, pair_floats


cdef class GroupPlan:
    """The work of one step in one layer group; arrays are described in `r_part.step_work.GroupWork`."""

    cdef const int32_t[::1] blocks, recent_blocks, positions, item_pair, item_start, item_stop, item_cache
    cdef const int64_t[::1] table_base, recent_base, pair_items, piece_chunks, piece_splits, piece_threads
    cdef const int64_t[:, ::1] chunks, splits
    cdef int64_t num_rows, max_pair_items, num_slots
    cdef int max_threads
    cdef int32_t num_kv_heads

    def __init__(self, *, int32_t num_kv_heads, const int32_t[::1] blocks not None,
                 const int64_t[::1] table_base not None, const int32_t[::1] recent_blocks not None,
                 const int64_t[::1] recent_base not None, const int32_t[::1] positions not None,
                 const int32_t[::1] item_pair not None, const int32_t[::1] item_start not None,
                 const int32_t[::1] item_stop not None, const int32_t[::1] item_cache not None,
                 const int64_t[::1] pair_items not None, const int64_t[:, ::1] chunks not None,
                 const int64_t[:, ::1] splits not None, const int64_t[::1] piece_chunks not None,
                 const int64_t[::1] piece_splits not None, const int64_t[::1] piece_threads not None,
                 int64_t num_slots):
        self.num_rows, self.num_kv_heads = positions.shape[0], num_kv_heads
        expect("table_base", table_base.shape[0], self.num_rows)
        expect("pair_items", pair_items.shape[0], self.num_rows * num_kv_heads + 1)
        expect("item_start", item_start.shape[0], item_pair.shape[0])
        expect("item_stop", item_stop.shape[0], item_pair.shape[0])
        expect("item_cache", item_cache.shape[0], item_pair.shape[0])
        expect("last pair_items", pair_items[pair_items.shape[0] - 1], item_pair.shape[0])
        expect("columns of chunks", chunks.shape[1], sizeof(Chunk) // sizeof(int64_t))
        expect("columns of splits", splits.shape[1], sizeof(Split) // sizeof(int64_t))
        expect("piece_chunks", piece_chunks.shape[0], piece_threads.shape[0] + 1)
        expect("piece_splits", piece_splits.shape[0], piece_threads.shape[0] + 1)
        expect("last piece_chunks", piece_chunks[piece_threads.shape[0]], chunks.shape[0])
        expect("last piece_splits", piece_splits[piece_threads.shape[0]], splits.shape[0])
        self.blocks, self.table_base, self.positions = blocks, table_base, positions
        self.recent_blocks, self.recent_base = recent_blocks, recent_base
        self.item_pair, self.item_start, self.item_stop = item_pair, item_start, item_stop
        self.item_cache, self.pair_items, self.chunks, self.splits = item_cache, pair_items, chunks, splits
        self.piece_chunks, self.piece_splits, self.piece_threads = piece_chunks, piece_splits, piece_threads
        self.num_slots = num_slots
        self.max_threads = max(piece_threads) if piece_threads.shape[0] else 1
        self.measure_pairs()

    cdef int measure_pairs(self) except -1:
        """Note the most items of one pair: what a thread keeps before it finishes the pair."""
        cdef int64_t pair
        self.max_pair_items = 0
        for pair in range(self.pair_items.shape[0] - 1):
            self.max_pair_items = max(self.max_pair_items, self.pair_items[pair + 1] - self.pair_items[pair])
        return 0

    cdef int fill(self, Piece* piece, int64_t index) except -1:
        """Point `piece` at the work of one piece."""
        if not 0 <= index < self.piece_threads.shape[0]:
            raise IndexError(f"piece {index} of {self.piece_threads.shape[0]}")
        cdef int64_t chunk = self.piece_chunks[index]
        cdef int64_t split = self.piece_splits[index]
        piece.num_threads = <int> self.piece_threads[index]
        piece.num_kv_heads = self.num_kv_heads
        piece.pair_items = &self.pair_items[0]
        piece.num_chunks = self.piece_chunks[index + 1] - chunk
        piece.num_splits = self.piece_splits[index + 1] - split
        if piece.num_chunks:
            piece.chunks = <const Chunk*> &self.chunks[chunk, 0]
        if piece.num_splits:
            piece.splits = <const Split*> &self.splits[split, 0]
        if self.item_pair.shape[0]:
            piece.item_pair = &self.item_pair[0]
            piece.item_start = &self.item_start[0]
            piece.item_stop = &self.item_stop[0]
            piece.item_cache = &self.item_cache[0]
        return 0


cdef int expect(str name, int64_t size, int64_t wanted) except -1:
    if size != wanted:
        raise ValueError(f"{name} has {size} entries; it must have {wanted}")
    return 0


cdef class Scratch:
    """Floats that begin on a cache line; they only grow."""

    cdef float[::1] memory
    cdef float* first
    cdef int64_t size

    def __init__(self):
        self.first = NULL
        self.size = 0

    cdef float* lend(self, int64_t floats) except? NULL:
        cdef uintptr_t line = LINE_FLOATS * sizeof(float)
        if self.size < floats:
            self.memory = np.empty(floats + LINE_FLOATS, np.float32)
            self.first = <float*> (((<uintptr_t> &self.memory[0]) + line - 1) // line * line)
            self.size = floats
        return self.first


cdef class GroupAttention:
    """Decode attention over the layers of one group, with its scratch memory.

    `recent`, if not None, holds the most recent tokens unquantised: the newest is read there.
    """

    cdef CacheView cache, recent
    cdef int32_t num_heads, group_size, wire_dtype
    cdef int64_t qkv_columns, partial_stride, workspace_floats
    cdef float scale, softcap
    cdef const float[:, ::1] sinks  # [num_layers, num_heads], or None
    cdef Scratch partials, workspaces

    def __init__(self, CacheView cache not None, CacheView recent, *, int32_t num_heads, str wire_dtype,
                 float scale, float softcap):
        if num_heads < 1 or num_heads % cache.num_kv_heads:
            raise ValueError(f"{num_heads} heads cannot share {cache.num_kv_heads} KV heads")
        if not 0 < scale < float("inf"):
            raise ValueError(f"scale is {scale}; it must be a positive number")
        if not 0 <= softcap < float("inf"):
            raise ValueError(f"softcap is {softcap}; it must be a positive number, or 0 for none")
        cdef int32_t head_dim = cache.view.head_dim
        self.cache, self.recent, self.num_heads, self.scale = cache, recent, num_heads, scale
        self.softcap, self.sinks = softcap, None
        self.wire_dtype, self.group_size = DTYPES[wire_dtype], num_heads // cache.num_kv_heads
        self.qkv_columns = <int64_t> (num_heads + 2 * cache.num_kv_heads) * head_dim
        self.partial_stride = partial_floats(self.group_size, head_dim)
        self.workspace_floats = workspace_floats(self.group_size, head_dim)
        self.partials, self.workspaces = Scratch(), Scratch()

    def set_sinks(self, const float[:, ::1] sinks not None):
        """Give each query head of each layer a score without a value: [num_layers, num_heads]."""
        expect("layers of sinks", sinks.shape[0], self.cache.num_layers)
        expect("heads of sinks", sinks.shape[1], self.num_heads)
        self.sinks = sinks

    def attend(self, int32_t layer, GroupPlan plan not None, qkv, out, int64_t piece, lse=None):
        """Attention of the rows of one piece.

        qkv [num_rows, qkv_size] and out [num_rows, q_size] are of the wire's type; lse [num_rows, num_heads] is
        float32 and optional.
        """
        expect("plan's KV heads", plan.num_kv_heads, self.cache.num_kv_heads)
        cdef Rows queries = Rows(qkv, self.wire_dtype, plan.num_rows, self.qkv_columns, False, "qkv")
        cdef Rows outputs = Rows(out, self.wire_dtype, plan.num_rows, self.num_heads * self.cache.view.head_dim, True,
                                 "out")
        cdef Rows sums
        cdef AttendArgs args
        args.caches[0].layer = self.cache.layer(layer)
        args.caches[0].blocks, args.caches[0].table_base = &plan.blocks[0], &plan.table_base[0]
        args.caches[1] = args.caches[0]
        args.newest_cache = 0
        if self.recent is not None:
            expect("recent_base", plan.recent_base.shape[0], plan.num_rows)
            args.caches[1].layer = self.recent.layer(layer)
            args.caches[1].blocks, args.caches[1].table_base = &plan.recent_blocks[0], &plan.recent_base[0]
            args.newest_cache = 1
        args.positions, args.head_dim = &plan.positions[0], self.cache.view.head_dim
        args.queries, args.query_row_bytes = queries.data, queries.row_bytes
        args.out, args.out_row_bytes = outputs.data, outputs.row_bytes
        args.group_size, args.num_heads = self.group_size, self.num_heads
        args.wire_dtype, args.scale, args.softcap = self.wire_dtype, self.scale, self.softcap
        args.sinks = &self.sinks[layer, 0] if self.sinks is not None else NULL
        args.lse = NULL
        if lse is not None:
            sums = Rows(lse, 0, plan.num_rows, self.num_heads, True, "lse")
            args.lse = <float*> sums.data
        cdef Piece work
        plan.fill(&work, piece)
        work.partial_stride, work.pair_floats = self.partial_stride, plan.max_pair_items * self.partial_stride
        work.workspace_stride = work.pair_floats + self.workspace_floats
        work.partials = self.partials.lend(max(plan.num_slots, 1) * self.partial_stride)
        work.workspaces = self.workspaces.lend(plan.max_threads * work.workspace_stride)
        cdef const Kernels* kernels = active
        with nogil:
            run_piece(kernels, &args, &work)


cdef void run_piece(const Kernels* kernels, const AttendArgs* args, const Piece* work) noexcept nogil:
    """One parallel region: all chunks, a barrier, then the pairs that were spread over chunks are finished.

    Threads take the next chunk when they are free; bits do not depend on who does what.
    """
    cdef int64_t chunk, split
    with parallel(num_threads=work.num_threads):
        for chunk in prange(work.num_chunks, schedule="dynamic", chunksize=1):
            attend_chunk(kernels, args, work, &work.chunks[chunk], workspace_of(work, threadid()))
        for split in prange(work.num_splits, schedule="static", chunksize=1):
            finish_pair(kernels, args, work, work.splits[split].pair,
                        work.partials + work.splits[split].slot * work.partial_stride,
                        workspace_of(work, threadid()))


cdef inline float* workspace_of(const Piece* work, int thread) noexcept nogil:
    return work.workspaces + thread * work.workspace_stride


cdef void attend_chunk(const Kernels* kernels, const AttendArgs* args, const Piece* work, const Chunk* chunk,
                       float* workspace) noexcept nogil:
    """Whole pairs from their first item to their result, or some items of one long pair."""
    cdef int64_t pair
    if chunk.first_pair == chunk.stop_pair:
        attend_items(kernels, args, work, chunk.first_item, chunk.stop_item, chunk.stop_item,
                     work.partials + chunk.slot * work.partial_stride, workspace)
    for pair in range(chunk.first_pair, chunk.stop_pair):
        attend_items(kernels, args, work, work.pair_items[pair], work.pair_items[pair + 1], chunk.stop_item,
                     workspace, workspace)
        finish_pair(kernels, args, work, pair, workspace, workspace)


cdef void attend_items(const Kernels* kernels, const AttendArgs* args, const Piece* work, int64_t first, int64_t stop,
                       int64_t stop_of_chunk, float* partials, float* workspace) noexcept nogil:
    """Items [first, stop), each into the next partial; the item after them is known up to the chunk's end."""
    cdef int64_t item
    cdef Span[2] spans
    if first < stop:
        fill_span(work, first, &spans[first % 2])
    for item in range(first, stop):
        if item + 1 < stop_of_chunk:
            fill_span(work, item + 1, &spans[(item + 1) % 2])
        kernels.attend_span(args[0], spans[item % 2], &spans[(item + 1) % 2] if item + 1 < stop_of_chunk else NULL,
                            partials + (item - first) * work.partial_stride, workspace + work.pair_floats)


cdef inline void fill_span(const Piece* work, int64_t item, Span* span) noexcept nogil:
    span.row = work.item_pair[item] // work.num_kv_heads
    span.head = work.item_pair[item] % work.num_kv_heads
    span.start, span.stop, span.cache = work.item_start[item], work.item_stop[item], work.item_cache[item]


cdef inline void finish_pair(const Kernels* kernels, const AttendArgs* args, const Piece* work, int64_t pair,
                             const float* partials, float* workspace) noexcept nogil:
    kernels.finish_row(args[0], <int32_t> (pair // work.num_kv_heads), <int32_t> (pair % work.num_kv_heads), partials,
                       work.pair_items[pair + 1] - work.pair_items[pair], workspace + work.pair_floats)


include "row_ops.pxi"
include "prompt_attention.pxi"
include "threads.pxi"
include "read_bandwidth.pxi"
