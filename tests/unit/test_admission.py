"""Continuous batching: who starts, where, and that nobody starves."""

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode_hpc.schedule.admission import Admission
from fastdecode_hpc.schedule.kv_layout import KVLayout, LayerGroup
from fastdecode_hpc.schedule.levelling import LoadedSequence, sum_loads
from fastdecode_hpc.schedule.load_stabilizing import Greedy, LoadStabilizing
from fastdecode_hpc.schedule.mini_batch import MiniBatch
from fastdecode_hpc.schedule.placement import Placement
from fastdecode_hpc.sequence import SamplingParams, Sequence

LAYOUT = KVLayout(8, (LayerGroup((0,), 1, 8, "fp16", "fp16"),))


def make_seq(seq_id: int, prompt_len: int = 5, max_new_tokens: int = 3) -> Sequence:
    return Sequence(seq_id, seq_id, [1] * prompt_len, SamplingParams(), max_new_tokens)


def make_admission(lengths: list[int], *, blocks: int = 100, workers: int = 2, batch: int = 8, slots: int = 2):
    placement = Placement(LAYOUT, {rank + 1: (blocks,) for rank in range(workers)})
    seqs = [make_seq(i, length) for i, length in enumerate(lengths)]
    return Admission(placement, iter(seqs), Greedy(batch), max_batch_size=batch, num_slots=slots)


def test_no_more_than_the_batch_is_admitted_and_a_place_is_given_on() -> None:
    admission = make_admission([5] * 10, batch=4)
    running = [admission.admit(0) for _ in range(4)]
    assert [seq.seq_id for seq in running] == [0, 1, 2, 3]
    assert admission.admit(0) is None
    admission.finished(running[2], 0)
    assert admission.admit(0).seq_id == 4


def test_a_long_sequence_is_not_overtaken() -> None:
    admission = make_admission([20, 60, 5], blocks=8, workers=1)
    first = admission.admit(0)
    assert admission.admit(0) is None  # 60 + 4 tokens need 8 blocks; 3 are taken
    admission.finished(first, 0)
    assert admission.admit(0).seq_id == 1


def test_arrivals_are_read_one_ahead_only() -> None:
    read = []

    def arrivals():
        for i in range(100):
            read.append(i)
            yield make_seq(i)

    placement = Placement(LAYOUT, {1: (4,)})
    admission = Admission(placement, arrivals(), Greedy(50), max_batch_size=50, num_slots=1)
    while admission.admit(0) is not None:
        pass
    assert len(read) == 3  # two fit, the third is known and waits


def test_closing_drops_what_waits() -> None:
    admission = make_admission([5] * 3)
    seq = admission.admit(0)
    admission.close()
    assert admission.admit(0) is None
    assert not admission.is_done()
    admission.finished(seq, 0)
    assert admission.is_done()


class Worker:
    """Decodes as the S-worker does: one slot's plan after another; prefill takes no time."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.batches = [MiniBatch(slot) for slot in range(admission.num_slots)]
        self.step, self.done, self.rows = 0, [], []  # rows: (step, slot, load by owner)

    def turn(self, batch: MiniBatch) -> None:
        for seq in batch.seqs:
            seq.output_ids.append(0)
        batch.grow()
        ended = [seq for seq in batch.seqs if len(seq.output_ids) >= seq.max_new_tokens]
        batch.remove(ended)
        for seq in ended:
            self.done.append(seq.seq_id)
            self.admission.finished(seq, self.step)
        self.admission.refill(batch, self.batches, self.step)
        while (seq := self.admission.admit(self.step)) is not None:
            seq.output_ids.append(0)
            if seq.max_new_tokens == 1:
                self.done.append(seq.seq_id)
                self.admission.finished(seq, self.step)
            else:
                self.admission.prefilled(seq)
        assert len(batch) <= self.admission.max_rows
        assert batch.seq_ids.tolist() == [seq.seq_id for seq in batch.seqs]
        assert batch.context_lens.tolist() == [seq.context_len for seq in batch.seqs]
        assert batch.owners.tolist() == [seq.owner for seq in batch.seqs]
        assert batch.loads_by_owner(LAYOUT) == sum_loads(LoadedSequence(seq, seq.context_len) for seq in batch.seqs)
        assert [seq.owner for seq in batch.seqs] == sorted(seq.owner for seq in batch.seqs)
        loads = Counter()
        for seq in batch.seqs:
            loads[seq.owner] += seq.context_len
        self.rows.append((self.step, batch.slot, len(batch), loads))

    def run(self, max_steps: int) -> None:
        while not self.admission.is_done() and self.step < max_steps:
            for batch in self.batches:
                self.turn(batch)
            self.step += 1


LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), max_size=60)


@given(LENGTHS, st.integers(1, 3), st.integers(1, 4), st.integers(1, 16), st.booleans())
@settings(max_examples=200, deadline=None)
def test_everything_runs_once_in_level_slots(lengths, slots, workers, batch, stabilizing) -> None:
    starts = LoadStabilizing(LAYOUT, max_batch_size=batch, spread=slots * workers) if stabilizing else Greedy(batch)
    placement = Placement(LAYOUT, {rank + 1: (12,) for rank in range(workers)})
    seqs = [make_seq(i, prompt_len, new) for i, (prompt_len, new) in enumerate(lengths)]
    worker = Worker(Admission(placement, iter(seqs), starts, max_batch_size=batch, num_slots=slots))
    worker.run(40 * len(lengths) + 10)
    assert sorted(worker.done) == list(range(len(lengths)))
    assert all(placement.free_blocks(rank) == (12,) for rank in placement.owners)
    assert not any(map(len, worker.batches))


def test_slots_level_out_again_when_one_empties() -> None:
    seqs = [make_seq(i, 5, new) for i, new in enumerate([3, 30] * 8)]
    admission = Admission(Placement(LAYOUT, {1: (200,)}), iter(seqs), Greedy(16), max_batch_size=16, num_slots=2)
    worker = Worker(admission)
    worker.turn(worker.batches[0])  # admits
    for batch, new in zip(worker.batches, (3, 30), strict=True):  # all short ones in one slot
        batch.add(seq for seq in admission._ready if seq.max_new_tokens == new)
        admission._decoding.update(seq.seq_id for seq in batch.seqs)
    admission._ready.clear()
    worker.step = 1
    worker.run(40)
    late = [rows for step, _, rows, _ in worker.rows if 6 <= step < 28]
    assert set(late) == {4}
    assert sorted(worker.done) == list(range(16))


def test_slots_and_owners_are_level_with_long_tailed_lengths() -> None:
    rng = np.random.default_rng(0)
    prompts, news = (np.clip(rng.lognormal(mu, 1, 1500), 2, 1500).astype(int) for mu in (4.5, 5))
    seqs = [make_seq(i, *lengths) for i, lengths in enumerate(zip(prompts.tolist(), news.tolist(), strict=True))]
    placement = Placement(LAYOUT, dict.fromkeys((1, 2, 3), (10**6,)))
    worker = Worker(Admission(placement, iter(seqs), Greedy(96), max_batch_size=96, num_slots=2))
    worker.run(2000)
    of_steps: dict[int, list[Counter]] = {}
    for step, _, rows, loads in worker.rows:
        if rows == 48:
            of_steps.setdefault(step, []).append(loads)
    steady = [loads for step, loads in of_steps.items() if step > 300 and len(loads) == 2]
    assert len(steady) > 500
    by_owner = np.array([[sum(slot[owner] for slot in slots) for owner in (1, 2, 3)] for slots in steady])
    by_slot = np.array([[sum(slot.values()) for slot in slots] for slots in steady])
    for loads in (by_owner, by_slot):
        assert np.mean(loads.max(axis=1) / loads.mean(axis=1)) < 1.05


def test_owners_are_spread_within_each_slot() -> None:
    admission = make_admission([5] * 8, workers=2, batch=8, slots=2)
    while (seq := admission.admit(0)) is not None:
        admission.prefilled(seq)
    batches = [MiniBatch(0), MiniBatch(1)]
    for batch in batches:
        admission.refill(batch, batches, 0)
        assert Counter(seq.owner for seq in batch.seqs) == {1: 2, 2: 2}
