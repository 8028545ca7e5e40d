"""The read loops read every float once: their sums are exact on whole numbers."""

import numpy as np
import pytest

from fastdecode_hpc.r_part.attention import READ_LOOPS, read_sums, touch_parts


def whole_numbers(count):
    return np.random.default_rng(count).integers(-50, 100, count).astype(np.float32)


@pytest.mark.parametrize("variant", range(len(READ_LOOPS)), ids=READ_LOOPS)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_sums_are_exact(isa, variant, num_threads):
    for count in (0, 1, 7, 16, 63, 64, 127, 128, 129, 1000, 4097, 65536, 100003):
        buffer = whole_numbers(count)
        assert read_sums(buffer, variant, num_threads) == buffer.sum(dtype=np.float64), count


def test_more_threads_than_floats(isa):
    assert read_sums(np.ones(5, np.float32), 0, 16) == 5


def test_every_part_is_touched():
    for count in (0, 1, 15, 1000, 100003):
        buffer = np.ones(count, np.float32)
        touch_parts(buffer, 3)
        assert not buffer.any()


def test_what_cannot_be_read_is_refused():
    buffer = np.zeros(64, np.float32)
    with pytest.raises(ValueError, match=f"no read loop {len(READ_LOOPS)}; they are 0 to {len(READ_LOOPS) - 1}"):
        read_sums(buffer, len(READ_LOOPS), 1)
    with pytest.raises(ValueError, match="0 threads"):
        read_sums(buffer, 0, 0)
    with pytest.raises(ValueError, match="0 threads"):
        touch_parts(buffer, 0)
    with pytest.raises(ValueError):
        read_sums(np.zeros(64), 0, 1)
