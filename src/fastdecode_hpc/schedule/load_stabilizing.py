"""When prefilled sequences start to decode: all at once, or so that the load of every step stays level.

The load of a step is what the R-workers read in it. It grows with every token of a running sequence, so a batch that
starts together ends with twice its mean load, while the S-Part's time stays what it was: one of the two parts is idle
at any time. The load-stabilizing schedule (FastDecode, section 4.2) starts a micro-batch every few steps instead.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import islice
from typing import Protocol

from fastdecode_hpc.schedule.forecast import LoadForecast
from fastdecode_hpc.schedule.kv_layout import KVLayout
from fastdecode_hpc.sequence import Sequence


class Starts(Protocol):
    """Decides how many ready sequences start to decode in a step."""

    def may_admit(self, num_waiting: int, num_running: int) -> bool:
        """Whether another sequence may be prefilled.

        Parameters
        ----------
        num_waiting : int
            Sequences in prefill or ready.
        num_running : int
            Sequences that decode.
        """

    def admitted(self, seq: Sequence) -> None:
        """A sequence goes into prefill."""

    def num_startable(self, ready: Collection[Sequence], step: int) -> int:
        """How many of `ready`, from the first on, may start in `step`; asked for every slot."""

    def started(self, seq: Sequence, step: int) -> None:
        """`step` is the sequence's next decode step: its first, or after one that it missed."""

    def finished(self, seq: Sequence, step: int) -> None:
        """A sequence does not decode in `step` or later."""


class Greedy:
    """Every sequence starts as soon as it can.

    Parameters
    ----------
    max_batch_size : int
        Most sequences in prefill, ready or decode.
    """

    def __init__(self, max_batch_size: int) -> None:
        self.max_batch_size = max_batch_size

    def may_admit(self, num_waiting: int, num_running: int) -> bool:
        return num_waiting + num_running < self.max_batch_size

    def admitted(self, seq: Sequence) -> None:
        pass

    def num_startable(self, ready: Collection[Sequence], step: int) -> int:
        return len(ready)

    def started(self, seq: Sequence, step: int) -> None:
        pass

    def finished(self, seq: Sequence, step: int) -> None:
        pass


def choose_interval(mean_steps: float, *, max_batch_size: int, spread: int) -> int:
    """Steps from one micro-batch to the next for which a micro-batch gets `spread` sequences."""
    return max(1, round(spread * mean_steps / max_batch_size))


class LoadStabilizing:
    """Starts a micro-batch every few steps, so that sequences of all ages run together.

    Parameters
    ----------
    layout : KVLayout
    max_batch_size : int
        B, most sequences in decode. As many as two micro-batches are prefilled ahead.
    start_interval : int, optional
        F, steps from one micro-batch to the next. By default a micro-batch gets `spread` sequences.
    load_limit : float, optional
        Most tokens that a step may read, averaged over layers, if all sequences run to their bounds. By default none:
        the pace alone levels the load.
    spread : int
        Over how many places (slots times R-workers) the sequences of a micro-batch are spread.

    Notes
    -----
    A micro-batch has ``M = B F / S`` sequences (equation 5), fractions of one carried on; S is the mean number of steps
    that a sequence runs. For equal lengths and prompts of P tokens the load then stays at ``B (P + (S + F) / 2) + M``
    or below (equation 6 with prompts), from the cold start on.

    What ends before its bound is replaced at once. If the batch is not full when a lifetime has passed since the cold
    start, what is missing is made up over the next lifetime: a burst would age together, and the load with it. S is the
    mean bound of the sequences admitted so far, or steps run over sequences ended, where ends come earlier than bounds.

    Sequences start in the order in which they became ready; the first is never passed over, so none starves. A sequence
    above the limit by itself runs alone.
    """

    def __init__(
        self,
        layout: KVLayout,
        *,
        max_batch_size: int,
        start_interval: int | None = None,
        load_limit: float | None = None,
        spread: int = 1,
    ) -> None:
        self.layout = layout
        self.max_batch_size = max_batch_size
        self.load_limit = math.inf if load_limit is None else load_limit
        self.forecast = LoadForecast(layout)
        self._start_interval, self._spread = start_interval, spread
        self._num_admitted = self._sum_bounds = 0  # bounds in decode steps
        self._lives = _Lives()
        self._cold_start = 0  # step at which the first one started when nothing ran
        self._interval_stop = 0  # step at which the next interval begins
        self._credit = 0.0  # sequences that may start

    @property
    def start_interval(self) -> int:
        """F, in steps."""
        if self._start_interval is not None:
            return self._start_interval
        return choose_interval(self.mean_steps, max_batch_size=self.max_batch_size, spread=self._spread)

    @property
    def micro_batch_size(self) -> int:
        """M, in sequences, rounded up."""
        return max(1, math.ceil(self.max_batch_size * self.start_interval / self.mean_steps))

    @property
    def mean_steps(self) -> float:
        """S, steps that a sequence runs."""
        bound = self._sum_bounds / max(1, self._num_admitted)
        return max(1.0, min(bound, self._lives.mean))

    def may_admit(self, num_waiting: int, num_running: int) -> bool:
        return num_waiting < 2 * self.micro_batch_size

    def admitted(self, seq: Sequence) -> None:
        self._num_admitted += 1
        self._sum_bounds += seq.max_new_tokens - 1  # the first token is prefill's

    def num_startable(self, ready: Collection[Sequence], step: int) -> int:
        if not ready:
            return 0
        if not self._lives.num_running:
            self._cold_start = step
        if step >= self._interval_stop:
            self._interval_stop = step + self.start_interval
            self._credit = min(self._credit, self.micro_batch_size) + self._rate(step) * self.start_interval
        room = min(int(self._credit), self.max_batch_size - self._lives.num_running)
        fitting = self.forecast.num_fitting(list(islice(ready, max(0, room))), step, self.load_limit)
        return fitting if self._lives.num_running else max(1, fitting)

    def started(self, seq: Sequence, step: int) -> None:
        if seq in self.forecast:
            self.forecast.remove(seq, step)
        else:
            self._lives.start(step)
            self._credit -= 1
        self.forecast.add(seq, step)

    def finished(self, seq: Sequence, step: int) -> None:
        if seq in self.forecast:
            self._credit += self.forecast.remove(seq, step)
            self._lives.end(step)

    def _rate(self, step: int) -> float:
        """Sequences that start in a step."""
        wanted = self.max_batch_size
        if step - self._cold_start >= self.mean_steps:
            wanted += max(0, self.max_batch_size - self._lives.num_running - self.micro_batch_size)
        return wanted / self.mean_steps


class _Lives:
    """How long sequences run: the steps that all have run, over those that have ended."""

    def __init__(self) -> None:
        self.num_running = 0
        self._num_ended = 0
        self._steps_run = 0  # until `_step`
        self._step = 0

    @property
    def mean(self) -> float:
        return self._steps_run / self._num_ended if self._num_ended else math.inf

    def start(self, step: int) -> None:
        self._count(step)
        self.num_running += 1

    def end(self, step: int) -> None:
        self._count(step)
        self.num_running -= 1
        self._num_ended += 1

    def _count(self, step: int) -> None:
        self._steps_run += self.num_running * (step - self._step)
        self._step = step
