"""The one place that makes messages of the pipeline move."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from fastdecode_hpc.transport.control import Control
from fastdecode_hpc.transport.mpi import MPI, MPI_LOCK

SPIN_POLLS = 50  # polls before a wait starts to sleep
SLEEP_S = 50e-6
POLLS_PER_CHECK = 1024


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
    control : Control
        Bounds the waits.
    wait : str
        ``spin``: a wait polls until it is over; ``sleep``: after a short spin it sleeps between polls.
    use_thread : bool
        Start the progress thread.
    thread_cores : collection of int, optional
        Cores for that thread; by default those of the thread that makes this, which may be bound to one.
    """

    def __init__(self, control: Control, *, wait: str, use_thread: bool, thread_cores: Collection[int] = ()) -> None:
        self.control = control
        self.t_wait = 0.0
        self._sleeps = wait == "sleep"
        self._lock = MPI_LOCK
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

    def wait(self, pending: Pending | None, what: str) -> None:
        """Come back when the message is done."""
        if pending is not None and pending.t_done is None:
            self.wait_until(lambda: pending.t_done is not None, what)

    def wait_until(self, done: Callable[[], bool], what: str) -> None:
        """Poke until `done`; the time counts as `t_wait`.

        Raises
        ------
        WatchdogError
            When that takes longer than the watchdog allows.
        """
        started, polls, patience = time.perf_counter(), 0, self.control.patience()
        while not done():
            self.poke()
            polls += 1
            if self._sleeps and polls > SPIN_POLLS and not done():
                time.sleep(SLEEP_S)
            if polls % POLLS_PER_CHECK == 0:
                self.control.check(patience, what)
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
