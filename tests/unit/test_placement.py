"""Owners, reservations and counts."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode_hpc.config import ModelConfig
from fastdecode_hpc.schedule.placement import KVLayout, LayerGroup, Placement, make_layout, row_counts

MODEL = ModelConfig(100, 64, 96, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, max_context_len=512)


def layout(window: int | None = None, block_size: int = 8) -> KVLayout:
    return KVLayout(block_size, (LayerGroup((0, 1), 2, 16, "fp16", window),))


def test_bytes_of_a_block_are_k_and_v_of_all_layers_and_heads() -> None:
    made = make_layout(MODEL, block_size=32, kv_dtype="fp16")
    assert made.groups[0].block_bytes(32) == 2 * 3 * 2 * 32 * 16 * 2
    assert made.bytes_for(33) == 2 * made.groups[0].block_bytes(32)


@given(st.integers(1, 200), st.integers(1, 60), st.sampled_from([8, 16, 32]))
def test_worst_case_of_a_window_covers_every_position(num_tokens: int, window: int, block_size: int) -> None:
    made = layout(window, block_size)
    group = made.groups[0]
    most = 0
    for position in range(num_tokens):
        first_block = group.first_needed(max(0, position - 1)) // block_size  # before the drop of this step
        most = max(most, position // block_size - first_block + 1)
    assert most <= made.blocks_for(num_tokens, group) <= -(-num_tokens // block_size)


@given(
    st.lists(st.integers(1, 120), max_size=60),
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
@settings(max_examples=150)
def test_every_sequence_has_one_owner_and_no_worker_promises_more_than_it_has(lengths, capacities, random) -> None:
    capacity = {rank + 1: (blocks,) for rank, blocks in enumerate(capacities)}
    placement = Placement(layout(), capacity)
    held: dict[int, tuple[int, int]] = {}
    for seq_id, length in enumerate(lengths):
        owner = placement.place(seq_id, length)
        if owner is None:
            need = placement.layout.worst_case(length)[0]
            assert all(placement.free_blocks(rank)[0] < need for rank in capacity)
        else:
            held[seq_id] = (owner, length)
        if held and random.random() < 0.4:
            gone = random.choice(sorted(held))
            placement.release(gone)
            del held[gone]
        for rank, (blocks,) in capacity.items():
            used = sum(placement.layout.worst_case(length)[0] for owner, length in held.values() if owner == rank)
            assert placement.free_blocks(rank) == (blocks - used,)
            assert used <= blocks
            assert placement.load(rank) == sum(length for owner, length in held.values() if owner == rank)


def test_load_goes_to_the_least_loaded_worker_and_follows_weights() -> None:
    placement = Placement(layout(), {1: (1000,), 2: (1000,)})
    assert [placement.place(seq_id, 8) for seq_id in range(4)] == [1, 2, 1, 2]
    weighted = Placement(layout(), {1: (1000,), 2: (1000,)}, weights={2: 3.0})
    owners = Counter(weighted.place(seq_id, 8) for seq_id in range(40))
    assert owners == {1: 10, 2: 30}


def test_what_can_never_fit_is_known() -> None:
    placement = Placement(layout(), {1: (3,), 2: (5,)})
    assert placement.fits_ever(40)
    assert not placement.fits_ever(41)


@given(st.lists(st.integers(0, 6), max_size=50))
def test_counts_add_up(owners: list[int]) -> None:
    counts = row_counts(sorted(owners), 7)
    assert sum(counts) == len(owners)
    assert all(count == owners.count(rank) for rank, count in enumerate(counts))


def test_unordered_owners_are_a_bug() -> None:
    with pytest.raises(AssertionError, match="ordered by owner"):
        row_counts([2, 1], 3)
