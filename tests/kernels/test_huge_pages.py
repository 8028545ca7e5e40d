"""The arena's place in memory, and how much of it lies on huge pages."""

import sys

import numpy as np
import pytest

from fastdecode_hpc.r_part.kv_cache import HUGE_PAGE_BYTES, from_huge_page_border, map_arena
from fastdecode_hpc.topology import huge_page_mode
from launching import run_limited


@pytest.mark.parametrize("num_bytes", [HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 8, 5 * HUGE_PAGE_BYTES - 8])
def test_an_arena_begins_at_a_huge_page(num_bytes: int) -> None:
    arena = map_arena(num_bytes)
    assert arena.ctypes.data % HUGE_PAGE_BYTES == 0
    assert arena.shape == (num_bytes,)
    arena[0] = arena[-1] = 1
    assert arena.sum() == 2


@pytest.mark.parametrize("shift", [0, 8, 4096, HUGE_PAGE_BYTES - 1])
def test_memory_is_cut_at_the_border(shift: int) -> None:
    memory = np.zeros(4 * HUGE_PAGE_BYTES, np.uint8)
    part = from_huge_page_border(memory[-memory.ctypes.data % HUGE_PAGE_BYTES + shift :], HUGE_PAGE_BYTES)
    assert part.ctypes.data % HUGE_PAGE_BYTES == 0
    assert part.shape == (HUGE_PAGE_BYTES,)


def test_small_arenas_are_what_they_are() -> None:
    assert map_arena(0).shape == (0,)
    assert map_arena(4096).shape == (4096,)


USED_PARTITION = """
from fastdecode_hpc.r_part.kv_cache import KVPartition
from fastdecode_hpc.schedule.kv_layout import KVLayout, LayerGroup

group = LayerGroup((0,), 8, 128, "fp16", "fp16")
partition = KVPartition(KVLayout(32, (group,)), ((64 << 20) // group.block_bytes(32),), num_threads=1)
before = partition.huge_page_share()
partition.add(0)
partition.reserve(0, 32)
print(before, partition.huge_page_share())
"""


def test_a_partition_knows_its_share_once_it_is_used() -> None:
    # In a process of its own: the kernel joins the arena with those that earlier tests left beside it.
    done = run_limited([sys.executable, "-c", USED_PARTITION], timeout=60)
    assert done.returncode == 0, done.stderr
    before, share = done.stdout.split()
    assert before == "None"
    assert 0 <= float(share) <= 1
    if huge_page_mode() in ("never", ""):
        assert float(share) == 0
