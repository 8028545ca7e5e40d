"""MPI start-up, the abort hook, clocks, and what all ranks do together before and after the pipeline.

The only mpi4py import of the program. Importing this module does not initialise MPI.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import mpi4py

mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

from fastdecode_hpc.log import wait_until_read  # noqa: E402
from fastdecode_hpc.transport.control import Control, RootControl, WorkerControl  # noqa: E402

__all__ = ["MPI", "MPI_LOCK", "S_RANK", "World", "init_mpi", "library_version", "row_type"]

S_RANK = 0  # the S-worker's rank in the world
ABORT_CODE = 1
DEFAULT_WATCHDOG_S = 300.0
LEAST_INIT_S = 60.0  # ranks may come this long after each other, however short the watchdog
LOCK_S = 1.0  # the longest that a rank which aborts waits for its other threads to leave MPI

MPI_LOCK = threading.RLock()  # held around every call of MPI: the thread level is SERIALIZED


def init_mpi(watchdog_s: float = DEFAULT_WATCHDOG_S) -> World:
    """Initialise MPI (thread level SERIALIZED) and install the abort hook, before anything can fail."""
    with _at_most(max(watchdog_s, LEAST_INIT_S)):
        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_SERIALIZED)
        world = World(MPI.COMM_WORLD, watchdog_s)
    _install_abort_hook(world)
    return world


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """End this process, with its stack on stderr, if the body takes longer: inside MPI nothing else can be done.

    The timer is faulthandler's, which needs no interpreter lock.
    """
    stderr = sys.__stderr__
    if stderr is None or seconds > threading.TIMEOUT_MAX:
        yield
        return
    faulthandler.dump_traceback_later(seconds, exit=True, file=stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _install_abort_hook(world: World) -> None:
    """End all ranks when this one raises: a rank that only dies leaves the others waiting for ever."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        sys.stderr.write(f"[rank {world.rank} on {world.host}] ends the job:\n{text}")
        world.abort(130 if issubclass(kind, KeyboardInterrupt) else ABORT_CODE)

    sys.excepthook = hook
    threading.excepthook = lambda args: hook(args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback)


def library_description() -> str:
    """What the MPI library says about itself; known before MPI starts."""
    return str(MPI.Get_library_version()).strip("\0\n ")


def library_version() -> str:
    """First line of that."""
    return library_description().split("\n")[0].strip().rstrip("\0")


def thread_level() -> str:
    """What MPI lets the threads of this process do: SINGLE, FUNNELED, SERIALIZED or MULTIPLE."""
    names = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    return next(name for name in names if getattr(MPI, f"THREAD_{name}") == MPI.Query_thread())


class World:
    """All ranks of the job, for start-up and end; never used inside the pipeline.

    Every wait is bounded, and a `WatchdogError` says whom it was for.

    Attributes
    ----------
    control : Control
        Bounds the waits of this rank.
    """

    def __init__(self, comm: MPI.Intracomm, watchdog_s: float = DEFAULT_WATCHDOG_S) -> None:
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.host = socket.gethostname()
        self._control_comm = comm.Dup()
        self.control = self._make_control(watchdog_s)

    def _make_control(self, watchdog_s: float) -> Control:
        has_beats = MPI.Query_thread() >= MPI.THREAD_SERIALIZED
        if self.is_s_rank:
            return RootControl(self._control_comm, watchdog_s, MPI_LOCK, size=self.size, has_beats=has_beats)
        return WorkerControl(self._control_comm, watchdog_s, MPI_LOCK, has_beats=has_beats)

    @property
    def is_s_rank(self) -> bool:
        return self.rank == S_RANK

    def abort(self, code: int) -> None:
        """End every rank, as soon as this one's last words are read; no collective call, safe in an error path."""
        wait_until_read()
        MPI_LOCK.acquire(timeout=LOCK_S)
        if MPI.Is_initialized() and not MPI.Is_finalized():
            self.comm.Abort(code)
        os._exit(code)

    def bcast(self, value: Any = None) -> Any:
        """Give every rank the S-worker's `value` (pickled)."""
        blob, what = pickle.dumps(value) if self.is_s_rank else b"", "what rank 0 tells all ranks"
        length = np.array([len(blob)], np.int64)
        self._run(lambda: self.comm.Ibcast(length, root=S_RANK), what)
        buffer = np.frombuffer(blob, np.uint8).copy() if self.is_s_rank else np.empty(int(length[0]), np.uint8)
        self._run(lambda: self.comm.Ibcast(buffer, root=S_RANK), what)
        return value if self.is_s_rank else pickle.loads(buffer.tobytes())

    def gather(self, value: Any, what: str) -> list[Any] | None:
        """Collect one value of every rank at the S-worker (None elsewhere); `what` they are, should one not come."""
        if self.is_s_rank:
            return [value, *(self._receive(rank, f"{what} of rank {rank}") for rank in range(1, self.size))]
        blob = np.frombuffer(pickle.dumps(value), np.uint8)
        length = np.array([len(blob)], np.int64)
        for message in (length, blob):
            self.send(message, S_RANK, f"rank 0 to take the {what} of this rank")
        return None

    def barrier(self, what: str = "all ranks to meet") -> None:
        """Wait for all ranks."""
        self._run(self.comm.Ibarrier, what)

    def duplicate(self) -> MPI.Intracomm:
        """A communicator of its own with the same ranks; collective."""
        with MPI_LOCK:
            comm, request = self.comm.Idup()
        self._run(lambda: request, "all ranks to begin a run")
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
        theirs, trips, what = np.empty(1), [], f"the clock of rank {rank}"
        for _ in range(rounds):
            sent = time.perf_counter()
            self.send(theirs, rank, what)
            self.receive(theirs, rank, what)
            back = time.perf_counter()
            trips.append((back - sent, float(theirs[0]) - (sent + back) / 2))
        round_trip, offset = min(trips)
        return offset, round_trip / 2

    def _answer_pings(self, rounds: int) -> None:
        clock, what = np.empty(1), "rank 0 to ask for the clock of this rank"
        for _ in range(rounds):
            self.receive(clock, S_RANK, what)
            clock[0] = time.perf_counter()
            self.send(clock, S_RANK, what)

    def finalize(self) -> None:
        """Leave MPI together."""
        self.barrier("all ranks to come to their end")
        self.control.close()
        with _at_most(max(self.control.watchdog_s, LEAST_INIT_S)):
            self._control_comm.Free()
            MPI.Finalize()

    def _receive(self, rank: int, what: str) -> Any:
        """The value that `rank` gives to a `gather`."""
        length = np.empty(1, np.int64)
        self.receive(length, rank, what)
        blob = np.empty(int(length[0]), np.uint8)
        self.receive(blob, rank, what)
        return pickle.loads(blob.tobytes())

    def send(self, message: np.ndarray, rank: int, what: str) -> None:
        """Send an array; `what` is waited for, should it not be taken."""
        self._run(lambda: self.comm.Isend(message, rank), what)

    def receive(self, into: np.ndarray, rank: int, what: str) -> None:
        """Receive an array of the sender's size."""
        self._run(lambda: self.comm.Irecv(into, rank), what)

    def _run(self, start: Callable[[], MPI.Request], what: str) -> None:
        """Start a message and wait for its end."""
        with MPI_LOCK:
            request = start()

        def done() -> bool:
            with MPI_LOCK:
                return bool(request.Test())

        self.control.wait(done, what)


def row_type(row_bytes: int) -> MPI.Datatype:
    """A committed datatype of one row: counts and displacements are then in rows and stay far below 2**31."""
    return MPI.BYTE.Create_contiguous(row_bytes).Commit()
