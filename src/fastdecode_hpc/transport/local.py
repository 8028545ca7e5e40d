"""The protocol of `transport.base` inside one process, without MPI and without threads.

The R-worker's loop is driven from the S-worker's waits, one stage at a time, so both parts run the
same code as over MPI and values are rounded to the wire type in the same places.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from fastdecode_hpc.timing import Patience
from fastdecode_hpc.transport.base import (
    LAYER_TIMES,
    Ints,
    PrefillSink,
    Rows,
    Segment,
    StepPlan,
    StepReport,
    TransportTimes,
)
from fastdecode_hpc.transport.control import WatchdogError

OWNER = 0  # the partition in the S-worker's own process


class _Mailbox:
    """What lies between the two ends, by slot."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.qkv: dict[int, Rows] = {}
        self.out: dict[int, Rows] = {}
        self.plans: dict[int, deque[StepPlan]] = defaultdict(deque)
        self.ready: dict[int, Callable[[], bool]] = {}  # slots with rows that the R-worker has not taken
        self.out_ready: set[int] = set()
        self.reports: dict[int, StepReport] = {}
        self.t_posted: dict[int, list[float]] = defaultdict(list)  # when each layer's rows were ready, by slot
        self.prompt_kv: deque[tuple[list[Segment], Rows, Callable[[], bool]]] = deque()


class LocalSEnd:
    """The S-worker's end; its waits run the R-worker."""

    size = 1
    t_wait = 0.0  # driving the R-worker is no waiting

    def __init__(self, mailbox: _Mailbox) -> None:
        self._box = mailbox
        self._r_stages: Iterator[object] = iter(())
        self._num_rows: dict[int, int] = {}
        self._awaited: set[int] = set()
        self._report_due: set[int] = set()
        self._t_asked: dict[int, list[float]] = defaultdict(list)
        self._t_back: dict[int, list[float]] = defaultdict(list)

    def drive(self, r_stages: Iterator[object]) -> None:
        """Take the R-worker's loop (`RWorker.stages`)."""
        self._r_stages = r_stages

    def describe_with(self, describe: Callable[[], str]) -> None:
        pass  # nobody is waited for

    def bind(self, slot: int, qkv: Rows, out: Rows) -> None:
        self._box.qkv[slot], self._box.out[slot] = qkv, out

    def send_plan(self, slot: int, plan: StepPlan) -> None:
        self._box.plans[slot].append(plan)
        self._num_rows[slot] = plan.num_rows
        self._report_due.add(slot)
        for times in (self._box.t_posted, self._t_asked, self._t_back):
            times[slot] = []

    def scatter_qkv(self, slot: int, ready: Callable[[], bool]) -> None:
        self._box.ready[slot] = ready
        if ready():  # else when the R-worker has waited for it
            self._box.t_posted[slot].append(time.perf_counter())
        self._awaited.add(slot)

    def wait_out(self, slot: int) -> Rows | None:
        if slot not in self._awaited:
            return None
        self._awaited.remove(slot)
        self._t_asked[slot].append(time.perf_counter())
        # Every stage up to the awaited one has been posted, so the R-worker never runs ahead of us.
        while slot not in self._box.out_ready:
            next(self._r_stages)
        self._box.out_ready.remove(slot)
        self._t_back[slot].append(time.perf_counter())
        return self._box.out[slot][: self._num_rows[slot]]

    def send_kv(self, segments: list[Segment], rows: Rows, ready: Callable[[], bool]) -> None:
        self._box.prompt_kv.append((segments, rows, ready))

    def wait_reports(self, slot: int) -> dict[int, StepReport]:
        if slot not in self._report_due:
            return {}
        self._report_due.remove(slot)
        while slot not in self._box.reports:
            next(self._r_stages)
        return {OWNER: self._box.reports.pop(slot)}

    def transport_times(self, slot: int) -> TransportTimes:
        return TransportTimes()

    @property
    def latencies(self) -> dict[int, float]:
        return {}

    def layer_times(self, slot: int) -> tuple[list[float], list[float], list[float]]:
        return self._box.t_posted[slot], self._t_asked[slot], self._t_back[slot]

    def poke(self) -> None:
        pass

    def close(self) -> None:
        for _ in self._r_stages:
            pass


class LocalREnd:
    """The R-worker's end; nothing is ever missing when it is asked for."""

    rank = OWNER
    t_wait = 0.0

    def __init__(self, mailbox: _Mailbox, watchdog_s: float) -> None:
        self._box = mailbox
        self._watchdog_s = watchdog_s
        self._num_rows: dict[int, int] = {}
        self._times: dict[int, npt.NDArray[np.float64]] = {}
        self._layer: dict[int, int] = {}
        self._sink: PrefillSink | None = None
        self._last_unit = 0  # units up to this one are expected

    def describe_with(self, describe: Callable[[], str]) -> None:
        pass

    def bind(self, sink: PrefillSink) -> None:
        self._sink = sink

    def wait_plan(self, slot: int) -> StepPlan:
        plan = self._box.plans[slot].popleft()
        self._num_rows[slot] = plan.num_rows
        self._times[slot] = np.zeros((LAYER_TIMES, self._box.num_layers))
        self._layer[slot] = 0
        return plan

    def expect(self, segments: list[Segment]) -> None:
        self._last_unit = max([self._last_unit, *(segment.unit for segment in segments)])

    def wait_qkv(self, slot: int) -> Rows:
        ready = self._box.ready.pop(slot)
        _wait(ready, self._watchdog_s)
        now, posted = time.perf_counter(), self._box.t_posted[slot]
        self._times[slot][:2, self._layer[slot]] = now
        if len(posted) == self._layer[slot]:
            posted.append(now)
        return self._box.qkv[slot][: self._num_rows[slot]]

    def out_rows(self, slot: int) -> Rows:
        return self._box.out[slot][: self._num_rows[slot]]

    def send_out(self, slot: int) -> None:
        self._times[slot][2, self._layer[slot]] = time.perf_counter()
        self._layer[slot] += 1
        self._box.out_ready.add(slot)

    def wait_prefill(self, seq_ids: Ints | None = None) -> None:
        self.poke()
        while self._expects_kv():
            _wait(self._box.prompt_kv[0][2], self._watchdog_s)
            self.poke()

    def send_report(self, slot: int, report: StepReport) -> None:
        self._box.reports[slot] = report

    def layer_times(self, slot: int) -> npt.NDArray[np.float64]:
        return self._times[slot]

    def poke(self) -> None:
        assert self._sink is not None, "bind() comes first"
        while self._expects_kv() and self._box.prompt_kv[0][2]():
            segments, rows, _ = self._box.prompt_kv.popleft()
            self._sink(segments, rows)

    def _expects_kv(self) -> bool:
        """Whether K/V has been sent for a plan that the R-worker has read; any other stays in the mailbox."""
        kv = self._box.prompt_kv
        return bool(kv) and kv[0][0][0].unit <= self._last_unit


def _wait(ready: Callable[[], bool], watchdog_s: float) -> None:
    """Wait for the device, the only thing that can be late in one process."""
    patience = Patience(watchdog_s)
    while not ready():
        time.sleep(20e-6)
        if patience.is_over():
            raise WatchdogError(f"waited {watchdog_s:g} s for the device to copy rows to the host")


def make_local(num_layers: int, watchdog_s: float = math.inf) -> tuple[LocalSEnd, LocalREnd]:
    """Make the two ends of a run in one process."""
    mailbox = _Mailbox(num_layers)
    return LocalSEnd(mailbox), LocalREnd(mailbox, watchdog_s)
