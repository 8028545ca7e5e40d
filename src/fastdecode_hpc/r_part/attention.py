"""Decode attention over a KV partition: the native kernels, and the NumPy reference that specifies them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fastdecode_hpc import _kernels
from fastdecode_hpc.isa import choose_isa
from fastdecode_hpc.r_part.step_work import StepWork

if TYPE_CHECKING:
    from fastdecode_hpc.r_part.kv_cache import KVPartition
    from fastdecode_hpc.schedule.kv_layout import LayerGroup

__all__ = [
    "READ_LOOPS",
    "DecodeAttention",
    "StepWork",
    "convert_rows",
    "make_cache_view",
    "numpy_dtype",
    "pin_threads",
    "read_sums",
    "reference_attention",
    "thread_cores",
    "touch_parts",
]

READ_LOOPS = _kernels.READ_LOOPS


def numpy_dtype(dtype: str) -> np.dtype:
    """The NumPy type that carries `dtype`; NumPy has no bf16, its bits travel as uint16."""
    return np.dtype({"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}[dtype])


def convert_rows(rows: np.ndarray, source_dtype: str, target_dtype: str) -> np.ndarray:
    """Convert as the wire and the cache do: to nearest even; finite values that are too large saturate.

    Parameters
    ----------
    rows : np.ndarray
        [num_rows, columns] of `source_dtype`; columns is a multiple of 8.
    """
    choose_isa()
    target = np.empty(rows.shape, numpy_dtype(target_dtype))
    _kernels.convert(rows, source_dtype, target, target_dtype)
    return target


def touch_parts(buffer: np.ndarray, num_threads: int) -> None:
    """Fill a buffer, [count] float32, with zeros: each thread the part that it reads in `read_sums`."""
    _kernels.touch_parts(buffer, num_threads)


def read_sums(buffer: np.ndarray, variant: int, num_threads: int) -> float:
    """Read a buffer, [count] float32, by the loop `READ_LOOPS[variant]`; the sum of what was read."""
    choose_isa()
    return _kernels.read_sums(buffer, variant, num_threads)


def make_cache_view(arena: np.ndarray, group: LayerGroup, block_size: int) -> _kernels.CacheView:
    """The kernels' view of the memory of one layer group, [num_blocks * block_bytes] uint8."""
    choose_isa()
    return _kernels.CacheView(
        arena,
        num_layers=len(group.layers),
        num_kv_heads=group.num_kv_heads,
        head_dim=group.head_dim,
        block_size=block_size,
        k_dtype=group.k_dtype,
        v_dtype=group.v_dtype,
    )


class DecodeAttention:
    """Attention of mini-batches over one KV partition.

    Parameters
    ----------
    partition : KVPartition
    num_heads : int
        Query heads; a multiple of the KV heads.
    wire_dtype : str
        Type of q, k, v and of the output: fp32, fp16 or bf16 (as uint16).
    num_threads : int
        Threads that store K and V; `attend` uses those of its `StepWork`.

    Notes
    -----
    For one instruction set the output bits of a row depend on its own q, K, V and position alone: not on
    its neighbours, the number of threads, the pieces, or where its blocks lie. Finite values outside the
    range of a 16-bit type become its largest.
    """

    def __init__(
        self,
        partition: KVPartition,
        *,
        num_heads: int,
        wire_dtype: str,
        num_threads: int,
    ) -> None:
        choose_isa()
        self._places = partition.layer_places
        self._layers = tuple(pool.group.layers for pool, _ in partition.pairs)
        self._views = tuple((pool.view, recent.view if recent else None) for pool, recent in partition.pairs)
        self._num_threads, self._wire_dtype = num_threads, wire_dtype
        self._kernels = tuple(
            _kernels.GroupAttention(
                *views,
                num_heads=num_heads,
                wire_dtype=wire_dtype,
                scale=pool.group.head_dim**-0.5 if pool.group.scale is None else pool.group.scale,
                softcap=pool.group.softcap or 0.0,
            )
            for (pool, _), views in zip(partition.pairs, self._views, strict=True)
        )
        self._q_sizes = tuple(num_heads * pool.group.head_dim for pool, _ in partition.pairs)

    def set_sinks(self, sinks: np.ndarray) -> None:
        """Give each query head of each layer a score that takes weight and has no value.

        Parameters
        ----------
        sinks : np.ndarray
            [num_layers, num_heads] float32
        """
        for layers, kernels in zip(self._layers, self._kernels, strict=True):
            kernels.set_sinks(np.ascontiguousarray(sinks[list(layers)]))

    def append(self, layer: int, work: StepWork, qkv: np.ndarray) -> None:
        """Store K and V of the rows ``[q|k|v]`` at their positions.

        Parameters
        ----------
        qkv : np.ndarray
            [num_rows, qkv_size] of the wire's type, C-contiguous.
        """
        group, index = self._places[layer]
        arrays, (view, recent) = work.groups[group], self._views[group]
        k_column, threads = self._q_sizes[group], self._num_threads
        view.store(index, arrays.places, qkv, k_column, self._wire_dtype, threads)
        if recent is not None:
            recent.store(index, arrays.recent_places, qkv, k_column, self._wire_dtype, threads)

    def attend(
        self,
        layer: int,
        work: StepWork,
        qkv: np.ndarray,
        out: np.ndarray,
        piece: int,
        lse: np.ndarray | None = None,
    ) -> None:
        """Compute the output of the rows of one piece; the other rows of `out` are not touched.

        Parameters
        ----------
        qkv : np.ndarray
            [num_rows, qkv_size] of the wire's type, C-contiguous; all rows of the mini-batch.
        out : np.ndarray
            [num_rows, num_heads * head_dim] of the wire's type, C-contiguous.
        lse : np.ndarray, optional
            [num_rows, num_heads] float32, receives log(sum exp(score)).
        """
        group, index = self._places[layer]
        plan = work.groups[group].plan or _make_plan(work, group, self._views[group][0].num_kv_heads)
        self._kernels[group].attend(index, plan, qkv, out, piece, lse)


def _make_plan(work: StepWork, group: int, num_kv_heads: int) -> _kernels.GroupPlan:
    """Hand the arrays of one layer group to the kernels, once."""
    arrays = work.groups[group]
    arrays.plan = _kernels.GroupPlan(
        num_kv_heads=num_kv_heads,
        blocks=arrays.blocks,
        table_base=arrays.table_base,
        positions=work.positions,
        recent_blocks=arrays.recent_blocks,
        recent_base=arrays.recent_base,
        item_pair=arrays.item_pair,
        item_start=arrays.item_start,
        item_stop=arrays.item_stop,
        item_cache=arrays.item_cache,
        pair_items=arrays.pair_items,
        chunks=arrays.chunks,
        splits=arrays.splits,
        piece_chunks=arrays.piece_chunks,
        piece_splits=arrays.piece_splits,
        piece_threads=arrays.piece_threads,
        num_slots=arrays.num_slots,
    )
    return arrays.plan


def reference_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    position: int,
    *,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of one row in float64: the specification of the kernels.

    Parameters
    ----------
    q : np.ndarray
        [num_heads, head_dim] of the newest token.
    k, v : np.ndarray
        [num_tokens, num_kv_heads, head_dim], the newest token included; tokens after it are not seen.
    position : int
        Of the newest token.
    window : int, optional
        Tokens that a query sees, itself included.
    scale : float, optional
        Of scores; default ``head_dim ** -0.5``.
    softcap : float, optional
        Scores become ``cap * tanh(score / cap)``.
    sinks : np.ndarray, optional
        [num_heads] one score more of each head, whose value is 0.

    Returns
    -------
    o : np.ndarray
        [num_heads, head_dim] float64.
    lse : np.ndarray
        [num_heads] float64, log(sum exp(score)).
    """
    first = 0 if window is None else max(0, position + 1 - window)
    seen = slice(first, position + 1)
    num_heads, head_dim = q.shape
    group_size = num_heads // k.shape[1]
    scale = head_dim**-0.5 if scale is None else scale
    keys = np.repeat(k[seen].astype(np.float64), group_size, axis=1)  # [num_seen, num_heads, head_dim]
    values = np.repeat(v[seen].astype(np.float64), group_size, axis=1)
    scores = np.einsum("hd,thd->ht", q.astype(np.float64), keys) * scale
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    sink = np.full((num_heads, 1), -np.inf) if sinks is None else sinks.astype(np.float64)[:, None]
    largest = np.maximum(scores.max(axis=1, keepdims=True), sink)
    weights = np.exp(scores - largest)
    total = weights.sum(axis=1, keepdims=True) + np.exp(sink - largest)
    return np.einsum("ht,thd->hd", weights / total, values), (largest + np.log(total))[:, 0]


def pin_threads(cores: Sequence[int]) -> None:
    """Bind thread i of the kernels' team of ``len(cores)`` threads to ``cores[i]``; the calling thread is thread 0.

    Threads that the calling thread starts later inherit its core.

    Raises
    ------
    OSError
        If the kernel refuses; threads may then be bound in part (see `thread_cores`).
    """
    _kernels.pin_threads(np.array(cores, np.int32))


def thread_cores(num_threads: int) -> tuple[tuple[int, ...], ...]:
    """The cores that each thread of the kernels' team may run on, as the kernel tells them.

    Shorter than `num_threads` where OpenMP gives fewer threads (OMP_THREAD_LIMIT).
    """
    return _kernels.thread_cores(num_threads)
