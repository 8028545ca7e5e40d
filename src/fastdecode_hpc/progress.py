"""How far a job is: a bar on a terminal, elsewhere one plain line every 10 s."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

PLAIN_LINE_EVERY_S = 10.0
BAR_EVERY_S = 1.0


class ProgressLine:
    """A bar on a terminal; elsewhere one plain line every 10 s."""

    def __init__(self, total: int | None, done: int) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._total, self._done, self._errors, self._tokens = total, done, 0, 0
        self._started = self._told = time.monotonic()
        self._first = done
        self._bar = tqdm(total=total, initial=done, unit="req", disable=not self._is_terminal, dynamic_ncols=True)

    def token(self) -> None:
        """Count one output token."""
        self._tokens += 1

    def request(self, failed: bool) -> None:
        """Count one finished request."""
        self._done += 1
        self._errors += failed
        self._bar.update(1)

    def tick(self) -> None:
        """Say how things stand, if it is time; called once a step."""
        now = time.monotonic()
        every = BAR_EVERY_S if self._is_terminal else PLAIN_LINE_EVERY_S
        if now - self._told < every:
            return
        self._told = now
        rate = self._tokens / (now - self._started)
        if self._is_terminal:
            self._bar.set_postfix_str(f"{rate:.0f} tok/s, {self._errors} errors")
        else:
            total = "?" if self._total is None else self._total
            line = f"{self._done}/{total} requests, {rate:.1f} tok/s, ETA {self._eta(now)}, {self._errors} errors"
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        self._bar.close()

    def _eta(self, now: float) -> str:
        done = self._done - self._first
        if self._total is None or not done:
            return "?"
        return str(tqdm.format_interval((now - self._started) / done * (self._total - self._done)))


class CountLine:
    """A bar on a terminal, elsewhere one plain line every 10 s, for work that is counted in one unit."""

    def __init__(self, total: int, unit: str) -> None:
        self._total, self._unit, self._done = total, unit, 0
        self._started = self._told = time.monotonic()
        self._bar = tqdm(total=total, unit=f" {unit}", disable=not sys.stderr.isatty(), dynamic_ncols=True)

    def advance(self, count: int) -> None:
        """Count what has been done, and say how things stand if it is time."""
        self._done += count
        self._bar.update(count)
        now = time.monotonic()
        if self._bar.disable and now - self._told >= PLAIN_LINE_EVERY_S:
            self._told = now
            left_s = (now - self._started) / self._done * (self._total - self._done)
            line = f"{self._done}/{self._total} {self._unit}, ETA {tqdm.format_interval(left_s)}"
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        self._bar.close()
