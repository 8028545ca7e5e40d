"""A row's bits depend on its own q, K, V and position alone."""

import copy

import numpy as np
import pytest
from kernel_cases import Rows, Shape, attend, bits, fill, make_partition

from fastdecode_hpc.r_part import step_work

LENGTHS = [0, 700, 3, 1500, 64, 511, 513, 90]


CASES = [(None, "fp16"), (200, "fp16"), (None, "int8"), (200, "int4"), (None, "k=int8,v=int4"), (40, "int8")]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[1]}-window-{case[0]}")
def rows(request):
    window, cache = request.param
    return Rows.random(Shape(6, 2, 64, window, "fp16", cache), LENGTHS)


@pytest.fixture
def expected(isa, rows):
    if (isa, rows.shape) not in _alone:
        _alone[isa, rows.shape] = alone(rows)
    return _alone[isa, rows.shape]


_alone = {}


def alone(rows):
    """Each row in a partition of its own, one thread."""
    results = []
    for i in range(len(rows.lengths)):
        partition = make_partition(rows.shape, rows.lengths, num_threads=1)
        fill(partition, rows, ids=[i])
        results.append(attend(partition, rows, order=[i], num_threads=1))
    return np.concatenate([out for out, _ in results]), np.concatenate([lse for _, lse in results])


def assert_same(got, expected, order=slice(None)):
    assert np.array_equal(bits(got[0]), bits(expected[0][order]))
    assert np.array_equal(bits(got[1]), bits(expected[1][order]))


@pytest.mark.parametrize("num_threads", [1, 2, 4])
@pytest.mark.parametrize("piece_bytes", [1, 300_000, 64 << 20])
def test_threads_and_pieces(rows, expected, num_threads, piece_bytes, monkeypatch):
    monkeypatch.setattr(step_work, "MIN_THREAD_BYTES", 1)
    partition = make_partition(rows.shape, rows.lengths)
    fill(partition, rows)
    assert_same(attend(partition, rows, num_threads=num_threads, piece_bytes=piece_bytes), expected)


@pytest.mark.parametrize("order", [[7, 6, 5, 4, 3, 2, 1, 0], [3], [1, 4], [5, 0, 2, 7]])
def test_neighbours_and_order(rows, expected, order):
    partition = make_partition(rows.shape, rows.lengths)
    fill(partition, rows)
    assert_same(attend(partition, rows, order=order), expected, order)


def test_block_placement_and_history(rows, expected):
    partition = make_partition(rows.shape, rows.lengths, spare_blocks=300)
    for seq_id, length in enumerate([40, 900, 16, 300, 5]):
        partition.add(100 + seq_id)
        partition.reserve(100 + seq_id, length)
    for seq_id in (103, 100, 104):
        partition.remove(seq_id)
    fill(partition, rows, ids=[6, 2, 0, 7, 1, 3, 5, 4])
    partition.check_integrity()
    assert_same(attend(partition, rows), expected)


@pytest.mark.parametrize("cache", ["fp32", "int8", "int4", "k=int4,v=bf16"])
@pytest.mark.parametrize("window", [None, 50])
def test_grown_by_appends_equals_prefill(isa, window, cache):
    # The last tokens come one by one, with blocks, windows and the copy of recent tokens moving on.
    length, start = 230, 90
    rows = Rows.random(Shape(3, 1, 32, window, cache=cache), [length])
    expected = alone(rows)
    prefix = Rows(rows.shape, [start], [rows.prompts[0][:start]])
    partition = make_partition(rows.shape, rows.lengths)
    fill(partition, prefix)
    q, newest = rows.qkv[:, : rows.shape.q_size], rows.qkv[:, rows.shape.q_size :]
    kv = np.concatenate([rows.prompts[0], newest])
    for position in range(start, length + 1):
        partition.reserve(0, position + 1)
        partition.drop_unreachable(0, position)
        step = Rows(rows.shape, [position], [], np.concatenate([q, kv[position : position + 1]], axis=1))
        got = attend(partition, step)
    assert_same(got, expected)


def test_nan_stays_in_its_row(isa, rows, expected):
    rows = copy.deepcopy(rows)
    rows.qkv[1, 0] = np.nan  # q of one head
    rows.prompts[3][1490, 0] = np.nan  # one K, read as it came
    rows.prompts[5][440, rows.shape.kv_size] = np.inf  # one V, quantised where the cache is
    partition = make_partition(rows.shape, rows.lengths)
    fill(partition, rows)
    got = attend(partition, rows, num_threads=3)
    clean = [i for i in range(len(LENGTHS)) if i not in (1, 3, 5)]
    assert_same([x[clean] for x in got], expected, clean)
    assert np.isnan(got[0][1, :64]).all()  # the head of that q
    assert np.isfinite(got[0][1, 64:].astype(np.float32)).all()
    assert np.isnan(got[0][3, : 3 * 64]).all()  # the heads of that KV head
    assert np.isfinite(got[0][3, 3 * 64 :].astype(np.float32)).all()
    if rows.shape.window != 40:  # else not seen
        assert not np.isfinite(got[0][5, : 3 * 64].reshape(3, 64)[:, 0]).any()
    assert np.isfinite(got[0][5, 3 * 64 :].astype(np.float32)).all()


def test_no_rows(isa, rows):
    partition = make_partition(rows.shape, rows.lengths)
    work = step_work.StepWork(partition, [], np.empty(0, np.int64), num_threads=2)
    assert work.num_pieces == 0
