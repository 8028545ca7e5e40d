"""Types of the native module; see cython/_kernels.pyx."""

import numpy as np

DTYPES: dict[str, int]

def available_isas() -> tuple[str, ...]: ...
def active_isa() -> str: ...
def select_isa(name: str) -> None: ...
def convert(source: np.ndarray, source_dtype: str, target: np.ndarray, target_dtype: str) -> None: ...

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
        kv_dtype: str,
    ) -> None: ...
    def touch(self, start: int, stop: int, num_threads: int) -> None: ...
    def store(
        self, layer: int, token_bytes: np.ndarray, rows: np.ndarray, column: int, wire_dtype: str, num_threads: int
    ) -> None: ...

class GroupPlan:
    def __init__(
        self,
        *,
        num_kv_heads: int,
        blocks: np.ndarray,
        table_base: np.ndarray,
        positions: np.ndarray,
        item_pair: np.ndarray,
        item_start: np.ndarray,
        item_stop: np.ndarray,
        pair_items: np.ndarray,
        piece_rows: np.ndarray,
        piece_threads: np.ndarray,
        shares: np.ndarray,
    ) -> None: ...

class GroupAttention:
    def __init__(self, cache: CacheView, *, num_heads: int, wire_dtype: str, scale: float) -> None: ...
    def attend(
        self,
        layer: int,
        plan: GroupPlan,
        qkv: np.ndarray,
        out: np.ndarray,
        piece: int,
        lse: np.ndarray | None = None,
    ) -> None: ...
