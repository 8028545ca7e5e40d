"""What crosses between the S-worker and the R-workers, and the two ends it crosses between.

The S-worker's end and the R-worker's end are protocols; `transport.mpi` and `transport.local`
implement both. Messages per step and slot, in order: one plan, then for every layer one scatter of
``[q|k|v]`` rows and one gather of output rows, then one report. Prompt K/V travels beside them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.generic]  # [num_rows, row_size] of the wire type (bf16 as uint16)
Ints = npt.NDArray[np.int64]

HEADER_LEN = 8  # int64 words of a plan's header
REPORT_FIELDS = 5  # float64 words of a report before its times of each layer
LAYER_TIMES = 4

WIRE_NUMPY = {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16}


class PlanKind(enum.IntEnum):
    """What a step of a slot consists of."""

    RUN = 0  # rows to attend
    EMPTY = 1  # no rows: keeps an idle run alive, may carry prefill units
    STOP = 2  # the end of this slot


class Segment(NamedTuple):
    """K/V of consecutive prompt tokens of one layer, on its way to its owner."""

    unit: int  # segments of one unit and owner travel in one message
    seq_id: int
    owner: int
    layer: int
    start: int
    num_tokens: int


def _no_ints() -> Ints:
    return np.zeros(0, np.int64)


@dataclass(slots=True)
class StepPlan:
    """What one step of one slot will do; receivers derive from it every message that follows.

    Attributes
    ----------
    seq_ids, owners, positions : int64 arrays
        One entry a row, ordered by owner; `positions` are where the rows' K/V go.
    new : int64 array
        Sequences that decode for the first time: their prefill has been listed completely before.
    finished : int64 array
        Sequences whose KV can go.
    segments : list of Segment
        Prompt K/V sent before this slot's next plan, in the order of sending.
    """

    kind: PlanKind
    step: int
    seq_ids: Ints = field(default_factory=_no_ints)
    owners: Ints = field(default_factory=_no_ints)
    positions: Ints = field(default_factory=_no_ints)
    new: Ints = field(default_factory=_no_ints)
    finished: Ints = field(default_factory=_no_ints)
    segments: list[Segment] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return len(self.seq_ids)

    def header(self) -> Ints:
        """The fixed-size message that comes first: kind, step, the counts and the payload's bytes."""
        counts = (self.num_rows, len(self.new), len(self.finished), len(self.segments))
        head = np.zeros(HEADER_LEN, np.int64)
        head[:7] = (self.kind, self.step, *counts, payload_words(counts) * 8)
        return head

    def payload(self) -> Ints:
        """The second message: everything else, as int64 words."""
        segments = np.array(self.segments, np.int64).ravel()
        return np.concatenate([self.seq_ids, self.owners, self.positions, self.new, self.finished, segments])


def payload_words(counts: Iterable[int]) -> int:
    """Int64 words of a payload with these numbers of rows, new, finished and segments."""
    rows, new, finished, segments = counts
    return 3 * rows + new + finished + len(Segment._fields) * segments


def decode_plan(header: Ints, payload: Ints) -> StepPlan:
    """Rebuild a plan from its two messages."""
    kind, step, rows, new, finished, segments = (int(x) for x in header[:6])
    borders = np.cumsum([rows, rows, rows, new, finished])
    seq_ids, owners, positions, new_ids, finished_ids, rest = np.split(payload, borders)
    table = rest.reshape(segments, len(Segment._fields)).tolist()
    return StepPlan(
        PlanKind(kind), step, seq_ids, owners, positions, new_ids, finished_ids, [Segment(*row) for row in table]
    )


@dataclass(slots=True)
class StepReport:
    """What one R-worker tells after a step of a slot. Times in seconds, on its own clock where absolute.

    `t_turn` is the part of `t_r_part` that went into the step's work list.
    `t_asked`, `t_arrived` and `t_posted` hold, for each layer, when the worker was free to take its q, k, v, when they
    had arrived, and when its output was posted; `t_before` when the message before them, q, k, v of whichever slot or
    prompt K/V, had arrived. They stay zero where the worker had no rows.
    """

    t_r_part: float
    t_turn: float
    t_wait: float
    free_blocks: int
    stop_request: bool
    t_asked: npt.NDArray[np.float64]
    t_arrived: npt.NDArray[np.float64]
    t_posted: npt.NDArray[np.float64]
    t_before: npt.NDArray[np.float64]

    @property
    def layer_times(self) -> tuple[npt.NDArray[np.float64], ...]:
        """All times of layers, in the order of the message."""
        return self.t_asked, self.t_arrived, self.t_posted, self.t_before

    def encode(self, into: npt.NDArray[np.float64]) -> None:
        """Write the report into a buffer of `report_words` float64."""
        into[:REPORT_FIELDS] = (
            self.t_r_part,
            self.t_turn,
            self.t_wait,
            self.free_blocks,
            self.stop_request,
        )
        into[REPORT_FIELDS:].reshape(LAYER_TIMES, -1)[:] = self.layer_times


def report_words(num_layers: int) -> int:
    """Float64 words of a report."""
    return REPORT_FIELDS + LAYER_TIMES * num_layers


def decode_report(words: npt.NDArray[np.float64]) -> StepReport:
    """Rebuild a report from its message."""
    times = words[REPORT_FIELDS:].reshape(LAYER_TIMES, -1).copy()
    t_r_part, t_turn, t_wait = words[:3].tolist()
    return StepReport(t_r_part, t_turn, t_wait, int(words[3]), bool(words[4]), *times)


@dataclass(frozen=True, slots=True)
class TransportTimes:
    """What the messages of one step of a slot took, in seconds.

    Attributes
    ----------
    t_transport : float
        From the last sender's post to completion at the last receiver, summed over layers and both ways.
    t_exposed : float
        The part of the S-worker's waits for output after that had been posted: neither part was working on the slot.
    ranks_exposed : dict of int to float
        The same of each R-worker's waits for q, k, v.
    ranks_link : dict of int to float
        Seconds that q, k, v of a layer were on their way to each R-worker (`link_times`).
    """

    t_transport: float = 0.0
    t_exposed: float = 0.0
    ranks_exposed: dict[int, float] = field(default_factory=dict)
    ranks_link: dict[int, float] = field(default_factory=dict)


PrefillSink = Callable[[list[Segment], Rows], None]  # segments of one message and their [k|v] rows


class SEnd(Protocol):
    """The S-worker's end."""

    @property
    def size(self) -> int:
        """Ranks that can own rows, the S-worker's own included."""

    def describe_with(self, describe: Callable[[], str]) -> None:
        """Say how to find out what this rank is doing, for the message when a wait was in vain."""

    def bind(self, slot: int, qkv: Rows, out: Rows) -> None:
        """Give a slot its buffers, ``[max_rows, qkv_size]`` and ``[max_rows, q_size]``, for the whole run."""

    def send_plan(self, slot: int, plan: StepPlan) -> None:
        """Start a step of a slot on every R-worker."""

    def scatter_qkv(self, slot: int, ready: Callable[[], bool]) -> None:
        """Send the slot's rows to their owners, as soon as `ready` says that the buffer is filled."""

    def wait_out(self, slot: int) -> Rows | None:
        """Rows of attention output of the last scatter, or None if there was none."""

    def send_kv(self, segments: list[Segment], rows: Rows, ready: Callable[[], bool]) -> None:
        """Send K/V of one unit's segments, all of one owner, when `rows` is `ready`; it is not changed afterwards.

        Messages leave in the order of the calls.
        """

    def wait_reports(self, slot: int) -> dict[int, StepReport]:
        """Reports of the slot's last step by rank, times on the S-worker's clock; empty before the first."""

    @property
    def t_wait(self) -> float:
        """Seconds spent waiting for other ranks so far."""

    def transport_times(self, slot: int) -> TransportTimes:
        """Of the slot's last reported step."""

    @property
    def latencies(self) -> dict[int, float]:
        """Seconds of a short message to each other rank."""

    def layer_times(self, slot: int) -> tuple[list[float], list[float], list[float]]:
        """Times of each layer of the slot's last reported step: q, k, v posted, output asked for, output there.

        Empty where the step had no rows. The lists don't change afterwards.
        """

    def poke(self) -> None:
        """Let messages move; called between bounded pieces of work."""

    def close(self) -> None:
        """End in order, after every slot has had its stop plan."""


class REnd(Protocol):
    """An R-worker's end."""

    @property
    def rank(self) -> int:
        """Which rows and segments are this worker's."""

    def describe_with(self, describe: Callable[[], str]) -> None:
        """Say how to find out what this rank is doing, for the message when a wait was in vain."""

    def bind(self, sink: PrefillSink) -> None:
        """Say where arrived prompt K/V goes; called from the worker's own thread, inside waits and pokes."""

    def wait_plan(self, slot: int) -> StepPlan:
        """The slot's next plan."""

    def expect(self, segments: list[Segment]) -> None:
        """Let the prompt K/V that a plan lists reach the sink; what the plan frees must be free by then."""

    def wait_qkv(self, slot: int) -> Rows:
        """Rows of the slot's next layer that this worker owns."""

    def out_rows(self, slot: int) -> Rows:
        """Where this worker's output rows go before `send_out`."""

    def send_out(self, slot: int) -> None:
        """Send the output rows."""

    def wait_prefill(self, seq_ids: Ints | None = None) -> None:
        """Come back when all expected K/V of these sequences (None: of all) has reached the sink."""

    def send_report(self, slot: int, report: StepReport) -> None:
        """End a step of a slot."""

    def layer_times(self, slot: int) -> npt.NDArray[np.float64]:
        """Times of each layer of the slot's running step: asked, arrived, posted, before; ``[4, num_layers]``."""

    @property
    def t_wait(self) -> float:
        """Seconds spent in all `wait_*` so far."""

    def poke(self) -> None:
        """Let messages move; called between bounded pieces of work."""
