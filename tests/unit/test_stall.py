"""What counts as waiting in vain, by a clock that the tests turn."""

from __future__ import annotations

import pytest

from fastdecode_hpc.schedule.admission import Admission
from fastdecode_hpc.schedule.kv_layout import KVLayout, LayerGroup
from fastdecode_hpc.schedule.load_stabilizing import Greedy
from fastdecode_hpc.schedule.mini_batch import MiniBatch
from fastdecode_hpc.schedule.placement import Placement
from fastdecode_hpc.schedule.stall import StalledError, StallGuard, describe_run
from fastdecode_hpc.sequence import SamplingParams, Sequence
from fastdecode_hpc.timing import Patience

LAYOUT = KVLayout(8, (LayerGroup((0,), 1, 8, "fp16", "fp16"),))


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def ask(patience: Patience, clock: Clock, seconds: float, every: float = 0.5) -> bool:
    """Whether it was over at any time."""
    was_over = False
    for _ in range(round(seconds / every)):
        clock.now += every
        was_over |= patience.is_over()
    return was_over


def test_patience_ends_after_its_limit_and_is_renewed() -> None:
    clock = Clock()
    patience = Patience(10, clock=clock)
    assert not ask(patience, clock, 10)
    assert ask(patience, clock, 0.5)
    patience.renew()
    assert not ask(patience, clock, 10)


def test_time_in_which_the_process_did_not_run_hardly_counts() -> None:
    clock = Clock()
    patience = Patience(10, clock=clock)
    assert not ask(patience, clock, 5)
    clock.now += 36000  # suspended by the batch system
    assert not patience.is_over()
    assert not ask(patience, clock, 4)
    assert ask(patience, clock, 0.5)


def test_steps_in_which_nothing_happens_end_the_run_with_its_state() -> None:
    clock = Clock()
    guard = StallGuard(10, lambda: "step 7 of a test", clock=clock)
    for _ in range(100):
        clock.now += 0.5
        guard.check()
        guard.progressed()
    with pytest.raises(StalledError, match=r"for 10 s.*\n  step 7 of a test"):
        for _ in range(21):
            clock.now += 0.5
            guard.check()


def test_a_step_that_takes_long_is_no_stall() -> None:
    clock = Clock()
    guard = StallGuard(10, lambda: "", clock=clock)
    for _ in range(9):  # each reads from a slow file, then nothing is admitted
        clock.now += 500
        guard.check()


def test_the_state_of_a_run_in_words() -> None:
    lengths = [5, 5, 5, 200]
    seqs = [Sequence(i, i, [1] * length, SamplingParams(), 3) for i, length in enumerate(lengths)]
    placement = Placement(LAYOUT, {1: (5,), 2: (3,)})
    admission = Admission(placement, iter(seqs), Greedy(8), max_batch_size=8, num_slots=2)
    while (seq := admission.admit(0)) is not None and seq.seq_id < 2:
        admission.prefilled(seq)
    assert admission.admit(0) is None  # the fourth needs more than there is
    batches = [MiniBatch(0), MiniBatch(1)]
    admission.refill(batches[0], batches, 1)
    assert describe_run(admission, batches, 12) == (
        "step 12; sequences: the next one waits and needs 26 KV blocks, 1 prefilling, 1 ready, 1 decoding "
        "(of these 0 between two slots); rows: 1 in slot 0, 0 in slot 1; "
        "KV blocks not promised: 1 of rank 1, 1 of rank 2"
    )
