"""Continuous batching: who starts, where, and that nobody starves."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode_hpc.schedule.admission import Admission
from fastdecode_hpc.schedule.placement import KVLayout, LayerGroup, Placement
from fastdecode_hpc.sequence import MiniBatch, SamplingParams, Sequence

LAYOUT = KVLayout(8, (LayerGroup((0,), 1, 8, "fp16", "fp16"),))


def make_seq(seq_id: int, prompt_len: int = 5, max_new_tokens: int = 3) -> Sequence:
    return Sequence(seq_id, seq_id, [1] * prompt_len, SamplingParams(), max_new_tokens)


def make_admission(lengths: list[int], *, blocks: int = 100, workers: int = 2, batch: int = 8, slots: int = 2):
    placement = Placement(LAYOUT, {rank + 1: (blocks,) for rank in range(workers)})
    seqs = [make_seq(i, length) for i, length in enumerate(lengths)]
    return Admission(placement, iter(seqs), max_batch_size=batch, num_slots=slots)


def test_no_more_than_the_batch_is_admitted_and_a_place_is_given_on() -> None:
    admission = make_admission([5] * 10, batch=4)
    running = [admission.admit() for _ in range(4)]
    assert [seq.seq_id for seq in running] == [0, 1, 2, 3]
    assert admission.admit() is None
    admission.finished(running[2])
    assert admission.admit().seq_id == 4


def test_a_long_sequence_is_not_overtaken() -> None:
    admission = make_admission([20, 60, 5], blocks=8, workers=1)
    first = admission.admit()
    assert admission.admit() is None  # 60 + 4 tokens need 8 blocks; 3 are taken
    admission.finished(first)
    assert admission.admit().seq_id == 1


def test_arrivals_are_read_one_ahead_only() -> None:
    read = []

    def arrivals():
        for i in range(100):
            read.append(i)
            yield make_seq(i)

    placement = Placement(LAYOUT, {1: (4,)})
    admission = Admission(placement, arrivals(), max_batch_size=50, num_slots=1)
    while admission.admit() is not None:
        pass
    assert len(read) == 3  # two fit, the third is known and waits


def test_closing_drops_what_waits() -> None:
    admission = make_admission([5] * 3)
    seq = admission.admit()
    admission.close()
    assert admission.admit() is None
    assert not admission.is_done()
    admission.finished(seq)
    assert admission.is_done()


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(1, 3), st.integers(1, 4), st.integers(1, 16))
@settings(max_examples=150)
def test_everything_runs_once_in_balanced_slots(lengths: list[int], slots: int, workers: int, batch: int) -> None:
    admission = make_admission(lengths, slots=slots, workers=workers, batch=batch, blocks=12)
    batches = [MiniBatch(slot) for slot in range(slots)]
    done: list[int] = []
    for round_ in range(10 * len(lengths) + 10):
        if admission.is_done():
            break
        while (seq := admission.admit()) is not None:
            admission.prefilled(seq)
        target = batches[round_ % slots]
        target.seqs += admission.joiners(target, sum(map(len, batches)))
        target.sort()
        assert len(target) <= admission.max_rows
        assert [seq.owner for seq in target.seqs] == sorted(seq.owner for seq in target.seqs)
        if target.seqs and round_ % 2:
            seq = target.seqs.pop(0)
            admission.finished(seq)
            done.append(seq.seq_id)
    while any(batches):
        seq = next(b for b in batches if len(b)).seqs.pop()
        admission.finished(seq)
        done.append(seq.seq_id)
        while (seq := admission.admit()) is not None:
            admission.finished(seq)
            done.append(seq.seq_id)
    while (seq := admission.admit()) is not None:
        admission.finished(seq)
        done.append(seq.seq_id)
    ready = admission.joiners(MiniBatch(0), 10**6)
    while ready:
        for seq in ready:
            admission.finished(seq)
            done.append(seq.seq_id)
        ready = admission.joiners(MiniBatch(0), 10**6)
    assert Counter(done) == Counter(range(len(lengths)))


def test_owners_are_spread_within_each_slot() -> None:
    admission = make_admission([5] * 8, workers=2, batch=8, slots=2)
    while (seq := admission.admit()) is not None:
        admission.prefilled(seq)
    first = admission.joiners(MiniBatch(0), 0)
    second = admission.joiners(MiniBatch(1), len(first))
    for joined in (first, second):
        assert Counter(seq.owner for seq in joined) == {1: 2, 2: 2}
