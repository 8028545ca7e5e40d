"""MPI start-up, the abort hook, clocks, and the one place that makes messages move.

The only mpi4py import of the program. Importing this module does not initialise MPI.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from types import TracebackType
from typing import Any

import mpi4py

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

from fastdecode_hpc.log import wait_until_read  # noqa: E402

__all__ = ["MPI", "S_RANK", "Pending", "Progress", "WatchdogError", "World", "init_mpi", "library_version", "row_type"]

S_RANK = 0  # the S-worker's rank in the world
SPIN_POLLS = 50  # polls before a wait starts to sleep
SLEEP_S = 50e-6
ABORT_CODE = 1


class WatchdogError(RuntimeError):
    """A wait took longer than the watchdog allows: some rank is dead, frozen or lost its messages."""


def init_mpi() -> World:
    """Initialise MPI (thread level SERIALIZED) and install the abort hook, before anything can fail."""
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_SERIALIZED)
    world = World(MPI.COMM_WORLD)
    _install_abort_hook(world)
    return world


def _install_abort_hook(world: World) -> None:
    """End all ranks when this one raises: a rank that only dies leaves the others waiting for ever."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        sys.stderr.write(f"[rank {world.rank} on {world.host}] ends the job:\n{text}")
        world.abort(130 if issubclass(kind, KeyboardInterrupt) else ABORT_CODE)

    sys.excepthook = hook
    threading.excepthook = lambda args: hook(args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback)


def library_version() -> str:
    """First line of the MPI library's own description."""
    return str(MPI.Get_library_version()).split("\n")[0].strip().rstrip("\0")


class World:
    """All ranks of the job, for start-up and end; never used inside the pipeline.

    Waits poll and sleep: a rank that blocks inside MPI takes cores from the one it is waiting for.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.host = socket.gethostname()

    @property
    def is_s_rank(self) -> bool:
        return self.rank == S_RANK

    def abort(self, code: int) -> None:
        """End every rank, as soon as this one's last words are read; no collective call, safe in an error path."""
        wait_until_read()
        if MPI.Is_initialized() and not MPI.Is_finalized():
            self.comm.Abort(code)
        os._exit(code)

    def bcast(self, value: Any = None) -> Any:
        """Give every rank the S-worker's `value` (pickled)."""
        blob = pickle.dumps(value) if self.is_s_rank else b""
        length = np.array([len(blob)], np.int64)
        _poll(self.comm.Ibcast(length, root=S_RANK))
        buffer = np.frombuffer(blob, np.uint8).copy() if self.is_s_rank else np.empty(int(length[0]), np.uint8)
        _poll(self.comm.Ibcast(buffer, root=S_RANK))
        return value if self.is_s_rank else pickle.loads(buffer.tobytes())

    def gather(self, value: Any, timeout_s: float | None = None) -> list[Any] | None:
        """Collect one value of every rank at the S-worker (None elsewhere); a `WatchdogError` after `timeout_s`."""
        blob = np.frombuffer(pickle.dumps(value), np.uint8)
        lengths = np.empty(self.size, np.int64) if self.is_s_rank else None
        _poll(self.comm.Igather(np.array([len(blob)], np.int64), lengths, root=S_RANK), timeout_s)
        if lengths is None:
            _poll(self.comm.Igatherv(blob, None, root=S_RANK), timeout_s)
            return None
        buffer = np.empty(int(lengths.sum()), np.uint8)
        displs = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        _poll(self.comm.Igatherv(blob, [buffer, lengths, displs, MPI.BYTE], root=S_RANK), timeout_s)
        return [pickle.loads(part.tobytes()) for part in np.split(buffer, displs[1:])]

    def barrier(self, timeout_s: float | None = None) -> None:
        """Wait for all ranks; a `WatchdogError` after `timeout_s`."""
        _poll(self.comm.Ibarrier(), timeout_s)

    def duplicate(self) -> MPI.Intracomm:
        """A communicator of its own with the same ranks; collective."""
        comm, request = self.comm.Idup()
        _poll(request)
        return comm

    def align_clocks(self, rounds: int = 20) -> list[tuple[float, float]] | None:
        """Offset of every rank's clock to the S-worker's, and how far it may be off, in seconds.

        Returns
        -------
        list of (offset_s, error_s) or None
            At the S-worker: subtract the offset from that rank's `time.perf_counter`. The shortest of
            `rounds` round trips counts, its half is the error.
        """
        if not self.is_s_rank:
            self._answer_pings(rounds)
            return None
        return [(0.0, 0.0)] + [self._ping(rank, rounds) for rank in range(1, self.size)]

    def _ping(self, rank: int, rounds: int) -> tuple[float, float]:
        theirs, trips = np.empty(1), []
        for _ in range(rounds):
            sent = time.perf_counter()
            self.comm.Send(theirs, rank)
            self.comm.Recv(theirs, rank)
            back = time.perf_counter()
            trips.append((back - sent, float(theirs[0]) - (sent + back) / 2))
        round_trip, offset = min(trips)
        return offset, round_trip / 2

    def _answer_pings(self, rounds: int) -> None:
        clock = np.empty(1)
        _poll(self.comm.Irecv(clock, S_RANK))  # may be long in coming: the others are asked first
        for round_ in range(rounds):
            if round_:
                self.comm.Recv(clock, S_RANK)
            clock[0] = time.perf_counter()
            self.comm.Send(clock, S_RANK)

    def finalize(self) -> None:
        """Leave MPI together."""
        self.barrier()
        MPI.Finalize()


def _poll(request: MPI.Request, timeout_s: float | None = None) -> None:
    for _ in range(SPIN_POLLS):
        if request.Test():
            return
    started = time.monotonic()
    while not request.Test():
        time.sleep(1e-3)
        if timeout_s is not None and time.monotonic() - started > timeout_s:
            raise WatchdogError(f"waited {timeout_s:g} s for all ranks to come to the end of the run")


class Pending:
    """One message under way, with everything that must outlive it."""

    __slots__ = ("keep", "request", "t_done")

    def __init__(self, request: MPI.Request, keep: tuple[Any, ...]) -> None:
        self.request = request
        self.keep = keep
        self.t_done: float | None = None


class Progress:
    """Makes messages move: MPI moves a non-blocking one only while somebody is inside MPI.

    Every MPI call of the pipeline goes through here, under one lock (thread level SERIALIZED). A thread
    does the poking where a core is free for it; everywhere `poke` is called between pieces of work.

    Parameters
    ----------
    wait : str
        ``spin``: a wait polls until it is over; ``sleep``: after a short spin it sleeps between polls.
    use_thread : bool
        Start the progress thread.
    watchdog_s : float
        Longest single wait before the job is ended.
    thread_cores : collection of int, optional
        Cores for that thread; by default those of the thread that makes this, which may be bound to one.
    """

    def __init__(self, *, wait: str, use_thread: bool, watchdog_s: float, thread_cores: Collection[int] = ()) -> None:
        self._sleeps = wait == "sleep"
        self.watchdog_s = watchdog_s
        self.armed = False  # by the first plan: until then rank 0 may load weights for as long as it takes
        self.t_wait = 0.0
        self._lock = threading.RLock()
        self._pending: list[Pending] = []
        self._deferred: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()
        self._thread_cores = thread_cores
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if use_thread and MPI.Query_thread() >= MPI.THREAD_SERIALIZED:
            self._thread = threading.Thread(target=self._poke_for_ever, name="mpi-progress", daemon=True)
            self._thread.start()

    def post(self, start: Callable[[], MPI.Request], *keep: Any) -> Pending:
        """Start a message now; `keep` lives until it is done."""
        with self._lock:
            pending = Pending(start(), keep)
            self._pending.append(pending)
            return pending

    def post_when(self, ready: Callable[[], bool], start: Callable[[], None]) -> None:
        """Run `start`, which posts, as soon as `ready`; deferred posts keep their order."""
        with self._lock:
            self._deferred.append((ready, start))
            self._start_ready()

    def poke(self) -> None:
        """Test everything under way, and note the time of what is done."""
        with self._lock:
            self._start_ready()
            for pending in self._pending:
                if pending.request.Test():
                    pending.t_done = time.perf_counter()
                    pending.keep = ()
            self._pending = [pending for pending in self._pending if pending.t_done is None]

    def wait(self, pending: Pending | None) -> None:
        """Come back when the message is done."""
        if pending is not None and pending.t_done is None:
            self.wait_until(lambda: pending.t_done is not None, "a message")

    def wait_until(self, done: Callable[[], bool], what: str) -> None:
        """Poke until `done`; the time counts as `t_wait`.

        Raises
        ------
        WatchdogError
            When that takes longer than the watchdog allows.
        """
        started, polls = time.perf_counter(), 0
        while not done():
            self.poke()
            polls += 1
            if self._sleeps and polls > SPIN_POLLS and not done():
                time.sleep(SLEEP_S)
            if self.armed and polls % 1024 == 0 and time.perf_counter() - started > self.watchdog_s:
                raise WatchdogError(
                    f"waited {self.watchdog_s:g} s for {what}; {len(self._pending)} messages are under way. "
                    "Another rank is dead, stopped or unreachable; see its output"
                )
        self.t_wait += time.perf_counter() - started

    def stop(self) -> None:
        """End the progress thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _start_ready(self) -> None:
        while self._deferred and self._deferred[0][0]():
            self._deferred.popleft()[1]()

    def _poke_for_ever(self) -> None:
        if self._thread_cores:
            with suppress(OSError):  # masks can't be set here: poking on a busy core is still poking
                os.sched_setaffinity(0, self._thread_cores)  # of this thread alone
        while not self._stop.wait(2 * SLEEP_S):
            self.poke()


def row_type(row_bytes: int) -> MPI.Datatype:
    """A committed datatype of one row: counts and displacements are then in rows and stay far below 2**31."""
    return MPI.BYTE.Create_contiguous(row_bytes).Commit()
