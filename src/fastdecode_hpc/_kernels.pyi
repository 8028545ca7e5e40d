"""Types of the native module; see cython/_kernels.pyx."""

import numpy as np

DTYPES: dict[str, int]
CACHE_DTYPES: dict[str, int]
READ_LOOPS: tuple[str, ...]
PANEL: int
INT8_GROUP: int
INT8_SCALED: int
PRODUCT_FLOATS: int

def available_isas() -> tuple[str, ...]: ...
def active_isa() -> str: ...
def select_isa(name: str) -> None: ...
def convert(source: np.ndarray, source_dtype: str, target: np.ndarray, target_dtype: str) -> None: ...
def cache_token_bytes(dtype: str, head_dim: int) -> int: ...
def exp_nonpositive(values: np.ndarray) -> np.ndarray: ...
def touch_parts(buffer: np.ndarray, num_threads: int) -> None: ...
def read_sums(buffer: np.ndarray, variant: int, num_threads: int) -> float: ...
def rms_norm(
    rows: int,
    num_rows: int,
    inner: int,
    outer_bytes: int,
    inner_bytes: int,
    weights: int,
    target: int,
    dtype: int,
    num_columns: int,
    eps: float,
    num_threads: int,
) -> None: ...
def swiglu(
    rows: int, num_rows: int, row_bytes: int, target: int, dtype: int, num_columns: int, num_threads: int
) -> None: ...
def rotate(
    rows: int,
    num_rows: int,
    row_bytes: int,
    num_heads: int,
    head_stride: int,
    angles: int,
    pairs: int,
    dtype: int,
    num_threads: int,
) -> None: ...
def to_wire(
    rows: int,
    num_rows: int,
    row_bytes: int,
    dtype: int,
    target: int,
    target_row_bytes: int,
    target_dtype: int,
    num_columns: int,
    num_saturated: int,
    num_threads: int,
) -> None: ...
def pick(rows: int, num_rows: int, row_bytes: int, num_columns: int, target: int, num_threads: int) -> None: ...
def has_pair_products() -> bool: ...
def multiply(
    rows: int,
    num_rows: int,
    row_stride: int,
    row_dtype: int,
    num_in: int,
    weights: int,
    weight_dtype: int,
    num_out: int,
    bias: int,
    target: int,
    target_dtype: int,
    num_threads: int,
) -> None: ...
def multiply_int8(
    rows: int,
    num_rows: int,
    row_stride: int,
    num_in: int,
    codes: int,
    scales: int,
    offsets: int,
    num_panels: int,
    target: int,
    workspace: int,
    num_threads: int,
) -> None: ...
def attend_prompt(
    scratch: Scratch,
    queries: int,
    query_row_bytes: int,
    num_queries: int,
    keys: int,
    key_row_bytes: int,
    values: int,
    value_row_bytes: int,
    out: int,
    out_row_bytes: int,
    start: int,
    num_kv_heads: int,
    group_size: int,
    head_dim: int,
    dtype: int,
    window: int,
    scale: float,
    softcap: float,
    sinks: int,
    task_queries: int,
    num_threads: int,
) -> None: ...

class Scratch:
    def __init__(self) -> None: ...

class CacheView:
    num_layers: int
    num_kv_heads: int
    block_bytes: int
    def __init__(
        self,
        arena: np.ndarray,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        k_dtype: str,
        v_dtype: str,
    ) -> None: ...
    def touch(self, start: int, stop: int, num_threads: int) -> None: ...
    def store(
        self, layer: int, places: np.ndarray, rows: np.ndarray, column: int, wire_dtype: str, num_threads: int
    ) -> None: ...

class GroupPlan:
    def __init__(
        self,
        *,
        num_kv_heads: int,
        blocks: np.ndarray,
        table_base: np.ndarray,
        positions: np.ndarray,
        recent_blocks: np.ndarray,
        recent_base: np.ndarray,
        item_pair: np.ndarray,
        item_start: np.ndarray,
        item_stop: np.ndarray,
        item_cache: np.ndarray,
        pair_items: np.ndarray,
        chunks: np.ndarray,
        splits: np.ndarray,
        piece_chunks: np.ndarray,
        piece_splits: np.ndarray,
        piece_threads: np.ndarray,
        num_slots: int,
    ) -> None: ...

class GroupAttention:
    def __init__(
        self,
        cache: CacheView,
        recent: CacheView | None,
        *,
        num_heads: int,
        wire_dtype: str,
        scale: float,
        softcap: float,
    ) -> None: ...
    def set_sinks(self, sinks: np.ndarray) -> None: ...
    def attend(
        self,
        layer: int,
        plan: GroupPlan,
        qkv: np.ndarray,
        out: np.ndarray,
        piece: int,
        lse: np.ndarray | None = None,
    ) -> None: ...

def pin_threads(cores: np.ndarray) -> None: ...
def thread_cores(num_threads: int) -> tuple[tuple[int, ...], ...]: ...
