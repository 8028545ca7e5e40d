"""The kernels against the float64 reference."""

import itertools

import numpy as np
import pytest
from kernel_cases import Rows, Shape, attend, fill, from_float, make_partition, to_float

from fastdecode_hpc.config import QUANTISED_DTYPES
from fastdecode_hpc.r_part.attention import DecodeAttention, StepWork, reference_attention

SPAN, BLOCK = 512, 16
LENGTHS = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, SPAN - 1, SPAN, SPAN + 1, 1700]

# Largest |error| as a share of the largest |v|. Sums are fp32: scores of a few units are off by a few 1e-7, which
# is the relative error of each weight; exp adds 1e-7, the weighted sum about as much. Then the output is rounded
# once: by at most half a unit in the last place, 2^-11 for fp16 and 2^-8 for bf16. The cache's rounding is no
# error: the reference uses the values as the cache holds them.
ACCUMULATION = 2e-6
TOLERANCE = {"fp32": ACCUMULATION, "fp16": 2**-11 + ACCUMULATION, "bf16": 2**-8 + ACCUMULATION}
LSE_TOLERANCE = 4e-6  # of values up to about 10
# With a quantised cache queries, and weights times scales, are rounded to 16 bits: to 2^-16 of the largest one. For
# normal values (the largest of a head 3 to 4) a score is off by about 4e-5 times a normal number, a weight likewise;
# four times that, and more, does not happen in a few thousand tokens.
FIXED_POINT = 2e-4


def check(rows: Rows) -> None:
    partition = make_partition(rows.shape, rows.lengths)
    fill(partition, rows)
    out, lse = attend(partition, rows)
    for i, length in enumerate(rows.lengths):
        o, expected_lse, largest = rows.reference(i)
        error = np.abs(to_float(out[i], rows.shape.wire) - o.ravel()).max() / largest
        fixed_point = FIXED_POINT if set(QUANTISED_DTYPES) & set(rows.shape.kv_dtypes) else 0.0
        assert error <= TOLERANCE[rows.shape.wire] + fixed_point, f"{length} older tokens: {error}"
        assert np.abs(lse[i] - expected_lse).max() <= LSE_TOLERANCE + fixed_point, f"{length} older tokens"


@pytest.mark.parametrize("head_dim", [8, 32, 64, 80, 128, 256])
@pytest.mark.parametrize("group_size", [1, 3, 4, 7, 8])
def test_shapes(isa, group_size, head_dim):
    num_kv_heads = 2 if group_size < 4 else 1
    shape = Shape(group_size * num_kv_heads, num_kv_heads, head_dim, block_size=BLOCK)
    lengths = LENGTHS[:-1] if isa == "scalar" else LENGTHS  # slow, and its code is that of the others
    check(Rows.random(shape, lengths, seed=head_dim + group_size))


@pytest.mark.parametrize("head_dim,group_size", [(8, 8), (64, 1), (80, 7), (256, 3)])
def test_shapes_with_a_window(isa, head_dim, group_size):
    check(Rows.random(Shape(group_size, 1, head_dim, 100, block_size=BLOCK), LENGTHS))


@pytest.mark.parametrize("wire,cache", list(itertools.product(["fp32", "fp16", "bf16"], repeat=2)))
def test_types(isa, wire, cache):
    check(Rows.random(Shape(6, 2, 80, None, wire, cache, block_size=8), LENGTHS))


@pytest.mark.parametrize("cache", ["int8", "int4", "k=int8,v=int4", "k=int4,v=fp16", "k=bf16,v=int8"])
@pytest.mark.parametrize("head_dim,group_size", [(8, 1), (64, 3), (80, 8), (128, 4), (256, 2)])
def test_quantised(isa, head_dim, group_size, cache):
    check(Rows.random(Shape(group_size * 2, 2, head_dim, None, cache=cache, block_size=BLOCK), LENGTHS))


@pytest.mark.parametrize("window", [20, 64, 100, 600])
@pytest.mark.parametrize("block_size", [8, 32, 1024])
def test_quantised_windows_and_blocks(isa, window, block_size):
    check(Rows.random(Shape(3, 1, 64, window, "fp16", "int4", block_size=block_size), LENGTHS))


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 512, 513, 3001, 5000])
def test_windows(isa, window):
    check(Rows.random(Shape(3, 1, 64, window, cache="fp16", block_size=BLOCK), LENGTHS))


@pytest.mark.parametrize("block_size", [8, 24, 32, 1024])
def test_block_sizes(isa, block_size):
    check(Rows.random(Shape(3, 3, 24, None, block_size=block_size), LENGTHS))


def test_many_heads_per_kv_head(isa):
    check(Rows.random(Shape(71, 1, 64, cache="bf16"), [0, 33, 600]))


def test_large_scores(isa):
    # Logits up to about 1e4, where an fp32 logit is only good to 1e-3: so is its weight, relatively.
    shape = Shape(3, 1, 64)
    rows = Rows.random(shape, [700], q_scale=3000.0)
    partition = make_partition(shape, rows.lengths)
    fill(partition, rows)
    out, lse = attend(partition, rows)
    o, expected_lse, largest = rows.reference(0)
    assert 3e3 < np.abs(expected_lse).max() < 2e4
    assert np.abs(out[0] - o.ravel()).max() <= 1e-2 * largest
    assert np.allclose(lse[0], expected_lse, rtol=1e-6)


def test_one_score_far_below(isa):
    # A weight that underflows is exactly 0, and a first tile far below the second loses nothing.
    shape = Shape(1, 1, 8)
    rows = Rows.random(shape, [40])
    rows.prompts[0][:, :8] = -1e4
    rows.qkv[0, :8], rows.qkv[0, 8:16] = 1.0, 1e4
    partition = make_partition(shape, rows.lengths)
    fill(partition, rows)
    out, _ = attend(partition, rows)
    assert np.array_equal(out[0], rows.qkv[0, 16:])


@pytest.mark.parametrize("softcap", [None, 0.5, 20.0])
@pytest.mark.parametrize("cache", ["fp32", "fp16", "int8", "int4"])
def test_own_scale_and_cap(isa, cache, softcap):
    shape = Shape(6, 2, 40, scale=0.7, softcap=softcap, cache=cache)
    check(Rows.random(shape, [0, 7, 50, 700], q_scale=0.25))


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("cache", ["fp32", "fp16", "int8", "k=int8,v=int4"])
def test_sinks(isa, cache, window):
    check(Rows.random(Shape(6, 2, 40, window, cache=cache, block_size=BLOCK, has_sinks=True), LENGTHS))


def test_sinks_by_hand(isa):
    # Two equal scores of 8 and a sink of 8 + log(2): half of the weight goes to the sink.
    k, v = np.ones((2, 1, 8)), np.stack([np.full((1, 8), 1.0), np.full((1, 8), 3.0)])
    o, lse = reference_attention(np.ones((1, 8)), k, v, 1, scale=1.0, sinks=np.array([8 + np.log(2)]))
    assert np.allclose(o, 1.0)
    assert np.allclose(lse, 8 + np.log(4))
    rows = Rows.random(Shape(has_sinks=True), [5])
    partition = make_partition(rows.shape, rows.lengths)
    attention = DecodeAttention(partition, num_heads=4, wire_dtype="fp32", num_threads=1)
    with pytest.raises(ValueError, match="heads of sinks has 3 entries; it must have 4"):
        attention.set_sinks(np.zeros((2, 3), np.float32))


def test_output_saturates(isa):
    # The cache holds more than the wire can: what does not fit becomes its largest value.
    shape = Shape(1, 1, 8, wire="fp16", cache="fp32")
    rows = Rows.random(shape, [0])
    partition = make_partition(shape, rows.lengths)
    fill(partition, rows)
    work = StepWork(partition, [0], np.array([0]), num_threads=1)
    attention = DecodeAttention(partition, num_heads=1, wire_dtype="fp16", num_threads=1)
    attention.append(1, work, rows.qkv)
    pool = partition.pools[0]
    place = int(pool.locate(0, np.array([0]))[0])
    assert place % pool.block_size == 0
    layer, token_bytes = pool.block_bytes // 2, 8 * 4  # V is a row a token, behind all K of the block
    value = place // pool.block_size * pool.block_bytes + layer + pool.block_size * token_bytes
    pool.arena[value : value + token_bytes].view(np.float32)[:] = [1e6, -1e6, 65519, 65536, np.inf, -np.inf, 3e38, 0]
    out = np.empty((1, 8), np.float16)
    attention.attend(1, work, rows.qkv, out, 0)
    assert out[0].tolist() == [65504, -65504, 65504, 65504, np.inf, -np.inf, 65504, 0]


def test_reference_by_hand():
    # Two equal keys: the mean of both values; a window of 1 sees the newest only.
    k, v = np.ones((2, 1, 8)), np.stack([np.full((1, 8), 1.0), np.full((1, 8), 3.0)])
    o, lse = reference_attention(np.ones((1, 8)), k, v, 1, scale=1.0)
    assert np.allclose(o, 2.0)
    assert np.allclose(lse, 8 + np.log(2))
    o, _ = reference_attention(np.ones((1, 8)), k, v, 1, window=1)
    assert np.allclose(o, 3.0)
    assert from_float(np.float32([1.0]), "bf16")[0] == 0x3F80
