"""The work list: everything is read exactly once, by exactly one thread, in exactly one piece."""

import heapq
import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Shape, make_partition

from fastdecode_hpc.r_part import step_work
from fastdecode_hpc.r_part.step_work import StepWork


def make_work(shape, positions, **options):
    partition = make_partition(shape, positions)
    group = shape.layout().groups[0]
    for i, position in enumerate(positions):
        partition.add(i, group.first_needed(position))
        partition.reserve(i, position + 1)
    return partition, StepWork(partition, range(len(positions)), np.array(positions, np.int64), **options)


@given(
    positions=st.lists(st.integers(0, 300), max_size=6),
    window=st.sampled_from([None, 1, 5, 64, 100]),
    cache=st.sampled_from(["fp32", "int8", "k=int4,v=fp16"]),
    num_kv_heads=st.integers(1, 3),
    num_threads=st.integers(1, 5),
    span_size=st.sampled_from([8, 32, 50]),
    piece_bytes=st.sampled_from([1, 3000, 10_000, 1 << 20]),
)
@settings(max_examples=120, deadline=None)
def test_work_is_a_partition(positions, window, cache, num_kv_heads, num_threads, span_size, piece_bytes):
    shape = Shape(num_kv_heads, num_kv_heads, 8, window, cache=cache, block_size=8)
    options = {"num_threads": num_threads, "span_size": span_size, "piece_bytes": piece_bytes}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_work, "MIN_THREAD_BYTES", 1)
        _, work = make_work(shape, positions, **options)
    group = work.groups[0]
    check_tokens(group, shape, positions, num_kv_heads, span_size)
    check_pieces(work, shape, positions, num_threads, piece_bytes)
    for piece in range(work.num_pieces):
        check_chunks(work, piece, num_kv_heads)


def check_tokens(group, shape, positions, num_kv_heads, span_size):
    """Each (row, KV head, visible older token) once, in order; no item crosses a multiple of the span size."""
    layer_group = shape.layout().groups[0]
    assert sorted(group.item_pair.tolist()) == group.item_pair.tolist()
    assert np.array_equal(np.searchsorted(group.item_pair, np.arange(len(group.pair_items))), group.pair_items)
    for pair, (first, stop) in enumerate(itertools.pairwise(group.pair_items.tolist())):
        position = positions[pair // num_kv_heads]
        seen, is_recent = [], []
        for start, end, cache in zip(*(x[first:stop].tolist() for x in items_of(group)), strict=True):
            assert start < end
            assert start // span_size == (end - 1) // span_size
            seen += range(start, end)
            is_recent += [cache] * (end - start)
        assert seen == list(range(layer_group.first_needed(position), position))
        check_recent(seen, is_recent, position, layer_group.is_quantised)


def items_of(group):
    return group.item_start, group.item_stop, group.item_cache


def check_recent(seen, is_recent, position, is_quantised):
    """The newest 32 older tokens or more are read as they came; the border is a whole tile's."""
    assert sorted(is_recent) == is_recent
    borders = [token for token, before, now in zip(seen[1:], is_recent, is_recent[1:], strict=False) if before != now]
    if not is_quantised:
        assert sum(is_recent) == 0
        return
    assert sum(is_recent) >= min(len(seen), 32)
    assert all(border % 32 == 0 and position - border < 64 for border in borders)


def check_pieces(work, shape, positions, num_threads, piece_bytes):
    """Pieces are runs of rows, all threads or one work on each, and one of many rows is not too large."""
    group, layer_group = work.groups[0], shape.layout().groups[0]
    assert work.piece_rows[0] == group.piece_chunks[0] == group.piece_splits[0] == 0
    assert work.piece_rows[-1] == len(positions)
    assert group.piece_chunks[-1] == len(group.chunks)
    assert group.piece_splits[-1] == len(group.splits)
    assert (np.diff(work.piece_rows) > 0).all()
    assert set(group.piece_threads.tolist()) <= {1, num_threads}
    token_bytes = shape.num_kv_heads * layer_group.head_token_bytes
    for first, stop in itertools.pairwise(work.piece_rows.tolist()):
        tokens = sum(position + 1 - layer_group.first_needed(position) for position in positions[first:stop])
        assert stop - first == 1 or tokens * token_bytes <= piece_bytes * num_threads


def piece_work(work, piece):
    """Chunks and splits of one piece."""
    group = work.groups[0]
    chunks = group.chunks[group.piece_chunks[piece] : group.piece_chunks[piece + 1]]
    return chunks, group.splits[group.piece_splits[piece] : group.piece_splits[piece + 1]]


def check_chunks(work, piece, num_kv_heads):
    """Each item of the piece is in one chunk; a pair is finished by its chunk, or split and finished once."""
    group = work.groups[0]
    chunks, splits = piece_work(work, piece)
    first_pair, stop_pair = (work.piece_rows[piece : piece + 2] * num_kv_heads).tolist()
    items, whole, slot_of = Counter(), Counter(), {}
    for first, stop, first_item, stop_item, slot in chunks.tolist():
        items.update(range(first_item, stop_item))
        whole.update(range(first, stop))
        if first == stop:
            assert first_item < stop_item
            slot_of.update(zip(range(first_item, stop_item), range(slot, slot + stop_item - first_item), strict=True))
            assert first <= group.item_pair[first_item] == group.item_pair[stop_item - 1]
        else:
            assert [first_item, stop_item] == group.pair_items[[first, stop]].tolist()
    assert items == Counter(range(*group.pair_items[[first_pair, stop_pair]].tolist()))
    assert whole + Counter(splits[:, 0].tolist()) == Counter(range(first_pair, stop_pair))
    # Partial results of a split pair lie one after the other, apart from those of other pairs.
    assert len(set(slot_of.values())) == len(slot_of)
    assert all(0 <= slot < group.num_slots for slot in slot_of.values())
    for pair, slot in splits.tolist():
        of_pair = range(*group.pair_items[pair : pair + 2].tolist())
        assert [slot_of.pop(item) for item in of_pair] == list(range(slot, slot + len(of_pair)))
    assert not slot_of


def chunk_costs(work, piece):
    """Cost of each chunk of a piece, in tokens."""
    group = work.groups[0]
    cost = np.concatenate(([0], np.cumsum(group.item_stop - group.item_start + step_work.ITEM_COST_TOKENS)))
    first_pair, stop_pair, first_item, stop_item, _ = piece_work(work, piece)[0].T
    return cost[stop_item] - cost[first_item] + step_work.PAIR_COST_TOKENS * (stop_pair - first_pair)


RAGGED = {
    "equal": [1000] * 64,
    "one long row": [30_000] + [50] * 200,
    "one long row last": [50] * 200 + [30_000],
    "alone": [30_000],
    "few": [3000, 10, 800, 2000, 1500],
    "many short": [7] * 3000,
    "long ones": [20_000] * 3 + [9000, 100],
}


@pytest.mark.parametrize("positions", RAGGED.values(), ids=RAGGED)
@pytest.mark.parametrize("num_threads", [2, 4, 16, 64])
@pytest.mark.parametrize("cache", ["fp16", "int8"])
def test_no_thread_has_much_more_than_its_share(positions, num_threads, cache, monkeypatch):
    monkeypatch.setattr(step_work, "MIN_THREAD_BYTES", 1)
    shape = Shape(2, 2, 64, cache=cache, block_size=32)
    _, work = make_work(shape, positions, num_threads=num_threads, piece_bytes=1 << 40)
    assert work.groups[0].piece_threads.tolist() == [num_threads]
    cost = chunk_costs(work, 0)
    fair_share, span = cost.sum() / num_threads, 512 + step_work.ITEM_COST_TOKENS
    # A chunk is small beside a thread's share, unless it is as small as an item or a pair can be.
    assert cost.max() <= max(3 * fair_share / step_work.CHUNKS_PER_THREAD, 2 * span)
    # Whoever is free takes the next chunk.
    busy_until = [0] * num_threads
    for one in cost.tolist():
        heapq.heapreplace(busy_until, busy_until[0] + one)
    assert max(busy_until) <= fair_share + cost.max()


def test_little_work_stays_on_one_thread():
    _, work = make_work(Shape(3, 1, 8), [5, 9], num_threads=4)
    assert work.groups[0].piece_threads.tolist() == [1]


def test_missing_blocks_are_named():
    partition, _ = make_work(Shape(block_size=8), [10, 20], num_threads=1)
    with pytest.raises(AssertionError, match="sequence 1 reads tokens 0 to 24 but holds tokens 0 to 23"):
        StepWork(partition, [0, 1], np.array([10, 24]), num_threads=1)
    with pytest.raises(ValueError, match="1 positions for 2 sequences"):
        StepWork(partition, [0, 1], np.array([10]), num_threads=1)
