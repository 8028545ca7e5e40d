"""Signs of life: for how long ranks wait for each other, and what is said when that is over.

A wait for another rank is bounded by `watchdog_s`. Rank 0 may be away from the pipeline for longer: it loads weights,
or a file system takes its time. So a thread of it sends the others a beat now and then, and they wait as long as beats
come. A rank 0 that is stopped, or that hangs inside MPI, sends none. One that is away for `AWAY_LIMITS` times
`watchdog_s` is ended by that thread. When rank 0 has waited in vain it asks the others what they are doing: who gives
no answer is the one to look for.

Nothing here knows MPI: a communicator is whatever has `Isend`, `Iprobe` and `Recv`.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from fastdecode_hpc.timing import Patience

ROOT = 0
AWAY_LIMITS = 10  # times watchdog_s that rank 0 may be away from the pipeline
BEATS_PER_LIMIT = 4
LONGEST_BEAT_S = 10.0
ROLL_CALL_S = 2.0
ANSWER_BYTES = 512
BEAT, ASK, BYE = range(3)  # words of rank 0
WORD_TAG, ANSWER_TAG = 1, 2
SPIN_POLLS, YIELD_POLLS = 50, 2000  # of a wait, before it yields its core, and before it sleeps
SLEEP_S = 1e-3

Lock = AbstractContextManager[Any]
Clock = Callable[[], float]


def no_run() -> str:
    """What a rank is doing before, between and after runs."""
    return "in no run"


class WatchdogError(RuntimeError):
    """A wait took longer than the watchdog allows: some rank is dead, frozen or lost its messages."""


class Control:
    """What both sides have: bounded waits.

    Parameters
    ----------
    comm : communicator
        Of its own.
    watchdog_s : float
        Longest wait without a sign of life.
    lock : context manager
        Held around every call of MPI in this process.
    clock : callable
        Seconds, monotonic.

    Attributes
    ----------
    describe : callable
        What this rank is doing, in words; for those who have to find out why a job came to its end.
    """

    def __init__(self, comm: Any, watchdog_s: float, lock: Lock, *, clock: Clock = time.monotonic) -> None:
        self.watchdog_s = watchdog_s
        self.describe: Callable[[], str] = no_run
        self._comm = comm
        self._lock = lock
        self._clock = clock

    def patience(self) -> Patience:
        """For one wait, to be given to `check` now and then."""
        return Patience(self.watchdog_s, clock=self._clock)

    def check(self, patience: Patience, what: str) -> None:
        """Do what is due during a wait for `what`; raise `WatchdogError` if it is in vain."""
        raise NotImplementedError

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Come back when `done`; for start-up and end.

        It polls and sleeps: a rank that blocks inside MPI takes cores from the one it is waiting for.

        Raises
        ------
        WatchdogError
            When that takes too long.
        """
        patience = self.patience()
        for polls in itertools.count():
            if done():
                break
            if polls >= SPIN_POLLS:
                self.check(patience, what)
            if polls >= YIELD_POLLS:
                time.sleep(SLEEP_S)
            elif polls >= SPIN_POLLS:
                os.sched_yield()
        self.alive()

    def alive(self) -> None:
        """Say that this rank's main thread gets on."""

    def close(self) -> None:
        """End in order; all ranks call it."""


class RootControl(Control):
    """Rank 0's side.

    Parameters
    ----------
    size : int
        Ranks, this one included.
    has_beats : bool
        Whether a second thread may call MPI here.
    """

    def __init__(
        self, comm: Any, watchdog_s: float, lock: Lock, *, size: int, has_beats: bool, clock: Clock = time.monotonic
    ) -> None:
        super().__init__(comm, watchdog_s, lock, clock=clock)
        self._others = range(1, size)
        self._words = {word: np.array([word], np.int64) for word in (BEAT, ASK, BYE)}
        self._sends: dict[int, Any] = {}  # the last word to each rank
        self._beat_s = min(watchdog_s / BEATS_PER_LIMIT, LONGEST_BEAT_S)
        self._away = Patience(AWAY_LIMITS * watchdog_s, gap_s=2 * self._beat_s, clock=clock)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if has_beats and size > 1:
            self._thread = threading.Thread(target=self._send_beats, name="signs-of-life", daemon=True)
            self._thread.start()

    def alive(self) -> None:
        self._away.renew()

    def check(self, patience: Patience, what: str) -> None:
        if patience.is_over():
            raise WatchdogError(self._explain(what))

    def beat(self) -> None:
        """Send a sign of life to all others, unless the main thread has been away for too long: then raise."""
        if self._away.is_over():
            raise WatchdogError(self._explain_absence())
        with self._lock:
            for rank in self._others:
                if rank not in self._sends or self._sends[rank].Test():
                    self._send(rank, BEAT)

    def stop(self) -> None:
        """Send no more beats."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        self.stop()
        for rank in self._others:
            self._finish_send(rank)
            self._send(rank, BYE)
            self._finish_send(rank)

    def _send_beats(self) -> None:
        while not self._stop.wait(self._beat_s):
            self.beat()

    def _send(self, rank: int, word: int) -> None:
        with self._lock:
            self._sends[rank] = self._comm.Isend(self._words[word], dest=rank, tag=WORD_TAG)

    def _finish_send(self, rank: int) -> None:
        def sent() -> bool:
            with self._lock:
                return rank not in self._sends or bool(self._sends[rank].Test())

        self.wait(sent, f"a word to rank {rank} to leave")

    def _explain(self, what: str) -> str:
        answers = self._call_roll()
        silent = "gives no answer: it is dead, stopped, unreachable or at work all the time"
        lines = [f"rank {rank}: {answers.get(rank, silent)}" for rank in self._others]
        return "\n  ".join(
            [
                f"waited {self.watchdog_s:g} s for {what}",
                f"rank {ROOT}: {self.describe()}",
                *lines,
                "where nothing is wrong but a rank needs longer, raise --watchdog-s",
            ]
        )

    def _explain_absence(self) -> str:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        return (
            f"rank 0 has been away from the pipeline for {self._away.limit_s:g} s, {AWAY_LIMITS} times --watchdog-s; "
            f"it is here:\n{stack}{self.describe()}"
        )

    def _call_roll(self) -> dict[int, str]:
        """What each of the others is doing, as far as they answer."""
        answers: dict[int, str] = {}
        end = self._clock() + ROLL_CALL_S
        with suppress(Exception):  # MPI may know already that a rank is gone; whatever is known has to be said
            for rank in self._others:
                self._send(rank, ASK)
            while len(answers) < len(self._others) and self._clock() < end:
                for rank in self._others:
                    self._take_answer(rank, answers)
                time.sleep(SLEEP_S)
        return answers

    def _take_answer(self, rank: int, answers: dict[int, str]) -> None:
        with self._lock:
            if self._comm.Iprobe(source=rank, tag=ANSWER_TAG):
                words = np.zeros(ANSWER_BYTES, np.uint8)
                self._comm.Recv(words, source=rank, tag=ANSWER_TAG)
                answers[rank] = words.tobytes().rstrip(b"\0").decode(errors="replace")


class WorkerControl(Control):
    """The side of every other rank."""

    def __init__(
        self, comm: Any, watchdog_s: float, lock: Lock, *, has_beats: bool, clock: Clock = time.monotonic
    ) -> None:
        super().__init__(comm, watchdog_s, lock, clock=clock)
        self._limit_s = watchdog_s if has_beats else AWAY_LIMITS * watchdog_s
        self._answers: list[tuple[npt.NDArray[np.uint8], Any]] = []  # kept until they have left
        self._has_ended = False

    def patience(self) -> Patience:
        return Patience(self._limit_s, clock=self._clock)

    def check(self, patience: Patience, what: str) -> None:
        if self._listen(what):
            patience.renew()
        if patience.is_over():
            raise WatchdogError(
                f"waited {self._limit_s:g} s for {what} without a sign of life from rank {ROOT}: it is dead, stopped, "
                f"unreachable or stuck inside a library; this rank: {self.describe()}"
            )

    def close(self) -> None:
        self.wait(lambda: self._has_ended, f"the last word of rank {ROOT}")

    def _listen(self, what: str) -> bool:
        """Take in rank 0's words; whether there were any."""
        word, heard = np.zeros(1, np.int64), False
        with self._lock:
            while self._comm.Iprobe(source=ROOT, tag=WORD_TAG):
                self._comm.Recv(word, source=ROOT, tag=WORD_TAG)
                heard = True
                if word[0] == ASK:
                    self._answer(what)
                self._has_ended |= bool(word[0] == BYE)
        return heard

    def _answer(self, what: str) -> None:
        text = f"waits for {what}; {self.describe()}".encode()[:ANSWER_BYTES]
        words = np.frombuffer(text.ljust(ANSWER_BYTES, b"\0"), np.uint8)
        self._answers.append((words, self._comm.Isend(words, dest=ROOT, tag=ANSWER_TAG)))
