"""The S-worker's end of `transport.base` over MPI non-blocking collectives (see `transport.mpi_comms`)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fastdecode_hpc.schedule.placement import row_counts
from fastdecode_hpc.transport.base import (
    Ints,
    PlanKind,
    Rows,
    Segment,
    StepPlan,
    StepReport,
    TransportTimes,
    decode_report,
    report_words,
)
from fastdecode_hpc.transport.clocks import Clocks
from fastdecode_hpc.transport.control import no_run
from fastdecode_hpc.transport.link_times import link_times
from fastdecode_hpc.transport.mpi import MPI, S_RANK, World
from fastdecode_hpc.transport.mpi_clocks import ClockAsker
from fastdecode_hpc.transport.mpi_comms import Comms, WireShape
from fastdecode_hpc.transport.mpi_progress import Pending, Progress

MAX_KV_UNDER_WAY = 256 << 20  # bytes of prompt K/V that may be in flight


def displacements(counts: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """MPI's displacements of contiguous counts."""
    return np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int32)


@dataclass(slots=True)
class _SSlot:
    """The S-worker's buffers and messages of one slot."""

    qkv: Rows
    out: Rows
    counts: npt.NDArray[np.int32]
    displs: npt.NDArray[np.int32]
    reports: npt.NDArray[np.float64]  # [size, report_words]
    num_rows: int = 0
    owners: str = ""  # of those rows, in words
    plan_sent: list[Pending] = field(default_factory=list)
    scatter: Pending | None = None
    gather: Pending | None = None
    awaited: bool = False  # rows are out and not back
    report: Pending | None = None
    t_posted: list[float] = field(default_factory=list)  # of each layer's scatter
    behind_kv: list[set[int]] = field(default_factory=list)  # ranks to which prompt K/V was leaving then
    t_asked: list[float] = field(default_factory=list)  # when its output was asked for
    t_back: list[float] = field(default_factory=list)  # when that was there
    times: TransportTimes = field(default_factory=TransportTimes)


@dataclass(slots=True)
class _KvSend:
    """Prompt K/V given to the transport."""

    num_bytes: int
    owner: int
    sending: Pending | None = None  # from when its rows are ready

    def is_done(self) -> bool:
        return self.sending is not None and self.sending.t_done is not None


class MpiSEnd:
    """The S-worker's end (`transport.base.SEnd`).

    Parameters
    ----------
    world : World
    shape : WireShape
    progress : Progress
    clocks : Clocks
        Of all ranks; kept aligned while this end is used.
    """

    def __init__(
        self,
        world: World,
        shape: WireShape,
        progress: Progress,
        clocks: Clocks,
    ) -> None:
        self.size = world.size
        self.shape = shape
        self.progress = progress
        self._world = world
        self._control = world.control
        self._comms = Comms(world, shape)
        self._clocks, self._asker = clocks, ClockAsker(self._comms.reports, progress, clocks)
        self._slots: dict[int, _SSlot] = {}
        self._kv_sends: deque[_KvSend] = deque()
        self._kv_bytes = 0
        self._kv_leaving: dict[int, _KvSend] = {}  # rank |-> the last that was given for it, until it has left

    def describe_with(self, describe: Callable[[], str]) -> None:
        self._control.describe = describe

    def bind(self, slot: int, qkv: Rows, out: Rows) -> None:
        counts = np.zeros(self.size, np.int32)
        reports = np.zeros((self.size, report_words(self.shape.num_layers)))
        self._slots[slot] = _SSlot(qkv, out, counts, counts.copy(), reports)

    def send_plan(self, slot: int, plan: StepPlan) -> None:
        state, comm = self._slots[slot], self._comms.slots[slot]
        self._control.alive()
        for pending in state.plan_sent:
            self.progress.wait(pending, f"the last plan of slot {slot} to leave")
        messages = [plan.header()] + ([payload] if len(payload := plan.payload()) else [])
        state.plan_sent = [self._post_bcast(comm, message) for message in messages]
        self._kv_leaving = {rank: kv_send for rank, kv_send in self._kv_leaving.items() if not kv_send.is_done()}
        state.num_rows = plan.num_rows
        state.counts[:] = row_counts(plan.owners.tolist(), self.size)
        state.displs[:] = displacements(state.counts)
        state.owners = _ranks_of(state.counts)
        state.t_posted, state.behind_kv, state.t_asked, state.t_back = [], [], [], []
        if plan.kind is not PlanKind.STOP:
            mine, reports = state.reports[S_RANK], state.reports
            state.report = self.progress.post(
                lambda: self._comms.reports.Igather(MPI.IN_PLACE, reports, root=S_RANK), mine
            )

    def _post_bcast(self, comm: MPI.Intracomm, message: Ints) -> Pending:
        return self.progress.post(lambda: comm.Ibcast(message, root=S_RANK), message)

    def scatter_qkv(self, slot: int, ready: Callable[[], bool]) -> None:
        state, comm, types = self._slots[slot], self._comms.slots[slot], self._comms
        self._control.alive()
        state.awaited, state.gather = True, None

        def start() -> None:
            leaving = list(self._kv_leaving.items())  # this may be the progress thread
            state.behind_kv.append({rank for rank, kv_send in leaving if not kv_send.is_done()})
            state.t_posted.append(time.perf_counter())
            send = [state.qkv, state.counts, state.displs, types.qkv_type]
            state.scatter = self.progress.post(lambda: comm.Iscatterv(send, MPI.IN_PLACE, root=S_RANK), send)
            receive = [state.out, state.counts, state.displs, types.out_type]
            state.gather = self.progress.post(lambda: comm.Igatherv(MPI.IN_PLACE, receive, root=S_RANK), receive)

        self.progress.post_when(ready, start)

    def wait_out(self, slot: int) -> Rows | None:
        state = self._slots[slot]
        if not state.awaited:
            return None
        state.t_asked.append(time.perf_counter())
        self.progress.wait_until(
            lambda: state.gather is not None and state.gather.t_done is not None,
            f"attention output of slot {slot} from {state.owners}",
        )
        self.progress.wait(state.scatter, f"q, k, v of slot {slot} to leave")
        assert state.gather is not None and state.gather.t_done is not None
        state.t_back.append(state.gather.t_done)
        state.awaited = False
        return state.out[: state.num_rows]

    def send_kv(self, segments: list[Segment], rows: Rows, ready: Callable[[], bool]) -> None:
        owner = segments[0].owner
        message, kv_send = [rows, len(rows), self._comms.kv_type], _KvSend(rows.nbytes, owner)
        self._control.alive()

        def start() -> None:
            kv_send.sending = self.progress.post(lambda: self._comms.prefill.Isend(message, dest=owner), message)

        # Receives are matched in order, and deferred posts keep theirs: no other send uses this communicator.
        self.progress.post_when(ready, start)
        self._kv_sends.append(kv_send)
        self._kv_leaving[owner] = kv_send
        self._kv_bytes += rows.nbytes
        self._retire_kv(MAX_KV_UNDER_WAY)

    def _retire_kv(self, limit: int) -> None:
        """Forget what has arrived, and wait while more than `limit` bytes are under way."""
        while self._kv_sends and (self._kv_bytes > limit or self._kv_sends[0].is_done()):
            kv_send = self._kv_sends.popleft()
            if not kv_send.is_done():
                self.progress.wait_until(kv_send.is_done, f"prompt K/V to reach rank {kv_send.owner}")
            self._kv_bytes -= kv_send.num_bytes

    def wait_reports(self, slot: int) -> dict[int, StepReport]:
        state = self._slots[slot]
        if state.report is None:
            return {}
        self.progress.wait(state.report, f"reports of slot {slot} from all ranks")
        state.report = None
        reports = {rank: decode_report(state.reports[rank]) for rank in range(1, self.size)}
        for rank, report in reports.items():
            for times in report.layer_times:
                times -= self._clocks.offsets_s[rank]
        state.times = self._transport_times(state, reports)
        self._asker.poke()
        return reports

    def transport_times(self, slot: int) -> TransportTimes:
        return self._slots[slot].times

    @property
    def latencies(self) -> dict[int, float]:
        return {rank: self._clocks.latencies_s[rank] for rank in range(1, self.size)}

    def layer_times(self, slot: int) -> tuple[list[float], list[float], list[float]]:
        state = self._slots[slot]
        return state.t_posted, state.t_asked, state.t_back

    def _transport_times(self, state: _SSlot, reports: dict[int, StepReport]) -> TransportTimes:
        """What the messages of the step took, from both sides' records."""
        busy = {rank: report for rank, report in reports.items() if state.counts[rank]}
        if not busy or not state.t_back:
            return TransportTimes()
        arrived = np.max([report.t_arrived for report in busy.values()], axis=0)
        posted = np.max([report.t_posted for report in busy.values()], axis=0)
        now = time.perf_counter()
        out, asked, back = np.array(state.t_posted), np.array(state.t_asked), np.array(state.t_back)
        return TransportTimes(
            _overlap(out, arrived) + _overlap(posted, back),
            _overlap(np.maximum(asked, posted), back),
            {rank: _overlap(np.maximum(report.t_asked, out), report.t_arrived) for rank, report in busy.items()},
            link_times(
                out, busy, state.behind_kv, self.latencies, {rank: self._clocks.doubt(rank, now) for rank in busy}
            ),
        )

    @property
    def t_wait(self) -> float:
        return self.progress.t_wait

    def poke(self) -> None:
        self.progress.poke()

    def close(self) -> None:
        self._retire_kv(-1)
        for state in self._slots.values():
            for pending in (*state.plan_sent, state.report):
                self.progress.wait(pending, "the last plans and reports")
        self._asker.close()
        self.progress.stop()
        self._world.barrier("all ranks to end this run")
        self.describe_with(no_run)
        self._comms.free()


def _ranks_of(counts: npt.NDArray[np.int32]) -> str:
    """The ranks with rows, in words."""
    ranks = np.flatnonzero(counts).tolist()
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"


def _overlap(starts: npt.NDArray[np.float64], stops: npt.NDArray[np.float64]) -> float:
    """Seconds from starts to stops, where these are later."""
    return float(np.maximum(stops - starts, 0.0).sum())
