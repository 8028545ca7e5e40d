"""The two ends of `transport.base` over MPI non-blocking collectives.

Every slot has a communicator of its own, prompt K/V and reports have one each, so that none orders
another. Within one, every rank posts every collective in the same order, with count 0 where it has no
rows; the S-worker's rank has count 0 in all of them. Buffers, counts and displacements live as long as
the transport.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdecode_hpc.schedule.placement import row_counts
from fastdecode_hpc.transport.base import (
    HEADER_LEN,
    Ints,
    PlanKind,
    PrefillSink,
    Rows,
    Segment,
    StepPlan,
    StepReport,
    decode_plan,
    decode_report,
    payload_words,
    report_words,
)
from fastdecode_hpc.transport.mpi import MPI, S_RANK, Pending, Progress, World, row_type

MAX_KV_UNDER_WAY = 256 << 20  # bytes of prompt K/V that the S-worker may have in flight
MAX_KV_POSTED = 4  # receives of prompt K/V that an R-worker has posted at once


@dataclass(frozen=True, slots=True)
class WireShape:
    """Sizes that both ends agree on before they are made."""

    num_layers: int
    num_slots: int
    max_rows: int  # of one slot
    qkv_size: int
    q_size: int
    kv_size: int
    dtype: Any  # numpy type of the wire


class _Comms:
    """Duplicates of the world and the row types, made by all ranks together."""

    def __init__(self, world: World, shape: WireShape) -> None:
        self.slots = [world.comm.Dup() for _ in range(shape.num_slots)]
        self.prefill = world.comm.Dup()
        self.reports = world.comm.Dup()
        itemsize = np.dtype(shape.dtype).itemsize
        self.qkv_type = row_type(shape.qkv_size * itemsize)
        self.out_type = row_type(shape.q_size * itemsize)
        self.kv_type = row_type(2 * shape.kv_size * itemsize)

    def free(self) -> None:
        for comm in (*self.slots, self.prefill, self.reports):
            comm.Free()
        for datatype in (self.qkv_type, self.out_type, self.kv_type):
            datatype.Free()


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
    plan_sent: list[Pending] = field(default_factory=list)
    scatter: Pending | None = None
    gather: Pending | None = None
    awaited: bool = False  # rows are out and not back
    report: Pending | None = None
    t_posted: list[float] = field(default_factory=list)  # of each layer's scatter
    t_back: list[float] = field(default_factory=list)  # of each layer's gather
    t_transport: float = 0.0


class MpiSEnd:
    """The S-worker's end (`transport.base.SEnd`)."""

    def __init__(self, world: World, shape: WireShape, progress: Progress, clocks: list[tuple[float, float]]) -> None:
        self.size = world.size
        self.shape = shape
        self.progress = progress
        self._world = world
        self._comms = _Comms(world, shape)
        self._offsets = [offset for offset, _ in clocks]
        self._slots: dict[int, _SSlot] = {}
        self._kv_sends: deque[tuple[Pending, int]] = deque()
        self._kv_bytes = 0

    def bind(self, slot: int, qkv: Rows, out: Rows) -> None:
        counts = np.zeros(self.size, np.int32)
        reports = np.zeros((self.size, report_words(self.shape.num_layers)))
        self._slots[slot] = _SSlot(qkv, out, counts, counts.copy(), reports)

    def send_plan(self, slot: int, plan: StepPlan) -> None:
        state, comm = self._slots[slot], self._comms.slots[slot]
        self.progress.armed = True
        for pending in state.plan_sent:
            self.progress.wait(pending)
        messages = [plan.header()] + ([payload] if len(payload := plan.payload()) else [])
        state.plan_sent = [self._post_bcast(comm, message) for message in messages]
        state.num_rows = plan.num_rows
        state.counts[:] = row_counts(plan.owners.tolist(), self.size)
        state.displs[:] = displacements(state.counts)
        state.t_posted, state.t_back = [], []
        if plan.kind is not PlanKind.STOP:
            mine, reports = state.reports[S_RANK], state.reports
            state.report = self.progress.post(
                lambda: self._comms.reports.Igather(MPI.IN_PLACE, reports, root=S_RANK), mine
            )

    def _post_bcast(self, comm: MPI.Intracomm, message: Ints) -> Pending:
        return self.progress.post(lambda: comm.Ibcast(message, root=S_RANK), message)

    def scatter_qkv(self, slot: int, ready: Callable[[], bool]) -> None:
        state, comm, types = self._slots[slot], self._comms.slots[slot], self._comms
        state.awaited, state.gather = True, None

        def start() -> None:
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
        self.progress.wait_until(
            lambda: state.gather is not None and state.gather.t_done is not None, f"attention output of slot {slot}"
        )
        self.progress.wait(state.scatter)
        assert state.gather is not None and state.gather.t_done is not None
        state.t_back.append(state.gather.t_done)
        state.awaited = False
        return state.out[: state.num_rows]

    def send_kv(self, segments: list[Segment], rows: Rows) -> None:
        owner, kv_type = segments[0].owner, self._comms.kv_type
        pending = self.progress.post(
            lambda: self._comms.prefill.Isend([rows, len(rows), kv_type], dest=owner), rows, segments
        )
        self._kv_sends.append((pending, rows.nbytes))
        self._kv_bytes += rows.nbytes
        self._retire_kv(MAX_KV_UNDER_WAY)

    def _retire_kv(self, limit: int) -> None:
        """Forget what has arrived, and wait while more than `limit` bytes are under way."""
        while self._kv_sends and (self._kv_bytes > limit or self._kv_sends[0][0].t_done is not None):
            pending, nbytes = self._kv_sends.popleft()
            self.progress.wait(pending)
            self._kv_bytes -= nbytes

    def wait_reports(self, slot: int) -> dict[int, StepReport]:
        state = self._slots[slot]
        if state.report is None:
            return {}
        self.progress.wait(state.report)
        state.report = None
        reports = {rank: decode_report(state.reports[rank]) for rank in range(1, self.size)}
        for rank, report in reports.items():
            report.t_arrived -= self._offsets[rank]
            report.t_posted -= self._offsets[rank]
        state.t_transport = _transport_time(state, reports)
        return reports

    def transport_time(self, slot: int) -> float:
        return self._slots[slot].t_transport

    @property
    def t_wait(self) -> float:
        return self.progress.t_wait

    def poke(self) -> None:
        self.progress.poke()

    def close(self) -> None:
        self._retire_kv(-1)
        for state in self._slots.values():
            for pending in (*state.plan_sent, state.report):
                self.progress.wait(pending)
        self.progress.stop()
        self._world.barrier()
        self._comms.free()


def _transport_time(state: _SSlot, reports: dict[int, StepReport]) -> float:
    """From the last sender's post to completion at the last receiver, summed over layers and both ways."""
    busy = [report for rank, report in reports.items() if state.counts[rank]]
    if not busy or not state.t_back:
        return 0.0
    arrived = np.max([report.t_arrived for report in busy], axis=0)
    posted = np.max([report.t_posted for report in busy], axis=0)
    out, back = np.array(state.t_posted), np.array(state.t_back)
    return float(np.maximum(arrived - out, 0).sum() + np.maximum(back - posted, 0).sum())


@dataclass(slots=True)
class _RSlot:
    """An R-worker's buffers and messages of one slot."""

    qkv: Rows
    out: Rows
    header: Ints
    report: npt.NDArray[np.float64]
    times: npt.NDArray[np.float64]  # [2, num_layers]: arrived, posted
    num_rows: int = 0
    layer: int = 0
    incoming: Pending | None = None  # the next header or the next rows
    sent: Pending | None = None
    report_sent: Pending | None = None


class MpiREnd:
    """An R-worker's end (`transport.base.REnd`)."""

    def __init__(self, world: World, shape: WireShape, progress: Progress) -> None:
        self.rank = world.rank
        self.shape = shape
        self.progress = progress
        self._world = world
        self._comms = _Comms(world, shape)
        self._slots = [self._make_slot() for _ in range(shape.num_slots)]
        self._expected: deque[list[Segment]] = deque()  # messages listed but not posted
        self._posted: deque[tuple[list[Segment], Rows, Pending]] = deque()
        self._sink: PrefillSink | None = None
        for slot in range(shape.num_slots):
            self._post_header(slot)

    def _make_slot(self) -> _RSlot:
        shape = self.shape
        return _RSlot(
            qkv=np.empty((shape.max_rows, shape.qkv_size), shape.dtype),
            out=np.empty((shape.max_rows, shape.q_size), shape.dtype),
            header=np.zeros(HEADER_LEN, np.int64),
            report=np.zeros(report_words(shape.num_layers)),
            times=np.zeros((2, shape.num_layers)),
        )

    def bind(self, sink: PrefillSink) -> None:
        self._sink = sink

    @property
    def t_wait(self) -> float:
        return self.progress.t_wait

    def wait_plan(self, slot: int) -> StepPlan:
        state, comm = self._slots[slot], self._comms.slots[slot]
        self._wait(state.incoming, f"the next plan of slot {slot}")
        self.progress.armed = True
        payload = np.empty(payload_words(int(x) for x in state.header[2:6]), np.int64)
        if len(payload):
            self._wait(self.progress.post(lambda: comm.Ibcast(payload, root=S_RANK), payload), "a plan's payload")
        plan = decode_plan(state.header.copy(), payload)
        state.num_rows, state.layer = int((plan.owners == self.rank).sum()), 0
        state.times[:] = 0.0
        if plan.kind is PlanKind.RUN:
            self._post_rows(slot)
        elif plan.kind is PlanKind.EMPTY:
            self._post_header(slot)
        return plan

    def expect(self, segments: list[Segment]) -> None:
        mine = [segment for segment in segments if segment.owner == self.rank]
        self._expected.extend(list(group) for _, group in itertools.groupby(mine, key=lambda segment: segment.unit))
        self._post_kv()

    def wait_qkv(self, slot: int) -> Rows:
        state = self._slots[slot]
        self._drain()
        self._wait(state.incoming, f"q, k, v of slot {slot}")
        self._wait(state.sent, f"the last output of slot {slot} to leave")
        assert state.incoming is not None and state.incoming.t_done is not None
        state.times[0, state.layer] = state.incoming.t_done
        return state.qkv[: state.num_rows]

    def out_rows(self, slot: int) -> Rows:
        state = self._slots[slot]
        return state.out[: state.num_rows]

    def send_out(self, slot: int) -> None:
        state, comm, out_type = self._slots[slot], self._comms.slots[slot], self._comms.out_type
        state.times[1, state.layer] = time.perf_counter()
        send = [state.out, state.num_rows, out_type]
        state.sent = self.progress.post(lambda: comm.Igatherv(send, None, root=S_RANK), send)
        state.layer += 1
        if state.layer < self.shape.num_layers:
            self._post_rows(slot)
        else:
            self._post_header(slot)

    def wait_prefill(self, seq_ids: Ints | None = None) -> None:
        wanted = None if seq_ids is None else set(seq_ids.tolist())

        def arrived() -> bool:
            self._drain()
            messages = itertools.chain(self._expected, (entry[0] for entry in self._posted))
            coming = (segment.seq_id for message in messages for segment in message)
            return not any(wanted is None or seq_id in wanted for seq_id in coming)

        if wanted != set() and not arrived():
            self.progress.wait_until(arrived, "prompt K/V")

    def send_report(self, slot: int, report: StepReport) -> None:
        state = self._slots[slot]
        self._wait(state.report_sent, "the last report to leave")
        report.encode(state.report)
        buffer = state.report
        state.report_sent = self.progress.post(lambda: self._comms.reports.Igather(buffer, None, root=S_RANK))

    def layer_times(self, slot: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        arrived, posted = self._slots[slot].times
        return arrived, posted

    def poke(self) -> None:
        self.progress.poke()
        self._drain()

    def close(self) -> None:
        """End in order, after every slot has had its stop plan."""
        for state in self._slots:
            for pending in (state.sent, state.report_sent):
                self.progress.wait(pending)
        self.progress.stop()
        self._world.barrier()
        self._comms.free()

    def _wait(self, pending: Pending | None, what: str) -> None:
        """Wait for a message; prompt K/V that arrives meanwhile goes to its sink."""
        if pending is None or pending.t_done is not None:
            return

        def done() -> bool:
            self._drain()
            return pending.t_done is not None

        self.progress.wait_until(done, what)

    def _post_header(self, slot: int) -> None:
        state, comm = self._slots[slot], self._comms.slots[slot]
        state.incoming = self.progress.post(lambda: comm.Ibcast(state.header, root=S_RANK))

    def _post_rows(self, slot: int) -> None:
        state, comm = self._slots[slot], self._comms.slots[slot]
        receive = [state.qkv, state.num_rows, self._comms.qkv_type]
        state.incoming = self.progress.post(lambda: comm.Iscatterv(None, receive, root=S_RANK), receive)

    def _post_kv(self) -> None:
        while self._expected and len(self._posted) < MAX_KV_POSTED:
            segments = self._expected.popleft()
            rows = np.empty((sum(segment.num_tokens for segment in segments), 2 * self.shape.kv_size), self.shape.dtype)
            receive = [rows, len(rows), self._comms.kv_type]
            pending = self.progress.post(self._starter_of_kv(receive), receive)
            self._posted.append((segments, rows, pending))

    def _starter_of_kv(self, receive: list[Any]) -> Callable[[], MPI.Request]:
        return lambda: self._comms.prefill.Irecv(receive, source=S_RANK)

    def _drain(self) -> None:
        """Hand arrived prompt K/V to the sink, in order, and post the next receives."""
        assert self._sink is not None, "bind() comes first"
        while self._posted and self._posted[0][2].t_done is not None:
            segments, rows, _ = self._posted.popleft()
            self._post_kv()
            self._sink(segments, rows)
