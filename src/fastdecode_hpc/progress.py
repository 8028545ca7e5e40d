"""How far a job is: a bar on a terminal, elsewhere one plain line every 10 s."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

PLAIN_LINE_EVERY_S = 10.0
BAR_EVERY_S = 1.0


class _Line:
    """What every progress line has: a bar on a terminal, a clock, and an estimate of what is left."""

    def __init__(self, total: int | None, unit: str, done: int = 0) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._total, self._done, self._first = total, done, done
        self._started = self._told = time.monotonic()
        self._bar = tqdm(total=total, initial=done, unit=unit, disable=not self._is_terminal, dynamic_ncols=True)

    def _advance(self, count: int) -> None:
        self._done += count
        self._bar.update(count)

    def _is_time(self, every_s: float) -> bool:
        """Whether the last line is so long ago; then a new one is due."""
        now = time.monotonic()
        if now - self._told < every_s:
            return False
        self._told = now
        return True

    def _eta(self) -> str:
        done = self._done - self._first
        if self._total is None or not done:
            return "?"
        return str(tqdm.format_interval((self._told - self._started) / done * (self._total - self._done)))

    def close(self) -> None:
        self._bar.close()


class ProgressLine(_Line):
    """How far a job is, in requests and tokens."""

    def __init__(self, total: int | None, done: int) -> None:
        super().__init__(total, "req", done)
        self._errors, self._tokens = 0, 0

    def token(self) -> None:
        """Count one output token."""
        self._tokens += 1

    def request(self, failed: bool) -> None:
        """Count one finished request."""
        self._errors += failed
        self._advance(1)

    def tick(self) -> None:
        """Say how things stand, if it is time; called once a step."""
        if not self._is_time(BAR_EVERY_S if self._is_terminal else PLAIN_LINE_EVERY_S):
            return
        rate = self._tokens / (self._told - self._started)
        if self._is_terminal:
            self._bar.set_postfix_str(f"{rate:.0f} tok/s, {self._errors} errors")
        else:
            total = "?" if self._total is None else self._total
            line = f"{self._done}/{total} requests, {rate:.1f} tok/s, ETA {self._eta()}, {self._errors} errors"
            print(line, file=sys.stderr, flush=True)


class CountLine(_Line):
    """How far work is that is counted in one unit."""

    def __init__(self, total: int | None, unit: str) -> None:
        super().__init__(total, f" {unit}")
        self._unit = unit

    def advance(self, count: int) -> None:
        """Count what has been done, and say how things stand if it is time."""
        self._advance(count)
        if not self._is_terminal and self._is_time(PLAIN_LINE_EVERY_S):
            total = "?" if self._total is None else self._total
            print(f"{self._done}/{total} {self._unit}, ETA {self._eta()}", file=sys.stderr, flush=True)
