"""Cutting the decode phase of a run into windows of equally many steps, with pauses in which a peer has its turn."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastdecode_hpc.timing import StepTimes

WINDOW_STEPS = 8
SLACK_TOKENS = WINDOW_STEPS - 1  # sequences may join some steps after each other


def num_new_tokens(rounds: int) -> int:
    """Tokens that each sequence decodes: the first comes from the prompt, and the first window warms up."""
    return 1 + (rounds + 1) * WINDOW_STEPS + SLACK_TOKENS


def least_context(rounds: int) -> int:
    """The shortest prompt and what is decoded."""
    return 2 + num_new_tokens(rounds)


class DecodeWindows:
    """A hook for each step of a run: times whole windows of pure decode steps at the full batch.

    Parameters
    ----------
    batch : int
        Rows of a step at the full batch.
    on_pause : callable
        Called after each window, outside of what is timed.
    clock : callable
        Seconds.

    Attributes
    ----------
    rates : list of float
        Tokens/s of each window.

    Notes
    -----
    With one slot a step begins when the hook of the one before returns, so the time from there to the next call is
    all that the step took. Steps in which prompts were computed, or rows were missing, don't count.
    """

    def __init__(
        self, batch: int, on_pause: Callable[[], None], *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.batch = batch
        self.rates: list[float] = []
        self._on_pause, self._clock = on_pause, clock
        self._steps: list[float] = []
        self._since = clock()

    def on_step(self, times: StepTimes) -> None:
        """Count the step that has ended."""
        seconds = self._clock() - self._since
        if times.num_rows == self.batch and not times.prefill_tokens and not times.t_prefill:
            self._steps.append(seconds)
        if len(self._steps) == WINDOW_STEPS:
            self.rates.append(self.batch * WINDOW_STEPS / sum(self._steps))
            self._steps.clear()
            self._on_pause()
        self._since = self._clock()
