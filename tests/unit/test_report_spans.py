"""Which steps' spans are kept, and that they are those of the stages."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdecode_hpc.report import spans
from fastdecode_hpc.report.schema import SPAN_KINDS
from fastdecode_hpc.report.spans import GROUP_STEPS, MAX_GROUPS, SpanGroups, group_spans
from fastdecode_hpc.timing import StageTimes, StepTimes
from report_files import MadeUpRun

NO_STAGES = StageTimes(0.0, [], [], [], {}, [])


def kept_steps(rows, num_slots: int = 2, num_spans: int = 100) -> list[list[int]]:
    """Steps of each group, for a run with these many rows in all slots."""
    groups, found = SpanGroups(), []

    def take(group: list[StepTimes]) -> None:
        if group:
            found.append(sorted({times.step for times in group}))
            assert len(group) == num_slots * len(found[-1])  # all slots of every step
            groups.bound(num_spans)

    for step, count in enumerate(rows):
        for slot in range(num_slots):
            of_slot = count // num_slots + (slot < count % num_slots)
            take(groups.add(StepTimes(step, slot, 0.0, of_slot, 0, 0, stages=NO_STAGES)))
    take(groups.take())
    return found


@given(rows=st.lists(st.integers(0, 300), max_size=400), num_slots=st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_groups_are_of_consecutive_steps_and_begin_with_the_first_rows(rows: list[int], num_slots: int) -> None:
    kept = kept_steps(rows, num_slots)
    assert all(group == list(range(group[0], group[-1] + 1)) for group in kept)
    assert all(len(group) == GROUP_STEPS for group in kept[:-1])  # the run's end may cut the last one
    flat = [step for group in kept for step in group]
    assert flat == sorted(set(flat)) and len(kept) <= MAX_GROUPS
    if any(rows):
        first = next(step for step, count in enumerate(rows) if count)
        assert flat[0] - first in (0, 1)  # rows of a later slot are known with the next step


def test_a_growing_batch_is_seen_again_when_it_has_doubled() -> None:
    kept = kept_steps([min(256, 1 + step) for step in range(600)])
    largest = [max(1, group[0]) for group in kept]
    assert largest[0] == 1 and any(step >= 128 for step in largest)
    gaps = np.diff([group[0] for group in kept])
    assert gaps.min() >= GROUP_STEPS


@pytest.mark.parametrize("num_spans", [100, 200_000, 10**7])
def test_a_long_run_keeps_few_groups_to_its_end(num_spans: int) -> None:
    kept = kept_steps((8 for _ in range(200_000)), 1, num_spans)
    most = max(16, min(64, spans.MAX_SPANS // num_spans))
    assert most / 2 <= len(kept) <= most
    assert kept[-1][0] > 80_000


@pytest.mark.parametrize(
    "run", [MadeUpRun(), MadeUpRun(num_ranks=1), MadeUpRun(num_slots=1, num_ranks=2, num_layers=5)]
)
def test_spans_are_those_of_the_stages(run: MadeUpRun) -> None:
    steps = list(run.steps())[: 4 * run.num_slots]
    by_rank = group_spans(steps)
    assert sorted(by_rank) == list(range(run.num_ranks))
    for columns in by_rank.values():
        assert (np.diff(columns["t_start"]) >= 0).all()
        for code in range(len(SPAN_KINDS)):
            mine = columns["kind"] == code
            assert (columns["t_end"][mine] >= columns["t_start"][mine]).all()
            assert (columns["t_start"][mine][1:] >= columns["t_end"][mine][:-1] - 1e-12).all()
    stages = 4 * run.num_slots * run.num_layers
    for name, rank, seconds in (("s_part", 0, run.t_s), ("head", 0, run.t_head)):
        lengths = lengths_of(by_rank[rank], name)
        assert len(lengths) == (stages if name == "s_part" else 4 * run.num_slots)
        if name == "s_part":
            assert lengths[1:] == pytest.approx(np.full(len(lengths) - 1, seconds), abs=1e-9)
    for rank in run.owners:
        lengths = lengths_of(by_rank[rank], "r_part")
        assert len(lengths) == stages
        assert lengths.sum() == pytest.approx(sum(times.ranks[rank].t_r_part for times in steps))
    assert len(lengths_of(by_rank[0], "prefill")) == run.num_slots * run.prefill_steps
    if run.num_ranks > 1:
        waits = lengths_of(by_rank[0], "wait").sum()
        assert waits == pytest.approx(sum(times.t_wait for times in steps))
        assert lengths_of(by_rank[0], "exposed").sum() <= waits + 1e-12
    else:
        assert not len(lengths_of(by_rank[0], "wait"))


def lengths_of(columns, kind: str) -> np.ndarray:
    mine = columns["kind"] == SPAN_KINDS.index(kind)
    return columns["t_end"][mine] - columns["t_start"][mine]


def test_what_a_device_got_ahead_begins_when_it_can() -> None:
    """On a GPU the stages of both slots are under way when the host has just asked for the second."""
    posted = {0: [1.0, 3.0], 1: [2.0, 4.0]}
    group = []
    for slot in (0, 1):
        stages = StageTimes(0.0, posted[slot], [0.1, 0.2], [0.1, 0.2], {}, [])
        group.append(StepTimes(0, slot, 0.0, 1, 1, 0, stages=stages, t_end=5.0))
    columns = group_spans(group)[0]
    mine = columns["kind"] == 0
    assert columns["t_start"][mine].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert columns["t_end"][mine].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_steps_without_rows_have_no_spans() -> None:
    assert not len(group_spans([StepTimes(0, 0, 0.0, 0, 0, 0, stages=NO_STAGES)]).get(0, {}).get("kind", []))


def test_a_worker_without_rows_only_waits() -> None:
    (times, *_) = MadeUpRun(num_slots=1).steps()
    idle = times.ranks[2]
    times.ranks[2] = type(idle)(0.0, idle.t_wait, 0.0, idle.free_blocks, 0)
    by_rank = group_spans([times])
    assert len(lengths_of(by_rank[1], "r_part")) and not len(lengths_of(by_rank[2], "r_part"))
    assert len(lengths_of(by_rank[2], "wait"))


def test_the_report_holds_the_spans_of_the_kept_steps_only(tmp_path: Path) -> None:
    run = MadeUpRun(num_steps=60)
    with h5py.File(run.write(tmp_path / "run.h5")) as file:
        for rank in range(3):
            columns = {name: data[:] for name, data in file[f"ranks/{rank}/spans"].items()}
            kept = set(columns["step"].tolist())
            assert kept >= {0, 1, 2, 3} and len(kept) < 30
            kind = "r_part" if rank else "s_part"
            assert len(lengths_of(columns, kind)) == run.num_layers * run.num_slots * len(kept)
