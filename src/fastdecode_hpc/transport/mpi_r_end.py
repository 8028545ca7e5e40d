"""An R-worker's end of `transport.base` over MPI non-blocking collectives (see `transport.mpi_comms`)."""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdecode_hpc.transport.base import (
    HEADER_LEN,
    LAYER_TIMES,
    Ints,
    PlanKind,
    PrefillSink,
    Rows,
    Segment,
    StepPlan,
    StepReport,
    decode_plan,
    payload_words,
    report_words,
)
from fastdecode_hpc.transport.control import no_run
from fastdecode_hpc.transport.mpi import MPI, S_RANK, World
from fastdecode_hpc.transport.mpi_clocks import ClockAnswerer
from fastdecode_hpc.transport.mpi_comms import Comms, WireShape
from fastdecode_hpc.transport.mpi_progress import Pending, Progress
from fastdecode_hpc.transport.slow_link import Lane, SlowLink

MAX_KV_POSTED = 4  # receives of prompt K/V that are posted at once


@dataclass(slots=True)
class _RSlot:
    """An R-worker's buffers and messages of one slot."""

    qkv: Rows
    out: Rows
    header: Ints
    report: npt.NDArray[np.float64]
    times: npt.NDArray[np.float64]  # [4, num_layers]: asked, arrived, posted, before
    num_rows: int = 0
    layer: int = 0
    incoming: Pending | None = None  # the next header or the next rows
    sent: Pending | None = None
    report_sent: Pending | None = None
    is_held: bool = False  # its output waits for a slow link


class MpiREnd:
    """An R-worker's end (`transport.base.REnd`).

    Parameters
    ----------
    world : World
    shape : WireShape
    progress : Progress
    slow_link : SlowLink, optional
        Hold q, k, v and output back for as long as this link would take longer.
    """

    def __init__(self, world: World, shape: WireShape, progress: Progress, slow_link: SlowLink | None = None) -> None:
        self.rank = world.rank
        self.shape = shape
        self.progress = progress
        self._world = world
        self._comms = Comms(world, shape)
        self._clock = ClockAnswerer(self._comms.reports, progress)
        self._slots = [self._make_slot() for _ in range(shape.num_slots)]
        self._expected: deque[list[Segment]] = deque()  # messages listed but not posted
        self._posted: deque[tuple[list[Segment], Rows, Pending]] = deque()
        self._coming: Counter[int] = Counter()  # seq_id |-> segments that have not reached the sink
        self._sink: PrefillSink | None = None
        self._t_sink = 0.0
        self._t_arrived = 0.0  # of the last rows, q, k, v or prompt K/V: what comes then was behind them on the link
        self._lanes = None if slow_link is None else (Lane(slow_link), Lane(slow_link))  # in, out
        for slot in range(shape.num_slots):
            self._post_header(slot)

    def _make_slot(self) -> _RSlot:
        shape = self.shape
        return _RSlot(
            qkv=np.empty((shape.max_rows, shape.qkv_size), shape.dtype),
            out=np.empty((shape.max_rows, shape.q_size), shape.dtype),
            header=np.zeros(HEADER_LEN, np.int64),
            report=np.zeros(report_words(shape.num_layers)),
            times=np.zeros((LAYER_TIMES, shape.num_layers)),
        )

    def describe_with(self, describe: Callable[[], str]) -> None:
        self._world.control.describe = describe

    def bind(self, sink: PrefillSink) -> None:
        self._sink = sink

    @property
    def t_wait(self) -> float:
        return self.progress.t_wait

    def wait_plan(self, slot: int) -> StepPlan:
        state, comm = self._slots[slot], self._comms.slots[slot]
        self._wait_until_sent(slot)
        self._wait(state.incoming, f"the next plan of slot {slot}")
        payload = np.empty(payload_words(int(x) for x in state.header[2:6]), np.int64)
        if len(payload):
            rest = self.progress.post(lambda: comm.Ibcast(payload, root=S_RANK), payload)
            self._wait(rest, f"the rest of the plan of slot {slot}")
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
        self._coming.update(segment.seq_id for segment in mine)
        self._expected.extend(list(group) for _, group in itertools.groupby(mine, key=lambda segment: segment.unit))
        self._post_kv()

    def wait_qkv(self, slot: int) -> Rows:
        state = self._slots[slot]
        self._drain()
        state.times[0, state.layer] = time.perf_counter()
        self._wait_until_sent(slot)
        self._wait(state.incoming, f"q, k, v of slot {slot}")
        self._wait(state.sent, f"the last output of slot {slot} to leave")
        assert state.incoming is not None and state.incoming.t_done is not None
        if state.num_rows:
            state.times[3, state.layer] = self._t_arrived
            state.times[1, state.layer] = self._pass_in(state, state.incoming.t_done)
            self._t_arrived = max(self._t_arrived, state.times[1, state.layer])  # one may be taken after a later one
        return state.qkv[: state.num_rows]

    def out_rows(self, slot: int) -> Rows:
        state = self._slots[slot]
        return state.out[: state.num_rows]

    def send_out(self, slot: int) -> None:
        state = self._slots[slot]
        now = state.times[2, state.layer] = time.perf_counter()
        state.layer += 1
        if self._lanes is None or not state.num_rows:
            self._send(slot)
            return
        leaves, state.is_held = self._lanes[1].passes(now, state.out[: state.num_rows].nbytes), True
        self.progress.post_when(lambda: time.perf_counter() >= leaves, lambda: self._send(slot))

    def _send(self, slot: int) -> None:
        """Post the output, and the receive of what comes next on the same communicator."""
        state, comm = self._slots[slot], self._comms.slots[slot]
        send = [state.out, state.num_rows, self._comms.out_type]
        state.sent = self.progress.post(lambda: comm.Igatherv(send, None, root=S_RANK), send)
        state.is_held = False
        if state.layer < self.shape.num_layers:
            self._post_rows(slot)
        else:
            self._post_header(slot)

    def _wait_until_sent(self, slot: int) -> None:
        state = self._slots[slot]
        if state.is_held:
            self._wait_until(lambda: not state.is_held, f"a slow link to take the output of slot {slot}")

    def _pass_in(self, state: _RSlot, t_done: float) -> float:
        """When rows that came at `t_done` are there; on a slow link that is waited for."""
        if self._lanes is None:
            return t_done
        arrives = self._lanes[0].passes(t_done, state.qkv[: state.num_rows].nbytes)
        self._wait_until(lambda: time.perf_counter() >= arrives, "a slow link to bring q, k, v")
        return arrives

    def wait_prefill(self, seq_ids: Ints | None = None) -> None:
        def arrived() -> bool:
            self._drain()
            coming = self._coming
            return not coming if seq_ids is None else not any(seq_id in coming for seq_id in seq_ids.tolist())

        if not arrived():
            self._wait_until(arrived, "prompt K/V")

    def send_report(self, slot: int, report: StepReport) -> None:
        state = self._slots[slot]
        self._wait(state.report_sent, "the last report to leave")
        report.encode(state.report)
        buffer = state.report
        state.report_sent = self.progress.post(lambda: self._comms.reports.Igather(buffer, None, root=S_RANK))

    def layer_times(self, slot: int) -> npt.NDArray[np.float64]:
        return self._slots[slot].times

    def poke(self) -> None:
        self.progress.poke()
        self._drain()

    def close(self) -> None:
        """End in order, after every slot has had its stop plan."""
        for slot, state in enumerate(self._slots):
            self._wait_until_sent(slot)
            for pending in (state.sent, state.report_sent):
                self.progress.wait(pending, "the last output and report to leave")
        self._wait_until(self._is_over, "rank 0 to ask no more")
        self.progress.stop()
        self._world.barrier("all ranks to end this run")
        self.describe_with(no_run)
        self._comms.free()

    def _is_over(self) -> bool:
        self._drain()
        return self._clock.has_ended

    def _wait(self, pending: Pending | None, what: str) -> None:
        """Wait for a message; prompt K/V that arrives meanwhile goes to its sink."""
        if pending is None or pending.t_done is not None:
            return

        def done() -> bool:
            self._drain()
            return pending.t_done is not None

        self._wait_until(done, what)

    def _wait_until(self, done: Callable[[], bool], what: str) -> None:
        """Wait; storing prompt K/V meanwhile is work."""
        stored = self._t_sink
        self.progress.wait_until(done, what)
        self.progress.t_wait -= self._t_sink - stored

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
        """Answer what has been asked; hand arrived prompt K/V to the sink, in order, and post the next receives."""
        assert self._sink is not None, "bind() comes first"
        self._clock.poke()
        while self._posted and (arrived := self._posted[0][2].t_done) is not None:
            segments, rows, _ = self._posted.popleft()
            self._t_arrived = max(self._t_arrived, arrived)
            self._post_kv()
            started = time.perf_counter()
            self._sink(segments, rows)
            self._t_sink += time.perf_counter() - started
            self._coming.subtract(segment.seq_id for segment in segments)
            for seq_id in {segment.seq_id for segment in segments if not self._coming[segment.seq_id]}:
                del self._coming[seq_id]
