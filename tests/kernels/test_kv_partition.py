"""Blocks, tables and memory of a KV partition, and the bits that are stored in it."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    GROUP,
    Codes,
    Rows,
    Shape,
    attend,
    bits,
    from_float,
    make_partition,
    quantise,
    recast,
    stored,
    to_float,
)

from fastdecode_hpc._kernels import CACHE_DTYPES, cache_token_bytes
from fastdecode_hpc.config import kv_token_bytes
from fastdecode_hpc.r_part.attention import convert_rows, numpy_dtype
from fastdecode_hpc.r_part.kv_cache import KVPartition
from fastdecode_hpc.schedule.kv_layout import KVLayout, LayerGroup, with_recent

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


def awkward_values(count, wire):
    rng = np.random.default_rng(3)
    values = rng.standard_normal(count, np.float32) * np.exp2(rng.integers(-30, 30, count)).astype(np.float32)
    values[: len(EDGES)] = EDGES
    return from_float(values, wire)


def layer_pools(partition, layer):
    """The pools that hold `layer` (recent tokens last), each with the layer's index in it."""
    return [(pool, pool.group.layers.index(layer)) for pool in partition.pools if layer in pool.group.layers]


def assert_same_part(got, values, wire, dtype):
    """What lies in the cache is what NumPy makes of the wire's values, bit for bit."""
    if not isinstance(got, Codes):
        assert np.array_equal(bits(got), bits(recast(values, wire, dtype)))
        return
    expected = quantise(to_float(values, wire), dtype)
    assert np.array_equal(got.scales, expected.scales, equal_nan=True)
    broken = np.isnan(expected.scales)
    assert np.array_equal(bits(got.scales[~broken]), bits(expected.scales[~broken]))
    whole = ~np.repeat(broken, GROUP if dtype == "int4" else values.shape[-1], axis=-1)[..., : values.shape[-1]]
    assert np.array_equal(got.codes[whole], expected.codes[whole])
    if got.minimums is not None:
        assert np.array_equal(bits(got.minimums[~broken]), bits(expected.minimums[~broken]))


def check_stored(partition, shape, values, layer=1, start=0):
    """The tokens of sequence 0 from `start` on; of the recent copy those that it still holds."""
    kv = values.reshape(len(values), 2, shape.num_kv_heads, shape.head_dim)
    for pool, index in layer_pools(partition, layer):
        first = max(start, pool.tables[0].first * pool.block_size)
        got = stored(pool, index, 0, range(first, len(values)))
        assert_same_part(got[0], kv[first:, 0], shape.wire, pool.group.k_dtype)
        assert_same_part(got[1], kv[first:, 1], shape.wire, pool.group.v_dtype)


def store_by_both_ways(shape, values):
    """Tokens [0, 7) and [7, n - 2) as pieces of a prompt, the last two one by one."""
    n = len(values)
    partition = make_partition(shape, [n - 1])
    partition.add(0)
    partition.reserve(0, n - 2)
    partition.write_prefill(1, 0, 0, values[:7], shape.wire)
    partition.write_prefill(1, 0, 7, values[7 : n - 2], shape.wire)
    for position in (n - 2, n - 1):
        partition.reserve(0, position + 1)
        q = np.zeros((1, shape.q_size), values.dtype)
        attend(partition, Rows(shape, [position], [], np.concatenate([q, values[position : position + 1]], axis=1)))
    return partition


@pytest.mark.parametrize("cache", [*DTYPES, "int8", "int4", "k=int4,v=bf16", "k=fp32,v=int8"])
@pytest.mark.parametrize("wire", DTYPES)
def test_stored_bits_equal_numpy(isa, wire, cache):
    shape = Shape(4, 2, 24, None, wire, cache, block_size=8)
    values = awkward_values(85 * 2 * shape.kv_size, wire).reshape(85, -1)
    partition = store_by_both_ways(shape, values)
    if len(partition.pools) == 2:  # what is kept as it came moves on with the newest token
        assert partition.pools[1].tables[0].first == (85 - 64) // 8
    check_stored(partition, shape, values)


@pytest.mark.parametrize("cache", ["int8", "int4"])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 256])
def test_quantised_tokens_of_every_kind_equal_numpy(isa, head_dim, cache):
    shape = Shape(2, 2, head_dim, cache=cache, block_size=16)
    rng = np.random.default_rng(head_dim)
    values = rng.standard_normal((40, 2 * shape.kv_size), np.float32)
    values[0:4] = np.array([0.0, -0.0, 1.0, -3.7])[:, None]  # one value in every place
    values[4] *= 1e-30  # too small for a scale
    values[5] *= 1e-20  # for int4 too small for a 16-bit scale
    values[6] = values[6] * 6e-8  # 16-bit subnormals
    values[7] *= 1e-41  # 32-bit ones
    values[8, ::2] = 65504
    values[9, 1::2] = -65504
    values[10] = values[10] * 1e5  # more than a 16-bit minimum holds
    values[11] = 1e6 + values[11]
    values[12] = -1e6 + values[12]
    values[13] *= 6e37
    values[14, 3] = 3.4e38
    values[15] = np.arange(2 * shape.kv_size) % 31 - 15.5  # ties
    values[16] = 1 + values[16] * 2**-12  # a minimum that is rounded up beyond all values
    values[17, 5], values[18, 9], values[19, -1] = np.nan, np.inf, -np.inf
    values[20], values[21], values[22] = np.nan, np.inf, -np.inf
    check_stored(store_by_both_ways(shape, values), shape, values)


@pytest.mark.parametrize("cache,size", [("int8", 64), ("int4", 32)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_no_number_spoils_its_scale_only(isa, bad, cache, size):
    shape = Shape(1, 1, 64, cache=cache, block_size=8)
    values = np.random.default_rng(1).standard_normal((9, 128), np.float32)
    values[4, 40] = bad  # K
    values[6, 64 + 3] = bad  # V
    pool, index = layer_pools(store_by_both_ways(shape, values), 1)[0]
    k, v = (part.values()[:, 0] for part in stored(pool, index, 0, range(9)))
    expected_k, expected_v = np.zeros((9, 64), bool), np.zeros((9, 64), bool)
    expected_k[4, 40 // size * size :], expected_v[6, :size] = True, True
    assert np.array_equal(np.isnan(k), expected_k)
    assert np.array_equal(np.isnan(v), expected_v)
    assert np.isfinite(k[~expected_k]).all()
    assert np.isfinite(v[~expected_v]).all()


@pytest.mark.parametrize("cache", ["fp32", "int8", "int4"])
def test_neighbouring_layers_are_untouched(isa, cache):
    shape = Shape(2, 2, 16, num_layers=3, cache=cache)
    partition = make_partition(shape, [10])
    partition.add(0)
    partition.reserve(0, 10)
    layers = [pool.arena.reshape(-1, 3, pool.block_bytes // 3) for pool in partition.pools]
    before = [memory[:, [0, 2]].copy() for memory in layers]
    partition.write_prefill(1, 0, 0, np.ones((10, 64), np.float32), "fp32")
    assert all(np.array_equal(memory[:, [0, 2]], old) for memory, old in zip(layers, before, strict=True))
    for part in stored(*layer_pools(partition, 1)[0], 0, range(10)):
        assert ((part.values() if isinstance(part, Codes) else part) == 1).all()


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
    groups = (LayerGroup((0, 2), 1, 8, "fp16", "fp16"), LayerGroup((1,), 2, 16, "fp32", "fp32", 20))
    partition = KVPartition(KVLayout(8, groups), (10, 10), num_threads=1)
    partition.add(0, start=19)
    partition.reserve(0, 40)
    assert partition.free_blocks() == (5, 7)  # all of 40 tokens; tokens 16 to 39
    partition.write_prefill(0, 0, 0, np.ones((39, 16), np.float16), "fp16")
    partition.write_prefill(1, 0, 0, np.arange(39 * 64, dtype=np.float32).reshape(39, 64), "fp32")
    assert stored(partition.pools[1], 0, 0, [16, 38])[0][:, 0, 0].tolist() == [16 * 64, 38 * 64]
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


OPERATION = st.tuples(st.sampled_from(["add", "grow", "remove"]), st.integers(0, 5), st.integers(1, 90))


@given(
    st.lists(OPERATION, max_size=60),
    st.sampled_from([None, 1, 7, 8, 30, 100]),
    st.sampled_from([("fp16", "fp16"), ("int8", "int4")]),
)
@settings(max_examples=100, deadline=None)
def test_blocks_are_never_lost_nor_shared(operations, window, dtypes):
    groups = (LayerGroup((0,), 1, 8, "fp16", "fp16"), *with_recent(LayerGroup((1,), 1, 8, *dtypes, window)))
    layout = KVLayout(8, groups)
    capacity = (150,) * len(groups)
    partition = KVPartition(layout, capacity, num_threads=1)
    lengths: dict[int, int] = {}
    for name, seq_id, amount in operations:
        if name == "add" and seq_id not in lengths:
            partition.add(seq_id, start=max(0, amount - window) if window else 0)
            lengths[seq_id] = amount
            partition.reserve(seq_id, amount)
        elif name == "grow" and seq_id in lengths and lengths[seq_id] + amount < 200:
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
    assert partition.free_blocks() == capacity


def check_against_worst_case(partition, seq_id, num_tokens):
    """Never more blocks than placement promised."""
    held = tuple(len(pool.tables[seq_id].ids) for pool in partition.pools)
    assert all(a <= b for a, b in zip(held, partition.layout.worst_case(num_tokens), strict=True))


RSS_PROGRAM = """
import numpy as np, psutil
from fastdecode_hpc.r_part.kv_cache import KVPartition
from fastdecode_hpc.schedule.kv_layout import KVLayout, LayerGroup

def rss():
    return psutil.Process().memory_info().rss >> 20

layout = KVLayout(32, (LayerGroup(tuple(range(16)), 8, 128, "fp16", "fp16"),))
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


@pytest.mark.parametrize("cache", ["int8", "k=int4,v=fp16"])
@pytest.mark.parametrize("window", [None, 40, 200])
def test_recent_tokens_of_a_long_prompt_in_chunks_layer_by_layer(isa, window, cache):
    shape = Shape(2, 1, 16, window, "fp16", cache, block_size=8, num_layers=2)
    layout = shape.layout()
    partition = KVPartition(layout, layout.worst_case(331), num_threads=1)  # exactly what placement promises
    values = from_float(np.random.default_rng(0).standard_normal((330, 2 * shape.kv_size), np.float32), "fp16")
    start = layout.groups[0].first_needed(330)
    partition.add(0, start)
    for layer in range(2):
        for first in range(start // 64 * 64, 330, 64):
            first, stop = max(first, start), min(first + 64, 330)
            partition.reserve(0, stop)
            partition.write_prefill(layer, 0, first, values[first:stop], "fp16")
            check_against_worst_case(partition, 0, 331)
    partition.reserve(0, 331)
    partition.check_integrity()
    assert partition.pools[1].tables[0].first == (331 - min(64, window or 64)) // 8
    for layer in range(2):
        check_stored(partition, shape, values, layer, start)
    partition.remove(0)
    assert partition.free_blocks() == layout.worst_case(331)


@pytest.mark.parametrize("k_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("v_dtype", ["fp16", "int8", "int4"])
def test_a_block_is_as_large_as_its_group_says(k_dtype, v_dtype):
    pool = make_partition(Shape(4, 2, 40, cache=f"k={k_dtype},v={v_dtype}", num_layers=3), []).pools[0]
    assert pool.view.block_bytes == pool.block_bytes == pool.group.block_bytes(16)


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_bytes_of_a_token_are_those_of_the_kernels(dtype):
    for head_dim in range(8, 257, 8):
        assert kv_token_bytes(dtype, head_dim) == cache_token_bytes(dtype, head_dim)
    assert kv_token_bytes(dtype, 64) == {"fp32": 256, "fp16": 128, "bf16": 128, "int8": 68, "int4": 40}[dtype]
