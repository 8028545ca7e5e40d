"""What each rank did when, in a few steps of a run: which steps are kept, and their spans as arrays. No HDF5."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fastdecode_hpc.report.schema import SPAN_KINDS, SPAN_UNITS
from fastdecode_hpc.timing import StageTimes, StepTimes

GROUP_STEPS = 4
LEAST_GAP = 16  # steps from the end of a group to the start of the next
MAX_GROUPS = 64
MIN_GROUPS = 16
MAX_SPANS = 4_000_000  # in all; a run on many ranks keeps fewer groups
GAP_GROUPS = 20  # the gap is this over the most groups times the step's number: 10^6 steps have room

S_RANK = 0

Floats = npt.NDArray[np.float64]
Columns = dict[str, npt.NDArray[np.generic]]  # one of `SPAN_UNITS` each


class SpanGroups:
    """Chooses groups of consecutive steps as they end.

    The first group begins with the first step that has rows, further ones whenever the batch has doubled since, and
    then at gaps that grow with the run, so that the number of groups grows with the logarithm of its steps only.
    """

    def __init__(self) -> None:
        self.max_groups = MAX_GROUPS
        self._num_groups = 0
        self._group: list[StepTimes] = []
        self._stop = 0  # step at which the group ends
        self._next = 0  # step from which on another may begin
        self._num_rows = 0  # when the last group began
        self._step, self._rows, self._rows_before = -1, 0, 0  # of the running step, and of the one before

    def add(self, times: StepTimes) -> list[StepTimes]:
        """Take a slot's step; a group that is complete, or an empty list.

        Steps come in order, those of all slots before the next.
        """
        done: list[StepTimes] = []
        if times.step != self._step:
            self._step, self._rows_before, self._rows = times.step, self._rows, 0
            if self._group and times.step >= self._stop:
                done = self.take()
            if not self._group and self._is_wanted(max(self._rows_before, times.num_rows)):
                self._begin(times.step)
        self._rows += times.num_rows
        if self._step < self._stop and times.stages is not None:
            self._group.append(times)
        return done

    def take(self) -> list[StepTimes]:
        """The group, be it complete or not."""
        done, self._group = self._group, []
        return done

    def bound(self, num_spans: int) -> None:
        """Say how many spans a group has."""
        self.max_groups = min(MAX_GROUPS, max(MIN_GROUPS, MAX_SPANS // max(1, num_spans)))

    def _is_wanted(self, num_rows: int) -> bool:
        if not num_rows or self._num_groups >= self.max_groups or self._step < self._stop:
            return False
        has_doubled = num_rows >= 2 * self._num_rows and self._num_groups < self.max_groups // 4
        return has_doubled or self._step >= self._next

    def _begin(self, step: int) -> None:
        self._stop = step + GROUP_STEPS
        self._next = self._stop + max(LEAST_GAP, step * GAP_GROUPS // self.max_groups)
        self._num_rows = max(self._rows_before, 1)
        self._num_groups += 1


def group_spans(group: Sequence[StepTimes]) -> dict[int, Columns]:
    """Spans of each rank in some steps, ordered by start; seconds since the run's start.

    Spans of one kind and rank don't overlap: what a device was given ahead counts from when it can have begun.
    """
    parts: dict[int, list[Columns]] = defaultdict(list)
    for times in group:
        assert times.stages is not None
        for rank, blocks in _spans_of(times, times.stages).items():
            parts[rank] += [_columns(times, *block) for block in blocks]
    return {rank: _in_order({name: np.concatenate([p[name] for p in of_rank]) for name in SPAN_UNITS})
            for rank, of_rank in parts.items() if of_rank}  # fmt: skip


Block = tuple[str, Floats, Floats, npt.NDArray[np.int64]]  # kind, starts, ends, layers


def _spans_of(times: StepTimes, stages: StageTimes) -> dict[int, list[Block]]:
    """Spans of one step of one slot, by rank."""
    ranks = {rank: np.asarray(of_rank) - stages.t_origin for rank, of_rank in stages.ranks.items()}
    busy = {rank: of_rank for rank, of_rank in ranks.items() if times.ranks[rank].load_tokens}
    own = np.array([stages.posted, stages.asked, stages.back]) - stages.t_origin
    spans: dict[int, list[Block]] = {S_RANK: [*_own_spans(times, own, busy), *_prefill_spans(stages)]}
    for rank, of_rank in ranks.items():
        spans.setdefault(rank, []).extend(_r_spans(of_rank, own[0], has_rows=rank in busy))
    return spans


def _own_spans(times: StepTimes, own: Floats, busy: Mapping[int, Floats]) -> list[Block]:
    """The S-Part's spans: from attention output to q, k, v, and waits for the former."""
    posted, asked, back = own
    if not posted.size:
        return []
    got = np.maximum(asked, back)
    layers = np.arange(posted.size)
    blocks = [
        ("s_part", np.concatenate([[times.t_start], got[:-1]]), posted, layers),
        ("head", got[-1:], np.array([times.t_end]), layers[-1:]),
    ]
    if S_RANK in times.ranks:  # one process: what looks like a wait is the R-Part at work
        return blocks
    blocks.append(_where_later("wait", asked, back))
    if busy:
        out = np.max([of_rank[2] for of_rank in busy.values()], axis=0)
        blocks.append(_where_later("exposed", np.maximum(asked, out), back))
    return blocks


def _r_spans(of_rank: Floats, sent: Floats, *, has_rows: bool) -> list[Block]:
    """An R-worker's spans: attention from q, k, v to output, and waits for the former."""
    asked, arrived, posted = of_rank
    if not sent.size or not posted.all():
        return []
    blocks = [_where_later("wait", asked, arrived), _where_later("exposed", np.maximum(asked, sent), arrived)]
    if has_rows:
        blocks.append(("r_part", np.maximum(asked, arrived), posted, np.arange(posted.size)))
    return blocks


def _prefill_spans(stages: StageTimes) -> list[Block]:
    starts, ends = np.array(stages.prefill).reshape(-1, 2).T - stages.t_origin
    return [("prefill", starts, ends, np.full(starts.size, -1))] if starts.size else []


def _where_later(kind: str, starts: Floats, ends: Floats) -> Block:
    """Spans of the layers in which `ends` is later; the others had nothing of the kind."""
    layers = np.flatnonzero(ends > starts)
    return kind, starts[layers], ends[layers], layers


def _columns(times: StepTimes, kind: str, starts: Floats, ends: Floats, layers: npt.NDArray[np.int64]) -> Columns:
    return {
        "t_start": starts,
        "t_end": ends,
        "kind": np.full(starts.size, SPAN_KINDS.index(kind), np.int8),
        "step": np.full(starts.size, times.step),
        "slot": np.full(starts.size, times.slot),
        "layer": layers,
    }


def _in_order(columns: Columns) -> Columns:
    """Sort by start, and let spans of one kind begin no earlier than the one before has ended."""
    order = np.lexsort((columns["t_end"], columns["kind"]))
    columns = {name: values[order] for name, values in columns.items()}
    starts, ends, kinds = columns["t_start"], columns["t_end"], columns["kind"]
    same = kinds[1:] == kinds[:-1]
    starts[1:][same] = np.maximum(starts[1:], ends[:-1])[same]
    order = np.argsort(starts, kind="stable")
    return {name: values[order] for name, values in columns.items()}
