"""The attention work of one step of one slot, as arrays: what is to be read, in which order, by which thread.

It is made once a step with NumPy and used for all layers; the loops over it are in ``cython/_kernels.pyx``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fastdecode_hpc.schedule.kv_layout import recent_border

if TYPE_CHECKING:
    from fastdecode_hpc._kernels import GroupPlan
    from fastdecode_hpc.r_part.kv_cache import BlockPool, KVPartition

ITEM_COST_TOKENS = 8  # what an item costs beyond its tokens, as tokens
PAIR_COST_TOKENS = 16  # what finishing a row and KV head costs
MIN_THREAD_BYTES = 64 << 10  # less KV than twice this is read by one thread; starting more costs more
CHUNKS_PER_THREAD = 16  # so that no thread is idle for long while another works on the last chunk
CHUNK = ("first_pair", "stop_pair", "first_item", "stop_item", "slot")  # columns of `GroupWork.chunks`


@dataclass(slots=True)
class GroupWork:
    """The work of one step in one layer group.

    Notes
    -----
    An item is a run of older tokens of one (row, KV head) in one cache and within one span; spans are cut at
    multiples of the span size, so they depend on the position alone. The newest token is no item: it is merged
    last, when the row is finished. Items are ordered by pair (row * num_kv_heads + KV head), then by token.

    A chunk is what one thread does without a break: pairs [first_pair, stop_pair) with all their items, or, where
    first_pair == stop_pair, the items [first_item, stop_item) of one long pair, whose partial results go to
    `slot` and later; a split (pair, slot) finishes such a pair.
    """

    blocks: np.ndarray  # [all blocks] int32, the rows' block tables one after the other
    table_base: np.ndarray  # [num_rows] int64; token t of row r: blocks[table_base[r] + t // block_size]
    recent_blocks: np.ndarray  # the same of the unquantised copy of recent tokens; empty where there is none
    recent_base: np.ndarray
    places: np.ndarray  # [num_rows] int64 of the newest token: block * block_size + place in the block
    recent_places: np.ndarray  # the same in the copy
    item_pair: np.ndarray  # [num_items] int32
    item_start: np.ndarray  # [num_items] int32, first token
    item_stop: np.ndarray  # [num_items] int32, one past the last token
    item_cache: np.ndarray  # [num_items] int32, 1: the copy of recent tokens
    pair_items: np.ndarray  # [num_pairs + 1] int64, pair |-> its first item
    chunks: np.ndarray  # [num_chunks, 5] int64, see `CHUNK`
    splits: np.ndarray  # [num_splits, 2] int64
    piece_chunks: np.ndarray  # [num_pieces + 1] int64, piece |-> its first chunk
    piece_splits: np.ndarray  # [num_pieces + 1] int64
    piece_threads: np.ndarray  # [num_pieces] int64, threads that are worth starting
    num_slots: int  # most partial results of split pairs in one piece
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
        A piece is a run of whole rows with at most this much KV for each thread in one layer (or one row), so
        that the caller can do something else in between.

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
        piece_bytes: int = 32 << 20,
    ) -> None:
        if len(positions) != len(seq_ids):
            raise ValueError(f"{len(positions)} positions for {len(seq_ids)} sequences")
        self.num_rows = len(seq_ids)
        self.positions = np.ascontiguousarray(positions, np.int32)
        firsts = [_first_visible(self.positions, pool.group.window) for pool, _ in partition.pairs]
        row_bytes = np.max(
            [_row_bytes(pool, self.positions, first) for (pool, _), first in zip(partition.pairs, firsts, strict=True)],
            axis=0,
        )
        self.piece_rows = _cut_pieces(row_bytes, piece_bytes * num_threads)
        self.groups = tuple(
            _group_work(pool, recent, seq_ids, self.positions, first, self.piece_rows, num_threads, span_size)
            for (pool, recent), first in zip(partition.pairs, firsts, strict=True)
        )

    @property
    def num_pieces(self) -> int:
        return len(self.piece_rows) - 1


def _first_visible(positions: np.ndarray, window: int | None) -> np.ndarray:
    """Oldest token that each row sees: [num_rows] int32."""
    return np.zeros_like(positions) if window is None else np.maximum(positions + 1 - window, 0)


def _row_bytes(pool: BlockPool, positions: np.ndarray, first: np.ndarray) -> np.ndarray:
    """KV bytes that each row reads in one layer: [num_rows] int64."""
    return np.asarray(
        (positions.astype(np.int64) - first + 1) * (pool.group.num_kv_heads * pool.group.head_token_bytes)
    )


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
    recent: BlockPool | None,
    seq_ids: Sequence[int],
    positions: np.ndarray,
    first: np.ndarray,
    piece_rows: np.ndarray,
    num_threads: int,
    span_size: int,
) -> GroupWork:
    num_kv_heads = pool.group.num_kv_heads
    blocks, table_base = _join_tables(pool, seq_ids, positions, first)
    recent_blocks, recent_base = np.empty(0, np.int32), np.empty(0, np.int64)
    recent_places = recent_base
    if recent is None:
        item_pair, item_start, item_stop = _cut_items(first, positions, num_kv_heads, span_size)
        item_cache = np.zeros(len(item_pair), np.int32)
    else:
        border = np.maximum(first, recent_border(positions))
        recent_blocks, recent_base = _join_tables(recent, seq_ids, positions, border)
        recent_places = _places(recent, recent_blocks, recent_base, positions)
        old = _cut_items(first, border, num_kv_heads, span_size)
        new = _cut_items(border, positions, num_kv_heads, span_size)
        order = np.argsort(np.concatenate((old[0], new[0])), kind="stable")
        item_pair, item_start, item_stop = (np.concatenate(both)[order] for both in zip(old, new, strict=True))
        item_cache = np.repeat(np.array([0, 1], np.int32), (len(old[0]), len(new[0])))[order]
    num_pairs = len(positions) * num_kv_heads
    pair_items = np.searchsorted(item_pair, np.arange(num_pairs + 1)).astype(np.int64)
    item_cost = np.concatenate(([0], np.cumsum(item_stop - item_start + ITEM_COST_TOKENS, dtype=np.int64)))
    pair_cost = item_cost[pair_items] + PAIR_COST_TOKENS * np.arange(num_pairs + 1)
    piece_pairs = piece_rows * num_kv_heads
    piece_bytes = np.diff(pair_cost[piece_pairs]) * pool.group.head_token_bytes
    # All threads or one: OpenMP runtimes end idle threads when a smaller team is asked for, and start them anew.
    threads = np.where(piece_bytes >= 2 * MIN_THREAD_BYTES, num_threads, 1).astype(np.int64)
    cuts = [
        _cut_chunks(pair_cost, pair_items, int(low), int(high), int(count))
        for low, high, count in zip(piece_pairs[:-1], piece_pairs[1:], threads, strict=True)
    ]
    chunks, splits = [chunks for chunks, _, _ in cuts], [splits for _, splits, _ in cuts]
    return GroupWork(
        blocks=blocks,
        table_base=table_base,
        recent_blocks=recent_blocks,
        recent_base=recent_base,
        places=_places(pool, blocks, table_base, positions),
        recent_places=recent_places,
        item_pair=item_pair,
        item_start=item_start,
        item_stop=item_stop,
        item_cache=item_cache,
        pair_items=pair_items,
        chunks=np.concatenate([np.empty((0, len(CHUNK)), np.int64), *chunks]),
        splits=np.concatenate([np.empty((0, 2), np.int64), *splits]),
        piece_chunks=_offsets(chunks),
        piece_splits=_offsets(splits),
        piece_threads=threads,
        num_slots=max((num_slots for _, _, num_slots in cuts), default=0),
    )


def _offsets(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Where each part begins in their concatenation, and where it ends: [num_parts + 1] int64."""
    return np.concatenate(([0], np.cumsum([len(part) for part in parts], dtype=np.int64)))


def _places(pool: BlockPool, blocks: np.ndarray, base: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Where the rows' newest tokens go, as `CacheView.store` takes it: [num_rows] int64."""
    newest = blocks[base + positions // pool.block_size].astype(np.int64)
    return np.asarray(newest * pool.block_size + positions % pool.block_size)


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
    first: np.ndarray, stop: np.ndarray, num_kv_heads: int, span_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut the tokens [first, stop) of each row and KV head at multiples of `span_size`.

    Returns
    -------
    item_pair, item_start, item_stop
        As in `GroupWork`.
    """
    first_span = first // span_size
    num_spans = np.where(stop > first, (stop - 1) // span_size - first_span + 1, 0)
    pair_counts = np.repeat(num_spans, num_kv_heads)
    pair_first = np.cumsum(pair_counts) - pair_counts
    item_pair = np.repeat(np.arange(len(pair_counts), dtype=np.int32), pair_counts)
    item_row = item_pair // num_kv_heads
    span = np.arange(len(item_pair)) - pair_first[item_pair] + first_span[item_row]
    item_start = np.maximum(span * span_size, first[item_row]).astype(np.int32)
    item_stop = np.minimum((span + 1) * span_size, stop[item_row]).astype(np.int32)
    return item_pair, item_start, item_stop


def _cut_chunks(
    pair_cost: np.ndarray, pair_items: np.ndarray, low: int, high: int, num_threads: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Chunks of about equal cost of the pairs [low, high), and the pairs that were split.

    Parameters
    ----------
    pair_cost : np.ndarray
        [num_pairs + 1] cumulated.

    Returns
    -------
    chunks : np.ndarray
        [num_chunks, 5] int64, see `CHUNK`.
    splits : np.ndarray
        [num_splits, 2] int64 (pair, slot).
    num_slots : int
        How many slots they need.
    """
    wanted = num_threads * CHUNKS_PER_THREAD if num_threads > 1 else 1
    cost = pair_cost[low : high + 1]
    target = max(1, (int(cost[-1]) - int(cost[0])) // wanted)
    is_long = (np.diff(cost) > 2 * target) & (wanted > 1)
    index = (cost[:-1] - cost[0]) // target
    is_start = np.concatenate(([True], (np.diff(index) != 0) | is_long[1:] | is_long[:-1]))
    starts = low + np.flatnonzero(is_start)
    stops = np.append(starts[1:], high)
    whole = np.stack([starts, stops, pair_items[starts], pair_items[stops], np.zeros_like(starts)], axis=1)
    keep = ~is_long[starts - low]
    chunks, splits, num_slots = [whole[keep]], [], 0
    for pair in (low + np.flatnonzero(is_long)).tolist():
        first, stop = int(pair_items[pair]), int(pair_items[pair + 1])
        parts = -(-int(pair_cost[pair + 1] - pair_cost[pair]) // target)
        cuts = np.unique(np.linspace(first, stop, parts + 1).astype(np.int64))
        same = np.full(len(cuts) - 1, pair)
        chunks.append(np.stack([same, same, cuts[:-1], cuts[1:], num_slots + cuts[:-1] - first], axis=1))
        splits.append((pair, num_slots))
        num_slots += stop - first
    # Parts of long pairs first: what is done last should be short.
    return np.concatenate(chunks[::-1]), np.array(splits, np.int64).reshape(-1, 2), num_slots
