"""Stop requests: a signal sets a flag, and the main loop looks at it between two steps.

And the processes that signals are sent to.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from fastdecode_hpc.config import ConfigError

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
END_SIGNALS = (signal.SIGTERM, signal.SIGINT)  # the second one of these ends the process at once
WARN_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
END_MARGIN_S = 90  # before Slurm ends a job
SAME_REQUEST_S = 1.0  # copies of one signal that come within this time count once


class Deadline(NamedTuple):
    """When a job must stop, and why."""

    at_s: float  # Unix time
    name: str


def find_deadline(
    time_budget_s: float | None, process_age_s: float, env: Mapping[str, str] = os.environ
) -> Deadline | None:
    """The earlier of the end of a time budget, counted from the process's start, and Slurm's limit.

    Notes
    -----
    Slurm tells the end of the job in ``SLURM_JOB_END_TIME``; `END_MARGIN_S` before it there is still time for the
    steps under way, for parking what they generated and for closing the files.
    """
    found = []
    if time_budget_s is not None:
        found.append(Deadline(time.time() - process_age_s + time_budget_s, "--time-budget"))
    if (end := env.get("SLURM_JOB_END_TIME", "")).isdigit():
        found.append(Deadline(int(end) - END_MARGIN_S, "the end of the Slurm job's time"))
    return min(found, default=None)


def parse_duration(text: str) -> float:
    """Seconds in ``90s``, ``30m``, ``2h``, ``1d`` or Slurm's ``[D-]HH:MM:SS``.

    Raises
    ------
    ConfigError
        If it is none of these.
    """
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text, re.ASCII):
        seconds = float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
    elif match := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text, re.ASCII):
        days, hours, minutes, rest = (int(part or 0) for part in match.groups())
        seconds = float(((days * 24 + hours) * 60 + minutes) * 60 + rest)
    else:
        seconds = 0.0
    if seconds <= 0:
        raise ConfigError(f"{text!r} is no time span; write 90s, 30m, 2h, 1d or HH:MM:SS, D-HH:MM:SS")
    return seconds


class StopRequest:
    """Whether somebody asked this process to stop, or its time is up; calling it tells.

    TERM, INT, USR1 and USR2 set a flag, nothing else. A second TERM or INT ends the process at once, as if
    nothing had been installed.

    Parameters
    ----------
    deadline : Deadline, optional
        When to stop without having been asked.

    Attributes
    ----------
    reason : str or None
        Name of the first signal that came, e.g. ``"SIGUSR1"``, or the deadline's.
    on_asked : callable
        Called whenever somebody asks, which a main loop does that gets on.

    Notes
    -----
    Install it on every rank: Hydra passes TERM, USR1 and INT on to all ranks, Open MPI's mpiexec USR1 and USR2,
    and Slurm signals all tasks of a step. One request may reach a process more than once (Slurm signals mpiexec
    as well, which sends it again), so copies within `SAME_REQUEST_S` are no second request.
    """

    def __init__(self, deadline: Deadline | None = None) -> None:
        self.reason: str | None = None
        self.on_asked: Callable[[], None] = lambda: None
        self._deadline = deadline
        self._first_end_s: float | None = None

    def __call__(self) -> bool:
        self.on_asked()
        if self.reason is None and self._deadline is not None and time.time() >= self._deadline.at_s:
            self.reason = self._deadline.name
        return self.reason is not None

    def install(self) -> None:
        """Take over the signals; from the main thread only."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def release(self) -> None:
        """There is nothing left to stop: a warning that comes while the process ends changes nothing any more.

        Python gives signals back before a process is gone, and with their default one that had done its work would die.
        """
        for number in WARN_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

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
