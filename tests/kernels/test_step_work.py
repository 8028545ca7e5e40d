"""The work list: everything is read exactly once, by exactly one thread, in exactly one piece."""

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
    positions=st.lists(st.integers(0, 200), max_size=6),
    window=st.sampled_from([None, 1, 5, 64, 100]),
    num_kv_heads=st.integers(1, 3),
    num_threads=st.integers(1, 5),
    span_size=st.sampled_from([8, 32, 50]),
    piece_bytes=st.sampled_from([1, 3000, 10_000, 1 << 20]),
)
@settings(max_examples=150, deadline=None)
def test_work_is_a_partition(positions, window, num_kv_heads, num_threads, span_size, piece_bytes):
    shape = Shape(num_kv_heads, num_kv_heads, 8, window, block_size=8)
    options = {"num_threads": num_threads, "span_size": span_size, "piece_bytes": piece_bytes}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_work, "MIN_THREAD_BYTES", 1)
        _, work = make_work(shape, positions, **options)
    group = work.groups[0]
    check_tokens(group, shape, positions, num_kv_heads, span_size)
    check_pieces(work, shape, positions, num_kv_heads, num_threads, piece_bytes)


def check_tokens(group, shape, positions, num_kv_heads, span_size):
    """Each (row, KV head, visible older token) once; no item crosses a multiple of the span size."""
    seen = Counter()
    for pair, start, stop in zip(group.item_pair, group.item_start, group.item_stop, strict=True):
        assert start < stop
        assert start // span_size == (stop - 1) // span_size
        seen.update((*divmod(int(pair), num_kv_heads), token) for token in range(start, stop))
    layer_group = shape.layout().groups[0]
    assert seen == Counter(
        (row, head, token)
        for row, position in enumerate(positions)
        for head in range(num_kv_heads)
        for token in range(layer_group.first_needed(position), position)
    )
    assert np.array_equal(np.searchsorted(group.item_pair, np.arange(len(group.pair_items))), group.pair_items)


def check_pieces(work, shape, positions, num_kv_heads, num_threads, piece_bytes):
    """Pieces cover the rows, shares the items of their piece; a piece of many rows is not too large."""
    group = work.groups[0]
    assert work.piece_rows[0] == 0
    assert work.piece_rows[-1] == len(positions)
    assert (np.diff(work.piece_rows) > 0).all()
    assert group.shares.shape == (work.num_pieces, num_threads + 1)
    piece_items = group.pair_items[work.piece_rows * num_kv_heads]
    layer_group = shape.layout().groups[0]
    for piece in range(work.num_pieces):
        shares, threads = group.shares[piece], group.piece_threads[piece]
        assert (np.diff(shares) >= 0).all()
        assert shares[0] == piece_items[piece]
        assert shares[threads] == shares[-1] == piece_items[piece + 1]
        rows = range(work.piece_rows[piece], work.piece_rows[piece + 1])
        tokens = sum(positions[row] + 1 - layer_group.first_needed(positions[row]) for row in rows)
        assert len(rows) == 1 or tokens * 2 * shape.kv_size * 4 <= piece_bytes


def test_shares_are_balanced():
    _, work = make_work(Shape(8, 8, 64, block_size=32), [3000, 10, 800, 2000, 1500], num_threads=4, piece_bytes=1 << 40)
    group = work.groups[0]
    tokens = np.concatenate(([0], np.cumsum(group.item_stop - group.item_start)))
    per_thread = np.diff(tokens[group.shares[0]])
    assert group.piece_threads.tolist() == [4]
    assert per_thread.max() - per_thread.min() <= 2 * 512


def test_little_work_stays_on_one_thread():
    _, work = make_work(Shape(3, 1, 8), [5, 9], num_threads=4)
    assert work.groups[0].piece_threads.tolist() == [1]


def test_missing_blocks_are_named():
    partition, _ = make_work(Shape(block_size=8), [10, 20], num_threads=1)
    with pytest.raises(AssertionError, match="sequence 1 reads tokens 0 to 24 but holds tokens 0 to 23"):
        StepWork(partition, [0, 1], np.array([10, 24]), num_threads=1)
    with pytest.raises(ValueError, match="1 positions for 2 sequences"):
        StepWork(partition, [0, 1], np.array([10]), num_threads=1)
