"""Stop requests: a signal sets a flag, and the main loop looks at it between two steps.

And the processes that signals are sent to.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import NamedTuple

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
END_SIGNALS = (signal.SIGTERM, signal.SIGINT)  # the second one of these ends the process at once
SAME_REQUEST_S = 1.0  # copies of one signal that come within this time count once


class StopRequest:
    """Whether somebody asked this process to stop; calling it tells.

    TERM, INT, USR1 and USR2 set a flag, nothing else. A second TERM or INT ends the process at once, as if
    nothing had been installed.

    Attributes
    ----------
    reason : str or None
        Name of the first signal that came, e.g. ``"SIGUSR1"``.

    Notes
    -----
    Install it on every rank: Hydra passes TERM, USR1 and INT on to all ranks, Open MPI's mpiexec USR1 and USR2,
    and Slurm signals all tasks of a step. One request may reach a process more than once (Slurm signals mpiexec
    as well, which sends it again), so copies within `SAME_REQUEST_S` are no second request.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._first_end_s: float | None = None

    def __call__(self) -> bool:
        return self.reason is not None

    def install(self) -> None:
        """Take over the signals; from the main thread only."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number in END_SIGNALS:
            self._end_if_second(number)
        if self.reason is None:
            self.reason = signal.Signals(number).name

    def _end_if_second(self, number: int) -> None:
        now = time.monotonic()
        if self._first_end_s is None:
            self._first_end_s = now
        elif now - self._first_end_s > SAME_REQUEST_S:
            # die by the signal itself: a launcher then sees a death and ends the other ranks
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


class Process(NamedTuple):
    """A process by id and start time, so that a reused id is never taken for it."""

    pid: int
    start_ticks: int | None

    @classmethod
    def current(cls) -> Process:
        """The calling process."""
        return cls(os.getpid(), _start_ticks(os.getpid()))

    @classmethod
    def load(cls, path: Path) -> Process | None:
        """Read what `save` wrote; None where there is nothing yet."""
        try:
            return cls(*map(int, path.read_text().split()))
        except FileNotFoundError:
            return None

    def save(self, path: Path) -> None:
        """Write to a file that is complete as soon as it is there."""
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(f"{self.pid} {self.start_ticks}")
        unfinished.rename(path)

    def is_running(self) -> bool:
        """Whether it is there, and no zombie."""
        return self.start_ticks is not None and _start_ticks(self.pid) == self.start_ticks

    def catches(self, number: int) -> bool:
        """Whether it handles a signal; True as well for one that has ended, where there is no use in waiting."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return True
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        return bool(caught >> (number - 1) & 1) or not self.is_running()

    def send(self, number: int) -> None:
        """Signal it, if it still is there."""
        if self.is_running():
            os.kill(self.pid, number)


def _start_ticks(pid: int) -> int | None:
    """When the kernel started a process; None where there is none, or only a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
