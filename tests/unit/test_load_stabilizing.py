"""The load-stabilizing schedule against brute force: the limit holds, nobody starves or starts later than needed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode_hpc.schedule.forecast import LoadForecast
from fastdecode_hpc.schedule.kv_layout import KVLayout, LayerGroup
from fastdecode_hpc.schedule.load_stabilizing import LoadStabilizing
from fastdecode_hpc.sequence import SamplingParams, Sequence

PLAIN = KVLayout(8, (LayerGroup((0,), 1, 8, "fp16", "fp16"),))
WINDOWED = KVLayout(8, (LayerGroup((0, 2), 1, 8, "fp16", "fp16"), LayerGroup((1,), 1, 8, "fp16", "fp16", window=9)))
LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(2, 40)), min_size=1, max_size=60)


def make_seq(seq_id: int, prompt_len: int, new: int) -> Sequence:
    """Prefilled: its first token is there."""
    return Sequence(seq_id, seq_id, [1] * prompt_len, SamplingParams(), new, output_ids=[0])


def read_by(layout: KVLayout, seq: Sequence) -> float:
    """What a sequence reads in its next step, averaged over layers, one layer at a time."""
    layers = [(layer, group.window) for group in layout.main_groups for layer in group.layers]
    seen = [seq.context_len if window is None else min(seq.context_len, window) for _, window in layers]
    return sum(seen) / len(layers)


class Trace:
    """Decodes under a schedule, and keeps what each step read. `ends` are tokens after which a sequence ends early."""

    def __init__(
        self, starts: LoadStabilizing, seqs: list[Sequence], arrivals: list[int], ends: dict[int, int]
    ) -> None:
        self.starts, self.ends = starts, ends
        self.coming = sorted(zip(arrivals, seqs, strict=True), key=lambda pair: pair[0])
        self.ready: list[Sequence] = []
        self.running: list[Sequence] = []
        self.step = 0
        self.loads: list[float] = []
        self.started: dict[int, int] = {}
        self.rows: list[int] = []

    def turn(self) -> None:
        while self.coming and self.coming[0][0] <= self.step:
            self.ready.append(self.coming.pop(0)[1])
            self.starts.admitted(self.ready[-1])
        count = self.starts.num_startable(self.ready, self.step)
        for seq in self.ready[:count]:
            self.starts.started(seq, self.step)
            self.started[seq.seq_id] = self.step
        self.running += self.ready[:count]
        del self.ready[:count]
        self.loads.append(sum(read_by(self.starts.layout, seq) for seq in self.running))
        self.rows.append(len(self.running))
        # Of those that decode in this step: what each reads, and how many steps it has left with this one.
        self.decoding = [(seq.context_len, seq.max_new_tokens - len(seq.output_ids)) for seq in self.running]
        self.step += 1
        for seq in list(self.running):
            seq.output_ids.append(0)
            if len(seq.output_ids) >= min(seq.max_new_tokens, self.ends.get(seq.seq_id, 10**9)):
                self.running.remove(seq)
                self.starts.finished(seq, self.step)

    def run(self) -> None:
        while self.coming or self.ready or self.running:
            self.turn()
            assert self.step < 100_000, "somebody starves"


@given(
    LENGTHS,
    st.sampled_from([PLAIN, WINDOWED]),
    st.integers(1, 20),
    st.integers(1, 9),
    st.integers(85, 900),
    st.data(),
)
@settings(max_examples=300, deadline=None)
def test_the_limit_is_never_exceeded_and_everybody_runs(lengths, layout, batch, interval, limit, data) -> None:
    seqs = [make_seq(i, *pair) for i, pair in enumerate(lengths)]
    arrivals = data.draw(st.lists(st.integers(0, 200), min_size=len(seqs), max_size=len(seqs)))
    ends = data.draw(st.dictionaries(st.integers(0, len(seqs) - 1), st.integers(2, 40)))
    starts = LoadStabilizing(layout, max_batch_size=batch, start_interval=interval, load_limit=limit)
    trace = Trace(starts, seqs, arrivals, ends)
    trace.run()
    assert max(trace.loads) <= limit + 1e-9
    assert len(trace.started) == len(seqs)
    order = [seq.seq_id for _, seq in sorted(zip(arrivals, seqs, strict=True), key=lambda pair: pair[0])]
    assert [trace.started[i] for i in order] == sorted(trace.started.values())  # nobody is overtaken
    assert starts.forecast.load(trace.step) == 0


@given(LENGTHS, st.sampled_from([PLAIN, WINDOWED]), st.integers(85, 600), st.data())
@settings(max_examples=300, deadline=None)
def test_nobody_starts_later_than_the_limit_demands(lengths, layout, limit, data) -> None:
    """Interval 1 and a large batch leave the limit alone: the first in the queue waits only while it would break it."""
    seqs = [make_seq(i, *pair) for i, pair in enumerate(lengths)]
    arrivals = data.draw(st.lists(st.integers(0, 100), min_size=len(seqs), max_size=len(seqs)))
    starts = LoadStabilizing(layout, max_batch_size=10**6, start_interval=1, load_limit=limit)
    trace = Trace(starts, seqs, arrivals, {})
    while trace.coming or trace.ready or trace.running:
        trace.turn()
        if trace.ready:
            assert _would_exceed(layout, trace.decoding, trace.ready[0], limit)


def _would_exceed(layout: KVLayout, decoding: list[tuple[int, int]], first: Sequence, limit: float) -> bool:
    """By brute force: somewhere in its life `first`, started in the step just done, lifts the load above `limit`."""
    peaks = []
    for k in range(first.max_new_tokens - 1):
        contexts = [context + k for context, left in decoding if k < left] + [first.prompt_len + 1 + k]
        layers = [group.window for group in layout.main_groups for _ in group.layers]
        reads = [c if window is None else min(c, window) for c in contexts for window in layers]
        peaks.append(sum(reads) / len(layers))
    return max(peaks) > limit


@pytest.mark.parametrize("batch,prompt_len,new", [(32, 16, 128), (64, 10, 256), (8, 10, 64), (16, 300, 100), (5, 3, 7)])
def test_equal_lengths_reach_the_steady_load_of_the_formula(batch: int, prompt_len: int, new: int) -> None:
    starts = LoadStabilizing(PLAIN, max_batch_size=batch, spread=2)
    seqs = [make_seq(i, prompt_len, new) for i in range(6 * batch)]
    trace = Trace(starts, seqs, [0] * len(seqs), {})
    trace.run()
    interval, size = starts.start_interval, starts.micro_batch_size
    # M is no whole number: what is carried on may make one sequence an interval older than in the formula.
    assert max(trace.loads) <= batch * (prompt_len + (new + interval) / 2) + size + interval
    # Six generations, one more to get up and down again; the batch is full in between.
    assert trace.step <= 7 * new + 3 * interval
    assert np.mean(trace.rows[new + interval : 6 * new]) >= 0.94 * batch
    # Between two starts all sequences grow, and then those of one micro-batch end: at most so much it goes up and down.
    steady = trace.loads[2 * new : 4 * new]
    assert max(steady) - min(steady) <= batch * interval + 2 * size * (prompt_len + new)


def test_the_batch_is_full_where_sequences_end_long_before_their_bounds() -> None:
    rng = np.random.default_rng(3)
    starts = LoadStabilizing(PLAIN, max_batch_size=32)
    seqs = [make_seq(i, 8, 1000) for i in range(1000)]
    trace = Trace(starts, seqs, [0] * len(seqs), dict(enumerate(rng.geometric(1 / 50, 1000).clip(2).tolist())))
    trace.run()
    assert starts.mean_steps == pytest.approx(50, rel=0.1)
    assert np.mean(trace.rows[200:1000]) >= 0.95 * 32
    assert max(trace.rows[:25]) < 32  # yet not at once


def test_what_was_held_up_does_not_start_in_a_burst() -> None:
    starts = LoadStabilizing(PLAIN, max_batch_size=64)
    seqs = [make_seq(i, 8, 128) for i in range(512)]
    trace = Trace(starts, seqs, [0] * 64 + [400] * 448, {})  # nothing arrives for some lifetimes
    trace.run()
    counts = np.bincount(list(trace.started.values()))
    assert counts.max() <= 2 * starts.micro_batch_size
    assert max(trace.loads) <= 64 * (8 + (128 + 2) / 2) + starts.micro_batch_size


def test_early_ends_free_their_load_at_once() -> None:
    starts = LoadStabilizing(PLAIN, max_batch_size=4, start_interval=1, load_limit=100)
    first, second = make_seq(0, 10, 80), make_seq(1, 10, 50)
    trace = Trace(starts, [first, second], [0, 0], {0: 5})
    trace.run()
    assert trace.started == {0: 0, 1: 4}  # together they would have read 80 + 50 and more


def test_a_sequence_above_the_limit_runs_alone() -> None:
    starts = LoadStabilizing(PLAIN, max_batch_size=4, start_interval=1, load_limit=20)
    trace = Trace(starts, [make_seq(i, 30, 5) for i in range(3)], [0, 0, 0], {})
    trace.run()
    assert sorted(trace.started.values()) == [0, 4, 8]
    assert max(trace.loads) == 34


def test_a_sequence_that_misses_a_step_is_expected_a_step_longer() -> None:
    forecast = LoadForecast(PLAIN)
    seq = make_seq(0, 10, 6)
    forecast.add(seq, 0)
    assert [forecast.load(step) for step in range(7)] == [11, 12, 13, 14, 15, 0, 0]
    seq.output_ids.append(0)  # decoded in step 0, not in step 1
    forecast.remove(seq, 2)
    forecast.add(seq, 2)
    assert [forecast.load(step) for step in range(2, 8)] == [12, 13, 14, 15, 0, 0]


def test_a_forecast_forgets_the_past_in_bounded_memory() -> None:
    forecast = LoadForecast(PLAIN)
    for step in range(20_000):
        seq = make_seq(step, 5, 50)
        forecast.add(seq, step)
    assert len(forecast._loads) < 1000
    assert forecast.load(20_000) == sum(5 + 1 + k for k in range(1, 49))


def test_starts_are_spread_over_a_burst() -> None:
    starts = LoadStabilizing(PLAIN, max_batch_size=32, spread=2)
    trace = Trace(starts, [make_seq(i, 8, 64) for i in range(32)], [0] * 32, {})
    trace.run()
    counts = np.bincount(list(trace.started.values()))
    assert counts.max() <= starts.micro_batch_size == 3  # 64 steps less the first token: 2.03 in an interval
    assert starts.start_interval == 4
