"""The attention work of one step of one slot, as arrays: what is to be read, in which order, by which thread.

It is made once a step with NumPy and used for all layers; the loops over it are in ``cython/_kernels.pyx``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from fastdecode_hpc._kernels import GroupPlan
    from fastdecode_hpc.r_part.kv_cache import BlockPool, KVPartition

ITEM_COST_TOKENS = 16  # what an item costs beyond its tokens, as tokens
MIN_THREAD_BYTES = 64 << 10  # less KV than twice this is read by one thread; starting more costs more


@dataclass(slots=True)
class GroupWork:
    """The work of one step in one layer group.

    Notes
    -----
    An item is a run of older tokens of one (row, KV head) within one span; spans are cut at multiples of the
    span size, so they depend on the position alone. The newest token is no item: it is merged last, when the
    row is finished. Items are ordered by pair (row * num_kv_heads + KV head), then by token.
    """

    blocks: np.ndarray  # [all blocks] int32, the rows' block tables one after the other
    table_base: np.ndarray  # [num_rows] int64; token t of row r: blocks[table_base[r] + t // block_size]
    token_bytes: np.ndarray  # [num_rows] int64, place of the newest token
    item_pair: np.ndarray  # [num_items] int32
    item_start: np.ndarray  # [num_items] int32, first token
    item_stop: np.ndarray  # [num_items] int32, one past the last token
    pair_items: np.ndarray  # [num_pairs + 1] int64, pair |-> its first item
    shares: np.ndarray  # [num_pieces, num_threads + 1] int64, thread |-> its first item
    piece_threads: np.ndarray  # [num_pieces] int64, threads that are worth starting
    plan: GroupPlan | None = None  # the kernels' checked view of these arrays


class StepWork:
    """What stays the same over all layers of one step of one slot.

    Parameters
    ----------
    partition : KVPartition
    seq_ids : sequence of int
        The rows, in the order of the mini-batch.
    positions : np.ndarray
        [num_rows] position of each row's newest token; its block is reserved.
    num_threads : int
    span_size : int
        Tokens of a span. It changes results in their last bits, so it is the same on all ranks.
    piece_bytes : int
        A piece is a run of whole rows with at most this much KV in one layer (or one row), so that the
        caller can do something else in between.

    Attributes
    ----------
    num_rows, num_pieces : int
    piece_rows : np.ndarray
        [num_pieces + 1] first row of each piece.
    groups : tuple of GroupWork
    """

    def __init__(
        self,
        partition: KVPartition,
        seq_ids: Sequence[int],
        positions: np.ndarray,
        *,
        num_threads: int,
        span_size: int = 512,
        piece_bytes: int = 64 << 20,
    ) -> None:
        if len(positions) != len(seq_ids):
            raise ValueError(f"{len(positions)} positions for {len(seq_ids)} sequences")
        self.num_rows = len(seq_ids)
        self.positions = np.ascontiguousarray(positions, np.int32)
        firsts = [_first_visible(self.positions, pool.group.window) for pool in partition.pools]
        row_bytes = np.max(
            [_row_bytes(pool, self.positions, first) for pool, first in zip(partition.pools, firsts, strict=True)],
            axis=0,
        )
        self.piece_rows = _cut_pieces(row_bytes, piece_bytes)
        self.groups = tuple(
            _group_work(pool, seq_ids, self.positions, first, self.piece_rows, num_threads, span_size)
            for pool, first in zip(partition.pools, firsts, strict=True)
        )

    @property
    def num_pieces(self) -> int:
        return len(self.piece_rows) - 1


def _first_visible(positions: np.ndarray, window: int | None) -> np.ndarray:
    """Oldest token that each row sees: [num_rows] int32."""
    return np.zeros_like(positions) if window is None else np.maximum(positions + 1 - window, 0)


def _row_bytes(pool: BlockPool, positions: np.ndarray, first: np.ndarray) -> np.ndarray:
    """KV bytes that each row reads in one layer: [num_rows] int64."""
    token_bytes = 2 * pool.group.num_kv_heads * pool.token_bytes
    return np.asarray((positions.astype(np.int64) - first + 1) * token_bytes)


def _cut_pieces(row_bytes: np.ndarray, piece_bytes: int) -> np.ndarray:
    """First rows of runs of at most `piece_bytes`, at least one row each: [num_pieces + 1] int64."""
    total = np.concatenate(([0], np.cumsum(row_bytes)))
    rows = [0]
    while rows[-1] < len(row_bytes):
        fits = int(np.searchsorted(total, total[rows[-1]] + piece_bytes, side="right")) - 1
        rows.append(max(fits, rows[-1] + 1))
    return np.array(rows, np.int64)


def _group_work(
    pool: BlockPool,
    seq_ids: Sequence[int],
    positions: np.ndarray,
    first: np.ndarray,
    piece_rows: np.ndarray,
    num_threads: int,
    span_size: int,
) -> GroupWork:
    blocks, table_base = _join_tables(pool, seq_ids, positions, first)
    newest = blocks[table_base + positions // pool.block_size].astype(np.int64)
    item_pair, item_start, item_stop, pair_items = _cut_items(positions, first, pool.group.num_kv_heads, span_size)
    piece_items = pair_items[piece_rows * pool.group.num_kv_heads]
    cost = np.concatenate(([0], np.cumsum(item_stop - item_start + ITEM_COST_TOKENS, dtype=np.int64)))
    piece_bytes = np.diff(cost[piece_items]) * 2 * pool.token_bytes
    # All threads or one: OpenMP runtimes end idle threads when a smaller team is asked for, and start them anew.
    threads = np.where(piece_bytes >= 2 * MIN_THREAD_BYTES, num_threads, 1)
    return GroupWork(
        blocks=blocks,
        table_base=table_base,
        token_bytes=newest * pool.block_bytes + positions % pool.block_size * pool.token_bytes,
        item_pair=item_pair,
        item_start=item_start,
        item_stop=item_stop,
        pair_items=pair_items,
        shares=_share_items(cost, piece_items, threads, num_threads),
        piece_threads=threads,
    )


def _join_tables(
    pool: BlockPool, seq_ids: Sequence[int], positions: np.ndarray, first: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The rows' block tables in one array, and where each row's block 0 would be in it."""
    tables = [pool.tables[seq_id] for seq_id in seq_ids]
    firsts = np.fromiter((table.first for table in tables), np.int64, len(tables))
    sizes = np.fromiter((len(table.ids) for table in tables), np.int64, len(tables))
    bad = (first // pool.block_size < firsts) | (positions // pool.block_size >= firsts + sizes)
    if bad.any():
        row = int(np.argmax(bad))
        raise AssertionError(
            f"sequence {seq_ids[row]} reads tokens {first[row]} to {positions[row]} but holds tokens "
            f"{firsts[row] * pool.block_size} to {(firsts[row] + sizes[row]) * pool.block_size - 1}"
        )
    blocks = np.concatenate([table.ids for table in tables]) if tables else np.empty(0, np.int32)
    return blocks, np.cumsum(sizes) - sizes - firsts


def _cut_items(
    positions: np.ndarray, first: np.ndarray, num_kv_heads: int, span_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut the older tokens [first, position) of each row and KV head at multiples of `span_size`.

    Returns
    -------
    item_pair, item_start, item_stop, pair_items
        As in `GroupWork`.
    """
    first_span = first // span_size
    num_spans = np.where(positions > first, (positions - 1) // span_size - first_span + 1, 0)
    pair_counts = np.repeat(num_spans, num_kv_heads)
    pair_items = np.concatenate(([0], np.cumsum(pair_counts, dtype=np.int64)))
    item_pair = np.repeat(np.arange(len(pair_counts), dtype=np.int32), pair_counts)
    item_row = item_pair // num_kv_heads
    span = np.arange(len(item_pair)) - pair_items[item_pair] + first_span[item_row]
    item_start = np.maximum(span * span_size, first[item_row]).astype(np.int32)
    item_stop = np.minimum((span + 1) * span_size, positions[item_row]).astype(np.int32)
    return item_pair, item_start, item_stop, pair_items


def _share_items(cost: np.ndarray, piece_items: np.ndarray, threads: np.ndarray, num_threads: int) -> np.ndarray:
    """Contiguous shares of each piece's items, of about equal cost: [num_pieces, num_threads + 1] int64.

    cost is [num_items + 1], cumulated. A piece of fewer threads leaves the shares of the others empty.
    """
    low, high = cost[piece_items[:-1], None], cost[piece_items[1:], None]
    part = np.minimum(np.arange(num_threads + 1), threads[:, None])
    shares = np.searchsorted(cost, low + (high - low) * part // threads[:, None])
    return np.ascontiguousarray(shares, np.int64)
