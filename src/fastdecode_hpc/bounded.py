"""Running code that came with a model's files for a bounded time and in bounded memory."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TypeVar

_T = TypeVar("_T")

_AGAIN_S = 0.1  # the code may have swallowed the first interruption
_SPARE_BYTES = 1 << 20


def run_bounded(work: Callable[[], _T], *, seconds: float, memory_bytes: int) -> _T:
    """Call `work` and give back what it returns.

    Parameters
    ----------
    seconds : float
        Longest time. Interrupts between two steps of Python and in the main thread only: not inside a call of C code.
    memory_bytes : int
        Most memory that the process may take on meanwhile, where the system tells its size (Linux). What it has been
        given before and keeps in reserve (`host.keep_freed_memory`) is not new to it.

    Raises
    ------
    TimeoutError, MemoryError
        When one of them is not enough.

    Notes
    -----
    The limit of the whole address space is lowered and put back, so another thread that happens to need more than what
    is left in that time fails as well.
    """
    limits = resource.getrlimit(resource.RLIMIT_AS)
    spare = bytearray(_SPARE_BYTES)  # given back first, so that cleaning up has memory
    with _Timer(seconds) as timer:
        try:
            _limit_memory(memory_bytes, limits)
            timer.start()
            return work()
        finally:
            spare.clear()
            resource.setrlimit(resource.RLIMIT_AS, limits)
            timer.stop()


class _Timer:
    """Interrupts the main thread with `TimeoutError`.

    It may still go off after the work has ended and before `stop`; not a second time before the exit stops it again.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._is_main = threading.current_thread() is threading.main_thread()

    def start(self) -> None:
        if self._is_main:
            signal.setitimer(signal.ITIMER_REAL, self._seconds, _AGAIN_S)

    def stop(self) -> None:
        if self._is_main:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def __enter__(self) -> _Timer:
        if self._is_main:
            self._handler = signal.signal(signal.SIGALRM, self._interrupt) or signal.SIG_DFL
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        if self._is_main:
            signal.signal(signal.SIGALRM, self._handler)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it took more than {self._seconds:g} s")


def _limit_memory(memory_bytes: int, limits: tuple[int, int]) -> None:
    size = _address_space_bytes()
    if size is not None:
        soft, hard = limits
        wanted = size + memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (wanted if soft == resource.RLIM_INFINITY else min(soft, wanted), hard))


def _address_space_bytes() -> int | None:
    """Size of this process's address space, or None where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return None
