"""Owners, reservations and counts."""

import dataclasses
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode_hpc.model_shape import ModelConfig
from fastdecode_hpc.schedule.kv_layout import RECENT_WINDOW, KVLayout, LayerGroup, make_layout
from fastdecode_hpc.schedule.placement import RETRY_STEPS, Placement, row_counts
from fastdecode_hpc.schedule.worker_costs import WorkerCost
from fastdecode_hpc.sequence import SamplingParams, Sequence

MODEL = ModelConfig(100, 64, 96, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, max_context_len=512)


def make_seq(seq_id: int, num_tokens: int) -> Sequence:
    """A sequence whose worst case is `num_tokens` (2 at least)."""
    new = max(1, num_tokens // 2)
    return Sequence(seq_id, seq_id, [1] * max(0, num_tokens - new - 1), SamplingParams(), new)


def layout(window: int | None = None, block_size: int = 8) -> KVLayout:
    return KVLayout(block_size, (LayerGroup((0, 1), 2, 16, "fp16", "fp16", window),))


def test_bytes_of_a_block_are_k_and_v_of_all_layers_and_heads() -> None:
    made = make_layout(MODEL, block_size=32, kv_dtype="fp16")
    assert made.groups[0].block_bytes(32) == 2 * 3 * 2 * 32 * 16 * 2
    assert made.bytes_for(33) == 2 * made.groups[0].block_bytes(32)


@pytest.mark.parametrize(
    "kv_dtype,token_bytes,recent",
    [
        ("int8", 2 * (16 + 4), ("fp16", "fp16")),
        ("int4", 2 * (16 + 4), ("fp16", "fp16")),  # a head of 16 takes a whole group of 32
        ("k=int8,v=int4", 2 * (16 + 4), ("fp16", "fp16")),
        ("k=int4,v=bf16", 16 + 4 + 2 * 16, ("fp16", "bf16")),
        ("k=fp32,v=int8", 4 * 16 + 16 + 4, ("fp32", "fp16")),
    ],
)
def test_a_quantised_layout_has_a_copy_of_recent_tokens(kv_dtype: str, token_bytes: int, recent: tuple) -> None:
    made = make_layout(MODEL, block_size=32, kv_dtype=kv_dtype)
    group, copy = made.groups
    assert (group.is_quantised, group.is_recent, group.window) == (True, False, None)
    assert (copy.is_quantised, copy.is_recent, copy.window) == (False, True, RECENT_WINDOW)
    assert (copy.k_dtype, copy.v_dtype) == recent
    assert copy.layers == group.layers == (0, 1, 2)
    assert group.block_bytes(32) == 32 * 3 * 2 * token_bytes
    assert made.token_bytes == 3 * 2 * token_bytes  # what one more token costs
    # The copy takes the same for every long sequence.
    assert made.worst_case(1000) == (32, 3)
    assert made.bytes_for(1000) - made.bytes_for(968) == group.block_bytes(32)


@pytest.mark.parametrize("kv_dtype", ["fp32", "fp16", "bf16", "k=fp32,v=fp16"])
def test_other_layouts_have_none(kv_dtype: str) -> None:
    (group,) = make_layout(MODEL, block_size=32, kv_dtype=kv_dtype).groups
    assert not group.is_quantised


@pytest.mark.parametrize("window,expected", [(16, 16), (64, 64), (4096, RECENT_WINDOW)])
def test_a_window_bounds_the_copy(window: int, expected: int) -> None:
    model = dataclasses.replace(MODEL, sliding_window=window)
    group, copy = make_layout(model, block_size=8, kv_dtype="int8").groups
    assert (group.window, copy.window) == (window, expected)


def test_memory_is_shared_between_the_cache_and_its_copy() -> None:
    made = make_layout(MODEL, block_size=32, kv_dtype="int8")
    budget = 50 * made.bytes_for(512) + 7
    blocks = made.split_budget(budget, 512, 50)
    assert blocks == tuple(50 * n for n in made.worst_case(512))
    placement = Placement(made, {1: blocks})
    assert [placement.place(make_seq(i, 512), 0) for i in range(51)] == [1] * 50 + [None]


def test_short_sequences_do_not_run_out_of_copies() -> None:
    # The model could go on for long, the sequences don't: there are as many copies as sequences run at once.
    made = make_layout(MODEL, block_size=32, kv_dtype="int4")
    budget = 100 * made.bytes_for(8192)
    placement = Placement(made, {1: made.split_budget(budget, 8192, 256)})
    assert [placement.place(make_seq(i, 200), 0) for i in range(256)] == [1] * 256
    held = sum(blocks * group.block_bytes(32) for blocks, group in zip(placement.capacity[1], made.groups, strict=True))
    assert held <= budget


def test_copies_leave_most_of_a_small_memory() -> None:
    made = make_layout(MODEL, block_size=32, kv_dtype="int4")
    blocks = made.split_budget(30 * made.bytes_for(512), 512, 10_000)
    sizes = [n * group.block_bytes(32) for n, group in zip(blocks, made.groups, strict=True)]
    assert sizes[1] <= sum(sizes) / 3
    assert min(made.split_budget(made.bytes_for(512), 512, 1)) > 0


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
    st.lists(st.integers(2, 120), max_size=60),
    st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
@settings(max_examples=150)
def test_every_sequence_has_one_owner_and_no_worker_promises_more_than_it_has(lengths, capacities, random) -> None:
    """Whatever tokens and rows cost, and also when that changes."""
    capacity = {rank + 1: (blocks,) for rank, blocks in enumerate(capacities)}
    placement = Placement(layout(), capacity)
    held: dict[int, Sequence] = {}
    for seq_id, length in enumerate(lengths):
        seq = make_seq(seq_id, length)
        if random.random() < 0.3:
            placement.costs = {rank: WorkerCost(*(random.random() for _ in range(3))) for rank in capacity}
        if placement.place(seq, seq_id) is None:
            need = placement.layout.worst_case(length)[0]
            assert all(placement.free_blocks(rank)[0] < need for rank in capacity)
        else:
            held[seq_id] = seq
        if held and random.random() < 0.4:
            gone = random.choice(sorted(held))
            placement.release(held.pop(gone), seq_id)
        for rank, (blocks,) in capacity.items():
            used = sum(layout().worst_case(seq.max_context_len)[0] for seq in held.values() if seq.owner == rank)
            assert placement.free_blocks(rank) == (blocks - used,)
            assert used <= blocks


def test_load_goes_to_the_least_loaded_worker_and_follows_weights() -> None:
    placement = Placement(layout(), {1: (1000,), 2: (1000,)})
    assert [placement.place(make_seq(i, 8), 0) for i in range(4)] == [1, 2, 1, 2]
    weighted = Placement(layout(), {1: (1000,), 2: (1000,)}, {1: WorkerCost(3.0), 2: WorkerCost(1.0)})
    owners = Counter(weighted.place(make_seq(i, 8), 0) for i in range(40))
    assert owners == {1: 10, 2: 30}


def test_rows_cost_what_their_link_takes() -> None:
    """With links alone: 5 rows to each of the fast ones for 1 row to the slow one, whatever their lengths."""
    costs = {1: WorkerCost(0.0, 1.0), 2: WorkerCost(0.0, 1.0), 3: WorkerCost(0.0, 5.0)}
    placement = Placement(layout(), dict.fromkeys(costs, (10000,)), costs)
    owners = Counter(placement.place(make_seq(i, 100), 0) for i in range(110))
    assert owners == {1: 50, 2: 50, 3: 10}


def test_latency_costs_once_however_many_rows() -> None:
    costs = {1: WorkerCost(0.0, 1.0), 2: WorkerCost(0.0, 1.0, 20.0)}
    placement = Placement(layout(), dict.fromkeys(costs, (10000,)), costs)
    owners = Counter(placement.place(make_seq(i, 100), 0) for i in range(60))
    assert owners == {1: 40, 2: 20}


@given(st.lists(st.integers(4, 120), max_size=60), st.integers(1, 5), st.floats(1e-9, 1e9))
def test_equal_costs_are_no_costs(lengths: list[int], num_workers: int, token_s: float) -> None:
    capacity = dict.fromkeys(range(1, num_workers + 1), (10000,))
    alike = Placement(layout(), capacity, dict.fromkeys(capacity, WorkerCost(token_s)))
    without = Placement(layout(), capacity)
    for step, length in enumerate(lengths):
        assert alike.place(make_seq(step, length), step) == without.place(make_seq(step, length), step)


def test_a_long_sequence_outweighs_several_short_ones() -> None:
    placement = Placement(layout(), {1: (1000,), 2: (1000,)})
    owners = [placement.place(make_seq(i, tokens), 0) for i, tokens in enumerate([400, 100, 100, 100])]
    assert owners == [1, 2, 2, 2]


def test_load_that_ends_soon_counts_little_for_a_sequence_that_stays() -> None:
    placement = Placement(layout(), {1: (1000,), 2: (1000,)})
    long_prompt = Sequence(0, 0, [1] * 300, SamplingParams(), 3)  # reads much, for two steps
    long_output = Sequence(1, 1, [1] * 10, SamplingParams(), 200)
    assert placement.place(long_prompt, 0) == 1
    assert placement.place(long_output, 0) == 2
    assert placement.place(Sequence(2, 2, [1] * 10, SamplingParams(), 200), 0) == 1
    placement.release(long_output, 5)
    assert placement.place(Sequence(3, 3, [1] * 10, SamplingParams(), 200), 5) == 2


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


def test_a_worker_that_got_nothing_for_long_gets_a_sequence() -> None:
    """Else a link that is well again would never be seen."""
    placement = Placement(layout(), dict.fromkeys((1, 2), (1000,)), {1: WorkerCost(), 2: WorkerCost(step_s=1e9)})
    for step in range(0, RETRY_STEPS, 100):
        seq = make_seq(step, 8)
        assert placement.place(seq, step) == 1
        placement.release(seq, step + 8)
    seqs = [make_seq(number, 8) for number in range(2)]
    assert [placement.place(seq, RETRY_STEPS) for seq in seqs] == [2, 1]
    placement.release(seqs[0], RETRY_STEPS + 8)
    assert placement.place(make_seq(2, 8), RETRY_STEPS + 9) == 1


class PlainPlacement:
    """The formula, sequence by sequence and step by step."""

    def __init__(self, made: KVLayout, capacity: dict[int, tuple[int, ...]]) -> None:
        self.layout, self.free = made, {rank: list(blocks) for rank, blocks in capacity.items()}
        self.costs: dict[int, WorkerCost] = {}
        self.loads: dict[int, dict[int, tuple[int, dict[int, int]]]] = {}  # seq_id |-> owner, load by step
        self.used = dict.fromkeys(capacity, 0)

    def steps_of(self, rank: int) -> list[dict[int, int]]:
        return [loads for owner, loads in self.loads.values() if owner == rank]

    def busy(self, rank: int, own: dict[int, int]) -> float:
        cost, layers = self.costs.get(rank, WorkerCost()), self.layout.num_layers
        others = self.steps_of(rank)
        tokens = sum(own.values()) + sum(loads.get(step, 0) for loads in others for step in own)
        rows = len(own) + sum(step in loads for loads in others for step in own)
        return tokens * cost.token_s + (rows * layers * cost.row_s + len(own) * layers * cost.step_s)

    def place(self, seq: Sequence, step: int) -> int | None:
        need = self.layout.worst_case(seq.max_context_len)
        room = [rank for rank, free in self.free.items() if all(a >= b for a, b in zip(free, need, strict=True))]
        if not room:
            return None
        windows = [window for group in self.layout.main_groups for window in [group.window] * len(group.layers)]
        contexts = range(seq.prompt_len + 1, seq.prompt_len + seq.max_new_tokens)
        own = {
            step + late: sum(context if window is None else min(context, window) for window in windows)
            for late, context in enumerate(contexts)
        }
        idle = [
            rank
            for rank in room
            if step - self.used[rank] >= RETRY_STEPS and not any(step in loads for loads in self.steps_of(rank))
        ]
        owner = min(idle or room, key=lambda rank: (self.busy(rank, own), rank))
        self.take(owner, need, 1)
        self.loads[seq.seq_id], self.used[owner] = (owner, own), step
        return owner

    def release(self, seq: Sequence, step: int) -> None:
        owner, _ = self.loads.pop(seq.seq_id)
        self.take(owner, self.layout.worst_case(seq.max_context_len), -1)
        self.used[owner] = step

    def take(self, owner: int, need: tuple[int, ...], sign: int) -> None:
        self.free[owner] = [free - sign * blocks for free, blocks in zip(self.free[owner], need, strict=True)]


@given(
    st.integers(1, 5),
    st.sampled_from([None, 20]),
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 60), st.sampled_from([0, 0, 1, 5, 70, RETRY_STEPS])), max_size=50
    ),
    st.randoms(use_true_random=False),
)
@settings(max_examples=150, deadline=None)
def test_the_owner_is_the_one_of_the_plain_formula(num_workers: int, window: int | None, events, random) -> None:
    made = layout(window)
    capacity = {rank: (random.randrange(10, 60),) for rank in range(1, num_workers + 1)}
    placement, plain = Placement(made, capacity), PlainPlacement(made, capacity)
    step, held = 0, []
    for seq_id, (prompt_len, new, wait) in enumerate(events):
        step += wait
        if random.random() < 0.2:  # whole numbers: sums are exact, so that ties are
            draw = lambda: WorkerCost(*(float(random.randrange(4)) for _ in range(3)))  # noqa: E731
            placement.costs = plain.costs = {rank: draw() for rank in capacity}
        while held and random.random() < 0.4:
            gone = held.pop(random.randrange(len(held)))
            placement.release(gone, step)
            plain.release(gone, step)
        seq = Sequence(seq_id, seq_id, [1] * prompt_len, SamplingParams(), new)
        owner = placement.place(seq, step)
        assert owner == plain.place(seq, step)
        assert {rank: placement.free_blocks(rank) for rank in capacity} == {r: tuple(f) for r, f in plain.free.items()}
        if owner is not None:
            held.append(seq)
