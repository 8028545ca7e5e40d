"""Blocks, tables and memory of a KV partition, and the bits that are stored in it."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Rows, Shape, attend, bits, from_float, make_partition, recast

from fastdecode_hpc.config import DTYPE_BYTES
from fastdecode_hpc.r_part.attention import convert_rows, numpy_dtype
from fastdecode_hpc.r_part.kv_cache import KVPartition
from fastdecode_hpc.schedule.placement import KVLayout, LayerGroup

DTYPES = ["fp32", "fp16", "bf16"]

# Ties, subnormals, the edges of fp16 and bf16, infinities; NaN is looked at apart, its bits are not promised.
EDGES = np.array(
    [
        *[0.0, -0.0, 1 + 2**-11, 1 + 3 * 2**-11, 2**-14, 2**-24, 2**-25, 1.0001 * 2**-25, 3 * 2**-25, 6e-8],
        *[65504, 65519.99, 65520, 1e6, -1e6, 3.3895e38, 3.4e38, -3.4e38, np.inf, -np.inf],
        *[1 + 2**-8, 1 + 3 * 2**-8, 2**-133, 1e-45],
    ],
    np.float32,
)


def stored(partition, layer, seq_id, tokens):
    """[num_tokens, 2, num_kv_heads, head_dim] as they lie in the cache."""
    group, index = partition.layer_places[layer]
    pool = partition.pools[group]
    shape = (-1, len(pool.group.layers), 2, pool.group.num_kv_heads, pool.block_size, pool.group.head_dim)
    blocks = pool.arena.view(numpy_dtype(pool.group.kv_dtype)).reshape(shape)
    table = pool.tables[seq_id]
    return np.stack(
        [blocks[table.ids[t // pool.block_size - table.first], index, :, :, t % pool.block_size] for t in tokens]
    )


def awkward_values(count, wire):
    rng = np.random.default_rng(3)
    values = rng.standard_normal(count, np.float32) * np.exp2(rng.integers(-30, 30, count)).astype(np.float32)
    values[: len(EDGES)] = EDGES
    return from_float(values, wire)


@pytest.mark.parametrize("cache", DTYPES)
@pytest.mark.parametrize("wire", DTYPES)
def test_stored_bits_equal_numpy(isa, wire, cache):
    shape = Shape(4, 2, 24, None, wire, cache, block_size=8)
    values = awkward_values(21 * 2 * shape.kv_size, wire).reshape(21, -1)
    partition = make_partition(shape, [20])
    partition.add(0)
    partition.reserve(0, 21)
    partition.write_prefill(1, 0, 0, values[:7], wire)
    partition.write_prefill(1, 0, 7, values[7:20], wire)
    rows = Rows(shape, [20], [], np.concatenate([np.zeros((1, shape.q_size), values.dtype), values[20:]], axis=1))
    attend(partition, rows)
    expected = recast(values, wire, cache).reshape(21, 2, 2, 24)
    assert np.array_equal(bits(stored(partition, 1, 0, range(21))), bits(expected))


def test_neighbouring_layers_are_untouched(isa):
    shape = Shape(2, 2, 16, num_layers=3)
    partition = make_partition(shape, [10])
    partition.add(0)
    partition.reserve(0, 10)
    before = [stored(partition, layer, 0, range(16)) for layer in (0, 2)]
    partition.write_prefill(1, 0, 0, np.ones((10, 64), np.float32), "fp32")
    assert all(
        np.array_equal(bits(a), bits(stored(partition, layer, 0, range(16))))
        for a, layer in zip(before, (0, 2), strict=True)
    )
    assert (stored(partition, 1, 0, range(10)) == 1).all()


def test_every_half_and_bfloat16_converts_as_in_numpy(isa):
    every = np.arange(65536, dtype=np.uint16).reshape(-1, 64)
    for dtype, wide in (("fp16", every.view(np.float16).astype(np.float32)), ("bf16", recast(every, "bf16", "fp32"))):
        got = convert_rows(every.view(numpy_dtype(dtype)), dtype, "fp32")
        numbers = ~np.isnan(wide)
        assert np.array_equal(got[numbers].view(np.uint32), wide[numbers].view(np.uint32))
        assert np.isnan(got[~numbers]).all()
        assert np.isnan(recast(convert_rows(got, "fp32", dtype), dtype, "fp32")[~numbers]).all()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=8))
@settings(max_examples=200, deadline=None)
def test_random_bits_convert_as_in_numpy(patterns):
    values = np.array(patterns, np.uint32).view(np.float32).reshape(1, 8)
    numbers = ~np.isnan(values)
    for dtype in ("fp16", "bf16"):
        got, expected = convert_rows(values, "fp32", dtype), from_float(values, dtype)
        assert np.array_equal(got[numbers].view(np.uint16), expected[numbers].view(np.uint16))


def test_windowed_groups_keep_what_is_seen():
    groups = (LayerGroup((0, 2), 1, 8, "fp16", None), LayerGroup((1,), 2, 16, "fp32", 20))
    partition = KVPartition(KVLayout(8, groups), (10, 10), num_threads=1)
    partition.add(0, start=19)
    partition.reserve(0, 40)
    assert partition.free_blocks() == (5, 7)  # all of 40 tokens; tokens 16 to 39
    partition.write_prefill(0, 0, 0, np.ones((39, 16), np.float16), "fp16")
    partition.write_prefill(1, 0, 0, np.arange(39 * 64, dtype=np.float32).reshape(39, 64), "fp32")
    assert stored(partition, 1, 0, [16, 38])[:, 0, 0, 0].tolist() == [16 * 64, 38 * 64]
    partition.drop_unreachable(0, 43)  # sees 24 to 43
    partition.check_integrity()
    assert partition.free_blocks() == (5, 8)
    partition.remove(0)
    assert partition.free_blocks() == (10, 10)


def test_running_out_says_the_numbers():
    partition = make_partition(Shape(block_size=8), [], spare_blocks=3)
    partition.add(5)
    with pytest.raises(AssertionError, match=r"sequence 5 needs 4 more blocks of .* bytes; 3 of 3 are free"):
        partition.reserve(5, 25)
    with pytest.raises(AssertionError, match="sequence 5 is already"):
        partition.add(5)
    with pytest.raises(AssertionError, match="tokens 0 to 0 of sequence 5"):
        partition.write_prefill(0, 5, 0, np.zeros((1, 128), np.float32), "fp32")


def test_lowest_block_comes_first():
    partition = make_partition(Shape(block_size=8), [], spare_blocks=9)
    for seq_id in range(3):
        partition.add(seq_id)
        partition.reserve(seq_id, 16)
    partition.remove(1)
    partition.remove(0)
    partition.add(9)
    partition.reserve(9, 40)
    assert partition.pools[0].tables[9].ids.tolist() == [0, 1, 2, 3, 6]


OPERATION = st.tuples(st.sampled_from(["add", "grow", "remove"]), st.integers(0, 5), st.integers(1, 40))


@given(st.lists(OPERATION, max_size=60), st.sampled_from([1, 7, 8, 30]))
@settings(max_examples=60, deadline=None)
def test_blocks_are_never_lost_nor_shared(operations, window):
    groups = (LayerGroup((0,), 1, 8, "fp16", None), LayerGroup((1,), 1, 8, "fp16", window))
    layout = KVLayout(8, groups)
    partition = KVPartition(layout, (60, 60), num_threads=1)
    lengths: dict[int, int] = {}
    for name, seq_id, amount in operations:
        if name == "add" and seq_id not in lengths:
            partition.add(seq_id, start=max(0, amount - window))
            lengths[seq_id] = amount
            partition.reserve(seq_id, amount)
        elif name == "grow" and seq_id in lengths and lengths[seq_id] + amount < 80:
            for _ in range(amount):  # as the engine does: one token, then what fell out of the window
                lengths[seq_id] += 1
                partition.reserve(seq_id, lengths[seq_id])
                partition.drop_unreachable(seq_id, lengths[seq_id] - 1)
                check_against_worst_case(partition, seq_id, lengths[seq_id])
        elif name == "remove" and seq_id in lengths:
            partition.remove(seq_id)
            del lengths[seq_id]
        partition.check_integrity()
    for seq_id in lengths:
        partition.remove(seq_id)
    partition.check_integrity()
    assert partition.free_blocks() == (60, 60)


def check_against_worst_case(partition, seq_id, num_tokens):
    """Never more blocks than placement promised."""
    held = tuple(len(pool.tables[seq_id].ids) for pool in partition.pools)
    assert all(a <= b for a, b in zip(held, partition.layout.worst_case(num_tokens), strict=True))


RSS_PROGRAM = """
import numpy as np, psutil
from fastdecode_hpc.r_part.kv_cache import KVPartition
from fastdecode_hpc.schedule.placement import KVLayout, LayerGroup

def rss():
    return psutil.Process().memory_info().rss >> 20

layout = KVLayout(32, (LayerGroup(tuple(range(16)), 8, 128, "fp16", None),))
before = rss()
partition = KVPartition(layout, (16 << 10 >> 2,), num_threads=2)  # 2 MiB a block: 8 GiB
empty = rss()
partition.add(0)
partition.reserve(0, 40 * 32)  # 80 MiB
used = rss()
for seq_id in range(1, 200):  # comes and goes in the same memory
    partition.add(seq_id)
    partition.reserve(seq_id, 8 * 32)
    partition.remove(seq_id)
print(empty - before, used - before, rss() - before)
"""


def test_memory_follows_use():
    run = subprocess.run([sys.executable, "-c", RSS_PROGRAM], capture_output=True, text=True, check=True)
    empty, used, after = map(int, run.stdout.split())
    assert empty < 16
    assert 80 <= used <= 160  # in steps of 64 MiB
    assert after <= 160


def test_layout_of_a_block():
    assert DTYPE_BYTES.keys() == set(DTYPES)
    partition = make_partition(Shape(4, 2, 32, block_size=16, num_layers=3), [])
    pool = partition.pools[0]
    assert pool.view.block_bytes == pool.block_bytes == 3 * 2 * 2 * 16 * 32 * 4
